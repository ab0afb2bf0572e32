"""Kernels and models are imported with torch alone, and without Triton the torch twins compute; and warnings."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.kernels import conftest

SOURCES = Path(__file__).parents[2] / "src"

CODE = """
import os, sys
sys.modules["triton"] = None
import torch
from sftron.kernels import cross_entropy, rms_norm, rope, swiglu
from sftron.models.architecture import LlamaConfig
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import weighted_loss_sum
import sftron
sftron.LlamaForSFT
sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForSFT(LlamaConfig.from_hf(dict(model_type="llama", **sizes)), compute_dtype=torch.float32)
ids = torch.arange(5)
hidden = model(ids, ids, torch.tensor([0, 5]).int(), 5)
weighted_loss_sum(hidden, model.head, ids, ids, torch.ones(5))[0].backward()
assert all(parameter.grad is not None for parameter in model.parameters())
assert not any(hasattr(module, "triton") for module in (cross_entropy, rms_norm, rope, swiglu))
assert os.environ["TRITON_DEFAULT_FP_FUSION"] == "0"
print(*sys.modules)
"""


def test_models_and_kernels_compute_where_there_is_no_triton() -> None:
    """And a setting of Triton by the user stays."""
    environment = os.environ | {"TRITON_DEFAULT_FP_FUSION": "0"}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SOURCES, env=environment)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "torch" in loaded
    assert not {"transformers", "datasets", "safetensors", "pydantic", "tokenizers"} & loaded


@pytest.mark.gpu  # it needs none itself
def test_a_warning_ends_no_test_of_a_gpu() -> None:
    """Compilers, drivers and NCCL have warnings of their own."""
    action, *_ = warnings.filters[0]
    assert action == "default"


def test_with_a_gpu_the_tests_of_kernels_are_tests_of_the_gpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    conftest.pytest_itemcollected(request.node)
    assert request.node.get_closest_marker("gpu") is not None
