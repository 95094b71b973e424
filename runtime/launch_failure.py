"""Why a launch failed, in the words of the rank that failed first, out of torchrun's logs."""

from __future__ import annotations

import json
import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

AGENT_LOG: Final = "torchrun.log"
_TAIL_BYTES: Final = 65536
_MOST_LINES: Final = 3
_MOST_TEXT: Final = 600
# torchrun's block "Root Cause (first observed failure)", torch 2.13: elastic/multiprocessing/errors/__init__.py.
_ROOT_CAUSE: Final = re.compile(
    r"Root Cause \(first observed failure\):.*?rank\s*: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\).*?"
    r"exitcode\s*: (?P<code>-?\d+) ",
    re.DOTALL,
)
_OWN_ERROR: Final = re.compile(r"^error\[[A-Z]\d{3}\]: ", re.MULTILINE)
_EXCEPTION: Final = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b")
_NOISE: Final = ("[W", "[E", "[I", "Traceback", "  File ", "    ", "warnings.warn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The rank that failed first.

    Attributes:
        rank: its number over all nodes; None where torchrun itself failed.
        started: ranks had been started.
        exit_code: of the rank; negative where a signal ended it.
        text: the end of what it said, one line or a few.
        hint: what may be wrong; empty where the text has to do.
        log: the file to read on in.
    """

    rank: int | None
    started: bool
    exit_code: int
    text: str
    hint: str
    log: Path


def find_failure(logs: Path, exit_code: int) -> Failure:
    """The first failure of a run whose logs are in `logs`.

    Args:
        logs: folder of the run: torchrun.log, and below it a file for each rank.
        exit_code: of torchrun.
    """
    agent = logs / AGENT_LOG
    said = _tail(agent)
    found = _last(_ROOT_CAUSE, said)
    attempt = _last_attempt(logs)
    if found is None or attempt is None:
        words, started = _last_words(said), attempt is not None
        text = words if words and exit_code >= 0 else f"torchrun: {_signal(exit_code)}"
        hint = _hint(said, exit_code)
        return Failure(rank=None, started=started, exit_code=exit_code, text=text, hint=hint, log=agent)
    code, folder = int(found["code"]), attempt / found["local"]
    errors = _tail(folder / "stderr.log")
    silent = code >= 0 and "Traceback" not in errors
    text, hint = _own_words(errors) or (_told_by_another(folder) if silent else None) or ("", "")
    text = text or _recorded(folder / "error.json") or _last_words(errors) or _signal(code)
    return Failure(
        rank=int(found["rank"]),
        started=True,
        exit_code=code,
        text=text if code >= 0 else f"{_signal(code)}; last said: {text}" if text != _signal(code) else text,
        hint=hint or _hint(errors, code),
        log=folder / "stderr.log",
    )


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = list(pattern.finditer(text))
    return found[-1] if found else None


def _last_attempt(logs: Path) -> Path | None:
    """`<run>_<random>/attempt_<n>` with the highest n: after restarts, the failure that ended the run."""
    attempts = [path for path in logs.glob("*/attempt_*") if path.name.removeprefix("attempt_").isdigit()]
    return max(attempts, key=lambda path: int(path.name.removeprefix("attempt_")), default=None)


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _own_words(text: str) -> tuple[str, str] | None:
    """Our own error and its hint, where the rank ended with one."""
    found = _last(_OWN_ERROR, text)
    if found is None:
        return None
    line, _, rest = text[found.start() :].partition("\n")
    hint = rest.partition("\n")[0]
    return line.strip()[:_MOST_TEXT], hint.removeprefix("hint: ").strip() if hint.startswith("hint: ") else ""


def _told_by_another(folder: Path) -> tuple[str, str] | None:
    """What all ranks meet, only the first of a node tells."""
    others = sorted(path for path in folder.parent.glob("*") if path != folder)
    told = (_own_words(_tail(one / "stderr.log")) for one in others)
    return next((words for words in told if words is not None), None)


def _recorded(path: Path) -> str:
    """What torch's `record` wrote for the rank."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        message: Any = json.loads(path.read_text(encoding="utf-8", errors="replace"))["message"]
        text = message if isinstance(message, str) else message["message"]
        return str(text).strip()[:_MOST_TEXT]
    return ""


def _last_words(text: str) -> str:
    """The last lines that say something: of a traceback its exception, of others the last line."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    exception = [index for index, line in enumerate(lines) if _EXCEPTION.match(line)]
    start = exception[-1] if exception else len(lines) - 1
    kept = [line for line in lines[start : start + _MOST_LINES] if not line.startswith(_NOISE)] or lines[-1:]
    return "\n".join(kept)[:_MOST_TEXT]


def _signal(code: int) -> str:
    if code >= 0:
        return f"it ended with code {code} and said nothing"
    with suppress(ValueError):
        return f"ended by signal {-code} ({signal.Signals(-code).name})"
    return f"ended by signal {-code}"


def _hint(text: str, code: int) -> str:
    """The usual mend of failures that say it badly themselves."""
    if code == -signal.SIGKILL:
        return "the system kills what takes its last memory (see dmesg): a smaller micro batch, or fewer ranks here"
    if "out of memory" in text.lower():
        return "a smaller micro_batch_size, more recomputation or ZeRO, or plan with a larger --hbm-margin"
    if "No module named" in text:
        return "install it for the Python that launches"
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return "another process has the port: give another --master-port, or HCCL_IF_BASE_PORT"
    return ""
