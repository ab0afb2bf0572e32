"""Evaluation during training: losses on evaluation sets, answers to prompts, and the choice of the best checkpoint."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from sftron.checkpoint.atomic import main_or_raise
from sftron.config import Config
from sftron.data.loader import collate
from sftron.data.packing import PoolPacking, lay_out
from sftron.data.types import Role
from sftron.kernels.device import free_memory, is_gpu
from sftron.models.generation import generate, most_likely
from sftron.models.llama import LlamaForSFT
from sftron.models.sharding import gathered_blocks, whole_head
from sftron.train.extension import NO_EXTENSION, Answer, Extension, ExtensionError, call_compute_metrics
from sftron.train.keep import (
    WITHIN_LIMITS,
    KeptLoss,
    comparable_losses,
    exceeded_at,
    facts_of,
    is_within,
    kept_after,
    named_now,
    problems,
    unknown_losses,
)
from sftron.train.logs import console
from sftron.train.metrics import TokenLosses, TokenSums
from sftron.train.objective import loss_of
from sftron.train.ranks import Ranks
from sftron.train.run import EvaluationSet, Question, RunData
from sftron.visible_text import counted

_POOL_SIZE = 256
_ALL_ROLES = frozenset(Role) - {Role.PADDING}


# --- The loss on a set ---


@dataclass(frozen=True, slots=True)
class SetLoss:
    """The losses of an evaluation set: unweighted means over tokens.

    Message weights are ignored, except that a message of weight 0 is left out. A mean over no tokens is None. `loss`,
    `token_accuracy` and `tokens` cover the completions, as data.train_on_roles and data.train_on_turns define them.
    """

    loss: float | None
    token_accuracy: float | None
    tokens: int
    conversations: int
    roles: dict[str, dict[str, Any]]
    """{role: {"loss", "tokens"}} for all tokens except the first of each conversation, by the role of the predicted
    token."""
    datasets: dict[str, dict[str, Any]]
    """{name: {"loss", "tokens"}} for the completions of each data set."""
    kept: dict[str, float | None] | None = None
    """{"before", "since", "rise", "max_rise"} of a set of evaluation.keep, in nats; None for others."""


class StopRequestedError(Exception):
    """A stop of the run was requested during an evaluation."""


def measure_set(
    model: LlamaForSFT,
    evaluation_set: EvaluationSet,
    *,
    token_budget: int,
    ranks: Ranks,
    before_pack: Callable[[], object] = lambda: None,
) -> SetLoss:
    """Returns the mean losses over all tokens of the set; the split into packs and ranks does not change them.

    Every rank has to call this. Each rank computes its share of the packs without gradients, and every rank returns the
    full result. Documents are always isolated, even if training does not isolate them (law 7), so a conversation's loss
    does not depend on its neighbors in the pack.

    Args:
        token_budget: The tokens of a pack; at least the length of the longest conversation.
        before_pack: Called before every pack; may raise, on all ranks alike.
    """
    conversations, preparation = evaluation_set.conversations, evaluation_set.preparation
    device = model.head_weight.device
    # The sums are fp64, so their order does not change the result at fp32 precision.
    sums = TokenSums(len(preparation.datasets), device, with_untrained=True)
    rows = list(_rows([len(each) for each in conversations], token_budget))
    for start in range(0, len(rows), ranks.dp_world_size):
        before_pack()
        own = rows[start:][ranks.dp_rank : ranks.dp_rank + 1] or [[]]  # sharded weights need every rank
        pack = lay_out(
            [conversations[number] for number in own[0]],
            token_budget=token_budget,
            remove_cross_attention=True,
            pad_id=preparation.chat_tokenizer.pad_id,
        )
        keep_tail = is_gpu(device)
        batch = collate(pack, keep_tail=keep_tail, measured_roles=_ALL_ROLES, context=ranks.context)
        with torch.no_grad():
            loss_of(model, batch, sums=sums)
    losses = TokenLosses.of(ranks.sum(sums.table_G4).flatten().tolist())
    return SetLoss(
        loss=losses.all.loss,
        token_accuracy=losses.token_accuracy,
        tokens=losses.all.tokens,
        conversations=len(conversations),
        roles={name: asdict(mean) for name, mean in losses.roles.items()},
        datasets={each.name: asdict(mean) for each, mean in zip(preparation.datasets, losses.datasets, strict=True)},
    )


def _rows(lengths: Sequence[int], token_budget: int) -> Iterator[list[int]]:
    """Yields the indices of the conversations in each pack, chosen by the packing algorithm of training."""
    packing, pending = PoolPacking(_POOL_SIZE), list(range(len(lengths)))
    while pending:
        chosen = packing.choose([lengths[number] for number in pending[:_POOL_SIZE]], token_budget)
        yield [pending[index] for index in chosen]
        for index in reversed(chosen):
            del pending[index]


# --- A whole evaluation ---


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of all sets and prompts; a line of evaluations.jsonl has the same fields."""

    step: int
    seconds: float
    sets: dict[str, SetLoss]
    answers: list[Answer]
    stop_rate: float | None
    """The share of answers that ended with a stop token; None if there are no prompts."""
    measures: dict[str, float] = field(default_factory=dict[str, float])
    """What a user's `compute_metrics` gives, by name."""

    def metrics(self) -> dict[str, Any]:
        """Returns the numbers as nested dictionaries; their keys joined by "/" are the names in wandb and keep_best."""
        sets = {name: asdict(each) for name, each in self.sets.items()}
        own = {"measures": self.measures} if self.measures else {}
        return {"eval": {**sets, **own, "stop_rate": self.stop_rate, "seconds": self.seconds}}

    def as_lines(self) -> Iterator[str]:
        """Yields the lines for the console: the numbers of evaluations.jsonl, rounded."""

        def rounded(loss: float | None) -> str:
            return "none" if loss is None else f"{loss:.4f}"

        for name, each in self.sets.items():
            roles = ", ".join(f"{role} {found['loss']:.4f}" for role, found in each.roles.items())
            conversations = counted(each.conversations, "conversations")
            accuracy = "none" if each.token_accuracy is None else f"{each.token_accuracy:.1%}"
            kept = f" | rise {rounded(each.kept['rise'])}, limit {each.kept['max_rise']:.4g}" if each.kept else ""
            yield (
                f"eval {self.step:>4} | {name} loss {rounded(each.loss)}{kept} | accuracy {accuracy} "
                f"| {counted(each.tokens, 'tokens')} of {conversations} | by role: {roles}"
            )
        own = "".join(f" | {name} {value:.4f}" for name, value in self.measures.items())
        stopped = sum(each.stopped for each in self.answers)
        of_answers = f" | {stopped} of {len(self.answers)} answers ended by themselves" if self.answers else ""
        yield f"eval {self.step:>4} | {self.seconds:.1f} s{of_answers}{own}"


# --- The best evaluation ---


@dataclass(frozen=True, slots=True)
class Best:
    """The best value so far of a metric, of those that checkpoints.keep_best and evaluation.patience name."""

    metric: str
    value: float
    step: int
    fingerprint: str
    """The fingerprints of the evaluation sets; values measured on other rows are not comparable."""
    num_worse: int = 0
    """The number of evaluations since this one."""
    kept: Mapping[str, float | None] = field(default_factory=dict)
    """The losses of the sets of evaluation.keep at this step; a limit may be lowered after it."""

    @property
    def words(self) -> str:
        """The metric and its value."""
        return f"{self.metric} {self.value:.4f}" if self.metric != WITHIN_LIMITS else f"the last within {self.metric}"

    def after(self, value: float | None, step: int) -> Best:
        """Returns the best after one more evaluation.

        A value has to be strictly better; one that is missing or not finite is not.
        """
        is_better = value is not None and (value < self.value if self.metric.endswith("/loss") else value > self.value)
        if is_better:
            return replace(self, value=value, step=step, num_worse=0)
        return replace(self, num_worse=self.num_worse + 1)


def metric_of(metrics: Mapping[str, Any], name: str) -> float | None:
    """Returns the metric with a name such as "eval/held_out/loss"; None if it is missing or not finite."""
    value: Any = metrics
    for part in name.split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) and isfinite(value) else None


def watched_metric(config: Config, sets: Sequence[EvaluationSet]) -> str:
    """Returns the metric that evaluation.patience watches. Raises ValueError if none is given and no set has a loss."""
    if name := config.evaluation.metric or config.checkpoints.keep_best:
        return name
    if not sets:
        raise ValueError("evaluation.metric: is null, but there is no set that has a loss; set it to eval/stop_rate")
    return f"eval/{sets[0].name}/loss"


_STOP_RATE, _OWN_MEASURES = "eval/stop_rate", "eval/measures/"


def require_metric(
    key: str, name: str, sets: Sequence[EvaluationSet], *, has_prompts: bool, has_own: bool = False
) -> None:
    """Raises ValueError if the run does not measure the metric `name`, which the configuration's `key` gives.

    Args:
        has_own: Whether a user's `compute_metrics` gives numbers, whose names the first evaluation shows.
    """
    if has_own and name.startswith(_OWN_MEASURES):
        return
    if name.startswith(_OWN_MEASURES):
        raise ValueError(f"{key}: only a function compute_metrics can give {name}; pass one (docs/extending.md)")
    known = [_STOP_RATE] if has_prompts else []
    for each in sets:
        roles = {int(role) for conversation in each.conversations for role in set(conversation.role_ids[1:].tolist())}
        measures = ["loss", "token_accuracy", *(f"roles/{Role(role).name.lower()}/loss" for role in sorted(roles))]
        known += [f"eval/{each.name}/{measure}" for measure in measures]
    if name not in known:
        raise ValueError(f"{key}: {name} is no metric of this run; give one of {', '.join(known)}")


def best_metric(config: Config) -> str | None:
    """Returns the metric of the best checkpoint, which a limit that ends the run needs, too; None if none is kept."""
    return config.checkpoints.keep_best or (WITHIN_LIMITS if config.evaluation.stops_at_limit else None)


def is_patience_over(config: Config, sets: Sequence[EvaluationSet], watched: Best | None) -> bool:
    """Returns whether evaluation.patience ends the run: too many evaluations without a better value of its metric."""
    patience = config.evaluation.patience
    if patience is None or watched is None or watched.num_worse < patience:
        return False
    return watched.metric == watched_metric(config, sets)


# --- The evaluator ---


class Evaluator:
    """Evaluates a run's model without changing weights, gradients, the data position or any random state.

    All ranks have to call the same methods.

    Attributes:
        evaluated_step: The step of the last evaluation; None before the first one.
        best: The best evaluation by checkpoints.keep_best; the evaluation before the first step does not count.
        watched: The best by the metric of evaluation.patience, the first evaluation included; None if it is null.
        kept: The losses of the sets of evaluation.keep, by their names.
    """

    def __init__(
        self,
        config: Config,
        data: RunData,
        ranks: Ranks,
        should_stop: Callable[[], bool],
        extension: Extension = NO_EXTENSION,
    ) -> None:
        """`should_stop` returns whether a stop of the run was requested; its value is the same on all ranks."""
        self._config, self._data, self._ranks, self._should_stop = config, data, ranks, should_stop
        self._extension = extension
        self._options, self._best_metric = config.evaluation, best_metric(config)
        has_patience = self._options.patience is not None
        self._watched_metric = watched_metric(config, data.evaluation_sets) if has_patience else None
        self.evaluated_step: int | None = None
        self.best: Best | None = None
        self.watched: Best | None = None
        self.kept: dict[str, KeptLoss] = {}
        self._answers_digest = self._digest_of_answers()

    @property
    def exceeded(self) -> list[str]:
        """How sets exceed their limits that end the run; empty if none does."""
        return problems(self._data.evaluation_sets, self.kept, "stop") if self.kept else []

    @property
    def kept_facts(self) -> dict[str, Any]:
        """The losses of the kept sets for result.json."""
        sets = {each.name: each for each in self._data.evaluation_sets}
        return {
            name: facts_of(sets[name], each) | {"exceeded_at": exceeded_at(sets[name], each)}
            for name, each in self.kept.items()
        }

    @property
    def is_patience_over(self) -> bool:
        return is_patience_over(self._config, self._data.evaluation_sets, self.watched)

    @property
    def reason_of_end(self) -> str | None:
        """Why a limit or evaluation.patience ends the run; None if neither does."""
        if exceeded := self.exceeded:
            return "; ".join(exceeded)
        watched = self.watched
        if watched is None or not self.is_patience_over:
            return None
        best = f"{watched.value:.4f}, of step {watched.step}, in {counted(watched.num_worse, 'evaluations')}"
        return f"evaluation.patience: {watched.metric} has had no better value than {best}"

    @property
    def best_step(self) -> int | None:
        return self.best and self.best.step

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Returns whether an evaluation is due after `step`; False if it was already evaluated."""
        if not self._data.is_evaluated or self.evaluated_step == step:
            return False
        if step == 0:
            return self._options.at_start
        interval = self._options.interval
        return is_last or (interval is not None and step % interval == 0)

    def evaluate(self, model: LlamaForSFT, step: int) -> Evaluation | None:
        """Evaluates all sets and prompts.

        Returns None if a stop was requested meanwhile; the evaluation is then due again after the run resumes.
        """
        started, data = time.perf_counter(), self._data
        if self.evaluated_step is None:  # it may take minutes without output
            parts = [
                f"{each.name}, {counted(len(each.conversations), 'conversations')}" for each in data.evaluation_sets
            ]
            parts += [f"prompts to answer: {len(data.questions)}"] * bool(data.questions)
            console.write(f"evaluation begins, which may take minutes: {'; '.join(parts)}")
        token_budget = self._options.tokens_per_batch or data.dataset.token_budget
        options: Any = {"token_budget": token_budget, "ranks": self._ranks, "before_pack": self._raise_if_stopped}
        try:
            with whole_head(model):
                sets = {each.name: measure_set(model, each, **options) for each in data.evaluation_sets}
                with gathered_blocks(model, self._fits):
                    answers = [self._answer(model, question) for question in data.questions]
            measures = self._measures(answers, step)
        except StopRequestedError:
            return None
        stop_rate = sum(each.stopped for each in answers) / len(answers) if answers else None
        for each in data.evaluation_sets:
            if each.limit is not None:
                self.kept[each.name] = kept_after(self.kept.get(each.name), each, sets[each.name].loss, step)
                sets[each.name] = replace(sets[each.name], kept=facts_of(each, self.kept[each.name]))
        evaluation = Evaluation(step, time.perf_counter() - started, sets, answers, stop_rate, measures)
        self.evaluated_step = step
        # Step 0 has no checkpoint to keep.
        if self._best_metric and step > 0 and not self.exceeded:
            self.best = self._after(self.best, self._best_metric, evaluation)
        if self._watched_metric:
            self.watched = self._after(self.watched, self._watched_metric, evaluation)
        for line in evaluation.as_lines():
            console.write(line)
        for problem in problems(data.evaluation_sets, self.kept, "warn") if self.kept else ():
            console.warn(f"{problem}")
        return evaluation

    def _raise_if_stopped(self) -> None:
        if self._should_stop():
            raise StopRequestedError

    def _fits(self, num_bytes: int) -> bool:
        """Returns whether every rank has twice as much free memory; a collective."""
        return not self._ranks.any(2 * num_bytes > free_memory(self._ranks.device))

    def _answer(self, model: LlamaForSFT, question: Question) -> Answer:
        """Generates the model's greedy answer, computed in the dtype of the parameters."""
        tokenizer, stop_ids = self._data.chat_tokenizer, self._data.sample.stop_ids
        prompt_ids, dtype = question.ids(tokenizer), model.head_weight.dtype
        token_ids: list[int] = []
        for token_id in generate(
            model, prompt_ids, self._options.max_new_tokens, stop_ids, choose=most_likely, dtype=dtype
        ):
            token_ids.append(token_id)
            self._raise_if_stopped()
        text = str(tokenizer.tokenizer.decode(token_ids, skip_special_tokens=True)).strip()
        return Answer(question.text, text, len(token_ids), token_ids[-1] in stop_ids)

    def _measures(self, answers: Sequence[Answer], step: int) -> dict[str, float]:
        """Returns what a user's `compute_metrics` gives, computed on the main rank. Raises ExtensionError on all."""
        compute = self._extension.compute_metrics
        if compute is None:
            return {}
        problem, measures, cause = "", dict[str, float](), None
        if self._ranks.is_main:
            try:
                rows = [deepcopy(dict(each.row)) for each in self._data.questions]
                measures = call_compute_metrics(compute, answers, rows)
            except ExtensionError as error:
                problem, cause = str(error), error.__cause__
        facts = self._ranks.gather({"problem": problem, "measures": measures})[0]
        problem, measures = facts["problem"], facts["measures"]
        names = [_OWN_MEASURES + name for name in measures]
        for metric in (self._best_metric, self._watched_metric):
            if not problem and metric and metric.startswith(_OWN_MEASURES) and metric not in names:
                problem = f"the configuration names {metric}, but compute_metrics gives {names}; make them agree"
        if problem:
            saved = ". The last finished step is saved" if step else ""
            raise ExtensionError(f"{problem}{saved}", may_save=True) from cause
        return measures

    def _measured_on(self, metric: str | None) -> str:
        """Returns the fingerprint of what a metric is measured on; values of another are not comparable."""
        if metric == _STOP_RATE or (metric is not None and metric.startswith(_OWN_MEASURES)):
            return self._answers_digest
        return " ".join(each.fingerprint[:12] for each in self._data.evaluation_sets)

    def _digest_of_answers(self) -> str:
        """Returns the digest of the prompts, the length of answers, and the user's code with its values."""
        facts: list[Any] = [[dict(each.row) for each in self._data.questions], self._options.max_new_tokens]
        if self._extension.compute_metrics is not None:
            described = self._extension.describe(self._config.extend)
            facts += [described and [described.setup, described.source, dict(described.options)]]
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()[:12]

    def _after(self, best: Best | None, metric: str, evaluation: Evaluation) -> Best | None:
        """Returns the best of the evaluation and `best`, the best one before."""
        step = evaluation.step
        value = float(step) if metric == WITHIN_LIMITS else metric_of(evaluation.metrics(), metric)
        if best is not None:
            best = best.after(value, step)
        elif value is not None:
            best = Best(metric, value, step, self._measured_on(metric))
        if best is None or best.step != step:
            return best
        return replace(best, kept={name: each.loss for name, each in self.kept.items()})

    def state(self) -> dict[str, Any]:
        """Returns the evaluator's state for a checkpoint, as JSON values."""
        best, watched = self.best and asdict(self.best), self.watched and asdict(self.watched)
        kept = {name: asdict(each) for name, each in self.kept.items()}
        return {"evaluated_step": self.evaluated_step, "best": best, "watched": watched, "kept": kept}

    def resume(self, state: Mapping[str, Any], checkpoints: Path) -> None:
        """Restores the state that a checkpoint of the run has."""
        self.evaluated_step = state["evaluated_step"]
        self.kept = comparable_losses(self._data.evaluation_sets, state)
        for line in unknown_losses(self._data.evaluation_sets, state):
            console.write(f"keep       {line}", is_needed=True)
        watched, best = (state[name] and Best(**named_now(state[name])) for name in ("watched", "best"))
        if watched and self._watched_metric:
            if (watched.metric, watched.fingerprint) == (self._watched_metric, self._measured_on(watched.metric)):
                self.watched = watched
            else:
                line = f"patience   starts again: until now, it watched {watched.metric} under different settings"
                console.write(line, is_needed=True)
        if best:
            is_there = main_or_raise(self._ranks, (checkpoints / f"step-{best.step}").is_dir)
            is_comparable = (best.metric, best.fingerprint) == (self._best_metric, self._measured_on(best.metric))
            if is_there and is_comparable and is_within(self._data.evaluation_sets, self.kept, best.kept):
                self.best = best
            elif is_there and is_comparable:
                what = f"step {best.step} does not meet the current limits of evaluation.keep"
                console.write(f"best       {what}; the search for the best starts again", is_needed=True)
            else:
                what = f"step {best.step} is gone, or its {best.metric} was measured under different settings"
                console.write(f"best       {what}; the search for the best starts again", is_needed=True)
