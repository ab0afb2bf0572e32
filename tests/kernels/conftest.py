"""The two implementations of an operation, "torch" and "triton": where they run, and how exactly."""

from collections.abc import Iterator

import pytest
import torch

DEVICES = {"torch": "cpu", "triton": "cuda" if torch.cuda.is_available() else "cpu"}
NIGHTLY = [] if torch.cuda.is_available() else [pytest.mark.nightly]
"""The marks of cases that take seconds interpreted."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """With a GPU, `pytest -m gpu tests/kernels` runs all tests here but those that compile for other GPUs."""
    if torch.cuda.is_available() and not item.get_closest_marker("nightly"):
        item.add_marker(pytest.mark.gpu)


def rounding_error(dtype: torch.dtype, implementation: str) -> float:
    """Largest relative error of a result rounded once: half a unit in the last place, and fp32's own error.

    Triton's interpreter cuts bf16 off instead of rounding it, up to a whole unit; machine code rounds to nearest.
    """
    unit = {torch.float32: 0.0, torch.bfloat16: 2**-7}[dtype]
    return 3e-6 + (unit if implementation == "triton" else unit / 2)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.empty gives NaN, so that a value which a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
