"""Steps, tokens and epochs, estimated before training; and for each data set, what was planned and what is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sftron.config import Config
from sftron.data.prepare import Preparation
from sftron.train.progress import Progress
from sftron.train.run_data import token_budget
from sftron.train.sample import Sample


@dataclass(frozen=True, slots=True)
class DataSetProjection:
    """What is expected of one data set."""

    name: str
    share: float
    """The part of the run's tokens, by its weight or its rows."""
    mean_tokens: float
    """Tokens of a kept row."""
    trained_share: float
    """The part of its tokens that is trained."""
    tokens_per_epoch: int | None
    """Tokens of all its rows; None of a stream, whose end is not known."""
    epochs: float | None
    """How often the run goes through its rows; None of a stream."""


@dataclass(frozen=True, slots=True)
class Projection:
    """What is expected of the whole run."""

    datasets: tuple[DataSetProjection, ...]
    conversations_per_pack: float
    tokens_per_step: int
    steps_per_epoch: float | None
    """None where each data set has epochs of its own, or its end is not known."""
    fill: float
    """How full packs are; below 1 where the pool holds less than a pack."""

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of all rows of all data sets."""
        return sum(dataset.tokens_per_epoch or 0 for dataset in self.datasets)

    @property
    def trained_share(self) -> float:
        return sum(dataset.share * dataset.trained_share for dataset in self.datasets)


def project(config: Config, preparation: Preparation, sample: Sample, *, dp_world_size: int) -> Projection:
    """Estimates the run from its sample. Packs count as full for strategy `pool`, which fills 99 % and more of what its
    pool can fill."""
    counts = [sample.audit.sources[index] for index in range(len(preparation.datasets))]
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


def mix_report(
    config: Config, preparation: Preparation, sample: Sample, projection: Projection, progress: Progress
) -> dict[str, Any]:
    """Returns {"step", "tokens", "datasets": [{what it is, "sampled", "planned", "trained"}, ...]}, all JSON.

    `planned` is estimated from the sampled rows, with the epochs at the end of the run; `trained` is counted so far,
    and its `rows` include the dropped ones.
    """
    datasets = []
    # A change of the data on the way began a new mixture.
    tokens = progress.tokens - progress.before.tokens
    for index, (dataset, plan, count) in enumerate(
        zip(preparation.datasets, projection.datasets, progress.datasets, strict=True)
    ):
        sampled = sample.audit.sources[index]
        datasets.append(
            {
                "name": dataset.name,
                "path": config.data.datasets[index].path,
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
