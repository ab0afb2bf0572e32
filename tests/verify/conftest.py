from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.train.runs import chat_line, make_model_folder


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads cost more than they give on models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers, and two dozen conversations of unlike lengths."""
    home = tmp_path_factory.mktemp("verified")
    make_model_folder(home / "model")
    lines = [chat_line(f"What is {n}?", f"{n} is " + "one more than " * (n % 4) + f"{n}.") for n in range(24)]
    (home / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return home
