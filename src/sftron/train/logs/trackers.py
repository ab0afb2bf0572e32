"""The loggers of `logging.to`: the trackers of accelerate, made to go on with the run of a run directory.

accelerate and the packages of the services are optional and slow to import, so they are imported where they are used.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sftron.train.logs import console
from sftron.train.logs.loggers import Answers, Numbers, flat, known_id, new_id, store_id
from sftron.train.run import Setup

_PROJECT = "sftron"
_MLFLOW_STATUS = {"completed": "FINISHED", "preempted": "KILLED", "failed": "FAILED", "diverged": "FAILED"}


class Tracker:
    """A run of a service, by accelerate's tracker of that name. Each start begins a new run there.

    Args:
        facts: Returns the configuration and the facts of the run; see `config_and_facts`.
    """

    replaces_steps = True

    def __init__(self, name: str, setup: Setup, folder: Path, facts: Callable[[], dict[str, Any]]) -> None:
        self.name = name
        self._options, self._run_name, self._folder = setup.config.logging.wandb, setup.config.general.run_name, folder
        self._facts = facts
        self._tracker: Any = None

    def start(self, step: int) -> None:
        self._open()
        self._tracker.store_init_configuration(self._flat_facts())

    def log(self, step: int, numbers: Numbers, answers: Answers | None = None) -> None:
        self._tracker.log(dict(numbers), step=step)

    def finish(self, status: str) -> None:
        self._tracker.finish()

    def _open(self, project: str | None = None, **options: Any) -> None:
        """Starts accelerate's tracker with these arguments of the service."""
        from accelerate import tracking

        # accelerate's own logger, and its choice of a rank, would open a process group; only the main rank is here.
        tracking.logger = logging.getLogger(tracking.__name__)  # pyright: ignore[reportAttributeAccessIssue]
        kind = tracking.LOGGER_TYPE_TO_CLASS[self.name]
        if kind.requires_logging_directory:
            options.setdefault("logging_dir", str(self._folder))
        tracker: Any = kind(project or self._options.project or _PROJECT, **options)
        tracker.main_process_only = False
        tracker.start()
        self._tracker = tracker

    def _flat_facts(self) -> dict[str, Any]:
        facts = flat(self._facts(), ".")
        return {name: value if type(value) in (bool, int, float) else str(value) for name, value in facts.items()}


class TensorBoard(Tracker):
    """Event files for TensorBoard. Those of an abandoned continuation are hidden by TensorBoard's own purge."""

    def start(self, step: int) -> None:
        self._open("tensorboard", purge_step=step + 1 if step else 0)
        runs = self._folder.parent
        console.write(f"tensorboard `tensorboard --logdir {runs}` shows this run and its neighbors")

    def log(self, step: int, numbers: Numbers, answers: Answers | None = None) -> None:
        texts = [f"{each['prompt']}\n\n---\n\n{each['answer']}" for each in answers or ()]
        self._tracker.log({**numbers, **{f"eval/answers/{n}": text for n, text in enumerate(texts)}}, step=step)


class Trackio(Tracker):
    """A run of trackio, which stores it as TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL configure.

    trackio recognizes a run by its name, so the name has the run's id: two run directories may have one name.
    """

    replaces_steps = False

    def start(self, step: int) -> None:
        project = os.environ.get("TRACKIO_PROJECT") or self._options.project or _PROJECT
        run_id = store_id(self.name, self._folder, known_id(self.name, self._folder) or new_id())
        name = f"{self._run_name}-{run_id}"
        no_machine_facts = {"auto_log_gpu": False, "auto_log_cpu": False}
        self._open(project, name=name, resume="allow", config=self._facts(), embed=False, **no_machine_facts)
        console.write(f"trackio    run {name}; `trackio show --project {project}` shows it")


class Mlflow(Tracker):
    """A run of MLflow, in mlflow.db of the run directory unless MLFLOW_TRACKING_URI names another place."""

    replaces_steps = False

    def start(self, step: int) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        import mlflow

        here = f"sqlite:///{(self._folder / 'mlflow.db').resolve()}"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or here
        mlflow.set_tracking_uri(uri)
        artifacts = str((self._folder / "mlflow").resolve()) if uri == here else None
        run_id = known_id(self.name, self._folder)
        self._open(run_id=run_id, run_name=self._run_name, logging_dir=artifacts)
        if run_id is None:
            run_id = store_id(self.name, self._folder, self._tracker.tracker.info.run_id)
            self._tracker.store_init_configuration(
                {_mlflow_name(key): str(value)[:5000] for key, value in self._flat_facts().items()}
            )
        console.write(f"mlflow     run {run_id} of experiment {self._tracker.experiment_name} in {uri}")

    def log(self, step: int, numbers: Numbers, answers: Answers | None = None) -> None:
        # Not synchronous: MLflow then sends many at once, which costs a quarter.
        named = {_mlflow_name(name): number for name, number in numbers.items()}
        self._tracker.log(named, step=step, synchronous=False)

    def finish(self, status: str) -> None:
        import mlflow

        mlflow.flush_async_logging()
        mlflow.end_run(_MLFLOW_STATUS[status])


def _mlflow_name(name: str) -> str:
    """Returns the name as MLflow admits it: a path without empty parts and "..", of few characters."""
    parts = [part for part in re.sub(r"[^\w\-. :/]", "_", name).split("/") if part]
    return "/".join("_" if part in (".", "..") else part for part in parts)[-250:]
