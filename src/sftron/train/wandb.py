"""Logging to Weights & Biases, which receives a copy of the metrics. It can delay a run, but a failure never ends it.

In this module, `import wandb` imports the package. It is optional and slow to import, so it is imported where it is
used.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from sftron import __version__
from sftron.config import Wandb
from sftron.errors import without_secrets
from sftron.train import console
from sftron.train.resume import Start
from sftron.train.run_directory import RunDirectory
from sftron.train.setup import Setup

ID_FILE = "wandb.json"
_TIME_FOR_GIT_S = 5.0
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


class WandbRun:
    """The wandb run of a training run. The first failed call is reported, and no failure ends the training run.

    If the server does not answer at the start, the run is logged offline. If it does not answer at the end, `finish`
    waits for a minute.

    Args:
        prepare: Returns the arguments of wandb.init.
        sample_page: The HTML page with the first pack, which is logged at the start.
    """

    def __init__(self, prepare: Callable[[], dict[str, Any]], sample_page: Path | None = None) -> None:
        self._prepare, self._sample_page = prepare, sample_page
        self._wandb: Any = None
        self._run: Any = None
        self._has_failed = False
        self._last_steps: deque[Mapping[str, Any]] = deque(maxlen=_NUM_FINAL_STEPS)

    def log_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs a line of metrics.jsonl."""
        self._last_steps.append(metrics)
        self._log(step, lambda: dict(flat_numbers(metrics)))

    def log_evaluation(self, step: int, metrics: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> None:
        """Logs the numbers of an evaluation, and its answers as a table; logging the table waits for the server."""
        self._log(step, lambda: dict(flat_numbers(metrics)))
        if answers:
            rows = [list(answer.values()) for answer in answers]
            self._log(step, lambda: {"eval/answers": self._wandb.Table(columns=list(answers[0]), data=rows)})

    def _log(self, step: int, values: Callable[[], Mapping[str, Any]]) -> None:
        if self._run is not None:
            with self._failure_reported():
                self._run.log({"step": step, **values()})

    def start(self) -> None:
        with self._failure_reported():
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
                console.say(f"wandb      has no server ({_in_words(error)}), and the run is logged offline")
            console.say(f"wandb      {run.url or f'offline; `wandb sync {Path(run.dir).parent}` sends it'}")
            # wandb's own step must increase, so wandb would drop a step that a resumed run trains again.
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            self._run = run
        if page := self._sample_page:
            self._log(0, lambda: {"sample_page": self._wandb.Html(page.read_text(encoding="utf-8"), inject=False)})

    def finish(self, status: str) -> None:
        """Ends the wandb run. `status` is the status in result.json."""
        exit_code = int(status != "completed")
        if self._run is not None:
            with self._failure_reported():
                self._run.summary.update({**final_figures(self._last_steps), "final/status": status})
                if status == "preempted":
                    self._run.mark_preempting()  # so that wandb shows no failure, and a sweep restarts the run
                self._run.finish(exit_code=exit_code)
        # wandb's service process completes the file of an offline run only when it is shut down. wandb shuts it down
        # with an atexit handler, which does not run in a multiprocessing process.
        if self._wandb is not None:
            with self._failure_reported():
                self._wandb.teardown(exit_code=exit_code)

    @contextmanager
    def _failure_reported(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # wandb sometimes raises SystemExit
            if not self._has_failed:
                console.say(f"wandb      failed: {_in_words(error)}. metrics.jsonl has every step")
            self._has_failed = True


def _in_words(error: BaseException) -> str:
    # The advice that wandb appends refers to a call in this file, not in the user's code.
    return f"{type(error).__name__}: {' '.join(str(error).split()).partition(' Consider increasing')[0].rstrip('.')}"


def flat_numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """Yields every number with a flat name such as "datasets/x.jsonl/tokens", because wandb plots only numbers."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{key}", value


def final_figures(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the speed and the mean loss per trained token over these steps, for run tables and sweeps."""
    if not steps:
        return {}
    figures = {"final/tokens_per_second": sum(s["tokens"] for s in steps) / sum(s["step_seconds"] for s in steps)}
    trained = [(step["loss"], step["trained_tokens"]) for step in steps if step["loss"] is not None]
    if num_trained := sum(tokens for _, tokens in trained):
        figures["final/loss"] = sum(loss * tokens for loss, tokens in trained if tokens) / num_trained
    return figures


# --- Before the run ---


def require_wandb(options: Wandb) -> None:
    """Raises ValueError if logging to wandb is configured but the package or an API key is missing."""
    if options.mode == "disabled":
        return
    if find_spec("wandb") is None:
        raise ValueError(
            f"logging.wandb.mode is {options.mode} but the package wandb is not installed: "
            "pip install 'sftron[wandb]', or set it to disabled"
        )
    if options.mode == "online" and not _has_key():
        raise ValueError(
            "logging.wandb.mode is online but there is no API key for it: run `wandb login`, or set WANDB_API_KEY, or "
            "set the mode to offline and run `wandb sync` later"
        )
    if (other := os.environ.get("WANDB_MODE")) and other != options.mode:
        console.say(f"wandb      mode {options.mode}, as configured; WANDB_MODE={other} is not read")


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


def make_wandb(
    setup: Setup, directory: RunDirectory, start: Start | None, *, num_parameters: int, step: int
) -> WandbRun | None:
    """Returns the wandb run; None if wandb is disabled, and on all ranks but the main one.

    Args:
        step: The last finished step; the page with the first pack is logged only if it is 0.
    """
    options = setup.config.logging.wandb
    if options.mode == "disabled" or not setup.ranks.is_main:
        return None
    # wandb reads these at import. Its error reports contain paths, and a batch job cannot answer prompts.
    os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    os.environ.setdefault("WANDB_DATA_DIR", str(directory.folder / "wandb"))  # for tables; the default is in HOME
    origin = str(start.folder) if start else None
    return WandbRun(
        lambda: _init_options(setup, directory.folder, parameters=num_parameters, started_from=origin),
        directory.samples if options.sample and step == 0 else None,
    )


def _init_options(setup: Setup, folder: Path, **facts: Any) -> dict[str, Any]:
    """Returns the arguments of wandb.init. Unset options are omitted, so WANDB_NOTES and similar variables apply.

    Args:
        facts: Facts besides the configuration that influence the results of the run, in addition to those of `setup`.
    """
    config, options, device = setup.config, setup.config.logging.wandb, setup.ranks.device
    versions = {name: version(name) for name in ("torch", "transformers", "tokenizers", "datasets", "wandb")}
    facts |= {
        "versions": {**versions, "python": platform.python_version(), "sftron": __version__},
        "git": git_state(Path.cwd()),
        "data": setup.fingerprint,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "num_ranks": setup.ranks.dp_world_size,
        "peak_tflops": setup.model.peak.tflops,
        "attention": setup.model.attention,
        "loss": setup.model.loss,
        "tokens_per_epoch": setup.data.projection.tokens_per_epoch,
    }
    arguments: dict[str, Any] = {
        **options.model_dump(include={"mode", "group", "job_type", "notes"}),
        "dir": str(folder),
        "resume": "allow",
        "name": options.name or os.environ.get("WANDB_NAME") or config.general.run_name,
        "tags": options.tags or None,
        "config": without_secrets({**config.model_dump(mode="json"), "run": facts}),
    }
    if not os.environ.get("WANDB_SWEEP_ID"):  # the sweep agent sets project, entity and id in the environment
        arguments |= {"project": options.project, "entity": options.entity, "id": wandb_id(folder)}
    return {name: value for name, value in arguments.items() if value is not None}


def wandb_id(folder: Path) -> str:
    """Returns the wandb run id of a run directory and stores it in wandb.json; WANDB_RUN_ID takes precedence.

    A copy of a run directory gets a new id as long as the original directory exists.
    """
    path, here = folder / ID_FILE, str(folder.resolve())
    known = json.loads(path.read_text()) if path.exists() else {"id": secrets.token_hex(6), "folder": here}
    if known["folder"] != here and (Path(known["folder"]) / ID_FILE).exists():
        known["id"] = secrets.token_hex(6)
    run_id = os.environ.get("WANDB_RUN_ID") or known["id"]
    path.write_text(json.dumps({"id": run_id, "folder": here}) + "\n")
    return run_id


def git_state(folder: Path) -> dict[str, Any] | None:
    """Returns the commit of the git repository that contains `folder`, and whether tracked files differ from it.

    Returns None if there is no repository. Programs that its own configuration names are not run.
    """
    command = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", "describe", "--always", "--dirty"]
    command += ["--abbrev=40", "--exclude=*"]  # the commit id, even if the commit has tags
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIME_FOR_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    commit = done.stdout.strip()
    return {"commit": commit.removesuffix("-dirty"), "dirty": commit.endswith("-dirty")}
