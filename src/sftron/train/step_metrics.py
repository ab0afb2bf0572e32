"""What a step reports: its numbers, and the line of them on the console."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from sftron.data.prepare import Preparation
from sftron.train.progress import Progress
from sftron.train.step import Deal, StepResult


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step, over all micro-batches and ranks. docs/metrics.md says more of each.

    step: 1 is the first. loss: sum of weighted token losses / sum of weights; None for a step without any target.
    roles: by role, {"loss", "tokens"}: the unweighted mean loss of its tokens, trained ones, or, of a role that is not
    trained, all, in the steps where they are measured. token_accuracy: share of the trained tokens that were the most
    likely one; entropy: of the predicted distributions there, nats, the mean; None where the loss does not tell them.
    learning_rate: the one this step used. grad_norm: before clipping. epoch: share of the data dealt, 1.0 is one pass;
    None where each data set has epochs of its own, or how long one is is not known.
    tokens, trained_tokens: of this step, the unused tail not counted. total_tokens, total_trained_tokens: of the run.
    fill: tokens / token budget. trained_share: trained_tokens / tokens. conversations: in this step.
    conversations_per_pack: conversations / packs. sum_squared_lengths: over documents as attention sees them, which is
    what it costs; sum_squared_lengths_spread: of the rank with the most / the mean of ranks - 1.
    dropped: rows dropped so far, by reason. truncated: conversations that lost turns so far.
    tokens_per_second: tokens / step_seconds, of all GPUs; tokens_per_second_per_gpu: that / their number; the same of
    trained_tokens.
    step_seconds: from asking for the data to the updated weights; data_seconds: the part of it spent waiting for data.
    checkpoint_seconds, evaluation_seconds: since the step before, for which training stood still.
    peak_memory_gb: device memory, or process memory on a CPU, of the rank that has held the most, of other ranks than
    the main one as of the step before.
    tflops: FLOPs that the model needs for the real tokens (train/flops.py) / step_seconds, 1e12 a second, of one GPU.
    mfu: tflops / peak_tflops. hfu: the same with all that is computed: recomputation, unused tail. peak_tflops: the
    device's, dense bf16, whatever the compute type; these three are None where it is not known.
    skipped: why the update was not made, or None.
    datasets: by name, what was dealt of each so far: {"rows", "conversations", "tokens", "trained_tokens", "epoch",
    "dropped"}; rows count the dropped ones, which `dropped` has by reason; and "loss": the unweighted mean over its
    trained tokens of this step, None without any.
    changed_settings: by configuration key, [the value before, the value from this step on]; of the first step that was
    made after a start with other settings.
    """

    step: int
    loss: float | None
    roles: dict[str, dict[str, Any]]
    token_accuracy: float | None
    entropy: float | None
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
    conversations_per_pack: float
    sum_squared_lengths: int
    sum_squared_lengths_spread: float
    dropped: dict[str, int]
    truncated: int
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    trained_tokens_per_second: float
    trained_tokens_per_second_per_gpu: float
    step_seconds: float
    data_seconds: float
    checkpoint_seconds: float
    evaluation_seconds: float
    peak_memory_gb: float
    tflops: float
    mfu: float | None
    hfu: float | None
    peak_tflops: float | None
    skipped: str | None = None
    datasets: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed_settings: dict[str, list[Any]] = field(default_factory=dict)

    def in_short(self, num_steps: int | None) -> str:
        """For the progress bar."""
        of = f"/{num_steps}" if num_steps else ""
        loss = "none" if self.loss is None else f"{self.loss:.4f}"
        return f"step {self.step}{of} | loss {loss} | {self.tokens_per_second:,.0f} tokens/s"

    def for_terminal(self, num_steps: int | None, time_left: str | None) -> str:
        """Returns the terminal's line: what one watches, and what must not be missed. `as_line` has the rest."""
        of = f"/{num_steps}" if num_steps else ""
        loss = "   none" if self.loss is None else f"{self.loss:7.4f}"
        left = "" if time_left is None else f" | {time_left} left"
        dropped = f" | dropped {sum(self.dropped.values())}" if self.dropped else ""
        skipped = f" | SKIPPED: {self.skipped}" if self.skipped else ""
        speed = f"{self.tokens_per_second:,.0f} tokens/s"
        return f"step {self.step:>4}{of} | loss {loss}{skipped} | lr {self.learning_rate:.2e} | {speed}{left}{dropped}"

    def as_line(self, num_steps: int | None) -> str:
        """Returns console.log's line; the numbers of `as_dict`, rounded."""
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
        accuracy = "" if self.token_accuracy is None else f" | accuracy {self.token_accuracy:.1%}"
        roles = ", ".join(f"{name} {role['loss']:.4f}" for name, role in self.roles.items())
        by_role = f" | by role: {roles}" if len(self.roles) > 1 else ""
        return (
            f"step {self.step:>4}{of} | loss {loss}{accuracy} | lr {self.learning_rate:.2e} | grad norm {norm} "
            f"| {self.tokens} tokens, {self.trained_share:.0%} trained | fill {self.fill:.1%} "
            f"| {self.tokens_per_second:,.0f} tokens/s{'' if is_one else per_gpu}, {self.tflops:.3g} TFLOP/s{mfu} "
            f"| epoch {epoch} | data wait {self.data_seconds:.2f} s"
            f"{dropped}{by_role}{skipped}"
        )


def measure_step(
    progress: Progress,
    deal: Deal,
    result: StepResult,
    *,
    learning_rate: float,
    preparation: Preparation,
    step_seconds: float,
    checkpoint_seconds: float,
    evaluation_seconds: float,
    peak_memory_bytes: int,
    peak_tflops: float | None,
    num_ranks: int,
    changed_settings: dict[str, list[Any]],
) -> StepMetrics:
    """The metrics of the step that `progress` has just counted. peak_memory_bytes: of this rank, after it."""
    counts, flops, losses = deal.counts, deal.flops, result.token_losses
    tokens_per_second, trained_tokens_per_second = counts.tokens / step_seconds, counts.trained_tokens / step_seconds
    return StepMetrics(
        step=progress.step,
        loss=result.loss,
        roles={} if losses is None else {name: asdict(mean) for name, mean in losses.roles.items()},
        token_accuracy=losses and losses.token_accuracy,
        entropy=losses and losses.entropy,
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
        conversations_per_pack=counts.conversations / counts.num_packs,
        sum_squared_lengths=counts.sum_squared_lengths,
        sum_squared_lengths_spread=deal.sum_squared_lengths_spread,
        dropped=dict(progress.dropped),
        truncated=progress.truncated,
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_gpu=tokens_per_second / num_ranks,
        trained_tokens_per_second=trained_tokens_per_second,
        trained_tokens_per_second_per_gpu=trained_tokens_per_second / num_ranks,
        step_seconds=step_seconds,
        data_seconds=deal.data_seconds,
        checkpoint_seconds=checkpoint_seconds,
        evaluation_seconds=evaluation_seconds,
        peak_memory_gb=max(deal.peak_memory_bytes, peak_memory_bytes) / 1e9,
        tflops=flops.model / step_seconds / 1e12,
        mfu=flops.model / step_seconds / 1e12 / peak_tflops if peak_tflops else None,
        hfu=flops.hardware / step_seconds / 1e12 / peak_tflops if peak_tflops else None,
        peak_tflops=peak_tflops,
        skipped=result.skipped,
        changed_settings=changed_settings,
        datasets={
            dataset.name: {
                "loss": None if losses is None else losses.datasets[index].loss,
                "rows": count.rows,
                "conversations": count.conversations,
                "tokens": count.tokens,
                "trained_tokens": count.trained_tokens,
                "epoch": count.epochs(dataset.num_rows),
                "dropped": dict(count.dropped),
            }
            for index, (dataset, count) in enumerate(zip(preparation.datasets, progress.datasets, strict=True))
        },
    )


class Stopwatch:
    """Runs while it is entered: `with watch: ...`, as often as wanted."""

    def __init__(self) -> None:
        self._seconds = self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._started

    def take(self) -> float:
        """Seconds since they were last taken."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
