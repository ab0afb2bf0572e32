"""What all loggers share. They receive a copy of a run's numbers, and can neither end a run nor delay a step."""

from __future__ import annotations

import json
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from sftron.regular_file import read_json_value
from sftron.train.logs import console

_TIME_TO_START_S = 10.0
"""How long the run waits for loggers to start, so that their output comes before the steps."""
_TIME_TO_FINISH_S = 70.0
"""The longest time that a run waits for all its loggers at the end; wandb itself may take a minute."""
_MOST_CALLS_WAITING = 10_000

Numbers = Mapping[str, int | float]
Answers = Sequence[Mapping[str, Any]]


class Logger(Protocol):
    """Sends numbers to one service or file. Every method may raise or take long; `LoggerThread` calls them."""

    name: str
    """Its name in logging.to."""
    replaces_steps: bool
    """Whether logging a repeated step again after a resume replaces the first record."""

    def start(self, step: int) -> None:
        """Begins or continues a run in the service; `step` is the last finished one."""
        ...

    def log(self, step: int, numbers: Numbers, answers: Answers | None = None) -> None:
        """Logs the numbers of a step or, with answers, of an evaluation."""
        ...

    def finish(self, status: str) -> None:
        """Sends what is left. `status` is the status in result.json."""
        ...


class LoggerThread:
    """Calls a logger in a thread of its own, in order. It reports the first failure and goes on with later calls.

    Each logger has its own thread, because one that hangs would silence the others. Calls wait in a bounded queue;
    calls that do not fit are dropped and reported.
    """

    def __init__(self, logger: Logger) -> None:
        self.name = logger.name
        self._logger = logger
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name=f"logging to {self.name}", daemon=True)
        self.has_started = threading.Event()
        self._reported: set[str] = set()
        self._logged = self._evaluated = -1

    def start(self, step: int, *, folder: Path, logged: int, evaluated: int) -> None:
        """Starts the thread and in it the logger.

        Args:
            step: The last finished step.
            folder: The run directory.
            logged, evaluated: The last steps in metrics.jsonl and evaluations.jsonl, which the logger was given too.
        """
        if not self._logger.replaces_steps:
            self._logged, self._evaluated = highest_sent(self.name, folder, logged, evaluated)
        self._call(lambda: self._logger.start(step))
        self._call(self.has_started.set)
        self._thread.start()

    def log(self, step: int, numbers: Numbers, answers: Answers | None = None) -> None:
        """Logs a step or, with its answers, an evaluation, unless the logger has it and cannot replace it."""
        if step > (self._logged if answers is None else self._evaluated):
            self._call(lambda: self._logger.log(step, numbers, answers))

    def finish(self, status: str) -> None:
        """Lets the thread end after the waiting calls, and does not wait for it."""
        self._calls.put(lambda: self._logger.finish(status))
        self._calls.put(None)

    def wait(self, seconds: float) -> None:
        """Waits at most `seconds` for the thread to end, then abandons it."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._report_once("did not end in time", "; what it has not sent is missing there")

    def _call(self, call: Callable[[], None]) -> None:
        if self._calls.qsize() < _MOST_CALLS_WAITING:
            self._calls.put(call)
        else:
            self._report_once(f"has {_MOST_CALLS_WAITING:,} calls waiting", "; what does not fit is missing there")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except (Exception, SystemExit) as error:  # wandb sometimes raises SystemExit
                self._report_once("failed", f": {in_words(error)}")

    def _report_once(self, problem: str, details: str) -> None:
        if problem not in self._reported:
            self._reported.add(problem)
            console.write(f"{self.name:<10} {problem}{details}. metrics.jsonl has every step", is_needed=True)


class Loggers:
    """All loggers of a run, on its main rank."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._threads = [LoggerThread(logger) for logger in loggers]

    def start(self, step: int, *, folder: Path, logged: int, evaluated: int) -> None:
        """Starts all loggers; see LoggerThread.start."""
        for thread in self._threads:
            thread.start(step, folder=folder, logged=logged, evaluated=evaluated)
        until = time.monotonic() + _TIME_TO_START_S
        for thread in self._threads:
            thread.has_started.wait(until - time.monotonic())

    def log(self, step: int, record: Mapping[str, Any], answers: Answers | None = None) -> None:
        """Logs the numbers of a line of metrics.jsonl or, with answers, of an evaluation."""
        numbers = {name: number for name, number in flat_numbers(record).items() if name != "step"}
        for thread in self._threads:
            thread.log(step, numbers, answers)

    def finish(self, status: str) -> None:
        for thread in self._threads:
            thread.finish(status)
        until = time.monotonic() + _TIME_TO_FINISH_S
        for thread in self._threads:
            thread.wait(max(0.0, until - time.monotonic()))


def in_words(error: BaseException) -> str:
    # The advice that wandb appends refers to a call in this package, not in the user's code.
    return f"{type(error).__name__}: {' '.join(str(error).split()).partition(' Consider increasing')[0].rstrip('.')}"


def flat(tree: Mapping[str, Any], separator: str) -> dict[str, Any]:
    """Returns the values of nested mappings by joined names, such as "datasets/x.jsonl/tokens"; lists are values."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            values |= {f"{key}{separator}{name}": leaf for name, leaf in flat(value, separator).items()}
        else:
            values[key] = value
    return values


def flat_numbers(record: Mapping[str, Any]) -> dict[str, int | float]:
    """Returns every number of a record by its flat name, because loggers plot only numbers."""
    return {name: value for name, value in flat(record, "/").items() if type(value) in (int, float)}


# --- What a run directory keeps of its run in a service, in NAME.json ---


def kept_facts(name: str, folder: Path) -> dict[str, Any]:
    """Returns what `keep_facts` wrote for a logger, else {}.

    Returns {} for a copy of a run directory while the original exists, because the copy is another run.
    """
    path = folder / f"{name}.json"
    kept = read_json_value(path) if path.exists() else {}
    is_copy = kept and kept["folder"] != str(folder.resolve()) and (Path(kept["folder"]) / path.name).exists()
    return {} if is_copy else kept


def keep_facts(name: str, folder: Path, **facts: Any) -> None:
    facts = {**kept_facts(name, folder), **facts, "folder": str(folder.resolve())}
    (folder / f"{name}.json").write_text(json.dumps(facts) + "\n")


def run_id(name: str, folder: Path, given: str | None = None) -> str:
    """Returns the id of the run in a service (the `given` one, the kept one, or a new one), and keeps it for resumed
    runs."""
    chosen = given or kept_facts(name, folder).get("id") or secrets.token_hex(6)
    keep_facts(name, folder, id=chosen)
    return chosen


def highest_sent(name: str, folder: Path, logged: int, evaluated: int) -> tuple[int, int]:
    """Returns the highest step and the highest evaluation that any start of the run sent to a logger.

    Keeps them, because each resume removes later steps from metrics.jsonl and evaluations.jsonl: after two kills, these
    files may end before the last step that the first start sent.

    Args:
        logged, evaluated: The last steps in these files before they are cut.
    """
    with suppress(OSError, ValueError, LookupError, TypeError):  # a damaged file; its logger reports it
        if kept := kept_facts(name, folder):
            logged, evaluated = max(logged, kept.get("sent", -1)), max(evaluated, kept.get("evaluated", -1))
            keep_facts(name, folder, sent=logged, evaluated=evaluated)
    return logged, evaluated
