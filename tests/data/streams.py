"""Small streams of rows held in memory, and what is to be compared of two packs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.formats.table import RowFormat
from sftron.data.prepare import DataOptions, DataSet, Preparation
from sftron.data.types import DataError, Pack, Row


class Rows:
    """A RowSource in memory. A row given as text cannot be read; the text is the reason."""

    def __init__(self, rows: Iterable[Row | str], name: str = "rows.jsonl") -> None:
        self.rows, self.name = list(rows), name

    @property
    def fingerprint(self) -> str:
        return json.dumps(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row = self.rows[index]
        if isinstance(row, str):
            raise DataError(f"{self.locate(index)}: {row}", reason=row)
        return row

    def locate(self, index: int) -> str:
        return f"{self.name}:{index + 1}"


def as_dataset(source: Rows, **options: Any) -> DataSet:
    return DataSet(source.name, source, RowFormat("messages"), **options)


def chat(*turns: str) -> Row:
    """chat("Hi", "Yo", "And?") is a row of a user, an assistant and a user message."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]}


OVERLONG = chat("word " * 60, "yes")
NOTHING_TRAINED = chat("a question that nobody answers")


def mixed_rows(num_rows: int) -> list[Row]:
    """Chats of many lengths; every seventh is too long for 48 tokens, every eleventh has nothing to train on."""
    rows = []
    for n in range(num_rows):
        row = chat(f"question {n}", f"answer {n} " + "and so on " * (n * 37 % 11))
        rows.append(OVERLONG if n % 7 == 5 else NOTHING_TRAINED if n % 11 == 3 else row)
    return rows


def make_dataset(rows: Iterable[Row | str], chat_tokenizer: ChatTokenizer, **options: Any) -> PackedDataset:
    """With packs of 96 tokens for conversations of at most 48; `options` are those of DataOptions and PackedDataset."""
    return make_mixture([as_dataset(Rows(rows))], chat_tokenizer, **options)


def make_mixture(datasets: Sequence[DataSet], chat_tokenizer: ChatTokenizer, **options: Any) -> PackedDataset:
    of_process = {name: options.pop(name) for name in ("dp_rank", "dp_world_size", "row_lengths") if name in options}
    defaults = {"sequence_length": 48, "micro_batch_size": 2, "pool_size": 5, "num_lanes": 6, "seed": 3}
    data_options = DataOptions(**defaults | options)
    return PackedDataset(Preparation(datasets, chat_tokenizer, data_options), data_options, **of_process)


def facts(pack: Pack) -> dict[str, Any]:
    """Returns all of a pack, arrays as bytes."""
    values = {name: getattr(pack, name) for name in Pack.__dataclass_fields__}
    return {name: value.tobytes() if hasattr(value, "tobytes") else value for name, value in values.items()}


def keys(packs: Iterable[Pack]) -> list[tuple[int, int, int]]:
    return [(key.source, key.row, key.epoch) for pack in packs for key in pack.keys]


def take(stream: Iterable[Pack], number: int) -> list[Pack]:
    return list(islice(stream, number))


def pretend_worker(monkeypatch: pytest.MonkeyPatch, worker_id: int, num_workers: int) -> None:
    """Makes the next datasets run as in this loader worker."""
    info = SimpleNamespace(id=worker_id, num_workers=num_workers) if num_workers else None
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: info)


def as_json(state: Mapping[str, Any]) -> Any:
    """Returns a state as a checkpoint gives it back: keys are text."""
    return json.loads(json.dumps(state))
