"""A sweep continues after whatever happens to its runs, and after whatever happens to itself."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from sftron.commands.sweep import main
from tests.compare.sweeps import ISOLATED, write_sweep
from tests.conftest import ROOT, children_of, rest_nightly
from tests.train.runs import make_model_folder, metrics, settings, write_config, write_rows

RATE = "optimizer.learning_rate"


def statuses(folder: Path) -> dict[str, str]:
    return {path.parent.name: json.loads(path.read_text())["status"] for path in folder.glob("runs/*/result.json")}


def order(folder: Path) -> list[str]:
    return (folder / "runs" / "order").read_text().splitlines()


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def _imports_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_runs_are_made_in_order_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sweep(tmp_path, {RATE: {"values": [0.3, 0.1, 0.2]}})
    assert main([str(path), "--dry-run"]) == 0
    listed = capsys.readouterr().out
    assert "new        run-0.3" in listed
    assert "--optimizer.learning_rate=0.1 --logging.wandb.mode=disabled" in listed
    assert not (tmp_path / "runs").exists()

    bad = tmp_path / "bad.yaml"
    bad.write_text(path.read_text().replace("grid", "bayes"))
    assert main([str(bad)]) == 2
    assert "bad.yaml:1: method: " in capsys.readouterr().err
    assert main([str(path)]) == 0
    assert order(tmp_path) == ["run-0.3", "run-0.1", "run-0.2"]
    assert main([str(path)]) == 0
    assert order(tmp_path) == ["run-0.3", "run-0.1", "run-0.2"]
    assert "3 runs, 3 completed before" in capsys.readouterr().out
    report = json.loads((tmp_path / "runs" / "report.json").read_text())
    assert [run["status"] for run in report["runs"]] == ["completed"] * 3


def test_a_run_that_fails_is_reported_and_the_others_are_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(tmp_path, {RATE: {"values": [1.0, 2.0, 0.1]}})
    assert main([str(path)]) == 1
    shown = capsys.readouterr().out
    for name in ("run-1.0", "run-2.0"):
        assert f"failed     {name}, exit status 1: see {tmp_path}/runs/{name}/output.log" in shown
    assert "rows.jsonl does not exist" in (tmp_path / "runs" / "run-2.0" / "output.log").read_text()
    assert statuses(tmp_path) == {"run-1.0": "failed", "run-0.1": "completed"}
    page = (tmp_path / "runs" / "report.html").read_text()
    assert "1 of 3 runs completed" in page
    assert "CUDA out of memory" in page
    # Only what is not completed is tried again.
    assert main([str(path)]) == 1
    assert order(tmp_path) == ["run-0.1"]


def interrupted(path: Path, interrupt: Callable[[], None]) -> int:
    """Runs a sweep whose first run waits to be stopped, and interrupts it there; returns the exit status."""

    def wait_and_interrupt() -> None:
        wait_for(lambda: list(path.parent.glob("runs/*/begun")))
        interrupt()

    thread = threading.Thread(target=wait_and_interrupt)
    thread.start()
    try:
        return main([str(path)])
    finally:
        thread.join()


@pytest.mark.parametrize("number", rest_nightly([signal.SIGTERM, signal.SIGHUP], [signal.SIGTERM]))
def test_a_stop_is_passed_on_and_the_same_command_continues(
    tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(tmp_path, {RATE: {"values": [3.0, 0.1]}})
    assert interrupted(path, lambda: os.kill(os.getpid(), number)) == 0
    assert "stopped    repeat the command to continue" in capsys.readouterr().out
    assert statuses(tmp_path) == {"run-3.0": "preempted"}
    assert (tmp_path / "runs" / "report.html").exists()
    assert main([str(path)]) == 0
    assert order(tmp_path) == ["run-3.0 again", "run-0.1"]


def status_of(process: int, field: str) -> str:
    (value,) = re.findall(rf"^{field}:\s*(\w+)", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return value


def has_pending(process: int, number: signal.Signals) -> bool:
    """Returns whether a stopped process has this signal waiting."""
    return bool(int(status_of(process, "ShdPnd"), 16) >> number - 1 & 1)


def test_a_second_interrupt_kills_a_run_that_hangs(tmp_path: Path) -> None:
    children: list[int] = []

    def interrupt_twice() -> None:
        (child,) = set(children_of(os.getpid())) - before
        children.append(child)
        os.kill(child, signal.SIGSTOP)
        # Linux delivers the lower number first: a SIGTERM that came before the stop took effect would not stay waiting.
        wait_for(lambda: status_of(child, "State") == "T")
        os.kill(os.getpid(), signal.SIGINT)
        # The first one is heard when the run has a SIGTERM waiting. A second one before that is the same one to Python.
        wait_for(lambda: has_pending(child, signal.SIGTERM))
        assert Path(f"/proc/{child}").exists()
        os.kill(os.getpid(), signal.SIGINT)

    before = set(children_of(os.getpid()))
    interrupted(write_sweep(tmp_path, {RATE: {"values": [3.0, 0.1]}}), interrupt_twice)
    assert not Path(f"/proc/{children[0]}").exists()
    assert not (tmp_path / "runs" / "run-0.1").exists()


@pytest.mark.nightly
def test_the_toggles_ablation_with_real_runs_continues_where_it_was_stopped(tmp_path: Path) -> None:
    num_steps = 40
    write_rows(tmp_path / "rows.jsonl")
    tree = settings(tmp_path, make_model_folder(tmp_path / "tiny"), tokens__train_steps=num_steps)
    tree["checkpoints"] = {"export_hf": False}
    config = write_config(tmp_path / "base.yaml", tree)
    train = ["torchrun", "--standalone", "--nproc_per_node=1", str(ROOT / "run_train.py"), "--config", str(config)]
    command = [*train, f"--general.run_name=isolated_{{{ISOLATED}}}", "${args}"]
    path = tmp_path / "sweep.yaml"
    parameters = {ISOLATED: {"values": [True, False]}}
    path.write_text(yaml.safe_dump({"method": "grid", "parameters": parameters, "command": command}))
    first, second = (tmp_path / "runs" / name for name in ("isolated_true", "isolated_false"))

    sweep = subprocess.Popen([sys.executable, "-m", "sftron", "sweep", path])
    wait_for(lambda: sweep.poll() is not None or ((first / "metrics.jsonl").exists() and len(metrics(first)) >= 2), 120)
    sweep.send_signal(signal.SIGTERM)
    assert sweep.wait(timeout=120) == 0
    assert statuses(tmp_path) == {"isolated_true": "preempted"}
    assert 2 <= len(metrics(first)) < num_steps

    assert main([str(path)]) == 0
    for run in (first, second):
        assert [line["step"] for line in metrics(run)] == list(range(1, num_steps + 1))
    assert set(statuses(tmp_path).values()) == {"completed"}
    printed = (first / "console.log").read_text()
    assert "resumed    " in printed
    assert printed.count("sftron     ") == 2  # by the run alone, once a start
    assert set(printed.splitlines()) <= set((first / "output.log").read_text().splitlines())
    report = json.loads((tmp_path / "runs" / "report.json").read_text())
    assert {effect["figure"] for effect in report["effects"]} >= {"tokens_per_second", "peak_memory_gb"}
    # The same packs in both, which is what makes them comparable.
    tokens = [[line["total_tokens"] for line in metrics(run)] for run in (first, second)]
    assert tokens[0] == tokens[1]
    assert (tmp_path / "runs" / "plots" / "loss_tokens.png").exists()
