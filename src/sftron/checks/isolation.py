"""Measures whether a model isolates the conversations of a pack from each other, in any trainer (law 7).

    a pack of three conversations    a a a | b b b b | c c
    in turn, some are changed        a x x | b b b b | c c     no logit of the others may change in any bit; each
                                     a a a | b x x x | c c     conversation is changed while any other one is not
                                     a a a | b b b b | c x
    all second halves are changed    a x x | b b x x | c x     nor one of a first half: no token attends to later ones

Isolation depends on the model's class, the keys of the batch, the attention implementation and the cache. No model
reports that it lacks isolation; docs/isolation.md has a table of model types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, combinations, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sftron.checks.report import Finding, NotMeasuredError

_MOST_ROUNDED = 8
"""The documents whose rounding is measured: a copy of one alone may happen to change no bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The change of the logits after other conversations, or later tokens, were changed."""

    num_conversations: int
    difference: float
    """The maximum |difference| of a logit by another conversation; 0.0 means bitwise equal."""
    rounding: float
    """The maximum difference that the backend's rounding can cause; measured only if the difference is not 0.0."""
    own_difference: float
    """The maximum |difference| of a logit in a changed conversation."""
    past_difference: float = 0.0
    """The maximum |difference| of a logit of a first half after all second halves were changed."""

    @property
    def isolated(self) -> bool:
        return max(self.difference, self.past_difference) <= self.rounding

    @property
    def shows_future(self) -> bool:
        """Whether conversations are isolated, and no token attends to later ones."""
        return self.difference <= self.rounding < self.past_difference


def try_isolation(model: nn.Module, batch: Mapping[str, Any]) -> Isolation | Exception:
    """Measures one row, a batch of FlattenPacks. Returns the error if the model refuses it or nothing is measured."""
    try:
        return measure_isolation(model, batch)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return error


def measure_isolation(model: nn.Module, batch: Mapping[str, Any]) -> Isolation:
    """Measures one row, a batch of FlattenPacks.

    Raises:
        NotMeasuredError: The measurement allows no conclusion.
        Exception: Any exception of the model.
    """
    device = next(model.parameters()).device
    inputs = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    inputs.pop("labels", None)
    ids, documents = inputs["input_ids"], documents_of(inputs)
    if len(documents) < 2:
        raise NotMeasuredError(
            "the packs hold 1 attention document, which has no neighbor; give packs with at least two conversations "
            "(with remove_cross_attention: false, a pack is one document)"
        )
    with _training_without_traces(model):
        return compare_documents(
            lambda changed: _logits(model, inputs | {"input_ids": changed}),
            ids,
            [(0, document) for document in documents],
            lambda longest: rounding_of(model, partial(_logits_of_rows, model, keys=inputs.keys()), longest),
        )


def documents_of(batch: Mapping[str, Any]) -> list[slice]:
    """Returns the range of each document of a row, a batch of FlattenPacks."""
    starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], batch["input_ids"].shape[1]], strict=True)]


@torch.no_grad()
def compare_documents(
    outputs: Callable[[Tensor], Tensor],
    ids: Tensor,
    documents: Sequence[tuple[int, slice]],
    rounding: Callable[[Tensor], float],
) -> Isolation:
    """Changes some documents but their first tokens, in turn, and then all second halves; measures all other outputs.

    Args:
        outputs: Returns logits or hidden states [B, T, any] for ids [B, T].
        documents: The row and the range of each document, at least two.
        rounding: Returns the rounding for ids [1, n] of one document.

    Raises NotMeasuredError if the measurement allows no conclusion.
    """
    before, other = outputs(ids), _other_tokens(ids)

    def changes(starts: Mapping[int, int], *, looks_before: bool = False) -> tuple[float, float]:
        """Changes documents from these places on; returns the largest change of others, and of what was changed.

        Args:
            looks_before: Whether the beginnings of changed documents are looked at, in place of the others.
        """
        changed, kept, own = ids.clone(), 0.0, 0.0
        for number, start in starts.items():
            row, each = documents[number]
            changed[row, start : each.stop] = other[row, start : each.stop]
        after = outputs(changed)
        for number, (row, each) in enumerate(documents):
            start = starts.get(number, each.stop)
            if each.start < start and (number in starts) == looks_before:
                kept = max(kept, _largest_difference(before[row, each.start : start], after[row, each.start : start]))
            if start < each.stop:
                own = max(own, _largest_difference(before[row, start : each.stop], after[row, start : each.stop]))
        return kept, own

    places = [min(each.start + 1, each.stop - 1) for _, each in documents]
    found = [changes({n: places[n] for n in chosen}) for chosen in separating_sets(len(documents))]
    halves = {n: (each.start + each.stop) // 2 for n, (_, each) in enumerate(documents)}
    of_halves = changes(halves, looks_before=True)
    difference, past_difference = max(kept for kept, _ in found), of_halves[0]
    own = max(each[1] for each in (*found, of_halves))
    if not own > 0:
        raise NotMeasuredError("its logits do not depend on the tokens; check that these are the weights to train")
    allowed = 0.0
    if max(difference, past_difference) > 0:
        longest = sorted(documents, key=lambda each: each[1].start - each[1].stop)[:_MOST_ROUNDED]
        allowed = 4 * max(rounding(ids[row, each][None]) for row, each in longest)
    return Isolation(
        num_conversations=len(documents),
        difference=difference,
        rounding=allowed,
        own_difference=own,
        past_difference=past_difference,
    )


def separating_sets(number: int) -> list[list[int]]:
    """Returns the fewest sets of 0 to number - 1 such that for any two, a set has the first and not the second.

    Each number is in another half of the sets (Sperner, 1928), so 6 of them need 4 sets, and 70 need 8.
    """
    size = next(size for size in range(2, 64) if math.comb(size, size // 2) >= number)
    sets: list[list[int]] = [[] for _ in range(size)]
    for each, chosen in zip(range(number), combinations(range(size), size // 2), strict=False):
        for at in chosen:
            sets[at].append(each)
    return [each for each in sets if each]


def isolation_of_pack(
    outputs: Callable[[Tensor], Tensor], ids: Tensor, lengths: Sequence[int], rounding: Callable[[], float]
) -> Finding:
    """Measures one of sftron's own models, in which a neighbor must not change a bit, except by the rounding of
    experts.

    Args:
        outputs: Returns logits or hidden states [T, any] for the ids [T] of the pack.
        lengths: The numbers of tokens of its conversations.
        rounding: Returns how much rounding changes a conversation's outputs beside a copy of itself.
    """
    bounds, allowed = [0, *accumulate(lengths)], "0, to the bit"
    documents = [(0, slice(*each)) for each in pairwise(bounds)]
    try:
        found = compare_documents(lambda each: outputs(each[0])[None], ids[None], documents, lambda _: rounding())
    except NotMeasuredError as error:  # of the model's own outputs, so this is a failure
        return Finding(False, str(error), allowed)
    if found.rounding:
        allowed = f"{found.rounding:.2g}, the rounding of experts"
    worst = max(found.difference, found.past_difference)
    return Finding(found.isolated, f"{len(lengths)} conversations: others change by {worst:.2g}", allowed)


def _other_tokens(ids: Tensor) -> Tensor:
    """Returns another id for each token, taken from the batch so that the model knows it."""
    known = ids.unique()
    if len(known) < 2:
        raise NotMeasuredError(f"all tokens of the packs are {int(known[0])}; give packs of real conversations")
    return known[(torch.searchsorted(known, ids) + 1) % len(known)]


def rounding_of(model: nn.Module, outputs: Callable[[Tensor], Tensor], ids: Tensor) -> float:
    """Returns how much a conversation's outputs change if the batch has a second row, a copy of it.

    In a mixture of experts, a second row changes the shapes of the matrix products, as does routing a neighbor's tokens
    to other experts. A copy adds nothing that could leak. Dropout is disabled, because its masks differ with two rows
    and would hide any leak.
    """
    model.eval()
    return _largest_difference(outputs(ids)[0], outputs(torch.cat([ids, ids]))[0])


def _logits(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    torch.manual_seed(0)  # the same dropout in both passes
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # the model's own buffers are unchanged
    outputs = torch.func.functional_call(model, buffers, kwargs=dict(inputs))
    if not hasattr(outputs, "logits"):
        raise NotMeasuredError(f"its forward method returns a {type(outputs).__name__}, which has no .logits")
    return outputs.logits


def _logits_of_rows(model: nn.Module, ids: Tensor, keys: Collection[str]) -> Tensor:
    """Returns the logits of whole rows. Passes positions if the batch's `keys` have them, because a model may require
    them."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return _logits(model, {"input_ids": ids} | ({"position_ids": positions} if "position_ids" in keys else {}))


def _largest_difference(one: Tensor, other: Tensor) -> float:
    """Returns the maximum difference of two [T, any]; equal infinities count as equal."""
    largest = float(torch.where(one == other, 0.0, (one.float() - other.float()).abs()).max())
    if not largest < float("inf"):
        raise NotMeasuredError("its logits are not finite; check that these are the weights to train")
    return largest


@contextmanager
def _training_without_traces(model: nn.Module) -> Iterator[None]:
    """Sets training mode without gradients, and restores modes and random state at exit."""
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        try:
            model.train()
            yield
        finally:
            for module, mode in modes:
                module.training = mode
