"""What is held out is never trained on, and is the same whatever else changes."""

import inspect
import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sftron.data.sources.views import split_source, take_rows
from sftron.data.types import DataError
from tests.data.files import all_rows, numbered
from tests.data.streams import Rows


def held_and_trained(num_rows: int, share: float) -> tuple[list[int], list[int]]:
    training, held = split_source(Rows(numbered(num_rows)), share)
    return [row["n"] for row in all_rows(held)] if held else [], [row["n"] for row in all_rows(training)]


@given(num_rows=st.integers(2, 300), share=st.floats(0, 0.99))
@example(num_rows=2, share=0.5)
@example(num_rows=2, share=0.9)
@example(num_rows=3, share=0.66)
@example(num_rows=7473, share=0.01)
def test_every_row_is_either_held_out_or_trained_in_its_order(num_rows: int, share: float) -> None:
    num_held = max(round(share * num_rows), 1 if share else 0)
    if num_held == num_rows:
        with pytest.raises(DataError, match=rf"evaluation.share {share} of {num_rows} rows leaves no row to train on"):
            held_and_trained(num_rows, share)
        return
    held, trained = held_and_trained(num_rows, share)
    assert len(held) == num_held
    assert (held, trained) == (sorted(set(held)), sorted(set(range(num_rows)) - set(held)))


@given(num_rows=st.integers(50, 300), num_parts=st.integers(2, 20))
def test_held_out_rows_are_spread_evenly_and_irregularly(num_rows: int, num_parts: int) -> None:
    held, _ = held_and_trained(num_rows, num_parts / num_rows)
    spans = [range(k * num_rows // num_parts, (k + 1) * num_rows // num_parts) for k in range(num_parts)]
    assert all(row in span for row, span in zip(held, spans, strict=True))
    many, _ = held_and_trained(1000, 0.1)
    assert len({row % 10 for row in many}) > 5


def test_what_is_held_out_depends_on_the_number_of_rows_and_the_share_alone() -> None:
    """So ablations over seeds and over mixtures are evaluated on the same rows, always."""
    assert list(inspect.signature(split_source).parameters) == ["source", "share"]
    assert held_and_trained(200, 0.05)[0] == [4, 36, 52, 73, 89, 113, 132, 151, 167, 180]
    for num_rows, share in [(1, 0.5), (10, 0.0)]:
        source = Rows(numbered(num_rows))
        assert split_source(source, share) == (source, None)


def test_the_sources_have_the_rows_locations_and_fingerprints_of_their_own() -> None:
    source = Rows(numbered(10))
    training, held = split_source(source, 0.2)
    assert held is not None
    for part in (training, held):
        locations = [part.locate(index) for index in range(len(part))]
        assert locations == [f"rows.jsonl:{row['n'] + 1}" for row in all_rows(part)]
        for outside in (-1, len(part)):
            with pytest.raises(IndexError):
                part[outside]
    others = [part for share in (0.2, 0.21) for part in split_source(source, share) if part]
    assert len({part.fingerprint for part in [source, *others]}) == 5
    assert training.name == source.name != held.name


def test_a_part_of_a_part_is_that_part_and_works_after_pickling() -> None:
    source = take_rows(take_rows(Rows(numbered(100)), range(50, 100), "half"), range(10), "some")
    parts = pickle.loads(pickle.dumps(split_source(source, 0.3)))
    assert sorted(row["n"] for part in parts for row in all_rows(part)) == list(range(50, 60))
    assert len(parts[0]) == 7
