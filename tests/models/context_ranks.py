"""One row on several ranks, against the same row on one: what the ranks of tests/models/test_context.py compute."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sftron.models import delta_layer, short_convolution
from sftron.models.block import Documents
from sftron.models.context import ContextAttention
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import weighted_loss_sum
from sftron.train.ranks import end_ranks, start_ranks
from tests.models.reference import FAMILIES, TINY, make_native, make_reference, pack


@dataclass(frozen=True)
class Row:
    """The documents of a row, and the number of tokens of each rank."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    unlabeled: tuple[int, ...] = ()
    """Ranks whose tokens have no label."""

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    def own(self, rank: int) -> slice:
        return slice(sum(self.counts[:rank]), sum(self.counts[: rank + 1]))


ROWS = {
    2: Row((7, 1, 61, 2, 13, 5), (40, 49)),
    4: Row((7, 1, 61, 2, 13, 5), (3, 40, 25, 21), unlabeled=(0,)),
}
"""A document longer than the 40 tokens of longrope and the windows of 20 that is on several ranks."""
RAGGED = {
    2: [Row((8, 81), (8, 81)), Row((1, 1), (1, 1)), Row((40, 1, 1, 7), (41, 8), (1,)), Row((89,), (88, 1))],
    4: [Row((3, 1, 1, 20, 64), (4, 1, 20, 64)), Row((89,), (1, 60, 1, 27), (0, 2)), Row((2, 2), (1, 1, 1, 1))],
}
"""One document over all ranks, and on a border; documents and ranks of one token; documents that end on a border."""


@dataclass(frozen=True)
class Measured:
    """The results of a row: all hidden states, the loss, and the gradients by name."""

    hidden_TH: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A family, with a row, a mistake, and options of the model."""

    family: str
    row: Row
    mutant: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    mode: str = "none"
    compiled: bool = False

    def make(self) -> LlamaForSFT:
        reference = make_reference(**FAMILIES[self.family] | self.model)
        model = make_native(reference, activation_checkpointing=self.mode)
        for block in model.model.layers if self.compiled else ():
            block.compile(backend="aot_eager")
        return model


def measure(model: LlamaForSFT, row: Row, own: slice, counts: tuple[int, ...] = ()) -> Measured:
    """Returns the results for the tokens `own`: the hidden states of these, and parts of the loss and gradients."""
    input_ids, position_ids, cu_seqlens, max_seqlen = pack(list(row.lengths))
    weights_T = torch.rand(row.num_tokens, generator=torch.Generator().manual_seed(1)) + 0.2
    targets_T = torch.cat([F.pad(ids[1:], (0, 1), value=-100) for ids in input_ids.split(list(row.lengths))])
    for rank in row.unlabeled:
        targets_T[row.own(rank)] = -100
    weights_T = weights_T.to(model.compute_dtype)
    denominator = weights_T[targets_T >= 0].sum().clamp(min=1)
    model.zero_grad(set_to_none=True)
    hidden_TH = model(input_ids[own], position_ids, cu_seqlens, max_seqlen, counts)
    (positions,) = torch.nonzero(targets_T[own] >= 0, as_tuple=True)
    arguments = (positions, targets_T[own][positions], weights_T[own][positions])
    loss_sum, _ = weighted_loss_sum(hidden_TH, model.head, *arguments)
    # Hidden states without labels matter too.
    others = torch.randn(hidden_TH.shape[1], generator=torch.Generator().manual_seed(2))
    ((loss_sum + (hidden_TH * others).sum()) / denominator).backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return Measured(hidden_TH.detach(), (loss_sum / denominator).detach(), gradients)


def differences(model: LlamaForSFT, row: Row, mutant: str = "") -> dict[str, float]:
    """Returns the largest differences from one rank, as shares of the largest value; a collective."""
    alone = measure(model, row, slice(None))
    with shared(model), MUTANTS[mutant]():
        ours = measure(model, row, row.own(dist.get_rank()), row.counts)
    for tensor in (ours.loss, *ours.gradients.values()):
        dist.all_reduce(tensor)
    parts = [alone.hidden_TH.new_empty(count, ours.hidden_TH.shape[1]) for count in row.counts]
    for rank, part in enumerate(parts):
        part.copy_(ours.hidden_TH) if rank == dist.get_rank() else None
        dist.broadcast(part, rank)
    # Where documents have one token, no score matters, and the gradients of queries and keys are rounding alone.
    least = 1e-3 * max(gradient.abs().max().item() for gradient in alone.gradients.values())
    pairs = [(ours.gradients[name], gradient) for name, gradient in alone.gradients.items()]
    return {
        "hidden": _share(torch.cat(parts), alone.hidden_TH),
        "loss": _share(ours.loss, alone.loss),
        "gradient": max(_share(*pair, least) for pair in pairs),
    }


def _share(ours: Tensor, alone: Tensor, least: float = 1e-30) -> float:
    return ((ours - alone).abs().max() / alone.abs().max().clamp(min=least)).item()


@contextmanager
def in_float64(model: LlamaForSFT) -> Iterator[None]:
    """The model computes in float64, and so does what names float32 itself: norms, softmax of routers, losses."""
    model.double()
    model.compute_dtype = torch.float64
    with patch.object(torch, "float32", torch.float64), patch.object(Tensor, "float", Tensor.double):
        yield


@contextmanager
def shared(model: LlamaForSFT) -> Iterator[None]:
    """The ranks share the rows of the model."""
    model.context_group = dist.group.WORLD
    try:
        yield
    finally:
        model.context_group = None


# --- Mistakes that others have made, each of which a test has to see ---


def _rotate_by_the_part() -> Any:
    original = LlamaForSFT._hidden_states

    def mutated(model: Any, mixes: Any, ids: Tensor, positions: Tensor, dtype: Any, tokens: slice) -> Tensor:
        return original(model, mixes, ids, positions[tokens], dtype)

    return patch.object(LlamaForSFT, "_hidden_states", mutated)


def _bounds_of_the_part(module: Any, name: str) -> Any:
    original = getattr(module, name)

    def mutated(documents: Documents) -> Any:
        assert documents.context is not None
        own = documents.context.tokens
        bounds = (documents.cu_seqlens.clamp(own.start, own.stop) - own.start).unique()
        bounds = torch.cat([bounds, torch.tensor([documents.num_tokens])])
        return original(replace(documents, cu_seqlens=bounds.int(), on_device=bounds.int()))

    return patch.object(module, name, mutated)


def _with_scores(change: Callable[[Any, Any, Tensor], Any]) -> Any:
    """Changes the scores that the attention function of a rank gets; `change`(theirs, of all heads, queries)."""
    original = ContextAttention.__call__

    def mutated(self: ContextAttention, q: Tensor, k: Tensor, v: Tensor, scores: Any) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor, own: Any) -> Tensor:
            return self.attend(q, k, v, change(own, scores, q))

        return original(replace(self, attend=attend), q, k, v, scores)

    return patch.object(ContextAttention, "__call__", mutated)


def _sinks_not_cut() -> Any:
    return _with_scores(lambda own, of_all, q: own._replace(sinks_N=of_all.sinks_N[: q.shape[1]]))


def _window_dropped() -> Any:
    return _with_scores(lambda own, of_all, q: own._replace(window=None))


@contextmanager
def _none() -> Iterator[None]:
    yield


MUTANTS: dict[str, Callable[[], Any]] = {
    "": _none,
    "rotations by the part": _rotate_by_the_part,
    "bounds of the part in delta layers": lambda: _bounds_of_the_part(delta_layer, "_recur_within"),
    "bounds of the part in convolutions": lambda: _bounds_of_the_part(short_convolution, "_convolve_within"),
    "sinks not cut": _sinks_not_cut,
    "window dropped": _window_dropped,
}


# --- The work of a rank ---


def save_differences(cases: list[Case], path: Path) -> None:
    """Writes the differences of each case, in float32 and, where blocks are not compiled, in float64."""
    ranks, found = start_ranks(), list[dict[str, dict[str, float]]]()
    for case in cases:
        model = case.make()
        found.append({"float32": differences(model, case.row, case.mutant)})
        if not case.compiled:
            with in_float64(model):
                found[-1]["float64"] = differences(model, case.row, case.mutant)
    if ranks.is_main:
        path.write_text(json.dumps(found))
    end_ranks()


def save_isolation(families: list[str], row: Row, path: Path) -> None:
    """Writes for each family and changed document how the others' hidden states change on this rank, and the largest
    gradient that reaches the embedding of another document's token."""
    ranks = start_ranks()
    own, found = row.own(ranks.rank), {}
    _, position_ids, cu_seqlens, max_seqlen = pack(list(row.lengths))
    documents = torch.arange(len(row.lengths)).repeat_interleave(torch.tensor(row.lengths))
    # Each token has an id of its own, so its row of the embeddings has the gradient of this position.
    ids = torch.randperm(TINY["vocab_size"], generator=torch.Generator().manual_seed(0))
    ids, unused = ids[: row.num_tokens], ids[row.num_tokens :]
    for family in families:
        model = make_native(make_reference(**FAMILIES[family]))
        model.context_group = dist.group.WORLD

        def hidden_states(input_ids: Tensor, model: LlamaForSFT = model) -> Tensor:
            return model(input_ids[own], position_ids, cu_seqlens, max_seqlen, row.counts)

        before, found[family] = hidden_states(ids).detach(), []
        for document in range(len(row.lengths)):
            is_of_it = documents == document
            changed = torch.where(is_of_it, unused[0], ids)
            difference = (hidden_states(changed).detach() - before).abs()
            model.zero_grad(set_to_none=True)
            hidden = hidden_states(ids)
            (hidden * is_of_it[own, None] * torch.randn(hidden.shape[1])).sum().backward()
            gradient = model.model.embed_tokens.weight.grad
            assert gradient is not None
            dist.all_reduce(gradient)
            found[family].append(
                {
                    "others": difference[~is_of_it[own]].max().item() if (~is_of_it[own]).any() else 0.0,
                    "it": difference[is_of_it[own]].max().item() if is_of_it[own].any() else None,
                    "gradient of others": gradient[ids[~is_of_it]].abs().max().item(),
                    "gradient of it": gradient[ids[is_of_it]].abs().max().item(),
                }
            )
    path.with_name(f"{path.name}-{ranks.rank}").write_text(json.dumps(found))
    end_ranks()


def save_costs(options: dict[str, Any], row: Row, path: Path) -> None:
    """Writes the numbers that this rank sends to others in a forward and backward pass, and the bytes that one rank,
    and this one, keep for the backward pass."""
    ranks = start_ranks()
    model = make_native(make_reference(**options))
    sent: list[int] = []
    original = dist.all_to_all_single

    def counting(output: Tensor, x: Tensor, received: list[int], sizes: list[int], **kwargs: Any) -> None:
        sent.append(sum(size for rank, size in enumerate(sizes) if rank != ranks.rank))
        original(output, x, received, sizes, **kwargs)

    kept: dict[str, int] = {}
    for name, own, counts in (("alone", slice(None), ()), ("shared", row.own(ranks.rank), row.counts)):
        model.context_group = dist.group.WORLD if counts else None
        storages: dict[int, Tensor] = {}
        parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}

        def keep(tensor: Tensor, storages: dict[int, Tensor] = storages, parameters: set[int] = parameters) -> Tensor:
            if (address := tensor.untyped_storage().data_ptr()) not in parameters and tensor.is_floating_point():
                storages[address] = tensor
            return tensor

        input_ids, *rest = pack(list(row.lengths))
        with patch.object(dist, "all_to_all_single", counting), saved_tensors_hooks(keep, lambda x: x):
            hidden = model(input_ids[own], *rest, counts)
            kept[name] = sum(each.untyped_storage().nbytes() for each in storages.values())
            hidden.sum().backward()
    path.with_name(f"{path.name}-{ranks.rank}").write_text(json.dumps({"sent": sent, "kept": kept}))
    end_ranks()


def save_whole(row: Row, path: Path) -> None:
    """Writes whether the ranks that share rows may all be given a whole one, without gradients and with them."""
    ranks = start_ranks()
    model, inputs, found = make_native(make_reference()), pack(list(row.lengths)), dict[str, Any]()
    with torch.no_grad():
        alone = model(*inputs)
        with shared(model):
            found["is that of one rank"] = model(*inputs).equal(alone)
    with shared(model):
        try:
            model(*inputs)
        except ValueError as error:
            found["with gradients"] = str(error)
    path.with_name(f"{path.name}-{ranks.rank}").write_text(json.dumps(found))
    end_ranks()
