"""Which rows of the data each rank of a trainer computes.

Each of them is a collective; on_ranks.py says what a pass proves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from sftcheck.faults import Fault
from sftcheck.ranks.rank_batches import MicroBatch, digest
from sftcheck.ranks.rank_subject import RankSubject
from sftron.checks.report import Finding


def rows(subject: RankSubject) -> Finding:
    world_size, unequal, wrong = subject.exchange.world_size, list[str](), _unlike_declared(subject)
    if len(set(subject.seen_batches)) > 1:
        counts = " and ".join(map(str, subject.seen_batches))
        unequal.append(f"the ranks have {counts} batches; training would hang")
    lost = sum(micro.num_lost for micro in _first_of_groups(subject))
    num_rows = sum(len(micro.whole.ids) for micro in _first_of_groups(subject))
    lost = sum(subject.exchange.gather("lost tokens", lost))
    num_rows = sum(subject.exchange.gather("the rows", num_rows))
    if lost > num_rows:  # one of each row may be the last, which predicts nothing
        wrong.append(f"no rank computes {lost:,} of the tokens in these rows")
    counted, notes = _counted_rows(subject)
    wrong += counted
    faults = {Fault.BATCHES_UNEQUAL: unequal, Fault.ROWS_REPEATED: wrong}
    measured = ", ".join([*unequal, *wrong]) or f"{world_size} ranks: {', '.join(notes)}"
    found = tuple(fault for fault, each in faults.items() if each)
    return Finding(not found, measured, "each row once", (), found)


def _first_of_groups(subject: RankSubject) -> list[MicroBatch]:
    return [micro for micro in subject.seen if subject.rank in micro.first_of_groups]


def _unlike_declared(subject: RankSubject) -> list[str]:
    """Describes how ranks fail to share the rows that they are declared to share."""
    declared = subject.declared_size
    if declared == 1:
        return []
    size = max((len(micro.group_of(subject.rank)) for micro in subject.seen), default=1)
    is_split = subject.is_split
    groups = subject.exchange.gather("the groups", (size, is_split))
    found = list[str]()
    if min(size for size, _ in groups) < declared:
        found.append(f"the trainer declares that {declared} ranks share the same rows, but gives them different rows")
    elif not all(is_split for _, is_split in groups):
        found.append(f"the trainer declares that {declared} ranks share the same rows, but each computes whole rows")
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
    """Returns the rows that this rank computes; a shared row counts for its first rank."""
    return [key for micro in _first_of_groups(subject) for key in micro.parts[subject.rank].row_keys]


def _rows_of_all(subject: RankSubject) -> int:
    """Returns the number of rows of one accumulation of all ranks."""
    trainer = subject.trainer
    return trainer._train_batch_size * trainer.args.gradient_accumulation_steps * subject.exchange.world_size
