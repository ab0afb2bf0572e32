"""Whatever wandb does, the run goes on, ends well, and metrics.jsonl has every step."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sftron.train import wandb_log
from sftron.train.wandb_log import WandbLog
from tests.train.runs import make_config, metrics, result, run

Given = list[tuple[str, Any]]


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What hangs, hangs until the test is over."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def make_wandb(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Given]:
    """Put a wandb in place whose `name` does `fault` at its n-th call; what it was given."""

    def make(name: str = "", nth: int = 1, fault: Callable[[], object] = lambda: None) -> Given:
        given: Given = []

        def call(own: str, value: Any) -> None:
            given.append((own, value))
            if own == name and [each for each, _ in given].count(name) == nth:
                fault()

        def init(**options: Any) -> SimpleNamespace:
            call("init", options)
            return SimpleNamespace(
                log=lambda numbers, step: call("log", step), finish=lambda exit_code: call("finish", exit_code)
            )

        wandb = SimpleNamespace(init=init, __spec__=ModuleSpec("wandb", None))
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        return given

    return make


def fail(error: BaseException) -> Callable[[], object]:
    def raise_it() -> object:
        raise error

    return raise_it


@pytest.mark.parametrize(
    ("name", "nth", "error", "num_given"),
    [
        ("init", 1, ConnectionError("unreachable"), 1),
        ("log", 3, BrokenPipeError("wandb-core is dead"), 4),
        ("log", 1, SystemExit(1), 2),
        ("finish", 1, TimeoutError("slow"), 22),
    ],
)
def test_a_wandb_that_fails_is_told_of_once_and_the_run_is_whole(
    tmp_path: Path,
    model_folder: Path,
    make_wandb: Callable[..., Given],
    capsys: pytest.CaptureFixture[str],
    name: str,
    nth: int,
    error: BaseException,
    num_given: int,
) -> None:
    given = make_wandb(name, nth, fail(error))
    ended = run(make_config(tmp_path, model_folder, logging__wandb={"mode": "online", "project": "p"}))

    assert len(given) == num_given
    assert result(ended)["status"] == "completed"
    assert [step["step"] for step in metrics(ended.directory.folder)] == list(range(1, 21))
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wandb ")]
    assert told == [f"wandb      gets nothing more: {type(error).__name__}: {error}. metrics.jsonl has every step"]


@pytest.mark.parametrize("name", ["init", "log", "finish"])
def test_a_wandb_that_hangs_holds_no_step_and_is_given_up_at_the_end(
    tmp_path: Path,
    model_folder: Path,
    make_wandb: Callable[..., Given],
    released: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """The test would not end if a step or the save waited for it."""
    monkeypatch.setattr(wandb_log, "_TIME_TO_FINISH_S", 0.2)
    make_wandb(name, 1, released.wait)
    ended = run(make_config(tmp_path, model_folder, logging__wandb={"mode": "online", "project": "p"}))

    assert result(ended)["status"] == "completed"
    assert len(metrics(ended.directory.folder)) == 20
    assert "wandb      gets nothing more: it has not finished in 0 s" in capsys.readouterr().out


def test_a_wandb_that_is_slow_at_first_gets_every_step_in_order(make_wandb: Callable[..., Given]) -> None:
    given = make_wandb("init", 1, lambda: time.sleep(0.2))
    log = WandbLog(mode="online")
    for step in range(1, 6):
        log.log({"loss": 1.0}, step)
    log.finish(0)

    assert given == [("init", {"mode": "online"}), *(("log", step) for step in range(1, 6)), ("finish", 0)]


def test_what_waits_for_wandb_is_bounded(
    make_wandb: Callable[..., Given],
    released: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(wandb_log, "_MAX_WAITING", 3)
    make_wandb("init", 1, released.wait)
    log = WandbLog(mode="online")
    for step in range(1, 9):
        log.log({"loss": 1.0}, step)
    log.finish(0)

    assert capsys.readouterr().out.count("gets nothing more: it has not taken the last 3 steps") == 1
