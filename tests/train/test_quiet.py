"""`sftron train --quiet` and `--verbose`."""

from pathlib import Path

import pytest

from sftron.commands.train import run as train
from sftron.config import load_config
from sftron.train.trainer import open_trainer
from tests.train.runs import make_model_folder, settings, write_config, write_rows


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_rows(tmp_path / "rows.jsonl", 8)
    folder = make_model_folder(tmp_path / "model")
    return write_config(tmp_path / "config.yaml", settings(tmp_path, folder, tokens__train_steps=30))


@pytest.mark.parametrize("option", ["-q", "--quiet"])
def test_a_quiet_run_prints_warnings_and_the_outcome_and_logs_all(
    tmp_path: Path, config: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(["--config", str(config), option]) == 0
    printed = capsys.readouterr().out.splitlines()
    logged = (tmp_path / "runs" / "run" / "console.log").read_text().splitlines()
    warnings = [line for line in logged if line.startswith("WARNING")]
    assert warnings  # the rows repeat
    assert printed == [*warnings, f"completed  after step 30; everything is in {tmp_path / 'runs' / 'run'}"]
    assert len(logged) > 30


def test_the_next_run_of_a_process_is_not_quiet(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(config), "--tokens.train_steps=2"]
    train([*arguments, "--quiet", "--general.run_name=quiet"])
    capsys.readouterr()
    open_trainer(load_config(arguments[1], [*arguments[2:], "--general.run_name=next"]))
    assert "projection" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "shows"), [("-v", True), ("--verbose", True), ("--optimizer.learning_rate=0.01", False)]
)
def test_a_verbose_run_shows_where_an_error_was_raised(
    tmp_path: Path, config: Path, option: str, shows: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text("[]\n")
    assert train(["--config", str(config), option]) == 2
    error = capsys.readouterr().err
    assert "rows.jsonl" in error
    assert ("Traceback (most recent call last)" in error) == shows


def test_a_quiet_start_says_what_it_did_not_do(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(config), "--tokens.train_steps=2", "--quiet"]
    assert train([*arguments, "--dry-run"]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("WARNING")]
    assert shown == ["dry run    all checks passed; nothing was trained or written"]
    assert train(arguments) == 0
    capsys.readouterr()
    assert train([*arguments, "--optimizer.learning_rate=0.5"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("completed  before, after step 2; nothing is left to do")
    assert "optimizer.learning_rate" in output
