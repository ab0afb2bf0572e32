"""What a block keeps for the backward pass, and that no tensor grows with the square of a document's length.

In units of 2 B x hidden_size per token: a bf16 value for each of hidden_size. Sizes are small, their ratios those of
Llama 3 8B: qkv 1.5 x hidden_size, intermediate_size 3.5 x hidden_size, a log-sum-exp of 1/64 unit. Attention keeps what
flash-attention keeps, natively and in transformers.
"""

from collections.abc import Callable, Iterable
from itertools import product, repeat

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface
from transformers import LlamaConfig as ReferenceConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from sftron.kernels.table import RopeSpec, build_rope_table
from sftron.models.architecture import LlamaConfig
from sftron.models.attention import SdpaAttention
from sftron.models.llama import ACTIVATION_CHECKPOINTING, LlamaForSFT, make_block
from sftron.models.loss import weighted_loss_sum
from sftron.train.measured_memory import LiveMemory as StorageMemory
from tests.conftest import rest_nightly
from tests.models.memory import LiveMemory, attend

T, H = 40, 512
SIZES = {"hidden_size": H, "intermediate_size": 1792, "num_attention_heads": 4, "num_key_value_heads": 1}
SIZES |= {"num_hidden_layers": 1, "vocab_size": 8, "max_position_embeddings": T}
CONFIG = LlamaConfig.from_hf({"model_type": "llama", **SIZES})


# x 1, qkv 1.5, attention 1, residual 1, gate_up 7; without recompute two norms 2 and the product 3.5.
@pytest.mark.parametrize(("mode", "units"), [("none", 17), ("selective", 11.5), ("full", 1)])
def test_a_block_keeps_what_its_mode_states(mode: str, units: float) -> None:
    block, table = make_block(CONFIG, CONFIG.layers[0], mode), _table()
    position_ids = torch.arange(T)
    kept = units_kept(lambda x: block(x, position_ids, table, attend), [*block.parameters(), position_ids, table])
    assert kept == pytest.approx(units, abs=0.05)


@pytest.mark.parametrize("model_type", ["stablelm", "apertus"])
def test_selective_keeps_no_output_of_a_layer_norm_and_of_a_trained_activation(model_type: str) -> None:
    """As of an RMSNorm: two of them, and the input of down_proj."""
    config, kept = LlamaConfig.from_hf({"model_type": model_type, **SIZES}), dict[str, float]()
    for mode in ("none", "selective"):
        block, position_ids = make_block(config, config.layers[0], mode).bfloat16(), torch.arange(T)
        with StorageMemory() as memory:
            output = block(_hidden_states(), position_ids, _table(), attend)
        assert output.requires_grad
        kept[mode] = sum(size for storage, size in memory.sizes.items() if not storage.expired()) / (2 * T * H)
    assert kept["none"] - kept["selective"] == pytest.approx(5.5, abs=0.05)


def test_the_same_ruler_measures_24_and_a_half_units_for_transformers() -> None:
    AttentionInterface.register("flash_like", _reference_attention)
    config = ReferenceConfig(**SIZES)
    config._attn_implementation = "flash_like"
    block = LlamaDecoderLayer(config, 0).bfloat16()
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0, dtype=torch.bfloat16), torch.arange(T)[None])

    def forward(x_TH: Tensor) -> Tensor:
        return block(x_TH[None], position_embeddings=(cos, sin))

    assert units_kept(forward, [*block.parameters(), cos, sin]) == pytest.approx(24.5, abs=0.1)


def test_selective_computes_no_matrix_product_again_and_full_computes_all() -> None:
    flops = {}
    for mode in ACTIVATION_CHECKPOINTING:
        block, x_TH = make_block(CONFIG, CONFIG.layers[0], mode), _hidden_states()
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
    return build_rope_table(T, RopeSpec(theta=10000.0, rotary_dim=H // SIZES["num_attention_heads"]))


def _reference_attention(
    module: object, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    """[1, N, T, D] in, [1, T, N, D] out, as transformers calls flash-attention."""
    q_TND, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q_TND, k_TKD, v_TKD)[None], None


EVERY_WAY = list(product(ACTIVATION_CHECKPOINTING, (torch.float32, torch.bfloat16)))


@pytest.mark.parametrize("way", rest_nightly(EVERY_WAY, [("selective", torch.bfloat16), ("full", torch.float32)]))
def test_no_tensor_grows_with_the_square_of_the_length(way: tuple[str, torch.dtype]) -> None:
    """Forward, backward and loss of one document of 32,768 tokens, on fake tensors, which cost nothing."""
    mode, dtype = way
    num_tokens, width = 32768, 224
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": width, "vocab_size": 512}
    config = LlamaConfig.from_hf({"model_type": "llama", **sizes, "max_position_embeddings": num_tokens})
    with FakeTensorMode():
        model = LlamaForSFT(config, "sdpa", dtype, activation_checkpointing=mode)
        ids = torch.zeros(num_tokens, dtype=torch.int64)
        with LiveMemory() as memory:
            # Not by `forward`, which reads the bounds of documents.
            hidden_TH = model.attend_with(repeat(SdpaAttention((num_tokens,))), ids, ids, dtype)
            weighted_loss_sum(hidden_TH, model.head, ids, ids, torch.ones(num_tokens))[0].backward()
    assert any("flash_attention_for_cpu_backward" in name for name in memory.operations)
    # gate and up of all tokens, 29 or 59 MB. A byte for each pair of tokens would be 1 GB.
    assert memory.largest == num_tokens * 2 * width * dtype.itemsize
