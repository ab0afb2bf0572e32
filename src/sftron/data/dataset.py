"""A torch IterableDataset of packs that can be stopped and resumed at any pack."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch.utils.data import IterableDataset

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.formats.detect import resolve_format
from sftron.data.formats.table import Format
from sftron.data.lanes.lane import EpochFetcher, Fetcher, Lane, LanePack, PoolDelay, Stream, parse_state
from sftron.data.lanes.mixture import MixtureFetcher
from sftron.data.lanes.order import ShuffledOrder, StreamOrder
from sftron.data.lanes.row_lengths import (
    is_best_fit_fuller,
    is_plannable,
    lengths_of_epoch,
    measure_rows,
    measured_row,
    read_measured,
)
from sftron.data.packing import BestFitPacking, MinibatchPacking, PoolPacking, lay_out
from sftron.data.prepare import DataOptions, DataSet, Preparation
from sftron.data.sources import RowList, RowSource, StreamedSource, open_source
from sftron.data.types import (
    IGNORE_INDEX,
    ConversationKey,
    DataError,
    Documents,
    Dropped,
    LabeledConversation,
    MeasuredRow,
    Pack,
    Row,
)
from sftron.visible_text import counted

_AUTO_NUM_LANES = 48
"""The number of lanes with `data.num_lanes: auto` for sets with too many rows to plan their packing
(row_lengths.py)."""

_ROWS_AT_ONCE = 256


class PackedDataset(IterableDataset[Pack]):
    """An endless stream of packs; pack n is a pure function of data, tokenizer, options and seed (law 5).

    Rank r of W ranks yields the packs r, r + W, r + 2 W, ..., and each of its m loader workers yields every m-th of
    those. The number of lanes must be a multiple of W x m, so that each lane has one owner. A lane that has reached
    num_epochs yields packs without a conversation, so that all ranks make the same number of steps.

    The packing of a small data set is planned (lanes/row_lengths.py): every rank and worker computes the packs of a
    single lane from the lengths of the rows, and reads only the rows of its own packs. Any W and m are then allowed.
    The packs equal those of one lane without planning, unless best-fit decreasing fills an epoch better
    (`is_best_fit`).

    Args:
        preparation: How rows become conversations.
        options: How conversations become packs.
        dp_rank: The data-parallel rank of this process.
        dp_world_size: The number of data-parallel ranks.
        num_sharing: The number of ranks that share each pack, for messages.
        ends: Ends the iteration once all lanes have reached num_epochs, for a user's own training loop on one rank.
            Unless there are several loader workers, which take turns, packs without a conversation are omitted.
        row_lengths: The result of `measure_rows` for all rows, if it is known; otherwise `measure` is called when it is
            first needed.

    Raises:
        DataError: The ranks do not divide the lanes, or a row that is read to estimate lengths is bad.
    """

    def __init__(
        self,
        preparation: Preparation,
        options: DataOptions,
        *,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        num_sharing: int = 1,
        ends: bool = False,
        row_lengths: Sequence[int | str] | None = None,
    ) -> None:
        self.preparation = preparation
        self.token_budget, self.seed, self.num_epochs = options.token_budget, options.seed, options.num_epochs
        if options.packing == "pool":
            self.packing = PoolPacking(options.pool_size)
        else:
            self.packing = MinibatchPacking(options.micro_batch_size if options.packing == "minibatch" else 1)
        if options.num_lanes == "auto":
            self.is_planned = row_lengths is not None or is_plannable(preparation, self.token_budget)
            self.num_lanes = 1 if self.is_planned else _AUTO_NUM_LANES
        else:
            self.is_planned, self.num_lanes = False, options.num_lanes
        self._remove_cross_attention = options.remove_cross_attention
        self._dp_rank, self._dp_world_size, self._ends = dp_rank, dp_world_size, ends
        self._num_sharing = num_sharing
        self._require_divided_lanes(0)
        self.pool_delay = PoolDelay()
        """How long the conversations of this process's packs stayed in the pool."""
        self._own_lanes = range(self.num_lanes)
        self.is_best_fit = False
        """Whether best-fit decreasing makes the planned packs; known once the rows are measured."""
        self.row_lengths: Sequence[int | str] | None = None
        if row_lengths is not None:
            self.plan(row_lengths)
        self.seek(0, {})

    @classmethod
    def from_path(
        cls,
        path: str | Path,
        chat_tokenizer: ChatTokenizer,
        *,
        split: str = "train",
        documents: Documents = "file",
        **options: Any,
    ) -> PackedDataset:
        """Opens a file, a folder, a pattern or a Hub id, as `data.datasets.path` does. Raises DataError.

        With `format="text"`, each file or each line of .txt files is a document, as `documents` says. The other options
        are those of `from_rows`.
        """
        source = open_source(str(path), split, documents=documents if options.get("format") == "text" else None)
        return cls._from_source(source, chat_tokenizer, **options)

    @classmethod
    def from_rows(cls, rows: Sequence[Row], chat_tokenizer: ChatTokenizer, **options: Any) -> PackedDataset:
        """Returns packs of rows that are already in memory: a list, or a data set of the datasets library.

        The options are `format` and `columns`, as in `data.datasets`, and the fields of DataOptions. Raises DataError.
        """
        return cls._from_source(RowList(rows), chat_tokenizer, **options)

    @classmethod
    def _from_source(
        cls,
        source: RowSource,
        chat_tokenizer: ChatTokenizer,
        *,
        format: Format | Literal["auto"] = "auto",
        columns: Mapping[str, str] | None = None,
        **keywords: Any,
    ) -> PackedDataset:
        if format not in (known := ("auto", *get_args(Format))):
            raise DataError(f"unknown format {format!r}; choose from {', '.join(known)}")
        options = DataOptions(**keywords)
        row_format = resolve_format(source, format, columns)
        preparation = Preparation([DataSet(source.name, source, row_format)], chat_tokenizer, options)
        dataset = cls(preparation, options, ends=True)
        if dataset.is_planned:
            dataset.measure()  # here, so that it does not happen in every loader worker
        return dataset

    def measure(self) -> Sequence[int | str]:
        """Returns `measure_rows` of all rows; the first call measures them. Raises DataError for a bad row."""
        return self.row_lengths or self.plan(measure_rows(self.preparation, range(self.preparation.num_rows or 0)))

    def plan(self, row_lengths: Sequence[int | str]) -> Sequence[int | str]:
        """Sets and returns the result of `measure_rows` for all rows, which determines `is_best_fit`."""
        self.row_lengths = row_lengths
        if self.is_planned and isinstance(self.packing, PoolPacking) and self.preparation.weights is None:
            lengths = lengths_of_epoch(row_lengths, self.seed)
            is_endless = self.num_epochs is None
            self.is_best_fit = is_best_fit_fuller(lengths, self.packing, self.token_budget, is_endless=is_endless)
        return row_lengths

    @property
    def lanes_in_words(self) -> str:
        planned = f"one lane, planned by their lengths{', best-fit decreasing' if self.is_best_fit else ''}"
        return planned if self.is_planned else f"{counted(self.num_lanes, 'lanes')}"

    def takes_workers(self, num_workers: int) -> bool:
        """Returns whether this rank can have `num_workers` loader workers."""
        return self.is_planned or self.num_lanes % (self._dp_world_size * max(1, num_workers)) == 0

    def round_after(self, index: int) -> int:
        """Returns the number of rank 0's next pack, after this rank has consumed pack `index`."""
        return index - self._dp_rank + self._dp_world_size

    def owns_lane(self, lane: int, first_pack: int) -> bool:
        """Returns whether this rank consumed the last pack of `lane` before `first_pack`, rank 0's next pack."""
        last_pack = first_pack - 1 - (first_pack - 1 - lane) % self.num_lanes
        return (last_pack - first_pack - self._dp_rank) % self._dp_world_size == 0

    def seek(self, first_pack: int, lane_states: Mapping[int, str], first_epoch: int = 0) -> None:
        """Resumes with pack number `first_pack` and each lane after its state, for any number of ranks and workers.

        `first_epoch` is the number of the first epoch: 0, unless the run continued with changed data.
        """
        self.load_state_dict(
            {"first_pack": first_pack, "num_given": 0, "lanes": lane_states, "first_epoch": first_epoch}
        )

    def to_hf(self) -> Any:
        """Returns the conversations of one epoch for TRL's SFTTrainer and transformers' Trainer, a `datasets.Dataset`.

        Its columns are `input_ids` and `labels`, with one row for each conversation, in the order of the rows. The
        label of a token is at the token's own index, or IGNORE_INDEX; these trainers shift and pack them themselves.

        Raises:
            DataError: A row is bad, or has token weights other than 0 and 1, which such labels cannot express.
        """
        from datasets import Dataset

        columns: dict[str, list[np.ndarray]] = {"input_ids": [], "labels": []}
        keys = list(self.preparation.all_keys())
        for start in range(0, len(keys), _ROWS_AT_ONCE):
            for read in self.preparation.read_many(keys[start : start + _ROWS_AT_ONCE]):
                if isinstance(read, Dropped):
                    continue
                if not np.isin(read.loss_weights, (0, 1)).all():
                    weight = read.loss_weights[(read.loss_weights != 0) & (read.loss_weights != 1)].min()
                    raise DataError(
                        f"{self.preparation.location(read.key)} has tokens of weight {weight:g}, and labels for "
                        "transformers are only on or off; remove the weights"
                    )
                labels = np.where(read.loss_weights > 0, read.labels, IGNORE_INDEX)
                columns["input_ids"].append(read.input_ids)
                columns["labels"].append(np.append(np.int32(IGNORE_INDEX), labels[:-1]))
        return Dataset.from_dict(columns)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of this copy of the dataset (of this worker), a few dozen bytes per lane."""
        return {
            "first_pack": self._first_pack,
            "num_given": self._num_given,
            "lanes": dict(self._lane_states),
            "first_epoch": self.first_epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes after `state`, which must come from the same rank and worker, with equally many ranks and workers."""
        self._first_pack, self._num_given = state["first_pack"], state["num_given"]
        self.first_epoch = state["first_epoch"]
        self._lane_states = {int(lane): lane_state for lane, lane_state in state["lanes"].items()}
        self._lanes: dict[int, Lane] = {}
        self._streams: list[Stream] = []

    def __iter__(self) -> Iterator[Pack]:
        worker = torch.utils.data.get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        self._require_divided_lanes(num_workers)
        step = self._dp_world_size * num_workers
        first_pack = self._first_pack + self._dp_rank + self._dp_world_size * worker_id
        self._own_lanes = range(1) if self.is_planned else range(first_pack % step, self.num_lanes, step)
        num_empty = 0
        while True:
            index = first_pack + step * self._num_given
            if self.is_planned:  # skips the packs of other ranks and workers
                for _ in range(step - 1 if self._num_given else index - self._first_pack):
                    self._lane(0).next_pack()
            # Counted before the yield, so that a state_dict taken while the pack is in use includes the pack.
            pack = self._pack(index)
            self._num_given += 1
            num_empty = 0 if pack.keys else num_empty + 1
            if self._ends and num_empty == len(self._own_lanes):
                if self._first_pack == 0 and self._num_given == num_empty and (index == 0 or not self.is_planned):
                    first = "".join(f": {each.reason}, {each.detail}" for each in pack.dropped_rows[:1])
                    raise DataError(f"no row can be trained on{first}; run `sftron inspect` to see the rows")
                return
            if pack.keys or num_workers > 1 or not self._ends:
                yield pack

    def _require_divided_lanes(self, num_workers: int) -> None:
        if self.takes_workers(num_workers):
            return
        wanted = self._dp_world_size * max(1, num_workers)
        fitting = [str(number) for number in range(1, self.num_lanes + 1) if self.num_lanes % number == 0]
        ranks = f"{self._dp_world_size} ranks"
        if (size := self._num_sharing) > 1:
            ranks = (
                f"{self._dp_world_size * size} ranks, which count as {ranks} because {size} share each pack (context),"
            )
        raise DataError(
            f"{ranks}{f' x {num_workers} workers' if num_workers else ''} do not divide data.num_lanes: "
            f"{self.num_lanes}; set ranks x workers to one of {', '.join(fitting)}; or, in a new run, "
            f"set data.num_lanes: {math.lcm(self.num_lanes, wanted)}"
        )

    def _pack(self, index: int) -> Pack:
        number = index % self.num_lanes
        lane = self._lane(number)
        rows = lane.next_pack()
        self._lane_states[number] = lane.state()
        conversations, dropped_rows = self._read_rows(rows)
        pack = lay_out(
            conversations,
            token_budget=self.token_budget,
            remove_cross_attention=self._remove_cross_attention,
            pad_id=self.preparation.chat_tokenizer.pad_id,
        )
        return replace(pack, index=index, lane=number, lane_state=self._lane_states[number], dropped_rows=dropped_rows)

    def _read_rows(self, rows: LanePack) -> tuple[Sequence[LabeledConversation], tuple[Dropped, ...]]:
        """Returns the conversations and the dropped rows of a pack; with planned packing, the rows are read here."""
        if not self.is_planned:
            return cast(tuple[LabeledConversation, ...], rows.conversations), rows.dropped_rows
        return read_measured(self.preparation, [*rows.conversations, *rows.dropped_rows])

    def _lane(self, number: int) -> Lane:
        # Made on first use, so that the first pack waits for one pool only.
        if number not in self._lanes:
            if self.is_planned:
                self.measure()
            fetcher = self._fetcher(number)
            packing = BestFitPacking() if self.is_best_fit else self.packing
            lane = Lane(fetcher, packing=packing, token_budget=self.token_budget, delay=self.pool_delay)
            if number in self._lane_states:
                lane.load_state(self._lane_states[number])
            self._lanes[number] = lane
        return self._lanes[number]

    def _fetcher(self, lane: int) -> Fetcher:
        # Streams are opened on first use: in the loader worker that reads them, and after lane states are loaded.
        if not self._streams:
            self._streams = self._open_streams()
        if self.preparation.weights is None:
            num_epochs = None if self.num_epochs is None else self.num_epochs - self.first_epoch
            options = {"num_epochs": num_epochs, "num_pooled_epochs": 1 if self.is_best_fit else 2}
            return EpochFetcher(lane, self.num_lanes, self._streams[0], **options)
        return MixtureFetcher(lane, self.num_lanes, self._streams, self.preparation.weights)

    def _open_streams(self) -> list[Stream]:
        """Returns one stream of all data sets' rows or, with weights, one stream per data set."""
        preparation = self.preparation
        if preparation.weights is None and not preparation.is_streamed:
            return [self._stream(0, preparation.num_rows or 0, preparation.key)]
        assert self.num_epochs is None
        sources = [dataset.source for dataset in preparation.datasets]
        return [
            self._stream(n, source if isinstance(source, StreamedSource) else len(source), partial(ConversationKey, n))
            for n, source in enumerate(sources)
        ]

    def _stream(self, dataset: int, rows: StreamedSource | int, key: Callable[[int, int], ConversationKey]) -> Stream:
        """Returns the stream of `rows` (their number, or a streamed source) in this data set's order."""
        options = {"seed": self.seed, "dataset": dataset, "first_epoch": self.first_epoch}
        if isinstance(rows, StreamedSource):
            start = min(map(partial(self._low_position, dataset), self._own_lanes))
            order = StreamOrder(rows, num_lanes=self.num_lanes, lanes=self._own_lanes, start=start, **options)
        else:
            order = ShuffledOrder(rows, stride=self.num_lanes, **options)

        def read(positions: Sequence[int]) -> Sequence[LabeledConversation | MeasuredRow | Dropped]:
            keys = [key(row, epoch) for row, epoch in order.rows(positions)]
            if self.is_planned:
                return [measured_row(key, self.measure()[self.preparation.row_number(key)]) for key in keys]
            return self.preparation.read_many(keys)

        return Stream(read, order.num_rows)

    def _low_position(self, dataset: int, lane: int) -> int:
        """Returns the first position of a data set's stream that the lane may read after its state."""
        if lane not in self._lane_states:
            return lane
        weights = self.preparation.weights
        numbers, _ = parse_state(self._lane_states[lane], None if weights is None else len(weights))
        return lane + self.num_lanes * numbers[dataset][0]
