"""The loggers of `logging.to`: accelerate's trackers, extended to continue the run of a run directory.

accelerate and the packages of the services are optional and slow to import, so they are imported where they are used.
"""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sftron.train.logs import console
from sftron.train.logs.loggers import Answers, Numbers, flat, in_words, kept_facts, run_id
from sftron.train.run import Setup
from sftron.train.run_directory import RunDirectory

_PROJECT = "sftron"
_NUM_FINAL_STEPS = 50
_MLFLOW_STATUS = {"completed": "FINISHED", "preempted": "KILLED"} | dict.fromkeys(
    ("failed", "diverged", "forgot"), "FAILED"
)

# By default, wandb collects host name, user, command line, packages, git remote, code, console output and GPU use.
_WANDB_SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("silent", "disable_code", "disable_git", "label_disable", "finish_timeout_raises"), True),
    **dict.fromkeys(("x_disable_meta", "x_disable_stats", "x_disable_machine_info"), True),
    **dict.fromkeys(("save_code", "x_save_requirements"), False),
    **dict.fromkeys(("host", "program"), ""),
    **dict.fromkeys(("init_timeout", "finish_timeout"), 60),
    "console": "off",
}


class Tracker:
    """A run of a service, logged by accelerate's tracker of that name. Each start begins a new run there.

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
    """Event files for TensorBoard. Its own purge hides the events of an abandoned continuation."""

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
        name = f"{self._run_name}-{run_id(self.name, self._folder)}"
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
        known = kept_facts(self.name, self._folder).get("id")
        self._open(run_id=known, run_name=self._run_name, logging_dir=artifacts)
        id_there = run_id(self.name, self._folder, self._tracker.tracker.info.run_id)
        if known is None:
            self._tracker.store_init_configuration(
                {_mlflow_name(key): str(value)[:5000] for key, value in self._flat_facts().items()}
            )
        console.write(f"mlflow     run {id_there} of experiment {self._tracker.experiment_name} in {uri}")

    def log(self, step: int, numbers: Numbers, answers: Answers | None = None) -> None:
        # Not synchronous: MLflow then sends many at once, which costs a quarter.
        named = {_mlflow_name(name): number for name, number in numbers.items()}
        self._tracker.log(named, step=step, synchronous=False)

    def finish(self, status: str) -> None:
        import mlflow

        mlflow.flush_async_logging()
        mlflow.end_run(_MLFLOW_STATUS[status])


def _mlflow_name(name: str) -> str:
    """Returns the name as MLflow accepts it: a path without empty parts or "..", in a few allowed characters."""
    parts = [part for part in re.sub(r"[^\w\-. :/]", "_", name).split("/") if part]
    return "/".join("_" if part in (".", "..") else part for part in parts)[-250:]


class Wandb(Tracker):
    """The wandb run of a training run.

    If the server does not answer at the start, the run is logged offline. If it does not answer at the end, `finish`
    waits for a minute. Charts use the run's own step, because wandb drops a point whose step is not after the last one.
    """

    def __init__(self, name: str, setup: Setup, folder: Path, facts: Callable[[], dict[str, Any]]) -> None:
        super().__init__(name, setup, folder, facts)
        # wandb reads these at import. Its error reports contain paths, and a batch job cannot answer prompts.
        os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
        os.environ.setdefault("WANDB_DATA_DIR", str(folder / "wandb"))  # for tables; the default is in HOME
        self._mode = setup.config.logging.wandb_mode
        self._last_steps: deque[Numbers] = deque(maxlen=_NUM_FINAL_STEPS)

    def start(self, step: int) -> None:
        import wandb

        options = {**self._run_options(), "settings": wandb.Settings(**_WANDB_SETTINGS)}
        try:
            self._open(**options, mode=self._mode)
        except Exception as error:
            if self._mode != "online":
                raise
            wandb.teardown(exit_code=1)  # releases the run id for the second attempt
            self._open(**options, mode="offline")
            console.write(f"wandb      cannot reach its server ({in_words(error)}), so it logs the run offline")
        run = self._tracker.tracker
        console.write(f"wandb      {run.url or f'offline; `wandb sync {Path(run.dir).parent}` sends it'}")
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        if self._options.sample and step == 0:
            page = RunDirectory(self._folder).samples.read_text(encoding="utf-8")
            self._tracker.log({"step": 0, "sample_page": wandb.Html(page, inject=False)})

    def log(self, step: int, numbers: Numbers, answers: Answers | None = None) -> None:
        """Logs the numbers, and the answers of an evaluation as a table; logging the table waits for the server."""
        if self._tracker is None:  # the failure to start is reported
            return
        if answers is None:
            self._last_steps.append(numbers)
        self._tracker.log({"step": step, **numbers})
        if answers:
            rows = [list(answer.values()) for answer in answers]
            self._tracker.log_table("eval/answers", list(answers[0]), rows)

    def finish(self, status: str) -> None:
        import wandb

        exit_code = int(status != "completed")
        try:
            if self._tracker is not None:
                run = self._tracker.tracker
                run.summary.update({**final_figures(self._last_steps), "final/status": status})
                if status == "preempted":
                    run.mark_preempting()  # so that wandb shows no failure, and a sweep restarts the run
                run.finish(exit_code=exit_code)
        finally:
            # wandb's service process completes the file of an offline run only when it is shut down. wandb shuts it
            # down with an atexit handler, which does not run in a multiprocessing process.
            wandb.teardown(exit_code=exit_code)

    def _run_options(self) -> dict[str, Any]:
        """Returns the arguments of wandb.init. Unset ones are omitted, so that WANDB_NOTES and the like apply."""
        options = self._options
        facts = self._facts()
        facts["run"]["versions"]["wandb"] = version("wandb")
        arguments: dict[str, Any] = {
            **options.model_dump(include={"group", "job_type", "notes"}),
            "project": os.environ.get("WANDB_PROJECT"),
            "dir": str(self._folder),
            "resume": "allow",
            "name": options.name or os.environ.get("WANDB_NAME") or self._run_name,
            "tags": options.tags or None,
            "config": facts,
        }
        if not os.environ.get("WANDB_SWEEP_ID"):  # the sweep agent sets project, entity and id in the environment
            project, given = options.project or arguments["project"], os.environ.get("WANDB_RUN_ID")
            arguments |= {"project": project, "entity": options.entity, "id": run_id(self.name, self._folder, given)}
        return {name: value for name, value in arguments.items() if value is not None}


def final_figures(steps: Sequence[Numbers]) -> dict[str, float]:
    """Returns the speed and the mean loss per trained token over these steps, for run tables and sweeps."""
    if not steps:
        return {}
    figures = {"final/tokens_per_second": sum(s["tokens"] for s in steps) / sum(s["step_seconds"] for s in steps)}
    trained = [(step["loss"], step["trained_tokens"]) for step in steps if "loss" in step]
    if num_trained := sum(tokens for _, tokens in trained):
        figures["final/loss"] = sum(loss * tokens for loss, tokens in trained if tokens) / num_trained
    return figures


def has_key() -> bool:
    """Returns whether an API key exists where wandb looks for it, without importing wandb, which takes a second."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb") / "settings"
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc").expanduser()
    server = urlsplit(os.environ.get("WANDB_BASE_URL", "")).netloc or "wandb.ai"
    for path, signs in ((settings, ("api_key", "base_url")), (netrc, ("wandb.ai", "coreweave.com", server))):
        with suppress(OSError, UnicodeError):
            if any(sign in path.read_text() for sign in signs):
                return True
    return False
