"""With checkpoints.allow_data_change a run goes on with other data: weights and step are kept, an epoch begins."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sftron.checkpoint.checkpoint import CheckpointError
from sftron.checks.replay import OpenedRun, audit_run
from sftron.train.trainer import open_trainer
from tests.train.runs import (
    NUM_ROWS,
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

OPTIONS: dict[str, Any] = {"checkpoints__export_hf": False}
ALLOWED = OPTIONS | {"checkpoints__allow_data_change": True}


def add_rows(folder: Path, number: int) -> None:
    with (folder / "rows.jsonl").open("a") as file:
        file.write("".join(chat_line(f"What is new {n}?", f"new {n}.") + "\n" for n in range(number)))


def test_the_run_goes_on_with_its_weights_and_the_data_begins_the_next_epoch(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(make_config(tmp_path, model_folder, **OPTIONS, tokens__train_steps=4))
    latest = first.progress.datasets[0].latest_epoch
    before = first.progress
    add_rows(tmp_path, 5)
    capsys.readouterr()
    changed = opened(make_config(tmp_path, model_folder, **ALLOWED, tokens__train_steps=18))

    said = capsys.readouterr().out
    assert "data       has changed since the checkpoint, as checkpoints.allow_data_change allows:" in said
    assert "data.datasets.0: " in said
    assert f"epoch {latest + 1}, counted from 0, begins with it" in said
    assert bits(changed) == bits(first)
    now = changed.progress
    assert now.step == 4
    assert [now.total.tokens, now.rows] == [before.total.tokens, before.rows]
    assert (now.first_epoch, now.datasets[0].rows) == (latest + 1, 0)

    assert changed.train() == 0
    folder = changed.directory.folder
    assert [line["step"] for line in metrics(folder)] == list(range(1, 19))
    assert metrics(folder)[4]["total_tokens"] > metrics(folder)[3]["total_tokens"]
    assert latest + 1 < metrics(folder)[4]["epoch"] < latest + 1.5
    recorded = [line["rows"] for line in metrics(folder)]
    assert [rows["packs"] for rows in recorded] == [[n, n + 2] for n in range(0, 36, 2)]
    assert [rows["epochs"][0] for rows in recorded] == [0] * 4 + [latest + 1] * 14
    found = audit_run(OpenedRun(folder))
    assert found.passed, found.as_text()
    assert found.checks[2].measured == (
        "14 steps have the same rows, tokens and weights; the data of 4 others is no longer available"
    )
    assert (latest + 1, NUM_ROWS + 5, "whole") in [(each.epoch, each.rows, each.verdict) for each in found.epochs]


def test_after_the_change_the_run_is_resumed_exactly_with_or_without_the_key(
    tmp_path: Path, model_folder: Path
) -> None:
    """And twice the same, where it was killed before it saved anything of the new data."""
    ended = []
    for name in ("whole", "stopped"):
        write_rows(tmp_path / "rows.jsonl")
        options = {**OPTIONS, "general__run_name": name, "checkpoints__interval": 2}
        run(make_config(tmp_path, model_folder, **options, tokens__train_steps=3))
        add_rows(tmp_path, 3)
        allowed = options | {"checkpoints__allow_data_change": True}
        if name == "stopped":
            open_trainer(make_config(tmp_path, model_folder, **allowed))
            run(make_config(tmp_path, model_folder, **allowed, tokens__train_steps=6, optimizer__schedule="constant"))
            options["data__num_workers"] = 1
        else:
            options = allowed
        ended.append(
            run(make_config(tmp_path, model_folder, **options, tokens__train_steps=9, optimizer__schedule="constant"))
        )

    whole, stopped = ended
    assert stopped.loader.state_dict() == whole.loader.state_dict()
    assert stopped.progress == whole.progress
    assert bits(stopped) == bits(whole)
    assert len({str([line["rows"] for line in metrics(trainer.directory.folder)]) for trainer in ended}) == 1


def test_training_by_epochs_deals_the_new_rows_in_each_epoch_that_is_left(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**ALLOWED, "tokens__train_steps": None, "tokens__train_epochs": 4}
    make_config(tmp_path, model_folder)
    stopped = opened(make_config(tmp_path, model_folder, **options, data__num_workers=0))
    on_each_step(monkeypatch, stop_in(1))
    assert stopped.train() == 0
    epoch = stopped.progress.datasets[0].latest_epoch + 1
    add_rows(tmp_path, 7)
    ended = run(make_config(tmp_path, model_folder, **options))
    folder = ended.directory.folder

    assert epoch <= 2
    assert ended.progress.datasets[0].rows == (4 - epoch) * (NUM_ROWS + 7)
    found = audit_run(OpenedRun(folder))
    assert found.passed, found.as_text()
    whole = [each.epoch for each in found.epochs if each.verdict == "whole"]
    assert whole == list(range(epoch, 4))
    assert metrics(folder)[-1]["epoch"] == 4
    assert metrics(folder)[-1]["learning_rate"] < 0.2 * 1e-2
    # All epochs have begun: nothing would be left to train.
    add_rows(tmp_path, 1)
    with pytest.raises(
        CheckpointError, match=r"4 epochs began with the old data, but tokens\.train_epochs is 4; raise it"
    ):
        open_trainer(make_config(tmp_path, model_folder, **options))


def test_other_data_sets_and_lanes_may_come_and_each_is_counted_from_zero(tmp_path: Path, model_folder: Path) -> None:
    run(make_config(tmp_path, model_folder, **OPTIONS, tokens__train_steps=3))
    write_rows(tmp_path / "other.jsonl", 9)
    sets = [{"path": str(tmp_path / name), "weight": 1} for name in ("rows.jsonl", "other.jsonl")]
    options = {**ALLOWED, "data__datasets": sets, "data__num_lanes": 6, "general__seed": 3}
    ended = run(make_config(tmp_path, model_folder, **options, tokens__train_steps=9))

    assert all(count.rows for count in ended.progress.datasets)
    assert ended.progress.before.rows > 0
    found = audit_run(OpenedRun(ended.directory.folder))
    assert found.passed, found.as_text()
    mix = json.loads((ended.directory.folder / "mix_report.json").read_text())
    assert sum(each["trained"]["share"] for each in mix["datasets"]) == pytest.approx(1)


def test_another_model_is_refused_with_the_key_too(tmp_path: Path, model_folder: Path) -> None:
    run(make_config(tmp_path, model_folder, **OPTIONS, tokens__train_steps=1))
    other = Path(shutil.copytree(model_folder, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.01}))
    with pytest.raises(CheckpointError, match="the model's norm_eps"):
        open_trainer(make_config(tmp_path, other, **ALLOWED))
