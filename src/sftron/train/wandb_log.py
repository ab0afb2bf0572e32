"""Weights & Biases beside the run: nothing that it does or fails to do can slow a step, end a run or lose a number."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftron.train import console
from sftron.train.wandb_facts import FinalFigures

_MAX_WAITING = 10_000
"""Points: 30 MB. Of steps, hours."""
_TIME_TO_START_S = 45.0
"""For a server to answer. Below the time to finish, so that a short run without a server has its offline files."""
_TIME_TO_FINISH_S = 60.0
_TIME_BETWEEN_FLUSHES_S = 2.0
"""Of wandb's own file: what a kill of the machine can take from it."""
THREAD_NAME = "wandb"

_NOTHING_OF_THE_ENVIRONMENT: dict[str, Any] = {
    # What wandb would find by itself: host name, user, command line, packages, git remote, code, console, GPU use.
    "host": "",
    "program": "",
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "save_code": False,
    "label_disable": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}

STEP = "step"
"""The x axis of every chart. wandb's own step only ever grows, and drops a step that a resume trains again."""


@dataclass(frozen=True, slots=True)
class _Point:
    numbers: Mapping[str, Any]
    step: int

    def send(self, wandb: Any, run: Any) -> None:
        run.log({**self.numbers, STEP: self.step})


@dataclass(frozen=True, slots=True)
class _Table:
    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    step: int

    def send(self, wandb: Any, run: Any) -> None:
        table = wandb.Table(columns=list(self.columns), data=[list(row) for row in self.rows])
        run.log({self.name: table, STEP: self.step})


@dataclass(frozen=True, slots=True)
class _Page:
    name: str
    path: Path
    step: int

    def send(self, wandb: Any, run: Any) -> None:
        run.log({self.name: wandb.Html(self.path.read_text(encoding="utf-8"), inject=False), STEP: self.step})


class WandbLog:
    """A thread of its own makes every call, as `init` may block for minutes and `log` while the disk or wandb's own
    process does; another one sends tables, which wait for the server's answers. What went wrong is said once;
    metrics.jsonl has every step all the same.

    identity: what a checkpoint remembers of the wandb run; JSON.
    """

    def __init__(
        self,
        prepare: Callable[[], dict[str, Any]],
        *,
        identity: Mapping[str, Any] | None = None,
        earlier: Callable[[int], Iterable[tuple[Mapping[str, Any], int]]] = lambda step: (),
    ) -> None:
        """prepare: makes the options of wandb.init, in the thread.

        earlier: the numbers and steps after a given step that the run had before it was started this time. A server
        that has been out of reach gets what it lacks of them.
        """
        self.identity = identity
        self._prepare, self._earlier = prepare, earlier
        self._waiting: queue.Queue[_Point | str] = queue.Queue(_MAX_WAITING)
        self._tables: queue.Queue[_Table | _Page | None] = queue.Queue(_MAX_WAITING)
        self._failed = False
        self._folder: Path | None = None
        self._final = FinalFigures()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        """Import wandb and go; what is logged before then waits. To be called once loader workers have been forked: a
        fork amid another thread's imports leaves locks behind that nobody opens."""
        if self._thread.ident is None:
            self._thread.start()

    def log(self, numbers: Mapping[str, Any], step: int) -> None:
        """numbers: under names that wandb draws by, "eval/x/loss"."""
        self._final.add(numbers)
        if self._failed:
            return
        try:
            self._waiting.put_nowait(_Point(numbers, step))
        except queue.Full:
            self._fail(f"it has not taken the last {_MAX_WAITING:,} steps")

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """rows: of text, numbers and bools, one for each column."""
        self._put_table(_Table(name, columns, rows, step))

    def log_page(self, name: str, path: Path, step: int) -> None:
        """path: of an HTML page that needs no other file; read when its turn comes."""
        self._put_table(_Page(name, path, step))

    def finish(self, status: str) -> None:
        """Wait until wandb has everything, a minute at most. status: completed, preempted, or anything that failed."""
        if not self._failed:
            self.start()
            try:
                self._waiting.put_nowait(status)
                self._thread.join(_TIME_TO_FINISH_S)
            except queue.Full:
                pass
            if self._thread.is_alive():
                self._fail(f"it has not finished in {_TIME_TO_FINISH_S:.0f} s")

    def _put_table(self, item: _Table | _Page) -> None:
        if not self._failed:
            with suppress(queue.Full):
                self._tables.put_nowait(item)

    def _run(self) -> None:
        try:
            import wandb

            try:
                self._work(wandb)
            except BaseException as error:  # wandb has ended its own thread by SystemExit
                self._fail(f"{type(error).__name__}: {error}")
                with suppress(BaseException):
                    # Else Python's way out would wait for it. Where this hangs, the thread lives, and run_train.py
                    # leaves another way.
                    wandb.teardown(exit_code=1)
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _work(self, wandb: Any) -> None:
        run = self._open(wandb)
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        for point in self._missing(run):
            point.send(wandb, run)
        tables = threading.Thread(
            target=self._send_tables, args=(wandb, run), name=f"{THREAD_NAME} tables", daemon=True
        )
        tables.start()
        while not isinstance(item := self._waiting.get(), str):
            item.send(wandb, run)
        self._tables.put(None)
        tables.join(_TIME_TO_FINISH_S / 3)
        run.summary.update({**self._final.as_dict(), "final/status": item})
        if item == "preempted":
            # With it, a status that is not 0 is not a failure, and a sweep starts the run again.
            run.mark_preempting()
        run.finish(exit_code=0 if item == "completed" else 1)

    def _open(self, wandb: Any) -> Any:
        """The wandb run: on a server, or in files where there is none."""
        options = self._prepare()
        settings = wandb.Settings(**_NOTHING_OF_THE_ENVIRONMENT, silent=True, init_timeout=_TIME_TO_START_S)
        with suppress(ValueError):  # older ones write as they go
            settings.x_transaction_log_flush_interval = _TIME_BETWEEN_FLUSHES_S
        try:
            run = wandb.init(**options, settings=settings)
        except Exception as error:
            if options["mode"] != "online":
                raise
            reason = " ".join(str(error).split()).partition(" Consider increasing")[0]  # advice on a call that is ours
            wandb.teardown(exit_code=1)  # the id is taken as long as the attempt lives
            run = wandb.init(**{**options, "mode": "offline"}, settings=settings)
            console.say(f"wandb      cannot be had ({type(error).__name__}: {reason}), and the run goes on offline")
        self._folder = Path(run.dir).parent
        console.say(f"wandb      {run.url}" if run.url else f"wandb      offline; `wandb sync {self._folder}` sends it")
        return run

    def _missing(self, run: Any) -> Iterator[_Point]:
        """What the run's server should have had earlier, and has not. Files have no server to ask."""
        if run.offline:
            return
        known = run.summary.get(STEP) if run.resumed else 0
        for numbers, step in self._earlier(known if isinstance(known, int) else 0):
            yield _Point(numbers, step)

    def _send_tables(self, wandb: Any, run: Any) -> None:
        while item := self._tables.get():
            try:
                item.send(wandb, run)
            except Exception as error:
                console.say(f"wandb      has not taken {item.name} ({type(error).__name__}: {error})")

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            rest = f", and `wandb sync {self._folder}` may send the rest" if self._folder else ""
            console.say(f"wandb      gets nothing more: {reason}. metrics.jsonl has every step{rest}")


def flat_numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """Every number under a key of its own, "datasets/x.jsonl/tokens": wandb draws numbers, not dictionaries."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from flat_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{key}", value
