"""Small runs: a tiny random Llama folder with the tests' tokenizer, a few conversations, and a configuration."""

import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from sftron.config import Config, load_config
from sftron.train import loop
from sftron.train.trainer import Trainer, open_trainer
from tests.conftest import ASSETS
from tests.models.reference import make_theirs

NUM_ROWS = 30


def make_model_folder(folder: Path, **overrides: Any) -> Path:
    options = {"vocab_size": 768, "max_position_embeddings": 256, "initializer_range": 0.1}
    make_theirs(**options | overrides).save_pretrained(folder)
    for path in (ASSETS / "tokenizer").iterdir():
        shutil.copyfile(path, folder / path.name)
    return folder


def chat_line(*turns: str) -> str:
    roles = ("user", "assistant")
    return json.dumps({"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]})


def write_rows(path: Path, num_rows: int = NUM_ROWS) -> Path:
    lines = [chat_line(f"What is {n}?", f"{n} is " + "one more than " * (n * 7 % 5) + f"{n}.") for n in range(num_rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def settings(tmp_path: Path, model_folder: Path, **overrides: Any) -> dict[str, Any]:
    """A run of 20 steps of 2 packs; `overrides` are {"section__key": value}, None for a section__key to leave out."""
    tree: dict[str, Any] = {
        "general": {"run_name": "run", "output_dir": str(tmp_path / "runs"), "seed": 7},
        "model": {"path": str(model_folder), "compute_dtype": "float32", "attention": "sdpa"},
        "data": {"datasets": [{"path": str(tmp_path / "rows.jsonl")}], "num_workers": 0, "num_lanes": 4},
        "tokens": {"sequence_length": 96, "batch_accumulation_per_replica": 2, "train_steps": 20},
        "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.1},
        "logging": {"interval": 5},
    }
    for name, value in overrides.items():
        section, key = name.split("__", 1)
        tree.setdefault(section, {})
        if value is None:
            tree[section].pop(key, None)
        else:
            tree[section][key] = value
    return tree


def write_config(path: Path, tree: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def make_config(tmp_path: Path, model_folder: Path, **overrides: Any) -> Config:
    if not (tmp_path / "rows.jsonl").exists():
        write_rows(tmp_path / "rows.jsonl")
    return load_config(write_config(tmp_path / "config.yaml", settings(tmp_path, model_folder, **overrides)))


def on_each_step(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object]) -> None:
    """Calls `act` with the number of each step, counted over all runs from 1, as the step is about to be made."""
    made, train_step = itertools.count(1), loop.train_step

    def acted(*arguments: Any, **options: Any) -> Any:
        act(next(made))
        return train_step(*arguments, **options)

    monkeypatch.setattr(loop, "train_step", acted)


def stop_in(*steps: int) -> Callable[[int], None]:
    """Asks the run to end in each of the steps, by a signal."""
    return lambda step: os.kill(os.getpid(), signal.SIGTERM) if step in steps else None


def opened(config: Config) -> Trainer:
    """Open a run that has steps left."""
    trainer = open_trainer(config)
    assert isinstance(trainer, Trainer)
    return trainer


def run(config: Config) -> Trainer:
    """Open and train to the end, or to wherever it is stopped."""
    trainer = open_trainer(config)
    assert trainer.train() == 0
    return cast(Trainer, trainer)  # of a run that was finished already, only what a CompletedRun has is there


def result(trainer: Trainer) -> dict[str, Any]:
    return json.loads((trainer.directory.folder / "result.json").read_text())


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def bits(trainer: Trainer) -> list[bytes]:
    """Weights and optimizer state."""
    tensors = [*trainer.model.parameters()]
    tensors += [value for p in trainer.model.parameters() for _, value in sorted(trainer.optimizer.state[p].items())]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]
