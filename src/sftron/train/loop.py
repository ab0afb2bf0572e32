"""The optimizer steps of a run, one after another: their batches, their updates, and their lines in the logs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

import torch

from sftron.data.loader import PackLoader
from sftron.data.types import Batch
from sftron.models.exact_sums import ExactSums
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import loss_function
from sftron.train.flops import step_flops
from sftron.train.logs import console
from sftron.train.logs.run_logs import RunLogs
from sftron.train.objective import Objective, TokenLoss
from sftron.train.optimizer import set_learning_rate
from sftron.train.progress import Progress
from sftron.train.run import Settings, Setup
from sftron.train.step import StepBatches, StepResult, next_step_batches, out_of_memory_explained, train_step
from sftron.train.text import description

_MAX_NON_FINITE_IN_A_ROW = 3


def objective_of(setup: Setup) -> Objective:
    """Returns what the run minimizes: a user's own objective, or the run's loss function."""
    own = setup.extension.objective
    return TokenLoss(loss_function(setup.model.loss)) if own is None else own


class Steps:
    """Makes the steps of a run, and counts them in its progress. Each method is a collective.

    Attributes:
        data_state: The state of the loader after the last finished step.
    """

    def __init__(
        self,
        setup: Setup,
        model: LlamaForSFT,
        optimizer: torch.optim.Optimizer,
        loader: PackLoader,
        progress: Progress,
        settings: Settings,
        logs: RunLogs,
        *,
        started: float,
    ) -> None:
        """`started` is the `time.perf_counter()` at which the process started."""
        self._setup, self._config, self._ranks = setup, setup.config, setup.ranks
        self._model, self._optimizer, self._loader = model, optimizer, loader
        self._progress, self._settings, self._logs, self._started = progress, settings, logs, started
        self.data_state: Mapping[str, Any] = loader.state_dict()
        self._is_first, self._num_empty = True, 0
        own = setup.extension.objective
        self._objective = objective_of(setup)
        self._denominator_of = None if own is None else own.denominator
        is_exact, mesh = self._config.general.deterministic == "layout", self._ranks.mesh
        self._sums = ExactSums(model, mesh) if is_exact and mesh is not None else None

    def next(self, batches: Iterator[Batch]) -> tuple[StepBatches, StepResult] | None:
        """Makes the next step, logs it, and returns its batches and its result; None if no batch has a conversation."""
        progress, started = self._progress, time.perf_counter()
        fetched = self._fetch(batches)
        if fetched.counts.total.conversations == 0:
            # At the end of the data, some lanes run out before others. Without a conversation, there is no step.
            self._commit(fetched)
            self._num_empty += len(fetched.batches) * self._ranks.dp_world_size
            self._setup.length.require_more_data(progress, self._num_empty, self._setup.data.dataset.num_lanes)
            return None
        self._require_denominator(fetched)
        self._num_empty = 0
        if progress.step == self._config.optimizer.warmup_steps:
            progress.rows_at_peak = progress.rows
        learning_rate = self._setup.length.learning_rate(progress, fetched.counts.total.rows)
        set_learning_rate(self._optimizer, learning_rate)
        result = self._step(fetched)
        progress.step += 1
        self._commit(fetched)
        self._logs.log_step(
            progress,
            fetched,
            result,
            learning_rate=learning_rate,
            seconds=time.perf_counter() - started,
            first_epoch=self.data_state["first_epoch"],
            changed_settings=self._settings.changed_at(progress.step),
        )
        return fetched, result

    def _require_denominator(self, fetched: StepBatches) -> None:
        """Raises ValueError if a user's objective has no denominator for a step with targets."""
        if self._denominator_of is not None and fetched.counts.weight_sum > 0 and not 0 < fetched.denominator < inf:
            kind = type(self._objective).__name__
            raise ValueError(
                f"{kind}.denominator gives {fetched.denominator:g} for a step with "
                f"{fetched.counts.total.trained_tokens:,} trained tokens; return a number above 0"
            )

    def _fetch(self, batches: Iterator[Batch]) -> StepBatches:
        """Returns the batches of the next step, and their counts over all ranks."""
        model, checkpointing = self._setup.model, self._config.model.activation_checkpointing
        self._ranks.at(f"the data of step {self._progress.step + 1}")
        return next_step_batches(
            batches,
            self._config.tokens.batch_accumulation_per_replica,
            ranks=self._ranks,
            num_datasets=len(self._progress.datasets),
            flops_of=lambda own: step_flops(model.architecture, own, checkpointing, model.trained),
            denominator_of=self._denominator_of,
        )

    def _step(self, fetched: StepBatches) -> StepResult:
        progress, interval = self._progress, self._config.logging.untrained_roles_interval
        is_first, self._is_first = self._is_first, False
        if is_first:
            console.write(f"first step {time.perf_counter() - self._started:.1f} s after the start")
        self._ranks.at(f"step {progress.step + 1}")
        wall, processor = time.perf_counter(), time.process_time()
        budget, doing = self._setup.data.dataset.token_budget, f"step {progress.step + 1}"
        with out_of_memory_explained(self._config, self._ranks.device, budget, doing):
            result = train_step(
                self._model,
                self._optimizer,
                fetched.batches,
                self._objective,
                max_grad_norm=self._config.optimizer.max_grad_norm,
                denominator=fetched.denominator,
                num_datasets=len(progress.datasets),
                with_untrained=interval is not None and progress.step % interval == 0,
                router_aux_loss_coef=self._setup.model.router_aux_loss_coef,
                sum_over_ranks=self._ranks.sum,
                sums=self._sums,
            )
        if is_first and self._ranks.world_size == 1 and self._ranks.device.type == "cpu":
            description.warn_of_busy_cores(time.perf_counter() - wall, time.process_time() - processor)
        return result

    def _commit(self, fetched: StepBatches) -> None:
        """Adds the fetched batches to the progress, the loader state and the next line of metrics.jsonl."""
        self._progress.add(fetched.counts)
        self.data_state = self._loader.state_dict()
        self._logs.packs += fetched.packs

    def is_finite(self, fetched: StepBatches, result: StepResult) -> bool:
        """Returns False at the third consecutive step without a finite loss and gradient norm.

        Every such step prints the locations of its conversations.
        """
        if result.is_finite:
            self._progress.non_finite_in_a_row = 0
            return True
        self._progress.non_finite_in_a_row += 1
        locations = [self._setup.data.preparation.location(key) for each in fetched.batches for key in each.pack.keys]
        reports = self._ranks.gather({"rows": locations})[:: self._ranks.context.size]
        everyone = [each for facts in reports for each in facts["rows"]]
        console.write(f"           no update was made. In the batch: {', '.join(everyone)}")
        return self._progress.non_finite_in_a_row < _MAX_NON_FINITE_IN_A_ROW
