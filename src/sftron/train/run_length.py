"""How far a run is on its way, in steps or in rows, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from sftron.config import Config
from sftron.train.optimizer import learning_rate_factor
from sftron.train.progress import Progress, decay_progress


@dataclass(frozen=True, slots=True)
class RunLength:
    """num_rows: an epoch of the data in force; None where it is not known, and the configuration gives the steps."""

    config: Config
    num_rows: int | None

    def rows_of_run(self, progress: Progress) -> int | None:
        """Of the whole run, where it is trained by epochs."""
        return progress.num_rows_of_run(self.num_rows, self.config.tokens.train_epochs)

    def is_done(self, progress: Progress) -> bool:
        if (train_steps := self.config.tokens.train_steps) is not None:
            return progress.step >= train_steps
        rows = self.rows_of_run(progress)
        return rows is not None and progress.rows >= rows

    def share_done(self, progress: Progress) -> float:
        if (train_steps := self.config.tokens.train_steps) is not None:
            return progress.step / train_steps
        return progress.rows / (self.rows_of_run(progress) or 1)

    def require_more_data(self, progress: Progress, num_empty: int, num_lanes: int) -> None:
        """Once every lane has drained, all rows have to be counted. num_empty: packs in a row without conversations."""
        if num_empty >= num_lanes and not self.is_done(progress):
            raise RuntimeError(
                f"the data has ended at {progress.rows} of {self.rows_of_run(progress)} rows: {num_empty} packs in a "
                "row had no conversation. Were the data files changed while the run read them?"
            )

    def learning_rate(self, progress: Progress) -> float:
        """Of the step about to be made."""
        options = self.config.optimizer
        return options.learning_rate * learning_rate_factor(
            options.schedule,
            step=progress.step,
            warmup_steps=options.warmup_steps,
            decay_progress=decay_progress(
                progress,
                warmup_steps=options.warmup_steps,
                train_steps=self.config.tokens.train_steps,
                num_rows=self.rows_of_run(progress),
            ),
            min_ratio=options.min_learning_rate_ratio,
            decay_share=options.decay_share,
        )
