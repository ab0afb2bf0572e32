"""One wandb run for a run however often it goes on; another for a copy, and for a run that begins with another's."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from sftron.train.resume import Start
from sftron.train.wandb_identity import FILE, find_identity


@pytest.fixture(autouse=True)
def _no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)


def checkpoint(directory: Path, step: int, wandb: Any, *, weights_only: bool = False) -> Start:
    folder = directory / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    state = {"step": step, "wandb": wandb}
    (folder / "state.json").write_text(json.dumps(state))
    return Start(folder, {} if weights_only else state, [], weights_only)


def make(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def test_a_run_keeps_its_id_with_and_without_checkpoints(tmp_path: Path) -> None:
    first = find_identity(tmp_path, "run", None)
    assert first.continued_from is None
    assert find_identity(tmp_path, "run", None) == first
    assert find_identity(tmp_path, "run", checkpoint(tmp_path, 4, first.state())) == first


def test_a_run_that_was_moved_or_renamed_keeps_it(tmp_path: Path) -> None:
    first = find_identity(make(tmp_path / "a"), "a", None)
    (tmp_path / "a").rename(tmp_path / "b")
    assert find_identity(tmp_path / "b", "b", None).id == first.id


def test_a_run_directory_that_is_reached_by_another_path_is_no_copy(tmp_path: Path) -> None:
    first = find_identity(make(tmp_path / "a"), "a", None)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert find_identity(tmp_path / "link", "a", None).id == first.id


def test_a_copy_of_a_run_is_another_run_and_says_of_which(tmp_path: Path) -> None:
    first = find_identity(make(tmp_path / "a"), "a", None)
    start = checkpoint(tmp_path / "a", 4, first.state())
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    start = Start(tmp_path / "b/checkpoints/step-4", start.state, [])
    copy = find_identity(tmp_path / "b", "b", start)

    assert copy.id != first.id
    assert copy.continued_from == {"run_name": "a", "wandb_id": first.id, "step": 4}
    assert find_identity(tmp_path / "b", "b", start) == copy
    assert find_identity(tmp_path / "a", "a", None) == first


def test_where_the_file_is_lost_the_checkpoint_has_it(tmp_path: Path) -> None:
    first = find_identity(tmp_path, "run", None)
    start = checkpoint(tmp_path, 4, first.state())
    (tmp_path / FILE).unlink()
    assert find_identity(tmp_path, "run", start).id == first.id


def test_checkpoints_that_were_copied_alone_are_of_the_run_that_wrote_them(tmp_path: Path) -> None:
    start = checkpoint(tmp_path, 4, {"id": "theirs", "run_name": "other"})
    found = find_identity(tmp_path, "run", start)
    assert found.id != "theirs"
    assert found.continued_from == {"run_name": "other", "wandb_id": "theirs", "step": 4}


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_run_that_begins_with_anothers_checkpoint_is_a_new_one_and_says_so(
    tmp_path: Path, weights_only: bool
) -> None:
    """Though that run had the same name."""
    theirs = checkpoint(tmp_path / "a", 7, {"id": "theirs", "run_name": "run"}, weights_only=weights_only)
    ours = find_identity(make(tmp_path / "b"), "run", theirs)
    assert ours.id != "theirs"
    assert ours.continued_from == {"run_name": "run", "wandb_id": "theirs", "step": 7}
    assert find_identity(tmp_path / "b", "run", theirs) == ours


def test_a_checkpoint_without_wandb_is_where_a_run_comes_from_all_the_same(tmp_path: Path) -> None:
    theirs = checkpoint(tmp_path / "a", 7, None)
    ours = find_identity(make(tmp_path / "b"), "run", theirs)
    assert ours.continued_from == {"run_name": None, "wandb_id": None, "step": 7}


def test_the_id_of_a_sweep_goes_before_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_identity(tmp_path, "run", None)
    monkeypatch.setenv("WANDB_RUN_ID", "trial3")
    assert find_identity(tmp_path, "run", None).id == "trial3"
    monkeypatch.delenv("WANDB_RUN_ID")
    assert find_identity(tmp_path, "run", None).id == "trial3"


@pytest.mark.parametrize("broken", ["", "[]", "{}", '{"id": "../x", "folder": "/", "run_name": "r"}', "[" * 9_000])
def test_a_file_that_is_none_of_ours_is_written_anew(tmp_path: Path, broken: str) -> None:
    (tmp_path / FILE).write_text(broken)
    found = find_identity(tmp_path, "run", checkpoint(tmp_path, 1, {"id": "a/../b", "run_name": 3}))
    assert found.continued_from == {"run_name": None, "wandb_id": None, "step": 1}
    assert json.loads((tmp_path / FILE).read_text())["id"] == found.id


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_takes_no_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    find_identity(tmp_path, "run", None)
    tmp_path.chmod(0o700)
    assert "cannot be written" in capsys.readouterr().out
