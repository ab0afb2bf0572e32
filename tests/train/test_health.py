"""Weights from which no training can go on are not saved, not the best, not exported, and cost no checkpoint."""

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sftron.checkpoint.checkpoint import read_state
from sftron.commands.train import run as main
from sftron.config import Checkpoints
from sftron.train import loop, objective
from sftron.train.run_directory import RunDirectory
from sftron.train.saving import Saver
from tests.train.runs import bits, chat_line, make_config, run

CONSTANT = {"optimizer__schedule": "constant", "tokens__batch_accumulation_per_replica": 1, "logging__interval": 1}
EVERY = CONSTANT | {"checkpoints__interval": 1, "checkpoints__keep_last": 2, "checkpoints__export_hf": False}
BREAKS = 1e38
"""A learning rate: AdamW moves every weight by about that, which is finite, and no loss of such weights is."""


def start(tmp_path: Path, model_folder: Path, **options: Any) -> int:
    make_config(tmp_path, model_folder, **options)
    return main(["--config", str(tmp_path / "config.yaml")])


def result_of(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "runs/run/result.json").read_text())


def saved(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "runs/run/checkpoints").glob("*"))


def make_bad(monkeypatch: pytest.MonkeyPatch, bad_steps: set[int], stop_after: int | None = None) -> None:
    """The batches of some steps have no finite loss, whatever the weights; and a signal comes in some step."""
    reached = 0
    original, loss_of = loop.train_step, objective.loss_of

    def train_step(*arguments: Any, **options: Any) -> Any:
        nonlocal reached
        reached += 1
        for batch in arguments[2]:
            batch_is_bad[id(batch)] = reached in bad_steps
            kept.append(batch)
        if reached == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **options)

    batch_is_bad: dict[int, bool] = {}
    kept: list[Any] = []

    def loss(model: Any, batch: Any, *options: Any) -> torch.Tensor:
        return loss_of(model, batch, *options) * (float("nan") if batch_is_bad[id(batch)] else 1.0)

    monkeypatch.setattr(loop, "train_step", train_step)
    monkeypatch.setattr(objective, "loss_of", loss)


@pytest.mark.parametrize(("rate", "beside"), [(BREAKS, True), (1e12, False)])
def test_steps_that_break_the_weights_cost_no_checkpoint_and_the_next_start_goes_back_to_the_last_healthy_one(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], rate: float, beside: bool
) -> None:
    options = EVERY | {"checkpoints__async": beside}
    assert start(tmp_path, model_folder, **options, tokens__train_steps=6) == 0
    capsys.readouterr()
    assert start(tmp_path, model_folder, **options, tokens__train_steps=12, optimizer__learning_rate=rate) == 3
    said = capsys.readouterr().out
    assert "WARNING    the loss or gradients after step 7 are not finite, so the weights are not saved" in said
    assert "The next start continues from step 6, where both were finite" in said
    assert result_of(tmp_path) == {"status": "failed", "step": 10, "error": "loss or gradients not finite"}
    assert saved(tmp_path) == ["step-5", "step-6"]

    assert start(tmp_path, model_folder, **options, tokens__train_steps=12) == 0
    said = capsys.readouterr().out
    assert f"resumed    {tmp_path}/runs/run/checkpoints/step-6, after step 6" in said
    assert result_of(tmp_path)["status"] == "completed"
    assert saved(tmp_path) == ["step-11", "step-12"]


def test_a_run_whose_last_step_broke_the_weights_is_no_completed_one_exports_nothing_and_has_no_best(
    tmp_path: Path, model_folder: Path
) -> None:
    """A rate of stop tokens is finite, whatever the weights are."""
    (tmp_path / "prompts.jsonl").write_text(chat_line("What is 3?") + "\n")
    options = CONSTANT | {
        "tokens__train_steps": 1,
        "optimizer__learning_rate": BREAKS,
        "evaluation__prompts": str(tmp_path / "prompts.jsonl"),
        "evaluation__max_new_tokens": 2,
        "checkpoints__keep_best": "eval/stop_rate",
        "checkpoints__export_interval": 1,
    }
    assert start(tmp_path, model_folder, **options) == 3
    assert result_of(tmp_path)["status"] == "failed"
    assert saved(tmp_path) == []
    for name in ("hf", "latest", "best.json"):
        assert not (tmp_path / "runs/run" / name).exists()


def test_a_run_whose_last_step_was_skipped_is_no_completed_one(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_bad(monkeypatch, {4})
    assert start(tmp_path, model_folder, **CONSTANT, tokens__train_steps=4, checkpoints__interval=3) == 3
    assert result_of(tmp_path) == {"status": "failed", "step": 4, "error": "loss or gradients not finite"}
    assert not (tmp_path / "runs/run/hf").exists()
    assert saved(tmp_path) == ["step-3"]


def test_a_bad_batch_does_not_condemn_healthy_weights(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is stopped in the step of that batch; nothing of what was trained before is lost."""
    options = EVERY | {"checkpoints__interval": None, "tokens__train_steps": 9}
    make_bad(monkeypatch, {3}, stop_after=3)
    assert start(tmp_path, model_folder, **options) == 0
    assert result_of(tmp_path)["status"] == "preempted"
    state = read_state(tmp_path / "runs/run/checkpoints/step-3")
    assert state["progress"]["non_finite_in_a_row"] == 1
    assert state["data"]["next_pack"] == 3


def test_a_proof_changes_no_bit_of_a_run(tmp_path: Path, model_folder: Path) -> None:
    """Which is made before every save: many in one of the runs, one in the other."""
    options = EVERY | {"tokens__train_steps": 5}
    often = run(make_config(tmp_path, model_folder, **options))
    once = run(make_config(tmp_path, model_folder, **options | {"checkpoints__interval": None}, general__run_name="b"))
    assert bits(often) == bits(once)


def test_a_source_whose_weights_are_not_finite_is_refused_by_the_name_of_the_tensor(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is trained; with the metadata of the files, nothing could be seen."""
    name = "model.layers.1.mlp.down_proj.weight"
    broken = Path(shutil.copytree(model_folder, tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    weights[name].view(-1)[7] = float("-inf")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    config = make_config(tmp_path, broken)
    expected = f"model.path: {broken} holds weights that are not finite (NaN or infinity), in {name}; "
    for further in ([], ["--dry-run"]):
        assert main(["--config", str(tmp_path / "config.yaml"), *further]) == 2
        assert capsys.readouterr().err.startswith(expected)
    assert not (config.run_dir / "metrics.jsonl").exists()


def test_the_batch_that_proves_the_weights_has_a_target(tmp_path: Path) -> None:
    """The last step of an epoch may end in packs without a conversation, whose loss is zero for any weights."""
    nothing: Any = None
    saver = Saver(
        nothing,
        Checkpoints(),
        RunDirectory(tmp_path),
        nothing,
        nothing,
        loss="native",
        state=dict,
        require_unchanged=nothing,
    )
    full, empty = SimpleNamespace(weight_sum=3.0), SimpleNamespace(weight_sum=0.0)
    finite: Any = SimpleNamespace(is_finite=True, loss=1.0)
    for batches in ([full, empty], [empty, empty]):
        fetched: Any = SimpleNamespace(batches=batches)
        saver.note(fetched, finite)
        assert saver._batch is full
