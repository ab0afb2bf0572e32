"""From the configuration to a wandb log: what has to be there, and what wandb.init is given."""

from __future__ import annotations

import importlib.util
import json
import netrc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sftron.config import Wandb
from sftron.config.secrets import without_secrets
from sftron.report.inspection import Inspection
from sftron.train import console
from sftron.train.plan import RunPlan
from sftron.train.resume import Start
from sftron.train.run_directory import RunDirectory
from sftron.train.wandb_facts import SAMPLE_COLUMNS, run_facts, sample_rows
from sftron.train.wandb_identity import find_identity
from sftron.train.wandb_log import WandbLog, flat_numbers

_HOSTS = ("wandb.ai", "coreweave.com")
"""Whose names, or subdomains' names, `wandb login` writes into netrc."""


def require_wandb(options: Wandb) -> None:
    """Raises ValueError where the package or a key is missing: asked for and not had is an error, not a silence."""
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
    """Whether wandb will find a key. It is not asked: importing it takes a second."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb") / "settings"
    with suppress(OSError, UnicodeError):
        text = settings.read_text()
        if "api_key" in text or "base_url" in text:  # a key there, or a server of one's own: wandb knows better
            return True
    own = urlsplit(os.environ.get("WANDB_BASE_URL", "")).netloc
    given = os.environ.get("NETRC")
    for path in [Path(given)] if given else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        with suppress(OSError, netrc.NetrcParseError, UnicodeError):
            hosts = netrc.netrc(path.expanduser()).hosts
            if any(host == own or host.endswith(_HOSTS) or host == "default" for host in hosts):
                return True
    return False


def start_wandb(
    plan: RunPlan,
    directory: RunDirectory,
    start: Start | None,
    *,
    num_parameters: int,
    inspection: Inspection | None,
    step: int,
) -> WandbLog | None:
    """The log of the main rank, where there is to be one; its thread begins with the first step.

    inspection: of the first pack. step: the last one that the run has trained.
    """
    options = plan.config.logging.wandb
    if options.mode == "disabled" or not plan.ranks.is_main:
        return None
    # Read when wandb is imported. Its own reports of errors quote paths; questions are never asked of a batch job.
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    os.environ["WANDB_SILENT"] = "true"
    os.environ.setdefault("WANDB_DATA_DIR", str(directory.folder / "wandb"))  # tables wait there; else in HOME
    identity = find_identity(directory.folder, plan.config.general.run_name, start)
    origin = without_secrets({"continued_from": identity.continued_from})

    def prepare() -> dict[str, Any]:
        facts = run_facts(plan, num_parameters)
        facts["run"] |= origin
        return _init_options(plan, directory, identity.id) | {"config": facts}

    log = WandbLog(prepare, identity=identity.state(), earlier=_earlier_steps(directory.metrics, step))
    if options.sample and inspection is not None and step == 0:
        rows = sample_rows(inspection.packs[0], inspection.decode, plan.preparation.source_names)
        log.log_table("sample", SAMPLE_COLUMNS, rows, step)
        log.log_page("sample_page", directory.samples, step)
    return log


def _init_options(plan: RunPlan, directory: RunDirectory, run_id: str) -> dict[str, Any]:
    """What the configuration does not say is left to wandb, and so to WANDB_NOTES and its like."""
    config, options = plan.config, plan.config.logging.wandb
    wanted: dict[str, Any] = {
        "mode": options.mode,
        "dir": str(directory.folder),
        "resume": "allow",
        "name": options.name or os.environ.get("WANDB_NAME") or config.general.run_name,
        "group": options.group,
        "job_type": options.job_type,
        "notes": options.notes,
        "tags": options.tags or None,
    }
    if not os.environ.get("WANDB_SWEEP_ID"):  # a sweep's runs are where the sweep is, under ids that it gives
        wanted |= {"project": options.project, "entity": options.entity, "id": run_id}
    return {name: value for name, value in wanted.items() if value is not None}


def _earlier_steps(path: Path, last: int) -> Callable[[int], Iterator[tuple[Mapping[str, Any], int]]]:
    """Reads metrics.jsonl, up to the step that the run goes on after."""

    def read(known: int) -> Iterator[tuple[Mapping[str, Any], int]]:
        with suppress(OSError), path.open("rb") as file:
            for line in file:
                with suppress(ValueError, KeyError, TypeError):
                    record = json.loads(line)
                    if known < record["step"] <= last:
                        yield dict(flat_numbers(record)), record["step"]
                    elif record["step"] > last:
                        return

    return read
