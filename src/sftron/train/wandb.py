"""Weights & Biases: a copy of the run's numbers. It can delay the start and the end of a run, and it can end neither.

`import wandb` in here is the package, and it is imported where it is used.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import secrets
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from sftron import __version__
from sftron.config import Wandb
from sftron.config.secrets import redacted, without_secrets
from sftron.data.types import Pack
from sftron.report.inspection import Inspection
from sftron.report.tokens import Decode, key_text, role_name, shown_conversations
from sftron.train import console
from sftron.train.metrics import STEP, Table
from sftron.train.plan import RunPlan
from sftron.train.resume import Start
from sftron.train.run_directory import RunDirectory
from sftron.visible_text import visible_text

ID_FILE = "wandb.json"
_TIME_FOR_GIT_S = 5.0
_NUM_FINAL_STEPS = 50
_MAX_SAMPLE_ROWS, _MAX_SAMPLE_CHARACTERS = 500, 10_000
_SAMPLE_COLUMNS = ("conversation", "role", "text", "trained", "tokens")
_PACKAGES = ("transformers", "tokenizers", "datasets", "wandb")

_SETTINGS: dict[str, Any] = {
    "silent": True,
    "init_timeout": 60,
    "finish_timeout": 60,
    "finish_timeout_raises": True,
    # By default wandb collects host name, user, command line, packages, git remote, code, console, and GPU use.
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


def require_wandb(options: Wandb) -> None:
    """Raises ValueError where logging to wandb is configured, and the package or an API key is missing."""
    if options.mode == "disabled":
        return
    if importlib.util.find_spec("wandb") is None:
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
    """Looks for a key where wandb does, without the second that importing wandb takes."""
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


class WandbRun:
    """A `Tracker` that logs to wandb. After the first call that fails it makes no other: metrics.jsonl has every step.

    A server that does not answer at the start makes it an offline run. One that does not answer at the end is waited
    for a minute.
    """

    def __init__(self, prepare: Callable[[], dict[str, Any]], sample: Mapping[str, Any] | None = None) -> None:
        """`prepare` returns the arguments of wandb.init; `sample` is logged as step 0."""
        self._prepare, self._sample = prepare, sample
        self._wandb: Any = None
        self._run: Any = None
        self._folder: Path | None = None
        self._has_failed = self._has_failed_at_media = False
        self._last_steps: deque[Mapping[str, Any]] = deque(maxlen=_NUM_FINAL_STEPS)

    def start(self) -> None:
        self._attempt(self._start)

    def log(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Logs numbers, a `Table`, or the HTML page at a Path."""
        if "step_seconds" in numbers:
            self._last_steps.append(numbers)
        self._attempt(lambda: self._log(step, numbers))

    def finish(self, status: str) -> None:
        self._attempt(lambda: self._finish(status))

    def _attempt(self, call: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            call()
        except (Exception, SystemExit) as error:  # wandb has raised SystemExit itself
            self._has_failed = True
            rest = f", and `wandb sync {self._folder}` may send the rest" if self._folder else ""
            console.say(f"wandb      stopped: {_in_words(error)}. metrics.jsonl has every step{rest}")
            with suppress(Exception, SystemExit):
                self._wandb.teardown(exit_code=1)  # else the end of the process would wait for it

    def _start(self) -> None:
        import wandb

        self._wandb = wandb
        options, settings = self._prepare(), wandb.Settings(**_SETTINGS)
        try:
            self._run = wandb.init(**options, settings=settings)
        except Exception as error:
            if options["mode"] != "online":
                raise
            wandb.teardown(exit_code=1)  # the id is in use as long as the first attempt lives
            self._run = wandb.init(**{**options, "mode": "offline"}, settings=settings)
            console.say(f"wandb      has no server ({_in_words(error)}), and the run is logged offline")
        self._folder = Path(self._run.dir).parent
        console.say(f"wandb      {self._run.url or f'offline; `wandb sync {self._folder}` sends it'}")
        # wandb's own step only grows, and drops a step that a resumed run trains again.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        if self._sample:
            self.log(0, self._sample)

    def _log(self, step: int, numbers: Mapping[str, Any]) -> None:
        media = {key: value for key, value in numbers.items() if isinstance(value, (Table, Path))}
        if len(media) < len(numbers):
            self._run.log({STEP: step} | {key: value for key, value in numbers.items() if key not in media})
        if media and not self._has_failed_at_media:
            try:  # a table, unlike a number, waits for the server: half a minute at most
                self._run.log({STEP: step} | {key: self._media(value) for key, value in media.items()})
            except Exception as error:
                self._has_failed_at_media = True
                console.say(f"wandb      gets no more tables ({_in_words(error)}); numbers are still logged")

    def _finish(self, status: str) -> None:
        if self._run is None:
            return
        self._run.summary.update({**final_figures(self._last_steps), "final/status": status})
        if status == "preempted":
            self._run.mark_preempting()  # so that wandb shows no failure, and a sweep starts the run again
        self._run.finish(exit_code=0 if status == "completed" else 1)

    def _media(self, value: Table | Path) -> Any:
        if isinstance(value, Table):
            return self._wandb.Table(columns=list(value.columns), data=[list(row) for row in value.rows])
        return self._wandb.Html(value.read_text(encoding="utf-8"), inject=False)


def _in_words(error: BaseException) -> str:
    # wandb adds advice on a call that is not the user's.
    return f"{type(error).__name__}: {' '.join(str(error).split()).partition(' Consider increasing')[0].rstrip('.')}"


def final_figures(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the speed and the mean loss of a trained token over these steps, for tables of runs and for sweeps."""
    if not steps:
        return {}
    seconds = sum(step["step_seconds"] for step in steps)
    figures = {"final/tokens_per_second": sum(step["tokens"] for step in steps) / seconds}
    losses = [(step["loss"], step["trained_tokens"]) for step in steps if "loss" in step]
    if num_trained := sum(tokens for _, tokens in losses):
        figures["final/loss"] = sum(loss * tokens for loss, tokens in losses if tokens) / num_trained
    return figures


def make_wandb(
    plan: RunPlan,
    directory: RunDirectory,
    start: Start | None,
    *,
    num_parameters: int,
    inspection: Inspection | None,
    step: int,
) -> WandbRun | None:
    """Returns what logs the run to wandb, or None where that is disabled or another rank does it.

    `inspection` shows the first pack; it is logged where `step`, the last one that was trained, is 0.
    """
    options = plan.config.logging.wandb
    if options.mode == "disabled" or not plan.ranks.is_main:
        return None
    # Read when wandb is imported. Its own reports of errors quote paths; a batch job answers no question.
    os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    os.environ.setdefault("WANDB_DATA_DIR", str(directory.folder / "wandb"))  # tables wait there; else in HOME
    sample = None
    if options.sample and inspection is not None and step == 0:
        rows = sample_rows(inspection.packs[0], inspection.decode, plan.preparation.source_names)
        sample = {"sample": Table(_SAMPLE_COLUMNS, rows), "sample_page": directory.samples}
    facts = {"parameters": num_parameters, "started_from": str(start.folder) if start else None}
    return WandbRun(lambda: _init_options(plan, directory.folder, facts), sample)


def _init_options(plan: RunPlan, folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of wandb.init. What the configuration leaves open is left to WANDB_NOTES and its like."""
    config, options = plan.config, plan.config.logging.wandb
    chosen: dict[str, Any] = {
        "mode": options.mode,
        "dir": str(folder),
        "resume": "allow",
        "name": options.name or os.environ.get("WANDB_NAME") or config.general.run_name,
        "group": options.group,
        "job_type": options.job_type,
        "notes": options.notes,
        "tags": options.tags or None,
        "config": without_secrets({**config.model_dump(mode="json"), "run": {**run_facts(plan), **facts}}),
    }
    if not os.environ.get("WANDB_SWEEP_ID"):  # a sweep's agent sets project, entity and id in the environment
        chosen |= {"project": options.project, "entity": options.entity, "id": wandb_id(folder)}
    return {name: value for name, value in chosen.items() if value is not None}


def wandb_id(folder: Path) -> str:
    """Returns the id of the run directory's wandb run, which the directory's wandb.json keeps.

    A copy of a run directory is another wandb run as long as the first directory is there. WANDB_RUN_ID of the
    environment comes before all.
    """
    known = _read_id(folder)
    if known and known["folder"] != str(folder.resolve()) and _read_id(Path(known["folder"])) == known:
        known = None
    run_id = os.environ.get("WANDB_RUN_ID") or (known["id"] if known else secrets.token_hex(6))
    (folder / ID_FILE).write_text(json.dumps({"id": run_id, "folder": str(folder.resolve())}) + "\n")
    return run_id


def _read_id(folder: Path) -> dict[str, str] | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads((folder / ID_FILE).read_text())
        return {"id": str(known["id"]), "folder": str(known["folder"])}
    return None


def run_facts(plan: RunPlan) -> dict[str, Any]:
    """Returns what decides the numbers of a run besides its configuration."""
    device = plan.ranks.device
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    versions |= {"python": platform.python_version(), "sftron": __version__, "torch": str(torch.__version__)}
    return {
        "versions": versions,
        "git": git_state(Path.cwd()),
        "data": plan.fingerprint,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "num_ranks": plan.ranks.dp_world_size,
        "peak_tflops": plan.peak.tflops,
        "attention": plan.attention,
        "loss": plan.loss,
        "tokens_per_epoch": plan.projection.tokens_per_epoch,
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Returns the commit of the working copy around `folder` and whether tracked files differ from it; None without
    one. No program that the working copy's own settings name is run."""

    def git(*arguments: str) -> str:
        command = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", *arguments]
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_TIME_FOR_GIT_S, check=True
        ).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def sample_rows(pack: Pack, decode: Decode, source_names: Sequence[str]) -> list[tuple[str, str, str, bool, int]]:
    """Returns a row of _SAMPLE_COLUMNS for each span of one role that is trained, or is not:

    conversation      role       text                        trained  tokens
    row 3 of a.jsonl  template   <|im_start|>user              False    3
    row 3 of a.jsonl  user       Hi                            False    1
    row 3 of a.jsonl  template   <|im_end|> <|im_start|>...    False    5
    row 3 of a.jsonl  assistant  Yo<|im_end|>                  True     2
    """
    rows: list[tuple[str, str, str, bool, int]] = []
    for conversation in shown_conversations(pack, decode):
        name = redacted(key_text(conversation.key, source_names))
        for (role, is_trained), group in groupby(conversation.spans, key=lambda span: (span.role, span.is_trained)):
            spans = list(group)
            text = visible_text("".join(span.text for span in spans))[:_MAX_SAMPLE_CHARACTERS]
            rows.append((name, role_name(role), redacted(text), is_trained, spans[-1].end - spans[0].start))
            if len(rows) == _MAX_SAMPLE_ROWS:
                return rows
    return rows
