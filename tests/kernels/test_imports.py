"""Kernels and models are imported with torch alone: without Triton too, where the torch twins compute."""

import subprocess
import sys

from tests.conftest import ROOT

CODE = """
import sys
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
print(*sys.modules)
"""


def test_models_and_kernels_compute_where_there_is_no_triton() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, cwd=ROOT / "src")
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "torch" in loaded
    assert not {"transformers", "datasets", "safetensors", "pydantic", "tokenizers"} & loaded
