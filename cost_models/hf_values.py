"""The content of a Hugging Face config.json, read key by key with complaints that name file, key and value."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cost_models.errors import TitanPlanError
from cost_models.model_files import show

_DEFAULT_SEQ_LEN: Final = 4096
_LONGEST_TRUSTED_CONTEXT: Final = 8192


def rope_scaling(values: Mapping[str, object]) -> Mapping[str, object] | None:
    """How rotary angles are scaled; None where they are not."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = values.get(key)
        if isinstance(scaling, Mapping) and scaling.get("rope_type", scaling.get("type")) not in {None, "default"}:
            return scaling
    return None


@dataclass(frozen=True, slots=True)
class HfValues:
    """A config.json under its file's name; every getter takes the first key that is there and not null."""

    values: Mapping[str, object]
    origin: str

    def whole(self, *keys: str, default: int | None = None) -> int:
        """A whole number; an error without one and without a default."""
        key, value = self._first(keys)
        if value is None and default is not None:
            return default
        if value is None:
            raise TitanPlanError("C608", f"{self.origin}: {' or '.join(keys)} is missing", "every size is needed")
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
            message = f"{self.origin}: {key} is {show(value)}, a whole number is needed"
            raise TitanPlanError("C606", message, "config.json holds numbers without quotes")
        return int(value)

    def real(self, *keys: str, default: float) -> float:
        """A number."""
        key, value = self._first(keys)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > sys.float_info.max:
            message = f"{self.origin}: {key} is {show(value)}, a number is needed"
            raise TitanPlanError("C606", message, "config.json holds numbers without quotes")
        return float(value)

    def rope_theta(self, default: float) -> float:
        """Base of the rotary angles: a key of its own, or inside `rope_parameters` since transformers 5."""
        inner = self.values.get("rope_parameters")
        if isinstance(inner, Mapping) and inner.get("rope_theta") is not None:
            return HfValues(inner, f"{self.origin}: rope_parameters").real("rope_theta", default=default)
        return self.real("rope_theta", default=default)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise TitanPlanError("C606", f"{self.origin}: {key} is {show(value)}, true or false is needed")
        return default if value is None else value

    def refuse(self, what: str) -> TitanPlanError:
        """The error for a shape that ModelSpec cannot hold."""
        hint = "write a model file (YAML) with the nearest shape and pass its path"
        return TitanPlanError("C607", f"{self.origin}: {what}", hint)

    @property
    def name(self) -> str:
        """Name of the model: `_name_or_path`, else the folder that the file lies in."""
        given = self.values.get("_name_or_path")
        path = Path(given) if isinstance(given, str) and given.strip("/. ") else Path(self.origin).absolute().parent
        return path.name or "model"

    @property
    def seq_len(self) -> int:
        """Length of pre-training, which configs do not state.

        The context before rotary scaling where it is given, else the context up to 8192; a longer one comes from a
        last training phase, most steps ran at 4096 (Qwen2.5, Qwen3).
        """
        for key in ("rope_scaling", "rope_parameters"):
            scaling = self.values.get(key)
            if isinstance(scaling, Mapping) and scaling.get("original_max_position_embeddings"):
                return HfValues(scaling, f"{self.origin}: {key}").whole("original_max_position_embeddings")
        context = self.whole("max_position_embeddings", "n_positions", default=_DEFAULT_SEQ_LEN)
        return context if context <= _LONGEST_TRUSTED_CONTEXT else _DEFAULT_SEQ_LEN

    def _first(self, keys: tuple[str, ...]) -> tuple[str, object]:
        return next(((key, self.values[key]) for key in keys if self.values.get(key) is not None), (keys[0], None))
