"""Steps, tokens and epochs, estimated before training, and of each data set what was to be trained and what was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sftron.config import Config
from sftron.data.prepare import Preparation
from sftron.train.feed import token_budget
from sftron.train.progress import Progress
from sftron.train.sample import Sample


@dataclass(frozen=True, slots=True)
class DataSetProjection:
    """One data set.

    share: of the run's tokens, as its weight or its rows make it. mean_tokens: of a kept row. trained_share: of its
    tokens. tokens_per_epoch: of all its rows, once. epochs: how often they are dealt until the end of the run. Both are
    None of a stream, whose end is not known.
    """

    name: str
    share: float
    mean_tokens: float
    trained_share: float
    tokens_per_epoch: int | None
    epochs: float | None


@dataclass(frozen=True, slots=True)
class Projection:
    """The whole run.

    steps_per_epoch: None where each data set has epochs of its own, or it is not known. fill: of packs; 1.0, or less
    where the pool holds less than a pack.
    """

    datasets: tuple[DataSetProjection, ...]
    conversations_per_pack: float
    tokens_per_step: int
    steps_per_epoch: float | None
    fill: float

    @property
    def tokens_per_epoch(self) -> int:
        """Of all rows of all data sets, once."""
        return sum(dataset.tokens_per_epoch or 0 for dataset in self.datasets)

    @property
    def trained_share(self) -> float:
        return sum(dataset.share * dataset.trained_share for dataset in self.datasets)


def project(config: Config, preparation: Preparation, sample: Sample, *, dp_world_size: int) -> Projection:
    """Packs are taken as full for strategy `pool`, which fills 99 % and more of what its pool can fill."""
    counts = [sample.audit.sources[place] for place in range(len(preparation.datasets))]
    per_epoch = [
        None if dataset.num_rows is None else dataset.num_rows * count.num_tokens / count.num_rows
        for dataset, count in zip(preparation.datasets, counts, strict=True)
    ]
    known = [tokens for tokens in per_epoch if tokens is not None]
    # What has no weights and is not known is one data set alone.
    parts = preparation.weights or known or (1,)
    shares = [part / sum(parts) for part in parts]
    means = [count.num_tokens / max(1, count.num_kept) for count in counts]
    conversations_per_token = sum(share / mean for share, mean in zip(shares, means, strict=True) if share)

    budget = token_budget(config)
    of_pool = min(budget * conversations_per_token, config.data.packing.pool_size)
    conversations_per_pack = {"pool": of_pool, "minibatch": config.tokens.micro_batch_size, "none": 1}[
        config.data.packing.strategy
    ]
    packs_per_step = config.tokens.batch_accumulation_per_replica * dp_world_size
    tokens_per_step = packs_per_step * conversations_per_pack / conversations_per_token
    steps_per_epoch = None if preparation.weights or not known else sum(known) / tokens_per_step
    steps = config.tokens.train_steps or (config.tokens.train_epochs or 0) * (steps_per_epoch or 0)
    return Projection(
        tuple(
            DataSetProjection(
                name=dataset.name,
                share=share,
                mean_tokens=mean,
                trained_share=count.num_trained_tokens / max(1, count.num_tokens),
                tokens_per_epoch=None if tokens is None else round(tokens),
                epochs=None if tokens is None else steps * tokens_per_step * share / max(1, tokens),
            )
            for dataset, count, share, mean, tokens in zip(
                preparation.datasets, counts, shares, means, per_epoch, strict=True
            )
        ),
        conversations_per_pack,
        round(tokens_per_step),
        steps_per_epoch,
        fill=conversations_per_pack / (budget * conversations_per_token),
    )


def require_a_peak(config: Config, projection: Projection) -> None:
    """Raises ValueError where a run of so many epochs would end within its warm-up."""
    epochs, warmup_steps = config.tokens.train_epochs, config.optimizer.warmup_steps
    if epochs and warmup_steps >= (steps := epochs * (projection.steps_per_epoch or 0)):
        raise ValueError(
            f"optimizer.warmup_steps: {warmup_steps} is not below the {steps:,.0f} steps or so of {epochs} epochs, so "
            "the learning rate would never reach its peak; lower it"
        )


def mix_report(
    config: Config, preparation: Preparation, sample: Sample, projection: Projection, progress: Progress
) -> dict[str, Any]:
    """{"step", "tokens", "datasets": [{what it is, "sampled", "planned", "trained"}, ...]}, JSON values throughout.

    planned: the share of the tokens, and the epochs at the end of the run, estimated from the sampled rows. trained:
    counted so far; dropped rows are among its `rows`, by reason in `dropped`.
    """
    datasets = []
    # A change of the data on the way began a new mixture.
    tokens = progress.tokens - progress.before.tokens
    for place, (dataset, plan, count) in enumerate(
        zip(preparation.datasets, projection.datasets, progress.datasets, strict=True)
    ):
        sampled = sample.audit.sources[place]
        datasets.append(
            {
                "name": dataset.name,
                "path": config.data.datasets[place].path,
                "format": str(dataset.row_format),
                "rows": dataset.num_rows,
                "weight": dataset.weight,
                "sampled": {
                    "rows": sampled.num_rows,
                    "kept": sampled.num_kept,
                    "mean_tokens": plan.mean_tokens,
                    "trained_share": plan.trained_share,
                },
                "planned": {"share": plan.share, "epochs": plan.epochs, "tokens_per_epoch": plan.tokens_per_epoch},
                "trained": {
                    "rows": count.rows,
                    "conversations": count.conversations,
                    "tokens": count.tokens,
                    "share": count.tokens / max(1, tokens),
                    "trained_tokens": count.trained_tokens,
                    "epochs": count.epochs(dataset.num_rows),
                    "dropped": dict(count.dropped),
                },
            }
        )
    return {"step": progress.step, "tokens": progress.tokens, "datasets": datasets}
