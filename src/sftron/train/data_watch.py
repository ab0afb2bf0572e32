"""Detects changes of data files while a run reads them."""

from __future__ import annotations

from pathlib import Path

from sftron.config import Config
from sftron.data.sources import find_files
from sftron.data.types import DataError
from sftron.train import run_data
from sftron.train.setup import Setup


class DataWatch:
    """A snapshot of the metadata of all data files (inode, size, mtime, ctime); data sets on the Hub are left out.

    A write in place that keeps the size and restores the mtime still changes the ctime.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stamps = self._look()

    def require_unchanged(self, setup: Setup) -> None:
        """Raises DataError on all ranks if the content of a data set has changed since the run was set up.

        Every rank calls this. The content is read only if the metadata of a file has changed.
        """
        problem = self._problem(setup) if setup.ranks.local_rank == 0 else None
        problems = [facts["problem"] for facts in setup.ranks.gather({"problem": problem})]
        if first := next(filter(None, problems), None):
            raise DataError(
                f"{first} was changed while the run reads it, so the steps since the last checkpoint may be of either "
                "content, and nothing is saved. Put it back, and the same command goes on from that checkpoint; "
                "checkpoints.allow_data_change: true goes on from there with the changed data"
            )

    def _problem(self, setup: Setup) -> str | None:
        """Returns the names of the data sets that have changed; None if there are none."""
        stamps = self._look()
        if stamps == self._stamps:
            return None
        saved = setup.data.preparation.fingerprint
        try:
            now = run_data.open_data(self._config, setup.data.chat_tokenizer).fingerprint
        except DataError as error:
            return f"data.datasets ({error})"
        changed = [name for name in saved if name.startswith("data.datasets") and saved[name] != now.get(name)]
        if not changed:
            self._stamps = stamps
        indices = [int(name.split(".")[2]) for name in changed if name.split(".")[2].isdigit()]
        return ", ".join(setup.data.preparation.source_names[index] for index in indices) or None

    def _look(self) -> list[tuple[str, int, int, int, int]]:
        stamps = []
        for each in self._config.data.datasets:
            try:
                files = find_files(each.path, each.split) or []
                stats = [(file, Path(file).stat()) for file in files]
            except (OSError, DataError):
                stats = []  # opening the data set reports the problem
            stamps += [(str(file), s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for file, s in stats]
        return stamps
