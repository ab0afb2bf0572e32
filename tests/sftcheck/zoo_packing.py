"""Set-ups of the zoo about packs, masks, positions and padding: the rows isolation, positions and padding."""

from typing import Any

import torch
from peft import LoraConfig
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

from sftcheck.faults import Fault
from sftron import ChatTokenizer, FlattenPacks, PackedDataset
from tests.sftcheck.zoo_materials import (
    ANSWERS,
    PAIRS,
    ROWS,
    FlattenAndMask,
    FlattenWithFirstTokens,
    Pad,
    Rows,
    arguments,
    broken,
    chatml,
    encoded,
    flat,
    marked,
    model,
    of_marks,
    padded,
    plain,
    sft,
    sound,
    tok,
)
from tests.sftcheck.zoo_proofs import (
    answers_alone,
    batches,
    labels_are_ids,
    leak,
    loss_ratio,
    moved_by_the_future,
    padding_labels,
    read,
    row_alone,
)
from tests.sftcheck.zoo_texts import WITH_FORGED_TURN

# ── Broken ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@broken(Fault.NOT_ISOLATED, "isolation", may="loss", proof=lambda t: leak(t) > 1e-3)
def bfd_packing_of_falcon() -> Trainer:
    """packing=True flattens conversations and passes position_ids, but falcon makes its masks without them."""
    return of_marks(kind="falcon", packing=True)


@broken(Fault.NOT_ISOLATED, "isolation", may="loss", proof=lambda t: leak(t) > 1e-3)
def bfd_packing_of_gpt_oss() -> Trainer:
    """gpt_oss with eager attention attends over the whole pack (transformers#39997, open since 2025)."""
    return of_marks(kind="gpt_oss", attention="eager", packing=True)


@broken(Fault.NOT_ISOLATED, "isolation", may="loss", proof=lambda t: leak(t) > 1e-3)
def padding_free_of_bloom() -> Trainer:
    """padding_free=True needs a model that reads position_ids; bloom's alibi does not."""
    return sft(ANSWERS, tok("chatml"), kind="bloom", attention="eager", padding_free=True, max_length=None)


@broken(Fault.NOT_ISOLATED, "isolation", may="loss", proof=lambda t: leak(t) > 1e-3)
def flattening_of_qwen3_5() -> Trainer:
    """DataCollatorWithFlattening() passes position_ids alone, and the state of a linear layer flows across them."""
    return flat(kind="qwen3_5_text")


@broken(Fault.CACHE, "isolation", may="loss", proof=lambda t: leak(t) > 1e-3)
def cache_and_packing() -> Trainer:
    """With TrainingArguments(use_cache=True), transformers makes no mask from position_ids, whatever the model."""
    return flat(use_cache=True)


@broken(Fault.MASK_OF_ONES, "isolation", may="loss", proof=lambda t: leak(t) > 1e-3)
def mask_of_ones_and_packing() -> Trainer:
    """A pack with an attention_mask of ones: transformers reads document borders only where there is no mask."""
    return chatml(collator=FlattenAndMask())


@broken(
    Fault.NO_POSITIONS,
    "isolation",
    "truncation",
    "positions",
    may="ids, stop tokens, trained tokens",
    trained_roles="all",
    proof=lambda t: leak(t) > 1e-3,
)
def wrapped_packing() -> Trainer:
    """packing_strategy="wrapped" cuts one long text every 256 tokens, in the middle of answers (trl#3067)."""
    return sft(ROWS, tok("chatml"), packing=True, packing_strategy="wrapped", max_length=256)


@broken(
    Fault.CUT_BY_PACKING,
    "isolation",
    "truncation",
    "positions",
    may="ids, stop tokens, trained tokens",
    trained_roles="all",
    proof=lambda t: leak(t) > 1e-3,
)
def group_texts() -> Trainer:
    """group_texts of transformers' run_clm.py, copied into a script for chats: blocks of 300 tokens, no borders."""
    tokenizer = tok("chatml")
    ids = [token for row in encoded(tokenizer) for token in row["input_ids"]]
    blocks = [ids[begin : begin + 300] for begin in range(0, len(ids) - 300, 300)]
    return plain([{"input_ids": block, "labels": block} for block in blocks], tokenizer)


@broken(
    Fault.LABELS_CROSS,
    "positions",
    may="trained tokens, loss",
    trained_roles="all",
    proof=lambda t: any((b["labels"][:, 1:][b["position_ids"][:, 1:] == 0] != -100).any() for b in batches(t)),
)
def labels_across_borders() -> Trainer:
    """A pack with labels = input_ids: the last token of each conversation learns the first one of the next."""
    return chatml(collator=FlattenWithFirstTokens())


@broken(
    Fault.NOT_AS_ALONE,
    "padding|positions|loss",
    may="padding, positions, loss, isolation",
    proof=lambda t: row_alone(t) > 1e-3,
)
def left_padding_of_gpt2() -> Trainer:
    """With a mask but no position_ids, gpt2 counts learned positions from the padding (transformers#29583)."""
    return padded("left", kind="gpt2")


@broken(Fault.PADDING_ATTENDED, "padding", may="isolation, loss, positions", proof=lambda t: row_alone(t) > 1e-3)
def left_padding_without_mask() -> Trainer:
    """The collator pads on the left, as for generation, and drops the mask: answers attend to the padding."""
    return padded("left", mask=False)


@broken(
    Fault.PADDING_TRAINED, "padding", may="trained tokens, stop tokens, loss", proof=lambda t: padding_labels(t) > 100
)
def trained_padding() -> Trainer:
    """tokenizer(..., padding=True) and labels = input_ids: most of the loss is about padding."""
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer), tokenizer, Pad(tokenizer, label=tokenizer.pad_token_id or 0))


class MaskOfIds(DataCollatorForSeq2Seq):
    def __call__(self, features: Rows, return_tensors: Any = None) -> Any:
        batch = super().__call__(features)
        return dict(batch) | {"attention_mask": (batch["input_ids"] != self.tokenizer.pad_token_id).long()}


@broken(Fault.TEXT_MASKED, "padding", may="positions, isolation, loss", proof=lambda t: row_alone(t) > 1e-3)
def mask_from_the_ids_of_padding() -> Trainer:
    """attention_mask = input_ids != pad_token_id, where the padding is the stop: no answer sees where another ended."""
    tokenizer = tok()
    return plain(encoded(tokenizer), tokenizer, MaskOfIds(tokenizer))


class BlockMask:
    """One row of conversations with a mask [1, 1, T, T] of its own; positions are left to the model."""

    def __init__(self, causal: bool) -> None:
        self.causal = causal

    def __call__(self, features: Rows) -> dict[str, torch.Tensor]:
        flat = {name: torch.tensor([[value for row in features for value in row[name]]]) for name in features[0]}
        sees = torch.block_diag(*(torch.ones(len(row["input_ids"]), len(row["input_ids"])) for row in features))
        sees = sees.tril() if self.causal else sees
        flat["labels"][0, [sum(len(row["input_ids"]) for row in features[:n]) for n in range(len(features))]] = -100
        return flat | {"attention_mask": torch.zeros_like(sees).masked_fill(sees == 0, torch.finfo().min)[None, None]}


@broken(Fault.FUTURE, "isolation", may="positions, loss", proof=lambda t: moved_by_the_future(t) > 1e-3)
def mask_that_shows_the_future() -> Trainer:
    """A block mask without its causal half: each token sees the ones that it is to predict."""
    return chatml(collator=BlockMask(causal=False))


class TypedTokens(DataCollatorForSeq2Seq):
    def __call__(self, features: Rows, return_tensors: Any = None) -> Any:
        batch = super().__call__(features)
        return dict(batch) | {"token_type_ids": (batch["labels"] != -100).long()}


@broken(Fault.NOT_AS_ALONE, "positions", may="loss", proof=lambda t: row_alone(t) > 1e-3)
def token_types_of_gpt2() -> Trainer:
    """token_type_ids that mark the answer are added to gpt2's embeddings, and no server passes them."""
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer), tokenizer, TypedTokens(tokenizer), kind="gpt2")


class NeatPacking:
    """One row of conversations, their numbers as the mask: 1 1 1 2 2 3 3 3, and positions that restart."""

    def __call__(self, features: Rows) -> dict[str, torch.Tensor]:
        lengths = [len(row["input_ids"]) for row in features]
        flat = {name: torch.tensor([[value for row in features for value in row[name]]]) for name in features[0]}
        numbers = torch.cat([torch.full((length,), n + 1) for n, length in enumerate(lengths)])[None]
        return flat | {"attention_mask": numbers, "position_ids": torch.cat([*map(torch.arange, lengths)])[None]}


@broken(Fault.MASK_OF_ONES, "isolation", may="loss, positions", proof=lambda t: leak(t) > 1e-3)
def neat_packing_without_its_patch() -> Trainer:
    """The mask of document numbers of LLaMA-Factory and axolotl without their patch: transformers reads ones."""
    return chatml(collator=NeatPacking())


@broken(Fault.NO_POSITIONS, "positions|isolation", may="isolation, positions, loss", proof=lambda t: leak(t) > 1e-3)
def positions_of_the_whole_pack() -> Trainer:
    """A collator flattens and leaves positions to the model, which counts, and attends, through the pack."""
    tokenizer = tok("chatml")

    def flatten(features: Rows) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([[value for row in features for value in row[name]]]) for name in features[0]}

    return plain(encoded(tokenizer), tokenizer, flatten)


# ── Sound ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@sound(lambda t: leak(t) == 0.0)
def bfd_packing_of_llama() -> Trainer:
    """The same packing with a model that makes its mask from position_ids, on sdpa and CPU."""
    return of_marks(packing=True)


@sound(lambda t: leak(t) == 0.0)
def bfd_packing_of_qwen2_eager() -> Trainer:
    """Packing with eager attention, and LoRA with dropout."""
    peft = LoraConfig(target_modules="all-linear", lora_dropout=0.1)
    return sft(
        ROWS, marked(), kind="qwen2", attention="eager", packing=True, assistant_only_loss=True, peft_config=peft
    )


@sound(lambda t: leak(t) == 0.0)
def padding_free() -> Trainer:
    """padding_free=True without packing, on prompt and completion."""
    return sft(ANSWERS, tok("chatml"), padding_free=True, max_length=None)


@sound(lambda t: leak(t) == 0.0 and labels_are_ids(t))
def flattening_of_llama() -> Trainer:
    """transformers' Trainer and DataCollatorWithFlattening."""
    return flat()


@sound(lambda t: leak(t) == 0.0)
def packs_of_sftron() -> Trainer:
    """sftron's packs in transformers' Trainer, with a row whose text spells control tokens and stays text."""
    tokenizer = tok("chatml")
    dataset = PackedDataset.from_rows(WITH_FORGED_TURN, ChatTokenizer(tokenizer), sequence_length=2048, num_epochs=1)
    arguments_ = TrainingArguments(**arguments(per_device_train_batch_size=1))
    return Trainer(model(tokenizer), arguments_, train_dataset=list(dataset), data_collator=FlattenPacks(),
                   processing_class=tokenizer)  # fmt: skip


@sound(lambda t: row_alone(t) < 1e-3)
def left_padding() -> Trainer:
    """Padding on the left with a mask: Llama's positions are relative."""
    return padded("left")


@sound(lambda t: abs(loss_ratio(t) - 1) < 1e-4 and padding_labels(t) == 0)
def right_padding_without_mask() -> Trainer:
    """Padding on the right needs no mask in a causal model: nothing that is trained comes after it."""
    return padded(mask=False)


@sound(lambda t: abs(loss_ratio(t) - 1) < 1e-4)
def cache_without_packing() -> Trainer:
    """use_cache=True costs memory and changes nothing where a row holds one conversation."""
    return chatml(use_cache=True)


@sound(answers_alone)
def falcon_without_packing() -> Trainer:
    """A model type that leaks in packs, in padded batches."""
    return sft(ANSWERS, tok("chatml"), kind="falcon")


@sound(lambda t: leak(t) == 0.0 and read(t).count(t.processing_class.eos_token) >= len(PAIRS), trained_roles="all")
def packed_texts() -> Trainer:
    """Plain texts for more pretraining, packed by TRL, which keeps their ids alone."""
    return sft([{"text": row["prompt"] + row["completion"]} for row in PAIRS], packing=True)


@sound(lambda t: moved_by_the_future(t) == 0.0)
def block_mask_and_relative_positions() -> Trainer:
    """A causal block mask without position_ids: Llama's positions are relative, so nothing changes."""
    return chatml(collator=BlockMask(causal=True))


@sound(lambda t: row_alone(t) < 1e-3 and labels_are_ids(t))
def left_padding_with_positions() -> Trainer:
    """gpt2 padded on the left, with position_ids that begin behind the padding."""
    tokenizer = tok("chatml")

    def collate(features: Rows) -> dict[str, torch.Tensor]:
        batch = Pad(tokenizer, "left")(features)
        return batch | {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}

    return plain(encoded(tokenizer), tokenizer, collate, kind="gpt2")
