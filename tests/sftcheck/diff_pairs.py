"""Pairs of a sound set-up and its broken twin, for the difference of their records."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, Trainer
from transformers.modeling_outputs import CausalLMOutputWithPast

from sftcheck.diff.parts import Factor
from sftcheck.faults import Fault
from sftcheck.record.recorder import record_trainer
from sftron.report.token_record import TokenRecord
from tests.sftcheck.zoo_materials import (
    ROWS,
    FlattenAndMask,
    FlattenWithFirstTokens,
    Pad,
    Rows,
    SumOfMeans,
    chatml,
    encoded,
    in_bfloat16,
    mean_over_all_tokens,
    plain,
    tok,
)
from tests.sftcheck.zoo_training import Clips, CountsAllTokens, DividesAgain, ZeroesFirst, mean_of_rows, undivided

FEW = ROWS[12:20]
MARKDOWN = (
    "{% for each in messages %}{{ '### ' + each.role + ':\n' + each.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)


def features(change: Callable[[dict[str, list[int]]], None] = lambda row: None, rows: Rows = FEW) -> Rows:
    found = encoded(tok("chatml"), rows)
    for row in found:
        change(row)
    return found


def few(rows: Rows | None = None, **given: Any) -> Trainer:
    """Eight short conversations, all of them in the first step."""
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2} | given
    return chatml(features() if rows is None else rows, **given)


def train_everything(row: dict[str, list[int]]) -> None:
    row["labels"] = [-100, *row["input_ids"][1:]]  # padding on the left would predict the first one


def mask_stops(row: dict[str, list[int]]) -> None:
    stop = tok("chatml").eos_token_id
    row["labels"] = [-100 if label == stop else label for label in row["labels"]]


def double_beginning(row: dict[str, list[int]]) -> None:
    row["input_ids"], row["labels"] = [row["input_ids"][0], *row["input_ids"]], [-100, *row["labels"]]


def cut_left(row: dict[str, list[int]]) -> None:
    row["input_ids"], row["labels"] = row["input_ids"][12:], row["labels"][12:]


def cut_right(row: dict[str, list[int]]) -> None:
    row["input_ids"], row["labels"] = row["input_ids"][:-8], row["labels"][:-8]


def train_first_half(row: dict[str, list[int]]) -> None:
    at = [n for n, label in enumerate(row["labels"]) if label != -100]
    for n in at[: len(at) // 2]:
        row["labels"][n] = -100


def blocks(size: int = 71) -> Rows:
    """Blocks of one long text, as group_texts makes them: they cut conversations, and attend across their borders."""
    rows, names = features(), ("input_ids", "labels")
    ids, labels = ([token for row in rows for token in row[name]] for name in names)
    return [{"input_ids": ids[n : n + size], "labels": labels[n : n + size]} for n in range(0, len(ids), size)]


def shifted(**given: Any) -> Trainer:
    return few(collator=Pad(tok("chatml"), shift=True), **given)


def with_weights_of(seed: int) -> Trainer:
    trainer = few()
    torch.manual_seed(seed)
    with torch.no_grad():
        for each in trainer.model.parameters():
            each.add_(0.05 * torch.randn_like(each))
    return trainer


class FlattenWithoutPositions(DataCollatorWithFlattening):
    """One row of all conversations, whose positions run on."""

    def __call__(self, features: Rows, *given: Any, **options: Any) -> dict[str, Any]:
        batch = super().__call__(features, *given, **options)
        return {name: value for name, value in batch.items() if name != "position_ids"}


UPDATES: dict[str, Callable[[], Trainer]] = {
    "highest learning rate": lambda: few(learning_rate=2e-3),
    "learning rates of the last steps": lambda: few(lr_scheduler_type="constant"),
    "learning rates of the first steps": lambda: few(warmup_steps=2),
    "steps of the run": lambda: few(max_steps=40),
    "weight decay": lambda: few(weight_decay=0.1),
    "clipping (max_grad_norm)": lambda: few(max_grad_norm=0.3),
    "betas": lambda: few(adam_beta2=0.95),
    "eps": lambda: few(adam_epsilon=1e-6),
    "optimizer": lambda: few(optim="sgd"),
    "gradient, in units of the loss's": lambda: few(trainer=DividesAgain),
    "gradient kept, apart from the sum of all passes": lambda: few(trainer=Clips),
    "gradient norm": lambda: few(trainer=ZeroesFirst),
    "seeds": lambda: few(data_seed=1),
    "types of the weights": lambda: in_bfloat16(few()),
    "trainable weights": lambda: with_frozen_embeddings(few()),
}
"""Set-ups whose update differs from that of `few`, by the fact that says so."""


def with_frozen_embeddings(trainer: Trainer) -> Trainer:
    trainer.model.get_input_embeddings().weight.requires_grad_(False)
    return trainer


def with_fused_head(
    trainer: Trainer, smoothing: float = 0.0, shift: int = 1, *, in_float32: bool = True, needs_labels: bool = False
) -> Trainer:
    """Computes the loss from the weights of the head, of two tokens at a time, and returns no logits (TRL 1.9).

    Args:
        in_float32: Whether the product with the head is computed in float32, whatever type both have.
    """
    model: Any = trainer.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    original, config = base.forward, base.config

    def forward(
        input_ids: Any = None, labels: Any = None, num_items_in_batch: Any = None, **given: Any
    ) -> CausalLMOutputWithPast:
        if labels is None and not needs_labels:
            return original(input_ids=input_ids, **given)
        hidden = base.base_model(input_ids=input_ids, **given).last_hidden_state[:, :-1]
        targets, loss = labels[:, shift : labels.shape[1] - 1 + shift], torch.zeros(())
        is_trained, head = targets != -100, base.get_output_embeddings().weight
        hidden, head = (hidden.float(), head.float()) if in_float32 else (hidden, head)
        pairs = zip(hidden[is_trained].split(2), targets[is_trained].split(2), strict=True)
        for own, wanted in pairs:
            logits = (own @ head.T).float() / getattr(config, "logits_scaling", 1.0)
            if cap := getattr(config, "final_logit_softcapping", None):
                logits = cap * torch.tanh(logits / cap)
            loss = loss + cross_entropy(logits, wanted, reduction="sum", label_smoothing=smoothing)
        return CausalLMOutputWithPast(loss=loss / (num_items_in_batch or is_trained.sum()))

    base.forward = forward
    return trainer


# -- two faults --------------------------------------------------------------------------------------------------------


class CountsPrompts(Trainer):
    """Counts every token of the conversations, whichever way they are padded."""

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        return sum((batch["input_ids"] != self.processing_class.pad_token_id).sum() for batch in batch_samples)


Parts = dict[str, Any]
"""What a set-up is made of: rows, a `change` of each, and arguments of `few`."""
PARTS: list[tuple[Factor, Parts]] = [
    (Factor.ROWS, {"rows": FEW[:6]}),
    (Factor.ROWS, {"rows": FEW[3:]}),
    (Factor.IDS, {"ids": double_beginning}),
    (Factor.IDS, {"ids": cut_left}),
    (Factor.IDS, {"ids": cut_right}),
    (Factor.TRAINED, {"labels": train_everything}),
    (Factor.TRAINED, {"labels": mask_stops}),
    (Factor.TRAINED, {"labels": train_first_half}),
    (Factor.WEIGHTS, {"trainer": SumOfMeans}),
    (Factor.WEIGHTS, {"trainer": CountsPrompts}),
    (Factor.WEIGHTS, {"compute_loss_func": undivided}),
    (Factor.CONTEXT, {"collator": FlattenAndMask}),
    (Factor.CONTEXT, {"collator": FlattenWithoutPositions}),
    (Factor.CONTEXT, {"collator": lambda: Pad(tok("chatml"), "left", mask=False)}),
]
"""Faults of one factor each, in the order of the factors, that can be put together."""


def put_together(*parts: Parts) -> Trainer:
    given: Parts = {name: value for each in parts for name, value in each.items()}
    rows = features(rows=given.pop("rows", FEW))
    for name in ("labels", "ids"):  # a row's labels are changed before its ids, which take them along
        for row in rows:
            given.get(name, lambda _: None)(row)
        given.pop(name, None)
    if "collator" in given:
        given["collator"] = given["collator"]()
    return few(rows, **given)


def drawn(seed: int) -> list[tuple[Factor, Parts]]:
    """Returns two faults of different factors, in the order of the factors."""
    generator = np.random.default_rng(seed)
    while True:
        first, second = sorted(generator.choice(len(PARTS), 2, replace=False).tolist())
        if PARTS[first][0] is not PARTS[second][0]:
            return [PARTS[first], PARTS[second]]


@dataclass(frozen=True)
class Case:
    broken: Callable[[], Trainer]
    factor: Factor
    fault: Fault | None
    sound: Callable[[], Trainer] = few
    also: tuple[Factor, ...] = ()
    """What follows from it: of a row's first token, nothing is before it that could predict it."""
    conversations: Rows | None = None
    """What packed rows need, whose ids do not show where a conversation begins."""

    def record(self) -> TokenRecord:
        return record_trainer(self.broken(), self.conversations)


CASES = {
    "rows": Case(lambda: few(features(rows=FEW[:6])), Factor.ROWS, None),
    "doubled beginning": Case(lambda: few(features(double_beginning)), Factor.IDS, Fault.DOUBLED_BOS),
    "cut at the beginning": Case(lambda: few(features(cut_left)), Factor.IDS, Fault.ROWS_CUT),
    "cut at the end": Case(lambda: few(features(cut_right)), Factor.IDS, Fault.ROWS_CUT),
    "another template": Case(
        lambda: plain(
            encoded(tok("chatml", MARKDOWN), FEW), tok("chatml"), per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
        ),
        Factor.IDS, Fault.OTHER_FORMAT,
    ),
    "questions trained": Case(lambda: few(features(train_everything)), Factor.TRAINED, Fault.PROMPTS_TRAINED),
    "stops masked": Case(lambda: few(features(mask_stops)), Factor.TRAINED, Fault.STOP_MASKED),
    "half of the answers": Case(lambda: few(features(train_first_half)), Factor.TRAINED, Fault.ANSWERS_LEFT_OUT),
    "labels shifted twice": Case(shifted, Factor.TRAINED, Fault.SHIFTED_LABELS),
    "padding trained": Case(
        lambda: few(collator=Pad(tok("chatml"), label=tok("chatml").pad_token_id or 0)),
        Factor.TRAINED, Fault.PADDING_TRAINED,
    ),
    "labels across borders": Case(
        lambda: few(collator=FlattenWithFirstTokens()), Factor.TRAINED, Fault.PROMPTS_TRAINED,
        sound=lambda: few(collator=DataCollatorWithFlattening()),
    ),
    "mean of means": Case(lambda: few(trainer=SumOfMeans), Factor.WEIGHTS, Fault.MEAN_OF_MEANS),
    "mean of rows": Case(
        lambda: few(compute_loss_func=mean_of_rows), Factor.WEIGHTS, Fault.MEAN_BY_SEQUENCE
    ),
    "sum without division": Case(lambda: few(compute_loss_func=undivided), Factor.WEIGHTS, Fault.UNDIVIDED),
    "mean over padding": Case(
        lambda: few(compute_loss_func=mean_over_all_tokens, gradient_accumulation_steps=1), Factor.WEIGHTS,
        Fault.OTHER_COUNT, sound=lambda: few(gradient_accumulation_steps=1),
    ),
    "all tokens counted": Case(lambda: few(trainer=CountsAllTokens), Factor.WEIGHTS, Fault.OTHER_COUNT),
    "pack without positions": Case(
        lambda: few(collator=FlattenWithoutPositions()), Factor.CONTEXT, Fault.NO_POSITIONS,
    ),
    "pack with a mask of ones": Case(lambda: few(collator=FlattenAndMask()), Factor.CONTEXT, Fault.MASK_OF_ONES),
    "padding attended": Case(
        lambda: few(collator=Pad(tok("chatml"), "left", mask=False)), Factor.CONTEXT, Fault.PADDING_ATTENDED
    ),
    "cut by packing": Case(
        lambda: few(blocks()), Factor.CONTEXT, Fault.CUT_BY_PACKING, conversations=FEW, also=(Factor.TRAINED,)
    ),
    "other weights": Case(lambda: with_weights_of(1), Factor.MODEL, None),
}  # fmt: skip
"""Each differs from its twin in one factor; the twin pads its rows, and trains the answers by one ratio."""

EQUAL = {
    "the same": few,
    "micro-batches of two": lambda: few(per_device_train_batch_size=2, gradient_accumulation_steps=4),
    "one micro-batch": lambda: few(per_device_train_batch_size=8, gradient_accumulation_steps=1),
    "flattened": lambda: few(collator=DataCollatorWithFlattening()),
    "padded on the left": lambda: few(collator=Pad(tok("chatml"), "left")),
    "padded to a multiple": lambda: few(collator=DataCollatorForSeq2Seq(tok("chatml"), pad_to_multiple_of=64)),
    "another order": lambda: few(features(rows=FEW[::-1])),
    "a head fused with the loss": lambda: with_fused_head(few()),
}
"""Set-ups whose loss is that of `few`."""
