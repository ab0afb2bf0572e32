"""mix_report.json: what of each data set a run is to train, and what it has trained."""

from __future__ import annotations

from typing import Any

from sftron.config import Config
from sftron.data.preparation import Preparation
from sftron.train.progress import Progress
from sftron.train.projection import Projection
from sftron.train.sample import Sample


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
