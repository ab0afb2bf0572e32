"""Where the numbers of a step are written: an object in metrics.jsonl, a point in wandb."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from sftron.train.line_file import LineFile
from sftron.train.plan import RunPlan
from sftron.train.run_directory import RunDirectory
from sftron.train.step_metrics import StepMetrics
from sftron.train.wandb_log import WandbLog


class MetricsLog:
    """metrics.jsonl, always, which ends no run (line_file.py); and wandb, if given."""

    def __init__(self, path: Path, *, resumed_step: int, wandb: WandbLog | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_lines_after(path, resumed_step)
        self._lines = LineFile(path)
        self._wandb = wandb

    def write(self, metrics: StepMetrics) -> None:
        record = asdict(metrics)
        self._lines.append(json.dumps(_finite(record), allow_nan=False).encode())
        if self._wandb is not None:
            self._wandb.log(dict(_numbers(record)), metrics.step)

    def close(self, exit_code: int) -> None:
        self._lines.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code)


def start_metrics(plan: RunPlan, directory: RunDirectory, step: int) -> MetricsLog:
    """The log of a run that goes on after `step`."""
    config = plan.config
    options = config.logging.wandb
    wandb = None
    if options.mode != "disabled":
        wandb = WandbLog(
            mode=options.mode,
            name=config.general.run_name,
            dir=directory.folder,
            config=config.model_dump(mode="json"),
            project=options.project,
            entity=options.entity,
            group=options.group,
            tags=options.tags,
        )
    return MetricsLog(directory.metrics, resumed_step=step, wandb=wandb)


def _finite(value: Any) -> Any:
    """JSON has no NaN; `skipped` says that a number was not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


def _numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """Every number under a key of its own, "datasets/x.jsonl/tokens": wandb draws numbers, not dictionaries."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{key}", value


def require_wandb(mode: str) -> None:
    """Raises ValueError where the package is missing: asked for and not had is an error, not a silence."""
    if mode != "disabled" and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"logging.wandb.mode is {mode} but the package wandb is not installed: pip install 'sftron[wandb]', "
            "or set it to disabled"
        )


def _drop_lines_after(path: Path, step: int) -> None:
    """Steps that a resume trains again are logged again. The file is cut off, which needs no room on the disk."""
    if not path.exists():
        return
    end = position = 0
    for line in path.read_bytes().splitlines(keepends=True):
        position += len(line)
        with suppress(ValueError, TypeError, KeyError):
            if json.loads(line)["step"] <= step:
                end = position
    os.truncate(path, end)
