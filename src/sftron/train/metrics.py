"""What a step reports: a console line, an object in metrics.jsonl, a point in wandb; the same numbers in each."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from sftron.data.preparation import Preparation
from sftron.train.flops import StepFlops
from sftron.train.line_file import LineFile, drop_lines_after
from sftron.train.progress import Progress, StepCounts
from sftron.train.step import StepResult
from sftron.train.wandb_log import WandbLog, flat_numbers


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step, over all micro-batches.

    step: 1 is the first. loss: sum of weighted token losses / sum of weights; None for a step without any target.
    learning_rate: the one this step used. grad_norm: before clipping. epoch: share of the data dealt, 1.0 is one pass;
    None where each data set has epochs of its own, or how long one is is not known.
    tokens, trained_tokens: of this step, the unused tail not counted. total_tokens, total_trained_tokens: of the run.
    fill: tokens / token budget. trained_share: trained_tokens / tokens. conversations: in this step.
    dropped: rows dropped so far, by reason. truncated: conversations that lost turns so far.
    tokens_per_second: tokens / step_seconds, of all GPUs; tokens_per_second_per_gpu: that / their number.
    step_seconds: from asking for the data to the updated weights; data_seconds: the part of it spent waiting for data.
    peak_memory_gb: device memory, or process memory on a CPU, of the rank that has held the most, of other ranks than
    the main one as of the step before.
    tflops: FLOPs that the model needs for the real tokens (train/flops.py) / step_seconds, 1e12 a second, of one GPU.
    mfu: tflops / peak_tflops. hfu: the same with all that is computed: recomputation, unused tail. peak_tflops: the
    device's, dense bf16, whatever the compute type; these three are None where it is not known.
    skipped: why the update was not made, or None.
    datasets: by name, what was dealt of each so far: {"rows", "conversations", "tokens", "trained_tokens", "epoch",
    "dropped"}; rows count the dropped ones, which `dropped` has by reason.
    """

    step: int
    loss: float | None
    learning_rate: float
    grad_norm: float | None
    epoch: float | None
    tokens: int
    trained_tokens: int
    total_tokens: int
    total_trained_tokens: int
    fill: float
    trained_share: float
    conversations: int
    dropped: dict[str, int]
    truncated: int
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    step_seconds: float
    data_seconds: float
    peak_memory_gb: float
    tflops: float
    mfu: float | None
    hfu: float | None
    peak_tflops: float | None
    skipped: str | None = None
    datasets: dict[str, dict[str, Any]] = field(default_factory=dict)

    def as_line(self, num_steps: int | None) -> str:
        """The console's line; the numbers of `as_dict`, rounded."""
        of = f"/{num_steps}" if num_steps else ""
        loss = "   none" if self.loss is None else f"{self.loss:7.4f}"
        norm = "  none" if self.grad_norm is None else f"{self.grad_norm:6.2f}"
        epochs = [self.epoch] if self.epoch is not None else [count["epoch"] for count in self.datasets.values()]
        epoch = f"{min(epochs):.2f}" + (f" to {max(epochs):.2f}" if len(epochs) > 1 else "")
        dropped = f" | dropped {sum(self.dropped.values())}" if self.dropped else ""
        mfu = f", mfu {self.mfu:.1%}" if self.mfu is not None else ""
        per_gpu = f" ({self.tokens_per_second_per_gpu:,.0f} a GPU)"
        is_one = self.tokens_per_second_per_gpu == self.tokens_per_second
        skipped = f" | SKIPPED: {self.skipped}" if self.skipped else ""
        return (
            f"step {self.step:>4}{of} | loss {loss} | lr {self.learning_rate:.2e} | grad norm {norm} "
            f"| {self.tokens} tokens, {self.trained_share:.0%} trained | fill {self.fill:.1%} "
            f"| {self.tokens_per_second:,.0f} tokens/s{'' if is_one else per_gpu}, {self.tflops:.3g} TFLOP/s{mfu} "
            f"| epoch {epoch} | data wait {self.data_seconds:.2f} s"
            f"{dropped}{skipped}"
        )


def measure_step(
    progress: Progress,
    counts: StepCounts,
    result: StepResult,
    *,
    learning_rate: float,
    preparation: Preparation,
    step_seconds: float,
    data_seconds: float,
    peak_memory_bytes: int,
    flops: StepFlops,
    peak_tflops: float | None,
    num_ranks: int,
) -> StepMetrics:
    """The metrics of the step that `progress` has just counted."""
    return StepMetrics(
        step=progress.step,
        loss=result.loss,
        learning_rate=learning_rate,
        grad_norm=result.grad_norm,
        epoch=None if preparation.weights or preparation.num_rows is None else progress.epochs(preparation.num_rows),
        tokens=counts.tokens,
        trained_tokens=counts.trained_tokens,
        total_tokens=progress.tokens,
        total_trained_tokens=progress.trained_tokens,
        fill=counts.tokens / counts.num_positions,
        trained_share=counts.trained_tokens / max(1, counts.tokens),
        conversations=counts.conversations,
        dropped=dict(progress.dropped),
        truncated=progress.truncated,
        tokens_per_second=counts.tokens / step_seconds,
        tokens_per_second_per_gpu=counts.tokens / step_seconds / num_ranks,
        step_seconds=step_seconds,
        data_seconds=data_seconds,
        peak_memory_gb=peak_memory_bytes / 1e9,
        tflops=flops.model / step_seconds / 1e12,
        mfu=flops.model / step_seconds / 1e12 / peak_tflops if peak_tflops else None,
        hfu=flops.hardware / step_seconds / 1e12 / peak_tflops if peak_tflops else None,
        peak_tflops=peak_tflops,
        skipped=result.skipped,
        datasets={
            dataset.name: {
                "rows": count.rows,
                "conversations": count.conversations,
                "tokens": count.tokens,
                "trained_tokens": count.trained_tokens,
                "epoch": count.epochs(dataset.num_rows),
                "dropped": dict(count.dropped),
            }
            for dataset, count in zip(preparation.datasets, progress.datasets, strict=True)
        },
    )


class MetricsLog:
    """metrics.jsonl, always, which ends no run (line_file.py); and wandb, if given."""

    def __init__(self, path: Path, *, resumed_step: int, wandb: WandbLog | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_lines_after(path, resumed_step)
        self._lines = LineFile(path)
        self._wandb = wandb

    def write(self, metrics: StepMetrics) -> None:
        record = asdict(metrics)
        # JSON has no NaN; `skipped` says that a number was not finite.
        finite = {
            key: None if isinstance(value, float) and not isfinite(value) else value for key, value in record.items()
        }
        self._lines.append(json.dumps(finite, allow_nan=False).encode())
        if self._wandb is not None:
            self._wandb.start()
            self._wandb.log(dict(flat_numbers(record)), metrics.step)

    def close(self, status: str) -> None:
        """status: how the run ended, as WandbLog.finish has it."""
        self._lines.close()
        if self._wandb is not None:
            self._wandb.finish(status)
