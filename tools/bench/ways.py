"""Ways to train on the same conversations: transformers' and ours, each with its batches and its step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sftron.data.dataloader import collate
from sftron.data.packing import PoolPacking, lay_out
from sftron.data.types import IGNORE_INDEX, Batch, LabeledConversation
from sftron.models.llama import LlamaForSFT
from sftron.train.step import loss_of, train_step
from tools.bench.conversations import Encoder, Row

MAX_GRAD_NORM = 1.0
POOL_SIZE = 256


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one optimizer step trains on. num_tokens: real ones. num_positions: what is computed, padding included."""

    inputs: Any
    num_tokens: int
    num_trained: int
    num_positions: int
    lengths: tuple[int, ...]


class Way(Protocol):
    """name: as the report has it. batches: from rows to what `step` takes, the whole way there, one step after another.

    step: forward, backward, clipping and update; returns the loss as a number. token_losses: of these rows' labelled
    tokens, fp32 in their order, without a gradient; all ways have to agree in them.
    """

    name: str
    is_ours: bool

    @property
    def num_parameters(self) -> int: ...

    def batches(self, rows: Iterable[Row]) -> Iterator[StepBatch]: ...

    def step(self, batch: StepBatch) -> float: ...

    def token_losses(self, rows: Sequence[Row]) -> Tensor: ...


# --- transformers ---


Collate = Callable[[list[dict[str, list[int]]]], dict[str, Tensor]]


def pad_to_longest(features: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """As DataCollatorForSeq2Seq: padded at the right, with an attention mask where anything is padded."""
    lengths = [len(each["input_ids"]) for each in features]
    longest = max(lengths)

    def rows(name: str, filler: int) -> Tensor:
        return torch.tensor([each[name] + [filler] * (longest - len(each[name])) for each in features])

    padded = {"input_ids": rows("input_ids", 0), "labels": rows("labels", IGNORE_INDEX)}
    if min(lengths) == longest:
        return padded
    return padded | {"attention_mask": (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()}


def flatten(features: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """DataCollatorWithFlattening: one row, positions that restart."""
    from transformers import DataCollatorWithFlattening

    flat: Any = DataCollatorWithFlattening()(features)
    return flat


class TransformersWay:
    """LlamaForCausalLM with fp32 weights and bf16 autocast, as Trainer with bf16 has it, and the same fused AdamW.

    attention: the implementation to take, where it is not the model's own. forward: what is called, where that is
        another than the model: a compiled one. use_cache: off, as attention would else run across the documents.
    """

    is_ours = False

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        encoder: Encoder,
        collate: Collate,
        conversations_per_step: int,
        *,
        attention: str = "sdpa",
        forward: Callable[..., Any] | None = None,
        use_cache: bool = False,
    ) -> None:
        self.name, self._model, self._optimizer = name, model, optimizer
        self._encoder, self._collate, self._per_step = encoder, collate, conversations_per_step
        # A compiled module has no length, and so no truth either.
        self._forward = model if forward is None else forward
        self._attention, self._use_cache = attention, use_cache
        self._device = next(model.parameters()).device

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())

    def batches(self, rows: Iterable[Row]) -> Iterator[StepBatch]:
        left = iter(rows)
        while chunk := list(islice(left, self._per_step)):
            features = self._encoder.theirs(chunk)
            lengths = tuple(len(each["input_ids"]) for each in features)
            num_trained = sum(label != IGNORE_INDEX for each in features for label in each["labels"])
            inputs = self._collate(features)
            yield StepBatch(inputs, sum(lengths), num_trained, inputs["input_ids"].numel(), lengths)

    def step(self, batch: StepBatch) -> float:
        loss = self._call(batch.inputs, self._forward).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()

    @torch.no_grad()
    def token_losses(self, rows: Sequence[Row]) -> Tensor:
        inputs = self._collate(self._encoder.theirs(rows))
        labels = inputs.pop("labels")[:, 1:].to(self._device)
        # Not compiled once more for this: a compiled forward shows in the loss of its steps.
        logits = self._call(inputs, self._model).logits[:, :-1]
        is_labelled = labels != IGNORE_INDEX
        return F.cross_entropy(logits[is_labelled].float(), labels[is_labelled], reduction="none")

    def _call(self, inputs: dict[str, Tensor], forward: Callable[..., Any]) -> Any:
        config: Any = self._model.config
        config._attn_implementation = self._attention
        moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in inputs.items()}
        with torch.autocast(self._device.type, torch.bfloat16):
            return forward(**moved, use_cache=self._use_cache)


# --- ours ---


Choose = Callable[[Iterator[LabeledConversation]], Iterator[list[LabeledConversation]]]


class OursWay:
    """LlamaForSFT on packs. packs: which conversations share one. token_budget: of a pack, None as long as it is."""

    is_ours = True

    def __init__(
        self,
        name: str,
        model: LlamaForSFT,
        optimizer: torch.optim.Optimizer,
        encoder: Encoder,
        choose: Choose,
        token_budget: int | None = None,
        *,
        keep_tail: bool = False,
    ) -> None:
        self.name, self._model, self._optimizer = name, model, optimizer
        self._encoder, self._choose, self._token_budget, self._keep_tail = encoder, choose, token_budget, keep_tail

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())

    def batches(self, rows: Iterable[Row]) -> Iterator[StepBatch]:
        for chosen in self._choose(self._labeled(iter(rows))):
            batch = self._batch(chosen, self._token_budget)
            lengths = tuple(len(each) for each in chosen)
            yield StepBatch(batch, sum(lengths), len(batch.labels), len(batch.input_ids), lengths)

    def _labeled(self, rows: Iterator[Row]) -> Iterator[LabeledConversation]:
        # A few at a time, so that what a step waits for is spread as in a loader.
        while chunk := list(islice(rows, 8)):
            yield from self._encoder.ours(chunk)

    def _batch(self, conversations: Sequence[LabeledConversation], token_budget: int | None) -> Batch:
        budget = token_budget or sum(map(len, conversations))
        pack = lay_out(conversations, token_budget=budget, remove_cross_attention=True, pad_id=0)
        return collate(pack, keep_tail=self._keep_tail)

    def step(self, batch: StepBatch) -> float:
        loss = train_step(self._model, self._optimizer, [batch.inputs], max_grad_norm=MAX_GRAD_NORM).loss
        assert loss is not None
        return loss

    @torch.no_grad()
    def token_losses(self, rows: Sequence[Row]) -> Tensor:
        batch = self._batch(self._encoder.ours(rows), None)
        device = self._model.head_weight.device
        cu_seqlens = batch.cu_seqlens if self._model.attention == "sdpa" else batch.cu_seqlens.to(device)
        hidden = self._model(batch.input_ids.to(device), batch.position_ids.to(device), cu_seqlens, batch.max_seqlen)
        rows_of_labels = hidden[batch.labeled_rows.to(device)]
        logits = F.linear(rows_of_labels, self._model.head_weight.to(hidden.dtype)).float()
        losses = F.cross_entropy(logits, batch.labels.to(device), reduction="none")
        # The step's own loss has to be these, not something else that is quick.
        torch.testing.assert_close(loss_of(self._model, batch), losses.sum(), rtol=1e-2, atol=0)
        return losses


def each(conversations_per_pack: int) -> Choose:
    """`minibatch`: exactly so many, in order."""

    def choose(conversations: Iterator[LabeledConversation]) -> Iterator[list[LabeledConversation]]:
        while chosen := list(islice(conversations, conversations_per_pack)):
            yield chosen

    return choose


def pool(token_budget: int) -> Choose:
    """`pool`: the oldest pending conversation and those of the pool that fill the budget best."""
    packing = PoolPacking(POOL_SIZE)

    def choose(conversations: Iterator[LabeledConversation]) -> Iterator[list[LabeledConversation]]:
        pending: list[LabeledConversation] = []
        while True:
            pending += islice(conversations, POOL_SIZE - len(pending))
            if not pending:
                return
            indices = packing.choose([len(each) for each in pending], token_budget)
            yield [pending[index] for index in indices]
            taken = set(indices)
            pending = [each for index, each in enumerate(pending) if index not in taken]

    return choose
