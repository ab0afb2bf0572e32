"""The logs of a run: its log files, the console, and the loggers' copy. A failed write does not end the run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property, partial
from importlib.metadata import version
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

from sftron import __version__
from sftron.checkpoint.atomic import sync
from sftron.config import Logging
from sftron.data.digest import PackDigest, step_rows
from sftron.errors import without_secrets
from sftron.kernels.device import device_name
from sftron.models.attention import describe_backends
from sftron.regular_file import read_lines
from sftron.train.evaluation import Evaluation
from sftron.train.extension import Events
from sftron.train.logs import console
from sftron.train.logs.loggers import Loggers
from sftron.train.logs.trackers import Mlflow, TensorBoard, Tracker, Trackio, Wandb, has_key
from sftron.train.metrics import StepMetrics
from sftron.train.progress import Progress
from sftron.train.resume import Start
from sftron.train.run import Setup, data_fingerprint
from sftron.train.run_directory import RunDirectory, intact_records, read_records
from sftron.train.step import StepBatches, StepResult, measure_step

_BUFFER_BYTES = 2**24
"""More than the lines of a run that waits for disk space."""
_PACKAGES = {"mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""The packages that a tracker imports, if their names differ from the tracker's."""
_EXTRAS = ("wandb", "trackio", "tensorboard", "mlflow")
_TIME_FOR_GIT_S = 5.0


class LineFile:
    """A file of lines, to which a run appends.

    Opening it removes an incomplete last line, which a kill may leave. A full disk does not end the run: lines wait in
    the buffer until they can be written.

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
        """Writes a line, given without its line end."""
        with self._warning("its lines wait in memory"):
            self._file.write(line + b"\n")
            self._file.flush()

    def sync(self) -> None:
        """Flushes all lines to disk (fsync), and the entry of a new file in its folder."""
        with self._warning("its lines wait in memory"):
            self._file.flush()
            os.fsync(self._descriptor)
            sync(self.path.parent)

    def is_in_place(self) -> bool:
        """Returns whether the path still names the file that is open."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        return False

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
                console.warn(f"{self.path} cannot be written ({error.strerror}); {consequence}")


def _kept_size(path: Path, last_step: int | None) -> int:
    kept = position = 0
    with suppress(ValueError):  # a line that is too long, so no run wrote it
        for line in read_lines(path):
            position += len(line)
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                if line.endswith(b"\n") and (last_step is None or json.loads(line)["step"] <= last_step):
                    kept = position
    return kept


def _last_step(path: Path) -> int:
    """Returns the step of the last record of a file, which the loggers got too; -1 without records."""
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
        self.events = Events((), is_main=False)
        self.packs: list[PackDigest] = []
        """The digests of the packs of all ranks since the last step."""
        self._setup, self._directory = setup, directory
        self._seconds: dict[str, float] = {}
        """The time spent on checkpoints and evaluations since the last step."""
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
        setup, self._bar = self._setup, console.RunProgress()
        if setup.ranks.is_main:
            # After the loader has forked its workers: a fork while a logger holds a lock could hang the worker.
            if self.loggers:
                logged, evaluated = map(_last_step, (self._directory.metrics, self._directory.evaluations))
                self.loggers.start(step, folder=self._directory.folder, logged=logged, evaluated=evaluated)
            self._metrics = LineFile(self._directory.metrics, last_step=step)
            if setup.data.is_evaluated:
                last_evaluated = -1 if evaluated_step is None else evaluated_step
                self._evaluations = LineFile(self._directory.evaluations, last_step=last_evaluated)

    @cached_property
    def _data(self) -> dict[str, str]:
        return data_fingerprint(self._setup.config, self._setup.data.dataset)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the time in the context, a checkpoint's or an evaluation's, to the metrics of the next step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[what] = self._seconds.get(what, 0.0) + time.perf_counter() - started

    def log_step(
        self,
        progress: Progress,
        fetched: StepBatches,
        result: StepResult,
        *,
        learning_rate: float,
        seconds: float,
        first_epoch: int,
        changed_settings: dict[str, list[Any]],
    ) -> None:
        """Writes and prints the metrics of a step that took `seconds`.

        Args:
            first_epoch: The loader's first epoch.
            changed_settings: The keys that changed at this step, each with its old and new value.
        """
        setup, config, num_steps = self._setup, self._setup.config, self._setup.length.steps_in_words(progress)
        dataset, packs, self.packs = setup.data.dataset, self.packs, []
        metrics = measure_step(
            progress,
            fetched,
            result,
            learning_rate=learning_rate,
            preparation=setup.data.preparation,
            step_seconds=seconds,
            checkpoint_seconds=self._seconds.pop("checkpoint", 0.0),
            evaluation_seconds=self._seconds.pop("evaluation", 0.0),
            peak_tflops=setup.model.peak.tflops,
            ranks=setup.ranks,
            changed_settings=changed_settings,
            rows=step_rows(packs, first_epoch=first_epoch, num_epochs=dataset.num_epochs, data=self._data),
        )
        self.write_step(metrics)
        self._bar.update(setup.length.share_done(progress), metrics.for_terminal(num_steps))
        if progress.step % config.logging.interval == 0 or result.skipped:
            left = self._bar.time_left
            console.write_short(metrics.as_line(num_steps, left), metrics.for_terminal(num_steps, left))

    def write_step(self, metrics: StepMetrics) -> None:
        if self._metrics:
            record = asdict(metrics)
            self._metrics.append(as_json(record))
            self.events.call("on_step", record)
            if self.loggers:
                self.loggers.log(metrics.step, record)

    def write_evaluation(self, evaluation: Evaluation) -> None:
        if self._evaluations:
            record = asdict(evaluation)
            self._evaluations.append(as_json(record))
            self.events.call("on_evaluation", record)
            if self.loggers:
                self.loggers.log(evaluation.step, evaluation.metrics(), record["answers"])

    def answers(self, step: int) -> list[dict[str, Any]] | None:
        """Returns the answers of the evaluation after `step`; None without an evaluation, and on other ranks."""
        records = intact_records(self._directory.evaluations) if self._evaluations else ()
        return next((record.get("answers") for record in records if record["step"] == step), None)

    def sync_steps(self) -> None:
        """Flushes metrics.jsonl and evaluations.jsonl to disk. They must contain every step and evaluation before a
        checkpoint, because a resumed run does not repeat them."""
        for file in (self._metrics, self._evaluations):
            if file:
                file.sync()

    def require_files(self) -> None:
        """Raises OSError if metrics.jsonl or evaluations.jsonl is no longer where this run created it."""
        lost = [str(file.path) for file in (self._metrics, self._evaluations) if file and not file.is_in_place()]
        if lost:
            raise FileNotFoundError(
                f"{', '.join(lost)}: removed, moved or replaced while the run wrote to it, so its records are lost. "
                "Move the run directory back, or start the run in another one (general.run_name)"
            )

    def close(self, status: str) -> None:
        """Closes all logs; a slow server may delay this by a minute. `status` is the status in result.json."""
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


# --- The loggers ---


def require_loggers(options: Logging) -> None:
    """Raises ValueError if a logger's package is not installed, or an online run has no wandb API key."""
    mode = options.wandb_mode
    for name in {*options.to, *(["wandb"] if mode != "disabled" else [])}:
        packages = ("accelerate", *_PACKAGES.get(name, (name,)))
        if missing := [package for package in packages if find_spec(package) is None]:
            how = f"'sftron[{name}]'" if name in _EXTRAS else " ".join(missing)
            raise ValueError(
                f"logging.to has {name}, but {', '.join(missing)} is not installed: pip install {how}, or remove "
                f"{name} from logging.to" + ", and logging.wandb.mode" * (name == "wandb")
            )
    if mode == "online" and not has_key():
        raise ValueError(
            "logging.wandb.mode is online, but no API key is set: run `wandb login`, or set WANDB_API_KEY, or "
            "set the mode to offline and run `wandb sync` later"
        )
    if mode != "disabled" and (other := os.environ.get("WANDB_MODE")) and other != mode:
        console.write(f"wandb      mode {mode}, as configured; sftron ignores WANDB_MODE={other}")


def make_loggers(setup: Setup, directory: RunDirectory, start: Start, *, num_parameters: int) -> Loggers | None:
    """Returns the loggers of the run; None without loggers, and on all ranks but the main one."""
    options = setup.config.logging
    names = [*options.to, *(["wandb"] if "wandb" not in options.to and options.wandb_mode != "disabled" else [])]
    if not names or not setup.ranks.is_main:
        return None
    started_from = str(start.folder) if start.folder else None
    facts = partial(config_and_facts, setup, parameters=num_parameters, started_from=started_from)
    kinds = {"tensorboard": TensorBoard, "trackio": Trackio, "mlflow": Mlflow, "wandb": Wandb}
    return Loggers([kinds.get(name, Tracker)(name, setup, directory.folder, facts) for name in names])


def config_and_facts(setup: Setup, **facts: Any) -> dict[str, Any]:
    """Returns the configuration without secrets. Its key `run` holds other facts that influence the results.

    Args:
        facts: Facts to add to those of `setup`.
    """
    config, device = setup.config, setup.ranks.device
    versions = {name: version(name) for name in ("torch", "transformers", "tokenizers", "datasets")}
    facts |= {
        "versions": versions | {"python": platform.python_version(), "sftron": __version__},
        "git": git_state(Path.cwd()),
        "data": setup.fingerprint,
        "device": device_name(device),
        "num_ranks": setup.ranks.world_size,
        "peak_tflops": setup.model.peak.tflops,
        "attention": describe_backends(setup.model.attention),
        "loss": setup.model.loss,
        "tokens_per_epoch": setup.data.projection.tokens_per_epoch,
    }
    return without_secrets({**config.model_dump(mode="json"), "run": facts})


def git_state(folder: Path) -> dict[str, Any] | None:
    """Returns the commit of the git repository that contains `folder`, and whether tracked files differ from it.

    Returns None without a repository. Does not run programs that the repository's configuration names.
    """
    command = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", "describe", "--always", "--dirty"]
    command += ["--abbrev=40", "--exclude=*"]  # the commit id, even if the commit has tags
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIME_FOR_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    commit = done.stdout.strip()
    return {"commit": commit.removesuffix("-dirty"), "dirty": commit.endswith("-dirty")}
