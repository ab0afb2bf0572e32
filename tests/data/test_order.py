"""An epoch's order is a permutation, another one each epoch, computed at any position; a stream's is one by windows."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftron.data.lanes.order import SHUFFLE_WINDOW, ShuffledOrder, StreamOrder
from sftron.data.sources import RawRow, StreamedSource
from sftron.data.types import Row


def epoch_of(num_rows: int, epoch: int, **options: Any) -> list[int]:
    """Returns the rows in the order of one epoch."""
    rows, epochs = ShuffledOrder(num_rows, **options).compute(np.arange(epoch * num_rows, (epoch + 1) * num_rows))
    assert set(epochs.tolist()) == {epoch}
    return rows.tolist()


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 64, 199, 1000, 4097])
def test_every_epoch_has_every_row_exactly_once(num_rows: int) -> None:
    for epoch in range(3):
        assert sorted(epoch_of(num_rows, epoch, seed=42)) == list(range(num_rows))


def test_epochs_seeds_and_data_sets_have_orders_of_their_own() -> None:
    options = itertools.product(range(5), range(5), range(5))
    orders = {tuple(epoch_of(500, epoch, seed=seed, dataset=dataset)) for epoch, seed, dataset in options}
    assert len(orders) == 125
    assert tuple(range(500)) not in orders


def test_the_order_looks_like_a_shuffle() -> None:
    """Displacements average a third of the length, and neighbors are not kept together, as in a random permutation."""
    num_rows = 10_000
    order = epoch_of(num_rows, 0, seed=1)
    displacement = sum(abs(row - position) for position, row in enumerate(order)) / num_rows
    assert 0.31 < displacement / num_rows < 0.36
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(order)) < 10


def test_a_position_has_the_same_row_however_it_is_reached_also_in_a_huge_set() -> None:
    rows, epochs = ShuffledOrder(37, seed=3, dataset=2).compute(np.arange(5000))
    expected = list(zip(rows.tolist(), epochs.tolist(), strict=True))
    for stride in (1, 5, 48):
        order = ShuffledOrder(37, seed=3, dataset=2, stride=stride)
        found = [order.rows(range(lane, 5000, stride)) for lane in range(stride)]
        assert [found[position % stride][position // stride] for position in range(5000)] == expected
        assert order.rows([4999, 0, 700]) == [expected[4999], expected[0], expected[700]]
    ((row, epoch),) = ShuffledOrder(10_000_000_000, seed=1).rows([39_999_999_999])
    assert (0 <= row < 10_000_000_000, epoch) == (True, 3)


def test_the_order_of_an_indexed_set_is_that_of_every_other_version() -> None:
    """A run that an earlier version began goes on with the rows that it has not read yet."""
    assert epoch_of(16, 0, seed=1) == [10, 13, 3, 7, 4, 9, 2, 5, 0, 6, 1, 15, 12, 14, 11, 8]
    assert epoch_of(16, 1, seed=1, dataset=2) == [3, 4, 1, 9, 6, 11, 2, 12, 10, 8, 15, 0, 7, 14, 13, 5]


# --- Streams ---


class ForwardRows:
    """A RowStream over rows in memory that counts what is read; it declares its number of rows or not."""

    name, fingerprint = "rows", "0"

    def __init__(self, rows: list[Row], *, declares: bool = False) -> None:
        self.rows, self.num_rows, self.num_read = rows, len(rows) if declares else None, 0

    def read(self, start: int) -> Iterator[Any]:
        for index in range(start, len(self.rows)):
            self.num_read += 1
            yield RawRow(f"rows:{index}", lambda row=self.rows[index]: row)


def order_of(
    num_rows: int, *, lanes: list[int], num_lanes: int, start: int = 0, declares: bool = False, **options: Any
) -> tuple[StreamOrder, StreamedSource]:
    source = StreamedSource(ForwardRows([{"n": n} for n in range(num_rows)], declares=declares))
    keywords = {"seed": 1, "dataset": 0, "window": 10} | options
    return StreamOrder(source, num_lanes=num_lanes, lanes=lanes, start=start, **keywords), source


def streamed(num_rows: int, number: int, **options: Any) -> list[tuple[int, int]]:
    """Returns (row, epoch) at the first positions, as a single lane gets them."""
    return order_of(num_rows, lanes=[0], num_lanes=1, **options)[0].rows(range(number))


@given(num_rows=st.integers(1, 60), window=st.integers(1, 25), declares=st.booleans())
def test_each_epoch_of_a_stream_has_each_row_once_in_its_own_window(num_rows: int, window: int, declares: bool) -> None:
    found = streamed(num_rows, 3 * num_rows, window=window, declares=declares)
    for epoch in range(3):
        rows = [row for row, e in found[epoch * num_rows : (epoch + 1) * num_rows] if e == epoch]
        assert sorted(rows) == list(range(num_rows))
        assert [row // window for row in rows] == [position // window for position in range(num_rows)]


def test_windows_epochs_seeds_and_data_sets_are_shuffled_differently_and_always_alike() -> None:
    def windows(**options: Any) -> set[tuple[int, ...]]:
        rows = [row % 10 for row, _ in streamed(20, 40, **options)]
        return {tuple(rows[start : start + 10]) for start in range(0, 40, 10)}

    every = [windows(seed=seed, dataset=dataset) for seed in (1, 11) for dataset in (0, 1)]
    assert len(set.union(*every)) == 16
    assert [row for row, _ in streamed(20, 10)] == [7, 4, 3, 0, 1, 8, 9, 2, 6, 5]


@given(
    num_rows=st.integers(1, 45),
    num_lanes=st.integers(1, 5),
    advances=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=25),
    declares=st.booleans(),
)
def test_lanes_at_any_pace_get_the_rows_of_their_positions(
    num_rows: int, num_lanes: int, advances: list[tuple[int, int]], declares: bool
) -> None:
    """Each row is at hand, though it was read long before, or lies after others' rows."""
    expected = streamed(num_rows, 600)
    order, source = order_of(num_rows, lanes=list(range(num_lanes)), num_lanes=num_lanes, declares=declares)
    numbers = [0] * num_lanes
    for lane, count in advances:
        lane %= num_lanes
        positions = [lane + num_lanes * (numbers[lane] + n) for n in range(count)]
        numbers[lane] += count
        found = order.rows(positions)
        assert found == [expected[position] for position in positions]
        assert [source[row] for row, _ in found] == [{"n": row} for row, _ in found]
        assert source.locate(found[0][0]) == f"rows:{found[0][0]}"


@given(num_rows=st.integers(1, 45), start=st.integers(0, 150), declares=st.booleans(), skipped=st.integers(0, 3))
def test_a_stream_that_begins_anywhere_goes_on_as_it_would_have(
    num_rows: int, start: int, declares: bool, skipped: int
) -> None:
    expected = streamed(num_rows, 250)
    order, source = order_of(num_rows, lanes=[start % 3], num_lanes=3, start=start, declares=declares)
    positions = list(range(start, 240, 3))[skipped:]
    assert [order.rows([position])[0] for position in positions] == [expected[position] for position in positions]
    assert source[expected[positions[-1]][0]] == {"n": expected[positions[-1]][0]}


def test_the_window_is_that_of_the_documentation() -> None:
    order = order_of(10_001, lanes=[0], num_lanes=1, window=SHUFFLE_WINDOW)[0]
    assert {row for row, _ in order.rows(range(10_000))} == set(range(10_000))
    assert order.rows([10_000]) == [(10_000, 0)]


def test_rows_before_the_window_are_not_read_again_where_their_number_is_known() -> None:
    order, source = order_of(1000, lanes=[0], num_lanes=1, start=1000 + 508, declares=True)
    order.rows([1508])
    assert source._stream.num_read == 10  # pyright: ignore[reportAttributeAccessIssue]
