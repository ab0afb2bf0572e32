"""The simulator of training faults finds each fault that is put back on purpose, and replays a seed to the bit."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest

from sftron.checkpoint import atomic, checkpoint, shards
from sftron.data.lanes.lane import EpochFetcher
from sftron.data.loader import PackLoader
from sftron.train import exports, saving
from sftron.train.logs import run_logs
from tests.simulator.draws import Kind
from tests.simulator.simulate import main, run_seeds

# --- Faults that are put back on purpose ---


def _unsynced_file(path: Path, chunks: Any) -> dict[str, Any]:
    content = b"".join(map(bytes, chunks))
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    os.write(file, content)
    os.close(file)
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _sync_folders_alone(path: Path, real: Callable[[Path], None] = atomic.sync) -> None:
    if path.is_dir():
        real(path)


def _keep_all_lines(path: Path, last_step: int | None, real: Callable[..., int] = run_logs._kept_size) -> int:
    return real(path, None)


def _restart_epoch(self: EpochFetcher, state: str, real: Callable[..., None] = EpochFetcher.load_state) -> None:
    real(self, state)
    assert self._num_rows is not None
    rows = self._num_rows // self._num_lanes
    self._next = self._consumed.low = self._consumed.low // rows * rows
    self._consumed.above = 0


def _point_before_export(
    self: exports.RunExports, real: Callable[..., Path] = exports.RunExports.export, **options: Any
) -> Path:
    if self.setup.ranks.is_main:
        self.directory.point("latest", self.directory.hf(self.progress.step))
    return real(self, **options)


def _without_optimizer(
    folder: Path, step: int, shards: Any, real: Callable[..., Path] = saving.write_checkpoint, **options: Any
) -> Path:
    return real(folder, step, {**shards, "optimizer": {}}, **options)


def _count_handed_over(self: PackLoader, packs: Any) -> Iterator[Any]:
    """Counts a pack when a worker has handed it over, not when it is trained; the next one is fetched before it is."""
    waiting = None
    while (pack := self._wait_for(lambda: next(packs, None))) is not None:
        self._next_pack = self._dataset.round_after(pack.index)
        self._lanes[pack.lane] = pack.lane_state
        if waiting is not None:
            yield self._collate(waiting)
        waiting = pack


FAULTS: dict[str, list[tuple[Any, str, Any]]] = {
    "a manifest is written before its files are on disk": [
        (checkpoint, "write_file", _unsynced_file),
        (shards, "write_file", _unsynced_file),
        (atomic, "sync", _sync_folders_alone),
    ],
    "metrics.jsonl counts a step twice after a resume": [(run_logs, "_kept_size", _keep_all_lines)],
    "a lane restarts its epoch": [(EpochFetcher, "load_state", _restart_epoch)],
    "latest names an export that is not written yet": [(exports.RunExports, "export", _point_before_export)],
    "weights that are not finite replace a healthy checkpoint": [
        (saving.Saver, "is_healthy", lambda *_: True),
    ],
    "progress is saved without its optimizer": [(saving, "write_checkpoint", _without_optimizer)],
    "the pack of a worker that dies is lost": [(PackLoader, "_batches", _count_handed_over)],
}


@contextmanager
def put_back(name: str) -> Iterator[None]:
    patches = [patch.object(*each) for each in FAULTS[name]]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


_SEEDS = range(40)
"""Few, so that it takes seconds; `make simulate` runs 100,000."""


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_that_is_put_back_is_found(name: str) -> None:
    with put_back(name):
        assert any(found.violations for found in run_seeds(_SEEDS))


def test_everything_holds_whatever_fails() -> None:
    found = list(run_seeds(_SEEDS))

    assert not [each for each in found if each.violations]
    assert {*sum((each.faults for each in found), Counter())} == {*get_args(Kind)}


def test_a_seed_is_replayed_to_the_bit_whatever_ran_before_it() -> None:
    events: list[str] = []
    *_, alone = run_seeds(range(7, 8), on_event=events.append)
    *_, after_others = run_seeds(range(5, 8))

    assert alone == after_others
    assert len(events) > 100


def test_a_result_that_cannot_be_written_and_no_run_are_refused_before_hours_of_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    for arguments, message in (
        (["--out", str(missing / "found.json")], f"{missing} is no folder; make it, or give another file"),
        (["--runs", "0"], "--runs 0: wanted at least 1, as no run shows nothing"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err
