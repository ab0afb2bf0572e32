"""The best checkpoint is kept, found again by a resume, and exported."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sftron.train import saving
from sftron.train.evaluation import metric_of
from sftron.train.trainer import open_trainer
from tests.train.runs import bits, make_config, opened, result, run, write_rows
from tests.train.test_evaluation import evaluations


@pytest.fixture
def options(held_out: Path) -> dict[str, Any]:
    """On so little data the loss on other rows soon rises again."""
    return {
        "tokens__train_steps": 8,
        "evaluation__datasets": [{"path": str(held_out)}],
        "evaluation__interval": 1,
        "checkpoints__keep_best": "eval/other/loss",
        "optimizer__learning_rate": 3e-2,
        "optimizer__schedule": "constant",
    }


def test_a_metric_is_found_by_its_name_and_is_none_without_a_value() -> None:
    metrics = {"eval": {"a": {"loss": None, "roles": {"user": {"loss": 2.0}}}, "stop_rate": 1}}
    assert metric_of(metrics, "eval/a/roles/user/loss") == 2.0
    assert metric_of(metrics, "eval/stop_rate") == 1.0
    assert metric_of(metrics, "eval/a/loss") is None


def test_the_best_is_never_pruned_and_is_exported_at_the_end_and_a_damaged_one_is_reported(
    tmp_path: Path, model_folder: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(make_config(tmp_path, model_folder, **options, checkpoints__interval=1)).directory.folder
    losses = {each["step"]: each["sets"]["other"]["loss"] for each in evaluations(folder) if each["step"]}
    best = min(losses, key=lambda step: losses[step])
    assert best < 6, "it would have been kept as one of the newest"
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {f"step-{best}", "step-7", "step-8"}
    checkpoint = f"checkpoints/step-{best}"
    expected = {"metric": "eval/other/loss", "value": losses[best], "step": best, "checkpoint": checkpoint}
    assert json.loads((folder / "best.json").read_text()) == expected
    assert (folder / "best").resolve() == (folder / "hf" / f"step-{best}").resolve()
    assert (folder / "latest").resolve().name == "step-8"
    weights = [load_file(folder / name / "model.safetensors") for name in ("best", "latest")]
    assert any(not weights[0][name].equal(weights[1][name]) for name in weights[0])

    (folder / "best").unlink()
    (folder / "hf" / f"step-{best}").rename(folder / "moved")
    with (folder / checkpoint / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    options["tokens__train_steps"] = 9
    again = run(make_config(tmp_path, model_folder, **options, checkpoints__interval=1))
    assert result(again)["status"] == "completed"
    assert (folder / "latest").resolve().name == "step-9"
    assert not (folder / "best").exists()
    assert "could not export the best checkpoint, " in capsys.readouterr().out


@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_without_an_interval_saves_what_is_best_and_a_resume_knows_it(
    tmp_path: Path, model_folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    options |= {"checkpoints__async": in_background, "checkpoints__export_hf": False}
    write_rows(tmp_path / "rows.jsonl")
    straight = run(make_config(tmp_path, model_folder, general__run_name="a", **options))
    best = straight._evaluator.best
    assert best is not None
    assert best.step < 6
    stopped = opened(make_config(tmp_path, model_folder, **options))

    def should_stop() -> bool:
        stopped.stop_request.received = stopped.progress.step == best.step + 1
        return stopped.stop_request.received

    monkeypatch.setattr(stopped._evaluator, "_should_stop", should_stop)
    assert stopped.train() == 0
    resumed = run(make_config(tmp_path, model_folder, **options))
    assert resumed._evaluator.best == best
    assert bits(resumed) == bits(straight)
    assert f"step-{best.step}" in {path.name for path in resumed.directory.checkpoints.iterdir()}


def test_a_best_that_cannot_be_saved_does_not_replace_the_one_before(
    tmp_path: Path, model_folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = saving.write_checkpoint

    def fail_at_2(folder: Path, step: int, *arguments: Any, **named: Any) -> Path:
        if step == 2:
            raise OSError("disk full")
        return write(folder, step, *arguments, **named)

    monkeypatch.setattr(saving, "write_checkpoint", fail_at_2)
    options |= {"tokens__train_steps": 2, "optimizer__learning_rate": 1e-3, "checkpoints__export_hf": False}
    trainer = opened(make_config(tmp_path, model_folder, **options))
    with pytest.raises(OSError, match="disk full"):
        trainer.train()
    losses = [each["sets"]["other"]["loss"] for each in evaluations(tmp_path / "runs" / "run")]
    assert losses[2] < losses[1], "the second is no better"
    assert trainer._evaluator.best_step == 1
    assert json.loads((tmp_path / "runs" / "run" / "best.json").read_text())["step"] == 1


def test_a_resume_writes_the_best_json_that_a_kill_after_the_checkpoint_has_prevented(
    tmp_path: Path, model_folder: Path, options: dict[str, Any]
) -> None:
    options |= {"tokens__train_steps": 2, "checkpoints__export_hf": False}
    file = run(make_config(tmp_path, model_folder, **options)).directory.folder / "best.json"
    written = file.read_text()
    file.unlink()
    open_trainer(make_config(tmp_path, model_folder, **options | {"tokens__train_steps": 3}))
    assert file.read_text() == written


def test_with_another_metric_the_search_for_the_best_starts_again(
    tmp_path: Path, model_folder: Path, options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    options["checkpoints__export_hf"] = False
    run(make_config(tmp_path, model_folder, **options | {"tokens__train_steps": 2}))
    options |= {"tokens__train_steps": 3, "checkpoints__keep_best": "eval/other/token_accuracy"}
    trainer = run(make_config(tmp_path, model_folder, **options))
    assert "its eval/other/loss was measured under different settings" in capfd.readouterr().out
    assert trainer._evaluator.best_step == 3
