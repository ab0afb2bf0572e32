"""What all tools have in common: how they report that something is wrong."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from sftron.errors import exit_with, refuse, show
from tests.conftest import ROOT

SECRET = "a-token-of-somebody"
ARGUMENTS: dict[str, Callable[[str], list[str]]] = {
    "audit_run": lambda path: [path],
    "bench_data": lambda path: ["--tokenizer", path, "--data", path],
    "check_sft": lambda path: ["--model", path],
    "convert_checkpoint": lambda path: [path, f"{path}-target"],
    "generate": lambda path: ["--model", path],
    "inspect_data": lambda path: ["--config", path],
    "plot_runs": lambda path: [path],
    "sweep": lambda path: [path],
    "verify_run": lambda path: ["--config", path],
    "verify_trainer": lambda path: [f"{path}:make"],
}
OWN_FILES_ONLY = {"bench_kernels", "bench_step", "chaos", "family_card", "isolation_table", "site_pages"}
"""They read no file of the user's but models, or run where sftron is not installed."""


@pytest.mark.parametrize("tool", ARGUMENTS)
def test_a_tool_that_refuses_what_it_is_given_shows_no_secret_and_exits_with_2(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr(sys, "argv", [f"{tool}.py", *ARGUMENTS[tool](str(tmp_path / SECRET))])
    with pytest.raises(SystemExit) as ended, patch.dict(os.environ):  # bench_data limits the libraries' threads
        runpy.run_path(str(ROOT / "tools" / f"{tool}.py"), run_name="__main__")
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert "***" in printed.err
    assert SECRET not in printed.err + printed.out
    assert "Traceback" not in printed.err


def test_every_tool_reports_errors_in_the_same_way() -> None:
    tools = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "tools").glob("*.py")}
    assert tools.keys() == ARGUMENTS.keys() | OWN_FILES_ONLY
    assert {tool for tool, text in tools.items() if "\n    exit_with(" in text} >= ARGUMENTS.keys()


def test_an_unexpected_error_is_shown_without_secrets_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)

    def fail() -> int:
        raise RuntimeError(f"GET https://host/?token={SECRET}")

    with pytest.raises(SystemExit) as ended:
        exit_with(fail)
    printed = capsys.readouterr().err
    assert ended.value.code == 1
    assert "RuntimeError: GET https://host/?token=***" in printed
    assert SECRET not in printed


def test_an_error_of_the_machine_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error is a real one: /dev/full is a full disk."""
    (tmp_path / "part-0").symlink_to("/dev/full")

    def write() -> int:
        with (tmp_path / "part-0").open("w") as file:
            file.write("x")
        return 0

    with pytest.raises(SystemExit) as ended:
        exit_with(write)
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("OSError: [Errno 28] No space left on device (")
    assert re.search(r"test_tools\.py:\d+, in write\)$", line)


def test_a_command_with_closed_streams_ends_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as ended:
        exit_with(lambda: show("a line") or show("another", to=sys.stderr) or len(sys.stdin.read()))
    streams = sys.stdin, sys.stdout, sys.stderr
    monkeypatch.undo()
    assert ended.value.code == 0
    for stream in streams:
        stream.close()


def test_ctrl_c_ends_a_command_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        exit_with(interrupted)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "stopped\n"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    ended = subprocess.run(
        f"{sys.executable} tools/sweep.py configs/sweep_toggles.yaml --dry-run | head -c 1",
        shell=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert ended.stderr == ""
    with pytest.raises(BrokenPipeError):  # where the reader goes before the last line is printed
        refuse(BrokenPipeError(32, "Broken pipe"), "sweep")
