"""A run on a mixture: planned shares are trained shares, the report has both, and a stop changes neither."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sftron.config import Config
from sftron.train.run import Setup
from sftron.train.sample import project
from sftron.train.text.description import describe_run
from sftron.train.trainer import Trainer, open_setup, open_trainer
from tests.train.runs import (
    bits,
    chat_line,
    make_config,
    metrics,
    on_each_step,
    opened,
    run,
    stop_in,
    write_rows,
)


def write_mixture(folder: Path) -> list[dict[str, Any]]:
    """Three data sets; one of them with rows that are dropped, and one of four rows."""
    write_rows(folder / "rows.jsonl", 60)
    lines = [chat_line("too long", "word " * 200), *(chat_line(f"q {n}", "a " * (n % 7 + 1)) for n in range(39))]
    (folder / "short.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "few.jsonl").write_text("\n".join(chat_line(f"Who {n}?", "Me.") for n in range(4)) + "\n")
    return [
        {"path": str(folder / "rows.jsonl"), "weight": 2},
        {"path": str(folder / "short.jsonl"), "weight": 1, "name": "short"},
        {"path": str(folder / "few.jsonl"), "weight": 1},
    ]


def mixture(folder: Path, model_folder: Path, **options: Any) -> Config:
    """With a pool of a few packs: what is pending is a small part of what is trained, as it is in longer runs."""
    pool = {"pool_size": 16}
    return make_config(
        folder, model_folder, **{"data__datasets": write_mixture(folder), "data__packing": pool} | options
    )


def report_of(trained: Trainer) -> dict[str, Any]:
    return json.loads((trained.directory.folder / "mix_report.json").read_text())


def test_the_report_has_the_plan_at_the_start_and_what_was_trained_at_the_end(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = opened(mixture(tmp_path, model_folder, general__run_name="started"))
    config = mixture(tmp_path, model_folder, tokens__train_steps=60, data__num_lanes=1)
    planned, trained = report_of(started), report_of(run(config))

    assert (planned["step"], planned["tokens"], trained["step"]) == (0, 0, 60)
    names = [str(tmp_path / "rows.jsonl"), "short", str(tmp_path / "few.jsonl")]
    paths = [str(tmp_path / name) for name in ("rows.jsonl", "short.jsonl", "few.jsonl")]
    for report in (planned, trained):
        found = [[each[key] for key in ("name", "path", "rows", "weight")] for each in report["datasets"]]
        assert found == [list(each) for each in zip(names, paths, (60, 40, 4), (2, 1, 1), strict=True)]
        assert [each["planned"]["share"] for each in report["datasets"]] == [0.5, 0.25, 0.25]
    assert all(each["trained"]["rows"] == 0 for each in planned["datasets"])

    rows, short, few = trained["datasets"]
    assert trained["tokens"] == sum(each["trained"]["tokens"] for each in trained["datasets"]) > 10_000
    for each in trained["datasets"]:
        done, plan = each["trained"], each["planned"]
        assert done["share"] == pytest.approx(plan["share"], abs=0.02)
        assert done["epochs"] == done["rows"] / each["rows"] == pytest.approx(plan["epochs"], rel=0.1)
        assert 0 < done["trained_tokens"] < done["tokens"]
        assert done["rows"] == done["conversations"] + sum(done["dropped"].values())
    assert few["trained"]["epochs"] > 10 > rows["trained"]["epochs"]
    assert short["trained"]["dropped"].keys() == {"overlong"}
    assert rows["trained"]["dropped"] == few["trained"]["dropped"] == {}

    said = capsys.readouterr().out
    assert "data       short, read as messages, 25.0 % of the tokens" in said
    assert f"WARNING    {names[2]} is trained about " in said
    assert f"WARNING    {names[0]} is trained" not in said
    last = metrics(tmp_path / "runs/run")[-1]
    assert last["epoch"] is None
    assert {name: count["tokens"] for name, count in last["datasets"].items()} == {
        each["name"]: each["trained"]["tokens"] for each in trained["datasets"]
    }


@pytest.mark.nightly  # the same of two streams and a file is below
def test_a_mixture_that_is_stopped_and_continued_is_the_one_that_never_stopped(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(mixture(tmp_path, model_folder, general__run_name="whole", tokens__train_steps=12))
    on_each_step(monkeypatch, stop_in(1, 5))
    stops = []
    for num_workers in (0, 2, 1):
        last = run(mixture(tmp_path, model_folder, tokens__train_steps=12, data__num_workers=num_workers))
        stops.append(last.progress.step)

    assert stops == [1, 5, 12]
    assert bits(last) == bits(whole)
    assert last.progress == whole.progress
    assert report_of(last) == report_of(whole)


def test_the_projection_is_what_becomes_of_a_run_without_weights(tmp_path: Path, model_folder: Path) -> None:
    """By epochs, so that it can be counted: the tokens of all rows, and how many steps they were."""
    datasets = [{**each, "weight": None} for each in write_mixture(tmp_path)]
    options = {"data__datasets": datasets, "tokens__train_steps": None, "tokens__train_epochs": 3}
    ended = run(make_config(tmp_path, model_folder, **options, data__num_lanes=1))

    plan = ended.setup.data.projection
    assert 3 * plan.tokens_per_epoch == ended.progress.total.tokens
    assert 3 * (plan.steps_per_epoch or 0) == pytest.approx(ended.progress.step, rel=0.05)
    assert [each.epochs for each in plan.datasets] == pytest.approx([3, 3, 3])
    report = report_of(ended)
    for each in report["datasets"]:
        assert each["trained"]["epochs"] == 3
        assert each["trained"]["share"] == pytest.approx(each["planned"]["share"])


def test_a_pool_that_holds_less_than_a_pack_is_reported(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = open_setup(mixture(tmp_path, model_folder, tokens__micro_batch_size=20, data__packing={"pool_size": 8}))
    plan = project(small.config, small.data.dataset, small.data.sample, dp_world_size=1)
    describe_run(small, None)

    pack = next(iter(small.data.dataset))
    assert plan.conversations_per_pack == len(pack.keys) == 8
    assert plan.fill == pytest.approx(pack.num_tokens / len(pack.input_ids), rel=0.3)
    assert "WARNING    a pool of 8 conversations fills about" in capsys.readouterr().out


def test_a_data_set_that_cannot_have_its_share_is_refused_and_two_of_one_name_are_numbered(
    tmp_path: Path, model_folder: Path
) -> None:
    datasets = write_mixture(tmp_path)
    twice = open_setup(make_config(tmp_path, model_folder, data__datasets=[*datasets, dict(datasets[1])]))
    assert twice.data.dataset.preparation.source_names[1::2] == ("short", "short (2)")

    (tmp_path / "few.jsonl").write_text(chat_line("nobody answers") + "\n")
    with pytest.raises(ValueError, match=r"None of 1 rows of .*few\.jsonl was kept, so it cannot get its share"):
        open_setup(make_config(tmp_path, model_folder, data__datasets=datasets))


def test_the_share_of_dropped_rows_is_judged_by_the_weights(tmp_path: Path, model_folder: Path) -> None:
    """Half of a small data set's rows are dropped: many where it has half of the tokens, few where it has little."""
    write_rows(tmp_path / "rows.jsonl", 300)
    half = [chat_line("Hi", "Yo") if n % 2 else chat_line("nobody answers") for n in range(20)]
    (tmp_path / "half.jsonl").write_text("\n".join(half) + "\n")

    def make(weight: float) -> Setup:
        datasets = [
            {"path": str(tmp_path / "rows.jsonl"), "weight": 1},
            {"path": str(tmp_path / "half.jsonl"), "weight": weight},
        ]
        return open_setup(make_config(tmp_path, model_folder, data__datasets=datasets))

    make(0.001)
    with pytest.raises(ValueError, match=r"rows were dropped \(.*\), more than data\.max_dropped_share 0\.05 allows"):
        make(1)


def test_a_streamed_run_that_is_stopped_and_continued_is_the_one_that_never_stopped(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two streams and a data set that is not one; epochs are crossed."""
    datasets = [{**each, "streaming": number < 2} for number, each in enumerate(write_mixture(tmp_path))]
    options = {"data__datasets": datasets, "tokens__train_steps": 24}
    whole = run(mixture(tmp_path, model_folder, general__run_name="whole", **options))
    on_each_step(monkeypatch, stop_in(3, 15))
    stops = []
    for num_workers in (1, 0, 2):
        last = run(mixture(tmp_path, model_folder, data__num_workers=num_workers, **options))
        stops.append(last.progress.step)

    assert stops == [3, 15, 24]
    assert bits(last) == bits(whole)
    assert last.progress == whole.progress
    assert last.progress.datasets[1].latest_epoch > 0
    # What the first pack took was read to the end, in this process and not in a loader's.
    assert report_of(last) == report_of(whole)

    changed = {"data__datasets": [{**each, "weight": 1} for each in datasets], "tokens__train_steps": 25}
    with pytest.raises(ValueError, match=r"data\.datasets\.\*\.weight: 2 : 1 : 1 in the checkpoint, 1 : 1 : 1 now"):
        open_trainer(mixture(tmp_path, model_folder, **changed))


def test_of_a_stream_whose_end_is_not_known_no_length_of_an_epoch_is_printed(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "rows.jsonl", 1500)
    streamed = {"path": str(tmp_path / "rows.jsonl"), "streaming": True}
    ended = run(make_config(tmp_path, model_folder, data__datasets=[streamed], data__num_workers=1))

    said = capsys.readouterr().out
    assert "           rows, read forward, in 4 lanes" in said
    assert "\nprojection 20 steps; " in said
    assert re.search(r"step +20/20 .* \| epoch 0\.00 \|", said)
    assert metrics(ended.directory.folder)[-1]["epoch"] is None
    (reported,) = report_of(ended)["datasets"]
    assert (reported["rows"], reported["planned"]["share"], reported["planned"]["epochs"]) == (None, 1, None)
    assert reported["trained"]["epochs"] == 0
    assert reported["trained"]["rows"] > 50
