"""Checks of a trainer's ranks: their rows, their loss, their gradients, and the parts of rows that they share.

The docstring of a check is the law that a pass proves, and is printed in reports. Each of them is a collective.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sftron.data.types import IGNORE_INDEX
from sftron.verify.report import Finding, NotMeasuredError
from sftron.verify.trainer import rank_remedies as remedies
from sftron.verify.trainer.rank_batches import MicroBatch, digest
from sftron.verify.trainer.rank_model import whole
from sftron.verify.trainer.rank_subject import RankSubject

_TOLERANCE, _ROUNDED_TOLERANCE = 1e-3, 2**-5
"""Relative differences of gradients that are rounding, in float32 and in other types."""
_LOSS_TOLERANCE, _ROUNDED_LOSS_TOLERANCE = 1e-4, 2**-6
_MOST_NAMED, _MOST_LENGTHS = 3, 16


# -- rows ------------------------------------------------------------------------------------------------------------


def rows(subject: RankSubject) -> Finding:
    """Each row of the data is computed once in an epoch, by one rank or in parts by those that share it."""
    world_size, wrong, notes = subject.exchange.world_size, list[str](), list[str]()
    if len(set(subject.seen_batches)) > 1:
        counts = ", ".join(map(str, subject.seen_batches))
        wrong.append(f"the ranks have {counts} batches, so the longer ones wait for ever")
    wrong += _unlike_declared(subject)
    lost = sum(micro.num_lost for micro in _first_of_groups(subject))
    num_rows = sum(len(micro.whole.ids) for micro in _first_of_groups(subject))
    lost = sum(subject.exchange.gather("lost tokens", lost))
    num_rows = sum(subject.exchange.gather("the rows", num_rows))
    if lost > num_rows:  # one of each row may be the last, which predicts nothing
        wrong.append(f"{lost:,} tokens of the rows are computed by no rank")
    counted, counted_notes = _counted_rows(subject)
    wrong, notes = wrong + counted, notes + counted_notes
    measured = ", ".join(wrong) or f"{world_size} ranks: {', '.join(notes)}"
    return Finding(not wrong, measured, "each row once", (), remedies.ROWS.of(subject.trainer))


def _first_of_groups(subject: RankSubject) -> list[MicroBatch]:
    return [micro for micro in subject.seen if subject.rank in micro.first_of_groups]


def _unlike_declared(subject: RankSubject) -> list[str]:
    """Describes that ranks which are declared to share rows do not."""
    declared = subject.declared_size
    if declared == 1:
        return []
    size = max((len(micro.group_of(subject.rank)) for micro in subject.seen), default=1)
    is_split = subject.is_split
    groups = subject.exchange.gather("the groups", (size, is_split))
    found = list[str]()
    if min(size for size, _ in groups) < declared:
        found.append(f"{declared} ranks are declared to share each row, and are given different ones")
    elif not all(is_split for _, is_split in groups):
        found.append(f"{declared} ranks are declared to share each row, and each computes it whole")
    return found


def _counted_rows(subject: RankSubject) -> tuple[list[str], list[str]]:
    """Returns what is wrong with how often each row is computed, and what there is to say."""
    keys = _keys_of_rows(subject)
    expected = Counter[str]()
    data_sets = subject.exchange.gather("the data", _expected_rows(subject, keys))
    for own in {digest(sorted(own)): own for own in data_sets}.values():
        expected.update(own)
    computed = Counter[str]()
    for each in subject.exchange.gather("the computed rows", _computed_rows(subject)):
        computed.update(each)
    if not computed:
        return [], ["the rows of the batches are not known"]
    num_expected, largest = sum(expected.values()), _rows_of_all(subject)
    repeated, missing = (computed - expected).total(), (expected - computed).total()
    wrong, notes = list[str](), [f"{(computed & expected).total():,} of {num_expected:,} rows once"]
    if len({digest(sorted(own)) for own in data_sets}) > 1:
        notes.append("their data sets differ")
    if repeated and (repeated >= largest or (missing and subject.is_whole_epoch)):
        wrong.append(f"{repeated:,} rows are computed more than once")
    elif repeated:
        notes.append(f"{repeated:,} repeated at the end, where the last batches are filled")
    if missing and subject.is_whole_epoch and (missing >= largest or repeated):
        wrong.append(f"{missing:,} of {num_expected:,} rows are computed by no rank")
    elif missing:
        notes.append(f"{missing:,} left out at the end, as an incomplete batch")
    return wrong, notes


def _keys_of_rows(subject: RankSubject) -> set[str]:
    """Returns the columns that the collator is given; the data set may have more."""
    for micro in subject.seen:
        for feature in micro.whole.features:
            if isinstance(feature, Mapping):
                return set(feature)
    return set()


def _expected_rows(subject: RankSubject, keys: set[str]) -> list[str]:
    rows = [{name: each[name] for name in keys if name in each} for each in subject.rows if isinstance(each, Mapping)]
    return [digest(row) for row in rows]


def _computed_rows(subject: RankSubject) -> list[str]:
    """Returns the rows that this rank computes, those that it shares with others if it is the first of them."""
    return [key for micro in _first_of_groups(subject) for key in micro.parts[subject.rank].row_keys]


def _rows_of_all(subject: RankSubject) -> int:
    """Returns the number of rows of one accumulation of all ranks."""
    trainer = subject.trainer
    return trainer._train_batch_size * trainer.args.gradient_accumulation_steps * subject.exchange.world_size


# -- denominators, loss and gradients --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GradientDifference:
    """The gradients of a rank after the trainer's reduction, against those of the reference."""

    apart: float
    """The norm of the difference by that of the reference."""
    factor: float
    """The factor of the reference that is nearest."""
    apart_from_factor: float
    """What `apart` is from the reference times the factor."""
    worst: str
    worst_apart: float
    worst_factor: float

    def is_right(self, tolerance: float) -> bool:
        return self.worst_apart <= tolerance


def _differences(subject: RankSubject) -> list[GradientDifference]:
    """Returns those of all ranks."""
    found = vars(subject).get("_gradient_differences")
    if found is None:
        own = _difference(subject.run.gradients, subject.expected_gradients)
        found = subject.exchange.gather("the gradients", own)
        vars(subject)["_gradient_differences"] = found
    return found


def _difference(gradients: Mapping[str, Tensor | None], expected: Mapping[str, Tensor]) -> GradientDifference:
    total = math.sqrt(sum(float(each.double().square().sum()) for each in expected.values()))
    if not total:
        raise NotMeasuredError("the reference has no gradient")
    products, squares, worst = 0.0, list[tuple[float, float, float]](), ("", 0.0, 1.0)
    for name, reference in expected.items():
        own = gradients.get(name)
        own = torch.zeros_like(reference) if own is None else own
        product, norm = float((own.double() * reference).sum()), float(reference.double().norm())
        products += product
        squares.append((float(own.double().square().sum()), product, norm**2))
        # A tensor whose gradient is rounding itself is compared with all of them.
        apart = float((own.double() - reference).norm()) / max(norm, 1e-4 * total)
        if not apart <= worst[1]:
            worst = (name, apart, product / norm**2 if norm else math.inf)
    factor = products / total**2

    def apart_from(scale: float) -> float:
        square = sum(own - 2 * scale * product + scale**2 * norm for own, product, norm in squares)
        return math.sqrt(max(square, 0.0)) / total

    return GradientDifference(apart_from(1.0), factor, apart_from(factor) / max(abs(factor), 1e-12), *worst)


def _tolerance(subject: RankSubject) -> float:
    return _ROUNDED_TOLERANCE if subject.model.is_rounded else _TOLERANCE


def _are_right(subject: RankSubject) -> bool:
    return all(each.is_right(_tolerance(subject)) for each in _differences(subject))


def _named_factor(factor: float, world_size: int, declared: int) -> str:
    names = {world_size: "the number of ranks", declared: "the number of ranks that share a row"}
    for size, name in names.items():
        if size > 1 and abs(factor / size - 1) < 0.01:
            return f"{factor:.4g} times the reference: {name}"
        if size > 1 and abs(factor * size - 1) < 0.01:
            return f"{factor:.4g} of the reference: 1 by {name}"
    return f"{factor:.4g} times the reference"


def gradients(subject: RankSubject) -> Finding:
    """After the trainer's own reduction, every rank has the gradients that one process computes of all rows."""
    tolerance, world_size = _tolerance(subject), subject.exchange.world_size
    found = _differences(subject)
    worst_rank = max(range(world_size), key=lambda rank: found[rank].worst_apart)
    worst = found[worst_rank]
    detail = tuple(
        f"rank {rank}: {each.apart:.2g} apart, factor {each.factor:.4g}; worst {each.worst} "
        f"({each.worst_apart:.2g} apart, factor {each.worst_factor:.4g})"
        for rank, each in enumerate(found)
    )
    allowed = f"<= {tolerance:.0e}, relative"
    if worst.is_right(tolerance):
        measured = f"{worst.worst_apart:.1e} from one process at most, in {len(subject.names):,} tensors"
        return Finding(True, measured, allowed, detail)
    size = max(len(micro.group_of(subject.rank)) for micro in subject.computed_micro_batches)
    factors = [each.factor for each in found]
    is_constant = all(each.apart_from_factor <= tolerance for each in found)
    if not math.isfinite(worst.apart):
        measured, remedy = f"rank {worst_rank}: the gradients are not finite", remedies.NOT_FINITE
    elif is_constant and max(factors) - min(factors) <= tolerance * max(map(abs, factors)):
        measured, remedy = _named_factor(worst.factor, world_size, size), remedies.FACTOR
    elif (
        max(each.apart for each in found) - min(each.apart for each in found) > tolerance or len(_digests(subject)) > 1
    ):
        measured = f"the ranks have different gradients: {', '.join(f'{each.apart:.2g}' for each in found)} apart"
        remedy = remedies.NOT_SUMMED
    else:
        measured = f"{worst.apart:.2g} from one process; worst {worst.worst} ({worst.worst_apart:.2g})"
        remedy = remedies.OTHER_GRADIENTS
    return Finding(False, measured, allowed, detail, remedy.of(subject.trainer))


def _digests(subject: RankSubject) -> set[str]:
    """Returns the different gradients of the ranks."""
    own = [None if each is None else _content(each) for each in subject.run.gradients.values()]
    return set(subject.exchange.gather("the digests of gradients", digest(own)))


def loss(subject: RankSubject) -> Finding:
    """The mean over the ranks of what a step returns is one ratio: the loss of all trained tokens, by their number."""
    returned, reference = subject.run.returned, subject.reference
    totals = [sum(each) for each in returned]
    total, ratio = sum(totals) / len(totals), reference.loss
    tolerance = _ROUNDED_LOSS_TOLERANCE if subject.model.is_rounded else _LOSS_TOLERANCE
    allowed = f"<= {tolerance:.0e}, relative"
    detail = (
        f"the ranks return {', '.join(f'{each:.6g}' for each in totals)}; the ratio is {ratio:.6g}",
        f"{reference.num_labels:,} labels of {len(returned[0])} micro-batches on {len(returned)} ranks",
    )
    if not math.isfinite(total + ratio):
        measured = f"the ranks return {', '.join(f'{each:.4g}' for each in totals)}"
        return Finding(False, measured, "finite", detail, remedies.NOT_FINITE.of(subject.trainer))
    apart = abs(total - ratio) / ratio
    if apart <= tolerance:
        return Finding(True, f"{apart:.1e} from the ratio of {reference.num_labels:,} labels", allowed, detail)
    if _are_right(subject):
        measured = f"the gradients are right; what is returned, and logged, is {apart:.2g} from the ratio"
        return Finding(True, measured, allowed, detail)
    return Finding(False, f"{apart:.2g} from the ratio", allowed, detail, remedies.MEAN_OF_RANKS.of(subject.trainer))


def denominators(subject: RankSubject) -> Finding:
    """The loss is divided on every rank by the number of labels of all ranks."""
    own = subject.step.num_items
    counts = subject.exchange.gather("the denominators", None if own is None else float(own))
    num_own = sum(batch.num_trained for batch in subject.step.batches)
    labels = subject.exchange.gather("the labels", num_own)
    expected, world_size = subject.reference.num_labels, subject.exchange.world_size
    given = [count for count in counts if count is not None]
    if not given:
        raise NotMeasuredError("the trainer counts nothing; see gradients")
    shown = ", ".join("none" if count is None else f"{count:,.10g}" for count in counts)
    detail = (f"num_items_in_batch by rank: {shown}; labels of each rank: {', '.join(map(str, labels))}",)
    if set(counts) == {float(expected)}:
        return Finding(True, f"{expected:,} on each of {world_size} ranks", f"{expected:,}", detail)
    if _are_right(subject):
        measured = f"num_items_in_batch is {shown}; the gradients show that another number divides"
        return Finding(True, measured, f"{expected:,}", detail)
    kind = ""
    if set(counts) == {float(expected * world_size)}:
        kind = ": the labels times the number of ranks"
    elif given == [float(count) for count in labels]:
        kind = ": each rank counts its own labels"
    elif len(set(counts)) == 1 and 0 < expected - given[0] * round(expected / given[0]) < round(expected / given[0]):
        kind = ": a quotient that is rounded down"
    measured = f"num_items_in_batch is {shown}{kind}"
    return Finding(False, measured, f"{expected:,}", detail, remedies.DENOMINATOR.of(subject.trainer))


# -- parts of rows ---------------------------------------------------------------------------------------------------


def _require_parts(subject: RankSubject) -> None:
    if not any(subject.exchange.gather("the parts of rows", subject.is_split)):
        raise NotMeasuredError("each rank computes whole rows")


def rotations(subject: RankSubject) -> Finding:
    """Each part of a row has the positions and the rotations that its tokens have in the whole row."""
    _require_parts(subject)
    chosen = subject.exchange.gather("the lengths of rows", _of_all_lengths(subject))[0]
    wrong, largest, num_compared = Counter[str](), 0.0, 0
    for micro in [subject.seen[number] for number in chosen]:
        own, expected = subject.rotations(micro)
        if not own or not expected:
            own, expected = _positions(micro)
        worst, compared = _apart(own, expected, micro.index)
        num_compared += compared
        largest = max(largest, worst)
        if worst > _allowed_rotation(subject):
            wrong[f"row of {micro.whole.ids.shape[1]:,} tokens"] += 1
    found = subject.exchange.gather("the rotations", (largest, num_compared, dict(wrong)))
    apart, allowed = [each for each, *_ in found], _allowed_rotation(subject)
    if not any(compared for _, compared, _ in found):
        raise NotMeasuredError("the model shows neither rotations nor positions")
    detail = tuple(f"rank {rank}: {largest:.2g} apart {names or ''}" for rank, (largest, _, names) in enumerate(found))
    if max(apart) <= allowed:
        longest = max(subject.exchange.gather("the longest row", [each.whole.ids.shape[1] for each in subject.seen]))
        measured = f"rows of up to {max(longest):,} tokens: rotations {max(apart):.1g} from those of whole rows"
        return Finding(True, measured, f"<= {allowed:.0e}", detail)
    ranks = [str(rank) for rank, each in enumerate(apart) if each > allowed]
    measured = f"rank {', '.join(ranks)}: rotations {max(apart):.2g} from those of the whole row"
    return Finding(False, measured, f"<= {allowed:.0e}", detail, remedies.ROTATIONS.of(subject.trainer))


def _of_all_lengths(subject: RankSubject) -> list[int]:
    """Returns the numbers of a few batches from the shortest rows to the longest, as some rotations depend on both."""
    order = np.argsort([micro.whole.ids.shape[1] for micro in subject.seen], kind="stable")
    chosen = np.unique(np.linspace(0, len(order) - 1, _MOST_LENGTHS).round().astype(int))
    return [int(order[n]) for n in chosen]


def _allowed_rotation(subject: RankSubject) -> float:
    return 2**-6 if subject.model.is_rounded else 1e-3


def _positions(micro: MicroBatch) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the positions of a part and of the whole rows, each [1, T, 1], for a model without rotations."""
    shape = micro.index.shape[:2]
    passed = micro.whole.positions
    at = np.maximum(micro.index, 0)
    own = passed[at[..., 0], at[..., 1]] if passed is not None else np.broadcast_to(np.arange(shape[1]), shape)
    expected = np.broadcast_to(np.arange(micro.whole.ids.shape[1]), micro.whole.ids.shape)
    return [own[..., None].astype(float)], [(expected if passed is None else passed)[..., None].astype(float)]


def _apart(own: Sequence[np.ndarray], expected: Sequence[np.ndarray], index: np.ndarray) -> tuple[float, int]:
    """Returns the largest difference of a part's rotations from those of the whole rows, and how many there are."""
    worst, compared = 0.0, 0
    for part, rows in zip(own, expected, strict=False):
        if part.shape[1] == rows.shape[1]:  # of the whole row, on each rank
            worst, compared = max(worst, float(np.abs(part - rows).max())), compared + part.shape[1]
        elif part.shape[1] == index.shape[1]:
            has_place = index[..., 0] >= 0
            at = index[has_place]
            part = np.broadcast_to(part, (len(index), *part.shape[1:]))[has_place]
            rows = np.broadcast_to(rows, (int(at[:, 0].max(initial=0)) + 1, *rows.shape[1:]))[at[:, 0], at[:, 1]]
            worst, compared = max(worst, float(np.abs(part - rows).max(initial=0.0))), compared + len(at)
    return worst, compared


def borders(subject: RankSubject) -> Finding:
    """Each label of a row is trained by the token before it, also where a part of the row ends.

    For this every token has a label.
    """
    _require_parts(subject)
    micro = max(subject.computed_micro_batches, key=lambda each: each.whole.ids.size)
    labels, places = subject.labelled_everywhere(micro)
    by_rank = subject.exchange.gather("the trained tokens", (micro.index, places, labels))
    lost = extra = total = 0
    for first in micro.first_of_groups:
        labels = by_rank[first][2]
        is_trained, expected = np.zeros(labels.shape, dtype=bool), np.zeros(labels.shape, dtype=bool)
        expected[:, :-1] = labels[:, 1:] != IGNORE_INDEX
        for rank in micro.group_of(first) if micro.is_split(first) else [first]:
            index, found, _ = by_rank[rank]
            if found is None or found.shape != index.shape[:2]:
                raise NotMeasuredError("the model's decoder is not found, so which tokens are trained is not known")
            at = index[(index[..., 0] >= 0) & found]
            is_trained[at[:, 0], at[:, 1]] = True
        lost, extra = lost + int((expected & ~is_trained).sum()), extra + int((is_trained & ~expected).sum())
        total += int(expected.sum())
    if not lost and not extra:
        return Finding(True, f"{total:,} labels are trained by the tokens before them", "all")
    measured = f"{lost:,} of {total:,} labels are not trained, and {extra:,} tokens without one are"
    return Finding(False, measured, "all", (), remedies.BORDERS.of(subject.trainer))


def across_ranks(subject: RankSubject) -> Finding:
    """No conversation sees another, neither on its own rank nor on another, and no token those after it."""
    micro_batches, world_size = subject.computed_micro_batches, subject.exchange.world_size
    numbers = subject.exchange.gather("the documents", [len(_documents(subject, micro)) for micro in micro_batches])
    before = subject.hidden_on_ranks([micro.whole.ids for micro in micro_batches])
    apart, own, size = 0.0, 0.0, max(float(each.abs().max()) for each in before)
    for kind in ("odd", "even", "second halves"):
        changes = list[_Change]()
        for n, micro in enumerate(micro_batches):
            first = micro.group_of(subject.rank)[0] if micro.is_split(subject.rank) else subject.rank
            earlier = sum(numbers[rank][n] for rank in micro.first_of_groups if rank < first)
            changes.append(_change_of(micro, _documents(subject, micro), earlier, kind))
        after = subject.hidden_on_ranks([each.ids for each in changes])
        for micro, change, one, two in zip(micro_batches, changes, before, after, strict=True):
            if one.shape[1] != micro.index.shape[1]:
                raise NotMeasuredError("the model's decoder is not found, and its logits are those of some tokens")
            difference, at = (one - two).abs().amax(dim=-1).cpu().numpy(), np.maximum(micro.index, 0)
            has_place, at = micro.index[..., 0] >= 0, (at[..., 0], at[..., 1])
            apart = max(apart, float(difference[change.is_kept[at] & has_place].max(initial=0.0)))
            own = max(own, float(difference[change.is_changed[at] & has_place].max(initial=0.0)))
    found = subject.exchange.gather("the changes", (apart, own, size))
    worst, own, size = (max(each[n] for each in found) for n in range(3))
    if not own or sum(sum(each) for each in numbers) < 2:
        raise NotMeasuredError("there are no two conversations in a step, or the outputs do not depend on the tokens")
    allowed = size * (2**-7 if subject.model.is_rounded else 1e-5)
    detail = (f"a changed conversation itself changes by {own:.2g}",)
    wrong = [rank for rank, each in enumerate(found) if each[0] > allowed]
    measured = f"conversations on {world_size} ranks: others change by {worst:.2g}"
    if wrong:
        measured = f"rank {', '.join(map(str, wrong))}: {measured}"
    return Finding(not wrong, measured, f"<= {allowed:.0e}", detail, remedies.ACROSS.of(subject.trainer))


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """Whole rows in which some conversations are other text."""

    ids: np.ndarray
    is_changed: np.ndarray
    """bool [B, T]"""
    is_kept: np.ndarray
    """bool [B, T]: conversations that are not changed, and what is in front of a change; no padding."""


def _change_of(micro: MicroBatch, documents: Sequence[tuple[int, slice]], earlier: int, kind: str) -> _Change:
    """Changes the odd or even conversations, or the second halves of all; `earlier` ones are on other ranks."""
    ids = micro.whole.ids
    is_changed, is_kept = np.zeros(ids.shape, dtype=bool), np.zeros(ids.shape, dtype=bool)
    for number, (row, columns) in enumerate(documents, earlier):
        begin = columns.start if number % 2 == (kind == "odd") else columns.stop
        begin = (columns.start + columns.stop) // 2 if kind == "second halves" else begin
        is_kept[row, columns.start : begin] = True
        is_changed[row, begin : columns.stop] = True
    known = np.unique(ids)
    other = known[(np.searchsorted(known, ids) + 1) % len(known)]
    return _Change(np.where(is_changed, other, ids), is_changed, is_kept)


def _documents(subject: RankSubject, micro: MicroBatch) -> list[tuple[int, slice]]:
    found = vars(subject).setdefault("_documents_of_micro", {})
    if id(micro) not in found:
        documents = subject.training.documents_of([micro.whole])
        found[id(micro)] = [each.index for each in documents if len(each) > 1]
    return found[id(micro)]


# -- replicas --------------------------------------------------------------------------------------------------------


def _content(tensor: Tensor) -> bytes:
    return (
        whole(tensor).contiguous().view(torch.uint8).numpy().tobytes() if tensor.ndim else bytes(str(tensor), "ascii")
    )


def replicas(subject: RankSubject) -> Finding:
    """What every rank holds is the same on all of them, before the first step and after it."""
    before = _differing(subject, "before", _tensors(subject))
    _ = subject.run
    optimizer: Any = subject.wrapped.optimizer
    for group in optimizer.param_groups:  # a warm-up begins with a rate of 0
        group["lr"] = group.get("initial_lr", group["lr"])
    optimizer.step()
    after = _differing(subject, "after", _tensors(subject))
    num_tensors = len(_tensors(subject))
    if not before and not after:
        measured = f"{num_tensors:,} tensors are equal on {subject.exchange.world_size} ranks, also after a step"
        return Finding(True, measured, "equal")
    words = "before the first step" if before else "after the first step"
    names = before or after
    measured = f"{len(names):,} of {num_tensors:,} tensors differ between the ranks {words}"
    remedy = remedies.NOT_ALIKE if before else remedies.DRIFT
    return Finding(False, measured, "equal", (", ".join(names[:_MOST_NAMED]),), remedy.of(subject.trainer))


def _tensors(subject: RankSubject) -> dict[str, Tensor]:
    return dict(subject.wrapped.named)


def _differing(subject: RankSubject, name: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the tensors that are not the same on all ranks."""
    own = {key: digest(_content(each)) for key, each in tensors.items()}
    found = subject.exchange.gather(f"the tensors {name} a step", own)
    return [key for key in own if len({each.get(key) for each in found}) > 1]


# -- joined ----------------------------------------------------------------------------------------------------------


def on_first_rank(measure: Callable[[Any], Finding]) -> Callable[[RankSubject], Finding]:
    """Returns a check that rank 0 makes alone, as it alone saves."""

    def check(subject: RankSubject) -> Finding:
        return subject.exchange.of_first("the finding of rank 0", lambda: measure(subject))

    check.__doc__ = measure.__doc__
    return check


def joined(findings: Sequence[Finding]) -> Finding:
    """Returns one finding of those of all ranks: it fails if one of them does, and says which."""
    if len({(each.passed, each.measured) for each in findings}) == 1:
        return findings[0]
    failed = [rank for rank, each in enumerate(findings) if each.passed is False]
    raised = [rank for rank, each in enumerate(findings) if each.raised]
    measured = [rank for rank, each in enumerate(findings) if each.passed is not None]
    shown = (failed or raised or measured or [0])[0]
    first, names = findings[shown], ", ".join(map(str, failed or raised))
    words = f"rank {names}: {first.measured}" if names else f"{first.measured} (rank {shown}; the others pass too)"
    detail = tuple(f"rank {shown}: {line}" for line in first.detail if line)
    return Finding(first.passed, words, first.allowed, detail, first.remedy, first.raised)
