"""Text and YAML files: every complaint names the file, and the line and column where the text is broken."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, Final

import yaml

from cost_models.errors import TitanPlanError
from cost_models.yaml_numbers import cut, plain, shorten

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable
    from pathlib import Path

try:
    from yaml import CSafeLoader as _BaseLoader
except ImportError:  # PyYAML built without libyaml: the same language, ten times slower
    from yaml import SafeLoader as _BaseLoader  # type: ignore[assignment]


_PROBLEM: Final = 128
_MOST_BITS: Final = 10_000
"""Of a whole number; Python refuses to spell one of more than 4300 digits (14,284 bits)."""


def read_text(path: Path | Traversable) -> str:
    """Read a text file; one that is missing, a folder, unreadable, not UTF-8 or empty is an error that says so."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise TitanPlanError("C603", f"{path}: there is no such file", "check the path") from None
    except IsADirectoryError:
        raise TitanPlanError("C603", f"{path} is a folder, a file is needed", "name the file in it") from None
    except UnicodeDecodeError as error:
        raise TitanPlanError("C603", f"{path}: not UTF-8 text ({error.reason})", "is it the right file?") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise TitanPlanError(
            "C603", f"{path}: cannot be read ({cut(str(error), 200)})", "check the path and its rights"
        ) from None
    if not text.strip():
        raise TitanPlanError("C603", f"{path} is empty", "the shipped `configs/` hold examples of every kind of file")
    return text


def parse_yaml(text: str, origin: str) -> object:
    """Parse YAML text; broken text is an error with file, line and column.

    Args:
        text: the YAML text.
        origin: what complaints name, usually the file.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - _Loader is a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = _one_line(error.problem or error.context or "broken")
        raise TitanPlanError("C604", f"{origin}{place}: {problem}", "mend the YAML") from None
    except Exception as error:  # noqa: BLE001 - control characters, deep nesting; no file may end in a traceback
        problem = _one_line(str(error) or type(error).__name__)
        raise TitanPlanError("C604", f"{origin}: {problem}", "mend the YAML") from None


def _one_line(problem: str) -> str:
    """The parser's own words and at most 80 characters of what it repeats."""
    return cut(" ".join(problem.split()), _PROBLEM)


def read_yaml(path: Path | Traversable) -> object:
    """Read and parse a YAML file."""
    return parse_yaml(read_text(path), str(path))


def read_mapping(path: Path | Traversable) -> dict[str, Any]:
    """Read a YAML file that must hold `key: value` lines."""
    values = read_yaml(path)
    if not isinstance(values, Mapping):
        raise TitanPlanError("C606", f"{path} holds a {type(values).__name__}, not `key: value` lines", "see configs/")
    return {str(key): value for key, value in values.items()}


class _Loader(_BaseLoader):
    """Safe loader that refuses a key given twice; YAML itself would silently keep the last.

    What its constructors raise besides errors of YAML (`!!int ""`, `!!bool foo`, 2024-99-99) gets the value's place.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ANN401 - as in the base
        try:
            value = super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception:  # noqa: BLE001 - IndexError, KeyError, AttributeError, ValueError ...
            problem = f"{plain(node.tag.rpartition(':')[2])} cannot be read from {shorten(node.value)}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            problem = "a whole number of thousands of digits"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {plain(key.value)} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)
