"""Whatever happens to a run, kills or other ranks and workers, its data goes on as if nothing had (laws 5 and 6)."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.formats.table import RowFormat
from sftron.data.loader import PackLoader
from sftron.data.prepare import DataSet
from sftron.data.sources import StreamedSource
from sftron.data.types import Dropped, Pack, Row
from tests.conftest import rest_nightly
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
from tests.data.test_order import ForwardRows

NUM_LANES, NUM_PACKS = 12, 132
LAYOUTS = [
    (ranks, workers)
    for ranks in (1, 2, 3, 4, 6, 12)
    for workers in (0, 1, 2, 3, 4)
    if 12 % (ranks * (workers or 1)) == 0
]
ANY_LAYOUTS = [(ranks, workers) for ranks in (1, 2, 3, 5, 8) for workers in (0, 1, 2, 3)]
"""Most of these do not divide any number of lanes that this data could have."""
Make = Callable[..., PackedDataset]


def streamed(rows: list[Row], *, declares: bool, weight: float | None = None) -> DataSet:
    return DataSet("stream", StreamedSource(ForwardRows(rows, declares=declares)), RowFormat("messages"), weight=weight)


def shorts(number: int, text: str = "who") -> list[Row]:
    return [chat(f"{text} {n}", "me") for n in range(number)]


KINDS: dict[str, Callable[[], tuple[list[DataSet], int | None]]] = {
    "indexed": lambda: ([as_dataset(Rows(mixed_rows(90)))], None),
    "two sets, one epoch": lambda: ([as_dataset(Rows(mixed_rows(70))), as_dataset(Rows(shorts(31)))], 1),
    "to the end of two epochs": lambda: ([as_dataset(Rows(mixed_rows(65)))], 2),
    "streamed": lambda: ([streamed(mixed_rows(70), declares=False)], None),
    "mixed": lambda: ([as_dataset(Rows(mixed_rows(50)), weight=2), as_dataset(Rows(shorts(9)), weight=1)], None),
    "mixed with a stream": lambda: (
        [as_dataset(Rows(mixed_rows(40)), weight=1), streamed(shorts(23), declares=True, weight=3)],
        None,
    ),
    "planned": lambda: ([as_dataset(Rows(mixed_rows(90)))], None),
    "planned, best fit of two sets, one epoch": lambda: (
        [as_dataset(Rows(mixed_rows(150))), as_dataset(Rows(shorts(31)))],
        1,
    ),
    "planned, best fit, two epochs": lambda: ([as_dataset(Rows(mixed_rows(150)))], 2),
    "planned, mixed": lambda: (
        [as_dataset(Rows(mixed_rows(50)), weight=2), as_dataset(Rows(shorts(9)), weight=1)],
        None,
    ),
}


class WorkersInProcess:
    """Stands for torch's loader: a copy of the dataset for each worker, all a pack ahead of what is taken."""

    def __init__(self, make: Make, num_workers: int, monkeypatch: pytest.MonkeyPatch, items: Any) -> None:
        own = items._dataset
        self._position = own._first_pack, own._lane_states, own.first_epoch
        self._make, self._num_workers, self._monkeypatch = make, num_workers, monkeypatch

    def __iter__(self) -> Iterator[Pack]:
        queues: list[list[Any]] = []
        streams = []
        for worker in range(max(1, self._num_workers)):
            dataset = self._make()
            dataset.seek(*self._position)
            pretend_worker(self._monkeypatch, worker, self._num_workers)
            streams.append(iter(dataset))
            queues.append([next(streams[-1])])
        while True:
            for stream, queue in zip(streams, queues, strict=True):
                queue.append(next(stream))
                yield queue.pop(0)


@dataclass
class Run:
    """A run over all its ranks, with the state that its last checkpoint has."""

    kind: str
    chat_tokenizer: ChatTokenizer
    monkeypatch: pytest.MonkeyPatch
    state: dict[str, Any] | None = None
    row_lengths: Sequence[int | str] | None = None

    @property
    def is_planned(self) -> bool:
        return self.kind.startswith("planned")

    def dataset(self, rank: int = 0, num_ranks: int = 1) -> PackedDataset:
        datasets, num_epochs = KINDS[self.kind]()
        options: dict[str, Any] = {"num_epochs": num_epochs, "dp_rank": rank, "dp_world_size": num_ranks}
        options["num_lanes"] = "auto" if self.is_planned else NUM_LANES
        options["row_lengths"] = self.row_lengths
        dataset = make_mixture(datasets, self.chat_tokenizer, **options)
        assert dataset.is_planned == self.is_planned
        if self.is_planned:
            self.row_lengths = dataset.measure()
        assert dataset.is_best_fit == ("best fit" in self.kind)
        return dataset

    def resume(self, layout: tuple[int, int], num_rounds: int, num_lost: int) -> dict[int, dict[str, Any]]:
        """From the last checkpoint: some packs a rank, a checkpoint, some more packs, and the end of all processes."""
        num_ranks, num_workers = layout
        found, states = {}, []
        for rank in range(num_ranks):
            make = partial(self.dataset, rank, num_ranks)
            loader = PackLoader(make(), num_workers=num_workers, keep_tail=False)
            loader._make_loader = partial(WorkersInProcess, make, num_workers, self.monkeypatch)  # pyright: ignore
            if self.state is not None:
                loader.load_state_dict(self.state)
            batches = iter(loader)
            found |= {batch.pack.index: facts(batch.pack) for batch in islice(batches, num_rounds)}
            states.append(as_json(loader.state_dict()))
            lost = [facts(batch.pack) for batch in islice(batches, num_lost)]
            assert len(lost) == num_lost
        assert len({(state["next_pack"], state["first_epoch"]) for state in states}) == 1
        lanes = {lane: lane_state for state in states for lane, lane_state in state["lanes"].items()}
        assert len(lanes) == sum(len(state["lanes"]) for state in states), "a lane has one owner"
        self.state = states[0] | {"lanes": lanes}
        return found


def hops_between(layouts: list[tuple[int, int]]) -> st.SearchStrategy[list[tuple[tuple[int, int], int, int]]]:
    return st.lists(st.tuples(st.sampled_from(layouts), st.integers(0, 9), st.integers(0, 5)), min_size=2, max_size=6)


# An end of the data, a stream, weights and planned packs.
FAST = ["two sets, one epoch", "streamed", "planned, mixed", "planned, best fit, two epochs", "mixed with a stream"]


@pytest.mark.parametrize("kind", rest_nightly(KINDS, FAST))
def test_any_kills_and_changes_of_layout_leave_the_order_and_every_tensor_of_the_packs(
    kind: str, chat_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them resumes in a row, at once after a resume, over the edge of an epoch and at the end of the data.

    In the packs, each row comes once in each epoch of its data set.
    """
    run = Run(kind, chat_tokenizer, monkeypatch)
    pretend_worker(monkeypatch, 0, 0)
    packs = take(run.dataset(), NUM_PACKS)
    expected = [facts(pack) for pack in packs]
    found, read = Counter(keys(packs)), run.dataset().preparation
    kept = {(key.source, key.row) for key in read.all_keys() if not isinstance(read.read(key), Dropped)}
    assert max(found.values()) == 1
    assert max(epoch for _, _, epoch in found) >= 1 or not packs[-1].keys
    assert {(source, row) for source, row, epoch in found if epoch == 0} == kept

    @settings(max_examples=settings.default.max_examples // 8, suppress_health_check=[HealthCheck.too_slow])
    @given(hops=hops_between(ANY_LAYOUTS if run.is_planned else LAYOUTS))
    def check(hops: list[tuple[tuple[int, int], int, int]]) -> None:
        run.state = None
        reached = 0
        for (num_ranks, num_workers), num_rounds, num_lost in hops:
            num_rounds = min(num_rounds, (NUM_PACKS - reached) // num_ranks)
            found = run.resume((num_ranks, num_workers), num_rounds, num_lost)
            assert sorted(found) == list(range(reached, reached + num_ranks * num_rounds))
            assert [found[index] for index in sorted(found)] == expected[reached : reached + len(found)]
            reached += len(found)
            assert run.state is not None
            assert run.state["next_pack"] == reached

    check()


# --- What a resume costs, and what it needs ---


class ManyRows(Rows):
    """Many rows that take no memory."""

    fingerprint = "many"  # pyright: ignore[reportIncompatibleMethodOverride,reportAssignmentType]

    def __init__(self, num_rows: int = 10_000_000) -> None:
        super().__init__([], "many.jsonl")
        self.num_rows = num_rows
        self.requested: list[int] = []

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Row:
        self.requested.append(index)
        return chat(f"question {index}", f"answer {index}")


@pytest.mark.parametrize("share", [0.0, 0.99])
@pytest.mark.parametrize("num_sets", [1, 2])
def test_the_first_pack_after_a_resume_reads_one_pool_wherever_in_ten_million_rows(
    num_sets: int, share: float, chat_tokenizer: ChatTokenizer
) -> None:
    """Of two data sets, it reads some rows ahead in each."""
    source, low = ManyRows(), int(share * 10_000_000 / 48)
    sets = [as_dataset(source, weight=None if num_sets == 1 else 1)] * num_sets
    dataset = make_mixture(sets, chat_tokenizer, num_lanes=48, pool_size=256)
    state = f"{low:x}:5" if num_sets == 1 else f"{low:x}.{20 * low:x},{low:x}.{20 * low:x}:5"
    dataset.seek(48 * 1000, dict.fromkeys(range(48), state))
    pack = next(iter(dataset))
    assert len(source.requested) == 256 or (num_sets == 2 and 256 < len(source.requested) < 3 * 256)
    assert len(pack.keys) > 1


def test_a_resume_of_a_stream_reads_the_window_of_the_lane_that_is_furthest_behind_and_on(
    chat_tokenizer: ChatTokenizer,
) -> None:
    rows = ForwardRows([chat("Hi", "Yo")] * 40_000, declares=True)
    dataset = make_mixture([DataSet("a", StreamedSource(rows), RowFormat("messages"))], chat_tokenizer)
    dataset.seek(0, {lane: f"{5000 if lane == 2 else 5100:x}:0" for lane in range(6)})
    assert {key.row // 10_000 for key in next(iter(dataset)).keys} == {3}
    assert rows.num_read == 10_000
