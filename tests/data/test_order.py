"""An epoch's order is a permutation, another one each epoch, computed at any position."""

import itertools

import numpy as np
import pytest

from sftron.data.lanes.order import ShuffledOrder, rows_at


def epoch_of(num_rows: int, epoch: int, **options: int) -> list[int]:
    """The rows in the order of one epoch."""
    rows, epochs = rows_at(np.arange(epoch * num_rows, (epoch + 1) * num_rows), num_rows, **options)
    assert set(epochs.tolist()) == {epoch}
    return rows.tolist()


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 64, 199, 1000, 4097])
def test_every_epoch_deals_every_row_exactly_once(num_rows: int) -> None:
    for epoch in range(3):
        assert sorted(epoch_of(num_rows, epoch, seed=42)) == list(range(num_rows))


def test_epochs_seeds_and_data_sets_have_orders_of_their_own() -> None:
    numbers = range(5)
    orders = {
        tuple(epoch_of(500, epoch, seed=seed, place=place))
        for seed in numbers
        for epoch in numbers
        for place in numbers
    }

    assert len(orders) == 125
    assert tuple(range(500)) not in orders


def test_the_order_looks_like_a_shuffle() -> None:
    """Displacements average a third of the length, and neighbours are not kept together, as in a random permutation."""
    num_rows = 10_000
    order = epoch_of(num_rows, 0, seed=1)

    displacement = sum(abs(row - p) for p, row in enumerate(order)) / num_rows
    assert 0.31 < displacement / num_rows < 0.36
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(order)) < 10


def test_any_position_of_a_huge_set_is_at_hand() -> None:
    (row,), (epoch,) = rows_at(np.array([39_999_999_999]), 10_000_000_000, seed=1)

    assert 0 <= row < 10_000_000_000
    assert epoch == 3


def test_a_position_has_the_same_row_however_it_is_asked_for() -> None:
    rows, epochs = rows_at(np.arange(5000), 37, seed=3, place=2)
    expected = list(zip(rows.tolist(), epochs.tolist(), strict=True))
    for stride in (1, 5, 48):
        order = ShuffledOrder(37, seed=3, place=2, stride=stride)
        dealt = [order.rows(range(lane, 5000, stride)) for lane in range(stride)]
        assert [dealt[position % stride][position // stride] for position in range(5000)] == expected
        assert order.rows([4999, 0, 700]) == [expected[4999], expected[0], expected[700]]
