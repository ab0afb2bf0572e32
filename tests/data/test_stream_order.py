"""A streamed data set is dealt like any other: each row once an epoch, in any layout, across any stop, forward only."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.formats.detect import RowFormat
from sftron.data.lanes.stream_order import StreamOrder
from sftron.data.prepare import DataSet
from sftron.data.sources import StreamedSource, open_stream
from sftron.data.types import DataError, Dropped, Pack, Row
from tests.data.files import write_rows
from tests.data.streams import (
    Rows,
    as_dataset,
    as_json,
    chat,
    facts,
    keys,
    make_mixture,
    mixed_rows,
    pretend_worker,
    take,
)


class ForwardRows:
    """A RowStream over rows in memory that counts what is read; its number of rows is told or not."""

    name, fingerprint = "rows", "0"

    def __init__(self, rows: list[Row], *, tells: bool = False) -> None:
        self.rows, self.num_rows, self.num_read = rows, len(rows) if tells else None, 0

    def read(self, start: int) -> Iterator[Any]:
        for index in range(start, len(self.rows)):
            self.num_read += 1
            yield ForwardRow(f"rows:{index}", self.rows[index])


class ForwardRow:
    def __init__(self, location: str, row: Row) -> None:
        self.location, self._row = location, row

    def read(self) -> Row:
        return self._row


def order_of(
    num_rows: int, *, lanes: list[int], num_lanes: int, start: int = 0, tells: bool = False, **options: Any
) -> tuple[StreamOrder, StreamedSource]:
    source = StreamedSource(ForwardRows([{"n": n} for n in range(num_rows)], tells=tells))
    keyed = {"seed": 1, "place": 0, "window": 10} | options
    return StreamOrder(source, num_lanes=num_lanes, lanes=lanes, start=start, **keyed), source


def dealt(num_rows: int, number: int, **options: Any) -> list[tuple[int, int]]:
    """(row, epoch) at the first positions, asked for by a single lane."""
    order, _ = order_of(num_rows, lanes=[0], num_lanes=1, **options)
    return order.rows(range(number))


@given(num_rows=st.integers(1, 60), window=st.integers(1, 25), tells=st.booleans())
def test_each_epoch_has_each_row_once_in_its_own_window(num_rows: int, window: int, tells: bool) -> None:
    found = dealt(num_rows, 3 * num_rows, window=window, tells=tells)

    for epoch in range(3):
        rows = [row for row, e in found[epoch * num_rows : (epoch + 1) * num_rows] if e == epoch]
        assert sorted(rows) == list(range(num_rows))
        assert [row // window for row in rows] == [place // window for place in range(num_rows)]


def test_windows_epochs_seeds_and_data_sets_are_shuffled_differently_and_for_ever_alike() -> None:
    def windows(**options: int) -> set[tuple[int, ...]]:
        rows = [row % 10 for row, _ in dealt(20, 40, **options)]
        return {tuple(rows[start : start + 10]) for start in range(0, 40, 10)}

    every = [windows(seed=seed, place=place) for seed in (1, 11) for place in (0, 1)]
    assert len(set.union(*every)) == 16
    assert [row for row, _ in dealt(20, 10)] == [7, 4, 3, 0, 1, 8, 9, 2, 6, 5]


@given(
    num_rows=st.integers(1, 45),
    num_lanes=st.integers(1, 5),
    advances=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=25),
    tells=st.booleans(),
)
def test_lanes_that_go_at_any_pace_get_the_rows_of_their_positions(
    num_rows: int, num_lanes: int, advances: list[tuple[int, int]], tells: bool
) -> None:
    """And each is at hand, though it was read long before, or lies behind others' rows."""
    expected = dealt(num_rows, 600)
    order, source = order_of(num_rows, lanes=list(range(num_lanes)), num_lanes=num_lanes, tells=tells)
    numbers = [0] * num_lanes
    for lane, count in advances:
        lane %= num_lanes
        positions = [lane + num_lanes * (numbers[lane] + n) for n in range(count)]
        numbers[lane] += count
        found = order.rows(positions)
        assert found == [expected[position] for position in positions]
        assert [source[row] for row, _ in found] == [{"n": row} for row, _ in found]
        assert source.locate(found[0][0]) == f"rows:{found[0][0]}"


@given(num_rows=st.integers(1, 45), start=st.integers(0, 150), tells=st.booleans(), skipped=st.integers(0, 3))
def test_begun_anywhere_it_goes_on_as_it_would_have(num_rows: int, start: int, tells: bool, skipped: int) -> None:
    expected = dealt(num_rows, 250)
    order, source = order_of(num_rows, lanes=[start % 3], num_lanes=3, start=start, tells=tells)
    positions = list(range(start, 240, 3))[skipped:]

    assert [order.rows([position])[0] for position in positions] == [expected[position] for position in positions]
    assert source.row(expected[positions[-1]][0]) == {"n": expected[positions[-1]][0]}


def test_what_lies_before_the_window_is_not_read_again_where_it_is_known_how_much_that_is() -> None:
    order, source = order_of(1000, lanes=[0], num_lanes=1, start=1000 + 508, tells=True)
    order.rows([1508])
    stream = source._stream
    assert isinstance(stream, ForwardRows)
    assert stream.num_read == 10


# --- Through the dataset ---

Make = Callable[..., PackedDataset]
NUM_ROWS, NUM_PACKS = 40, 36


@pytest.fixture(params=["one", "mixture"])
def make(request: pytest.FixtureRequest, tmp_path: Path, chat_tokenizer: ChatTokenizer) -> Make:
    """A stream of its own, or mixed with another one and with a data set that is not streamed."""
    path = write_rows(tmp_path / "a.jsonl", mixed_rows(NUM_ROWS))
    other = write_rows(tmp_path / "b.jsonl", [chat(f"q {n}", "a") for n in range(13)])

    def make(**options: Any) -> PackedDataset:
        def streamed(path: str, weight: float | None) -> DataSet:
            return DataSet(path, open_stream(path), RowFormat("messages"), weight=weight)

        if request.param == "one":
            return make_mixture([streamed(path, None)], chat_tokenizer, **options)
        whole = as_dataset(Rows([chat(f"who {n}", "me") for n in range(7)]), weight=1)
        return make_mixture([streamed(path, 2), whole, streamed(other, 1)], chat_tokenizer, **options)

    return make


def kept(dataset: PackedDataset) -> set[tuple[int, int]]:
    preparation = dataset.preparation
    own = [key for key in preparation.all_keys() if not isinstance(preparation.read(key), Dropped)]
    return {(key.source, key.row) for key in own}


def test_every_row_is_dealt_once_in_each_epoch_of_its_data_set(make: Make) -> None:
    found = Counter(keys(take(make(), 120)))
    of_rows = kept(make())

    assert max(found.values()) == 1
    for source in {source for source, _ in of_rows}:
        reached = max(epoch for s, _, epoch in found if s == source)
        assert reached >= 3
        assert {(s, row) for s, row, epoch in found if s == source and epoch == 0} == {
            (s, row) for s, row in of_rows if s == source
        }


@pytest.mark.parametrize("layout", [(1, 2), (2, 0), (2, 3), (3, 2), (6, 1)])
def test_pack_n_is_the_same_for_any_ranks_and_workers_that_divide_the_lanes(
    make: Make, layout: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [facts(pack) for pack in take(make(), NUM_PACKS)]
    num_ranks, num_workers = layout
    union: dict[int, dict[str, Any]] = {}
    for rank in range(num_ranks):
        for worker_id in range(max(1, num_workers)):
            pretend_worker(monkeypatch, worker_id, num_workers)
            packs = take(make(dp_rank=rank, dp_world_size=num_ranks), NUM_PACKS // (num_ranks * max(1, num_workers)))
            union |= {pack.index: facts(pack) for pack in packs}

    assert [union[index] for index in range(NUM_PACKS)] == expected


def test_stopped_after_any_pack_and_resumed_the_stream_is_the_same(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a fresh process, and by one that had read on; on one rank, and on two with two workers each."""
    expected = [facts(pack) for pack in take(make(), NUM_PACKS)]
    stopped, used = make(), make()
    stream = iter(stopped)
    for cut in range(NUM_PACKS - 8):
        state = as_json(stopped.state_dict())
        used.load_state_dict(state)
        assert [facts(pack) for pack in take(used, 8)] == expected[cut : cut + 8]
        pretend_worker(monkeypatch, 1, 3)
        rank = make(dp_rank=1, dp_world_size=2)
        rank.start_at(cut, {int(lane): each for lane, each in state["lanes"].items()})
        assert facts(next(iter(rank))) == expected[cut + 3]
        pretend_worker(monkeypatch, 0, 0)
        next(stream)


def test_a_broken_row_of_a_stream_is_told_by_its_line(tmp_path: Path, chat_tokenizer: ChatTokenizer) -> None:
    path = Path(write_rows(tmp_path / "a.jsonl", mixed_rows(20)))
    lines = path.read_text().splitlines()
    lines[12] = "{broken"
    path.write_text("\n".join(lines))
    dataset = DataSet("a", open_stream(str(path)), RowFormat("messages"))

    with pytest.raises(DataError, match=rf"{path}:13: "):
        take(make_mixture([dataset], chat_tokenizer), 30)
    packs: list[Pack] = take(make_mixture([dataset], chat_tokenizer, on_bad_row="skip"), 30)
    assert sum(count for pack in packs for (_, reason), count in pack.dropped.items() if reason == "broken_json") > 0


def test_a_resume_reads_the_window_of_the_lane_that_is_furthest_behind_and_on(chat_tokenizer: ChatTokenizer) -> None:
    rows = ForwardRows([chat("Hi", "Yo")] * 40_000, tells=True)
    dataset = make_mixture([DataSet("a", StreamedSource(rows), RowFormat("messages"))], chat_tokenizer)
    dataset.start_at(0, {lane: f"{5000 if lane == 2 else 5100:x}:0" for lane in range(6)})
    pack = next(iter(dataset))

    assert {key.row // 10_000 for key in pack.keys} == {3}
    assert rows.num_read == 10_000
