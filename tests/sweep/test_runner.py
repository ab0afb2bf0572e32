"""A sweep goes on after whatever happens to its runs, and after whatever happens to itself."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sftron.data.child_process import STOP_SIGNALS, children_of
from tests.conftest import ROOT
from tests.sweep.sweeps import write_sweep
from tools.sweep import main

RATE = "optimizer.learning_rate"


def statuses(folder: Path) -> dict[str, str]:
    return {path.parent.name: json.loads(path.read_text())["status"] for path in folder.glob("runs/*/result.json")}


def order(folder: Path) -> list[str]:
    return (folder / "runs" / "order").read_text().split("\n")[:-1]


@pytest.fixture(autouse=True)
def _imports_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))


def test_runs_are_made_in_order_and_not_made_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sweep(tmp_path, {RATE: {"values": [0.3, 0.1, 0.2]}})
    assert main([str(path)]) == 0
    assert order(tmp_path) == ["run-0.3", "run-0.1", "run-0.2"]
    assert main([str(path)]) == 0
    assert len(order(tmp_path)) == 3
    assert "3 runs, 3 completed before" in capsys.readouterr().out
    assert (tmp_path / "runs" / "report.html").exists()


def test_a_run_that_fails_is_told_and_the_others_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sweep(tmp_path, {RATE: {"values": [1.0, 2.0, 0.1]}})
    assert main([str(path)]) == 1
    told = capsys.readouterr().out
    assert "failed     run-1.0, " in told
    assert "exit status 1: CUDA out of memory" in told
    assert "exit status 1: data.datasets: rows.jsonl does not exist" in told
    assert "failed     2 of 3 runs" in told
    assert statuses(tmp_path) == {"run-1.0": "failed", "run-0.1": "completed"}
    page = (tmp_path / "runs" / "report.html").read_text()
    assert "1 of 3 runs completed" in page
    assert "CUDA out of memory" in page
    # Only what is not completed is tried again.
    assert main([str(path)]) == 1
    assert order(tmp_path) == ["run-0.1"]


def start_waiting_sweep(folder: Path) -> subprocess.Popen[str]:
    """Returns a sweep whose first run waits to be stopped, once it does."""
    path = write_sweep(folder, {RATE: {"values": [3.0, 0.1]}, "general.seed": {"values": [0, 1]}})
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "sweep.py"), str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(folder.glob("runs/*/begun")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_is_passed_on_and_the_same_command_continues(tmp_path: Path, number: signal.Signals) -> None:
    process = start_waiting_sweep(tmp_path)
    process.send_signal(number)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert "stopped    the same command continues" in told
    assert statuses(tmp_path) == {"run-3.0-0": "preempted"}
    assert (tmp_path / "runs" / "report.html").exists()
    path = tmp_path / "sweep.yaml"
    (tmp_path / "runs" / "run-3.0-1").mkdir()
    (tmp_path / "runs" / "run-3.0-1" / "begun").touch()
    assert main([str(path)]) == 0
    assert order(tmp_path) == ["run-3.0-0 again", "run-3.0-1 again", "run-0.1-0", "run-0.1-1"]


def test_a_second_interrupt_kills(tmp_path: Path) -> None:
    process = start_waiting_sweep(tmp_path)
    pid = children_of(process.pid)[0]
    os.kill(pid, signal.SIGSTOP)  # a run that hangs
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert not Path(f"/proc/{pid}").exists()


def test_only_the_runs_that_are_named_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sweep(tmp_path, {RATE: {"values": [0.3, 0.1, 0.2]}})
    assert main([str(path), "--only", "2,0"]) == 0
    assert order(tmp_path) == ["run-0.2", "run-0.3"]
    assert main([str(path), "--only", "3"]) == 2
    assert "the runs are numbered 0 to 2" in capsys.readouterr().err


def test_a_dry_run_lists_the_runs_and_starts_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sweep(tmp_path, {RATE: {"values": [0.3, 0.1]}})
    assert main([str(path), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "  0  new        run-0.3" in told
    assert "--optimizer.learning_rate=0.1 --logging.wandb.mode=disabled" in told
    assert not (tmp_path / "runs").exists()


def test_the_report_alone_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sweep(tmp_path, {RATE: {"values": [0.3, 0.1]}})
    assert main([str(path), "--report-only"]) == 0
    assert "no report  no run has begun" in capsys.readouterr().out
    main([str(path), "--only", "1"])
    assert main([str(path), "--report-only", "--json", str(tmp_path / "out.json")]) == 0
    assert order(tmp_path) == ["run-0.1"]
    assert [run["status"] for run in json.loads((tmp_path / "out.json").read_text())["runs"]] == ["completed"]


def test_checkpoints_are_dropped_of_completed_runs_only(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, {RATE: {"values": [0.1, 1.0]}})
    for name in ("run-0.1", "run-1.0"):
        (tmp_path / "runs" / name / "checkpoints").mkdir(parents=True)
    main([str(path), "--drop-checkpoints"])
    assert not (tmp_path / "runs" / "run-0.1" / "checkpoints").exists()
    assert (tmp_path / "runs" / "run-1.0" / "checkpoints").exists()


def test_a_bad_file_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sweep(tmp_path, {RATE: {"values": [0.1]}}, method="bayes")
    assert main([str(path)]) == 2
    assert "found 'bayes', and a grid is all that is run here: use `wandb sweep`" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
