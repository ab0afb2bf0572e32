"""Mixtures of experts in config.json, and the names of their weights.

    native                        in transformers' memory       in published files, for each expert N
    mlp.gate.weight               mlp.gate.weight               mlp.gate.weight or block_sparse_moe.gate.weight
    mlp.experts.gate_up_proj      mlp.experts.gate_up_proj      mlp.experts.N.{gate,up}_proj.weight, or
                                                                block_sparse_moe.experts.N.{w1,w3}.weight
    mlp.experts.down_proj         mlp.experts.down_proj         mlp.experts.N.down_proj.weight, or
                                                                block_sparse_moe.experts.N.w2.weight

Published files of Granite have block_sparse_moe.router.layer.weight, and block_sparse_moe.{input,output}_linear.weight
with all experts. A folder has one of these spellings, and its export has the same one. Those of Gemma 4, which has
experts beside an MLP, have one, and are in families/gemma.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

ADDED_LATER = {"added_later": True}
"""The metadata of fields that are no fact of a checkpoint while they have their default, as in older checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of a layer, the same in all layers that have experts."""

    num_experts: int
    num_selected: int
    """The number of experts of a token."""
    intermediate_size: int
    """The size of each expert."""
    normalizes: bool
    """Whether the scores of a token's experts are divided by their sum."""
    shared_size: int | None
    """The intermediate size of the expert that all tokens share, if there is one."""
    swiglu_alpha: float = 1.0
    swiglu_limit: float = math.inf
    """The constants of kernels/clamped_swiglu.py, for experts that compute it."""
    router: str = field(default="softmax", metadata=ADDED_LATER)
    """The key of ROUTERS in routing.py."""
    num_groups: int = field(default=1, metadata=ADDED_LATER)
    num_selected_groups: int = field(default=1, metadata=ADDED_LATER)
    """The number of groups of experts, all of one size, and of those among which a token's experts are selected."""
    score_scale: float = field(default=1.0, metadata=ADDED_LATER)
    """The factor of the scores."""


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The names of the number of experts."""
_SELECTED = ("num_experts_per_tok", "top_k_experts")
"""The names of the number of experts of a token."""
_DENSE, _SPARSE = "dense", "sparse"
_OPTIONAL_SHARED = "shared_intermediate_size"
"""Granite's key for the size of the expert that all tokens share; 0 means that there is none."""


def read_mixture(
    values: Mapping[str, Any], given: Mapping[str, Any], router: str, *, may_be_empty: bool = False
) -> tuple[Mixture | None, list[bool], list[str]]:
    """Returns the experts, whether each layer has them, and the problems of their keys.

    Args:
        values: The keys that the family reads, with defaults; those of mixtures are absent from other families.
        given: The keys of config.json.
        router: The key of ROUTERS.
        may_be_empty: Whether the number of experts may be 0.
    """
    num_layers = values["num_hidden_layers"]
    selected = next((key for key in _SELECTED if key in values), None)
    if selected is None or not values.get("enable_moe_block", True):
        return None, [False] * num_layers, []
    names = [key for key in _COUNTS if values.get(key) is not None] or [key for key in _COUNTS if key in values][-1:]
    counts = {key: values[key] for key in [key for key in names if key in given] or names}
    is_empty = may_be_empty and not any(counts.values())
    size_of_shared = _OPTIONAL_SHARED if _OPTIONAL_SHARED in values else "shared_expert_intermediate_size"
    shared = values.get(size_of_shared)
    if size_of_shared == _OPTIONAL_SHARED and shared == 0 and not may_be_empty:
        shared = None
    inner = "moe_intermediate_size" if "moe_intermediate_size" in values else "intermediate_size"
    sizes = counts | {key: values[key] for key in (selected, inner)}
    sizes["decoder_sparse_step"] = step = values.get("decoder_sparse_step", 1)
    sizes |= {key: values[key] for key in ("n_group", "topk_group", "n_shared_experts") if key in values}
    sizes = ({} if is_empty else sizes) | ({} if shared is None else {size_of_shared: shared})
    problems = [
        f"{key} is missing or null, and experts need it"
        if size is None
        else f"{key}: {size!r} is not a whole number from 1 to {2**20}"
        for key, size in sizes.items()
        if type(size) is not int or not 0 < size <= 2**20
    ]
    if is_empty:
        return None, [False] * num_layers, problems
    if len(set(counts.values())) > 1:
        key, other, *_ = counts
        problems.append(f"{other}: {counts[other]} contradicts {key}: {counts[key]}")
    dense = values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(each) is not int for each in dense):
        problems.append(f"mlp_only_layers: {dense!r} is not a list of the numbers of layers")
    # A family that reads mlp_layer_types does not read it.
    first = 0 if "mlp_layer_types" in values else values.get("first_k_dense_replace", 0)
    if type(first) is not int or first < 0:
        problems.append(f"first_k_dense_replace: {first!r} is not a whole number of at least 0")
    kinds = values.get("mlp_layer_types", [_SPARSE] * num_layers) or [_DENSE] + [_SPARSE] * (num_layers - 1)
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (_DENSE, _SPARSE) for kind in kinds):
        problems.append(f"mlp_layer_types: {kinds!r} has not {_DENSE} or {_SPARSE} for each of {num_layers} layers")
    if problems:
        return None, [], problems
    num_experts, num_selected = next(iter(counts.values())), values[selected]
    num_groups, num_selected_groups = values.get("n_group", 1), values.get("topk_group", 1)
    if wrong := _wrong_groups(selected, num_experts, num_selected, num_groups, num_selected_groups):
        return None, [], [wrong]
    if "n_shared_experts" in values:
        shared = values["n_shared_experts"] * values[inner]
    mixture = Mixture(
        num_experts=num_experts,
        num_selected=num_selected,
        intermediate_size=values[inner],
        normalizes=values.get("norm_topk_prob", True),
        shared_size=shared,
        router=router,
        num_groups=num_groups,
        num_selected_groups=num_selected_groups,
        score_scale=values.get("routed_scaling_factor", 1.0),
        **{key: values[key] for key in ("swiglu_alpha", "swiglu_limit") if key in values},
    )
    is_sparse = [
        (number + 1) % step == 0 and number not in dense and number >= first and kind == _SPARSE
        for number, kind in enumerate(kinds)
    ]
    return mixture, is_sparse, []


def _wrong_groups(
    selected: str, num_experts: int, num_selected: int, num_groups: int, num_selected_groups: int
) -> str | None:
    """Returns the problem of selecting experts from groups of them, if there is one; `selected` is the key of their
    number."""
    size, rest = divmod(num_experts, num_groups)
    if num_groups > 1 and (rest or size < 2):
        return f"n_group: {num_groups} does not divide the {num_experts} experts into groups of at least 2"
    if num_selected_groups > num_groups:
        return f"topk_group: {num_selected_groups} exceeds n_group: {num_groups}"
    if num_selected > size * num_selected_groups:
        of_groups = f" of topk_group: {num_selected_groups}" if num_groups > 1 else ""
        return f"{selected}: {num_selected} exceeds the {size * num_selected_groups} experts{of_groups}"
    return None


def stated_aux_coefficient(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> float:
    """Returns the coefficient of the auxiliary loss that transformers adds in training, given a config.json and the
    defaults of its family: router_aux_loss_coef if output_router_logits is true, else 0. Without that key, it is 0."""
    if not config.get("output_router_logits") or "router_aux_loss_coef" not in defaults:
        return 0.0
    stated = config.get("router_aux_loss_coef")
    return defaults["router_aux_loss_coef"] if stated is None else stated


# --- The names of weights ---

FUSED, GRANITE, SEPARATE, MIXTRAL = "fused", "granite", "separate", "mixtral"
"""The spellings: all experts in one tensor, this under the names of Granite, each expert in tensors of its own, and
these under the names of Mixtral."""

_PARTS = {
    SEPARATE: {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    MIXTRAL: {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
}
_GRANITE_PARTS = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}
_EXPERTS = re.compile(r"(.*\.mlp\.)experts\.(gate_up_proj|down_proj)$")
_ROUTER = re.compile(r"(.*\.)mlp(\.gate\.weight)$")


def spelling_of(names: Iterable[str]) -> str:
    """Returns the spelling of the experts in a folder with tensors of these names; FUSED without experts."""
    for name in names:
        if ".block_sparse_moe.input_linear." in name:
            return GRANITE
        if re.search(r"\.block_sparse_moe\.experts\.\d+\.", name):
            return MIXTRAL
        if re.search(r"\.mlp\.experts\.\d+\.", name):
            return SEPARATE
    return FUSED


def is_split(native_name: str, spelling: str) -> bool:
    """Returns whether a native tensor holds all experts of a layer, and the files hold each expert for itself."""
    return spelling in _PARTS and _EXPERTS.match(native_name) is not None


def mixture_names(native_name: str, num_experts: int, spelling: str) -> tuple[str, ...] | None:
    """Returns the names in files that make up a native tensor of a mixture, in the order of its rows: those of expert
    0, then those of expert 1. It is None for all other tensors, and if the name is the native one."""
    if spelling == FUSED:
        return None
    if spelling == GRANITE:
        if (found := _EXPERTS.match(native_name)) is not None:
            return (found[1].replace(".mlp.", ".block_sparse_moe.") + _GRANITE_PARTS[found[2]],)
        return (f"{found[1]}block_sparse_moe.router.layer.weight",) if (found := _ROUTER.match(native_name)) else None
    if (found := _EXPERTS.match(native_name)) is not None:
        prefix = found[1] if spelling == SEPARATE else found[1].replace(".mlp.", ".block_sparse_moe.")
        parts = _PARTS[spelling][found[2]]
        return tuple(f"{prefix}experts.{number}.{part}.weight" for number in range(num_experts) for part in parts)
    if spelling == MIXTRAL and (found := _ROUTER.match(native_name)) is not None:
        return (f"{found[1]}block_sparse_moe{found[2]}",)
    return None
