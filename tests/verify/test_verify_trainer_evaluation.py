"""verify_trainer: the loss of an evaluation."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import Trainer

from sftron import verify_trainer
from tests.verify.small_trainers import ANSWERS, encoded, failed, messages, plain, row_of, sft

pytestmark = [pytest.mark.filterwarnings("ignore::"), pytest.mark.usefixtures("quiet")]

UNLIKE = [{"messages": messages(number)} for number in (30, 31, 34)]
"""Answers of three lengths, none of which is trained."""
ALIKE = [{"messages": [messages(number)[0], messages(30)[1]]} for number in (30, 31, 34)]


# -- eval_loss -------------------------------------------------------------------------------------------------------


class CountsLabels(Trainer):
    """What the remedy says: an `evaluate` that weights each batch by its labels."""

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        count = int((inputs["labels"][..., 1:] != -100).sum())
        found = super().prediction_step(model, inputs, *args, **options)
        self.sums.append((count * float(found[0]), count))
        return found

    def evaluate(self, *args: Any, **options: Any) -> Any:
        self.sums: list[tuple[float, int]] = []
        found = super().evaluate(*args, **options)
        loss, count = map(sum, zip(*self.sums, strict=True))
        return {**found, "eval_loss": loss / count}


class RaisesInEvaluate(Trainer):
    def evaluate(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no metric is configured")


def evaluated(own: Any, folder: Path, kind: type[Trainer] = Trainer, rows: Any = UNLIKE, **options: Any) -> Trainer:
    options = {"per_device_eval_batch_size": 1, **options}
    trainer = plain(own, folder, kind, **options)
    trainer.eval_dataset = Dataset.from_list(encoded(own, rows))
    return trainer


def in_bfloat16(own: Any, folder: Path) -> Trainer:
    trainer = evaluated(own, folder, bf16_full_eval=True)
    trainer.model.bfloat16()
    return trainer


def two_sets(own: Any, folder: Path) -> Trainer:
    trainer = evaluated(own, folder)
    trainer.eval_dataset = {"alike": Dataset.from_list(encoded(own, ALIKE)), "unlike": trainer.eval_dataset}  # pyright: ignore
    return trainer


def of_trl(own: Any, folder: Path) -> Trainer:
    trainer: Any = sft(own, folder, ANSWERS, per_device_eval_batch_size=1)
    rows = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in UNLIKE]
    trainer.eval_dataset = sft(own, folder, rows).train_dataset
    return trainer


def with_smoothing(own: Any, folder: Path) -> Trainer:
    return evaluated(own, folder, label_smoothing_factor=0.1)


@pytest.mark.parametrize("make", [evaluated, in_bfloat16, two_sets, of_trl, with_smoothing])
def test_an_eval_loss_that_depends_on_the_batch_size_fails_the_loss(make: Any, own: Any, tmp_path: Path) -> None:
    trainer = make(own, tmp_path)
    report = verify_trainer(trainer)
    row = row_of(report, "loss")
    assert failed(report) == ["loss"], [(each.name, each.measured) for each in report.checks]
    assert "eval_loss of batches with 8 and 27 labels is" in row.measured
    assert row.remedy.startswith("In the evaluation's batches: eval_loss depends on per_device_eval_batch_size")
    assert ("alike: not measured, rows with" in row.measured) is (make is two_sets)
    assert (trainer.args.per_device_eval_batch_size, trainer.state.log_history) == (1, [])


@pytest.mark.parametrize(
    ("kind", "rows", "size", "words"),
    [
        (CountsLabels, UNLIKE, 1, "; eval: eval_loss is one ratio"),
        (Trainer, UNLIKE, 3, ""),
        (Trainer, ALIKE, 1, "; eval: not measured, rows with 8 and 8 labels, where a mean of means is the ratio"),
        (RaisesInEvaluate, UNLIKE, 1, "; eval: not measured: RuntimeError: no metric is configured"),
    ],
)
def test_an_eval_loss_that_is_one_ratio_is_no_fault(
    kind: type[Trainer], rows: Any, size: int, words: str, own: Any, tmp_path: Path
) -> None:
    report = verify_trainer(evaluated(own, tmp_path, kind, rows, per_device_eval_batch_size=size))
    assert report.passed, [(each.name, each.measured) for each in report.checks]
    assert words in row_of(report, "loss").measured
    assert words or "eval" not in row_of(report, "loss").measured
