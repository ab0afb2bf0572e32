"""A run goes on when somebody deletes or moves what it writes, and says so."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sftron.train import console
from sftron.train.line_file import LineFile
from sftron.train.run_logs import RunLogs
from sftron.train.step_metrics import StepMetrics
from tests.train.runs import make_config, result, run

GONE = "was deleted or moved while the run writes it"


@pytest.mark.parametrize("lose", [Path.unlink, lambda path: path.rename(path.with_name("elsewhere"))])
def test_a_file_that_is_gone_is_said_once_and_another_in_its_place_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lose: Callable[[Path], object]
) -> None:
    console.speak(True)
    monkeypatch.chdir(tmp_path)
    file = LineFile(Path("metrics.jsonl"))
    file.append(b"1")
    os.chdir("/")  # the file's place is where it was begun
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


def test_a_rank_that_does_not_speak_says_it_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A ledger is of every rank."""
    console.speak(False)
    file = LineFile(tmp_path / "ledger-rank-1.jsonl")
    (tmp_path / "ledger-rank-1.jsonl").unlink()
    file.append(b"1")
    file.close()
    console.speak(True)
    told = capsys.readouterr()
    assert (told.out, told.err.count(f"ledger-rank-1.jsonl {GONE}")) == ("", 1)


def test_of_a_console_log_that_is_gone_one_is_told_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console.speak(True)
    log = LineFile(tmp_path / "console.log")
    console.log_to(log.append)
    (tmp_path / "console.log").unlink()
    console.say("first")
    console.say("second")
    console.log_to(None)
    log.close()
    assert capsys.readouterr().out.count(f"console.log {GONE}") == 1


def test_a_run_whose_directory_is_deleted_goes_on_and_says_so(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, model_folder, tokens__train_steps=6, checkpoints__interval=2)
    write = RunLogs.write_step

    def write_and_delete(self: RunLogs, step: StepMetrics) -> None:
        write(self, step)
        if step.step == 3:
            shutil.rmtree(config.run_dir)

    monkeypatch.setattr(RunLogs, "write_step", write_and_delete)
    trainer = run(config)
    assert result(trainer)["status"] == "completed"
    assert (config.run_dir / "checkpoints" / "step-6").is_dir()
    said = capsys.readouterr().out
    assert said.count(f"metrics.jsonl {GONE}") == said.count(f"console.log {GONE}") == 1
