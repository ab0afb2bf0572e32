"""A tiny model folder for all runs, and one finished run whose files many tests read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from sftron.train.logs import console
from sftron.train.logs.loggers import flat_numbers
from sftron.train.trainer import Trainer
from tests.train.runs import chat_line, make_config, make_model_folder, metrics, run


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of so small a model mostly wait for each other, and on a busy machine ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _prints() -> None:
    """Whatever run an earlier test made: of several ranks, only the main one prints."""
    console.start(True)


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    """Conversations of one and of two rounds, of any length; none of them is trained on."""
    path = tmp_path / "other.jsonl"
    lines = [
        chat_line(f"Is {n} even?", "Yes" if n % 2 else "No, it is odd. " * (n % 4 + 1), *(["Sure?", "Yes."] * (n % 2)))
        for n in range(13)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


class RecordedLoggers:
    """Stands for Loggers: `steps` are the numbers that they were given of each step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}

    def start(self, step: int, **_: int) -> None: ...

    def log(self, step: int, metrics: Mapping[str, Any], answers: Any = None) -> None:
        if answers is None:
            self.steps[step] = dict(flat_numbers(metrics))

    def finish(self, status: str) -> None: ...


@dataclass(frozen=True)
class FinishedRun:
    """A run of six steps that was resumed after the fourth with another learning rate. Its files are for reading."""

    trainer: Trainer
    loggers: RecordedLoggers
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", self.trainer.directory.folder)

    @property
    def steps(self) -> list[dict[str, Any]]:
        return metrics(self.folder)

    @property
    def console(self) -> list[str]:
        return (self.folder / "console.log").read_text().splitlines()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Has a row that is too long, an evaluation set, prompts, exports on the way, and a known peak."""
    folder = tmp_path_factory.mktemp("private-place")
    model_folder = make_model_folder(folder / "tiny-model")
    (model_folder / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en]\n---\n# Tiny\n", encoding="utf-8")
    rows = [chat_line(f"What is {n}?", f"It is {n}, " + "and one more " * (n % 5) + "there.") for n in range(40)]
    rows.insert(3, chat_line("What?", "too long " * 200))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    others = [chat_line(f"Is {n} even?", "No." if n % 2 else "Yes, it is.") for n in range(5)]
    (folder / "others.jsonl").write_text("\n".join(others) + "\n", encoding="utf-8")
    (folder / "prompts.jsonl").write_text(chat_line("What is 3?") + "\n", encoding="utf-8")
    options = {
        "data__max_dropped_share": 1.0,
        "checkpoints__interval": 2,
        "checkpoints__export_interval": 2,
        "evaluation__datasets": [{"path": str(folder / "others.jsonl"), "name": "held-out"}],
        "evaluation__interval": 2,
        "evaluation__prompts": str(folder / "prompts.jsonl"),
        "evaluation__max_new_tokens": 4,
        "logging__interval": 1,
        "logging__untrained_roles_interval": 3,
        "logging__peak_tflops": 0.5,
        "logging__wandb": {"mode": "disabled", "entity": "private-team", "tags": ["private-tag"]},
    }
    loggers = RecordedLoggers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sftron.train.trainer.make_loggers", lambda *_, **__: loggers)
        run(make_config(folder, model_folder, tokens__train_steps=4, **options))
        options["optimizer__learning_rate"] = 5e-3
        return FinishedRun(run(make_config(folder, model_folder, tokens__train_steps=6, **options)), loggers)
