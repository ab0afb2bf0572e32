"""The run directory on file systems that lack something, and beside what a person has put there."""

import errno
import fcntl
from pathlib import Path
from typing import Any

import pytest

from sftron.train.run_directory import RunDirectory


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_said_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def lockf(*_: Any) -> None:
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    RunDirectory(tmp_path / "run").acquire()
    assert f"WARNING    {tmp_path / 'run'} cannot be locked (no locks here): " in capsys.readouterr().out
    assert (tmp_path / "run/lock").read_text().startswith("process ")


@pytest.mark.parametrize("name", ["latest", "best"])
def test_a_real_folder_in_the_place_of_a_link_is_refused_before_training(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"{name} is no link, .*; move it away"):
        RunDirectory(tmp_path).acquire()


def test_a_link_that_cannot_be_made_at_the_end_is_said_and_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path)
    directory.hf(3).mkdir(parents=True)
    (tmp_path / "latest").mkdir()
    directory.point("latest", directory.hf(3))
    assert f"WARNING    {tmp_path / 'latest'} cannot name {directory.hf(3)}" in capsys.readouterr().out
