"""`sftron train --record N` records what a run trains, and the run is the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from sftcheck.diff.difference import difference
from sftcheck.record.recorder import record_trainer
from sftron.commands.train import main
from sftron.report.token_record import read_record
from sftron.train.first_steps import FirstSteps
from tests.train.runs import make_config, metrics, opened


def recorded(tmp_path: Path, model_folder: Path, *arguments: str, **overrides: Any) -> Path:
    make_config(tmp_path, model_folder, tokens__train_steps=3, **overrides)
    assert main(["--config", str(tmp_path / "config.yaml"), *arguments]) == 0
    return tmp_path / "runs" / "run"


def test_the_weights_times_the_losses_are_the_loss_of_each_step(tmp_path: Path, model_folder: Path) -> None:
    folder = recorded(tmp_path, model_folder, "--record", "2")
    found = read_record(folder / "record.safetensors")
    sums = np.bincount(found.step, -found.weight * found.own)
    assert sums == pytest.approx(found.facts["losses"], rel=1e-6)
    assert found.facts["losses"][0] == pytest.approx(metrics(folder)[0]["loss"], rel=1e-6)
    assert np.abs(found.context - found.reference)[found.is_trained].max() < 1e-4
    rate, update = found.facts["optimizer"]["groups"][0]["lr"], found.facts["update"]
    assert update["norm"] == pytest.approx(rate * np.sqrt(update["num_weights"]), rel=0.05)


def test_a_recorded_run_is_the_run_without_it(tmp_path: Path, model_folder: Path) -> None:
    folders = []
    for name, arguments in (("plain", ()), ("recorded", ("--record=2",))):
        (tmp_path / name).mkdir()
        folders.append(recorded(tmp_path / name, model_folder, *arguments, lora__rank=4))
    lines = [[each["loss"] for each in metrics(folder)] for folder in folders]
    assert lines[0] == lines[1]


@pytest.mark.parametrize("value", ["0", "x", "-1", ""])
def test_a_wrong_number_of_steps_is_refused(value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(tmp_path / "config.yaml"), "--record", value]) == 2
    assert "wanted a number of steps" in capsys.readouterr().err


def test_a_run_that_leaks_is_explained(tmp_path: Path, model_folder: Path) -> None:
    records = []
    for name, isolated in (("a", True), ("b", False)):
        (tmp_path / name).mkdir()
        folder = recorded(tmp_path / name, model_folder, "--record", "1", data__remove_cross_attention=isolated)
        records.append(read_record(folder / "record.safetensors"))
    found = difference(*records)
    assert [each.factor.value for each in found.named] == ["context"]
    assert found.is_explained


def test_a_run_moved_from_transformers_is_equal_in_every_part(tmp_path: Path, model_folder: Path) -> None:
    run = opened(make_config(tmp_path, model_folder))
    batches = [next(iter(run.loader))]
    rows, pack = [], batches[0].pack
    for begin, end in zip(pack.conversation_bounds[:-1], pack.conversation_bounds[1:], strict=True):
        labels = np.append(-100, pack.labels[begin : end - 1])
        rows.append({"input_ids": pack.input_ids[begin:end].tolist(), "labels": labels.tolist()})
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=len(rows), use_cpu=True, report_to="none"
    )
    theirs = Trainer(
        AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32), arguments, train_dataset=rows,
        processing_class=tokenizer, data_collator=DataCollatorForSeq2Seq(tokenizer),
    )  # fmt: skip
    recorder = FirstSteps(run.setup, run.model)
    recorder.add(batches)
    found = difference(record_trainer(theirs), recorder.finish(run))
    assert not found.named
    assert found.is_explained
    assert len(found.a.sketches) == len(rows) > 1
