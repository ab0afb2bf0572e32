"""Which token of the whole rows each token of a batch is, as in the picture of row_map.py."""

import numpy as np

from sftcheck.ranks.row_map import RowMap

LAYOUT = np.array([(0, column) for column in range(7)])
OWN = np.array([[0, 1, 4, 5, -1]])
OTHER = np.array([[2, 3]])


def test_a_batch_reads_the_whole_row_at_its_places_and_another_value_where_it_has_none() -> None:
    rows = 10 + np.arange(7)[None]
    assert RowMap.of_numbers(OWN, LAYOUT).read(rows, outside=-1).tolist() == [[10, 11, 14, 15, -1]]
    assert RowMap.of_numbers(OWN, LAYOUT).read(rows[..., None] * [1, 2])[0, 2].tolist() == [14, 28]


def test_two_batches_write_their_values_where_their_tokens_are_and_leave_the_rest() -> None:
    rows = np.zeros((1, 7), dtype=int)
    assert RowMap.of_numbers(OWN, LAYOUT).write(rows, np.array([[1, 2, 5, 6, 99]])) == 4
    assert RowMap.of_numbers(OTHER, LAYOUT).write(rows, np.array([[3, 4]])) == 2
    assert rows.tolist() == [[1, 2, 3, 4, 5, 6, 0]]


def test_a_batch_that_is_the_whole_rows_has_each_token_at_its_own_place() -> None:
    rows = np.arange(6).reshape(2, 3)
    row_map = RowMap.of_whole(rows.shape)
    assert row_map.shape == (2, 3)
    assert row_map.has_place.all()
    assert np.array_equal(row_map.read(rows), rows)
