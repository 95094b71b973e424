"""Bad input: a code, what was got, what would do, exit code 2, and never a traceback, in words and as JSON."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import click
import pytest

from cost_models.codes import find_code
from cost_models.errors import TitanPlanError
from planner.cli import root
from planner.cli.errors import run

TINY = ("--model", "tiny", "--npus", "8")
MODEL = "name: x\nhidden_dim: 128\nn_layers: 4\nn_heads: 8\nffn_dim: 256\nvocab_size: 512\nseq_len: 128\n"
CLUSTER = "name: mine\ndevice: 910b2\ndevices_per_node: 8\nmemory_gb: 64\n"

# Arguments, code, and what the message or the hint must name.
BAD = [
    (("--model", "lama2-7b", "--npus", "8"), "C601", "llama2-7b"),
    (("--model", "", "--npus", "8"), "C601", "titan-plan models"),
    ((*TINY, "--cluster", "atlas-800t-a22"), "C602", "atlas-800t-a2"),
    (("--model", "tiny", "--npus", "0"), "T301", "0 devices"),
    (("--model", "tiny", "--npus", "-8"), "T301", "-8 devices"),
    (("--model", "tiny", "--npus", "63"), "T303", "56 or 64"),
    (("--model", "tiny", "--npus", "7"), "T304", "4 or 8"),
    (("--model", "tiny", "--npus", "3.5"), "C617", "3.5"),
    (("--model", "tiny", "--npus", "eight"), "C617", "eight"),
    (("--model", "tiny", "--npus", "8" + 22 * "0"), "C610", "1000000"),
    ((*TINY, "--seq-len", "0"), "C610", "seq_len is 0"),
    ((*TINY, "--seq-len", "1" + 30 * "0"), "C610", "--seq-len"),
    ((*TINY, "--seq-len", "long"), "C617", "--seq-len"),
    ((*TINY, "--global-batch", "0"), "C610", "global_batch is 0"),
    ((*TINY, "--global-batch", "1" + 30 * "0"), "C610", "--global-batch"),
    (("--model", "unknown-key.yaml", "--npus", "8"), "C605", "did you mean hidden_dim?"),
    (("--model", "folder", "--npus", "8"), "C603", "config.json"),
    (("--model", "./none.yaml", "--npus", "8"), "C603", "none.yaml"),
    (("--model", "broken.yaml", "--npus", "8"), "C604", "broken.yaml"),
    (("--model", "bytes.yaml", "--npus", "8"), "C603", "UTF-8"),
    ((*TINY, "--cluster", "cluster.yaml"), "C6..", "memory_gb"),
    ((*TINY, "--cluster", "./none.yaml"), "C603", "none.yaml"),
    ((*TINY, "--hbm-margin", "2GB"), "C609", "1.86GiB"),
    ((*TINY, "--hbm-margin", "abc"), "C610", "abc"),
    ((*TINY, "--hbm-margin", "-1"), "C610", "-1"),
    ((*TINY, "--hbm-margin", "200%"), "C610", "200%"),
    ((*TINY, "--tokens", "abc"), "C610", "abc"),
    ((*TINY, "--fix", "garbage"), "C650", "garbage"),
    ((*TINY, "--fix", "tpp=2"), "C650", "did you mean tp?"),
    ((*TINY, "--fix", "tp=3"), "C650", "1, 2, 4, 8"),
    ((*TINY, "--fix", "tp=4,pp=4"), "C650", "tp 4 x pp 4 = 16"),
    ((*TINY, "--fix", "zero=7"), "C650", "no layout"),
    ((*TINY, "--max", "schedule=1f1b"), "C650", "schedule"),
    ((*TINY, "--calibration", "none.yaml"), "C603", "none.yaml"),
    ((*TINY, "--calibration", "broken.yaml"), "C604", "broken.yaml"),
    ((*TINY, "--calibration", "folder"), "C603", "folder"),
    ((*TINY, "--calibration", "unknown-key.yaml"), "C605", "hidden_dim"),
    ((*TINY, "--out", "file"), "C603", "file"),
    ((*TINY, "--out", "file/inside"), "C603", "is a file"),
    ((*TINY, "--out", 300 * "a"), "C603", "too long"),
    ((*TINY, "--precision", "int8"), "C611", "bf16"),
    ((*TINY, "--optimizer", "lion"), "C611", "adamw"),
    ((*TINY, "--top", "0"), "C617", "--top"),
    ((*TINY, "--color", "blue"), "C617", "never"),
    ((*TINY, "--modle", "tiny"), "C617", "--model"),
    (("--model", "tiny"), "C617", "--npus"),
    (("--npus", "8"), "C617", "--model"),
    (("explian", "D201"), "C617", "explain"),
    (("--model", "tiny", "models"), "C617", "--model"),
    (("models", "extra"), "C617", "extra"),
    (("explain", "D999"), "C611", "D999"),
    (("explain",), "C617", "CODE"),
    (("clusters", "show", "atlas-800t-a22"), "C602", "atlas-800t-a2"),
    (("evaluate", "none.csv", "-o", "out.csv"), "C603", "none.csv"),
    (("evaluate", "folder", "-o", "out.csv"), "C603", "folder"),
    (("evaluate", "file"), "C617", "--out"),
]


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (tmp_path / "unknown-key.yaml").write_text(f"{MODEL}hiden_dim: 3\n", encoding="utf-8")
    (tmp_path / "cluster.yaml").write_text(CLUSTER, encoding="utf-8")
    (tmp_path / "broken.yaml").write_text(": : [", encoding="utf-8")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize(("arguments", "code", "named"), [pytest.param(*bad, id=" ".join(bad[0])[:60]) for bad in BAD])
def test_bad_input_is_told_with_code_and_hint(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: str, named: str
) -> None:
    assert run(list(arguments)) == 2
    told = capsys.readouterr()
    assert told.out == ""
    first, *rest = told.err.splitlines()
    found = re.match(rf"error\[({code})\]: (.+)", first)
    assert found, first
    assert [line for line in rest if line.startswith("hint: ") and len(line) > len("hint: ")] == rest[-1:]
    assert named in told.err
    assert "Traceback" not in told.err
    assert not Path("titan_runs").exists()
    # The code is one that `explain` knows.
    assert find_code(found.group(1)).code == found.group(1)

    assert run([*arguments, "--json"]) == 2
    as_json = capsys.readouterr()
    assert as_json.err == ""
    assert json.loads(as_json.out) == {
        "schema": 1,
        "error": {
            "code": found.group(1),
            "message": first.partition(": ")[2],
            "hint": rest[-1].removeprefix("hint: "),
        },
    }


def test_the_codes_of_this_table_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for code in {code for _, code, _ in BAD if "." not in code}:
        assert run(["explain", code]) == 0
        assert code in capsys.readouterr().out


def raise_in_search(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(_ctx: click.Context, /, **_options: object) -> None:
        raise error

    monkeypatch.setattr(root.cli, "callback", click.pass_context(fail))


def test_interrupted_is_130_and_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_in_search(monkeypatch, KeyboardInterrupt())
    assert run(list(TINY)) == 130
    told = capsys.readouterr()
    assert (told.out, told.err.strip().splitlines()[0]) == ("", "error[R710]: interrupted")


def test_an_error_chooses_its_own_exit_code_and_may_have_no_hint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_in_search(monkeypatch, TitanPlanError("R700", "went wrong", exit_code=1))
    assert run(list(TINY)) == 1
    assert capsys.readouterr().err == "error[R700]: went wrong\n"
    assert run([*TINY, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"] == {"code": "R700", "message": "went wrong", "hint": ""}


def test_our_own_mistakes_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    raise_in_search(monkeypatch, ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        run(list(TINY))


def test_nothing_asked_is_answered_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert "Usage: titan-plan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "word", "code"), [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "terminated", 143)]
)
def test_a_signal_ends_a_verb_with_its_word_and_clears_away(
    number: int, word: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cleared = []

    def search(_ctx: click.Context, /, **_options: object) -> None:
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        finally:
            cleared.append(True)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(root.cli, "callback", click.pass_context(search))
    assert run(list(TINY)) == code
    assert f"error[R710]: {word}" in capsys.readouterr().err
    assert cleared == [True]
    assert signal.getsignal(signal.SIGTERM) == before
