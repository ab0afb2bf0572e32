"""evaluation.patience ends a run at the evaluation that an independent count names, wherever the run was stopped."""

import json
from pathlib import Path
from typing import Any

import pytest

from sftron.config import ConfigError
from sftron.train.evaluation import Best
from sftron.train.trainer import CompletedRun, open_setup, open_trainer
from tests.train.runs import bits, make_config, on_each_step, result, run, stop_in, write_rows
from tests.train.test_evaluation import evaluations


@pytest.fixture
def options(held_out: Path) -> dict[str, Any]:
    """On so little data the loss on other rows soon rises again."""
    return {
        "tokens__train_steps": 14,
        "evaluation__datasets": [{"path": str(held_out)}],
        "evaluation__interval": 1,
        "evaluation__patience": 3,
        "optimizer__learning_rate": 3e-2,
        "optimizer__schedule": "constant",
        "checkpoints__export_hf": False,
    }


def expected_end(losses: dict[int, float], patience: int) -> tuple[int, int]:
    """The step whose loss is the lowest before the end, and the step of the end, by looking back from each step."""
    steps = sorted(losses)
    for number in range(patience, len(steps)):
        recent, earlier = steps[number - patience + 1 : number + 1], steps[: number - patience + 1]
        if min(losses[step] for step in recent) >= min(losses[step] for step in earlier):
            return min(earlier, key=lambda step: losses[step]), steps[number]
    raise AssertionError("the losses never stop falling")


def test_lower_losses_and_higher_rates_are_better_and_what_is_missing_is_not() -> None:
    for metric, better, worse in (("eval/a/loss", 0.5, 1.5), ("eval/stop_rate", 1.5, 0.5)):
        best = Best(metric, 1.0, 0, "")
        for number, value in enumerate((worse, 1.0, None), start=1):
            best = best.after(value, number)
            assert (best.num_worse, best.step) == (number, 0)
        assert best.after(better, 4) == Best(metric, better, 4, "")


def test_a_run_ends_at_the_evaluation_that_is_worse_for_the_last_time_and_is_complete(
    tmp_path: Path, model_folder: Path, options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "rows.jsonl")
    without = {key: value for key, value in options.items() if key != "evaluation__patience"}
    whole = run(make_config(tmp_path, model_folder, general__run_name="whole", **without))
    losses = {each["step"]: each["sets"]["other"]["loss"] for each in evaluations(whole.directory.folder)}
    best, end = expected_end(losses, 3)
    assert 0 < best < end < 14

    trainer = run(make_config(tmp_path, model_folder, **options))
    ended = result(trainer)
    assert (ended["status"], ended["step"]) == ("completed", end)
    reason = f"eval/other/loss has had no better value than {losses[best]:.4f}, of step {best}, in 3 evaluations"
    assert ended["reason"] == f"evaluation.patience: {reason}"
    assert [each["step"] for each in evaluations(trainer.directory.folder)] == list(range(end + 1))
    printed = capfd.readouterr().out
    assert f"ends early evaluation.patience: {reason}" in printed
    assert "optimizer.schedule constant" not in printed

    again = open_trainer(make_config(tmp_path, model_folder, **options))
    assert isinstance(again, CompletedRun)
    assert again.status == "completed"
    longer = run(make_config(tmp_path, model_folder, **options | {"evaluation__patience": 4}))
    assert result(longer)["step"] == expected_end(losses, 4)[1] == end + 1


@pytest.mark.parametrize("stop_after", [2, 3])
def test_a_run_that_is_stopped_within_its_patience_ends_where_it_would_have_ended(
    tmp_path: Path, model_folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, stop_after: int
) -> None:
    write_rows(tmp_path / "rows.jsonl")
    straight = run(make_config(tmp_path, model_folder, general__run_name="straight", **options))
    watched = straight._evaluator.watched
    assert watched is not None
    with monkeypatch.context() as patch:
        on_each_step(patch, stop_in(watched.step + stop_after))
        stopped = run(make_config(tmp_path, model_folder, **options))
    assert result(stopped)["status"] == "preempted"
    assert stopped._evaluator.watched is not None
    assert 0 < stopped._evaluator.watched.num_worse < 3

    resumed = run(make_config(tmp_path, model_folder, **options))
    assert resumed._evaluator.watched == watched
    assert result(resumed) == result(straight) | {"exported": None}
    assert bits(resumed) == bits(straight)


def test_a_falling_rate_is_warned_of_and_another_metric_starts_the_search_again(
    tmp_path: Path, model_folder: Path, options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    options |= {"optimizer__schedule": "cosine", "tokens__train_steps": 1}
    run(make_config(tmp_path, model_folder, **options))
    assert "WARNING    optimizer.schedule cosine falls over the full length of the run" in capfd.readouterr().out
    options |= {"evaluation__metric": "eval/other/token_accuracy", "tokens__train_steps": 2}
    trainer = run(make_config(tmp_path, model_folder, **options))
    line = "patience   starts again: until now, it watched eval/other/loss under different settings"
    assert line in capfd.readouterr().out
    assert trainer._evaluator.watched is not None
    assert (trainer._evaluator.watched.step, trainer._evaluator.watched.metric) == (
        2,
        "eval/other/token_accuracy",
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"evaluation__datasets": []}, "evaluation.patience: is 3, but nothing is evaluated: give evaluation.share"),
        ({"evaluation__interval": None}, "evaluation.patience: is 3, but interval is null, so nothing is evaluated"),
        (
            {"evaluation__patience": None, "evaluation__metric": "eval/other/loss"},
            "evaluation.metric: is eval/other/loss, but patience is null: set it, or remove the key",
        ),
    ],
)
def test_settings_that_could_never_end_a_run_are_refused(
    tmp_path: Path, model_folder: Path, options: dict[str, Any], change: dict[str, Any], problem: str
) -> None:
    options |= change
    if change == {"evaluation__datasets": []}:
        del options["evaluation__interval"]
    with pytest.raises(ConfigError, match=problem):
        make_config(tmp_path, model_folder, **options)


def test_a_metric_that_is_not_measured_is_refused_with_those_that_are(
    tmp_path: Path, model_folder: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"evaluation.metric: eval/held_out/loss is no metric .* eval/other/loss"):
        open_setup(make_config(tmp_path, model_folder, **options, evaluation__metric="eval/held_out/loss"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    options |= {"evaluation__datasets": [], "evaluation__prompts": str(prompts)}
    with pytest.raises(ValueError, match="no set that has a loss; set it to eval/stop_rate"):
        open_setup(make_config(tmp_path, model_folder, **options))
