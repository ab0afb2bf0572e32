"""What a run writes line by line is there although somebody deletes it in the midst; what is lost is said."""

import shutil
from pathlib import Path

import pytest

from sftron.train import console
from sftron.train.line_file import LineFile
from sftron.train.run_logs import RunLogs
from sftron.train.step_metrics import StepMetrics
from tests.train.runs import make_config, metrics, result, run


def test_a_file_that_is_deleted_begins_anew_and_that_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console.speak(True)
    folder = tmp_path / "run"
    folder.mkdir()
    file = LineFile(folder / "metrics.jsonl")
    file.append(b"1")
    shutil.rmtree(folder)
    file.append(b"2")
    file.append(b"3")
    file.close()
    assert (folder / "metrics.jsonl").read_bytes() == b"2\n3\n"
    said = capsys.readouterr().out
    assert said.count("metrics.jsonl was deleted while the run wrote it; it begins anew with what follows") == 1


def test_a_console_log_that_is_deleted_holds_what_is_said_of_that(tmp_path: Path) -> None:
    console.speak(True)
    path = tmp_path / "console.log"
    log = LineFile(path)
    console.log_to(log.append)
    console.say("first")
    path.unlink()
    console.say("second")
    console.log_to(None)
    log.close()
    lines = path.read_text().splitlines()
    assert "second" in lines
    assert sum("console.log was deleted" in line for line in lines) == 1
    assert "first" not in lines


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
    assert [record["step"] for record in metrics(config.run_dir)] == [4, 5, 6]
    assert result(trainer)["status"] == "completed"
    assert (config.run_dir / "checkpoints" / "step-6").is_dir()
    assert "metrics.jsonl was deleted while the run wrote it" in capsys.readouterr().out
