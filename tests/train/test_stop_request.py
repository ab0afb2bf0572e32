"""A signal is heard from the first moment to the last, and by nobody else; forks have nothing to wait for."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from sftron.data.child_process import STOP_SIGNALS
from sftron.train import signals
from sftron.train.logs.run_logs import RunLogs
from sftron.train.signals import StopRequest
from tests.conftest import ROOT
from tests.train.faults import Fault, train_with
from tests.train.ranks import Ended, launch, train
from tests.train.runs import chat_line, make_config, metrics, run, settings, write_config, write_rows

STEPS = 4


def configure(folder: Path, model_folder: Path, **overrides: Any) -> Path:
    write_rows(folder / "rows.jsonl", 100)
    options = {"tokens__train_steps": STEPS, "tokens__batch_accumulation_per_replica": 1} | overrides
    return write_config(folder / "config.yaml", settings(folder, model_folder, **options))


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "runs/run/result.json").read_text())


def require_order(ended: list[Ended]) -> None:
    assert all(each.exit_code == 0 and "Traceback" not in each.err for each in ended), ended


# --- Whom signals are for ---


def test_each_signal_is_heard_until_the_outer_of_two_that_listen_gives_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    for number in STOP_SIGNALS:
        request = StopRequest()
        with request.listening(), monkeypatch.context() as patch:
            with request.listening():
                assert signal.getsignal(number) == request._receive
            patch.setattr(signals.os, "write", _fail_on_a_full_disk)
            os.kill(os.getpid(), number)
            assert request.received
        assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def _fail_on_a_full_disk(*_: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_hangup_that_nohup_has_the_run_ignore_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    request = StopRequest()
    with request.listening():
        os.kill(os.getpid(), signal.SIGHUP)
        assert not request.received
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_after_a_run_signals_are_as_before_it_and_what_is_forked_ends_by_them(
    tmp_path: Path, model_folder: Path
) -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    run(make_config(tmp_path, model_folder, tokens__train_steps=1, checkpoints__export_hf=False))
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before

    sleeper = get_context("fork").Process(target=signal.pause)
    sleeper.start()
    sleeper.terminate()
    sleeper.join(10)
    is_over = not sleeper.is_alive()
    sleeper.kill()
    assert is_over


# --- Threads beside forks ---


def _train_noting_forks(config: Path) -> int:
    """The file `forks` has a line for each fork: the names of this process's threads."""
    open_logs = RunLogs.open

    def with_a_thread(*arguments: Any, **options: Any) -> None:
        threading.Thread(target=threading.Event().wait, name="wandb's", daemon=True).start()
        open_logs(*arguments, **options)

    def note() -> None:
        names = sorted(thread.name for thread in threading.enumerate())
        with config.with_name("forks").open("a") as file:
            file.write(json.dumps(names) + "\n")

    RunLogs.open = with_a_thread
    os.register_at_fork(before=note)
    return train(config)


def test_workers_are_forked_before_a_run_has_threads_that_could_hold_what_they_need(
    tmp_path: Path, model_folder: Path
) -> None:
    num_ranks = 2
    (tmp_path / "prompts.jsonl").write_text(chat_line("What is 3?") + "\n")
    options = {"checkpoints__async": True, "checkpoints__interval": 1, "data__num_workers": 2}
    options |= {"evaluation__prompts": str(tmp_path / "prompts.jsonl"), "evaluation__max_new_tokens": 2}
    config = configure(tmp_path, model_folder, **options)
    ended = launch(num_ranks, _train_noting_forks, config, folder=tmp_path)

    assert [each.exit_code for each in ended] == [0] * num_ranks, ended
    at_forks = [json.loads(line) for line in (tmp_path / "forks").read_text().splitlines()]
    assert len(at_forks) == 2 * num_ranks  # two loader workers of each
    assert all(names == ["MainThread"] for names in at_forks), at_forks


# --- The first moment ---


def test_a_signal_while_python_still_imports_ends_the_run_in_order(tmp_path: Path, model_folder: Path) -> None:
    """It comes with the first import that is not of the handler itself."""
    script = """
import os, runpy, signal, sys

class Strike:
    def find_spec(self, name, *_):
        if name == "sftron.config":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Strike())
runpy.run_path("run_train.py", run_name="__main__")
"""
    config = configure(tmp_path, model_folder)
    ended = subprocess.run(
        [sys.executable, "-c", script, "--config", str(config)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("received SIGTERM")
    assert result(tmp_path) == {"status": "preempted", "step": 0, "exported": None}


# --- The last moments ---


@pytest.mark.parametrize(
    ("fault", "num_ranks"), [(Fault("SIGTERM", "save", 0, STEPS), 2), (Fault("SIGKILL", "export", 0, STEPS), 1)]
)
def test_a_run_that_ends_between_its_last_step_and_its_export_exports_at_the_next_start_and_trains_no_more(
    tmp_path: Path, model_folder: Path, fault: Fault, num_ranks: int
) -> None:
    config = configure(tmp_path, model_folder, parallelism__timeout_seconds=10)
    ended = launch(num_ranks, train_with, config, fault, folder=tmp_path)
    folder = tmp_path / "runs/run"
    if fault.what == "SIGTERM":
        require_order(ended)
        assert result(tmp_path) == {"status": "preempted", "step": STEPS, "exported": None}
    else:
        assert ended[0].exit_code == -signal.SIGKILL
    assert not (folder / "latest").exists()
    lines = {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}
    checkpoint = (folder / f"checkpoints/step-{STEPS}/MANIFEST.json").read_bytes()

    again = launch(num_ranks, train, config, folder=tmp_path)
    require_order(again)
    assert result(tmp_path)["status"] == "completed"
    assert [line["step"] for line in metrics(folder)] == list(range(1, STEPS + 1))
    assert (folder / "metrics.jsonl").read_bytes() == lines["metrics.jsonl"]
    assert (folder / f"checkpoints/step-{STEPS}/MANIFEST.json").read_bytes() == checkpoint
    assert (folder / "latest/model.safetensors").is_file()


def test_a_signal_during_the_export_after_the_last_save_lets_it_be_done(tmp_path: Path, model_folder: Path) -> None:
    config = configure(tmp_path, model_folder)
    ended = launch(2, train_with, config, Fault("SIGUSR1", "export", 1, STEPS), folder=tmp_path)

    require_order(ended)
    assert result(tmp_path)["status"] == "completed"
    assert (tmp_path / "runs/run/latest/model.safetensors").is_file()


def test_a_signal_during_the_last_evaluation_saves_and_the_next_start_evaluates_and_exports(
    tmp_path: Path, model_folder: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text(chat_line("What is 3?") + "\n")
    options = {"evaluation__prompts": str(tmp_path / "prompts.jsonl"), "evaluation__max_new_tokens": 2}
    config = configure(tmp_path, model_folder, **options)
    ended = launch(2, train_with, config, Fault("SIGUSR1", "answers", 1, STEPS), folder=tmp_path)

    require_order(ended)
    assert result(tmp_path) == {"status": "preempted", "step": STEPS, "exported": None}
    evaluations = tmp_path / "runs/run/evaluations.jsonl"
    assert len(evaluations.read_text().splitlines()) == 1
    require_order(launch(2, train, config, folder=tmp_path))
    assert result(tmp_path)["status"] == "completed"
    assert len(evaluations.read_text().splitlines()) == 2
    assert (tmp_path / "runs/run/latest/model.safetensors").is_file()


def test_neither_a_signal_after_all_is_done_nor_a_full_disk_under_stdout_changes_the_exit_status(
    tmp_path: Path, model_folder: Path
) -> None:
    """As a second one of an impatient scheduler, while Python and torch take themselves down."""
    config = configure(tmp_path, model_folder, tokens__train_steps=1)
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(
            [sys.executable, "run_train.py", "--config", str(config)],
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
        )
    try:
        said, num_sent = tmp_path / "runs/run/console.log", 0
        while process.poll() is None:
            if said.exists() and "\ncompleted " in said.read_text():
                time.sleep(0.1)  # a second Ctrl-C before all is done is meant
                for number in STOP_SIGNALS:
                    process.send_signal(number)
                num_sent += 1
            time.sleep(0.005)
        _, err = process.communicate()
    finally:
        process.kill()
    assert num_sent
    assert (process.returncode, err) == (0, b"")
