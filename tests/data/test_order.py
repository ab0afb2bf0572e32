"""An epoch's order is a permutation, another one each epoch, computed at any position."""

import itertools

import pytest

from sftron.data.order import row_at


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 64, 199, 1000, 4097])
def test_every_epoch_deals_every_row_exactly_once(num_rows: int) -> None:
    for epoch in range(3):
        assert sorted(row_at(p, num_rows, seed=42, epoch=epoch) for p in range(num_rows)) == list(range(num_rows))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(row_at(p, 500, seed=seed, epoch=epoch) for p in range(500)) for seed in range(5) for epoch in range(5)
    }

    assert len(orders) == 25
    assert tuple(range(500)) not in orders


def test_the_order_looks_like_a_shuffle() -> None:
    """Displacements average a third of the length, and neighbours are not kept together, as in a random permutation."""
    num_rows = 10_000
    order = [row_at(p, num_rows, seed=1, epoch=0) for p in range(num_rows)]

    displacement = sum(abs(row - p) for p, row in enumerate(order)) / num_rows
    assert 0.31 < displacement / num_rows < 0.36
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(order)) < 10


def test_any_position_of_a_huge_set_is_at_hand() -> None:
    assert 0 <= row_at(9_999_999_999, 10_000_000_000, seed=1, epoch=3) < 10_000_000_000
