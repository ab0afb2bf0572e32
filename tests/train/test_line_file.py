"""A file of lines loses none to a full disk, and a run reports that somebody has deleted what it writes."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sftron.train import console, line_file
from sftron.train.line_file import LineFile
from sftron.train.metrics import StepMetrics
from sftron.train.run_logs import RunLogs
from tests.train.runs import make_config, result, run

GONE = "was deleted or moved while the run writes it"


@pytest.mark.parametrize("lose", [Path.unlink, lambda path: path.rename(path.with_name("elsewhere"))])
def test_a_file_that_is_gone_is_reported_once_and_another_in_its_place_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lose: Callable[[Path], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = LineFile(Path("metrics.jsonl"))
    file.append(b"1")
    os.chdir("/")  # the file is where it was opened
    file.append(b"2")
    path = tmp_path / "metrics.jsonl"
    assert path.read_bytes() == b"1\n2\n"
    assert GONE not in capsys.readouterr().out

    lose(path)
    path.write_bytes(b"another run's\n")
    file.append(b"3")
    file.append(b"4")
    file.close()
    assert path.read_bytes() == b"another run's\n"
    assert capsys.readouterr().out.count(f"metrics.jsonl {GONE}") == 1


@pytest.mark.parametrize("num_bytes", [1, 70_000])
def test_a_line_that_was_cut_off_is_removed_when_the_file_is_opened(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"whole\n" + b"x" * num_bytes)
    LineFile(path).close()
    assert path.read_bytes() == b"whole\n"


def test_on_a_full_disk_lines_wait_are_written_later_and_whole_and_lost_ones_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, room, write = LineFile(tmp_path / "lines"), 25, os.write
    lines = [b"%d: ten bytes" % number for number in range(9)]

    def write_some(target: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(target, data[: min(room, 7)])
        room -= written
        return written

    monkeypatch.setattr(line_file.os, "write", write_some)
    for line in lines[:6]:
        file.append(line)
    file.sync()
    printed = capsys.readouterr().out
    assert printed.count("cannot be written (No space left on device); its lines wait in memory") == 1
    room = 10_000
    file.append(lines[6])
    assert (tmp_path / "lines").read_bytes().splitlines() == lines[:7]
    assert capsys.readouterr().out == ""
    room = 0
    for line in lines[7:]:
        file.append(line)
    file.close()
    assert "lacks the last 2 lines, which could not be written" in capsys.readouterr().out


def test_a_rank_that_does_not_print_warns_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every rank has a ledger."""
    console.speak(False)
    file = LineFile(tmp_path / "ledger-rank-1.jsonl")
    (tmp_path / "ledger-rank-1.jsonl").unlink()
    file.append(b"1")
    file.close()
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count(f"ledger-rank-1.jsonl {GONE}")) == ("", 1)


def test_a_run_whose_directory_is_deleted_goes_on_and_reports_it(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, model_folder, tokens__train_steps=4, checkpoints__interval=2)
    write = RunLogs.write_step

    def write_and_delete(self: RunLogs, step: StepMetrics) -> None:
        write(self, step)
        if step.step == 3:
            shutil.rmtree(config.run_dir)

    monkeypatch.setattr(RunLogs, "write_step", write_and_delete)
    trainer = run(config)
    assert result(trainer)["status"] == "completed"
    assert (config.run_dir / "checkpoints" / "step-4").is_dir()
    printed = capsys.readouterr().out
    assert printed.count(f"metrics.jsonl {GONE}") == printed.count(f"console.log {GONE}") == 1
