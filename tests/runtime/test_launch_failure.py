"""Why a run failed: the right rank, its own words, a hint, and the log to read on in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.launch_failure import AGENT_LOG, find_failure

# As torch 2.13 prints it; a launch of a failing module for real is in test_launch.py.
REPORT = """\
E1130 11:20:57 3262 elastic/multiprocessing/api.py:988] failed (exitcode: {code}) local_rank: {local} (pid: 3270)
Traceback (most recent call last):
  File "run.py", line 1010, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
runtime.train FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-30_11:20:57
  host      : n
  rank      : 7 (local_rank: 7)
  exitcode  : -15 (pid: 3277)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_11:20:57
  host      : n
  rank      : {rank} (local_rank: {local})
  exitcode  : {code} (pid: 3270)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
TRACE = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\n'


def logs(folder: Path, stderr: str, *, code: int = 1, local: int = 3, attempt: int = 0) -> Path:
    (folder / AGENT_LOG).write_text(REPORT.format(rank=local + 8, local=local, code=code), encoding="utf-8")
    rank = folder / "titan_x" / f"attempt_{attempt}" / str(local)
    rank.mkdir(parents=True)
    (rank / "stderr.log").write_text(stderr, encoding="utf-8")
    return rank


def test_the_exception_is_told_not_the_traceback(tmp_path: Path) -> None:
    rank = logs(tmp_path, f"step 1\n{TRACE}ValueError: boom at layer 3\n")
    found = find_failure(tmp_path, 1)
    assert (found.rank, found.exit_code, found.text, found.hint) == (11, 1, "ValueError: boom at layer 3", "")
    assert found.log == rank / "stderr.log"
    assert found.started


def test_of_two_exceptions_the_last_one_is_told_with_its_second_line(tmp_path: Path) -> None:
    text = f"{TRACE}KeyError: 'a'\n\nDuring handling\n\n{TRACE}torch.OutOfMemoryError: out of memory.\nTried 2 GiB\n"
    logs(tmp_path, text)
    found = find_failure(tmp_path, 1)
    assert found.text == "torch.OutOfMemoryError: out of memory.\nTried 2 GiB"
    assert "micro_batch_size" in found.hint


def test_our_own_error_goes_before_everything(tmp_path: Path) -> None:
    logs(
        tmp_path,
        "error[R750]: loss is nan\nhint: a lower lr\n[W1130 socket.cpp] shutting down\nRuntimeError: x\n",
        code=2,
    )
    found = find_failure(tmp_path, 1)
    assert (found.text, found.hint, found.exit_code) == ("error[R750]: loss is nan", "a lower lr", 2)


def test_what_only_the_first_rank_of_a_node_tells_is_told_though_another_ended_first(tmp_path: Path) -> None:
    rank = logs(tmp_path, "", code=2, local=1)
    first = rank.parent / "0"
    first.mkdir()
    (first / "stderr.log").write_text("error[C606]: training.lr is 'x'\nhint: a number is needed\n", encoding="utf-8")
    found = find_failure(tmp_path, 1)
    assert (found.text, found.hint) == ("error[C606]: training.lr is 'x'", "a number is needed")


def test_what_others_say_never_hides_the_exception_of_the_rank_that_failed(tmp_path: Path) -> None:
    rank = logs(tmp_path, f"{TRACE}ValueError: boom\n", local=1)
    other = rank.parent / "0"
    other.mkdir()
    (other / "stderr.log").write_text("error[R763]: another rank went away\nhint: look there\n", encoding="utf-8")
    assert find_failure(tmp_path, 1).text == "ValueError: boom"


def test_what_torchs_record_wrote_goes_before_the_end_of_the_log(tmp_path: Path) -> None:
    rank = logs(tmp_path, "[W1130 warn]\nlast line\n")
    body = {"message": {"message": "RuntimeError: recorded", "extraInfo": {"timestamp": "1"}}}
    (rank / "error.json").write_text(json.dumps(body), encoding="utf-8")
    assert find_failure(tmp_path, 1).text == "RuntimeError: recorded"


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"message": {}}'])
def test_a_broken_record_is_as_none(tmp_path: Path, broken: str) -> None:
    (logs(tmp_path, "last line\n") / "error.json").write_text(broken, encoding="utf-8")
    assert find_failure(tmp_path, 1).text == "last line"


def test_a_killed_rank_is_told_by_its_signal(tmp_path: Path) -> None:
    logs(tmp_path, "step 4\n", code=-9)
    found = find_failure(tmp_path, 1)
    assert found.text == "ended by signal 9 (SIGKILL); last said: step 4"
    assert "memory" in found.hint


def test_a_rank_that_said_nothing_is_told_by_its_code(tmp_path: Path) -> None:
    logs(tmp_path, "", code=77)
    assert find_failure(tmp_path, 1).text == "it ended with code 77 and said nothing"


def test_after_restarts_the_last_attempt_is_read(tmp_path: Path) -> None:
    for attempt in (9, 10, 2):
        logs(tmp_path, f"E: attempt {attempt}\n", attempt=attempt)
    assert find_failure(tmp_path, 1).text == "E: attempt 10"


def test_without_any_rank_torchruns_own_words_are_told(tmp_path: Path) -> None:
    (tmp_path / AGENT_LOG).write_text(f"{TRACE}RuntimeError: the rendezvous timed out\n", encoding="utf-8")
    found = find_failure(tmp_path, 1)
    assert (found.rank, found.started, found.text) == (None, False, "RuntimeError: the rendezvous timed out")


def test_a_torchrun_that_was_killed_had_started_ranks(tmp_path: Path) -> None:
    (tmp_path / "titan_x" / "attempt_0").mkdir(parents=True)
    found = find_failure(tmp_path, -9)
    assert (found.rank, found.started, found.text) == (None, True, "torchrun: ended by signal 9 (SIGKILL)")


def test_a_log_of_another_encoding_or_of_many_lines_is_no_obstacle(tmp_path: Path) -> None:
    rank = logs(tmp_path, "")
    (rank / "stderr.log").write_bytes(b"x" * 10**6 + b"\nValueError: \xff\xfe " + b"y" * 10_000 + b"\n")
    found = find_failure(tmp_path, 1)
    assert found.text.startswith("ValueError: ")
    assert len(found.text) <= 600
