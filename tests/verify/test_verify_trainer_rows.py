"""verify_trainer: each row on a trainer that breaks its law alone, and each kind of state after it."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerBase, Trainer, TrainingArguments

from sftron import verify_trainer
from sftron.verify.verify_trainer import REQUIRED
from tests.verify.test_verify_trainer import (
    ANSWERS,
    QUIET,
    _quiet,  # noqa: F401  the fixture of the mark below
    encoded,
    failed,
    messages,
    plain,
    row_of,
    sft,
    tiny,
)

pytestmark = [pytest.mark.filterwarnings("ignore::"), pytest.mark.usefixtures("_quiet")]


@pytest.fixture
def own(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer that a test may change."""
    return copy.deepcopy(tokenizer)


class Collator(DataCollatorForSeq2Seq):
    """Pads labels by position, and then changes the batch."""

    change: Callable[[Any], None]

    def __call__(self, features: Any, return_tensors: Any = None) -> Any:
        batch = super().__call__(features)
        type(self).change(batch)
        return batch


def collated(own: Any, folder: Path, change: Callable[[Any], None], kind: type[Trainer] = Trainer) -> Trainer:
    return plain(own, folder, kind, type("Changing", (Collator,), {"change": staticmethod(change)})(own))


def of_features(own: Any, folder: Path, features: list[dict[str, Any]], model: Any = None, collator: Any = None) -> Any:
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **QUIET}
    return Trainer(
        model or tiny(own),
        TrainingArguments(str(folder / "out"), **options),
        train_dataset=features,  # pyright: ignore[reportArgumentType]
        processing_class=own,
        data_collator=collator or DataCollatorForSeq2Seq(own),
    )


def features_of(own: Any) -> list[dict[str, Any]]:
    return encoded(own, [{"messages": messages(number)} for number in range(24)])


# -- the rows --------------------------------------------------------------------------------------------------------


def masked_pad(own: Any, folder: Path) -> Trainer:
    own.pad_token = own.eos_token

    def mask(batch: Any) -> None:
        batch["labels"][batch["input_ids"] == own.pad_token_id] = -100

    return collated(own, folder, mask)


def masked_stop(own: Any, folder: Path) -> Trainer:
    def mask(batch: Any) -> None:
        batch["labels"][batch["input_ids"] == own.eos_token_id] = -100

    return collated(own, folder, mask)


def trained_padding(own: Any, folder: Path) -> Trainer:
    def train(batch: Any) -> None:
        padding = batch["attention_mask"] == 0
        batch["labels"][padding] = batch["input_ids"][padding]

    return collated(own, folder, train)


class Counted(Trainer):
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, torch.tensor(sum(len(batch["input_ids"]) for batch in batches))


def counted_rows(own: Any, folder: Path) -> Trainer:
    return plain(own, folder, Counted)


def crossing_labels(own: Any, folder: Path) -> Trainer:
    features = features_of(own)

    def flatten(rows: Any) -> dict[str, torch.Tensor]:
        names = ("input_ids", "labels")
        batch = {name: torch.tensor([[each for row in rows for each in row[name]]]) for name in names}
        positions = [at for row in rows for at in range(len(row["input_ids"]))]
        return {**batch, "position_ids": torch.tensor([positions])}

    for each in features:
        each["labels"][0] = each["input_ids"][0]
    return of_features(own, folder, features, collator=flatten)


def mixed_rows(own: Any, folder: Path) -> Trainer:
    """Each row of a batch sees the row before it."""

    def mix(_module: Any, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
        return torch.cat([out[:1], out[1:] + out[:-1].mean(dim=1, keepdim=True)])

    trainer = plain(own, folder)
    model: Any = trainer.model
    model.model.norm.register_forward_hook(mix)
    return trainer


def shared_storage(own: Any, folder: Path) -> Trainer:
    trainer = plain(own, folder)
    model: Any = trainer.model
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.data, requires_grad=False)
    return trainer


def beside_the_adapter(own: Any, folder: Path) -> Trainer:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(tiny(own), LoraConfig(r=4, target_modules=["q_proj"]))
    model.base_model.model.model.norm.weight.requires_grad_(True)
    return sft(own, folder, ANSWERS, model)


def without_gradient(own: Any, folder: Path) -> Trainer:
    trainer = plain(own, folder)
    block: Any = trainer.model.model.layers[0].mlp  # pyright: ignore
    block.forward = torch.no_grad()(block.forward)
    return trainer


class SavesAnother(Trainer):
    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir)
        other: Any = copy.deepcopy(self.processing_class)
        other.chat_template = other.chat_template.replace("'\n'", "'\n\n'").replace("\n' +", "\n\n' +")
        assert other.chat_template != self.processing_class.chat_template  # pyright: ignore
        other.save_pretrained(output_dir)


def another_template_saved(own: Any, folder: Path) -> Trainer:
    trainer = plain(own, folder, SavesAnother)
    trainer.train_dataset = [  # pyright: ignore[reportAttributeAccessIssue]
        {**each, "messages": messages(number)} for number, each in enumerate(features_of(own))
    ]
    return trainer


def rows_without_labels(own: Any, folder: Path) -> Trainer:
    features = features_of(own)
    for each in features[::4]:
        each["labels"] = [-100] * len(each["labels"])
    return of_features(own, folder, features)


def trained_headers(own: Any, folder: Path) -> Trainer:
    features = features_of(own)
    for each in features:
        first = each["labels"].count(-100)  # the last token before it is a line break, which may be trained
        each["labels"][first - 3 : first] = each["input_ids"][first - 3 : first]
    return of_features(own, folder, features)


def half_answers(own: Any, folder: Path) -> Trainer:
    features = features_of(own)
    for each in features:
        first = each["labels"].count(-100)
        each["labels"][first : first + 3] = [-100] * 3
    return of_features(own, folder, features)


def doubled_beginning(own: Any, folder: Path) -> Trainer:
    own.chat_template = "{{ bos_token }}" + own.chat_template
    features = [{name: [ids[0], *ids] for name, ids in each.items()} for each in features_of(own)]
    return of_features(own, folder, features)


def no_beginning(own: Any, folder: Path) -> Trainer:
    own.chat_template = "{{ bos_token }}" + own.chat_template
    return of_features(own, folder, [{name: ids[1:] for name, ids in each.items()} for each in features_of(own)])


def another_template(own: Any, folder: Path) -> Trainer:
    other = copy.deepcopy(own)
    other.chat_template = own.chat_template.replace("<|im_start|>", "<|start_header_id|>")
    features = [{**each, "messages": messages(number)} for number, each in enumerate(features_of(other))]
    return of_features(own, folder, features)


@pytest.mark.parametrize(
    ("make", "row", "measured", "remedy"),
    [
        (masked_pad, "stop tokens", "0 of 24 answers train <|im_end|>", "The padding token is the stop token"),
        (masked_stop, "stop tokens", "0 of 24 answers train <|im_end|>", "The stop token is masked away"),
        (trained_padding, "padding", "padding tokens trained", "labels[attention_mask == 0] = -100"),
        (counted_rows, "loss", "num_items_in_batch is 8, and", "do not override get_batch_samples"),
        (crossing_labels, "positions", "18 labels cross", "first token to -100"),
        (mixed_rows, "isolation", "in different rows: others change by", "batch statistics"),
        (mixed_rows, "loss", "the same rows one by one", "depends on its neighbors"),
        (shared_storage, "adapters", "1 frozen tensors move", "requires_grad"),
        (beside_the_adapter, "adapters", "1 trained tensors are not saved with the adapter", "modules_to_save=[...]"),
        (without_gradient, "adapters", "4 trainable tensors get no gradient", "requires_grad"),
        (another_template_saved, "generation", "documents differ from the saved template's", "processing_class"),
        (rows_without_labels, "truncation", "6 rows have nothing to train", "These rows train nothing"),
        (trained_headers, "trained tokens", "48 tokens of headers trained", "Move {% generation %} behind the header"),
        (half_answers, "trained tokens", "72 of ", "Answers are left out of the loss"),
        (doubled_beginning, "ids", "0 of 24 documents", "add_special_tokens=False"),
        (no_beginning, "ids", "0 of 24 documents", "that the batch lacks"),
        (another_template, "ids", "0 of 24 documents", "save the template that you trained with"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_what_breaks_one_law_fails_in_its_row(
    make: Callable[[Any, Path], Trainer], row: str, measured: str, remedy: str, own: Any, tmp_path: Path
) -> None:
    report = verify_trainer(make(own, tmp_path))
    assert row in failed(report), [(each.name, each.status, each.measured) for each in report.rows]
    assert measured in row_of(report, row).measured
    assert remedy in row_of(report, row).remedy
    assert not report.passed


def test_a_report_without_one_of_the_required_rows_has_not_passed(own: Any, tmp_path: Path) -> None:
    report = verify_trainer(sft(own, tmp_path, ANSWERS))
    assert report.passed
    names = {each.name for each in report.rows}
    for name in ("ids", "trained tokens", "stop tokens", "isolation", "truncation"):
        assert name in names
        checks = tuple(replace(each, passed=None) if each.name == name else each for each in report.checks)
        assert not replace(report, checks=checks).passed, name
    assert len(REQUIRED) == 5


def test_an_evaluation_that_cannot_be_measured_is_named_in_its_rows(own: Any, tmp_path: Path) -> None:
    trainer = plain(own, tmp_path)
    trainer.eval_dataset = [{"input_ids": "no ids"}] * 4  # pyright: ignore[reportAttributeAccessIssue]
    report = verify_trainer(trainer)
    assert not failed(report)
    for name in ("ids", "trained tokens", "stop tokens", "truncation"):
        assert "; eval: not measured: " in row_of(report, name).measured


# -- what is put back ------------------------------------------------------------------------------------------------


def test_gradients_buffers_and_configurations_are_put_back(own: Any, tmp_path: Path) -> None:
    own.eos_token = "<|endoftext|>"  # which transformers writes into the configurations of the model
    trainer = plain(own, tmp_path)
    model: Any = trainer.model
    model.config.eos_token_id = model.generation_config.eos_token_id = 2
    model.register_buffer("num_calls", torch.zeros(()))
    model.register_forward_hook(lambda module, *_: module.num_calls.add_(1))
    for each in model.parameters():
        each.grad = torch.full_like(each, 0.5)
    before = copy.deepcopy((model.config.to_dict(), model.generation_config.to_dict()))
    verify_trainer(trainer)
    assert all(each.grad is not None and (each.grad == 0.5).all() for each in model.parameters())
    assert model.num_calls == 0
    assert (model.config.to_dict(), model.generation_config.to_dict()) == before


class Drawing(DataCollatorForSeq2Seq):
    def __call__(self, features: Any, return_tensors: Any = None) -> Any:
        self.draws.append(self.random.random())  # pyright: ignore[reportAttributeAccessIssue]
        return super().__call__(features)


class Noting(Trainer):
    def compute_loss(self, *args: Any, **options: Any) -> Any:
        self.notes["losses"].append(1)  # pyright: ignore[reportAttributeAccessIssue]
        return super().compute_loss(*args, **options)


def test_a_collator_a_trainer_and_an_accelerator_with_state_have_it_afterwards(own: Any, tmp_path: Path) -> None:
    collator: Any = Drawing(own)
    collator.random, collator.draws = random.Random(0), []
    trainer: Any = plain(own, tmp_path, Noting, collator)
    trainer.notes = {"losses": []}
    accelerator = {name: (id(value), repr(value)) for name, value in vars(trainer.accelerator).items()}
    verify_trainer(trainer)
    assert collator.random.getstate() == random.Random(0).getstate()
    assert not collator.draws
    assert trainer.notes == {"losses": []}
    assert {name: (id(value), repr(value)) for name, value in vars(trainer.accelerator).items()} == accelerator
