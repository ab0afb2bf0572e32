"""A tiny model folder for all runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.train.runs import make_model_folder


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
