"""A run that has ended, or was killed, opened again: its ledger, its checkpoints and its data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np

from sftron.config import load_config
from sftron.data.sources import EndOfStream, StreamedSource
from sftron.data.types import ConversationKey
from sftron.train import feed
from sftron.train.ledger import data_facts
from sftron.verify.dealt_rows import DealtStream
from sftron.verify.ledger_records import read_ledger
from sftron.verify.run_eras import Era, eras_of


class OpenedRun:
    """read: the ledger with all that was written; records: what counts of it. eras: see run_eras.py.

    overrides: of the run's configuration, as for data that has moved. Raises ValueError where the run has no ledger, or
    its data cannot be opened.
    """

    def __init__(self, folder: Path, overrides: Sequence[str] = ()) -> None:
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"{folder} is no run directory: it holds no config.yaml")
        self.folder = folder
        self.config = load_config(folder / "config.yaml", overrides)
        self.read = read_ledger(folder)
        self.records = self.read.effective()
        self.eras, self.era_problems = eras_of(self.read, folder / "checkpoints")
        self.preparation = feed.prepare(self.config, feed.load_chat_tokenizer(self.config))
        self.dataset = feed.make_dataset(self.config, self.preparation)
        self._fingerprint = data_facts(self.config, self.dataset)["fingerprint"]

    def has_data(self, era: Era) -> bool:
        """Whether the data of an era is that which is there now."""
        return era.stream[0] == self._fingerprint

    def rows_of(self, era: Era) -> tuple[np.ndarray, np.ndarray]:
        """The number of the pack of each row dealt in an era, and the rows."""
        packs = self.records.packs[self.records.rows[:, 0], 2]
        own = era.holds(packs)
        return packs[own], self.records.rows[own]

    def num_rows_of(self, era: Era, place: int) -> int | None:
        """Rows of a data set; a stream that does not tell is read to its end. None where it is no longer there."""
        if (told := era.data["datasets"][place]["rows"]) is not None:
            return told
        source = self.preparation.datasets[place].source if self.has_data(era) else None
        if not isinstance(source, StreamedSource):
            return None
        with suppress(EndOfStream):
            for row in count():
                source.raw(row)
        return source.num_rows

    def rewind(self) -> None:
        """Let streams be read from their first row again."""
        for dataset in self.preparation.datasets:
            if isinstance(dataset.source, StreamedSource):
                dataset.source.skip_to(0)

    def location(self, era: Era, source: int, row: int) -> str:
        """Of a row, file:line where the data is still there."""
        if self.has_data(era):
            return self.preparation.location(ConversationKey(source, row))
        return f"{era.data['datasets'][source]['name']}, row {row}"

    def name(self, era: Era, stream: DealtStream, code: int) -> str:
        source, row, epoch = stream.row(code)
        return f"{self.location(era, source, row)} in epoch {epoch}"
