"""verify_trainer: the step that is computed shows what the accumulation does, or its row says that it does not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, Trainer, default_data_collator

from sftcheck.trainer.trainer_subject import TrainerSubject
from sftron import verify_trainer
from tests.sftcheck.small_trainers import Means, cache, encoded, messages, plain, row_of
from tests.sftcheck.zoo_training import Clips, DividesAgain, KeepsLogits, OwnStep, ZeroesFirst

pytestmark = [pytest.mark.filterwarnings("ignore::"), pytest.mark.usefixtures("quiet")]


def rows_of_equal_lengths(own: Any, folder: Path, kind: type[Trainer], **options: Any) -> Trainer:
    """Every answer has the same number of labels, so that a mean of the micro-batches' means is the ratio."""
    trainer = plain(own, folder, kind, **options)
    answer = {"role": "assistant", "content": "It is one more than one less."}
    rows = encoded(own, [{"messages": [messages(number)[0], answer]} for number in range(24)])
    trainer.train_dataset = Dataset.from_list(rows)
    assert len({sum(label != -100 for label in row["labels"]) for row in rows}) == 1
    return trainer


@pytest.mark.parametrize(("kind", "status"), [(Means, "FAIL"), (Trainer, "PASS")])
def test_micro_batches_with_equal_numbers_of_labels_do_not_hide_a_mean_of_means(
    kind: type[Trainer], status: str, own: Any, tmp_path: Path
) -> None:
    row = row_of(verify_trainer(rows_of_equal_lengths(own, tmp_path, kind)), "loss")
    assert row.status == status, row.measured
    assert (status == "PASS") or "the weight of a micro-batch is off by" in row.measured


class LabelsOfItsOwn(Means):
    """Its loss takes the answers' labels from the collator's batch, whatever their name."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        answers = inputs.pop("answers")
        return super().compute_loss(model, {**inputs, "labels": answers.where(answers > 0, -100)})


class Renaming(DataCollatorForSeq2Seq):
    def __call__(self, features: Any, return_tensors: Any = None) -> Any:
        batch = super().__call__(features)
        batch["answers"] = batch.pop("labels").clamp(min=0)
        return batch


def test_equal_numbers_of_labels_that_cannot_be_changed_are_not_a_pass(own: Any, tmp_path: Path) -> None:
    collator = Renaming(own)
    trainer = rows_of_equal_lengths(own, tmp_path, LabelsOfItsOwn, collator=collator, remove_unused_columns=False)
    row = row_of(verify_trainer(trainer), "loss")
    assert row.status == "SKIP", row.measured
    assert "so a mean of means equals the ratio" in row.measured


class Bins(Trainer):
    """Its dataloader fills bins of rows, and drops the last step if it is not full."""

    rows_of_a_bin = 3

    def _get_train_sampler(self, *_: Any) -> Any:
        self._train_batch_size = self.rows_of_a_bin * self.args.per_device_train_batch_size
        return super()._get_train_sampler()

    def get_train_dataloader(self) -> Any:
        with_drop, self.args.dataloader_drop_last = self.args.dataloader_drop_last, True
        try:
            self._get_train_sampler()
            return super().get_train_dataloader()
        finally:
            self.args.dataloader_drop_last = with_drop


class MeansOfBins(Means, Bins):
    pass


@pytest.mark.parametrize("kind", [Bins, MeansOfBins])
def test_rows_are_added_until_there_is_an_accumulation(kind: type[Trainer], own: Any, tmp_path: Path) -> None:
    report = verify_trainer(plain(own, tmp_path, kind))
    assert len(report.facts["computed"].split(",")) == 2, report.facts["computed"]
    assert row_of(report, "loss").status == ("FAIL" if issubclass(kind, Means) else "PASS")


def test_one_micro_batch_says_nothing_about_an_accumulation(own: Any, tmp_path: Path) -> None:
    trainer = plain(own, tmp_path, Means)
    trainer.train_dataset = trainer.train_dataset.select(range(4))  # pyright: ignore
    row = row_of(verify_trainer(trainer), "loss")
    assert row.status == "SKIP"
    assert "1 micro-batch, but the trainer accumulates 2" in row.measured


def test_rows_that_workers_collate_are_seen(own: Any, tmp_path: Path) -> None:
    own.pad_token = own.eos_token
    trainer = plain(own, tmp_path, dataloader_num_workers=1, dataloader_prefetch_factor=2)
    stop, rows = own.eos_token_id, list(trainer.train_dataset)  # pyright: ignore
    for row in rows:
        row["labels"] = [-100 if label == stop else label for label in row["labels"]]
    trainer.train_dataset = Dataset.from_list(rows)
    report = verify_trainer(trainer)
    assert row_of(report, "stop tokens").remedy.startswith("The labels mask the stop token")
    assert "the same rows one by one" in " ".join(row_of(report, "loss").detail)
    assert (trainer.args.dataloader_num_workers, trainer.args.dataloader_prefetch_factor) == (1, 2)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_logits_of_the_trained_tokens_alone_change_no_row(num_rows: int, own: Any, tmp_path: Path) -> None:
    report = verify_trainer(plain(own, tmp_path, KeepsLogits, per_device_train_batch_size=num_rows))
    assert report.passed, [(row.name, row.status, row.measured) for row in report.checks]
    assert "logits_to_keep" in TrainerSubject(plain(own, tmp_path, KeepsLogits), own, None, "all").arguments
    assert all(row_of(report, name).status == "PASS" for name in ("positions", "loss", "adapters"))


def test_a_leak_between_conversations_is_not_said_to_be_of_the_future(own: Any, tmp_path: Path) -> None:
    row = row_of(verify_trainer(cache(own, tmp_path)), "isolation")
    assert row.status == "FAIL"
    assert "before a changed one" not in row.measured


def padded_pack(own: Any, rows: list[dict[str, list[int]]]) -> dict[str, list[int]]:
    """Joins rows, and pads them behind with stop tokens without labels that have positions of their own."""
    size = 200 - sum(len(row["input_ids"]) for row in rows)
    rows = [{**row, "labels": [-100, *row["labels"][1:]]} for row in rows]
    rows.append({"input_ids": [own.pad_token_id] * size, "labels": [-100] * size})
    pack = {name: [each for row in rows for each in row[name]] for name in ("input_ids", "labels")}
    return {**pack, "position_ids": [at for row in rows for at in range(len(row["input_ids"]))]}


@pytest.mark.parametrize("is_given", [False, True])
def test_padding_with_positions_of_its_own_is_no_document(is_given: bool, own: Any, tmp_path: Path) -> None:
    own.pad_token = own.eos_token
    trainer = plain(own, tmp_path, collator=default_data_collator)
    conversations = [messages(number) for number in range(24)]
    rows = encoded(own, [{"messages": each} for each in conversations])
    trainer.train_dataset = Dataset.from_list([padded_pack(own, rows[first : first + 4]) for first in range(0, 24, 4)])
    report = verify_trainer(trainer, conversations if is_given else None)
    assert report.passed, [(row.name, row.status, row.measured) for row in report.checks]
    assert report.facts["truth"].startswith("24 documents: 24 ")
    assert "padding tokens: not trained" in row_of(report, "padding").measured


# -- gradients -------------------------------------------------------------------------------------------------------


class Halving(OwnStep):
    def change(self, model: Any) -> None:
        for each in model.parameters():
            each.grad.mul_(0.5)


class Freezing(OwnStep):
    """Loses the gradient of one tensor among many."""

    def change(self, model: Any) -> None:
        model.model.layers[0].mlp.up_proj.weight.grad.zero_()


class ClipsAtTheEnd(OwnStep):
    def change(self, model: Any) -> None:
        if self.accelerator.sync_gradients:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)


class DetachesHalf(OwnStep):
    """A loss with the right value and half of its gradient."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(*args, **options)
        return loss / 2 + loss.detach() / 2


@pytest.mark.parametrize("in_bfloat16", [False, True])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OwnStep, ""),
        (ClipsAtTheEnd, ""),
        (DividesAgain, "times the gradients of the loss in 2 micro-batches"),
        (Halving, "from the gradients of the loss in 2 micro-batches"),
        (Clips, "from the gradients of the loss in 2 micro-batches"),
        (ZeroesFirst, "from the gradients of the loss in 2 micro-batches"),
        (Freezing, "furthest model.layers.0.mlp.up_proj.weight (1)"),
    ],
)
def test_a_step_keeps_the_gradient_of_its_loss(
    kind: type[Trainer], words: str, in_bfloat16: bool, own: Any, tmp_path: Path
) -> None:
    trainer = plain(own, tmp_path, kind)
    if in_bfloat16:
        trainer.model.bfloat16()
    report = verify_trainer(trainer)
    row = row_of(report, "gradients")
    assert row.status == ("FAIL" if words else "PASS"), row.measured
    assert words in row.measured
    assert report.passed is not bool(words)
    assert row_of(report, "loss").status == "PASS"


def test_a_loss_with_the_right_value_has_its_gradient(own: Any, tmp_path: Path) -> None:
    row = row_of(verify_trainer(plain(own, tmp_path, DetachesHalf)), "gradients")
    assert (row.status, row.measured) == ("FAIL", "0.5 times the gradients of the loss in 2 micro-batches")
