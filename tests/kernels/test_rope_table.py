import pytest
import torch
from transformers import LlamaConfig as TheirConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sftron.kernels.rope_table import LinearScaling, Llama3Scaling, RopeScaling, build_rope_table

SCALINGS: dict[str, tuple[RopeScaling | None, dict[str, float]]] = {
    "default": (None, {}),
    "linear": (LinearScaling(factor=3.0), {"factor": 3.0}),
    "llama3": (
        Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
        {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ),
}
D = 64


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
