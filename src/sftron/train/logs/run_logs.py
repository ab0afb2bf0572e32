"""The files of lines that a run writes, and the loggers' copy of them. A failed write does not end the run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from sftron.regular_file import read_lines
from sftron.train.evaluation import Evaluation
from sftron.train.logs import console
from sftron.train.logs.loggers import Loggers
from sftron.train.metrics import StepMetrics
from sftron.train.run import Setup
from sftron.train.run_directory import RunDirectory, intact_records, read_records

_BUFFER_BYTES = 2**24
"""More than the lines of a run that waits for space on its disk."""


class LineFile:
    """A file of lines, to which a run appends.

    When it is opened, an incomplete last line is removed, as a kill leaves it. A full disk does not end the run: lines
    wait in the buffer until they can be written.

    Args:
        last_step: If given, the lines are records with a "step", and everything after the last one up to this step is
            removed too: a resumed run makes the later steps again.
    """

    def __init__(self, path: Path, *, last_step: int | None = None) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._file = os.fdopen(self._descriptor, "ab", _BUFFER_BYTES, closefd=False)
        self._has_failed = False
        os.truncate(path, _kept_size(path, last_step))

    def append(self, line: bytes) -> None:
        """Writes a line; `line` is given without the line end."""
        with self._warning("its lines wait in memory"):
            self._file.write(line + b"\n")
            self._file.flush()

    def sync(self) -> None:
        """Flushes all lines to disk (fsync)."""
        with self._warning("its lines wait in memory"):
            self._file.flush()
            os.fsync(self._descriptor)

    def close(self) -> None:
        self.sync()
        with self._warning("it lacks its last lines"):
            self._file.close()
        os.close(self._descriptor)

    @contextmanager
    def _warning(self, consequence: str) -> Iterator[None]:
        try:
            yield
            self._has_failed = False
        except OSError as error:
            had_failed, self._has_failed = self._has_failed, True  # before the warning: this may be console.log
            if not had_failed or self._file.closed:
                console.write(f"WARNING    {self.path} cannot be written ({error.strerror}); {consequence}")


def _kept_size(path: Path, last_step: int | None) -> int:
    kept = position = 0
    with suppress(ValueError):  # a line that is too long, which no run has written
        for line in read_lines(path):
            position += len(line)
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                if line.endswith(b"\n") and (last_step is None or json.loads(line)["step"] <= last_step):
                    kept = position
    return kept


def _last_step(path: Path) -> int:
    """Returns the step of the last record of a file, which a logger was given too; -1 if there is none."""
    try:
        return max((record["step"] for record in read_records(path)), default=-1)
    except ValueError:  # a line is damaged; then loggers may show a step twice
        return -1


class RunLogs:
    """The logs of a run.

    Each log is opened as soon as its inputs are known; a log that is not open is skipped. Only the main rank writes.
    """

    def __init__(self, setup: Setup, directory: RunDirectory) -> None:
        self.loggers: Loggers | None = None
        self._setup, self._directory = setup, directory
        self._console: LineFile | None = None
        self._metrics: LineFile | None = None
        self._evaluations: LineFile | None = None

    def open_console(self) -> None:
        if self._setup.ranks.is_main:
            self._console = LineFile(self._directory.console_log)
            console.log_to(self._console.append)

    def open(self, *, step: int, evaluated_step: int | None) -> None:
        """Opens all logs except the console's, and removes the records after the point that the run resumes from.

        Args:
            step: The last finished step.
            evaluated_step: The step of the last evaluation; None if there was none.
        """
        setup = self._setup
        if setup.ranks.is_main:
            # After the loader has forked its workers: a fork while a logger holds a lock could hang the worker.
            if self.loggers:
                logged, evaluated = map(_last_step, (self._directory.metrics, self._directory.evaluations))
                self.loggers.start(step, folder=self._directory.folder, logged=logged, evaluated=evaluated)
            self._metrics = LineFile(self._directory.metrics, last_step=step)
            if setup.data.is_evaluated:
                last_evaluated = -1 if evaluated_step is None else evaluated_step
                self._evaluations = LineFile(self._directory.evaluations, last_step=last_evaluated)

    def write_step(self, metrics: StepMetrics) -> None:
        if self._metrics:
            record = asdict(metrics)
            self._metrics.append(as_json(record))
            if self.loggers:
                self.loggers.log(metrics.step, record)

    def write_evaluation(self, evaluation: Evaluation) -> None:
        if self._evaluations:
            record = asdict(evaluation)
            self._evaluations.append(as_json(record))
            if self.loggers:
                self.loggers.log(evaluation.step, evaluation.metrics(), record["answers"])

    def answers(self, step: int) -> list[dict[str, Any]] | None:
        """Returns the answers of the evaluation after `step`; None if there was none, and on other ranks."""
        records = intact_records(self._directory.evaluations) if self._evaluations else ()
        return next((record.get("answers") for record in records if record["step"] == step), None)

    def sync_steps(self) -> None:
        """Flushes metrics.jsonl to disk, because it has to contain every step of a checkpoint."""
        if self._metrics:
            self._metrics.sync()

    def close(self, status: str) -> None:
        """Closes all logs; loggers may wait a minute for a slow server. `status` is the status in result.json."""
        for file in (self._evaluations, self._metrics):
            if file:
                file.close()
        if self._metrics and self.loggers:
            self.loggers.finish(status)
        console.log_to(None)
        if self._console:
            self._console.close()


def as_json(record: Mapping[str, Any]) -> bytes:
    """Returns the record as strict JSON; numbers that are not finite become null."""

    def finite(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: finite(each) for key, each in value.items()}
        return None if isinstance(value, float) and not isfinite(value) else value

    return json.dumps(finite(record), allow_nan=False).encode()
