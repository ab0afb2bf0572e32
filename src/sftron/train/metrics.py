"""Where the numbers of a step are written: an object in metrics.jsonl, a point in wandb."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from sftron.train.line_file import LineFile, drop_lines_after
from sftron.train.step_metrics import StepMetrics
from sftron.train.wandb_log import WandbLog, flat_numbers


class MetricsLog:
    """metrics.jsonl, always, which ends no run (line_file.py); and wandb, if given."""

    def __init__(self, path: Path, *, resumed_step: int, wandb: WandbLog | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_lines_after(path, resumed_step)
        self._lines = LineFile(path)
        self._wandb = wandb

    def write(self, metrics: StepMetrics) -> None:
        record = asdict(metrics)
        self._lines.append(json.dumps(_finite(record), allow_nan=False).encode())
        if self._wandb is not None:
            self._wandb.start()
            self._wandb.log(dict(flat_numbers(record)), metrics.step)

    def close(self, status: str) -> None:
        """status: how the run ended, as WandbLog.finish has it."""
        self._lines.close()
        if self._wandb is not None:
            self._wandb.finish(status)


def _finite(value: Any) -> Any:
    """JSON has no NaN; `skipped` says that a number was not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value
