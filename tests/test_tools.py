"""What all tools have in common: how they report that something is wrong."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from sftron.config.errors import exit_with
from tests.conftest import ROOT
from tools import audit_run, check_sft, convert_checkpoint, generate, inspect_data, plot_runs, sweep, verify_run

with patch.dict(os.environ):  # where it sets one thread, which is not for the other tests
    from tools import bench_data

SECRET = "a-token-of-somebody"
CALLS: dict[str, Callable[[str], int]] = {
    "audit_run": lambda path: audit_run.main([path]),
    "bench_data": lambda path: bench_data.main(["--tokenizer", path, "--data", path]),
    "check_sft": lambda path: with_arguments(check_sft.main, "--model", path),
    "convert_checkpoint": lambda path: convert_checkpoint.main([path, f"{path}-target"]),
    "generate": lambda path: generate.main(["--model", path]),
    "inspect_data": lambda path: inspect_data.main(["--config", path]),
    "plot_runs": lambda path: plot_runs.main([path]),
    "sweep": lambda path: sweep.main([path]),
    "verify_run": lambda path: verify_run.main(["--config", path]),
}
OWN_FILES_ONLY = {"bench_kernels", "bench_step", "chaos", "isolation_table"}
"""They read no file of the user's but models, or run where sftron is not installed."""


def with_arguments(main: Callable[[], int], *arguments: str) -> int:
    with patch.object(sys, "argv", ["tool.py", *arguments]):
        return main()


@pytest.mark.parametrize("tool", CALLS)
def test_a_tool_that_refuses_what_it_is_given_shows_no_secret_and_exits_with_2(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    status = CALLS[tool](str(tmp_path / SECRET))
    printed = capsys.readouterr()

    assert status == 2
    assert "***" in printed.err
    assert SECRET not in printed.err + printed.out
    assert "Traceback" not in printed.err


def test_no_tool_is_left_out() -> None:
    tools = {path.stem for path in (ROOT / "tools").glob("*.py")}
    assert tools == CALLS.keys() | OWN_FILES_ONLY


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


@pytest.mark.parametrize("tool", CALLS)
def test_each_tool_ends_by_exit_with(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr("sftron.config.errors.exit_with", called.append)
    with patch.dict(os.environ):
        runpy.run_path(str(ROOT / "tools" / f"{tool}.py"), run_name="__main__")
    assert len(called) == 1


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
