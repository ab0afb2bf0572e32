"""The projection of a run (its steps, tokens and epochs), and the mix report of planned and trained data."""

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
    """The estimates for one data set."""

    name: str
    share: float
    """The share of the run's tokens, by weight or by number of tokens."""
    mean_tokens: float
    """The mean number of tokens in a kept row."""
    trained_share: float
    """The share of its tokens that are trained."""
    tokens_per_epoch: int | None
    """The number of tokens in all its rows; None for a stream, whose length is not known."""
    epochs: float | None
    """The number of passes over its rows in the whole run; None for a stream."""


@dataclass(frozen=True, slots=True)
class Projection:
    """The estimates for the whole run."""

    datasets: tuple[DataSetProjection, ...]
    conversations_per_pack: float
    tokens_per_step: int
    steps_per_epoch: float | None
    """The steps per epoch; None if each data set has its own epochs, or if the length of the data is not known."""
    fill: float
    """The expected fill of packs; below 1 if the pool holds less than a pack."""

    @property
    def tokens_per_epoch(self) -> int:
        """The number of tokens in all rows of all data sets."""
        return sum(dataset.tokens_per_epoch or 0 for dataset in self.datasets)

    @property
    def trained_share(self) -> float:
        return sum(dataset.share * dataset.trained_share for dataset in self.datasets)


def project(config: Config, preparation: Preparation, sample: Sample, *, dp_world_size: int) -> Projection:
    """Estimates the run from its sample of rows.

    With strategy `pool`, packs are assumed to be full if the pool holds enough, because it fills 99 % or more.
    """
    counts = [sample.audit.sources[index] for index in range(len(preparation.datasets))]
    per_epoch = [
        None if dataset.num_rows is None else dataset.num_rows * count.num_tokens / count.num_rows
        for dataset, count in zip(preparation.datasets, counts, strict=True)
    ]
    known = [tokens for tokens in per_epoch if tokens is not None]
    # Without weights and with an unknown length, there is only one data set.
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
    """Returns the mix report, as JSON values: {"step", "tokens", "datasets": [{..., "sampled", "planned", "trained"}]}.

    `planned` is estimated from the sampled rows, and its epochs are those at the end of the run. `trained` has the
    counts so far; its `rows` include dropped rows.
    """
    datasets = []
    # A change of the data has started a new mixture.
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
