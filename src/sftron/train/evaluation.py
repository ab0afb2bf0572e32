"""When a run is evaluated, what comes out, and which evaluation was the best so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sftron.models.llama import LlamaForSFT
from sftron.models.sharding import whole_head
from sftron.train import console
from sftron.train.answers import Answer, answer, stop_rate
from sftron.train.best import Best, metric_of
from sftron.train.feed import token_budget
from sftron.train.plan import RunPlan
from sftron.train.set_loss import SetLoss, measure_set


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

    def __init__(self, plan: RunPlan, should_stop: Callable[[], bool]) -> None:
        self._plan, self._should_stop = plan, should_stop
        self._options = plan.config.evaluation
        self.evaluated_step: int | None = None
        self.best: Best | None = None

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """After `step`, the number of steps made; not a second time."""
        if not self._plan.evaluates or self.evaluated_step == step:
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
            for each in self._plan.evaluation_sets:
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
            for question in self._plan.questions:
                answered = answer(
                    model,
                    self._plan.chat_tokenizer,
                    question,
                    max_new_tokens=self._options.max_new_tokens,
                    stop_ids=self._plan.sample.stop_ids,
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
        return " ".join(each.fingerprint[:12] for each in self._plan.evaluation_sets)

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
