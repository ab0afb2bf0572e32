"""When a run is evaluated, what comes out and is printed, and which evaluation was the best so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sftron.data.overlap import Overlap, overlaps
from sftron.models.llama import LlamaForSFT
from sftron.models.sharding import whole_head
from sftron.train import console
from sftron.train.answers import Answer, answer, stop_rate
from sftron.train.best import Best, metric_of
from sftron.train.run_data import token_budget
from sftron.train.set_loss import SetLoss, measure_set
from sftron.train.setup import Setup


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of all sets and prompts. seconds: that it took. stop_rate: None without prompts."""

    step: int
    seconds: float
    sets: dict[str, SetLoss]
    answers: list[Answer]
    stop_rate: float | None

    def record(self) -> dict[str, Any]:
        """The line of evaluations.jsonl."""
        return asdict(self)

    def metrics(self) -> dict[str, Any]:
        """Under the names that wandb and checkpoints.keep_best have for them, before they are joined by "/"."""
        sets = {name: asdict(each) for name, each in self.sets.items()}
        return {"eval": {**sets, "stop_rate": self.stop_rate, "seconds": self.seconds}}


class Evaluator:
    """Evaluates a run's model. It changes neither weights, gradients, the place in the data nor any random state.

    should_stop: whether the run was asked to end, on some rank; all ranks ask together.
    evaluated_step: of the last evaluation. best: by checkpoints.keep_best, of those after the first step. All ranks
    have to call the same methods.
    """

    def __init__(self, plan: Setup, should_stop: Callable[[], bool]) -> None:
        self._plan, self._should_stop = plan, should_stop
        self._options = plan.config.evaluation
        self.evaluated_step: int | None = None
        self.best: Best | None = None

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """After `step`, the number of steps made; not a second time."""
        if not self._plan.data.is_evaluated or self.evaluated_step == step:
            return False
        if step == 0:
            return self._options.at_start
        interval = self._options.interval
        return is_last or (interval is not None and step % interval == 0)

    def evaluate(self, model: LlamaForSFT, step: int) -> Evaluation | None:
        """None where the run was asked to end meanwhile; the evaluation is then due when it goes on."""
        started = time.perf_counter()
        config, ranks = self._plan.config, self._plan.ranks
        sets: dict[str, SetLoss] = {}
        answers: list[Answer] = []
        with whole_head(model):
            for each in self._plan.data.evaluation_sets:
                measured = measure_set(
                    model,
                    each,
                    token_budget=self._options.tokens_per_batch or token_budget(config),
                    ranks=ranks,
                    should_stop=self._should_stop,
                )
                if measured is None:
                    return None
                sets[each.name] = measured
            for question in self._plan.data.questions:
                answered = answer(
                    model,
                    self._plan.data.chat_tokenizer,
                    question,
                    max_new_tokens=self._options.max_new_tokens,
                    stop_ids=self._plan.data.sample.stop_ids,
                    should_stop=self._should_stop,
                )
                if answered is None:
                    return None
                answers.append(answered)
        evaluation = Evaluation(step, time.perf_counter() - started, sets, answers, stop_rate(answers))
        self.evaluated_step = step
        self._judge(evaluation)
        return evaluation

    def _judge(self, evaluation: Evaluation) -> None:
        """Step 0 has no checkpoint that could be kept."""
        metric = self._plan.config.checkpoints.keep_best
        if metric is None or evaluation.step == 0:
            return
        value = metric_of(evaluation.metrics(), metric)
        if value is not None and (self.best is None or self.best.is_beaten_by(value)):
            self.best = Best(metric, value, evaluation.step, self._of)

    @property
    def _of(self) -> str:
        """What the values of the metric are of: those on other rows cannot be compared."""
        return " ".join(each.fingerprint[:12] for each in self._plan.data.evaluation_sets)

    def state(self) -> dict[str, Any]:
        """JSON for the run's checkpoint."""
        return {"evaluated_step": self.evaluated_step, "best": self.best and asdict(self.best)}

    @property
    def best_step(self) -> int | None:
        return self.best and self.best.step

    def go_on_from(self, state: Mapping[str, Any], checkpoints: Path) -> None:
        """state: of a run's checkpoint; those of earlier versions know of no evaluation. Raises ValueError for what is
        no such state."""
        kept = state.get("evaluation", {})
        try:
            step, best = kept.get("evaluated_step"), kept.get("best")
            if step is not None and (type(step) is not int or step < 0):
                raise TypeError(step)
            self.evaluated_step, best = step, best and Best(**best)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"the checkpoint's evaluation is not what a run keeps ({error!r})") from error
        if best and (reason := self._reason_against(best, checkpoints)):
            console.say(f"best       step {best.step} {reason}; the best is looked for anew")
        else:
            self.best = best

    def _reason_against(self, best: Best, checkpoints: Path) -> str | None:
        wanted = self._plan.config.checkpoints.keep_best
        if best.metric != wanted:
            return f"was by {best.metric}, and checkpoints.keep_best is {wanted}"
        if best.of != self._of:
            return "was of other evaluation sets"
        if self._plan.ranks.gather({"is_there": (checkpoints / f"step-{best.step}").is_dir()})[0]["is_there"]:
            return None
        return f"is no longer in {checkpoints}"


def describe_sets(plan: Setup) -> None:
    """The evaluation sets, and which of their rows are also trained on: the loss of those says nothing."""
    sets = plan.data.evaluation_sets
    found, num_compared = overlaps([each.preparation for each in sets], plan.data.preparation) if sets else ([], 0)
    for each, overlap in zip(sets, found, strict=True):
        num_tokens = sum(len(conversation) for conversation in each.conversations)
        dropped = "".join(f"; {count} rows dropped: {reason}" for reason, count in sorted(each.dropped.items()))
        console.say(
            f"evaluation {each.name}: {len(each.conversations):,} conversations, {num_tokens:,} tokens"
            f"{dropped}{'' if num_compared else '; not compared with the training data, which is streamed'}"
        )
        if overlap.locations:
            console.say(
                f"WARNING    {_overlap_words(each.name, overlap, num_compared, plan.data.preparation.num_rows)}"
            )


def _overlap_words(name: str, overlap: Overlap, num_compared: int, num_rows: int | None) -> str:
    assert overlap.locations is not None
    there, here = overlap.locations
    part = "" if num_compared == num_rows else f", of which {num_compared:,} of {num_rows:,} were compared"
    return (
        f"{overlap.num_rows:,} rows of {name} are also in the training data{part}; the first: {there} is {here}. "
        "Their loss tells nothing about new data"
    )


def announce_evaluation(plan: Setup) -> None:
    """Before the first one: minutes may pass without another line."""
    sizes = [f"{each.name}, {len(each.conversations):,} conversations" for each in plan.data.evaluation_sets]
    sizes += [f"prompts to answer: {len(plan.data.questions)}"] * bool(plan.data.questions)
    console.say(f"evaluation begins, which may take minutes: {'; '.join(sizes)}")


def say_evaluation(evaluation: Evaluation) -> None:
    for line in _lines(evaluation):
        console.say(line)


def _lines(evaluation: Evaluation) -> Iterator[str]:
    """The numbers of evaluations.jsonl, rounded."""
    for name, each in evaluation.sets.items():
        roles = ", ".join(f"{role} {_number(found['loss'])}" for role, found in each.roles.items())
        accuracy = "none" if each.token_accuracy is None else f"{each.token_accuracy:.1%}"
        yield (
            f"eval {evaluation.step:>4} | {name} loss {_number(each.loss)} | accuracy {accuracy} "
            f"| {each.tokens:,} tokens of {each.conversations:,} conversations | by role: {roles}"
        )
    stopped = sum(each.stopped for each in evaluation.answers)
    of_answers = f" | {stopped} of {len(evaluation.answers)} answers ended by themselves" * bool(evaluation.answers)
    yield f"eval {evaluation.step:>4} | {evaluation.seconds:.1f} s{of_answers}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
