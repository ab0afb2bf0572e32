"""Set-ups of rank_zoo.py in which several ranks share each row: its labels, positions, borders and gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, MistralConfig, Phi3Config, Trainer

import tests.sftcheck.context_trainer as context
from sftcheck.faults import Fault
from tests.sftcheck.context_trainer import ATTENTION, ContextTrainer, ForgetfulLlama, MemoryLlama, Part
from tests.sftcheck.rank_materials import (
    broken,
    plain,
    ranks_drift,
    real_step,
    rows_are_repeated,
    sound,
    step_has_factor,
    step_is_right,
    step_is_wrong,
)
from tests.sftcheck.small_trainers import tiny
from tests.sftcheck.zoo_materials import tok


def shared(kind: type[Trainer] = ContextTrainer, model: Any = None, collator: Any = None, **given: Any) -> Trainer:
    """A trainer whose rows two ranks share."""
    tokenizer = tok("chatml")
    model = model or tiny(tokenizer, attn_implementation=ATTENTION)
    trainer = plain(kind, model, **given)
    if collator is not None:
        trainer.data_collator = collator
    return trainer


class Packed(DataCollatorForSeq2Seq):
    """All rows one after another, with positions that restart."""

    def __call__(self, features: Any, return_tensors: Any = None) -> Any:
        ids = [n for each in features for n in each["input_ids"]]
        labels = [n for each in features for n in (-100, *each["labels"][1:])]
        positions = [n for each in features for n in range(len(each["input_ids"]))]
        found = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.tensor([values]) for name, values in found.items()}


def packed(kind: type[Trainer] = ContextTrainer, model: Any = None) -> Trainer:
    return shared(kind, model, Packed(tok("chatml")), per_device_train_batch_size=3)


def _other(kind: type[Any], **settings: Any) -> Any:
    """A tiny random model of another family, with the attention of context_trainer.py."""
    tokenizer = tok("chatml")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    given = {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "initializer_range": 0.3, **sizes, **ids}
    return AutoModelForCausalLM.from_config(kind(**{**given, **settings}), attn_implementation=ATTENTION)


def _longrope() -> Any:
    """Phi 3 whose rotations have two sets of factors: of rows up to 24 tokens, and of longer ones."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "rope_theta": 10000.0}
    rope |= {"original_max_position_embeddings": 24}
    return _other(Phi3Config, rope_parameters=rope, max_position_embeddings=256, original_max_position_embeddings=24)


# -- broken ----------------------------------------------------------------------------------------------------------


class _ShiftedAfterTheCut(ContextTrainer):
    def labels_of(self, behind: Tensor, index: Tensor) -> Tensor:
        own = behind[:, index].clone()
        own[:, -1] = -100  # the label is the first of the next part
        return own


@broken(Fault.LABELS_AT_BORDERS, "borders", may="gradients, loss", proof=step_is_wrong)
def labels_shifted_after_the_cut() -> Trainer:
    """Each part shifts its own labels, so the last token of a part has nothing to predict."""
    return shared(_ShiftedAfterTheCut)


class _LocalPositions(ContextTrainer):
    def positions_of(self, positions: Tensor, index: Tensor) -> Tensor:
        return torch.arange(len(index))[None].expand(len(positions), -1)


@broken(
    Fault.OTHER_ROTATIONS,
    "rotations",
    "gradients",
    may="isolation, across ranks, positions, loss, truncation, ids",
    proof=step_is_wrong,
)
def positions_of_the_part() -> Trainer:
    """Each part counts its positions from 0."""
    return shared(_LocalPositions)


@broken(Fault.OTHER_ROTATIONS, "rotations", "gradients", may="loss", proof=step_is_wrong)
def longrope_by_the_part() -> Trainer:
    """longrope takes the factors of short rows in the first part, and those of long ones in the second."""
    return shared(model=_longrope())


class _BordersOfThePart(ContextTrainer):
    def documents_of(self, documents: Tensor, index: Tensor) -> Tensor:
        own = documents[:, index]
        return torch.cat([own - own[:, :1]] * self.size, 1)  # cu_seqlens count from 0 in each part


@broken(
    Fault.LEAK_ACROSS_RANKS,
    "across ranks",
    "gradients",
    may="loss",
    proof=lambda trainer: real_step(trainer).apart[0] > 5e-3,
)
def borders_of_the_part() -> Trainer:
    """Documents are numbered by each part's own positions, so those of two parts see each other (prime-rl#2392)."""
    return packed(_BordersOfThePart)


class _WindowOfThePart(ContextTrainer):
    def compute_loss(self, *args: Any, **given: Any) -> Any:
        before = context.window_of
        context.window_of = lambda window, num_local, _: before(window, num_local, num_local)
        try:
            return super().compute_loss(*args, **given)
        finally:
            context.window_of = before


def _windowed() -> Any:
    return _other(MistralConfig, sliding_window=20)


@broken(Fault.GRADIENTS_OF_RANKS, "gradients", may="loss", proof=step_is_wrong)
def window_by_the_local_length() -> Trainer:
    """The window is left out where a part is shorter than it, although the row is longer (prime-rl#2418)."""
    return shared(_WindowOfThePart, _windowed())


def _remembering(kind: type[MemoryLlama]) -> Any:
    tokenizer = tok("chatml")
    model = kind(tiny(tokenizer).config)
    model.set_attn_implementation(ATTENTION)
    return model


@broken(Fault.GRADIENTS_OF_RANKS, "gradients", may="loss", proof=step_is_wrong)
def one_fabricated_document() -> Trainer:
    """A recurrent layer takes each part for a document, and begins it with an empty state (prime-rl#3003)."""
    return shared(model=_remembering(ForgetfulLlama))


class _SilentlyOne(Trainer):
    def get_sp_size(self) -> int:
        return 2

    def get_train_dataloader(self) -> Any:
        sampler = DistributedSampler(self.train_dataset, 1, 0)  # pyright: ignore
        options = {"batch_size": self._train_batch_size, "collate_fn": self.data_collator}
        return torch.utils.data.DataLoader(self.train_dataset, sampler=sampler, **options)  # pyright: ignore


@broken(Fault.ROWS_REPEATED, "rows", may="gradients, loss, denominators", proof=rows_are_repeated)
def size_that_is_silently_one() -> Trainer:
    """Two ranks are to share each row, and each computes it whole (ms-swift#10061)."""
    return plain(_SilentlyOne)


class _DifferentRows(ContextTrainer):
    def sampler(self) -> Any:
        return DistributedSampler(self.train_dataset, dist.get_world_size(), dist.get_rank())  # pyright: ignore


@broken(
    Fault.ROWS_REPEATED,
    "rows",
    may="gradients, loss, denominators, across ranks, borders, rotations, positions, isolation",
    proof=step_is_wrong,
)
def different_rows_in_a_group() -> Trainer:
    """The ranks of a group are given different rows, and each computes its part of another one."""
    return shared(_DifferentRows, per_device_train_batch_size=1, collator=_OneLength(tok("chatml")))


class _OneLength(DataCollatorForSeq2Seq):
    """Rows of the same length, so that the parts of two different ones fit."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, pad_to_multiple_of=64)


class _LastTokensDropped(ContextTrainer):
    def to_multiple(self, *whole: Tensor) -> Any:
        return [each[:, : each.shape[1] // 8 * 8] for each in whole]


@broken(
    Fault.GRADIENTS_OF_RANKS, "rows|borders", "gradients", may="rows, borders, loss, denominators", proof=step_is_wrong
)
def last_tokens_dropped() -> Trainer:
    """What the parts do not divide at the end of a row is dropped with its labels (TE#1930)."""
    return shared(_LastTokensDropped, per_device_train_batch_size=1, gradient_accumulation_steps=4)


class _OwnReplica(ContextTrainer):
    def _wrap_model(self, model: nn.Module, *args: Any, **given: Any) -> nn.Module:
        own = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        return DistributedDataParallel(model, process_group=own[dist.get_rank()])

    def scaled(self, loss: Tensor) -> Tensor:
        return loss


@broken(Fault.GRADIENTS_NOT_SUMMED, "gradients", "replicas", may="loss, adapters", proof=ranks_drift)
def gradients_not_summed_over_a_group() -> Trainer:
    """DDP spans the ranks with different rows alone, so each keeps the gradients of its part (VeOmni#1115)."""
    return shared(_OwnReplica)


class _CountsTimesSize(ContextTrainer):
    def counted(self, count: Tensor) -> Tensor:
        dist.all_reduce(count)
        return count


@broken(Fault.OTHER_DENOMINATOR, "denominators", "gradients", "loss", proof=step_has_factor(1 / 2))
def counts_times_the_size_of_a_group() -> Trainer:
    """Each rank of a group counts the labels of the whole row."""
    return shared(_CountsTimesSize)


# -- sound -----------------------------------------------------------------------------------------------------------


@sound(proof=step_is_right)
def rows_in_parts() -> Trainer:
    """Contiguous parts; padded rows whose length no number divides."""
    return shared()


class _HeadAndTail(ContextTrainer):
    def columns(self, num_tokens: int) -> Tensor:
        chunks = torch.arange(num_tokens).chunk(2 * self.size)
        return torch.cat([chunks[self.context_rank], chunks[-1 - self.context_rank]])


@sound(proof=step_is_right)
def rows_in_heads_and_tails() -> Trainer:
    """Each rank has a chunk of the beginning and one of the end, as torch's context parallelism deals them."""
    return shared(_HeadAndTail)


@sound(proof=step_is_right)
def packed_rows_in_parts() -> Trainer:
    return packed()


@sound(proof=step_is_right)
def window_in_parts() -> Trainer:
    return shared(model=_windowed())


@sound(proof=step_is_right)
def memory_in_parts() -> Trainer:
    return shared(model=_remembering(MemoryLlama))


class _OfTheWholeRow(ContextTrainer):
    """Computes the rotations of the whole row, and cuts them."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **given: Any) -> Any:
        positions = self.whole(inputs)[2]
        (rotary,) = [each for each in model.modules() if type(each).__name__ == "Phi3RotaryEmbedding"]
        forward = type(rotary).forward

        def cut(values: Tensor, position_ids: Any, **given: Any) -> Any:
            part = Part.current
            assert part is not None
            return tuple(each[:, part.index] for each in forward(rotary, values, positions, **given))

        rotary.forward = cut
        try:
            return super().compute_loss(model, inputs, *args, **given)
        finally:
            del rotary.forward


@sound(proof=step_is_right)
def longrope_of_the_whole_row() -> Trainer:
    return shared(_OfTheWholeRow, _longrope())


@sound(proof=step_is_right, ranks=4)
def two_groups_of_two_ranks() -> Trainer:
    return shared(per_device_train_batch_size=1)


class _Cutting(Packed):
    """Cuts the rows itself; each rank passes on its part."""

    size = 2

    def __call__(self, features: Any, return_tensors: Any = None) -> Any:
        batch = super().__call__(features)
        batch["shift_labels"] = nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
        batch["documents"] = (batch["position_ids"] == 0).cumsum(1)
        missing = -batch["input_ids"].shape[1] % self.size
        ends = {"shift_labels": -100, "documents": -1}
        batch = {key: nn.functional.pad(each, (0, missing), value=ends.get(key, 0)) for key, each in batch.items()}
        index = torch.arange(batch["input_ids"].shape[1]).chunk(self.size)[dist.get_rank() % self.size]
        own = {name: each if name == "documents" else each[:, index] for name, each in batch.items()}
        return {**own, "index": index}


class _CutByTheCollator(ContextTrainer):
    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        count = torch.as_tensor(sum((batch["shift_labels"] != -100).sum() for batch in batch_samples))
        dist.all_reduce(count)
        return count

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        Part.current = Part(self.context_group, inputs["index"], inputs["documents"])
        logits = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
        labels = inputs["shift_labels"].flatten()
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum", ignore_index=-100)
        return self.scaled(losses / num_items_in_batch)


@sound(proof=step_is_right)
def rows_cut_by_the_collator() -> Trainer:
    """The collator gives each rank its part of the packed rows, as axolotl's does."""
    return shared(_CutByTheCollator, collator=_Cutting(tok("chatml")), per_device_train_batch_size=3)
