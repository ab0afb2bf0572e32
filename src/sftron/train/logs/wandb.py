"""Logging to Weights & Biases, which receives a copy of the metrics.

In this module, `import wandb` imports the package. It is optional and slow to import, so it is imported where it is
used.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sftron.train.logs import console
from sftron.train.logs.loggers import Numbers, config_and_facts, in_words, known_id, new_id, store_id
from sftron.train.run import Setup

_NUM_FINAL_STEPS = 50
# By default, wandb collects host name, user, command line, packages, git remote, code, console output and GPU use.
_SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("silent", "disable_code", "disable_git", "label_disable", "finish_timeout_raises"), True),
    **dict.fromkeys(("x_disable_meta", "x_disable_stats", "x_disable_machine_info"), True),
    **dict.fromkeys(("save_code", "x_save_requirements"), False),
    **dict.fromkeys(("host", "program"), ""),
    **dict.fromkeys(("init_timeout", "finish_timeout"), 60),
    "console": "off",
}


class WandbLogger:
    """The wandb run of a training run.

    If the server does not answer at the start, the run is logged offline. If it does not answer at the end, `finish`
    waits for a minute.

    Args:
        prepare: Returns the arguments of wandb.init.
        sample_page: The HTML page with the first pack, which is logged at the start.
    """

    name = "wandb"
    replaces_steps = True  # charts are drawn over the run's own step

    def __init__(self, prepare: Callable[[], dict[str, Any]], sample_page: Path | None = None) -> None:
        self._prepare, self._sample_page = prepare, sample_page
        self._wandb: Any = None
        self._run: Any = None
        self._last_steps: deque[Numbers] = deque(maxlen=_NUM_FINAL_STEPS)

    def log_step(self, step: int, numbers: Numbers) -> None:
        self._last_steps.append(numbers)
        self._log(step, lambda: numbers)

    def log_evaluation(self, step: int, numbers: Numbers, answers: Sequence[Mapping[str, Any]]) -> None:
        """Logs the numbers of an evaluation, and its answers as a table; logging the table waits for the server."""
        self._log(step, lambda: numbers)
        if answers:
            rows = [list(answer.values()) for answer in answers]
            self._log(step, lambda: {"eval/answers": self._wandb.Table(columns=list(answers[0]), data=rows)})

    def _log(self, step: int, values: Callable[[], Mapping[str, Any]]) -> None:
        if self._run is not None:
            self._run.log({"step": step, **values()})

    def start(self, step: int) -> None:
        import wandb

        self._wandb = wandb
        options, settings = self._prepare(), wandb.Settings(**_SETTINGS)
        try:
            run = wandb.init(**options, settings=settings)
        except Exception as error:
            if options["mode"] != "online":
                raise
            wandb.teardown(exit_code=1)  # releases the run id for the second attempt
            run = wandb.init(**{**options, "mode": "offline"}, settings=settings)
            console.write(f"wandb      has no server ({in_words(error)}), and the run is logged offline")
        console.write(f"wandb      {run.url or f'offline; `wandb sync {Path(run.dir).parent}` sends it'}")
        # wandb's own step must increase, so wandb would drop a step that a resumed run trains again.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self._run = run
        if (page := self._sample_page) and step == 0:
            self._log(0, lambda: {"sample_page": self._wandb.Html(page.read_text(encoding="utf-8"), inject=False)})

    def finish(self, status: str) -> None:
        exit_code = int(status != "completed")
        try:
            if self._run is not None:
                self._run.summary.update({**final_figures(self._last_steps), "final/status": status})
                if status == "preempted":
                    self._run.mark_preempting()  # so that wandb shows no failure, and a sweep restarts the run
                self._run.finish(exit_code=exit_code)
        finally:
            # wandb's service process completes the file of an offline run only when it is shut down. wandb shuts it
            # down with an atexit handler, which does not run in a multiprocessing process.
            if self._wandb is not None:
                self._wandb.teardown(exit_code=exit_code)


def final_figures(steps: Sequence[Numbers]) -> dict[str, float]:
    """Returns the speed and the mean loss per trained token over these steps, for run tables and sweeps."""
    if not steps:
        return {}
    figures = {"final/tokens_per_second": sum(s["tokens"] for s in steps) / sum(s["step_seconds"] for s in steps)}
    trained = [(step["loss"], step["trained_tokens"]) for step in steps if "loss" in step]
    if num_trained := sum(tokens for _, tokens in trained):
        figures["final/loss"] = sum(loss * tokens for loss, tokens in trained if tokens) / num_trained
    return figures


# --- Before the run ---


def require_wandb(mode: str) -> None:
    """Raises ValueError if the run is logged to wandb, but the package or an API key is missing.

    Args:
        mode: The value of `Logging.wandb_mode`.
    """
    if mode == "disabled":
        return
    if find_spec("wandb") is None:
        raise ValueError(
            f"logging.wandb.mode is {mode} but the package wandb is not installed: "
            "pip install 'sftron[wandb]', or set it to disabled"
        )
    if mode == "online" and not _has_key():
        raise ValueError(
            "logging.wandb.mode is online but there is no API key for it: run `wandb login`, or set WANDB_API_KEY, or "
            "set the mode to offline and run `wandb sync` later"
        )
    if (other := os.environ.get("WANDB_MODE")) and other != mode:
        console.write(f"wandb      mode {mode}, as configured; WANDB_MODE={other} is not read")


def _has_key() -> bool:
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


def make_wandb(setup: Setup, folder: Path, *, sample_page: Path, **facts: Any) -> WandbLogger:
    """Returns the logger to wandb; `facts` are those of `config_and_facts`."""
    # wandb reads these at import. Its error reports contain paths, and a batch job cannot answer prompts.
    os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    os.environ.setdefault("WANDB_DATA_DIR", str(folder / "wandb"))  # for tables; the default is in HOME
    is_sent = setup.config.logging.wandb.sample
    return WandbLogger(lambda: _init_options(setup, folder, **facts), sample_page if is_sent else None)


def _init_options(setup: Setup, folder: Path, **facts: Any) -> dict[str, Any]:
    """Returns the arguments of wandb.init. Unset options are omitted, so WANDB_NOTES and similar variables apply."""
    config, options = setup.config, setup.config.logging.wandb
    arguments: dict[str, Any] = {
        **options.model_dump(include={"group", "job_type", "notes"}),
        "mode": config.logging.wandb_mode,
        "dir": str(folder),
        "resume": "allow",
        "name": options.name or os.environ.get("WANDB_NAME") or config.general.run_name,
        "tags": options.tags or None,
        "config": config_and_facts(setup, versions={"wandb": version("wandb")}, **facts),
    }
    if not os.environ.get("WANDB_SWEEP_ID"):  # the sweep agent sets project, entity and id in the environment
        arguments |= {"project": options.project, "entity": options.entity, "id": wandb_id(folder)}
    return {name: value for name, value in arguments.items() if value is not None}


def wandb_id(folder: Path) -> str:
    """Returns the wandb run id of a run directory and stores it in wandb.json; WANDB_RUN_ID takes precedence."""
    return store_id("wandb", folder, os.environ.get("WANDB_RUN_ID") or known_id("wandb", folder) or new_id())
