"""Data sets of the Hub: one configuration of one commit, as the datasets library prepares or streams it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sftron.data.json_text import excerpt
from sftron.data.sources.arrow import ArrowSource
from sftron.data.sources.streaming import RowStream, read_table
from sftron.data.types import DataError
from sftron.hub_revision import commit_of
from sftron.regular_file import where_missing

_FINGERPRINT_ROWS = 8


@dataclass(frozen=True, slots=True)
class HubSplit:
    """A split of a data set of the Hub.

    Attributes:
        config: The configuration; None is the only or the default one.
        revision: A branch, tag or commit; None is the branch main.
    """

    path: str
    split: str
    config: str | None = None
    revision: str | None = None

    def open(self, max_row_bytes: int) -> ArrowSource:
        """Opens the split in the datasets library's cache, and downloads it if necessary. Raises DataError."""
        with self._loading() as (builder, commit):
            builder.download_and_prepare()
            table = builder.as_dataset(split=self.split)
            source = ArrowSource(self.name, [Path(file["filename"]) for file in table.cache_files], max_row_bytes)
            source.fingerprint = self._fingerprint(builder, commit, source.fingerprint)
        return source

    def stream(self, max_row_bytes: int) -> RowStream:
        """Streams the split. Skipped rows are read but not converted. Raises DataError."""
        with self._loading() as (builder, commit):
            table = builder.as_streaming_dataset(split=self.split).with_format("arrow")
            first = [row for part in table.take(_FINGERPRINT_ROWS).iter(1) for row in part.to_pylist()]
            fingerprint = self._fingerprint(builder, commit, [self.path, first])
        return RowStream(self.name, fingerprint, None, partial(read_table, table, self.name, max_row_bytes))

    @property
    def name(self) -> str:
        parts = [each for each in (self.config, self.split) if each not in (None, "train")]
        return f"{self.path} ({', '.join(parts)})" if parts else self.path

    def _fingerprint(self, builder: Any, commit: str, rows: Any) -> str:
        """Returns a hash of the commit, and of rows that were read, as a cache may hold anything.

        The library's own fingerprint depends on the cache's files and their times.
        """
        facts = [commit, builder.config.name, self.split, rows]
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()

    def commit(self) -> str:
        """Returns the commit that the revision names now. Raises DataError."""
        with self._refused():
            return commit_of(self.path, "dataset", self.revision)

    @contextmanager
    def _loading(self) -> Iterator[tuple[Any, str]]:
        """Yields the library's builder of the data set and its commit. Turns any error into a DataError."""
        import datasets  # slow to import

        commit = self.commit()
        with self._refused():
            builder = datasets.load_dataset_builder(self.path, self.config, revision=commit)
            if builder.hash != commit:  # if the Hub fails, the library takes any commit that it has in its cache
                problem = f"commit {commit} cannot be loaded from the Hub, but the cache has {builder.hash}"
                raise DataError(f"{self.path}: {problem}; try again, or set revision to the cached commit")
            yield builder, commit

    @contextmanager
    def _refused(self) -> Iterator[None]:
        """Turns any error into a DataError."""
        try:
            yield
        except DataError:
            raise
        except Exception as error:  # network, authentication and unknown names raise many types
            at = "" if self.revision is None else f" of revision {self.revision}"
            problem = f"is not a local file or folder{where_missing(self.path)}, and split {excerpt(self.split)}{at} "
            problem += "cannot be loaded from the Hub"
            reason = " ".join(str(error).split())
            raise DataError(f"{self.path}: {problem}: {reason}; `config` names a configuration") from error
