"""Runs are compared like with like, whatever they have recorded and however far they came."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from sftron.commands.compare import main
from sftron.compare.comparison import MOST_POINTS, Comparison, Metric, compare
from sftron.compare.figures import Spread
from sftron.compare.recorded_run import read_run
from tests.compare.sweeps import COMPLETIONS, ISOLATED, ablation, step, write_run


def comparison_of(*folders: Path) -> Comparison:
    return compare("Test", [read_run(folder) for folder in folders])


def effect_texts(comparison: Comparison) -> dict[tuple[str, str], str]:
    return {(effect.key, effect.figure.key): effect.text for effect in comparison.effects}


def spread_of(comparison: Comparison, key: str, group: int = 0) -> Spread | None:
    (figure,) = (figure for figure in comparison.figures if figure.key == key)
    return comparison.groups[group].spread(figure)


@pytest.fixture(scope="module")
def toggles(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return comparison_of(*ablation(tmp_path_factory.mktemp("ablation")))


def test_figures_are_means_over_seeds_and_effects_are_measured_between_runs_that_are_alike_in_all_else(
    toggles: Comparison,
) -> None:
    assert [(group.letter, len(group.runs)) for group in toggles.groups] == [(letter, 2) for letter in "ABCD"]
    assert toggles.groups[1].words == "train_on_completions_only true, remove_cross_attention false"
    answers = spread_of(toggles, "answers_loss", 2)
    assert answers is not None
    assert (answers.mean, answers.std) == pytest.approx((1.115, statistics.stdev([1.11, 1.12])))
    assert spread_of(toggles, "tokens_per_second", 2) == Spread(225.0, statistics.stdev([150, 300]), 2)

    texts = effect_texts(toggles)
    # The seeds' speeds differ by a factor of two, and still each pair gives 1.5.
    assert texts[ISOLATED, "tokens_per_second"] == "× 1.500 ± 0.000 (4 pairs)"
    assert texts[COMPLETIONS, "answers_loss"] == "−0.1000 ± 0.0000 (4 pairs)"
    assert texts[ISOLATED, "answers_loss"] == "+0.0000 ± 0.0000 (4 pairs)"
    assert {(effect.value, effect.reference) for effect in toggles.effects} == {(True, False)}
    # Losses over different tokens are no effect.
    assert "loss" in {figure.key for figure in toggles.figures} - {effect.figure.key for effect in toggles.effects}


def test_a_slow_moment_of_the_machine_does_not_move_a_speed(tmp_path: Path) -> None:
    steps = {name: [step(n, speed=speed) for n in range(1, 8)] for name, speed in (("true", 120.0), ("false", 100.0))}
    steps["true"][3] = step(4, speed=1.0)
    steps["false"][5] = step(6, speed=2.0)
    folders = [write_run(tmp_path / name, f"--{ISOLATED}={name}", steps=each) for name, each in steps.items()]
    assert effect_texts(comparison_of(*folders))[ISOLATED, "tokens_per_second"] == "× 1.200 (1 pair)"


def test_runs_are_compared_by_what_they_have_recorded(tmp_path: Path) -> None:
    without = write_run(tmp_path / "without", "--optimizer.learning_rate=1.0e-4", steps=[step(1), step(2)])
    with_roles = write_run(tmp_path / "with", steps=[step(1, answers=0.5), step(2, answers=0.4)])
    nothing = write_run(tmp_path / "nothing", "--optimizer.learning_rate=0.1", status="failed", error="<out of> memory")
    (nothing / "result.json").write_text("[1]")
    comparison = comparison_of(without, with_roles, nothing)
    assert [group.words for group in comparison.groups] == [
        "without: learning_rate 0.0001",
        "with: learning_rate 0.001",
        "nothing: learning_rate 0.1",
    ]
    assert spread_of(comparison, "answers_loss") is None
    assert json.loads(comparison.as_json())["runs"][2]["status"] == "unknown"
    page = comparison.as_html()
    assert all(text in page for text in ("not recorded", "Training loss of the answers", "2 of 3 runs completed"))
    assert not comparison_of(nothing).charts


def loss_lines(comparison: Comparison) -> tuple[list[Any], Any]:
    """The faint lines of the chart of losses, and the mean."""
    lines = next(chart for chart in comparison.charts if chart.name == "loss_tokens").lines
    (mean,) = (line.points for line in lines if not line.is_faint)
    return [line.points for line in lines if line.is_faint], mean


def test_a_mean_goes_as_far_as_all_completed_runs_and_a_failed_run_is_only_drawn(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / str(n), f"--general.seed={n}", steps=[step(k, loss=n) for k in range(1, n + 1)])
        for n in (2, 5)
    ]
    folders.append(write_run(tmp_path / "bad", "--general.seed=3", status="failed", steps=[step(1, loss=9.0)]))
    comparison = comparison_of(*folders)
    faint, mean = loss_lines(comparison)
    assert [len(points) for points in faint] == [2, 5, 1]
    assert mean == ((64.0, 3.5), (128.0, 3.5))
    assert spread_of(comparison, "loss") == Spread(3.5, statistics.stdev([2, 5]), 2)


def test_long_runs_are_drawn_as_means_of_spans(tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", steps=[step(n, loss=float(n % 2)) for n in range(1, 4001)])
    faint, mean = loss_lines(comparison_of(run))
    assert (len(faint), len(mean), {y for _, y in mean}) == (0, MOST_POINTS, {0.5})


def test_evaluation_losses_cover_the_answers(tmp_path: Path) -> None:
    def evaluation(number: int, answers: float) -> dict[str, Any]:
        roles = {"assistant": {"loss": answers, "tokens": 9}}
        return {"step": number, "sets": {"held <out>.jsonl": {"loss": 7.0, "roles": roles}, "plain": {"loss": 2.0}}}

    folders = []
    for name, last in (("true", 1.5), ("false", 1.75)):
        evaluations = [evaluation(0, 3.0), evaluation(4, last)]
        folders.append(write_run(tmp_path / name, f"--{ISOLATED}={name}", steps=[step(4)], evaluations=evaluations))
    comparison = comparison_of(*folders)
    texts = effect_texts(comparison)
    assert texts[ISOLATED, "evaluation.held <out>.jsonl"] == "−0.2500 (1 pair)"
    assert texts[ISOLATED, "evaluation.plain"] == "+0.0000 (1 pair)"
    chart = comparison.charts[0]
    assert chart.title == "Evaluation loss, answers of held <out>.jsonl"
    assert chart.lines[0].points == ((0.0, 3.0), (256.0, 1.5))


def test_numbers_have_the_names_of_wandb_and_time_counts_only_steps(tmp_path: Path) -> None:
    odd = {"datasets": {"a.jsonl": {"loss": 2}}, "loss": None, "flag": True, "nan": math.nan}
    folder = write_run(tmp_path / "a", steps=[step(n, speed=64 / 30) | odd for n in (1, 2, 3)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # the run was killed
    run = read_run(folder)
    assert run.by_step("datasets/a.jsonl/loss") == {1: 2.0, 2: 2.0, 3: 2.0}
    assert run.by_step("loss") == run.by_step("flag") == {}
    assert run.minutes() == {1: 0.5, 2: 1.0, 3: 1.5}


# --- What a page claims ---


def recorded(
    folder: Path, name: str, *, training: str | None = "t", held_out: str = "h", loss: float = 1.0, **options: Any
) -> Path:
    """A run of the learning rate `loss`, with what it has recorded of its data."""
    evaluations = [{"step": 6, "stop_rate": loss / 2, "sets": {"held_out": {"loss": loss}}}]
    steps = [step(n, answers=loss) for n in range(1, 7)]
    rate = f"--optimizer.learning_rate={loss}"
    run = write_run(folder / name, rate, steps=steps, evaluations=evaluations, **options)
    if training is not None:
        fingerprints = {"training": training, "evaluation": {"held_out": held_out}}
        (run / "mix_report.json").write_text(json.dumps({"fingerprints": fingerprints}))
    return run


def test_losses_are_called_comparable_only_where_the_data_is_known_to_be_the_same(tmp_path: Path) -> None:
    first, same = recorded(tmp_path, "a"), recorded(tmp_path, "b", loss=2.0)
    other = recorded(tmp_path, "c", training="u", held_out="i", loss=3.0)
    unknown = recorded(tmp_path, "d", training=None)
    for second, note in (
        (same, "The same tokens: comparable"),
        (other, "2 different data sets, tokenizers or templates: not comparable"),
        (unknown, ""),
    ):
        notes = {chart.name: chart.note for chart in comparison_of(first, second).charts}
        assert notes["evaluation_1_tokens"] == notes["assistant_loss_tokens"] == note


def test_a_run_is_named_by_its_run_name_wherever_its_folder_is(tmp_path: Path) -> None:
    moved = recorded(tmp_path, "a").rename(tmp_path / "copy")
    comparison = comparison_of(moved, recorded(tmp_path, "b", loss=2.0))
    assert [group.words for group in comparison.groups] == ["a: learning_rate 1.0", "b: learning_rate 2.0"]
    assert [run["name"] for run in json.loads(comparison.as_json())["runs"]] == ["a", "b"]


RATE = "--optimizer.learning_rate=0.01"
LORA = ("--lora.rank=16", RATE)
PRODUCT, PERSONA = "{path: examples/quickstart/product.jsonl}", "{path: examples/quickstart/persona.jsonl}"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (((), LORA), ["r0: lora false, learning_rate 0.001", "r1: lora true, learning_rate 0.01"]),
        (
            ((), LORA, ("--lora.rank=4", RATE)),
            [
                "r0: lora false, learning_rate 0.001",
                "r1: lora true, learning_rate 0.01, rank 16",
                "r2: lora true, learning_rate 0.01, rank 4",
            ],
        ),
        (
            ((), LORA, (*LORA, "--general.seed=9")),
            ["r0: lora false, learning_rate 0.001", "lora true, learning_rate 0.01"],
        ),
        (((), ("--optimizer.max_grad_norm=null",)), ["r0: max_grad_norm 1.0", "r1: max_grad_norm none"]),
        (
            ((f"--data.datasets=[{PRODUCT}]",), (f"--data.datasets=[{PERSONA}]",)),
            [
                "r0: data.datasets.path [examples/quickstart/product.jsonl]",
                "r1: data.datasets.path [examples/quickstart/persona.jsonl]",
            ],
        ),
        (
            ((f"--data.datasets=[{PRODUCT}]",), (f"--data.datasets=[{PRODUCT[:-1]}, max_samples: 9}}]",)),
            ["r0: data.datasets.max_samples [none]", "r1: data.datasets.max_samples [9]"],
        ),
    ],
)
def test_runs_are_named_by_what_differs_and_never_by_null(
    tmp_path: Path, overrides: tuple[tuple[str, ...], ...], words: list[str]
) -> None:
    folders = [write_run(tmp_path / f"r{n}", *more, steps=[step(1), step(2)]) for n, more in enumerate(overrides)]
    comparison = comparison_of(*folders)
    assert [group.words for group in comparison.groups] == words
    assert "null" not in comparison.as_text()
    assert "null" not in comparison.as_html().partition("<body")[2]


@pytest.mark.parametrize(
    ("name", "goal", "order", "best"),
    [
        ("eval/held_out/loss", "minimize", "acb", "a has the lowest eval/held_out/loss, 1.0000"),
        ("eval/stop_rate", "maximize", "bca", "b has the highest eval/stop_rate, 1.5000"),
        ("no/such", "minimize", "abc", ""),
    ],
)
def test_the_metric_sorts_the_runs_and_names_the_best(
    tmp_path: Path, name: str, goal: str, order: str, best: str
) -> None:
    folders = [recorded(tmp_path, each, loss=loss) for each, loss in (("a", 1.0), ("b", 3.0), ("c", 2.0))]
    # What has not come to its end is not the best, whatever it has reached.
    folders.append(recorded(tmp_path, "f", loss=0.1, status="failed"))
    comparison = compare("Test", [read_run(folder) for folder in folders], metric=Metric(name, goal))
    assert [run.name for run in comparison.runs] == [*order, "f"]
    assert comparison.best_words == best
    assert best in comparison.as_html()
    # A setting's values are compared with the one that was given first, whatever is best.
    assert {effect.reference for effect in comparison.effects} == {1.0}


# --- sftron compare ---


def test_any_runs_can_be_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders, out, copy = ablation(tmp_path)[:2], tmp_path / "out", tmp_path / "copy.json"
    assert main([*map(str, folders), "--out", str(out), "--json", str(copy)]) == 0
    assert "script-src 'none'" in (out / "report.html").read_text()
    assert {path.name for path in (out / "plots").iterdir()} >= {"loss_tokens.png", "assistant_loss_time.png"}
    assert (out / "report.json").read_text() == copy.read_text()
    shown = capsys.readouterr().out
    assert "remove_cross_attention true against false: tokens/s × 1.500 (1 pair)" in shown
    assert shown.count(comparison_of(*folders).as_text()) == 1


def test_what_cannot_be_plotted_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file = write_run(tmp_path / "a", steps=[step(1)]), tmp_path / "file"
    (tmp_path / "link").symlink_to(folder)
    file.write_text("")
    for arguments, problem in (
        ([tmp_path], f"{tmp_path} is not a run directory"),
        ([folder, tmp_path / "link"], "has a run twice"),
        ([folder, "--out", file / "x"], f"{file}/x cannot be written: "),
        ([folder, "--out", tmp_path / "out", "--json", file / "x"], f"{file}/x cannot be written: "),
    ):
        assert main([str(each) for each in arguments]) == 2
        assert problem in capsys.readouterr().err


def on_ranks(num_ranks: int, *, total: int) -> list[dict[str, Any]]:
    """Steps of 2 packs on each rank; before the last one, the packs of a round without a conversation are skipped."""
    ends = [2 * num_ranks * n for n in range(1, 12)] + [2 * num_ranks * 13]
    firsts = [0, *ends]
    return [
        step(n + 1) | {"total_tokens": total * (n + 1), "rows": {"packs": [first, end]}}
        for n, (first, end) in enumerate(zip(firsts, ends, strict=False))
    ]


def test_the_number_of_ranks_is_a_setting_and_no_seed(tmp_path: Path) -> None:
    packs = "--tokens.batch_accumulation_per_replica=2"
    folders = [
        write_run(tmp_path / f"run_{ranks}_{seed}", packs, f"--general.seed={seed}", steps=on_ranks(ranks, total=total))
        for ranks, total in ((1, 64), (2, 128))
        for seed in (1, 2)
    ]
    changed = write_run(tmp_path / "changed", packs, steps=on_ranks(1, total=64)[:6] + on_ranks(2, total=64)[6:])
    failed = write_run(tmp_path / "failed", packs, status="failed", error="out of memory")
    comparison = comparison_of(*folders, changed, failed)
    assert [group.words for group in comparison.groups] == ["ranks 1", "ranks 2", "changed: ranks [1, 2]"]
    assert [run.name for run in comparison.groups[0].runs] == ["run_1_1", "run_1_2", "failed"]
    assert [spread_of(comparison, "tokens", group) for group in (0, 1)] == [Spread(768, 0, 2), Spread(1536, 0, 2)]


def test_runs_with_equal_seeds_count_once(tmp_path: Path) -> None:
    losses = {"a": (1, 2.0), "again": (1, 4.0), "b": (2, 5.0)}
    folders = [
        write_run(tmp_path / name, f"--general.seed={seed}", steps=[step(1, loss=loss)])
        for name, (seed, loss) in losses.items()
    ]
    assert spread_of(comparison_of(*folders), "loss") == Spread(4.0, statistics.stdev([3, 5]), 2)
    assert spread_of(comparison_of(*folders[:2]), "loss") == Spread(3.0, None, 1)
