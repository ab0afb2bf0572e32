"""Each run of a sweep has a checked configuration and a directory of its own, which is never mistaken for another's."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from sftron.sweep.planned_run import PlannedRun, plan_runs
from sftron.sweep.sweep_file import SweepError, read_sweep_file
from tests.conftest import ROOT
from tests.sweep.sweeps import write_run, write_sweep


def plan(path: Path, wandb_mode: str = "disabled") -> list[PlannedRun]:
    return plan_runs(read_sweep_file(path), wandb_mode=wandb_mode)


def with_command(path: Path, change: dict[str, str | None]) -> Path:
    """Words of the command replaced, or left out."""
    tree = yaml.safe_load(path.read_text())
    words = [change.get(word, word) for word in tree["command"]]
    path.write_text(yaml.safe_dump({**tree, "command": [word for word in words if word is not None]}))
    return path


def test_the_ablation_of_the_toggles_has_twelve_configurations_with_a_directory_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    runs = plan(Path("configs/sweep_toggles.yaml"))
    assert len({run.folder for run in runs}) == 12
    assert all(run.folder.parent == Path("runs/sweep_toggles") for run in runs)
    run = runs[3]
    assert run.name == "completions_false-isolated_false-seed_1"
    assert not run.config.data.train_on_completions_only
    assert not run.config.data.remove_cross_attention
    assert run.config.logging.wandb.mode == "disabled"


def test_wandb_gets_the_mode_that_was_asked_for(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, {"general.seed": {"value": 1}})
    (run,) = plan(path, "offline")
    assert run.config.logging.wandb.mode == "offline"


def test_runs_that_would_share_a_directory_are_refused_with_a_name_to_use(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, {"general.seed": {"values": [1, 2]}, "data.num_workers": {"value": 0}})
    tree = yaml.safe_load(path.read_text())
    tree["command"] = [word for word in tree["command"] if "run_name" not in word]
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(SweepError, match=r"2 runs would share .*put --general.run_name=run-\{general.seed\} into the"):
        plan(path)


def test_a_bad_configuration_of_any_run_is_told_before_the_first_begins(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, {"optimizer.learning_rate": {"values": [0.1, -1.0]}, "data.no_such": {"value": 1}})
    with pytest.raises(SweepError) as caught:
        plan(path)
    assert "unknown key" in str(caught.value)
    assert "wanted a number above 0" in str(caught.value)


@pytest.mark.parametrize(
    ("macro", "problem"),
    [
        ("${args_no_boolean_flags}", "leaves out whatever is False"),
        ("${args_no_equals}", "does not read what"),
        (None, "no run would get its parameters"),
    ],
)
def test_arguments_that_would_not_arrive_are_refused(tmp_path: Path, macro: str | None, problem: str) -> None:
    path = with_command(write_sweep(tmp_path, {"general.seed": {"value": 1}}), {"${args}": macro})
    with pytest.raises(SweepError, match=problem):
        plan(path)


def test_a_directory_is_new_begun_or_completed(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, {"general.seed": {"values": [1, 2, 3]}})
    for seed, status in ((2, "running"), (3, "completed")):
        write_run(tmp_path / "runs" / f"run-{seed}", f"--general.seed={seed}", status=status)
    assert [run.state() for run in plan(path)] == ["new", "begun", "completed"]


@pytest.mark.parametrize("status", ["completed", "running"])
def test_a_run_of_another_configuration_is_neither_skipped_nor_gone_on_with(tmp_path: Path, status: str) -> None:
    path = write_sweep(tmp_path, {"general.seed": {"value": 1}})
    write_run(tmp_path / "runs" / "run-1", "--general.seed=1", "--optimizer.learning_rate=0.5", status=status)
    (run,) = plan(path)
    with pytest.raises(SweepError, match=r"optimizer.learning_rate is 0.5 there and 0.001 here"):
        run.state()


@pytest.mark.parametrize("override", ["--logging.interval=7", "--checkpoints.interval=2", "--checkpoints.async=true"])
def test_what_changes_no_weight_makes_no_other_run(tmp_path: Path, override: str) -> None:
    path = write_sweep(tmp_path, {"general.seed": {"value": 1}})
    write_run(tmp_path / "runs" / "run-1", "--general.seed=1", override)
    assert plan(path)[0].state() == "completed"


def test_the_environment_is_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATE", "0.25")
    path = write_sweep(tmp_path, {"general.seed": {"value": 1}})
    change: dict[str, Any] = {"${args}": "--optimizer.learning_rate=${envvar:RATE}"}
    tree = yaml.safe_load(with_command(path, change).read_text())
    path.write_text(yaml.safe_dump({**tree, "command": [*tree["command"], "${args}"]}))
    assert plan(path)[0].config.optimizer.learning_rate == 0.25
