"""The calls of the flash-attention packages, and which of them is taken; stand-ins with their signatures compute."""

import importlib.metadata
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from sftron.models import attention
from sftron.models.architecture import Layer
from sftron.models.attention import SdpaAttention, attend_documents, resolve_attention
from sftron.models.attention_kernels import Scores
from sftron.models.llama import LlamaForSFT
from tests.models.conftest import bounds, random_heads
from tests.models.reference import tiny_config

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
LENGTHS = [5, 1, 200]
PARAMETERS = {
    # flash-attn 2.8
    2: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size softcap "
    "alibi_slopes deterministic return_attn_probs block_table",
    # hopper/flash_attn_interface.py of 2025
    3: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale causal qv "
    "q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin",
    # flash-attn-4 4.0.0b36: the fourth argument is no longer the bounds, and the log-sum-exp comes along
    4: "q k v qv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_k seqused_q seqused_k page_table "
    "softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa deterministic score_mod mask_mod",
}

Call = dict[str, Any]


def _stand_in(version: int, calls: list[Call]) -> Callable[..., Any]:
    """The package's function: it takes its parameters alone, and computes by them, so that a wrong one shows."""
    parameters = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in PARAMETERS[version].split()
    ]

    def flash_attn_varlen_func(*arguments: Any, **options: Any) -> Any:
        given = Signature(parameters).bind(*arguments, **options).arguments
        calls.append(given)
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            assert given[name].dtype == torch.int32, name
        assert given["cu_seqlens_q"].equal(given["cu_seqlens_k"])
        assert given["max_seqlen_q"] == given["max_seqlen_k"] >= int(given["cu_seqlens_q"].diff().max())
        assert given["causal"] is True
        before, after = given.get("window_size", (None, 0))
        assert after == 0
        options = {"window": None if before is None else before + 1, "scale": given.get("softmax_scale")}
        attend = SdpaAttention(tuple(given["cu_seqlens_q"].diff().tolist()))
        out = attend(given["q"], given["k"], given["v"], Scores(softcap=given.get("softcap"), **options))
        return (out, None) if version == 4 else out

    flash_attn_varlen_func.__signature__ = Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return flash_attn_varlen_func


TRIAL = attention.trial_failure.__wrapped__
MODULES = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}


class Machine:
    """A machine of one's choice: its GPU's compute capability, and the packages installed there. No backend is tried,
    unless `computes` makes a GPU of the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.calls: list[Call] = []
        monkeypatch.setattr(attention, "trial_failure", lambda *_: None)

    def computes(self, capability: tuple[int, int], functions: Mapping[int, Callable[..., Any]]) -> torch.device:
        """Returns a device of this capability, with these versions, on which backends are tried."""
        self.set(capability, *functions)
        for version, function in functions.items():
            self.install(MODULES[version], function)
        self._monkeypatch.setattr(attention, "is_gpu", lambda _: True)
        self._monkeypatch.setattr(attention, "compute_capability", lambda _: capability)
        self._monkeypatch.setattr(attention, "trial_failure", cache(TRIAL))
        return torch.device("cpu")

    def set(self, capability: tuple[int, int], *versions: int) -> None:
        self._monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        self._monkeypatch.setattr(importlib.metadata, "version", (lambda _: "4.0.0") if 4 in versions else _missing)
        for version, name in MODULES.items():
            self.install(name, _stand_in(version, self.calls) if version in versions else None)
        self._monkeypatch.setitem(sys.modules, "flash_attn_3", None)

    def install(self, name: str, function: Callable[..., Any] | None) -> None:
        module = ModuleType(name)
        if function:
            module.flash_attn_varlen_func = function  # pyright: ignore[reportAttributeAccessIssue]
        # Version 4 lies within the package that would be version 2's.
        self._monkeypatch.setitem(sys.modules, name, module if function or name == "flash_attn" else None)


def _missing(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("deterministic", [False, True])
def test_each_version_is_given_the_same_documents(version: int, deterministic: bool, machine: Machine) -> None:
    machine.set((9, 0), version)
    inputs = random_heads(206)
    weights = torch.randn_like(inputs[0])
    torch.use_deterministic_algorithms(deterministic)
    try:
        out = attend_documents(f"flash_attn_{version}", bounds(LENGTHS), 200, 206)(*inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    expected = attend_documents("sdpa", bounds(LENGTHS), 200, 206)(*inputs)
    assert out.equal(expected)
    for found, wanted in zip(*(torch.autograd.grad(x, inputs, weights) for x in (out, expected)), strict=True):
        assert found.equal(wanted)
    (call,) = machine.calls
    # Padded to buckets; no heads repeated; nothing else asked for, as 1/sqrt(D) is the packages' own scale.
    assert (len(call["cu_seqlens_q"]), call["max_seqlen_q"]) == (17, 256)
    assert (call["q"].shape[1], call["k"].shape[1], call["v"].shape[1]) == (6, 2, 2)
    bounds_and_lengths = {f"{name}_{part}" for name in ("cu_seqlens", "max_seqlen") for part in "qk"}
    assert call.keys() == {"q", "k", "v", "causal", "deterministic", *bounds_and_lengths}
    assert call["deterministic"] is deterministic


@pytest.mark.parametrize(
    "options",
    [{"window": 1}, {"window": 130}, {"scale": 0.3}, {"softcap": 2.0}, {"window": 7, "scale": 1.0, "softcap": 9}],
)
@pytest.mark.parametrize("version", [2, 3, 4])
def test_each_version_is_given_the_same_options(version: int, options: dict[str, Any], machine: Machine) -> None:
    machine.set((9, 0), version)
    if version == 4 and "softcap" in options:
        pytest.skip("refused")
    inputs = random_heads(206)
    out = attend_documents(f"flash_attn_{version}", bounds(LENGTHS), 200, 206)(*inputs, Scores(**options))
    assert out.equal(attend_documents("sdpa", bounds(LENGTHS), 200, 206)(*inputs, Scores(**options)))


WINDOW, SOFTCAP, SINKS = Layer(window=4096), Layer(softcap=50.0), Layer(window=128, sinks=True)


@pytest.mark.parametrize(
    ("capability", "layer", "auto"),
    [
        ((9, 0), Layer(scale=0.1), "varlen"),
        ((9, 0), WINDOW, "varlen"),
        ((9, 0), SOFTCAP, "flash_attn_3"),
        ((10, 0), SOFTCAP, "flash_attn_2"),
        ((9, 0), SINKS, "flex"),
        ((10, 0), SINKS, "flex"),
        ((7, 5), SINKS, "sdpa"),
    ],
)
def test_auto_takes_the_first_that_can_compute_a_layer_and_never_version_4(
    capability: tuple[int, int], layer: Layer, auto: str, machine: Machine
) -> None:
    machine.set(capability, 2, 3, 4)
    assert resolve_attention("auto", CUDA, BF16, 128, layer) == auto


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("varlen", SINKS, "varlen cannot train attention sinks, which this model has"),
        ("varlen", SOFTCAP, "varlen cannot train with a soft cap of scores, and this model's is 50"),
        ("flash_attn", SINKS, "flash_attn_4 cannot train attention sinks.* flash_attn_3 cannot .* flash_attn_2 cannot"),
    ],
)
def test_a_backend_that_cannot_compute_a_layer_is_refused(
    name: str, layer: Layer, reason: str, machine: Machine
) -> None:
    machine.set((9, 0), 2, 3, 4)
    with pytest.raises(ValueError, match=f"attention: '{name}' cannot run here: {reason}.*Choose 'auto', or 'sdpa'"):
        resolve_attention(name, CUDA, BF16, 128, layer)


@pytest.mark.parametrize(
    ("capability", "versions", "flash_attn"),
    [
        ((9, 0), (2, 3, 4), "flash_attn_4"),
        ((9, 0), (2, 3), "flash_attn_3"),
        ((10, 0), (2, 3), "flash_attn_2"),
        ((8, 6), (2, 3, 4), "flash_attn_2"),
        ((12, 0), (2, 4), "flash_attn_2"),
        ((9, 0), (), None),
        ((7, 5), (2, 3, 4), None),
    ],
)
def test_the_newest_version_that_is_installed_and_supports_the_device_is_taken(
    capability: tuple[int, int], versions: tuple[int, ...], flash_attn: str | None, machine: Machine
) -> None:
    machine.set(capability, *versions)
    assert resolve_attention("auto", CUDA, BF16, 128) == ("sdpa" if capability < (8, 0) else "varlen")
    if flash_attn:
        assert resolve_attention("flash_attn", CUDA, BF16, 128) == flash_attn
    else:
        with pytest.raises(ValueError, match="'flash_attn' cannot run here: "):
            resolve_attention("flash_attn", CUDA, BF16, 128)


def test_auto_takes_what_can_compute_heads_of_this_size_and_type(machine: Machine) -> None:
    machine.set((9, 0), 2, 3, 4)
    heads = ((BF16, 256, "varlen"), (BF16, 20, "flex"), (BF16, 512, "sdpa"), (torch.float32, 128, "sdpa"))
    for dtype, head_dim, auto in heads:
        assert resolve_attention("auto", CUDA, dtype, head_dim) == auto


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "head_dim", "reason"),
    [
        ("varlen", (7, 5), BF16, 64, "varlen needs compute capability 8.0 or later, but the GPU has 7.5"),
        ("varlen", (9, 0), torch.float32, 64, "it computes in bfloat16 or float16, but the model computes in float32"),
        ("varlen", (9, 0), BF16, 20, "varlen takes a head_dim of 8 to 256 in steps of 8, but the model has 20"),
        ("flex", (9, 0), BF16, 8, "flex takes a head_dim of 16 to 256 in steps of 1, but the model has 8"),
        ("flash_attn", (9, 0), BF16, 64, "flash_attn 4 is not installed .pip install flash-attn-4.; flash_attn 3 is"),
        ("flash_attn", (12, 0), BF16, 64, "flash_attn_4 needs compute capability 9.0 or later and below 12.0, .* 12.0"),
    ],
)
def test_a_refusal_has_the_reason_both_values_and_the_remedy(
    name: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int, reason: str, machine: Machine
) -> None:
    machine.set(capability)
    with pytest.raises(ValueError, match=f"attention: '{name}' cannot run here: {reason}.*Choose 'auto', or 'sdpa'"):
        resolve_attention(name, CUDA, dtype, head_dim)


def test_the_first_module_that_has_the_function_is_taken(machine: Machine) -> None:
    """Version 3 is installed under one of two names, and the second may exist without the function."""
    machine.set((9, 0), 3)
    machine.install("flash_attn_3", lambda: None)
    machine.install("flash_attn_3.flash_attn_interface", None)
    machine._monkeypatch.setitem(sys.modules, "flash_attn_3.flash_attn_interface", ModuleType("without the function"))
    assert resolve_attention("flash_attn", CUDA, BF16, 64) == "flash_attn_3"


def test_a_version_that_cannot_be_loaded_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.set((9, 0), 4)

    def fail(name: str) -> None:
        raise ImportError(f"{name}: undefined symbol")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ValueError, match=r"flash_attn 4 is installed but cannot be loaded: .*undefined symbol"):
        resolve_attention("flash_attn", CUDA, BF16, 64)


def test_a_head_that_version_3_cannot_compute_deterministically_goes_elsewhere(machine: Machine) -> None:
    machine.set((9, 0), 3)
    torch.use_deterministic_algorithms(True)
    try:
        assert resolve_attention("auto", CUDA, BF16, 256, SOFTCAP) == "flex"
        with pytest.raises(
            ValueError, match="flash_attn_3 is deterministic up to a head_dim of 192, but the model has 256"
        ):
            resolve_attention("flash_attn", CUDA, BF16, 256)
    finally:
        torch.use_deterministic_algorithms(False)


# --- Trials ---


def _broken(version: int, fault: str) -> Callable[..., Any]:
    """Returns the function of a package with a fault."""
    sound = _stand_in(version, [])

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: Call) -> Tensor:
            ctx.save_for_backward(q, k, v)
            ctx.options = options
            return sound(q, k, v, **options)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            if fault == "backward":
                raise RuntimeError("This flash attention build does not support backward.\nRebuild it.")
            if fault == "window":
                del ctx.options["window_size"]
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
                return *torch.autograd.grad(sound(*leaves, **ctx.options), leaves, grad), None

    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if fault == "argument":
            assert "causal" in options
            raise TypeError("flash_attn_varlen_func() got an unexpected keyword argument 'causal'")
        if fault == "neighbors":
            options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), bounds([len(q)]))
            options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), len(q))
        out = Broken.apply(q, k, v, options)
        assert isinstance(out, Tensor)
        return out * torch.nan if fault == "nan" else out

    return flash_attn_varlen_func


FAULTS = {
    "backward": "on a trial, RuntimeError: This flash attention build does not support backward.",
    "argument": "on a trial, TypeError: flash_attn_varlen_func.. got an unexpected keyword argument 'causal'",
    "nan": "its trial got outputs and gradients of q, k and v wrong by nan, nan, nan, nan, above 0.05",
    "window": r"its trial got outputs and gradients of q, k and v wrong by 0.00\d, 0.\d, 0.\d, 0.\d, above 0.05",
    "neighbors": "its trial got outputs and gradients .* wrong by",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_backend_that_fails_its_trial_is_not_used_and_the_reason_is_printed(fault: str, machine: Machine) -> None:
    layer, lines = Layer(window=4096, softcap=50.0), []
    device = machine.computes((9, 0), {3: _broken(3, fault), 2: _stand_in(2, [])})
    assert resolve_attention("auto", device, BF16, 64, layer, lines.append) == "flash_attn_2"
    (line,) = lines
    assert re.match(f"attention: flash_attn_3 is not used: {FAULTS[fault]}", line), line
    machine.install(MODULES[2], None)
    with pytest.raises(
        ValueError, match=f"'flash_attn' cannot run here: .*{FAULTS[fault]}.*; flash_attn 2 is not inst"
    ):
        resolve_attention("flash_attn", device, BF16, 64, layer, lines.append)


def test_no_mode_around_it_lets_a_trial_fail(machine: Machine, varlen_on_cpu: None) -> None:
    lines: list[str] = []
    device = machine.computes((9, 0), {})
    with torch.device("meta"), torch.inference_mode():
        assert resolve_attention("auto", device, BF16, 64, report=lines.append) == "varlen", lines


@pytest.mark.parametrize("layer", [Layer(), WINDOW, SOFTCAP, Layer(window=1, scale=0.2, softcap=3.0)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_sound_backend_passes_its_trial_once_in_a_process(
    layer: Layer, dtype: torch.dtype, machine: Machine, varlen_on_cpu: None
) -> None:
    calls: list[Call] = []
    device = machine.computes((9, 0), {3: _stand_in(3, calls)})
    lines: list[str] = []
    auto = "varlen" if layer.softcap is None else "flash_attn_3"
    assert resolve_attention("auto", device, dtype, 64, layer, lines.append) == auto
    assert resolve_attention("flash_attn", device, dtype, 64, layer, lines.append) == "flash_attn_3"
    assert resolve_attention("flash_attn", device, dtype, 64, layer, lines.append) == "flash_attn_3"
    assert len(calls) == 1
    assert resolve_attention("flash_attn", device, dtype, 128, layer, lines.append) == "flash_attn_3"
    assert len(calls) == 2
    assert not lines


def test_a_row_as_long_as_the_table_is_not_refused_for_its_bucket(varlen_on_cpu: None) -> None:
    model = LlamaForSFT(tiny_config(), compute_dtype=torch.float32, num_positions=130)
    ids = torch.randint(97, (150,))
    hidden = []
    for model.attention in ("sdpa", "varlen"):
        hidden.append(model(ids, torch.cat([torch.arange(20), torch.arange(130)]), bounds([20, 130]), 130))
    assert hidden[0].equal(hidden[1])
    with pytest.raises(ValueError, match="131 tokens does not fit the RoPE table of 130"):
        model(ids, torch.cat([torch.arange(19), torch.arange(131)]), bounds([19, 131]), 131)
