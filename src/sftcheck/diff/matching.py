"""The same conversations in two records, and the same tokens in them.

A    <s> user Hi </s> bot Yo </s>           documents are found by their sketches, so special tokens, order,
B    user Hi </s> bot Yo </s> <s> ...       packs and cuts do not matter; tokens are aligned by their ids
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from sftron.report.token_record import NO_TARGET, TokenRecord, prefix_digests

_LEAST_SHARED = 0.4
"""The smallest share of hashes that the shorter of two equal texts has in common with the longer one."""
_NONE = np.uint64(2**64 - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """One conversation in a record: which of its tokens, in order."""

    number: int
    at: np.ndarray
    ids: np.ndarray
    prefixes: np.ndarray
    """uint64 [n + 1]: a digest of the first n ids."""


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A conversation in both records."""

    a: Document
    b: Document
    aligned: np.ndarray
    """int [n, 2]: places of the same token in the two documents."""
    cut: str = ""
    """The record that has parts of the conversation as documents, "A" or "B"; "" if it is whole in both."""

    @property
    def is_same(self) -> bool:
        return np.array_equal(self.a.ids, self.b.ids)

    @property
    def same_prefix(self) -> np.ndarray:
        """bool [n], of the aligned tokens: whether the same ids are before them, or were before the cut."""
        same = self.a.prefixes[self.aligned[:, 0]] == self.b.prefixes[self.aligned[:, 1]]
        return same | bool(self.cut)


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The same tokens in both records, [n]."""

    a: np.ndarray
    b: np.ndarray
    is_same: np.ndarray
    """Whether the same ids are before them in their conversation."""
    is_cut_a: np.ndarray
    is_cut_b: np.ndarray


class Matching:
    """The pairs of documents of two records.

    Attributes:
        pairs: Each document is in one pair at most, but for those whose parts are documents of the other record.
        only_a, only_b: The numbers of the others.
    """

    def __init__(self, a: TokenRecord, b: TokenRecord) -> None:
        self.a, self.b = a, b
        documents = list(documents_of(a)), list(documents_of(b))
        # Texts can be equal where ids are not, and the end of a conversation that is cut may have no text.
        best = _of_equal_ids(*documents)
        taken = set(best.values())
        scored = sorted(_scored(a.sketches, b.sketches, best.keys(), taken))
        for *_, n, m in scored:
            if n not in best and m not in taken:
                best[n] = m
                taken.add(m)
        self.pairs = [_aligned(documents[0][n], documents[1][m]) for n, m in sorted(best.items())]
        self._add_parts(scored, documents)
        found = {each.a.number for each in self.pairs}, {each.b.number for each in self.pairs}
        self.only_a, self.only_b = (sorted({each.number for each in own} - known)
                                    for own, known in zip(documents, found, strict=True))  # fmt: skip

    def _add_parts(self, scored: Sequence[tuple[float, float, int, int]], documents: Any) -> None:
        """Adds the documents that are a further part of a conversation in a pair."""
        of = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)  # the places of each document's pairs
        for place, each in enumerate(self.pairs):
            of[0][each.a.number].append(place)
            of[1][each.b.number].append(place)
        for *_, n, m in scored:
            for side, name in ((0, "B"), (1, "A")):  # that has the whole, and the other one
                whole, part = ((n, m), (m, n))[side]
                places = of[side][whole]
                if not places or of[1 - side][part]:
                    continue
                found = _aligned(documents[0][n], documents[1][m])
                covered = np.concatenate([self.pairs[each].aligned[:, side] for each in places])
                aligned = found.aligned[~np.isin(found.aligned[:, side], covered)]
                if 2 * len(aligned) < len(documents[1 - side][part].ids):
                    continue
                for each in places:
                    self.pairs[each] = replace(self.pairs[each], cut=name)
                for own, number in zip(of, (n, m), strict=True):
                    own[number].append(len(self.pairs))
                self.pairs.append(replace(found, aligned=aligned, cut=name))

    @cached_property
    def places(self) -> Places:
        parts = [
            (each.a.at[each.aligned[:, 0]], each.b.at[each.aligned[:, 1]], each.same_prefix,
             np.full(len(each.aligned), each.cut == "A"), np.full(len(each.aligned), each.cut == "B"))
            for each in self.pairs
        ]  # fmt: skip
        none = np.zeros(0, dtype=np.int64)
        empty = (none, none, none.astype(bool), none.astype(bool), none.astype(bool))
        return Places(*map(np.concatenate, zip(empty, *parts, strict=True)))


def documents_of(record: TokenRecord) -> Iterator[Document]:
    """Yields the documents of a record, by their numbers."""
    order = np.argsort(record.document, kind="stable")
    bounds = np.searchsorted(record.document[order], np.arange(len(record.sketches) + 1))
    for number, (first, end) in enumerate(pairwise(bounds.tolist())):
        at = order[first:end]
        yield Document(number, at, record.id[at], own_prefixes(record.id[at]))


def own_prefixes(ids: np.ndarray) -> np.ndarray:
    """Returns a digest of the first n ids, for each n from 0, uint64 [len + 1]."""
    return np.concatenate([[np.uint64(0)], prefix_digests(ids, np.zeros(len(ids), dtype=np.int64))])


def _of_equal_ids(a: Sequence[Document], b: Sequence[Document]) -> dict[int, int]:
    """Returns the numbers of documents of the same ids, those of A by those of B, in order; each is in one pair."""
    of_ids, found = defaultdict[bytes, list[int]](list), dict[int, int]()
    for each in reversed(b):
        of_ids[each.ids.tobytes()].append(each.number)
    for each in a:
        if own := of_ids[each.ids.tobytes()]:
            found[each.number] = own.pop()
    return found


def _scored(
    a: np.ndarray, b: np.ndarray, known_a: Collection[int], known_b: Collection[int]
) -> Iterator[tuple[float, float, int, int]]:
    """Yields (-share, -likeness, n, m) of documents whose sketches have enough in common: the best is the smallest.

    The share is of the smaller text that is in the larger one. Those in `known_a` and `known_b` have their pair.
    """
    if not (a.size and b.size):
        return
    values, places = np.unique(np.concatenate([a.ravel(), b.ravel()]), return_inverse=True)
    in_a, in_b = places[: a.size].reshape(a.shape), places[a.size :].reshape(b.shape)
    counts = [np.bincount(each.ravel(), minlength=len(values)) for each in (in_a, in_b)]
    # What many documents share, such as a system prompt, says little.
    weight = np.where(values == _NONE, 0.0, 1.0 / np.maximum(*counts))
    of_a, of_b = (np.pad(np.cumsum(weight[each], axis=1), ((0, 0), (1, 0))) for each in (in_a, in_b))
    order = np.argsort(in_b, axis=None, kind="stable")
    order = order[~np.isin(order // b.shape[1], list(known_b))]
    starts = np.searchsorted(in_b.ravel()[order], np.arange(len(values) + 1))
    for n in sorted({*range(len(a))} - {*known_a}):
        having = [order[starts[each] : starts[each + 1]] // b.shape[1] for each in in_a[n]]
        common = np.bincount(np.concatenate(having), np.repeat(weight[in_a[n]], [*map(len, having)]), len(b))
        found = np.flatnonzero(common)
        common, others = common[found], b[found]
        # Of a longer text, only the smallest hashes are known.
        whole_a = of_a[n, np.searchsorted(a[n], others[:, -1], side="right")]
        whole_b = of_b[found, (others <= a[n, -1]).sum(axis=1)]
        share = common / np.minimum(whole_a, whole_b)
        likeness = common / (of_a[n, -1] + of_b[found, -1] - common)
        for m in np.flatnonzero(share >= _LEAST_SHARED):
            yield -round(float(share[m]), 9), -round(float(likeness[m]), 9), n, int(found[m])


def _aligned(a: Document, b: Document) -> Pair:
    if len(a.ids) == len(b.ids) and np.array_equal(a.ids, b.ids):
        return Pair(a, b, np.repeat(np.arange(len(a.ids))[:, None], 2, axis=1))
    first, last = _equal_ends(a.ids, b.ids)
    ends = len(a.ids) - last, len(b.ids) - last
    inner = SequenceMatcher(None, a.ids[first : ends[0]].tolist(), b.ids[first : ends[1]].tolist(), autojunk=False)
    blocks = [(0, 0, first), *((x + first, y + first, n) for x, y, n in inner.get_matching_blocks()), (*ends, last)]
    places = [np.stack([np.arange(x, x + n), np.arange(y, y + n)], axis=1) for x, y, n in blocks if n]
    return Pair(a, b, np.concatenate(places) if places else np.zeros((0, 2), dtype=np.int64))


def _equal_ends(a: np.ndarray, b: np.ndarray) -> tuple[int, int]:
    """Returns how many ids are equal at the beginnings, and at the ends behind them."""
    size = min(len(a), len(b))
    unlike = np.flatnonzero(a[:size] != b[:size])
    first = int(unlike[0]) if len(unlike) else size
    rest = size - first
    unlike = np.flatnonzero(a[len(a) - rest :][::-1] != b[len(b) - rest :][::-1])
    return first, int(unlike[0]) if len(unlike) else rest


def trains_itself(record: TokenRecord) -> np.ndarray:
    """Returns whether the loss trains the token itself, or none in its place, bool [n]."""
    return (record.target == NO_TARGET) | (record.target == record.id)
