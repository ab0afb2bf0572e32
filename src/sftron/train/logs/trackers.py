"""Logging to TensorBoard, trackio and MLflow, each through its own package, and the choice of a run's loggers.

In this module, `import mlflow` and the like import the packages. They are optional and slow to import, so they are
imported where they are used.
"""

from __future__ import annotations

import os
import re
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sftron.config import Logging
from sftron.train.logs import console
from sftron.train.logs.loggers import Loggers, Numbers, config_and_facts, flat, known_id, new_id, store_id
from sftron.train.logs.wandb import make_wandb, require_wandb
from sftron.train.resume import Start
from sftron.train.run import Setup
from sftron.train.run_directory import RunDirectory

PACKAGES = {"trackio": ("trackio",), "tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""The packages that each logger imports, besides wandb."""
_PROJECT = "sftron"
_MLFLOW_BATCH, _MLFLOW_BATCH_S = 800, 5.0
"""MLflow takes 1,000 numbers at most in one call, and a call for many costs a quarter of what single ones cost."""
_MLFLOW_STATUS = {"completed": "FINISHED", "preempted": "KILLED", "failed": "FAILED", "diverged": "FAILED"}


class TensorBoardLogger:
    """Event files for TensorBoard. Those of an abandoned continuation are hidden by TensorBoard's own purge."""

    name = "tensorboard"
    replaces_steps = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def start(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1 if step else 0)
        console.write(
            f"tensorboard `tensorboard --logdir {self._folder.parent.parent}` shows this run and its neighbors"
        )

    def log_step(self, step: int, numbers: Numbers) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        # One event for all numbers costs a tenth of an event for each, as add_scalar would write.
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in numbers.items()]
        self._writer.file_writer.add_summary(Summary(value=values), step)

    def log_evaluation(self, step: int, numbers: Numbers, answers: Sequence[Mapping[str, Any]]) -> None:
        self.log_step(step, numbers)
        for number, answer in enumerate(answers):
            self._writer.add_text(f"eval/answers/{number}", f"{answer['prompt']}\n\n---\n\n{answer['answer']}", step)
        self._writer.flush()

    def finish(self, status: str) -> None:
        self._writer.close()


class TrackioLogger:
    """A run of trackio, which stores it as TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL configure.

    trackio recognizes a run by its name, so the name has the run's id: two run directories may have one name.
    """

    name = "trackio"
    replaces_steps = False

    def __init__(self, setup: Setup, folder: Path, **facts: Any) -> None:
        self._setup, self._folder, self._facts = setup, folder, facts
        self._run: Any = None
        self._warned: set[str] = set()

    def start(self, step: int) -> None:
        import trackio

        self._print_on_console()

        run_id = store_id(self.name, self._folder, known_id(self.name, self._folder) or new_id())
        name = f"{self._setup.config.general.run_name}-{run_id}"
        project = os.environ.get("TRACKIO_PROJECT") or self._setup.config.logging.wandb.project or _PROJECT
        config = config_and_facts(self._setup, **self._facts)
        no_machine_facts: dict[str, Any] = {"auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(project, name, resume="allow", config=config, embed=False, **no_machine_facts)
        console.write(f"trackio    run {name}; `trackio show --project {project}` shows it")

    def log_step(self, step: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=step)

    def log_evaluation(self, step: int, numbers: Numbers, answers: Sequence[Mapping[str, Any]]) -> None:
        self.log_step(step, numbers)

    def finish(self, status: str) -> None:
        self._run.finish()

    def _print_on_console(self) -> None:
        """Routes trackio's prints and warnings through the console, which logs them and draws its bar below them.

        The names are replaced in its modules, because the streams and filters of this process belong to all threads.
        """

        def write(*words: object, **_: Any) -> None:
            text = re.sub(r"\x1b\[[\d;]*m", "", " ".join(map(str, words))).strip("* \n")
            # Until the run is open, all but a URL of its dashboard is in the line of this logger.
            if text and (self._run is not None or "://" in text):
                console.write(f"trackio    {text}")

        def warn(message: object, *_: Any, **__: Any) -> None:
            if str(message) not in self._warned:
                console.write(f"trackio    warning: {message}")
            self._warned.add(str(message))

        for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "trackio"]:
            vars(module)["print"] = write
            if "warnings" in vars(module):
                vars(module)["warnings"] = SimpleNamespace(**{**vars(warnings), "warn": warn})


class MlflowLogger:
    """A run of MLflow, in mlflow.db of the run directory unless MLFLOW_TRACKING_URI names another place."""

    name = "mlflow"
    replaces_steps = False

    def __init__(self, setup: Setup, folder: Path, **facts: Any) -> None:
        self._setup, self._folder, self._facts = setup, folder, facts
        self._client: Any = None
        self._run_id = ""
        self._waiting: list[Any] = []
        self._sent_at = time.monotonic()

    def start(self, step: int) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        here = f"sqlite:///{(self._folder / 'mlflow.db').resolve()}"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or here
        client, options = MlflowClient(tracking_uri=uri), self._setup.config
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or options.logging.wandb.project or _PROJECT
        known, run_id = client.get_experiment_by_name(experiment), known_id(self.name, self._folder)
        if run_id is None:
            artifacts = str((self._folder / "mlflow").resolve()) if uri == here else None
            number = known.experiment_id if known else client.create_experiment(experiment, artifacts)
            run_id = client.create_run(number, run_name=options.general.run_name).info.run_id
            facts = config_and_facts(self._setup, **self._facts)
            params = [Param(_mlflow_name(key), str(value)[:5000]) for key, value in flat(facts, ".").items()]
            for first in range(0, len(params), 100):  # the most that one call may have
                client.log_batch(run_id, params=params[first : first + 100])
        else:
            client.update_run(run_id, "RUNNING")
        self._client, self._run_id = client, store_id(self.name, self._folder, run_id)
        console.write(f"mlflow     run {run_id} of experiment {experiment} in {uri}")

    def log_step(self, step: int, numbers: Numbers) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting += [Metric(_mlflow_name(name), float(value), now, step) for name, value in numbers.items()]
        if len(self._waiting) >= _MLFLOW_BATCH or time.monotonic() - self._sent_at > _MLFLOW_BATCH_S:
            self._send()

    def log_evaluation(self, step: int, numbers: Numbers, answers: Sequence[Mapping[str, Any]]) -> None:
        self.log_step(step, numbers)

    def finish(self, status: str) -> None:
        self._send()
        self._client.set_terminated(self._run_id, _MLFLOW_STATUS[status])

    def _send(self) -> None:
        self._sent_at = time.monotonic()
        while self._waiting:
            batch, self._waiting = self._waiting[:_MLFLOW_BATCH], self._waiting[_MLFLOW_BATCH:]
            self._client.log_batch(self._run_id, metrics=batch)


def _mlflow_name(name: str) -> str:
    """Returns the name as MLflow admits it: a path without empty parts and "..", of few characters."""
    parts = [part for part in re.sub(r"[^\w\-. :/]", "_", name).split("/") if part]
    return "/".join("_" if part in (".", "..") else part for part in parts)[-250:]


# --- Before the run ---


def require_loggers(options: Logging) -> None:
    """Raises ValueError if a package of logging.to is not installed, or wandb has no API key."""
    require_wandb(options.wandb_mode)
    for name in options.to:
        if missing := [package for package in PACKAGES.get(name, ()) if find_spec(package) is None]:
            raise ValueError(
                f"logging.to has {name}, but {', '.join(missing)} is not installed: pip install 'sftron[{name}]', or "
                f"remove {name} from logging.to"
            )


def make_loggers(setup: Setup, directory: RunDirectory, start: Start | None, *, num_parameters: int) -> Loggers | None:
    """Returns the loggers of the run; None if there are none, and on all ranks but the main one."""
    options, folder = setup.config.logging, directory.folder
    if not setup.ranks.is_main:
        return None
    facts = {"parameters": num_parameters, "started_from": str(start.folder) if start else None}
    loggers: list[Any] = []
    if options.wandb_mode != "disabled":
        loggers.append(make_wandb(setup, folder, sample_page=directory.samples, **facts))
    if "trackio" in options.to:
        loggers.append(TrackioLogger(setup, folder, **facts))
    if "tensorboard" in options.to:
        loggers.append(TensorBoardLogger(folder / "tensorboard"))
    if "mlflow" in options.to:
        loggers.append(MlflowLogger(setup, folder, **facts))
    return Loggers(loggers) if loggers else None
