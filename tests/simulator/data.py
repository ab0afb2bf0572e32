"""Stand-ins for rows and loader workers. Lanes, packing, streams' orders and the loader itself are the real ones."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from sftron.config import Config
from sftron.data.dataset import PackedDataset
from sftron.data.formats.table import RowFormat
from sftron.data.prepare import DataSet, Preparation
from sftron.data.sources import RowList, StreamedSource
from sftron.data.sources.streaming import RowStream
from sftron.data.types import IGNORE_INDEX, ConversationKey, Dropped, LabeledConversation, Role
from sftron.train.build_data import data_options
from tests.simulator.life import here

_AHEAD = 2
"""The most packs that a worker makes ahead; torchdata's prefetch_factor."""


def num_rows_of(config: Config) -> int:
    """Returns the number of rows of all data sets: the path of each is its number of rows."""
    return sum(int(each.path) for each in config.data.datasets)


def is_dropped(row: int) -> bool:
    return row % 19 == 11


class MadeUpRows(Preparation):
    """Rows of made-up ids, of which two of three are short, and every 19th is dropped."""

    def __init__(self, config: Config) -> None:
        tokenizer: Any = SimpleNamespace(
            pad_id=0, fingerprint={"tokenizer": "none"}, template=SimpleNamespace(date=None), tokenizer=range(1000)
        )
        datasets = [
            DataSet(each.path, _source(int(each.path), each.streaming), RowFormat("messages"), weight=each.weight)
            for each in config.data.datasets
        ]
        super().__init__(datasets, tokenizer, data_options(config))
        self._rows: dict[int, LabeledConversation | Dropped] = {}

    def read_many(self, keys: Sequence[ConversationKey]) -> list[LabeledConversation | Dropped]:
        if self.is_streamed:
            for key in keys:  # a stream holds exactly the rows that are asked for
                assert self.datasets[key.source].source[key.row] == {"row": key.row}
        return [replace(self._row(key), key=key) for key in keys]

    tokenize_many = read_many  # pyright: ignore[reportAssignmentType]  # of which only the lengths are read

    def of_process(self) -> MadeUpRows:
        """Returns these rows as another process has them, in which streams have positions of their own."""
        own = copy.copy(self)
        own.datasets = tuple(replace(each, source=copy.copy(each.source)) for each in self.datasets)
        return own

    def _row(self, key: ConversationKey) -> LabeledConversation | Dropped:
        row = self.row_number(key)
        if row not in self._rows:
            self._rows[row] = Dropped("overlong", "made up", key) if is_dropped(row) else _conversation(row, key)
        return self._rows[row]


def _source(num_rows: int, is_streamed: bool) -> RowList | StreamedSource:
    rows = [{"row": row} for row in range(num_rows)]
    if not is_streamed:
        return RowList(rows)
    raws: list[Any] = [SimpleNamespace(read=lambda row=row: row, location="made up") for row in rows]
    return StreamedSource(RowStream("stream", "made up", None, lambda first: iter(raws[first:])))


def _conversation(row: int, key: ConversationKey) -> LabeledConversation:
    length = 4 + row * 7 % 5 + (row % 3 == 0) * (8 + row % 4)
    ids = (np.arange(length, dtype=np.int32) * 31 + row * 17) % 997 + 1
    labels = np.append(ids[1:], IGNORE_INDEX).astype(np.int32)
    weights = (labels != IGNORE_INDEX).astype(np.float32)
    return LabeledConversation(ids, labels, weights, np.full(length, Role.ASSISTANT, np.uint8), key)


class SimulatedLoader:
    """A StatefulDataLoader whose workers are copies of the dataset, which make packs ahead.

    A worker that dies or hangs takes what it has made with it. The loader raises torch's error when its turn comes.
    """

    def __init__(self, dataset: Any, *, num_workers: int, **_: Any) -> None:
        self.dataset, self.num_workers = dataset, num_workers

    def __iter__(self) -> Iterator[Any]:
        return self._in_turn() if self.num_workers else self._alone()

    def _alone(self) -> Iterator[Any]:
        for pack in self.dataset:
            here()[0].machine.event("pack")
            yield pack

    def _in_turn(self) -> Iterator[Any]:
        life, rank = here()
        workers = [iter(self._copy()) for _ in range(self.num_workers)]
        made: list[deque[Any]] = [deque() for _ in workers]
        lost: dict[int, str] = {}
        for turn in itertools.count():
            own = turn % self.num_workers
            life.machine.event("pack", f"worker {own}")
            if rank in life.worker_faults:
                lost[life.chance.randrange(self.num_workers)] = life.worker_faults.pop(rank)
            if own in lost:
                raise RuntimeError(f"DataLoader {'worker (pid 1) is killed' if lost[own] == 'dies' else 'timed out'}")
            for number, queue in enumerate(made):
                while len(queue) < (number == own) or (len(queue) < _AHEAD and life.chance.random() < 0.3):
                    info = SimpleNamespace(id=number, num_workers=self.num_workers)
                    with patch("torch.utils.data._utils.worker._worker_info", info):
                        queue.append(next(workers[number], None))
            if (pack := made[own].popleft()) is None:
                return
            yield pack

    def _copy(self) -> Any:
        """Returns the dataset as a forked worker has it."""
        own = copy.copy(self.dataset)
        own._dataset = copy.copy(self.dataset._dataset)
        own._dataset.preparation = own._dataset.preparation.of_process()
        own.load_state_dict(self.dataset.state_dict())
        return own


_PREPARED: dict[str, tuple[MadeUpRows, Sequence[int | str] | None]] = {}


def prepared(config: Config) -> tuple[MadeUpRows, Sequence[int | str] | None]:
    """Returns the rows of a configuration, and their lengths if their packing is planned; made once."""
    name = config.model_dump_json(include={"data", "tokens"})
    if name not in _PREPARED:
        rows = MadeUpRows(config)
        dataset = PackedDataset(rows, data_options(config))
        _PREPARED[name] = rows, (dataset.measure() if dataset.is_planned else None)
    return _PREPARED[name]
