"""What the goldens are taken of: rows made from a seed, configurations, and the few calls that reach the product.

Everything that a golden depends on is made here, so that only a change of behavior changes a golden. The functions
`run_data` and `train` are the only ones that know how sftron is built.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftron.config import Config, load_config
from sftron.data.loader import PackLoader
from sftron.data.types import Batch
from sftron.train.build_data import load_chat_tokenizer, make_dataset, make_loader, open_data
from sftron.train.trainer import open_trainer
from tests.conftest import ASSETS
from tests.data.family_conversations import TOOLS, call
from tests.train.runs import make_model_folder, write_config

_TEXT = "the of sun rain seed leaf pot 世界 naïve water nine light code root calm slow 12 3.5 a green <b> stem"
WORDS = _TEXT.split()


def _text(chance: random.Random, longest: int) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(1, longest)))


def _messages(chance: random.Random, num_rounds: int) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": _text(chance, 6)}] if chance.random() < 0.3 else []
    for _ in range(num_rounds):
        messages.append({"role": "user", "content": _text(chance, 12)})
        messages.append({"role": "assistant", "content": _text(chance, 20)})
    return messages


def _calls(chance: random.Random) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": _text(chance, 8)},
        {"role": "assistant", "content": "", "tool_calls": [call(city=_text(chance, 2))]},
        {"role": "tool", "content": _text(chance, 8), "tool_call_id": "a1b2c3d4e", "name": "weather"},
        {"role": "assistant", "content": _text(chance, 12), "reasoning_content": _text(chance, 5)},
    ]


def make_rows(folder: Path) -> None:
    """Writes the files that the configurations below name."""
    chance = random.Random(20261122)
    chats = [{"messages": _messages(chance, chance.randint(1, 3))} for _ in range(300)]
    short = [{"messages": _messages(chance, 1)} for _ in range(400)]
    weighted = [{"messages": _messages(chance, 2)} for _ in range(200)]
    for row in weighted:
        row["messages"][-1]["weight"] = chance.choice([0, 0.5, 1, 2])
    sharegpt = [
        {"conversations": [{"from": "human", "value": _text(chance, 9)}, {"from": "gpt", "value": _text(chance, 15)}]}
        for _ in range(200)
    ]
    alpaca = [
        {"instruction": _text(chance, 9), "input": _text(chance, 4) if n % 3 else "", "output": _text(chance, 15)}
        for n in range(200)
    ]
    pairs = [{"q": _text(chance, 9), "a": _text(chance, 15)} for _ in range(200)]
    calls = [{"messages": _calls(chance), "tools": TOOLS} for _ in range(150)]
    bad = [json.dumps(row) for row in short[:120]]
    bad[17], bad[60] = '{"messages": [', json.dumps({"messages": [{"role": "user", "content": 7}]})
    ids = []
    for _ in range(200):
        tokens = [chance.randrange(300) for _ in range(chance.randint(4, 60))]
        start = chance.randrange(1, len(tokens))
        ids.append({"input_ids": tokens, "labels": [-100] * start + tokens[start:]})
    files = {"chats": chats, "short": short, "weighted": weighted, "sharegpt": sharegpt, "alpaca": alpaca}
    for name, rows in {**files, "pairs": pairs, "calls": calls, "ids": ids}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "bad.jsonl").write_text("\n".join(bad) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Subject:
    """A configuration. datasets: names of files above, or keys of a data set; settings: {"section.key": value}."""

    datasets: tuple[str | dict[str, Any], ...]
    settings: dict[str, Any]
    template: str | None = None

    def config(self, folder: Path, run_name: str = "run", **settings: Any) -> Config:
        """The files lie in `folder`, with the model folder `model`."""
        datasets = [{"path": each} if isinstance(each, str) else dict(each) for each in self.datasets]
        for each in datasets:
            each["path"] = str(folder / f"{each['path']}.jsonl")
        tree: dict[str, Any] = {
            "general": {"run_name": run_name, "output_dir": str(folder / "runs"), "seed": 7},
            "model": {"path": str(folder / "model"), "compute_dtype": "float32", "attention": "sdpa"},
            "data": {"datasets": datasets, "num_workers": 0, "num_lanes": 4, "max_dropped_share": 1.0},
            "tokens": {"sequence_length": 256, "train_steps": 20},
            "optimizer": {"learning_rate": 3e-3, "weight_decay": 0.1, "warmup_steps": 3},
        }
        if self.template:
            tree["tokenizer"] = {"chat_template": str(ASSETS / "templates" / f"{self.template}.jinja")}
        for key, value in (self.settings | settings).items():
            *sections, name = key.split(".")
            section = tree
            for each in sections:
                section = section.setdefault(each, {})
            section[name] = value
        if tree["tokens"].get("train_epochs"):
            del tree["tokens"]["train_steps"]
        return load_config(write_config(folder / f"{run_name}.yaml", tree))


SUBJECTS = {
    "one lane": Subject(("chats",), {"data.num_lanes": 1}),
    "four lanes": Subject(("chats", "short"), {}),
    "twelve lanes, wide packs": Subject(("chats", "short"), {"data.num_lanes": 12, "tokens.micro_batch_size": 4}),
    "lanes by themselves": Subject(("chats", "short"), {"data.num_lanes": "auto"}),
    "two epochs": Subject(("chats",), {"tokens.train_epochs": 2}),
    "minibatch": Subject(("chats",), {"data.packing.strategy": "minibatch", "tokens.micro_batch_size": 3}),
    "one conversation a pack": Subject(("short",), {"data.packing.strategy": "none"}),
    "all tokens, attention across": Subject(
        ("chats",), {"data.train_on_completions_only": False, "data.remove_cross_attention": False}
    ),
    "truncated turns": Subject(("chats",), {"data.overlong": "truncate_turns", "tokens.sequence_length": 128}),
    "dropped": Subject(("chats",), {"tokens.sequence_length": 128}),
    "mixture": Subject(
        ({"path": "chats", "weight": 3}, {"path": "sharegpt", "weight": 1.0}, {"path": "alpaca", "weight": 0.5}), {}
    ),
    "streamed": Subject(({"path": "chats", "streaming": True},), {}),
    "weights and last turns": Subject(("weighted",), {"data.train_on_turns": "last"}),
    "columns": Subject(
        ({"path": "pairs", "format": "query_response", "columns": {"query": "q", "response": "a"}},), {}
    ),
    "pretokenized": Subject(("ids",), {}),
    "bad rows skipped": Subject(("bad",), {"data.on_bad_row": "skip"}),
    "calls and reasoning": Subject(("calls",), {"tokens.sequence_length": 768}, template="qwen3_like"),
    "calls alone": Subject(
        ("calls",), {"tokens.sequence_length": 768, "data.train_on_roles": ["tool_call"]}, template="qwen3_like"
    ),
}

TRAINED = {
    "packed": Subject(("chats", "short"), {"tokens.batch_accumulation_per_replica": 2, "data.num_lanes": 12}),
    "all tokens, attention across": Subject(
        ("chats",),
        {
            "data.train_on_completions_only": False,
            "data.remove_cross_attention": False,
            "tokens.batch_accumulation_per_replica": 2,
        },
    ),
    "weights": Subject(
        ("weighted",), {"tokens.batch_accumulation_per_replica": 2, "model.activation_checkpointing": "selective"}
    ),
}


def make_folder(folder: Path) -> Path:
    make_rows(folder)
    make_model_folder(folder / "model")
    return folder


# --- What follows knows how sftron is built ---


@dataclass
class RunData:
    """The data of a run on one rank: its loader, and where a row stands."""

    loader: PackLoader

    def batches(self) -> Iterator[Batch]:
        return iter(self.loader)


def run_data(config: Config, *, dp_rank: int = 0, dp_world_size: int = 1) -> RunData:
    preparation = open_data(config, load_chat_tokenizer(config))
    dataset = make_dataset(config, preparation, dp_rank=dp_rank, dp_world_size=dp_world_size)
    return RunData(make_loader(config, dataset, keep_tail=True, pin_memory=False))


def train(config: Config) -> None:
    """Trains in this process; metrics.jsonl and the export are in `config.run_dir`."""
    assert open_trainer(config).train() == 0
