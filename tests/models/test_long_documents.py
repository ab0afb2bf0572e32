"""One document of 32,768 tokens: no memory that grows with the square of the length, through all of the model.

On fake tensors, which have shapes and types but no values, all that is computed costs nothing.
"""

from itertools import repeat
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sftron.models.architecture import LlamaConfig
from sftron.models.attention import SdpaAttention
from sftron.models.llama import BLOCKS, LlamaForSFT
from sftron.models.loss import weighted_loss_sum
from tests.models.live_memory import LiveMemory

T, H, F, V = 32768, 64, 224, 512
SIZES = {"hidden_size": H, "intermediate_size": F, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"model_type": "llama", "vocab_size": V, "max_position_embeddings": T}
DTYPES = (torch.float32, torch.bfloat16)


class LargestTensor(TorchDispatchMode):
    """with LargestTensor() as largest: ...; num_bytes: of all that operations made; names: of the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.add(func.name())
        made = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor)]
        self.num_bytes = max([self.num_bytes, *(x.numel() * x.element_size() for x in made)])
        return out


def make_model(mode: str, dtype: torch.dtype, num_layers: int) -> LlamaForSFT:
    config = LlamaConfig.from_hf({**SIZES, "num_hidden_layers": num_layers})
    return LlamaForSFT(config, "sdpa", dtype, activation_checkpointing=mode)


def forward_and_backward(model: LlamaForSFT) -> None:
    """One document of T tokens, a label at each of them."""
    ids = torch.zeros(T, dtype=torch.int64)
    # Not by `forward`, which reads the bounds of documents.
    hidden_TH = model.attend_with(repeat(SdpaAttention((T,))), ids, ids, model.compute_dtype)
    weighted_loss_sum(hidden_TH, model.head_weight, ids, ids, torch.ones(T))[0].backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", BLOCKS)
def test_no_tensor_grows_with_the_square_of_the_length(mode: str, dtype: torch.dtype) -> None:
    with FakeTensorMode():
        model = make_model(mode, dtype, num_layers=1)
        with LargestTensor() as largest:
            forward_and_backward(model)
    assert any("flash_attention_for_cpu_backward" in name for name in largest.names)
    # gate and up of all tokens, 29 or 59 MB. A byte for each pair of tokens would be 1 GB.
    assert largest.num_bytes == T * 2 * F * dtype.itemsize


def test_a_layer_of_a_long_document_keeps_what_the_mode_says() -> None:
    """The most bytes alive with 2 layers less those with 1, in units of a bf16 hidden state for each token."""
    units = {}
    for mode in BLOCKS:
        peaks = []
        for num_layers in (1, 2):
            with FakeTensorMode():
                model = make_model(mode, torch.bfloat16, num_layers)
                with LiveMemory() as memory:
                    forward_and_backward(model)
            peaks.append(memory.peak)
        units[mode] = (peaks[1] - peaks[0]) / (T * H * 2)
    assert units["full"] == pytest.approx(1, abs=0.1)
    assert 10 < units["selective"] < units["none"] - 5 < 15
