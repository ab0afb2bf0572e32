"""A tiny model folder for all runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sftron.train import console
from tests.train.runs import chat_line, make_model_folder


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
    console.speak(True)


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
