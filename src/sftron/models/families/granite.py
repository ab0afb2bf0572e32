"""The families of Granite; see table.py."""

from __future__ import annotations

from typing import Any

from sftron.models.families.family import COMMON, MIXTURE, Family, Values, key

_GRANITE: dict[str, Any] = COMMON | {
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_MODEL: dict[str, Any] = {
    "embedding_multiplier": key("embedding_multiplier"),
    "residual_multiplier": key("residual_multiplier"),
    "logit_scale": lambda values: 1 / values["logits_scaling"],
}
_SCALE = {"scale": key("attention_multiplier")}
_MIXTURE = _GRANITE | MIXTURE | {"num_local_experts": 8, "num_experts_per_tok": 2}
_NAMES = {
    "mlp.experts": ("block_sparse_moe.experts",),
    "mlp.gate": ("block_sparse_moe.router",),
    "mlp.shared_experts.gate_up_proj": ("shared_mlp.input_linear",),
    "mlp.shared_experts.down_proj": ("shared_mlp.output_linear",),
}
"""The names in transformers' memory; mixtures.py has those of experts and routers in files."""


def _with_shared_expert(values: Values) -> str:
    return "added_experts" if values["shared_intermediate_size"] else "experts"


def _size_of_mlp(values: Values) -> int:
    """Without experts, that of all tokens is the MLP."""
    return values["intermediate_size" if values["num_local_experts"] else "shared_intermediate_size"]


GRANITE_FAMILIES: dict[str, Family] = {
    "granite": Family(
        architecture="GraniteForCausalLM",
        defaults=_GRANITE | {"mlp_bias": False},
        model=_MODEL,
        layer=_SCALE,
    ),
    "granitemoe": Family(
        architecture="GraniteMoeForCausalLM",
        defaults=_MIXTURE,
        fixed={"mlp_bias": False},
        model=_MODEL,
        layer=_SCALE | {"mlp": "experts"},
        names=_NAMES,
    ),
    "granitemoeshared": Family(
        architecture="GraniteMoeSharedForCausalLM",
        defaults=_MIXTURE | {"shared_intermediate_size": 0},
        fixed={"mlp_bias": False},
        model=_MODEL,
        layer=_SCALE | {"mlp": _with_shared_expert},
        names=_NAMES,
    ),
    "granitemoehybrid": Family(
        architecture="GraniteMoeHybridForCausalLM",
        defaults=_MIXTURE | {"shared_intermediate_size": 1024, "position_embedding_type": None, "layer_types": None},
        fixed={"mlp_bias": False},
        # Those of Mamba layers, which are not implemented.
        irrelevant=frozenset(
            {
                *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand"),
                *("mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
            }
        ),
        model=_MODEL | {"intermediate_size": _size_of_mlp},
        layer=_SCALE | {"mlp": lambda values: "added_experts" if values["num_local_experts"] else "gated"},
        types=lambda values: ["mamba"] * values["num_hidden_layers"],
        rotates=lambda values: [values["position_embedding_type"] == "rope"] * values["num_hidden_layers"],
        may_lack_experts=True,
        names=_NAMES
        | {"mlp.gate_up_proj": ("shared_mlp.input_linear",), "mlp.down_proj": ("shared_mlp.output_linear",)},
    ),
}
