"""The same conversations in two records, and the same tokens in them.

A    <s> user Hi </s> bot Yo </s>           documents are found by their sketches, so special tokens, order,
B    user Hi </s> bot Yo </s> <s> ...       packs and cuts do not matter; tokens are aligned by their ids
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
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
        scored = sorted(_scored(a.sketches, b.sketches))
        best = dict[int, int]()
        for *_, n, m in scored:
            if n not in best and m not in best.values():
                best[n] = m
        self.pairs = [_aligned(documents[0][n], documents[1][m]) for n, m in sorted(best.items())]
        self._add_parts(scored, documents)
        found = {each.a.number for each in self.pairs}, {each.b.number for each in self.pairs}
        self.only_a, self.only_b = (sorted({each.number for each in own} - known)
                                    for own, known in zip(documents, found, strict=True))  # fmt: skip

    def _add_parts(self, scored: Sequence[tuple[float, float, int, int]], documents: Any) -> None:
        """Adds the documents that are a further part of a conversation in a pair."""
        for *_, n, m in scored:
            for side, name in ((0, "B"), (1, "A")):  # that has the whole, and the other one
                whole, part = ((n, m), (m, n))[side]
                pairs = [each for each in self.pairs if (each.a, each.b)[side].number == whole]
                if not pairs or any((each.b, each.a)[side].number == part for each in self.pairs):
                    continue
                found = _aligned(documents[0][n], documents[1][m])
                covered = np.concatenate([each.aligned[:, side] for each in pairs])
                aligned = found.aligned[~np.isin(found.aligned[:, side], covered)]
                if 2 * len(aligned) < len(documents[1 - side][part].ids):
                    continue
                own = [replace(each, cut=name) for each in pairs]
                self.pairs = [own[pairs.index(each)] if each in pairs else each for each in self.pairs]
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


def _scored(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[float, float, int, int]]:
    """Yields (-share, -likeness, n, m) of documents whose sketches have enough in common: the best is the smallest."""
    hashes_a, hashes_b = ([set(row[row != _NONE].tolist()) for row in each] for each in (a, b))
    counts = (Counter(h for row in each for h in row) for each in (hashes_a, hashes_b))
    in_a, in_b = counts
    # What many documents share, such as a system prompt, says little.
    weight = {h: 1.0 / max(in_a[h], in_b[h], 1) for h in (*in_a, *in_b)}
    of_hash = defaultdict[int, list[int]](list)
    for n, row in enumerate(hashes_b):
        for each in row:
            of_hash[each].append(n)
    for n, own in enumerate(hashes_a):
        for m in sorted({m for each in own for m in of_hash.get(each, ())}):
            share, likeness = _shared(own, hashes_b[m], weight, a.shape[1])
            if share >= _LEAST_SHARED:
                yield -share, -likeness, n, m


def _shared(a: set[int], b: set[int], weight: dict[int, float], size: int) -> tuple[float, float]:
    """Returns the share of the smaller text that is in the larger one, and the likeness of both."""
    common = sum(weight[h] for h in a & b)
    shares = list[float]()
    for own, other in ((a, b), (b, a)):
        # Of a longer text, only the smallest hashes are known.
        known = max(other) if len(other) == size else None
        whole = sum(weight[h] for h in own if known is None or h <= known)
        shares.append(common / whole if whole else 0.0)
    return max(shares), common / (sum(weight[h] for h in a | b) or 1.0)


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
