"""Whatever happens to a run, kills or other ranks and workers, its data goes on as if nothing had (laws 5 and 6)."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.formats.detect import RowFormat
from sftron.data.lanes.lane import Lane, PoolDelay
from sftron.data.lanes.mixture import Mixture
from sftron.data.lanes.row_lengths import RowLengths
from sftron.data.lanes.lane import EpochSampler, Stream
from sftron.data.loader import PackLoader, _collate_or_error
from sftron.data.packing import make_packing
from sftron.data.prepare import DataSet
from sftron.data.sources import StreamedSource
from sftron.data.types import Batch, ConversationKey, Dropped, LabeledConversation, Row
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
    "planned, two sets, one epoch": lambda: ([as_dataset(Rows(mixed_rows(150))), as_dataset(Rows(shorts(31)))], 1),
    "planned, mixed": lambda: (
        [as_dataset(Rows(mixed_rows(50)), weight=2), as_dataset(Rows(shorts(9)), weight=1)],
        None,
    ),
}


class WorkersInProcess:
    """Stands for torchdata's loader: a copy of the dataset for each worker, all a pack ahead of what is taken."""

    def __init__(self, make: Make, num_workers: int, monkeypatch: pytest.MonkeyPatch, items: Any) -> None:
        self._start = items._dataset.state_dict()
        self._make, self._num_workers, self._monkeypatch = make, num_workers, monkeypatch

    def __iter__(self) -> Iterator[Batch]:
        queues: list[list[Any]] = []
        streams = []
        for worker in range(max(1, self._num_workers)):
            dataset = self._make()
            dataset.seek(self._start["first_pack"], self._start["lanes"], self._start["first_epoch"])
            pretend_worker(self._monkeypatch, worker, self._num_workers)
            streams.append(iter(dataset))
            queues.append([next(streams[-1])])
        while True:
            for stream, queue in zip(streams, queues, strict=True):
                queue.append(next(stream))
                yield _collate_or_error(queue.pop(0), keep_tail=False)  # pyright: ignore[reportReturnType]


@dataclass
class Run:
    """A run over all its ranks, with the state that its last checkpoint has."""

    kind: str
    chat_tokenizer: ChatTokenizer
    monkeypatch: pytest.MonkeyPatch
    state: dict[str, Any] | None = None
    row_lengths: RowLengths | None = None

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


@pytest.mark.parametrize("kind", KINDS)
def test_any_kills_and_changes_of_layout_leave_the_order_and_every_tensor_of_the_packs(
    kind: str, chat_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them resumes in a row, at once after a resume, over the edge of an epoch and at the end of the data."""
    run = Run(kind, chat_tokenizer, monkeypatch)
    pretend_worker(monkeypatch, 0, 0)
    expected = [facts(pack) for pack in take(run.dataset(), NUM_PACKS)]

    @settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
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


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_comes_once_in_each_epoch_of_its_data_set(
    kind: str, chat_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_worker(monkeypatch, 0, 0)
    dataset = Run(kind, chat_tokenizer, monkeypatch).dataset()
    packs = take(dataset, NUM_PACKS)
    found = Counter(keys(packs))
    read = Run(kind, chat_tokenizer, monkeypatch).dataset().preparation
    kept = {(key.source, key.row) for key in read.all_keys() if not isinstance(read.read(key), Dropped)}
    assert max(found.values()) == 1
    assert len(packs[0].keys) > 1
    for source in {source for source, _ in kept}:
        reached = max(epoch for s, _, epoch in found if s == source)
        assert reached >= 1 or not packs[-1].keys
        assert {(s, row) for s, row, epoch in found if s == source and epoch == 0} == {
            (s, row) for s, row in kept if s == source
        }


# --- What a resume costs, and what it needs ---


@pytest.mark.parametrize("num_sets", [1, 10])
def test_the_state_of_240_lanes_is_below_64_kb(num_sets: int) -> None:
    """Lengths as of chats, from some tokens to the whole budget, for one set or a mixture; each lane at its longest."""
    longest = 0
    for seed in range(3):
        lane = _lane_of_chats(seed, num_sets)
        for _ in range(800):
            lane.next_pack()
            longest = max(longest, len(lane.state()))

    assert len(json.dumps({str(lane): "x" * longest for lane in range(240)})) <= 65_536


def _lane_of_chats(seed: int, num_sets: int) -> Lane:
    lengths = np.clip(np.random.default_rng(seed).lognormal(5.5, 1.1, 50_021), 4, 4096).astype(int)

    def read(positions: Sequence[int]) -> list[LabeledConversation]:
        blanks = [np.empty(lengths[position % len(lengths)]) for position in positions]
        return [LabeledConversation(b, b, b, b, ConversationKey(0, p)) for b, p in zip(blanks, positions, strict=True)]

    stream = Stream(read, 10_000_000)
    if num_sets == 1:
        sampler = EpochSampler(0, 240, stream, num_epochs=None)
    else:
        sampler = Mixture(0, 240, [stream] * num_sets, range(1, num_sets + 1))
    packing = make_packing("pool", pool_size=256, micro_batch_size=1)
    return Lane(sampler, packing=packing, token_budget=4096, delay=PoolDelay())


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


@pytest.mark.parametrize("share", [0.0, 0.01, 0.99])
def test_the_first_pack_after_a_resume_reads_one_pool_wherever_in_ten_million_rows(
    share: float, chat_tokenizer: ChatTokenizer
) -> None:
    source = ManyRows()
    dataset = make_mixture([as_dataset(source)], chat_tokenizer, num_lanes=48, pool_size=256)
    low = int(share * 10_000_000 / 48)
    dataset.seek(48 * 1000, dict.fromkeys(range(48), f"{low:x}:5"))
    pack = next(iter(dataset))
    assert len(source.requested) == 256
    assert len(pack.keys) > 1


def test_a_resume_of_a_stream_reads_the_window_of_the_lane_that_is_furthest_behind_and_on(
    chat_tokenizer: ChatTokenizer,
) -> None:
    rows = ForwardRows([chat("Hi", "Yo")] * 40_000, declares=True)
    dataset = make_mixture([DataSet("a", StreamedSource(rows), RowFormat("messages"))], chat_tokenizer)
    dataset.seek(0, {lane: f"{5000 if lane == 2 else 5100:x}:0" for lane in range(6)})
    assert {key.row // 10_000 for key in next(iter(dataset)).keys} == {3}
    assert rows.num_read == 10_000
