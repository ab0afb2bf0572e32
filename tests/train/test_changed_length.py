"""A run whose length is changed trains every row of its epochs once (law 6)."""

from pathlib import Path
from typing import Any

import pytest

from sftron.checks.opened_run import OpenedRun
from sftron.checks.replay import audit_run
from sftron.data.lanes.lane import ConsumedSet, num_consumed
from sftron.train.run import RunLength
from tests.train.runs import NUM_ROWS, make_config, metrics, run


def lasting(num_epochs: int, **options: Any) -> dict[str, Any]:
    return {**options, "tokens__train_steps": None, "tokens__train_epochs": num_epochs}


@pytest.mark.parametrize(
    ("num_steps", "num_epochs", "num_lanes"),
    [(5, 1, 4), (5, 1, "auto"), (6, 1, 4), (11, 2, 4), (10, 2, 1)],
)
def test_steps_and_then_epochs_end_when_the_last_epoch_is_whole(
    tmp_path: Path,
    model_folder: Path,
    capsys: pytest.CaptureFixture[str],
    num_steps: int,
    num_epochs: int,
    num_lanes: Any,
) -> None:
    options = {"checkpoints__export_hf": False, "checkpoints__interval": 1, "data__num_lanes": num_lanes}
    run(make_config(tmp_path, model_folder, **options, tokens__train_steps=num_steps))
    capsys.readouterr()
    config = make_config(tmp_path, model_folder, **lasting(num_epochs, **options))
    ended = run(config)
    folder, beyond = ended.directory.folder, ended.progress.rows_beyond

    found = audit_run(OpenedRun(folder))
    assert found.passed, found.as_text()
    assert [each.verdict for each in found.epochs if each.epoch < num_epochs] == ["whole"] * num_epochs
    assert sum(each.trained for each in found.epochs if each.epoch >= num_epochs) == beyond > 0
    assert f"{beyond} rows beyond tokens.train_epochs: {num_epochs} are trained already" in capsys.readouterr().out
    assert ended.progress.rows == NUM_ROWS * num_epochs + beyond
    # The rate has come down to its end with the last rows.
    assert metrics(folder)[-1]["learning_rate"] < 0.2 * 1e-2
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    run(config)
    assert files == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_run_whose_epochs_are_whole_has_no_step_left_and_may_go_on_to_more(
    tmp_path: Path, model_folder: Path
) -> None:
    options = {"checkpoints__export_hf": False}
    long = run(make_config(tmp_path, model_folder, **options, tokens__train_steps=20))
    assert long.progress.rows > 2 * NUM_ROWS
    short = run(make_config(tmp_path, model_folder, **lasting(1, **options)))
    assert short.progress.step == 20
    ended = run(make_config(tmp_path, model_folder, **lasting(5, **options)))
    assert ended.progress.rows == 5 * NUM_ROWS
    assert audit_run(OpenedRun(ended.directory.folder)).passed


def test_a_run_that_misses_rows_of_its_epochs_fails_and_says_how_many(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunLength, "is_done", lambda length, progress: progress.rows >= NUM_ROWS - 7)
    with pytest.raises(
        RuntimeError, match=rf"trained 2[3-9] of {NUM_ROWS} rows in tokens\.train_epochs: 1, but counted"
    ):
        run(make_config(tmp_path, model_folder, **lasting(1)))


@pytest.mark.parametrize("num_lanes", [1, 3])
@pytest.mark.parametrize("num_positions", [0, 1, 7, 20])
def test_consumed_positions_are_counted_below_the_end_of_the_epochs(num_lanes: int, num_positions: int) -> None:
    positions = {0, 1, 2, 3, 4, 6, 9, 10, 15, 22}
    lanes = {n: ConsumedSet() for n in range(num_lanes)}
    for position in positions:
        lanes[position % num_lanes].add(position // num_lanes, 1)
    states = {str(n): f"{each.low:x}:{each.above:x}" for n, each in lanes.items()}
    expected = sum(position < num_positions for position in positions)
    assert num_consumed(states, num_lanes, num_positions) == expected
