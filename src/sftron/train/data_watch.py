"""Notices that data files were changed while a run reads them."""

from __future__ import annotations

from pathlib import Path

from sftron.config import Config
from sftron.data.sources import find_files
from sftron.data.types import DataError
from sftron.train import feed
from sftron.train.plan import RunPlan


class DataWatch:
    """What the system says of the data files (inode, size, times), as of its making; a data set of the Hub has none.

    A write in place that keeps the size and sets the time back still changes the time of the change.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stamps = self._look()

    def require_unchanged(self, plan: RunPlan) -> None:
        """Raises DataError, on all ranks, where some data set has other content than `plan` was made with.

        Every rank has to call it. Content is read only where a file was touched, as `feed.prepare` reads it.
        """
        problem = self._problem(plan) if plan.ranks.local_rank == 0 else None
        problems = [facts["problem"] for facts in plan.ranks.gather({"problem": problem})]
        if first := next(filter(None, problems), None):
            raise DataError(
                f"{first} was changed while the run reads it, so the steps since the last checkpoint may be of either "
                "content, and nothing is saved. Put it back, and the same command goes on from that checkpoint; "
                "checkpoints.allow_data_change: true goes on from there with the changed data"
            )

    def _problem(self, plan: RunPlan) -> str | None:
        stamps = self._look()
        if stamps == self._stamps:
            return None
        try:
            now = feed.prepare(self._config, plan.chat_tokenizer).fingerprint
        except DataError as error:
            return f"data.datasets ({error})"
        known = plan.preparation.fingerprint
        changed = [name for name in known if name.startswith("data.datasets") and known[name] != now.get(name)]
        if not changed:
            self._stamps = stamps
        places = [int(name.split(".")[2]) for name in changed if name.split(".")[2].isdigit()]
        return ", ".join(plan.preparation.source_names[place] for place in places) or None

    def _look(self) -> list[tuple[str, int, int, int, int]]:
        stamps = []
        for each in self._config.data.datasets:
            try:
                files = find_files(each.path, each.split) or []
                stats = [(file, Path(file).stat()) for file in files]
            except (OSError, DataError):
                stats = []  # opening them says what is wrong
            stamps += [(str(file), s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for file, s in stats]
        return stamps
