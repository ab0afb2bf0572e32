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

        def init(settings: Any, **options: Any) -> SimpleNamespace:
            call("init", options["mode"])
            return SimpleNamespace(
                log=lambda numbers: call("log", numbers["step"]),
                finish=lambda exit_code: call("finish", exit_code),
                define_metric=lambda *_, **__: None,
                mark_preempting=lambda: None,
                summary={},
                offline=True,
                url=None,
                dir="/there/files",
            )

        wandb = SimpleNamespace(
            init=init,
            teardown=lambda exit_code: None,
            Settings=lambda **options: SimpleNamespace(**options),
            __spec__=ModuleSpec("wandb", None),
        )
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
        ("init", 1, PermissionError("no place"), 1),
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
    ended = run(make_config(tmp_path, model_folder, logging__wandb={"mode": "offline", "sample": False}))

    assert len(given) == num_given
    assert result(ended)["status"] == "completed"
    assert [step["step"] for step in metrics(ended.directory.folder)] == list(range(1, 21))
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wandb ")]
    opened = name != "init"
    rest = ", and `wandb sync /there` may send the rest" if opened else ""
    said = f"wandb      gets nothing more: {type(error).__name__}: {error}. metrics.jsonl has every step{rest}"
    assert told == ["wandb      offline; `wandb sync /there` sends it"] * opened + [said]


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
    ended = run(make_config(tmp_path, model_folder, logging__wandb={"mode": "offline", "sample": False}))

    assert result(ended)["status"] == "completed"
    assert len(metrics(ended.directory.folder)) == 20
    assert "wandb      gets nothing more: it has not finished in 0 s" in capsys.readouterr().out


def test_a_wandb_that_is_slow_at_first_gets_every_step_in_order(make_wandb: Callable[..., Given]) -> None:
    given = make_wandb("init", 1, lambda: time.sleep(0.2))
    log = WandbLog(lambda: {"mode": "offline"})
    log.start()
    for step in range(1, 6):
        log.log({"loss": 1.0}, step)
    log.finish("completed")

    assert given == [("init", "offline"), *(("log", step) for step in range(1, 6)), ("finish", 0)]


def test_nothing_of_it_begins_before_it_is_started(make_wandb: Callable[..., Given]) -> None:
    """Loader workers are forked before; a fork amid another thread's imports could hang them."""
    given = make_wandb()
    log = WandbLog(lambda: {"mode": "offline"})
    log.log({"loss": 1.0}, 0)
    time.sleep(0.1)
    assert not given
    assert wandb_log.THREAD_NAME not in {thread.name for thread in threading.enumerate()}
    log.finish("failed")
    assert given == [("init", "offline"), ("log", 0), ("finish", 1)]


def test_a_server_that_cannot_be_had_is_told_of_and_files_are_written_instead(
    make_wandb: Callable[..., Given], capsys: pytest.CaptureFixture[str]
) -> None:
    given = make_wandb("init", 1, fail(ConnectionError("no route\nto the host")))
    log = WandbLog(lambda: {"mode": "online"})
    log.log({"loss": 1.0}, 1)
    log.finish("completed")

    assert given == [("init", "online"), ("init", "offline"), ("log", 1), ("finish", 0)]
    assert capsys.readouterr().out.splitlines() == [
        "wandb      cannot be had (ConnectionError: no route to the host), and the run goes on offline",
        "wandb      offline; `wandb sync /there` sends it",
    ]


def test_a_table_that_is_not_taken_holds_nothing_up(
    make_wandb: Callable[..., Given], released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this wandb there is no such thing as a table; and a page is waited for as long as a part of the end may."""
    monkeypatch.setattr(wandb_log, "_TIME_TO_FINISH_S", 0.6)
    given = make_wandb()
    log = WandbLog(lambda: {"mode": "offline"})
    sys.modules["wandb"].Html = lambda *_, **__: released.wait()  # pyright: ignore[reportAttributeAccessIssue]
    log.log_table("t", ["a"], [[1]], 1)
    log.log_page("p", Path(__file__), 1)
    log.log({"loss": 1.0}, 1)
    log.finish("completed")

    assert given == [("init", "offline"), ("log", 1), ("finish", 0)]


def test_what_waits_for_wandb_is_bounded(
    make_wandb: Callable[..., Given],
    released: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(wandb_log, "_MAX_WAITING", 3)
    make_wandb("init", 1, released.wait)
    log = WandbLog(lambda: {"mode": "offline"})
    for step in range(1, 9):
        log.log({"loss": 1.0}, step)
    log.finish("completed")

    assert capsys.readouterr().out.count("gets nothing more: it has not taken the last 3 steps") == 1
