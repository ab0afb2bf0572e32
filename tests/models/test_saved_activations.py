"""What a block keeps for the backward pass, by storage, measured where autograd keeps it.

In units of 2 B x hidden_size per token: a bf16 value for each of hidden_size. Sizes are small, their ratios those of
Llama 3 8B: qkv 1.5 x hidden_size, intermediate_size 3.5 x hidden_size, a log-sum-exp of 1/64 unit. Attention keeps what
flash-attention keeps, in ours and in transformers'.
"""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface
from transformers import LlamaConfig as TheirConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from sftron.kernels.rope_table import build_rope_table
from sftron.models.architecture import LlamaConfig
from sftron.models.llama import BLOCKS
from tests.models.flash_like import attend

T, H = 40, 512
SIZES = {"hidden_size": H, "intermediate_size": 1792, "num_attention_heads": 4, "num_key_value_heads": 1}
SIZES |= {"num_hidden_layers": 1, "vocab_size": 8, "max_position_embeddings": T}


# x 1, qkv 1.5, attention 1, residual 1, gate_up 7; without recompute two norms 2 and the product 3.5.
@pytest.mark.parametrize(("mode", "units", "limit"), [("none", 17, 17.5), ("selective", 11.5, 12), ("full", 1, 1.1)])
def test_a_block_keeps_what_it_says(mode: str, units: float, limit: float) -> None:
    block, table = BLOCKS[mode](LlamaConfig.from_hf({"model_type": "llama", **SIZES})), _table()
    position_ids = torch.arange(T)
    kept = units_kept(lambda x: block(x, position_ids, table, attend), [*block.parameters(), position_ids, table])
    assert kept == pytest.approx(units, abs=0.05)
    assert kept <= limit


def test_the_same_ruler_gives_24_and_a_half_units_for_transformers() -> None:
    AttentionInterface.register("flash_like", _their_attention)
    config = TheirConfig(**SIZES)
    config._attn_implementation = "flash_like"
    block = LlamaDecoderLayer(config, 0).bfloat16()
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0, dtype=torch.bfloat16), torch.arange(T)[None])

    def forward(x_TH: Tensor) -> Tensor:
        return block(x_TH[None], position_embeddings=(cos, sin))

    assert units_kept(forward, [*block.parameters(), cos, sin]) == pytest.approx(24.5, abs=0.1)


def test_selective_computes_no_matrix_product_again_and_full_computes_all() -> None:
    flops = {}
    for mode, make_block in BLOCKS.items():
        block, x_TH = make_block(LlamaConfig.from_hf({"model_type": "llama", **SIZES})), _hidden_states()
        with FlopCounterMode(display=False) as counter:
            block(x_TH, torch.arange(T), _table(), attend).float().sum().backward()
        flops[mode] = counter.get_total_flops()
    once = 2 * T * H * (1.5 + 1 + 7 + 3.5) * H
    assert flops == {"none": 3 * once, "selective": 3 * once, "full": 4 * once}


def units_kept(forward: Callable[[Tensor], Tensor], not_counted: Iterable[Tensor]) -> float:
    """Parameters, their casts (known by their shape) and what all layers share are not counted."""
    known = {tensor.untyped_storage().data_ptr() for tensor in not_counted}
    shapes = {tensor.shape for tensor in not_counted}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.shape not in shapes:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        # The output is alive while its graph is counted, so no storage is used twice.
        output = forward(_hidden_states())
        assert output.requires_grad
    return sum(kept.values()) / (2 * T * H)


def _hidden_states() -> Tensor:
    return torch.randn(T, H, dtype=torch.bfloat16, requires_grad=True)


def _table() -> Tensor:
    return build_rope_table(T, H // SIZES["num_attention_heads"], 10000.0, None)


def _their_attention(
    module: object, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    """[1, N, T, D] in, [1, T, N, D] out, as transformers calls flash-attention."""
    q_TND, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q_TND, k_TKD, v_TKD)[None], None
