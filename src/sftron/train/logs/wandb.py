"""The run of Weights & Biases that a training run is logged to.

In this module, `import wandb` imports the package. It is optional and slow to import, so it is imported where it is
used.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sftron.train.logs import console
from sftron.train.logs.loggers import Answers, Numbers, in_words, known_id, new_id, store_id
from sftron.train.logs.trackers import Tracker
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


class Wandb(Tracker):
    """The wandb run of a training run.

    If the server does not answer at the start, the run is logged offline. If it does not answer at the end, `finish`
    waits for a minute. Charts are drawn over the run's own step: wandb drops one that is not after its last one.

    Args:
        mode: online or offline.
        sample_page: The HTML page with the first pack, which is logged at the start.
    """

    def __init__(
        self, setup: Setup, folder: Path, facts: Callable[[], dict[str, Any]], *, mode: str, sample_page: Path
    ) -> None:
        super().__init__("wandb", setup, folder, facts)
        # wandb reads these at import. Its error reports contain paths, and a batch job cannot answer prompts.
        os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
        os.environ.setdefault("WANDB_DATA_DIR", str(folder / "wandb"))  # for tables; the default is in HOME
        self._mode, self._sample_page = mode, sample_page
        self._last_steps: deque[Numbers] = deque(maxlen=_NUM_FINAL_STEPS)

    def start(self, step: int) -> None:
        import wandb

        options = {**self._run_options(), "settings": wandb.Settings(**_SETTINGS)}
        try:
            self._open(**options, mode=self._mode)
        except Exception as error:
            if self._mode != "online":
                raise
            wandb.teardown(exit_code=1)  # releases the run id for the second attempt
            self._open(**options, mode="offline")
            console.write(f"wandb      has no server ({in_words(error)}), and the run is logged offline")
        run = self._tracker.tracker
        console.write(f"wandb      {run.url or f'offline; `wandb sync {Path(run.dir).parent}` sends it'}")
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        if self._options.sample and step == 0:
            page = self._sample_page.read_text(encoding="utf-8")
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
            project = options.project or arguments["project"]
            arguments |= {"project": project, "entity": options.entity, "id": wandb_id(self._folder)}
        return {name: value for name, value in arguments.items() if value is not None}


def wandb_id(folder: Path) -> str:
    """Returns the wandb run id of a run directory and stores it in wandb.json; WANDB_RUN_ID takes precedence."""
    return store_id("wandb", folder, os.environ.get("WANDB_RUN_ID") or known_id("wandb", folder) or new_id())


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
