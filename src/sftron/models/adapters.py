"""Low-rank adapters of the linear layers (LoRA, arXiv 2106.09685), one for each Hugging Face projection.

    W' = W + scale * B @ A, where scale = alpha / rank, or alpha / sqrt(rank) with rank stabilization (arXiv 2312.03732)
    with DoRA (arXiv 2402.09353): W'' = magnitude * W' / |W'|, row by row; |W'| has no gradient

A fused linear layer has one adapter for each projection that is fused in it, never one for all of them. The parameter
model.layers.0.self_attn.qkv_proj.adapters.q_proj.lora_A belongs to the projection model.layers.0.self_attn.q_proj; peft
names it model.layers.0.self_attn.q_proj.lora_A.weight, after the prefix base_model.model. If the two modules differ in
their parents, such as mlp.gate_up_proj and shared_mlp.input_linear, the adapter is named shared_mlp/input_linear.

    shape suffixes: I input size, O output size, R rank
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sftron.models.architecture import LlamaConfig
from sftron.models.fusion import source_rows
from sftron.models.layers import Adapter
from sftron.models.routing import Router
from sftron.name_patterns import NamePatterns

A, B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
SAVED_MODULES = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
"""The modules that may be trained in full besides the adapters, and their full names."""
ALL_LINEAR = "all-linear"
_NATIVE = re.compile(rf"\.\w+\.adapters\.([\w/]+)\.({A}|{B}|{MAGNITUDE})$")
_BLOCK = re.compile(r".*\.layers\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """The adapters of a model."""

    ranks: Mapping[str, int]
    """The rank of each adapted projection, by its name; every other projection has no adapter."""
    alphas: Mapping[str, float]
    rslora: bool = False
    dora: bool = False
    modules_to_save: tuple[str, ...] = ()
    """The keys of SAVED_MODULES that are trained in full."""

    def scale(self, projection: str) -> float:
        rank = self.ranks[projection]
        return self.alphas[projection] / (math.sqrt(rank) if self.rslora else rank)

    def as_dict(self) -> dict[str, Any]:
        """Returns the adapters as JSON values, for `from_dict`."""
        return {**asdict(self), "modules_to_save": list(self.modules_to_save)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> LoraSpec:
        return cls(**{**content, "modules_to_save": tuple(content["modules_to_save"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStart:
    """The adapters to add to a model, and their first values."""

    spec: LoraSpec
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Whole values by `peft_name`; a parameter without one gets its `initial_value`."""
    seed: int = 0
    init: str = "default"


# --- The projections of a model ---


@dataclass(frozen=True, slots=True)
class Projection:
    """A range of the rows of a linear layer that is a linear layer of Hugging Face's model."""

    linear: str
    """The native name of the linear layer."""
    name: str
    """The last part of Hugging Face's name, such as q_proj."""
    first_row: int
    num_rows: int
    in_features: int
    adapter: str
    """The name of its adapter in the linear layer; it differs from `name` if the parents of the two modules differ."""


def projections_of(model: nn.Module, config: LlamaConfig) -> dict[str, Projection]:
    """Returns the projections of the model by Hugging Face's names; the head is not one of them."""
    found: dict[str, Projection] = {}
    for linear, module in model.named_modules():
        if not isinstance(getattr(module, "adapters", None), nn.ModuleDict) or linear == "lm_head":
            continue
        row = 0
        num_all, in_features = module.get_parameter("weight").shape
        for source, num_rows in source_rows(f"{linear}.weight", num_all, config):
            name = source.removesuffix(".weight")
            parent, _, last = name.rpartition(".")
            is_sibling = parent == linear.rpartition(".")[0]
            adapter = last if is_sibling else _BLOCK.sub("", name)[1:].replace(".", "/")
            found[name] = Projection(linear, last, row, num_rows, in_features, adapter)
            row += num_rows
    return found


def selected_names(targets: str | Sequence[str], names: Iterable[str]) -> list[str]:
    """Returns the names that `targets` selects, by peft's rules; see `match_targets`.

    Raises:
        ValueError: An expression takes too many steps, or is not supported; see `NamePatterns`.
    """
    if targets == ALL_LINEAR:
        return list(names)
    if isinstance(targets, str):
        pattern = NamePatterns([targets])  # peft's is re.fullmatch
        return [name for name in names if pattern.first(name) is not None]
    return [name for name in names if any(name == each or name.endswith(f".{each}") for each in targets)]


def match_targets(targets: str | Sequence[str], projections: Sequence[str], *, has_experts: bool = False) -> list[str]:
    """Returns the projections that `targets` selects, by peft's rules.

    Args:
        targets: ALL_LINEAR; a regular expression that matches a whole name; or a list of names or ends of names.
        has_experts: Whether the model has experts, for the error; experts and routers have no adapters.

    Raises:
        ValueError: A target selects nothing, or an expression is not supported.
    """
    known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in projections))
    known += "; adapters of experts and routers are not implemented" if has_experts else ""
    for target in [] if isinstance(targets, str) else targets:
        if not selected_names([target], projections):
            remedy = "; list it in modules_to_save" if target in SAVED_MODULES else ""
            raise ValueError(f"targets: {target!r} is no linear layer of this model. The layers are {known}{remedy}")
    try:
        found = selected_names(targets, projections)
    except ValueError as error:
        raise ValueError(f"targets: {error}") from error
    if not found:
        raise ValueError(
            f"targets: {targets!r} matches no linear layer; an expression has to match a whole name, such as "
            f"{projections[0]}. The layers are {known}"
        )
    return found


# --- Adding and initializing ---


def add_adapters(model: nn.Module, config: LlamaConfig, spec: LoraSpec) -> None:
    """Adds uninitialized adapters to the linear layers and freezes all other parameters but `modules_to_save`.

    Adapters have to be added before the model is sharded, so that they are sharded with their layer and their gradients
    are summed over ranks.

    Raises:
        ValueError: The model has no such projection, or has no such module to train in full.
    """
    projections = projections_of(model, config)
    if unknown := sorted(spec.ranks.keys() - projections.keys()):
        raise ValueError(f"the model has no linear layer {unknown[0]} for an adapter ({len(unknown)} such names)")
    model.requires_grad_(False)
    for name, rank in spec.ranks.items():
        at = projections[name]
        adapters = model.get_submodule(f"{at.linear}.adapters")
        assert isinstance(adapters, nn.ModuleDict)
        with model.get_parameter(f"{at.linear}.weight").device:
            adapters[at.adapter] = Adapter(
                at.first_row, at.num_rows, at.in_features, rank, spec.scale(name), dora=spec.dora
            )
    for name in spec.modules_to_save:
        if name == "lm_head" and config.tie_word_embeddings:
            raise ValueError(
                "modules_to_save: lm_head is tied to the embeddings in this model (tie_word_embeddings), so training "
                "one trains both; list embed_tokens instead"
            )
        model.get_submodule(SAVED_MODULES[name]).requires_grad_(True)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Computes as the base does, without adapters, and counts no loads of experts. Only for passes without gradients:
    a backward pass of the body would compute with the adapters."""
    assert not torch.is_grad_enabled()
    linears = [
        (each, each.adapters) for each in model.modules() if isinstance(getattr(each, "adapters", None), nn.ModuleDict)
    ]
    routers = [(each, each.routing) for each in model.modules() if isinstance(each, Router)]
    try:
        for linear, _ in linears:
            linear.adapters = nn.ModuleDict()
        for router, _ in routers:
            router.routing = None
        yield
    finally:
        for linear, adapters in linears:
            linear.adapters = adapters
        for router, routing in routers:
            router.routing = routing


def is_adapter(native_name: str) -> bool:
    """Returns whether a parameter belongs to an adapter."""
    return _NATIVE.search(native_name) is not None


def peft_name(native_name: str) -> str:
    """Returns the name of a trained parameter in peft's file, without the prefix base_model.model."""
    found = _NATIVE.search(native_name)
    if found is None:
        return native_name
    parent, adapter, part = native_name[: found.start()], found[1], found[2]
    if "/" in adapter and (block := _BLOCK.match(parent)):
        parent, adapter = block[0], adapter.replace("/", ".")
    return f"{parent}.{adapter}.{part}" + ("" if part == MAGNITUDE else ".weight")


def initial_value(
    native_name: str, shape: torch.Size, *, seed: int, init: str, row_norms: Callable[[str], Tensor]
) -> Tensor:
    """Returns the whole initial value, fp32, of a parameter of an adapter; it is the same on all ranks.

    As in peft, B is zero, A is uniform within 1/sqrt(I) ("default") or normal with a deviation of 1/R ("gaussian"), and
    DoRA's magnitude is the norm of each row of the weight.

    Args:
        init: "default" or "gaussian".
        row_norms: Returns the norms of the rows of a projection's weight, fp32 [O].
    """
    name = peft_name(native_name)
    if name.endswith(MAGNITUDE):
        return row_norms(name.removesuffix(f".{MAGNITUDE}"))
    if native_name.endswith(B):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed} {native_name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    if init == "gaussian":
        return torch.randn(shape, generator=generator) / shape[0]
    return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])


# --- Merging ---


def merge(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float, magnitude_O: Tensor | None) -> Tensor:
    """Returns the weight of a projection with its adapter merged, in fp32."""
    merged_OI = weight_OI.float() + scale * (b_OR.float() @ a_RI.float())
    if magnitude_O is None:
        return merged_OI
    return merged_OI * (magnitude_O.float() / merged_OI.norm(dim=1))[:, None]
