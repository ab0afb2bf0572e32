"""Runs are compared like with like, whatever they have recorded and however far they came."""

import json
import math
import statistics
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sftron.sweep.comparison import Comparison, as_json, as_text, compare
from sftron.sweep.comparison_page import comparison_page
from sftron.sweep.curves import MOST_POINTS
from sftron.sweep.figures import Figure, Spread
from sftron.sweep.recorded_run import number_at, read_run
from sftron.sweep.sweep_file import Metric, SweepError, read_sweep_file
from sftron.sweep.wording import effect_words, spread_words
from tests.sweep.sweeps import step, write_run, write_sweep
from tools.plot_runs import main

ISOLATED, COMPLETIONS = "data.remove_cross_attention", "data.train_on_completions_only"


def comparison_of(*folders: Path) -> Comparison:
    return compare("Test", [read_run(folder) for folder in folders])


def ablation(tmp_path: Path) -> list[Path]:
    """2 x 2 toggles, 2 seeds. Isolated runs are 1.5 times as fast; all-token runs have answers that are 0.1 worse."""
    folders = []
    for seed in (1, 2):
        for completions in ("true", "false"):
            for isolated in ("true", "false"):
                speed = (150.0 if isolated == "true" else 100.0) * seed
                answers = 1.0 + seed / 100 + (0.0 if completions == "true" else 0.1)
                loss = answers if completions == "true" else answers + 5
                steps = [step(n, speed=speed, answers=answers, loss=loss) for n in range(1, 7)]
                name = f"c_{completions}-i_{isolated}-{seed}"
                overrides = (f"--{COMPLETIONS}={completions}", f"--{ISOLATED}={isolated}", f"--general.seed={seed}")
                folders.append(write_run(tmp_path / "runs" / name, *overrides, steps=steps))
    return folders


class Page(HTMLParser):
    """Every tag closed, nothing fetched."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_seeds_are_one_group_and_settings_tell_groups_apart(tmp_path: Path) -> None:
    comparison = comparison_of(*ablation(tmp_path))
    assert [group.letter for group in comparison.groups] == ["A", "B", "C", "D"]
    assert [len(group.runs) for group in comparison.groups] == [2] * 4
    assert comparison.groups[1].words == "train_on_completions_only true, remove_cross_attention false"


def test_figures_are_means_over_seeds_with_their_standard_deviation(tmp_path: Path) -> None:
    comparison = comparison_of(*ablation(tmp_path))
    figures = {figure.key: comparison.spread_of(comparison.groups[2], figure) for figure in comparison.figures}
    answers = figures["answers_loss"]
    assert answers is not None
    assert answers.mean == pytest.approx(1.115)
    assert answers.std == pytest.approx(statistics.stdev([1.11, 1.12]))
    assert figures["tokens_per_second"] == Spread(225.0, statistics.stdev([150, 300]), 2)
    assert figures["tokens"] == Spread(384.0, 0.0, 2)


def test_an_effect_is_measured_between_runs_that_are_alike_in_all_else(tmp_path: Path) -> None:
    comparison = comparison_of(*ablation(tmp_path))
    told = {(effect.key, effect.figure.key): effect for effect in comparison.effects}
    speed = told[ISOLATED, "tokens_per_second"]
    assert (speed.value, speed.reference) == (True, False)
    # The seeds' speeds differ by a factor of two, and still each pair says 1.5.
    assert effect_words(speed) == "× 1.500 ± 0.000 (4 pairs)"
    assert effect_words(told[COMPLETIONS, "answers_loss"]) == "−0.1000 ± 0.0000 (4 pairs)"
    assert effect_words(told[ISOLATED, "answers_loss"]) == "+0.0000 ± 0.0000 (4 pairs)"


def test_losses_over_different_tokens_are_not_made_an_effect(tmp_path: Path) -> None:
    comparison = comparison_of(*ablation(tmp_path))
    assert "loss" in {figure.key for figure in comparison.figures}
    assert "loss" not in {effect.figure.key for effect in comparison.effects}
    assert "Compare the loss of the answers" in comparison_page(comparison)


def test_a_slow_moment_of_the_machine_does_not_move_a_speed(tmp_path: Path) -> None:
    steps = {
        isolated: [step(n, speed=speed) for n in range(1, 8)] for isolated, speed in (("true", 120.0), ("false", 100.0))
    }
    steps["true"][3] = step(4, speed=1.0)
    steps["false"][5] = step(6, speed=2.0)
    folders = [write_run(tmp_path / name, f"--{ISOLATED}={name}", steps=each) for name, each in steps.items()]
    comparison = comparison_of(*folders)
    (effect,) = (effect for effect in comparison.effects if effect.figure.key == "tokens_per_second")
    assert effect.change == Spread(1.2, None, 1)


def test_runs_of_a_version_without_role_losses_are_compared_by_what_they_have(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", "--optimizer.learning_rate=1.0e-4", steps=[step(1), step(2)])
    new = write_run(tmp_path / "new", steps=[step(1, answers=0.5), step(2, answers=0.4)])
    comparison = comparison_of(old, new)
    assert [group.words for group in comparison.groups] == ["old: learning_rate 0.0001", "new: learning_rate 0.001"]
    page = comparison_page(comparison)
    assert "not recorded" in page
    assert "Training loss of the answers" in page
    answers = next(figure for figure in comparison.figures if figure.key == "answers_loss")
    assert comparison.spread_of(comparison.groups[0], answers) is None


def test_runs_with_nothing_recorded_make_a_page_all_the_same(tmp_path: Path) -> None:
    comparison = comparison_of(write_run(tmp_path / "a", status="failed", error="<out of> memory"))
    page = comparison_page(comparison)
    Page(page)
    assert "0 of 1 runs completed" in page
    assert "&lt;out of&gt; memory" in page
    assert json.dumps(as_json(comparison))


def test_a_failed_run_is_drawn_but_counts_for_no_figure(tmp_path: Path) -> None:
    good = write_run(tmp_path / "good", steps=[step(n, loss=1.0) for n in range(1, 5)])
    bad = write_run(tmp_path / "bad", "--general.seed=3", status="failed", steps=[step(1, loss=9.0), step(2, loss=9.0)])
    comparison = comparison_of(good, bad)
    loss = next(figure for figure in comparison.figures if figure.key == "loss")
    (group,) = comparison.groups
    assert comparison.spread_of(group, loss) == Spread(1.0, None, 1)
    chart = next(chart for chart in comparison.charts if chart.name == "loss_tokens")
    faint = [line for line in chart.lines if line.is_faint]
    assert [len(line.points) for line in faint] == [4, 2]
    (mean,) = (line for line in chart.lines if not line.is_faint)
    assert [y for _, y in mean.points] == [1.0] * 4


def test_a_mean_goes_as_far_as_all_of_its_runs(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / str(n), f"--general.seed={n}", steps=[step(k, loss=n) for k in range(1, n + 1)])
        for n in (2, 5)
    ]
    chart = next(chart for chart in comparison_of(*folders).charts if chart.name == "loss_tokens")
    (mean,) = (line for line in chart.lines if not line.is_faint)
    assert mean.points == ((64.0, 3.5), (128.0, 3.5))


def test_long_runs_are_drawn_as_means_of_stretches(tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", steps=[step(n, loss=float(n % 2)) for n in range(1, 4001)])
    chart = next(chart for chart in comparison_of(run).charts if chart.name == "loss_tokens")
    (line,) = chart.lines
    assert len(line.points) == MOST_POINTS
    assert {y for _, y in line.points} == {0.5}


def test_evaluations_are_those_of_the_answers(tmp_path: Path) -> None:
    def evaluation(number: int, answers: float) -> dict:
        roles = {"assistant": {"loss": answers, "tokens": 9}}
        return {"step": number, "sets": {"held <out>": {"loss": 7.0, "roles": roles}, "plain": {"loss": 2.0}}}

    folders = [
        write_run(
            tmp_path / name,
            f"--{ISOLATED}={name}",
            steps=[step(4)],
            evaluations=[evaluation(0, 3.0), evaluation(4, last)],
        )
        for name, last in (("true", 1.5), ("false", 1.75))
    ]
    comparison = comparison_of(*folders)
    change = {effect.figure.key: effect_words(effect) for effect in comparison.effects}
    assert change["evaluation.held <out>"] == "−0.2500 (1 pair)"
    assert change["evaluation.plain"] == "+0.0000 (1 pair)"
    chart = comparison.charts[0]
    assert chart.title == "Evaluation loss, answers of held <out>"
    assert chart.lines[0].points == ((0.0, 3.0), (256.0, 1.5))
    Page(comparison_page(comparison))


def test_the_page_is_well_formed_fetches_nothing_and_names_every_run(tmp_path: Path) -> None:
    page = comparison_page(comparison_of(*ablation(tmp_path)))
    parsed = Page(page)
    assert parsed.addresses == []
    assert "script-src 'none'" in page
    text = "".join(parsed.text)
    assert all(f"c_{c}-i_{i}-{seed}" in text for c in ("true", "false") for i in ("true", "false") for seed in (1, 2))
    assert "8 of 8 runs completed" in text


def test_time_is_that_of_the_steps(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", steps=[step(n, speed=64 / 30) for n in (1, 2, 3)]))
    assert run.minutes() == {1: 0.5, 2: 1.0, 3: 1.5}


def test_a_torn_last_line_is_left_out_and_any_other_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=[step(1), step(2)])
    whole = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(whole + '{"step": 3, "lo')
    assert [each["step"] for each in read_run(folder).steps] == [1, 2]
    (folder / "metrics.jsonl").write_text('{"step": 1, "lo\n' + whole)
    with pytest.raises(ValueError, match=r"metrics.jsonl:1: is not an object with a step"):
        read_run(folder)


@pytest.mark.parametrize("step", ['"one"', "1.5", "null", "true"])
def test_a_step_that_is_no_whole_number_is_named_by_its_line(tmp_path: Path, step: str) -> None:
    folder = write_run(tmp_path / "run", steps=[])
    (folder / "metrics.jsonl").write_text(f'{{"step": {step}}}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:1: is not an object with a step: its step is "):
        read_run(folder)


def test_an_evaluation_without_sets_that_can_be_read_is_named_by_its_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=[step(1)])
    (folder / "evaluations.jsonl").write_text('{"step": 0, "sets": {}}\n{"step": 1, "sets": 5}\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"evaluations\.jsonl:2: is not an object with a step: its sets are 5"):
        read_run(folder)


@pytest.mark.parametrize(
    ("mean", "told"),
    [(0.000321, "0.00032 (1)"), (0.5, "0.500 (1)"), (5.0, "5.000 (1)"), (-0.04, "-0.040 (1)"), (0.0, "0.000 (1)")],
)
def test_a_figure_has_two_digits_that_are_not_zero(mean: float, told: str) -> None:
    assert spread_words(Spread(mean, None, 1), Figure("tflops", "", "", 3, lambda run: None)) == told


def test_numbers_are_found_under_names_with_dots() -> None:
    record = {"datasets": {"a.jsonl": {"loss": 2}, "a": {"jsonl": 3}}, "loss": None, "flag": True, "nan": math.nan}
    assert number_at(record, "datasets.a.jsonl.loss") == 2.0
    assert number_at(record, "loss") is None
    assert number_at(record, "flag") is None
    assert number_at(record, "no.such") is None


def test_any_runs_can_be_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = ablation(tmp_path)[:2]
    out, other = tmp_path / "out", tmp_path / "copy.json"
    assert main([*map(str, folders), "--out", str(out), "--json", str(other)]) == 0
    assert (out / "report.html").exists()
    assert {path.name for path in (out / "plots").iterdir()} >= {"loss_tokens.png", "assistant_loss_time.png"}
    assert json.loads((out / "report.json").read_text()) == json.loads(other.read_text())
    told = capsys.readouterr().out
    assert "remove_cross_attention true against false: tokens/s × 1.500 (1 pair)" in told
    assert told.count(as_text(comparison_of(*folders))) == 1


def test_a_folder_that_is_no_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err


def test_a_run_that_is_named_twice_is_not_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "a", steps=[step(1)])
    (tmp_path / "link").symlink_to(folder)
    assert main([str(folder), str(tmp_path / "link"), "--out", str(tmp_path / "out")]) == 2
    assert f"link is named twice, first as {folder}: name each run once" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--out", "--json"])
def test_a_report_that_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    folder, file = write_run(tmp_path / "a", steps=[step(1)]), tmp_path / "file"
    file.write_text("")
    assert main([str(folder), "--out", str(tmp_path / "out"), option, str(file / "x")]) == 2
    assert "the report cannot be written: " in capsys.readouterr().err


def test_a_result_that_is_no_object_is_none(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=[step(1)])
    (folder / "result.json").write_text("[1]")
    assert read_run(folder).status == "unknown"


# --- What a page claims ---


def recorded(tmp_path: Path, name: str, *, training: str | None = "t", held_out: str = "h", loss: float = 1.0) -> Path:
    """A run of the learning rate `loss`, with what it has recorded of its data."""
    evaluations = [{"step": 6, "stop_rate": loss / 2, "sets": {"held_out": {"loss": loss}}}]
    steps = [step(n, answers=loss) for n in range(1, 7)]
    folder = write_run(tmp_path / name, f"--optimizer.learning_rate={loss}", steps=steps, evaluations=evaluations)
    if training is not None:
        fingerprints = {"training": training, "evaluation": {"held_out": held_out}}
        (folder / "mix_report.json").write_text(json.dumps({"fingerprints": fingerprints}))
    return folder


def notes(*folders: Path) -> dict[str, str]:
    return {chart.name: chart.note for chart in comparison_of(*folders).charts}


def test_losses_are_called_comparable_only_where_the_data_is_known_to_be_the_same(tmp_path: Path) -> None:
    first, same = recorded(tmp_path, "a"), recorded(tmp_path, "b", loss=2.0)
    other, unknown = (
        recorded(tmp_path, "c", training="u", held_out="i", loss=3.0),
        recorded(tmp_path, "d", training=None),
    )
    for name in ("evaluation_1_tokens", "assistant_loss_tokens"):
        assert notes(first, same)[name] == "The same tokens: comparable"
        assert notes(first, other)[name] == "2 different data sets, tokenizers or templates: not comparable"
        assert notes(first, unknown)[name] == ""


def test_a_run_is_named_by_its_run_name_wherever_its_folder_lies(tmp_path: Path) -> None:
    folders = [recorded(tmp_path, "a"), recorded(tmp_path, "b", loss=2.0)]
    moved = [folder.rename(tmp_path / f"copy-{number}") for number, folder in enumerate(folders)]
    comparison = comparison_of(*moved)

    assert [group.words for group in comparison.groups] == ["a: learning_rate 1.0", "b: learning_rate 2.0"]
    assert [run["name"] for run in as_json(comparison)["runs"]] == ["a", "b"]
    page = "".join(Page(comparison_page(comparison)).text)
    assert "a: learning_rate 1.0" in page
    assert "copy-0" not in page


@pytest.mark.parametrize(
    ("name", "goal", "order", "best"),
    [
        ("eval/held_out/loss", "minimize", "acb", "a has the lowest eval/held_out/loss, 1.0000"),
        ("eval/stop_rate", "maximize", "bca", "b has the highest eval/stop_rate, 1.5000"),
        ("roles/assistant/loss", "minimize", "acb", "a has the lowest roles/assistant/loss, 1.0000"),
        ("no/such", "minimize", "abc", ""),
    ],
)
def test_the_metric_sorts_the_runs_and_names_the_best(
    tmp_path: Path, name: str, goal: str, order: str, best: str
) -> None:
    folders = [recorded(tmp_path, "a"), recorded(tmp_path, "b", loss=3.0), recorded(tmp_path, "c", loss=2.0)]
    # What has not come to its end is not the best, whatever it has reached.
    failed = write_run(tmp_path / "f", steps=[step(1, answers=0.1)], status="failed")
    runs = [read_run(folder) for folder in (*folders, failed)]
    comparison = compare("Test", runs, metric=Metric(name, goal))

    assert [run.name for run in comparison.runs] == [*order, "f"]
    assert comparison.best_words == best
    assert best in as_text(comparison)
    assert best in "".join(Page(comparison_page(comparison)).text)
    # What a setting changed is told against the value that was given first, whatever is best.
    assert {effect.reference for effect in comparison.effects} == {1.0}


def test_the_sweeps_metric_is_read_and_a_goal_that_is_none_is_refused(tmp_path: Path) -> None:
    parameters = {"optimizer.learning_rate": {"values": [0.1]}}
    path = write_sweep(tmp_path, parameters, metric={"name": "eval/held_out/loss"})
    assert read_sweep_file(path).metric == Metric("eval/held_out/loss", "minimize")
    path = write_sweep(tmp_path, parameters, metric={"name": "loss", "goal": "small"})
    with pytest.raises(SweepError, match=r"metric\.goal: found 'small'; wanted minimize or maximize"):
        read_sweep_file(path)
    path = write_sweep(tmp_path, parameters, metric="loss")
    with pytest.raises(SweepError, match="metric: found 'loss'; wanted a mapping"):
        read_sweep_file(path)
