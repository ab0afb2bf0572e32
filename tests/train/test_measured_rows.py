"""By default a small set is planned: its rows are measured at the start, by all ranks."""

from pathlib import Path
from typing import Any

import pytest

from sftron.commands.audit import main as audit
from sftron.data.lanes import row_lengths
from sftron.data.types import DataError
from sftron.train import build_data
from sftron.train.trainer import dry_run, open_setup, open_trainer
from tests.train.ranks import launch, train
from tests.train.runs import chat_line, make_config, metrics, run

EPOCH = {"data__num_lanes": "auto", "tokens__train_steps": None, "tokens__train_epochs": 1}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows are measured at each start that measures any."""
    counts: list[int] = []

    def counted(preparation: Any, rows: Any) -> list[int | str]:
        counts.append(len(rows))
        return row_lengths.measure_rows(preparation, rows)

    monkeypatch.setattr(build_data, "measure_rows", counted)
    monkeypatch.setattr("sftron.data.dataset.measure_rows", counted)
    return counts


def test_a_run_whose_packs_were_the_pools_is_not_resumed_with_those_of_best_fit_decreasing(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sftron.data.dataset.is_best_fit_fuller", lambda *_, **__: False)
    run(make_config(tmp_path, model_folder, **EPOCH, checkpoints__export_hf=False))
    monkeypatch.setattr("sftron.data.dataset.is_best_fit_fuller", lambda *_, **__: True)
    with pytest.raises(ValueError, match="planned packing: absent in the checkpoint, best-fit decreasing now"):
        open_trainer(make_config(tmp_path, model_folder, **EPOCH, checkpoints__export_hf=False))


def test_lanes_of_ones_own_and_streams_are_not_measured(
    tmp_path: Path, model_folder: Path, measured: list[int]
) -> None:
    make_config(tmp_path, model_folder)
    streamed = {"data__datasets": [{"path": str(tmp_path / "rows.jsonl"), "streaming": True}]}
    for options, num_lanes in (({"data__num_lanes": 4}, 4), (streamed | {"data__num_lanes": "auto"}, 48)):
        setup = open_setup(make_config(tmp_path, model_folder, **options))
        assert (setup.data.dataset.num_lanes, setup.data.dataset.is_planned) == (num_lanes, False)
        assert setup.fingerprint["data.num_lanes"] == str(num_lanes)
    assert not measured


def test_a_planned_run_takes_any_number_of_workers_and_names_a_bad_row_before_weights_are_read(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = open_setup(make_config(tmp_path, model_folder, **EPOCH, data__num_workers=5))
    assert build_data.num_workers(setup.config, setup.data.dataset) == 5
    assert dry_run(setup) == 0
    assert "30 rows in one lane, planned by their lengths, loader workers: 5, packs of" in capsys.readouterr().out

    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    # Row 301 of 799 is none of those that are sampled.
    rows = [rows[n % 30] if n != 301 else '{"messages": 5}' for n in range(799)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:302: `messages` is the number 5"):
        open_setup(make_config(tmp_path, model_folder, **EPOCH))


def test_a_planned_epoch_on_two_ranks_is_the_epoch_on_one(tmp_path: Path, model_folder: Path) -> None:
    """Each measures a part of the rows. Many are near half the budget, so packs are those of best-fit decreasing."""
    lines = [chat_line(f"Hi {n}", "Yo " * (3 + n * 37 % 16)) for n in range(61)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def configure(name: str, num_ranks: int) -> Any:
        options = {"tokens__batch_accumulation_per_replica": 2 // num_ranks, "parallelism__timeout_seconds": 60}
        return make_config(tmp_path, model_folder, **EPOCH, **options, general__run_name=name)

    assert run(configure("on-1", 1)).setup.data.dataset.is_best_fit
    configure("on-2", 2)
    for ended in launch(2, train, tmp_path / "config.yaml", folder=tmp_path):
        assert ended.exit_code == 0, ended.err
    alone, ours = metrics(tmp_path / "runs/on-1"), metrics(tmp_path / "runs/on-2")
    assert len(alone) == len(ours) > 3
    for one, two in zip(alone, ours, strict=True):
        for key in ("tokens", "trained_tokens", "total_tokens", "conversations", "epoch", "learning_rate"):
            assert two[key] == one[key]
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert sum(each["conversations"] for each in ours) == 61
    assert [audit([str(tmp_path / "runs" / name)]) for name in ("on-1", "on-2")] == [0, 0]
