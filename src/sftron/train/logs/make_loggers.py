"""The choice of a run's loggers, before the run, and the facts that they are told at its start."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sftron import __version__
from sftron.config import Logging
from sftron.errors import without_secrets
from sftron.train.logs import console
from sftron.train.logs.loggers import Loggers
from sftron.train.logs.trackers import Mlflow, TensorBoard, Tracker, Trackio, Wandb, has_key
from sftron.train.resume import Start
from sftron.train.run import Setup
from sftron.train.run_directory import RunDirectory

_PACKAGES = {"mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""The packages that a tracker imports, where it is not the one of its name."""
_EXTRAS = ("wandb", "trackio", "tensorboard", "mlflow")
_TIME_FOR_GIT_S = 5.0


def require_loggers(options: Logging) -> None:
    """Raises ValueError if a package of a logger is not installed, or an online run has no API key of wandb."""
    mode = options.wandb_mode
    for name in {*options.to, *(["wandb"] if mode != "disabled" else [])}:
        packages = ("accelerate", *_PACKAGES.get(name, (name,)))
        if missing := [package for package in packages if find_spec(package) is None]:
            how = f"'sftron[{name}]'" if name in _EXTRAS else " ".join(missing)
            raise ValueError(
                f"{name} is to log the run, but {', '.join(missing)} is not installed: pip install {how}, or remove "
                f"{name} from logging.to" + ", and logging.wandb.mode" * (name == "wandb")
            )
    if mode == "online" and not has_key():
        raise ValueError(
            "logging.wandb.mode is online but there is no API key for it: run `wandb login`, or set WANDB_API_KEY, or "
            "set the mode to offline and run `wandb sync` later"
        )
    if mode != "disabled" and (other := os.environ.get("WANDB_MODE")) and other != mode:
        console.write(f"wandb      mode {mode}, as configured; WANDB_MODE={other} is not read")


def make_loggers(setup: Setup, directory: RunDirectory, start: Start, *, num_parameters: int) -> Loggers | None:
    """Returns the loggers of the run; None if there are none, and on all ranks but the main one."""
    options = setup.config.logging
    names = [*options.to, *(["wandb"] if "wandb" not in options.to and options.wandb_mode != "disabled" else [])]
    if not names or not setup.ranks.is_main:
        return None
    started_from = str(start.folder) if start.folder else None
    facts = partial(config_and_facts, setup, parameters=num_parameters, started_from=started_from)
    kinds = {"tensorboard": TensorBoard, "trackio": Trackio, "mlflow": Mlflow, "wandb": Wandb}
    return Loggers([kinds.get(name, Tracker)(name, setup, directory.folder, facts) for name in names])


def config_and_facts(setup: Setup, **facts: Any) -> dict[str, Any]:
    """Returns the configuration without secrets. Its key `run` has the facts besides it that influence the results.

    Args:
        facts: Facts in addition to those of `setup`.
    """
    config, device = setup.config, setup.ranks.device
    versions = {name: version(name) for name in ("torch", "transformers", "tokenizers", "datasets")}
    facts |= {
        "versions": versions | {"python": platform.python_version(), "sftron": __version__},
        "git": git_state(Path.cwd()),
        "data": setup.fingerprint,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "num_ranks": setup.ranks.world_size,
        "peak_tflops": setup.model.peak.tflops,
        "attention": setup.model.attention,
        "loss": setup.model.loss,
        "tokens_per_epoch": setup.data.projection.tokens_per_epoch,
    }
    return without_secrets({**config.model_dump(mode="json"), "run": facts})


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
