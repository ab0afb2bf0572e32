import pytest
import torch
from transformers import LlamaConfig as TheirConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from sftron.kernels.rope import LinearScaling, Llama3Scaling, RopeScaling, build_rope_table, rotate_qk

SCALINGS: dict[str, tuple[RopeScaling | None, dict[str, float]]] = {
    "default": (None, {}),
    "linear": (LinearScaling(factor=3.0), {"factor": 3.0}),
    "llama3": (
        Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
        {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ),
}
D, N, K, T = 64, 3, 1, 50


@pytest.mark.parametrize("rope_type", SCALINGS)
def test_the_table_is_that_of_transformers_to_the_bit(rope_type: str) -> None:
    scaling, parameters = SCALINGS[rope_type]
    theirs = TheirConfig(
        head_dim=D,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": rope_type, "rope_theta": 500000.0, **parameters},
    )
    positions = torch.cat([torch.arange(100), torch.arange(130972, 131072)])
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.empty(0), positions[None])
    table = build_rope_table(131072, D, 500000.0, scaling)
    assert table[positions].equal(torch.cat([cos[0, :, : D // 2], sin[0, :, : D // 2]], dim=-1))


def test_scalings_differ_from_each_other() -> None:
    tables = [build_rope_table(100, D, 500000.0, scaling) for scaling, _ in SCALINGS.values()]
    assert not tables[0].equal(tables[1])
    assert not tables[0].equal(tables[2])


def test_queries_and_keys_are_rotated_as_by_transformers_and_values_left_alone() -> None:
    table, qkv, position_ids = _inputs(torch.float32)
    q, k, v = qkv.unflatten(-1, (-1, D)).split([N, K, K], dim=1)
    cos, sin = (x.repeat(1, 2) for x in table[position_ids].chunk(2, dim=-1))
    their_q, their_k = apply_rotary_pos_emb(q, k, cos, sin)
    ours = rotate_qk(qkv, position_ids, table, N, K)
    assert ours.equal(torch.cat([their_q, their_k, v], dim=1).flatten(1))
    assert not ours.equal(qkv)


def test_the_gradient_is_the_numerical_one() -> None:
    table, qkv, position_ids = _inputs(torch.float64)
    qkv = qkv[:3, : 4 * D].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate_qk(x, position_ids[:3], table.double(), 2, 1), [qkv])


def test_positions_are_those_given_and_not_the_index() -> None:
    table, qkv, position_ids = _inputs(torch.float32)
    shuffled = torch.randperm(T)
    ours = rotate_qk(qkv[shuffled], position_ids[shuffled], table, N, K)
    assert ours.equal(rotate_qk(qkv, position_ids, table, N, K)[shuffled])
    assert not ours.equal(rotate_qk(qkv[shuffled], position_ids, table, N, K))


def test_bf16_is_rounded_once_from_fp32_arithmetic() -> None:
    table, qkv, position_ids = _inputs(torch.bfloat16)
    exact = rotate_qk(qkv.float(), position_ids, table, N, K)
    assert rotate_qk(qkv, position_ids, table, N, K).equal(exact.bfloat16())


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    table = build_rope_table(T, D, 10000.0, None)
    return table, torch.randn(T, (N + 2 * K) * D, dtype=dtype), torch.arange(T)
