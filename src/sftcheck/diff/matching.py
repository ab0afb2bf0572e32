"""The same conversations in two records, and the same tokens in them.

A    <s> user Hi </s> bot Yo </s>           documents are found by their sketches, so special tokens, order,
B    user Hi </s> bot Yo </s> <s> ...       packs and cuts do not matter; tokens are aligned by their ids
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise

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

    @property
    def is_same(self) -> bool:
        return np.array_equal(self.a.ids, self.b.ids)

    @property
    def same_prefix(self) -> np.ndarray:
        """bool [n], of the aligned tokens: whether the same ids are before them."""
        return self.a.prefixes[self.aligned[:, 0]] == self.b.prefixes[self.aligned[:, 1]]


class Matching:
    """The pairs of documents of two records.

    Attributes:
        pairs: Each document is in one pair at most.
        only_a, only_b: The numbers of the others.
    """

    def __init__(self, a: TokenRecord, b: TokenRecord) -> None:
        self.a, self.b = a, b
        documents_a, documents_b = list(documents_of(a)), list(documents_of(b))
        found = dict(_pairs(a.sketches, b.sketches))
        self.pairs = [_aligned(each, documents_b[found[n]]) for n, each in enumerate(documents_a) if n in found]
        self.only_a = [n for n in range(len(documents_a)) if n not in found]
        self.only_b = sorted(set(range(len(documents_b))) - set(found.values()))

    def places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the places of the same tokens in A and in B, and whether the same ids are before them."""
        parts = [
            (pair.a.at[pair.aligned[:, 0]], pair.b.at[pair.aligned[:, 1]], pair.same_prefix) for pair in self.pairs
        ]
        if not parts:
            none = np.zeros(0, dtype=np.int64)
            return none, none, none.astype(bool)
        first, second, same = (np.concatenate(each) for each in zip(*parts, strict=True))
        return first, second, same


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


def _pairs(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields pairs of documents whose sketches have the most in common, the best first."""
    hashes_a, hashes_b = ([set(row[row != _NONE].tolist()) for row in each] for each in (a, b))
    counts = (Counter(h for row in each for h in row) for each in (hashes_a, hashes_b))
    in_a, in_b = counts
    # What many documents share, such as a system prompt, says little.
    weight = {h: 1.0 / max(in_a[h], in_b[h], 1) for h in (*in_a, *in_b)}
    of_hash = defaultdict[int, list[int]](list)
    for n, row in enumerate(hashes_b):
        for each in row:
            of_hash[each].append(n)
    scored = list[tuple[float, float, int, int]]()
    for n, own in enumerate(hashes_a):
        for m in sorted({m for each in own for m in of_hash.get(each, ())}):
            share, likeness = _shared(own, hashes_b[m], weight, a.shape[1])
            if share >= _LEAST_SHARED:
                scored.append((-share, -likeness, n, m))
    taken_a, taken_b = set[int](), set[int]()
    for *_, n, m in sorted(scored):
        if n not in taken_a and m not in taken_b:
            taken_a.add(n)
            taken_b.add(m)
            yield n, m


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
