"""Checks of rows that several ranks of a trainer share, and of conversations on different ranks.

Each of them is a collective; on_ranks.py says what a pass proves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from sftcheck.faults import Fault
from sftcheck.ranks.rank_batches import MicroBatch
from sftcheck.ranks.rank_subject import RankSubject
from sftcheck.ranks.row_map import RowMap
from sftcheck.tolerances import CHANGE_ACROSS_RANKS, ROTATION
from sftron.checks.isolation import separating_sets
from sftron.checks.report import Finding, NotMeasuredError
from sftron.data.types import IGNORE_INDEX

_MOST_LENGTHS = 16


def _require_parts(subject: RankSubject) -> None:
    if not subject.is_split:
        raise NotMeasuredError("each rank computes whole rows")


def rotations(subject: RankSubject) -> Finding:
    _require_parts(subject)
    chosen = subject.exchange.gather("the lengths of rows", _of_all_lengths(subject))[0]
    wrong, largest, num_compared, allowed = Counter[str](), 0.0, 0, ROTATION.limit_of(subject.model)
    for micro in [subject.seen[number] for number in chosen]:
        own, expected = subject.on_ranks.rotations(micro)
        if not own or not expected:
            own, expected = _positions(micro)
        worst, compared = _apart(own, expected, micro)
        num_compared += compared
        largest = max(largest, worst)
        if worst > allowed:
            wrong[f"row of {micro.whole.ids.shape[1]:,} tokens"] += 1
    found = subject.exchange.gather("the rotations", (largest, num_compared, dict(wrong)))
    apart = [each for each, *_ in found]
    if not any(compared for _, compared, _ in found):
        raise NotMeasuredError("the model shows neither rotations nor positions")
    detail = tuple(f"rank {rank}: {largest:.2g} apart {names or ''}" for rank, (largest, _, names) in enumerate(found))
    if max(apart) <= allowed:
        longest = max(subject.exchange.gather("the longest row", [each.whole.ids.shape[1] for each in subject.seen]))
        measured = f"rows of up to {max(longest):,} tokens: rotations differ by {max(apart):.1g} from whole rows"
        return Finding(True, measured, f"<= {allowed:.0e}", detail)
    ranks = [str(rank) for rank, each in enumerate(apart) if each > allowed]
    measured = f"rank {', '.join(ranks)}: rotations differ by {max(apart):.2g} from the whole row"
    return Finding(False, measured, f"<= {allowed:.0e}", detail, (Fault.OTHER_ROTATIONS,))


def _of_all_lengths(subject: RankSubject) -> list[int]:
    """Returns the numbers of a few batches from the shortest rows to the longest, as some rotations depend on both."""
    order = np.argsort([micro.whole.ids.shape[1] for micro in subject.seen], kind="stable")
    chosen = np.unique(np.linspace(0, len(order) - 1, _MOST_LENGTHS).round().astype(int))
    return [int(order[n]) for n in chosen]


def _positions(micro: MicroBatch) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the positions of a part and of the whole rows, each [1, T, 1], for a model without rotations."""
    shape, passed = micro.computed.shape, micro.whole.positions
    own = micro.computed.read(passed) if passed is not None else np.broadcast_to(np.arange(shape[1]), shape)
    expected = np.broadcast_to(np.arange(micro.whole.ids.shape[1]), micro.whole.ids.shape)
    return [own[..., None].astype(float)], [(expected if passed is None else passed)[..., None].astype(float)]


def _apart(own: Sequence[np.ndarray], expected: Sequence[np.ndarray], micro: MicroBatch) -> tuple[float, int]:
    """Returns the largest difference of a part's rotations from the whole rows' rotations, and how many there are."""
    worst, compared = 0.0, 0
    for part, rows in zip(own, expected, strict=False):
        if part.shape[1] == rows.shape[1]:  # of the whole row, on each rank
            worst, compared = max(worst, float(np.abs(part - rows).max())), compared + part.shape[1]
        elif part.shape[1] == micro.computed.shape[1]:
            rows = np.broadcast_to(rows, (len(micro.whole.ids), *rows.shape[1:]))
            different = np.abs(part - micro.computed.read(rows))[micro.computed.has_place]
            worst, compared = max(worst, float(different.max(initial=0.0))), compared + len(different)
    return worst, compared


def borders(subject: RankSubject) -> Finding:
    _require_parts(subject)
    # Every token gets a label, so that a border is seen wherever it falls.
    micro = max(subject.computed_micro_batches, key=lambda each: each.whole.ids.size)
    labels, trained = subject.on_ranks.trained_everywhere(micro)
    by_rank = subject.exchange.gather("the trained tokens", (micro.computed.places, trained, labels))
    lost = extra = total = 0
    for first in micro.first_of_groups:
        labels = by_rank[first][2]
        is_trained, expected = np.zeros(labels.shape, dtype=bool), np.zeros(labels.shape, dtype=bool)
        expected[:, :-1] = labels[:, 1:] != IGNORE_INDEX
        for rank in micro.group_of(first) if micro.is_split(first) else [first]:
            places, found, _ = by_rank[rank]
            if found is None or found.shape != places.shape[:2]:
                raise NotMeasuredError("the check finds no decoder, so it cannot tell which tokens are trained")
            RowMap(np.where(found[..., None], places, -1)).write(is_trained, found)
        lost, extra = lost + int((expected & ~is_trained).sum()), extra + int((is_trained & ~expected).sum())
        total += int(expected.sum())
    if not lost and not extra:
        return Finding(True, f"{total:,} labels are trained by the tokens before them", "all")
    measured = f"{lost:,} of {total:,} labels are not trained, and {extra:,} tokens without one are"
    return Finding(False, measured, "all", (), (Fault.LABELS_AT_BORDERS,))


def across_ranks(subject: RankSubject) -> Finding:
    micro_batches, world_size = subject.computed_micro_batches, subject.exchange.world_size
    documents = [_documents(subject, micro) for micro in micro_batches]
    numbers = subject.exchange.gather("the documents", [len(each) for each in documents])
    before = subject.on_ranks.hidden([micro.whole.ids for micro in micro_batches])
    apart, own, size = 0.0, 0.0, max(float(each.abs().max()) for each in before)
    total = max(map(sum, zip(*numbers, strict=True)))  # on all ranks, which take the same passes
    for chosen in (*separating_sets(total), None):
        changes = list[_Change]()
        for n, micro in enumerate(micro_batches):
            first = micro.group_of(subject.rank)[0] if micro.is_split(subject.rank) else subject.rank
            earlier = sum(numbers[rank][n] for rank in micro.first_of_groups if rank < first)
            changes.append(_change_of(micro, documents[n], earlier, chosen))
        after = subject.on_ranks.hidden([each.ids for each in changes])
        for micro, change, one, two in zip(micro_batches, changes, before, after, strict=True):
            if one.shape[1] != micro.computed.shape[1]:
                raise NotMeasuredError("the check finds no decoder, and the model's logits cover only some tokens")
            difference = (one - two).abs().amax(dim=-1).cpu().numpy()
            is_kept, is_changed = (micro.computed.read(each, False) for each in (change.is_kept, change.is_changed))
            apart = max(apart, float(difference[is_kept].max(initial=0.0)))
            own = max(own, float(difference[is_changed].max(initial=0.0)))
    found = subject.exchange.gather("the changes", (apart, own, size))
    worst, own, size = (max(each[n] for each in found) for n in range(3))
    if not own or sum(sum(each) for each in numbers) < 2:
        raise NotMeasuredError("a step holds fewer than two conversations, or its outputs do not depend on the tokens")
    allowed = size * CHANGE_ACROSS_RANKS.limit_of(subject.model)
    detail = (f"a changed conversation itself changes by {own:.2g}",)
    wrong = [rank for rank, each in enumerate(found) if each[0] > allowed]
    measured = f"conversations on {world_size} ranks: others change by {worst:.2g}"
    if wrong:
        measured = f"rank {', '.join(map(str, wrong))}: {measured}"
    return Finding(not wrong, measured, f"<= {allowed:.0e}", detail, (Fault.LEAK_ACROSS_RANKS,))


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """Whole rows in which some conversations are other text."""

    ids: np.ndarray
    is_changed: np.ndarray
    """bool [B, T]"""
    is_kept: np.ndarray
    """bool [B, T]: unchanged conversations, and what precedes a change; no padding."""


def _change_of(
    micro: MicroBatch, documents: Sequence[tuple[int, slice]], earlier: int, chosen: Collection[int] | None
) -> _Change:
    """Changes conversations by their numbers, or the second halves of all; `earlier` ones are on other ranks."""
    ids = micro.whole.ids
    is_changed, is_kept = np.zeros(ids.shape, dtype=bool), np.zeros(ids.shape, dtype=bool)
    for number, (row, columns) in enumerate(documents, earlier):
        begin = (columns.start + columns.stop) // 2
        if chosen is not None:
            begin = columns.start if number in chosen else columns.stop
        is_kept[row, columns.start : begin] = True
        is_changed[row, begin : columns.stop] = True
    known = np.unique(ids)
    other = known[(np.searchsorted(known, ids) + 1) % len(known)]
    return _Change(np.where(is_changed, other, ids), is_changed, is_kept)


def _documents(subject: RankSubject, micro: MicroBatch) -> list[tuple[int, slice]]:
    return [each.index for each in subject.training.documents_of([micro.whole]) if len(each) > 1]
