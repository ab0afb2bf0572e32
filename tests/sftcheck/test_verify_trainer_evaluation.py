"""verify_trainer: the loss of an evaluation, the rows that it shares with the training, and the length of schedules."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, ReduceLROnPlateau
from transformers import Trainer

from sftcheck.trainer.evaluation import num_shared_rows
from sftcheck.trainer.schedule import num_steps_of, schedule_note
from sftcheck.trainer.trainer_subject import TrainerSubject
from sftron import verify_trainer
from tests.sftcheck.small_trainers import ANSWERS, encoded, failed, messages, plain, row_of, sft

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
    assert ("alike: not measured, the rows have" in row.measured) is (make is two_sets)
    assert (trainer.args.per_device_eval_batch_size, trainer.state.log_history) == (1, [])


@pytest.mark.parametrize(
    ("kind", "rows", "size", "words"),
    [
        (CountsLabels, UNLIKE, 1, "; eval: eval_loss is one ratio"),
        (Trainer, UNLIKE, 3, ""),
        (Trainer, ALIKE, 1, "; eval: not measured, the rows have 8 and 8 labels, so a mean of means equals the ratio"),
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


# -- rows of both ----------------------------------------------------------------------------------------------------


def test_rows_of_the_evaluation_that_are_trained_are_counted_in_a_fact(own: Any, tmp_path: Path) -> None:
    trainer: Any = evaluated(own, tmp_path)
    assert "trained too" not in TrainerSubject(trainer, own, None, "assistant").facts
    rows = [*trainer.train_dataset.select([3, 7]), *trainer.eval_dataset]
    trainer.eval_dataset = {"few": trainer.eval_dataset, "more": Dataset.from_list(rows)}
    report = verify_trainer(trainer)
    assert report.facts["trained too"] == "more: 2 of 5 rows are in the training too"


def test_rows_of_the_evaluation_are_sought_among_all_rows_of_the_training(own: Any, tmp_path: Path) -> None:
    ids = [[number % 97, number, 5] for number in range(2000)]
    assert num_shared_rows([{"input_ids": each} for each in ids], [{"input_ids": each} for each in ids[1990:]]) == 10
    texts = [{"text": f"bird {number}"} for number in range(40)]
    assert num_shared_rows(texts, [*texts[38:], {"text": "fish"}]) == 2
    talks = [{"messages": messages(number), "id": number} for number in range(40)]
    assert num_shared_rows(talks, [{"messages": messages(number)} for number in (39, 40)]) == 1


# -- schedules -------------------------------------------------------------------------------------------------------


def scheduled(own: Any, folder: Path, make: Any, **options: Any) -> str:
    """Returns the note about a schedule that `make` gives for an optimizer, in a run of 40 steps."""
    trainer = plain(own, folder, max_steps=40, **options)
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-3)
    trainer.optimizer, trainer.lr_scheduler = optimizer, make(optimizer)
    rate = optimizer.param_groups[0]["lr"]
    note = schedule_note(trainer, 40)
    assert (optimizer.param_groups[0]["lr"], trainer.lr_scheduler.last_epoch) == (rate, 0)
    return note


@pytest.mark.parametrize(
    ("make", "note"),
    [
        (lambda o: transformers.get_cosine_schedule_with_warmup(o, 0, 4000), "is lowest after 4,000 steps"),
        (lambda o: transformers.get_linear_schedule_with_warmup(o, 5, 10), "is lowest after 10 steps"),
        (lambda o: transformers.get_constant_schedule_with_warmup(o, 500), "rises for 500 steps"),
        (lambda o: OneCycleLR(o, 1e-3, total_steps=4000), "rises for 1,199 steps"),
        (lambda o: CosineAnnealingLR(o, 400), "is lowest after 400 steps"),
        (lambda o: LinearLR(o, 1.0, 0.1, 8), "is lowest after 8 steps"),
        (lambda o: transformers.get_cosine_schedule_with_warmup(o, 0, 10**6), "falls for more than 20,000 steps"),
    ],
)
def test_a_schedule_of_another_length_than_the_run_is_named_with_both_numbers(
    make: Any, note: str, own: Any, tmp_path: Path
) -> None:
    found = scheduled(own, tmp_path, make)
    assert found.startswith(f"the learning rate {note}")
    assert found.endswith("the run has 40")


@pytest.mark.parametrize(
    "make",
    [
        lambda o: transformers.get_cosine_schedule_with_warmup(o, 4, 40),
        lambda o: transformers.get_linear_schedule_with_warmup(o, 0, 40),
        lambda o: transformers.get_constant_schedule_with_warmup(o, 10),
        transformers.get_constant_schedule,
        lambda o: transformers.get_cosine_with_hard_restarts_schedule_with_warmup(o, 0, 40, 4),
        lambda o: transformers.get_inverse_sqrt_schedule(o, 10),
        lambda o: transformers.get_wsd_schedule(o, 4, 10, num_training_steps=40),
        lambda o: OneCycleLR(o, 1e-3, total_steps=40),
    ],
)
def test_a_schedule_of_the_run_is_not_named(make: Any, own: Any, tmp_path: Path) -> None:
    assert not scheduled(own, tmp_path, make)


class FixedSchedule(Trainer):
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        return transformers.get_cosine_schedule_with_warmup(optimizer or self.optimizer, 0, 4000)  # pyright: ignore


def test_a_schedule_that_the_trainer_makes_is_followed_too(own: Any, tmp_path: Path) -> None:
    trainer = plain(own, tmp_path, FixedSchedule)
    assert num_steps_of(trainer, 24) == 9
    facts = verify_trainer(trainer).facts
    assert facts["schedule"] == "the learning rate is lowest after 4,000 steps, and the run has 9"
    assert trainer.lr_scheduler is None
    for kind in ("linear", "cosine", "constant_with_warmup", "inverse_sqrt", "polynomial"):
        sound = plain(own, tmp_path, lr_scheduler_type=kind, warmup_steps=2)
        assert not schedule_note(sound, 9), kind


def test_a_schedule_that_cannot_be_followed_is_left_alone(own: Any, tmp_path: Path) -> None:
    trainer = plain(own, tmp_path, max_steps=40)
    trainer.lr_scheduler = ReduceLROnPlateau(torch.optim.SGD(trainer.model.parameters(), lr=1e-3))  # pyright: ignore
    assert not schedule_note(trainer, 40)


def test_a_last_accumulation_of_fewer_batches_is_a_step(own: Any, tmp_path: Path) -> None:
    trainer = plain(own, tmp_path)
    trainer.args.gradient_accumulation_steps, trainer.args.num_train_epochs = 16, 3
    num_rows = 31 * trainer._train_batch_size
    assert num_steps_of(trainer, num_rows) == 6
