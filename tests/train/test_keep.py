"""evaluation.keep: a rise of a kept loss beyond its limit warns or ends the run, wherever it was stopped before."""

import json
import re
from dataclasses import replace
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sftron.compare.comparison import compare
from sftron.compare.recorded_run import read_run
from sftron.config import ConfigError
from sftron.data.types import DataError
from sftron.report.charts import Chart
from sftron.train import evaluation
from sftron.train.evaluation import Evaluation, SetLoss
from sftron.train.keep import comparable_losses
from sftron.train.logs.loggers import flat_numbers
from sftron.train.text import conclusion
from sftron.train.trainer import CompletedRun, open_setup, open_trainer
from tests.train.ranks import launch, train
from tests.train.runs import (
    bits,
    chat_line,
    make_config,
    on_each_step,
    opened,
    result,
    run,
    settings,
    stop_in,
    write_config,
    write_rows,
)
from tests.train.test_evaluation import evaluations, timeless

NUM_STEPS = 8


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Conversations whose answers have nothing in common with the trained ones, so their loss rises and falls."""
    path = tmp_path / "old.jsonl"
    path.write_text("".join(chat_line(f"Old {n}?", f"QZX {n} VKW!") + "\n" for n in range(6)))
    return path


def options_of(old: Path, **limit: Any) -> dict[str, Any]:
    return {
        "tokens__train_steps": NUM_STEPS,
        "evaluation__interval": 1,
        "evaluation__keep": [{"path": str(old), **limit}],
        "optimizer__learning_rate": 3e-2,
        "optimizer__schedule": "constant",
        "checkpoints__export_hf": False,
    }


@pytest.fixture
def losses(tmp_path: Path, model_folder: Path, old: Path) -> list[float]:
    """The kept losses by step of a run that nothing ends; a limit of 0 would be exceeded in a step after the first."""
    write_rows(tmp_path / "rows.jsonl")
    options = options_of(old, max_rise=1e9) | {"general__run_name": "free"}
    trainer = opened(make_config(tmp_path, model_folder, **options))
    assert trainer.train() == 0
    return [each["sets"]["old"]["loss"] for each in evaluations(trainer.directory.folder)]


def limit_between(losses: list[float]) -> tuple[float, int]:
    """A limit that is exceeded after the second step for the first time, and the step in which it is."""
    rises = [loss - losses[0] for loss in losses]
    step = next(n for n in range(3, len(rises)) if rises[n] > max(0.0, *rises[:n]))
    return (max(0.0, *rises[:step]) + rises[step]) / 2, step


def problem_of(losses: list[float], step: int, max_rise: float) -> str:
    rise = losses[step] - losses[0]
    return (
        f"evaluation.keep: the loss of old has risen by {rise:.4f}, from {losses[0]:.4f} to {losses[step]:.4f}; at "
        f"most {max_rise:.4g} is allowed"
    )


# --- What happens beyond the limit ---


def test_a_limit_that_warns_changes_no_bit_and_is_said_at_each_evaluation_and_in_the_result_card_and_plot(
    tmp_path: Path, model_folder: Path, old: Path, losses: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    max_rise, step = limit_between(losses)
    options = options_of(old, max_rise=max_rise) | {"checkpoints__export_hf": True}
    trainer = opened(make_config(tmp_path, model_folder, **options))
    assert trainer.train() == 0
    printed = capfd.readouterr().out
    folder, ended = trainer.directory.folder, result(trainer)
    without = {key: value for key, value in options.items() if key.split("__")[0] != "evaluation"}
    assert bits(trainer) == bits(run(make_config(tmp_path, model_folder, general__run_name="without", **without)))
    rise = losses[-1] - losses[0]
    assert (ended["status"], ended["step"]) == ("completed", NUM_STEPS)
    assert ended["kept"] == {
        "old": {"before": losses[0], "since": 0, "rise": rise, "max_rise": max_rise, "exceeded_at": step}
    }
    above = [n for n, loss in enumerate(losses) if loss - losses[0] > max_rise]
    assert "its loss may rise by" in printed
    assert [f"WARNING    {problem_of(losses, n, max_rise)}" for n in above] == [
        line for line in printed.splitlines() if line.startswith("WARNING    evaluation.keep")
    ]
    for each, loss in zip(evaluations(folder), losses, strict=True):
        found = each["sets"]["old"]
        kept = {"before": losses[0], "since": 0, "rise": loss - losses[0], "max_rise": max_rise}
        assert (found["loss"], found["kept"]) == (loss, kept)
    verdict = "**forgot more than allowed**" if rise > max_rise else "kept"
    row = f"| `old` | {NUM_STEPS} | {losses[0]:.4f} | {rise:.4f} | {max_rise:.4f} | {verdict} |"
    assert row in (folder / "latest" / "README.md").read_text()


def test_the_plot_has_a_line_at_the_limit(
    tmp_path: Path, model_folder: Path, old: Path, losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[Chart, list[str]]] = []
    monkeypatch.setattr(conclusion, "write_images", lambda charts, _, names: drawn.append((charts[0], names)))
    opened(make_config(tmp_path, model_folder, **options_of(old, max_rise_percent=5))).train()
    ((chart, names),) = drawn
    assert names == ["training", "e  evaluation, old", "limit of old"]
    assert chart.lines[1].points == tuple((float(step), loss) for step, loss in enumerate(losses))
    assert chart.lines[2].points == tuple((float(step), losses[0] * (1 + 5 / 100)) for step in range(len(losses)))
    assert [line.style for line in chart.lines] == [0, 1, 2]


def test_a_limit_that_stops_ends_the_run_with_status_4_and_exports_the_last_checkpoint_within_it(
    tmp_path: Path, model_folder: Path, old: Path, losses: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    max_rise, step = limit_between(losses)
    more = {"checkpoints__export_hf": True, "checkpoints__export_interval": 1}
    options = options_of(old, max_rise=max_rise, on_exceeded="stop") | more
    trainer = opened(make_config(tmp_path, model_folder, **options))
    assert trainer.train() == 4
    folder, ended, problem = trainer.directory.folder, result(trainer), problem_of(losses, step, max_rise)
    within = folder / "hf" / f"step-{step - 1}"
    assert (ended["status"], ended["step"], ended["exported"]) == ("forgot", step, str(within))
    assert ended["error"] == ended["reason"] == problem
    assert ended["kept"]["old"]["exceeded_at"] == step
    assert [each["sets"]["old"]["loss"] for each in evaluations(folder)] == losses[: step + 1]
    assert {(folder / name).resolve() for name in ("latest", "best")} == {within.resolve()}
    assert not (folder / "hf" / f"step-{step}").exists()
    assert "| kept |" in (within / "README.md").read_text()
    assert {f"step-{step - 1}", f"step-{step}"} == {path.name for path in (folder / "checkpoints").iterdir()}
    printed = capfd.readouterr().out
    assert f"ends early {problem}" in printed
    assert f"forgot     after step {step}" in printed
    assert f"WARNING    {problem}; the export is the best within the limits" in printed

    again = open_trainer(make_config(tmp_path, model_folder, **options))
    assert isinstance(again, CompletedRun)
    assert again.train() == 4
    options["evaluation__keep"][0]["max_rise"] = 1e9
    raised = opened(make_config(tmp_path, model_folder, **options))
    assert raised.train() == 0
    assert (result(raised)["status"], result(raised)["step"]) == ("completed", NUM_STEPS)
    assert evaluations(folder)[-1]["sets"]["old"]["loss"] == losses[-1]
    assert (folder / "latest").resolve().name == f"step-{NUM_STEPS}"


def test_with_keep_best_the_best_by_its_metric_of_those_within_the_limit_is_exported(
    tmp_path: Path, model_folder: Path, old: Path, losses: list[float]
) -> None:
    """The kept loss itself: the lowest one is of an earlier step than the last within the limit, or of the last."""
    max_rise, step = limit_between(losses)
    options = options_of(old, max_rise=max_rise, on_exceeded="stop")
    options |= {"checkpoints__export_hf": True, "checkpoints__keep_best": "eval/old/token_accuracy"}
    trainer = opened(make_config(tmp_path, model_folder, **options))
    assert trainer.train() == 4
    within = evaluations(trainer.directory.folder)[1:step]
    best = max(within, key=lambda each: (each["sets"]["old"]["token_accuracy"], -each["step"]))["step"]
    assert (trainer.directory.folder / "latest").resolve().name == f"step-{best}"


def test_a_first_evaluation_beyond_the_limit_exports_nothing_and_the_last_one_counts_too(
    tmp_path: Path, model_folder: Path, old: Path, losses: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    options = options_of(old, max_rise=0, on_exceeded="stop")
    above = next(n for n, loss in enumerate(losses) if loss > losses[0])
    options |= {"checkpoints__export_hf": True, "tokens__train_steps": above, "evaluation__interval": NUM_STEPS}
    trainer = opened(make_config(tmp_path, model_folder, **options))
    assert trainer.train() == 4
    assert (result(trainer)["status"], result(trainer)["exported"]) == ("forgot", None)
    assert "reason" not in result(trainer)
    assert "nothing within the limits is exported" in capfd.readouterr().out
    assert not (trainer.directory.folder / "hf").exists()
    assert isinstance(open_trainer(make_config(tmp_path, model_folder, **options)), CompletedRun)
    options["evaluation__keep"][0]["on_exceeded"] = "warn"
    warned = opened(make_config(tmp_path, model_folder, **options))
    assert warned.train() == 0
    assert result(warned)["status"] == "completed"
    assert (trainer.directory.folder / "latest").resolve().name == f"step-{above}"
    options["evaluation__keep"][0]["on_exceeded"] = "stop"
    judged = opened(make_config(tmp_path, model_folder, **options))
    assert judged.train() == 4
    assert result(judged)["status"] == "forgot"


def test_a_limit_in_percent_is_of_the_loss_before_the_first_step(
    tmp_path: Path, model_folder: Path, old: Path, losses: list[float]
) -> None:
    max_rise, step = limit_between(losses)
    percent = 100 * max_rise / losses[0]
    trainer = opened(
        make_config(tmp_path, model_folder, **options_of(old, max_rise_percent=percent, on_exceeded="stop"))
    )
    assert trainer.train() == 4
    assert result(trainer)["step"] == step
    assert result(trainer)["kept"]["old"]["max_rise"] == pytest.approx(max_rise)
    assert result(trainer)["error"].endswith(f"is allowed, {percent:g} % of it")


# --- Stops, ranks and other rows ---


def test_a_run_that_is_stopped_and_hops_to_two_ranks_ends_where_it_would_have_ended(
    tmp_path: Path, model_folder: Path, old: Path, losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss before the first step is not measured again: the resumed weights have another one."""
    max_rise, step = limit_between(losses)
    options = options_of(old, max_rise=max_rise, on_exceeded="stop")
    straight = opened(make_config(tmp_path, model_folder, general__run_name="straight", **options))
    assert straight.train() == 4
    with monkeypatch.context() as patch:
        on_each_step(patch, stop_in(2))
        stopped = opened(make_config(tmp_path, model_folder, **options))
        assert stopped.train() == 0
    assert result(stopped)["status"] == "preempted"
    resumed = opened(make_config(tmp_path, model_folder, **options))
    assert resumed._evaluator.kept["old"].before == losses[0]
    assert resumed.train() == 4
    assert result(resumed) == result(straight)
    assert bits(resumed) == bits(straight)
    assert timeless(resumed.directory.folder) == timeless(straight.directory.folder)

    hop = options | {"general__run_name": "hop"}
    for num_ranks, num_steps, status in ((1, 2, 0), (2, NUM_STEPS, 4)):
        hop |= {"tokens__train_steps": num_steps, "tokens__batch_accumulation_per_replica": 2 // num_ranks}
        config = write_config(tmp_path / "hop.yaml", settings(tmp_path, model_folder, **hop))
        ended = launch(num_ranks, train, config, folder=tmp_path)
        assert [each.exit_code for each in ended] == [status] * num_ranks, ended[0].err
    hopped = json.loads((tmp_path / "runs" / "hop" / "result.json").read_text())
    assert (hopped["status"], hopped["step"], hopped["kept"]["old"]["before"]) == ("forgot", step, losses[0])
    assert hopped["kept"]["old"]["rise"] == pytest.approx(losses[step] - losses[0], abs=1e-4)


def test_a_run_that_begins_with_the_weights_of_another_counts_from_these(
    tmp_path: Path, model_folder: Path, old: Path, losses: list[float]
) -> None:
    checkpoint = str(tmp_path / "runs" / "free" / "checkpoints" / f"step-{NUM_STEPS}")
    options = options_of(old, max_rise=1e9) | {"checkpoints__load": "weights", "checkpoints__resume": checkpoint}
    trainer = run(make_config(tmp_path, model_folder, **options))
    assert result(trainer)["kept"]["old"]["before"] == pytest.approx(losses[-1], abs=1e-6)


@pytest.mark.parametrize("other", ["rows", "name"])
def test_a_resume_whose_kept_set_is_another_one_says_so_and_counts_from_the_next_evaluation(
    tmp_path: Path, model_folder: Path, old: Path, capfd: pytest.CaptureFixture[str], other: str
) -> None:
    options = options_of(old, max_rise=1e9) | {"checkpoints__export_hf": True}
    opened(make_config(tmp_path, model_folder, **options | {"tokens__train_steps": 2})).train()
    name = "old"
    if other == "rows":
        old.write_text("".join(old.read_text().splitlines(keepends=True)[1:]))
    else:
        options["evaluation__keep"][0]["name"] = name = "older"
    capfd.readouterr()
    resumed = opened(make_config(tmp_path, model_folder, **options))
    printed = capfd.readouterr().out
    what = f"keep       the loss of {name} before the first step is not known, so its rise counts from the next"
    assert what in printed
    if other == "rows":
        changed = [line for line in printed.splitlines() if line.startswith("keep         ")]
        assert [line.split(":")[0] for line in changed] == ["keep         rows of old", "keep         tokens of old"]
        assert all(re.search(r": \w{12}\.\.\. in the checkpoint, \w{12}\.\.\. now", line) for line in changed)
    else:
        assert "keep         the checkpoint has the kept sets: old" in printed
    assert resumed.train() == 0
    found = {each["step"]: each["sets"] for each in evaluations(resumed.directory.folder)}
    assert list(resumed._evaluator.kept) == [name]
    before, rise = found[3][name]["loss"], found[NUM_STEPS][name]["loss"] - found[3][name]["loss"]
    assert result(resumed)["kept"][name] | {"exceeded_at": None} == found[NUM_STEPS][name]["kept"] | {
        "before": before,
        "since": 3,
        "rise": rise,
        "exceeded_at": None,
    }
    row = f"| `{name}` | {NUM_STEPS} | {before:.4f} after step 3 | {rise:.4f} | 1000000000.0000 | kept |"
    assert row in (resumed.directory.folder / "latest" / "README.md").read_text()


@pytest.mark.parametrize(
    "unrelated",
    [{"tokens__sequence_length": 128}, {"data__on_bad_row": "skip"}, {"data__overlong": "truncate_turns"}],
    ids=lambda each: next(iter(each)),
)
def test_a_key_that_changes_no_token_of_a_kept_set_does_not_change_its_loss_before_training(
    tmp_path: Path, model_folder: Path, old: Path, capfd: pytest.CaptureFixture[str], unrelated: dict[str, Any]
) -> None:
    write_rows(tmp_path / "rows.jsonl")
    options = options_of(old, max_rise=1e9) | {"tokens__train_steps": 1, "checkpoints__allow_data_change": True}
    opened(make_config(tmp_path, model_folder, **options)).train()
    before = evaluations(tmp_path / "runs" / "run")[0]["sets"]["old"]["loss"]
    capfd.readouterr()
    resumed = opened(make_config(tmp_path, model_folder, **options | unrelated | {"tokens__train_steps": 2}))
    assert "data       has changed since the checkpoint" in capfd.readouterr().out
    assert resumed.train() == 0
    assert result(resumed)["kept"]["old"]["before"] == before


# --- Configurations and rows ---


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"evaluation__interval": None}, "evaluation.keep: has a limit, but interval is null, so it is not checked"),
        ({"evaluation__at_start": False}, "evaluation.at_start: is false, but keep measures a rise from the loss"),
        ({"max_rise": -0.1}, "evaluation.keep.0.max_rise: found -0.1 .a number.; wanted a number from 0"),
        ({"max_rise": None}, "evaluation.keep.0.max_rise: is missing; set it, in nats, or max_rise_percent"),
        ({"max_rise_percent": 2}, "evaluation.keep.0.max_rise: is 0.5 and max_rise_percent is 2; keep one of them"),
        ({"on_exceeded": "best"}, "evaluation.keep.0.on_exceeded: found .*wanted warn or stop"),
    ],
)
def test_limits_that_cannot_be_are_refused_with_the_remedy(
    tmp_path: Path, model_folder: Path, old: Path, change: dict[str, Any], problem: str
) -> None:
    options = options_of(old, max_rise=0.5)
    for key, value in change.items():
        if "__" in key:
            options[key] = value
        else:
            options["evaluation__keep"][0][key] = value
    with pytest.raises(ConfigError, match=problem):
        make_config(tmp_path, model_folder, **options)


def test_a_kept_file_that_is_missing_and_a_name_twice_are_refused_before_any_weight_is_read(
    tmp_path: Path, model_folder: Path, old: Path
) -> None:
    options = options_of(tmp_path / "gone.jsonl", max_rise=0.5)
    with pytest.raises(DataError, match=r"gone\.jsonl"):
        open_setup(make_config(tmp_path, model_folder, **options))
    options = options_of(old, max_rise=0.5) | {"evaluation__datasets": [{"path": str(old)}]}
    with pytest.raises(DataError, match=r"evaluation.keep: 2 sets are named old; give it another `name`"):
        open_setup(make_config(tmp_path, model_folder, **options))


def test_kept_rows_that_are_also_trained_on_are_counted(
    tmp_path: Path, model_folder: Path, old: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As when the rows are replayed."""
    write_rows(tmp_path / "rows.jsonl")
    sets = [{"path": str(tmp_path / "rows.jsonl")}, {"path": str(old)}]
    opened(make_config(tmp_path, model_folder, data__datasets=sets, **options_of(old, max_rise=0.5)))
    assert "WARNING    6 rows of old are also in the training data" in capfd.readouterr().out


# --- The comparison ---


def test_compare_shows_kept_losses_and_their_rises(
    tmp_path: Path, model_folder: Path, old: Path, losses: list[float]
) -> None:
    folder = tmp_path / "runs" / "free"
    comparison = compare("runs", [read_run(folder)])
    figures = {figure.key: figure for figure in comparison.figures}
    (free,) = comparison.runs
    assert figures["evaluation.old"].of(free) == losses[-1]
    assert figures["kept.old"].of(free) == pytest.approx(losses[-1] - losses[0])
    assert "rise of the loss of old, kept" in comparison.as_text()
    kept = {"before": 1.0, "since": 0, "rise": 0.5, "max_rise": 0.25}
    measured = SetLoss(loss=1.5, token_accuracy=0.5, tokens=1, conversations=1, roles={}, datasets={}, kept=kept)
    logged = flat_numbers(Evaluation(1, 0.1, {"old": measured}, [], None).metrics())
    assert logged["eval/old/kept/rise"] == 0.5


def test_documents_of_plain_text_are_kept_as_conversations_are(tmp_path: Path, model_folder: Path) -> None:
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": f"QZX {n} VKW, and more of it."}) + "\n" for n in range(4)))
    options = options_of(documents, format="text", max_rise=1e9) | {"tokens__train_steps": 2}
    trainer = run(make_config(tmp_path, model_folder, **options))
    first, *_, last = (each["sets"]["documents"] for each in evaluations(trainer.directory.folder))
    assert set(first["roles"]) == {"text"}
    assert first["roles"]["text"]["loss"] == first["loss"]
    assert last["kept"]["rise"] == last["loss"] - first["loss"] != 0


# --- Limits that change ---


def strict_json(path: Path) -> Any:
    """Returns the value of a file, which holds no NaN, because JSON has none."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{path} holds {name}")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_a_best_checkpoint_above_a_limit_that_is_lowered_is_not_exported(
    tmp_path: Path, model_folder: Path, old: Path, losses: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    require_not_best_above(tmp_path, model_folder, losses, options_of(old, max_rise=1e9, on_exceeded="stop"), capfd)


def test_a_best_checkpoint_above_a_limit_that_now_stops_is_not_exported(
    tmp_path: Path, model_folder: Path, old: Path, losses: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    """The best by another metric, which falls as the run learns and forgets."""
    options = options_of(old, max_rise=limit_between(losses)[0]) | {"checkpoints__keep_best": "eval/rows/loss"}
    options["evaluation__datasets"] = [{"path": str(tmp_path / "rows.jsonl")}]
    require_not_best_above(tmp_path, model_folder, losses, options, capfd)


def require_not_best_above(
    tmp_path: Path, model_folder: Path, losses: list[float], options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    max_rise, step = limit_between(losses)
    options |= {"checkpoints__export_hf": True, "tokens__train_steps": step}
    trainer = opened(make_config(tmp_path, model_folder, **options))
    assert trainer.train() == 0
    folder, best = trainer.directory.folder, trainer._evaluator.best
    assert best is not None
    assert best.step == step
    assert result(trainer)["exported"] == str(folder / "hf" / f"step-{step}")
    options["evaluation__keep"][0] |= {"max_rise": max_rise, "on_exceeded": "stop"}
    options["tokens__train_steps"] = NUM_STEPS
    capfd.readouterr()
    resumed = opened(make_config(tmp_path, model_folder, **options))
    said = f"best       step {step} does not meet the current limits of evaluation.keep"
    assert said in capfd.readouterr().out
    assert resumed.train() == 4
    ended = result(resumed)
    assert (ended["status"], ended["step"], ended["exported"]) == ("forgot", step, None)
    assert ended["kept"]["old"]["exceeded_at"] == step
    assert not (folder / "latest").is_symlink()
    assert not (folder / "best").is_symlink()
    assert not (folder / "best.json").exists()
    assert isinstance(open_trainer(make_config(tmp_path, model_folder, **options)), CompletedRun)


def test_the_first_step_above_a_limit_is_known_after_the_limit_is_changed(
    tmp_path: Path, model_folder: Path, old: Path, losses: list[float]
) -> None:
    """Also if the loss was lower again when the run was stopped."""
    rises = [loss - losses[0] for loss in losses]
    stop = next(n for n in range(2, NUM_STEPS) if rises[n] < max(rises[:n]))
    max_rise = (max(rises[:stop]) + rises[stop]) / 2
    options = options_of(old, max_rise=1e9)
    opened(make_config(tmp_path, model_folder, **options | {"tokens__train_steps": stop})).train()
    options["evaluation__keep"][0]["max_rise"] = max_rise
    resumed = run(make_config(tmp_path, model_folder, **options | {"tokens__train_steps": stop + 1}))
    first = next(n for n, rise in enumerate(rises) if rise > max_rise)
    assert first < stop
    assert result(resumed)["kept"]["old"]["exceeded_at"] == first
    options["evaluation__keep"][0]["max_rise"] = 1e9
    raised = run(make_config(tmp_path, model_folder, **options | {"tokens__train_steps": stop + 2}))
    assert result(raised)["kept"]["old"]["exceeded_at"] is None


def test_the_card_of_an_export_that_is_there_already_has_the_limit_in_force_now(
    tmp_path: Path, model_folder: Path, old: Path, losses: list[float]
) -> None:
    max_rise, step = limit_between(losses)
    options = options_of(old, max_rise=1e9, on_exceeded="stop")
    options |= {"checkpoints__export_hf": True, "checkpoints__export_interval": 1}
    trainer = opened(make_config(tmp_path, model_folder, **options | {"tokens__train_steps": step - 1}))
    assert trainer.train() == 0
    options["evaluation__keep"][0]["max_rise"] = max_rise
    assert opened(make_config(tmp_path, model_folder, **options)).train() == 4
    within = trainer.directory.hf(step - 1)
    row = f"| `old` | {step - 1} | {losses[0]:.4f} | {losses[step - 1] - losses[0]:.4f} | {max_rise:.4f} | kept |"
    assert (trainer.directory.folder / "latest").resolve() == within.resolve()
    assert row in (within / "README.md").read_text()


def test_a_kept_loss_that_is_not_finite_is_above_every_limit_and_null_in_json(
    tmp_path: Path, model_folder: Path, old: Path, losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_set = evaluation.measure_set

    def measured(*args: Any, **options: Any) -> SetLoss:
        found = of_set(*args, **options)
        return found if found.loss == losses[0] else replace(found, loss=nan)

    monkeypatch.setattr(evaluation, "measure_set", measured)
    trainer = opened(make_config(tmp_path, model_folder, **options_of(old, max_rise=1e9, on_exceeded="stop")))
    assert trainer.train() == 4
    folder = trainer.directory.folder
    kept = strict_json(folder / "result.json")["kept"]["old"]
    assert kept == {"before": losses[0], "since": 0, "rise": None, "max_rise": 1e9, "exceeded_at": 1}
    assert strict_json(folder / "checkpoints" / "step-1" / "state.json")["evaluation"]["kept"]["old"]["loss"] is None
    assert f"was {losses[0]:.4f} and is no longer finite" in result(trainer)["error"]
    assert "kept.old" not in [figure.key for figure in compare("runs", [read_run(folder)]).figures]

    monkeypatch.setattr(evaluation, "measure_set", lambda *args, **options: replace(of_set(*args, **options), loss=nan))
    unmeasured = opened(make_config(tmp_path, model_folder, general__run_name="nan", **options_of(old, max_rise=1e9)))
    with pytest.raises(DataError, match="the loss of old after step 0 is not finite, so no rise can be measured"):
        unmeasured.train()


def test_the_loss_of_an_earlier_checkpoint_is_read_which_calls_the_fingerprint_of() -> None:
    saved = {"before": 1.0, "loss": 1.5, "of": "0123", "made_of": {}, "highest": [[0, 1.0], [4, 1.5]]}
    kept: Any = SimpleNamespace(name="old", limit=object(), fingerprint="0123")
    found = comparable_losses([kept], {"kept": {"old": saved}})["old"]
    assert (found.fingerprint, found.rise, found.highest) == ("0123", 0.5, ((0, 1.0), (4, 1.5)))
    kept.fingerprint = "4567"
    assert comparable_losses([kept], {"kept": {"old": saved}}) == {}
