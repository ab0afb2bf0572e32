"""A machine that loses its power keeps what was synced, and perhaps no more: each name that a publish relies on is
synced before anything that it replaces is removed (law 12)."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftron.checkpoint.atomic import publish
from sftron.train.run_directory import RunDirectory

Calls = list[tuple[str, Path]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The syncs, renames (with the new name) and removals of trees, in order."""
    calls: Calls = []

    def record(module: Any, name: str, path_of: Callable[..., Path]) -> None:
        real = getattr(module, name)

        def recorded(*arguments: Any, **options: Any) -> Any:
            calls.append((name, path_of(*arguments)))
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, recorded)

    record(os, "fsync", lambda file: Path(f"/proc/self/fd/{file}").readlink())
    record(os, "rename", lambda _, new: Path(new))
    record(os, "replace", lambda _, new: Path(new))
    record(shutil, "rmtree", lambda path, **_: Path(path))
    return calls


def _write(folder: Path) -> None:
    (folder / "file").write_text("text")


def test_all_folders_above_a_new_folder_are_synced_after_its_rename(tmp_path: Path, calls: Calls) -> None:
    folder = tmp_path / "runs" / "run" / "checkpoints" / "step-1"
    publish(folder, _write)

    renamed = calls.index(("rename", folder))
    assert calls.index(("fsync", folder.parent)) > renamed
    for above in (tmp_path / "runs" / "run", tmp_path / "runs", tmp_path):
        assert ("fsync", above) in calls[renamed:], above


def test_a_replaced_folder_is_removed_only_after_the_new_name_is_synced(tmp_path: Path, calls: Calls) -> None:
    folder = tmp_path / "step-1"
    publish(folder, _write)
    calls.clear()
    publish(folder, _write)

    removed = next(number for number, (name, _) in enumerate(calls) if name == "rmtree")
    assert calls.index(("rename", folder)) < calls.index(("fsync", tmp_path)) < removed


def test_a_file_of_the_run_directory_is_synced_before_it_gets_its_name(tmp_path: Path, calls: Calls) -> None:
    RunDirectory(tmp_path).write("best.json", {"step": 1})

    assert [name for name, path in calls if path.name in ("best.json.tmp", "best.json")] == ["fsync", "replace"]


def test_a_link_is_synced_before_a_result_that_relies_on_it(tmp_path: Path, calls: Calls) -> None:
    RunDirectory(tmp_path).point("latest", tmp_path / "hf" / "step-1")

    assert [name for name, path in calls if path in (tmp_path, tmp_path / "latest")] == ["replace", "fsync"]
