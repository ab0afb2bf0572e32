"""The stream of packs as a torch IterableDataset that can be stopped and resumed anywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, Unpack, cast, get_args

import torch
from torch.utils.data import IterableDataset

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.formats.detect import Format, resolve_format
from sftron.data.lanes.lane import AUTO_NUM_LANES, Lane, LaneDeal, Waits
from sftron.data.lanes.mixture import Mixture
from sftron.data.lanes.order import RowOrder, ShuffledOrder
from sftron.data.lanes.row_lengths import RowLengths, is_plannable, measure_rows
from sftron.data.lanes.sampler import Draws, OneStream, Stream, low_cursors
from sftron.data.lanes.stream_order import StreamOrder
from sftron.data.packing import Packing, lay_out, make_packing
from sftron.data.prepare import DataSet, Preparation
from sftron.data.sources import RowList, RowSource, StreamedSource, open_source
from sftron.data.types import ConversationKey, DataError, Dropped, LabeledConversation, MeasuredRow, Pack, Row

_POOL_SIZE = 256


class PackOptions(TypedDict, total=False):
    """What `PackedDataset.from_path` and `from_rows` take by name; the configuration's keys, and its defaults.

    token_budget: tokens a pack, by default sequence_length. num_lanes: what the number of loader workers divides; by
    default all rows are measured first where that takes little, and any number of workers will do. packing: "none" puts
    one conversation into each pack.
    """

    sequence_length: Required[int]
    token_budget: int
    format: Format | Literal["auto"]
    columns: Mapping[str, str]
    packing: Literal["pool", "none"]
    overlong: Literal["drop", "truncate_turns", "error"]
    train_on_completions_only: bool
    remove_cross_attention: bool
    num_epochs: int
    num_lanes: int
    seed: int


class PackedDataset(IterableDataset[Pack]):
    """An endless stream of packs; pack n is a pure function of data, tokenizer, packing settings and seed (law 5).

    Rank r of W takes the packs r, r + W, r + 2 W, ... and its loader worker w of m every m-th of those, so W x m has to
    divide num_lanes: each lane then has one owner. A drained lane (num_epochs) gives packs without a conversation, so
    that ranks stay in step; the stream itself never ends, unless `ends`.

    is_planned: the one lane is followed by all ranks and workers, by the lengths of the rows; each reads what goes into
    its own packs. Any W x m will do then, and the packs are those that one lane gives without it.
    row_lengths: where they are known already; else `measure` is called when they are first needed.
    token_budget: tokens a pack. num_epochs: the number of the last epoch + 1; None repeats the data for ever; data sets
    with weights always do. first_epoch: the number of the first one, 0 but where a run went on with other data.
    ends: for loops of one's own on one rank: once all lanes have drained, iteration is over, and without several loader
    workers, which are asked in turn, packs without a conversation are left out.
    waits: how long the conversations given so far were pending.
    """

    def __init__(
        self,
        preparation: Preparation,
        packing: Packing,
        *,
        token_budget: int,
        num_lanes: int,
        seed: int,
        num_epochs: int | None = None,
        remove_cross_attention: bool = True,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        ends: bool = False,
        is_planned: bool = False,
        row_lengths: RowLengths | None = None,
    ) -> None:
        assert num_lanes == 1 or not is_planned
        if num_lanes % dp_world_size and not is_planned:
            raise DataError(
                f"{dp_world_size} ranks do not divide data.num_lanes: {num_lanes}; {_layouts(num_lanes, dp_world_size)}"
            )
        self.preparation, self.packing = preparation, packing
        self.token_budget, self.num_lanes, self.seed, self.num_epochs = token_budget, num_lanes, seed, num_epochs
        self._remove_cross_attention = remove_cross_attention
        self._dp_rank, self._dp_world_size, self._ends = dp_rank, dp_world_size, ends
        self.is_planned, self.row_lengths = is_planned, row_lengths
        self.waits = Waits()
        self._streams: list[Stream] = []
        self._own_lanes = range(num_lanes)
        self._first_pack = 0
        self.first_epoch = 0
        self._num_given = 0
        self._lanes: dict[int, Lane] = {}
        self._lane_states: dict[int, str] = {}

    @classmethod
    def from_path(
        cls, path: str | Path, chat_tokenizer: ChatTokenizer, *, split: str = "train", **options: Unpack[PackOptions]
    ) -> PackedDataset:
        """Of a file, a folder, a pattern or a Hub id, as `data.datasets.path`. Raises DataError."""
        return cls._from_source(open_source(str(path), split), chat_tokenizer, **options)

    @classmethod
    def from_rows(
        cls, rows: Sequence[Row], chat_tokenizer: ChatTokenizer, **options: Unpack[PackOptions]
    ) -> PackedDataset:
        """Of rows by index: a list, or a data set of the datasets library. Raises DataError."""
        return cls._from_source(RowList(rows), chat_tokenizer, **options)

    @classmethod
    def _from_source(
        cls, source: RowSource, chat_tokenizer: ChatTokenizer, **options: Unpack[PackOptions]
    ) -> PackedDataset:
        length = options["sequence_length"]
        _require_known("format", options.get("format", "auto"), ("auto", *get_args(Format)))
        _require_known("packing", options.get("packing", "pool"), ("pool", "none"))
        _require_known("overlong", options.get("overlong", "drop"), ("drop", "truncate_turns", "error"))
        if length < 2:
            raise DataError(f"sequence_length is {length}; a conversation has two tokens at least")
        if (token_budget := options.get("token_budget", length)) < length:
            raise DataError(
                f"token_budget is {token_budget}, and sequence_length {length}; raise the one, or lower the other"
            )
        row_format = resolve_format(source, options.get("format", "auto"), options.get("columns"))
        preparation = Preparation(
            [DataSet(source.name, source, row_format)],
            chat_tokenizer,
            sequence_length=length,
            overlong=options.get("overlong", "drop"),
            train_on_completions_only=options.get("train_on_completions_only", True),
        )
        is_planned = "num_lanes" not in options and is_plannable(preparation, token_budget)
        dataset = cls(
            preparation,
            make_packing(options.get("packing", "pool"), pool_size=_POOL_SIZE, micro_batch_size=1),
            token_budget=token_budget,
            num_lanes=1 if is_planned else options.get("num_lanes", AUTO_NUM_LANES),
            seed=options.get("seed", 42),
            num_epochs=options.get("num_epochs"),
            remove_cross_attention=options.get("remove_cross_attention", True),
            ends=True,
            is_planned=is_planned,
        )
        if is_planned:
            dataset.measure()  # not in each loader worker
        return dataset

    def measure(self) -> RowLengths:
        """The lengths of all rows, measured where they are not known. Raises DataError for a bad row."""
        if self.row_lengths is None:
            rows = range(self.preparation.num_rows or 0)
            self.row_lengths = RowLengths.of(self.preparation, measure_rows(self.preparation, rows))
        return self.row_lengths

    @property
    def lanes_in_words(self) -> str:
        return "one lane, planned by their lengths" if self.is_planned else f"{self.num_lanes} lanes"

    def takes_workers(self, num_workers: int) -> bool:
        """Whether this rank's packs can be made by so many loader workers."""
        return self.is_planned or self.num_lanes % (self._dp_world_size * max(1, num_workers)) == 0

    def round_after(self, index: int) -> int:
        """The number of rank 0's next pack once all ranks have as many as this one, which has just had pack `index`."""
        return index - self._dp_rank + self._dp_world_size

    def owns_lane(self, lane: int, first_pack: int) -> bool:
        """Whether this rank has had the last pack of `lane` before `first_pack`, with which rank 0 goes on."""
        last_pack = first_pack - 1 - (first_pack - 1 - lane) % self.num_lanes
        return (last_pack - first_pack - self._dp_rank) % self._dp_world_size == 0

    def __iter__(self) -> Iterator[Pack]:
        worker = torch.utils.data.get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        if not self.takes_workers(num_workers):
            raise DataError(
                f"{self._dp_world_size} ranks x {num_workers} workers do not divide data.num_lanes: {self.num_lanes}; "
                f"{_layouts(self.num_lanes, self._dp_world_size * num_workers)}"
            )
        step = self._dp_world_size * num_workers
        first_lane = (self._first_pack + self._dp_rank + self._dp_world_size * worker_id) % step
        self._own_lanes = range(1) if self.is_planned else range(first_lane, self.num_lanes, step)
        num_empty = 0
        while True:
            number_in_rank = worker_id + num_workers * self._num_given
            index = self._first_pack + self._dp_rank + self._dp_world_size * number_in_rank
            if self.is_planned:  # past the packs of the others
                lane = self._lane(0)
                for _ in range(step - 1 if self._num_given else index - self._first_pack):
                    lane.deal()
            # Counted before it is handed out: a state asked for while the pack is being used lies behind it.
            pack = self._pack(index)
            self._num_given += 1
            num_empty = 0 if pack.keys else num_empty + 1
            if self._ends and num_empty == len(self._own_lanes):
                if self._first_pack == 0 and self._num_given == num_empty and (index == 0 or not self.is_planned):
                    raise DataError(
                        f"no row can be trained on{_first_drop(pack)}; look at them with tools/inspect_data.py"
                    )
                return
            if pack.keys or num_workers > 1 or not self._ends:
                yield pack

    def state_dict(self) -> dict[str, Any]:
        """Where this copy of the dataset (this worker) stands. Some dozens of bytes a lane; no text, no tokens."""
        return {
            "first_pack": self._first_pack,
            "num_given": self._num_given,
            "lanes": dict(self._lane_states),
            "first_epoch": self.first_epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind `state`, of a worker with the same number in the same layout."""
        self._first_pack, self._num_given = state["first_pack"], state["num_given"]
        self.first_epoch = state["first_epoch"]
        self._lane_states = {int(lane): lane_state for lane, lane_state in state["lanes"].items()}
        self._lanes.clear()
        self._streams = []

    def start_at(self, first_pack: int, lane_states: dict[int, str], first_epoch: int = 0) -> None:
        """Go on with pack number `first_pack`, every lane behind its state, in whatever layout is in force now."""
        state = {"first_pack": first_pack, "num_given": 0, "lanes": lane_states, "first_epoch": first_epoch}
        self.load_state_dict(state)

    def _pack(self, index: int) -> Pack:
        lane_number = index % self.num_lanes
        lane = self._lane(lane_number)
        deal = lane.deal()
        self._lane_states[lane_number] = lane.state()
        conversations, dropped_rows = self._read_rows(deal)
        pack = lay_out(
            conversations,
            token_budget=self.token_budget,
            remove_cross_attention=self._remove_cross_attention,
            pad_id=self.preparation.chat_tokenizer.pad_id,
        )
        return replace(
            pack,
            index=index,
            lane=lane_number,
            lane_state=self._lane_states[lane_number],
            dropped_rows=dropped_rows,
        )

    def _read_rows(self, deal: LaneDeal) -> tuple[Sequence[LabeledConversation], tuple[Dropped, ...]]:
        """The conversations and dropped rows of a pack; those that are known by their length only are read now."""
        if not self.is_planned:
            return cast(tuple[LabeledConversation, ...], deal.conversations), deal.dropped_rows
        measured = [*deal.conversations, *deal.dropped_rows]
        read = self.preparation.read_many([each.key for each in measured])
        for before, now in zip(measured, read, strict=True):
            if (found := _length_or_reason(now)) != (expected := _length_or_reason(before)):
                raise DataError(
                    f"{self.preparation.location(now.key)}: {found}, but {expected} when the rows were measured at the "
                    "start; the data or its tokenizer has changed meanwhile: set it back, or start another run"
                )
        return (
            [each for each in read if isinstance(each, LabeledConversation)],
            tuple(each for each in read if isinstance(each, Dropped)),
        )

    def _lane(self, lane_number: int) -> Lane:
        # Made when first asked, so the first pack waits for one pool only.
        if lane_number not in self._lanes:
            draws = self._draws(lane_number)
            lane = Lane(draws, packing=self.packing, token_budget=self.token_budget, waits=self.waits)
            if lane_number in self._lane_states:
                lane.load_state(self._lane_states[lane_number])
            self._lanes[lane_number] = lane
        return self._lanes[lane_number]

    def _draws(self, lane: int) -> Draws:
        # A stream is opened where it is read, in the loader's worker, and behind the states of its lanes.
        if not self._streams:
            self._streams = self._open_streams()
        if self.preparation.weights is None:
            num_epochs = None if self.num_epochs is None else self.num_epochs - self.first_epoch
            return OneStream(lane, self.num_lanes, self._streams[0], num_epochs=num_epochs)
        return Mixture(lane, self.num_lanes, self._streams, self.preparation.weights)

    def _open_streams(self) -> list[Stream]:
        """One of all rows, numbered through; with weights one of each data set."""
        preparation = self.preparation
        if preparation.weights is None and not preparation.is_streamed:
            assert preparation.num_rows is not None
            return [self._stream(self._shuffled(preparation.num_rows, 0), preparation.key)]
        assert self.num_epochs is None
        return [
            self._stream(self._order(place), partial(ConversationKey, place))
            for place in range(len(preparation.datasets))
        ]

    def _stream(self, order: RowOrder, key: Callable[[int, int], ConversationKey]) -> Stream:
        if self.is_planned:
            return Stream(partial(_measured, self.measure(), order, key), order.num_rows)
        return Stream(partial(_read, self.preparation, order, key), order.num_rows)

    def _order(self, place: int) -> RowOrder:
        source = self.preparation.datasets[place].source
        if not isinstance(source, StreamedSource):
            return self._shuffled(len(source), place)
        states = {lane: self._lane_states.get(lane) for lane in self._own_lanes}
        starts = [lane + self.num_lanes * (low_cursors(state)[place] if state else 0) for lane, state in states.items()]
        return StreamOrder(
            source,
            seed=self.seed,
            place=place,
            num_lanes=self.num_lanes,
            lanes=self._own_lanes,
            start=min(starts),
            first_epoch=self.first_epoch,
        )

    def _shuffled(self, num_rows: int, place: int) -> RowOrder:
        return ShuffledOrder(num_rows, seed=self.seed, place=place, stride=self.num_lanes, first_epoch=self.first_epoch)


def _read(
    preparation: Preparation,
    order: RowOrder,
    key: Callable[[int, int], ConversationKey],
    positions: Sequence[int],
) -> list[LabeledConversation | Dropped]:
    return preparation.read_many([key(row, epoch) for row, epoch in order.rows(positions)])


def _measured(
    row_lengths: RowLengths, order: RowOrder, key: Callable[[int, int], ConversationKey], positions: Sequence[int]
) -> list[MeasuredRow | Dropped]:
    return [row_lengths.row(key(row, epoch)) for row, epoch in order.rows(positions)]


def _length_or_reason(row: LabeledConversation | MeasuredRow | Dropped) -> str:
    return f"dropped as {row.reason}" if isinstance(row, Dropped) else f"{len(row)} tokens"


def _first_drop(pack: Pack) -> str:
    return f": {pack.dropped_rows[0].reason}, {pack.dropped_rows[0].detail}" if pack.dropped_rows else ""


def _require_known(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise DataError(f"{option} is {value!r}; it may be one of {', '.join(known)}")


def _layouts(num_lanes: int, wanted: int) -> str:
    fitting = [number for number in range(1, num_lanes + 1) if num_lanes % number == 0]
    return (
        f"ranks x workers may be one of {', '.join(map(str, fitting))}; or set data.num_lanes: "
        f"{math.lcm(num_lanes, wanted)}, which suits {wanted} as well, in a run that has not begun"
    )
