"""The calls of the flash-attention packages, and which of them is taken; stand-ins with their signatures compute."""

import importlib.metadata
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from sftron.models.attention import SdpaAttention, attend_documents, resolve_attention
from sftron.models.llama import LlamaForSFT
from tests.models.packed_documents import bounds, random_heads
from tests.models.reference import tiny_config

# ruff: noqa: E501

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
LENGTHS = [5, 1, 200]

Call = dict[str, Any]


def _answer(calls: list[Call], given: Call) -> Tensor:
    """By the arguments alone, so that a wrong one shows."""
    calls.append(given)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        assert given[name].dtype == torch.int32, name
    assert given["cu_seqlens_q"].equal(given["cu_seqlens_k"])
    assert given["max_seqlen_q"] == given["max_seqlen_k"] >= int(given["cu_seqlens_q"].diff().max())
    assert given["causal"] is True
    return SdpaAttention(tuple(given["cu_seqlens_q"].diff().tolist()))(given["q"], given["k"], given["v"])


# fmt: off
def _version_2(calls: list[Call]) -> Callable[..., Any]:
    """flash-attn 2.8."""
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
    ):
        return _answer(calls, locals())
    return flash_attn_varlen_func


def _version_3(calls: list[Call]) -> Callable[..., Any]:
    """hopper/flash_attn_interface.py of 2025."""
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None,
        causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
        softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
    ):
        return _answer(calls, locals())
    return flash_attn_varlen_func


def _version_4(calls: list[Call]) -> Callable[..., Any]:
    """flash-attn-4 4.0.0b36: the fourth argument is no longer the bounds, and the log-sum-exp comes along."""
    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
        seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
        window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, return_lse=False,
    ):
        return _answer(calls, locals()), None
    return flash_attn_varlen_func
# fmt: on


MODULES = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}
STAND_INS = {2: _version_2, 3: _version_3, 4: _version_4}


class Machine:
    """A machine of one's choice: its GPU's compute capability, and the packages installed there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.calls: list[Call] = []

    def set(self, capability: tuple[int, int], *versions: int) -> None:
        self._monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        self._monkeypatch.setattr(importlib.metadata, "version", self._distribution if 4 in versions else self._missing)
        for version, name in MODULES.items():
            self.install(name, STAND_INS[version](self.calls) if version in versions else None)
        self._monkeypatch.setitem(sys.modules, "flash_attn_3", None)

    def install(self, name: str, function: Callable[..., Any] | None) -> None:
        module = ModuleType(name)
        if function:
            module.flash_attn_varlen_func = function  # pyright: ignore[reportAttributeAccessIssue]
        # Version 4 lies within the package that would be version 2's.
        self._monkeypatch.setitem(sys.modules, name, module if function or name == "flash_attn" else None)

    @staticmethod
    def _distribution(_name: str) -> str:
        return "4.0.0"

    @staticmethod
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
    # Padded to buckets; 1/sqrt(D) is the packages' own scale; no heads repeated; nothing else asked for.
    assert (len(call["cu_seqlens_q"]), call["max_seqlen_q"]) == (17, 256)
    assert (call["softmax_scale"], call["softcap"]) == (None, 0.0)
    assert (call["q"].shape[1], call["k"].shape[1], call["v"].shape[1]) == (6, 2, 2)
    assert call["deterministic"] is deterministic
    assert call["window_size"] in ((-1, -1), (None, None))


@pytest.mark.parametrize(
    ("capability", "versions", "flash_attn", "auto"),
    [
        ((9, 0), (2, 3, 4), "flash_attn_4", "flash_attn_4"),
        ((9, 0), (2, 3), "flash_attn_3", "flash_attn_3"),
        ((10, 0), (2, 3), "flash_attn_2", "varlen"),
        ((8, 6), (2, 3, 4), "flash_attn_2", "varlen"),
        ((12, 0), (2, 4), "flash_attn_2", "varlen"),
        ((9, 0), (), None, "varlen"),
        ((7, 5), (2, 3, 4), None, "sdpa"),
    ],
)
def test_the_newest_version_that_is_installed_and_supports_the_device_is_taken(
    capability: tuple[int, int], versions: tuple[int, ...], flash_attn: str | None, auto: str, machine: Machine
) -> None:
    machine.set(capability, *versions)
    assert resolve_attention("auto", CUDA, BF16, 128) == auto
    if flash_attn:
        assert resolve_attention("flash_attn", CUDA, BF16, 128) == flash_attn
    else:
        with pytest.raises(ValueError, match="'flash_attn' cannot run here: "):
            resolve_attention("flash_attn", CUDA, BF16, 128)


def test_auto_takes_what_can_compute_heads_of_this_size_and_type(machine: Machine) -> None:
    machine.set((9, 0), 2, 3, 4)
    heads = ((BF16, 256, "flash_attn_3"), (BF16, 20, "flex"), (BF16, 512, "sdpa"), (torch.float32, 128, "sdpa"))
    for dtype, head_dim, auto in heads:
        assert resolve_attention("auto", CUDA, dtype, head_dim) == auto


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "head_dim", "reason"),
    [
        ("varlen", (7, 5), BF16, 64, "varlen needs compute capability 8.0 or later, this device has 7.5"),
        ("varlen", (9, 0), torch.float32, 64, "it computes in bfloat16 or float16, the model in float32"),
        ("varlen", (9, 0), BF16, 20, "varlen takes a head_dim of 8 to 256 in steps of 8, the model's is 20"),
        ("flex", (9, 0), BF16, 8, "flex takes a head_dim of 16 to 256 in steps of 1, the model's is 8"),
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


def test_a_version_that_cannot_be_loaded_or_lacks_an_argument_is_refused_and_not_called(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.set((9, 0), 4)
    with monkeypatch.context() as broken:

        def fail(name: str) -> None:
            raise ImportError(f"{name}: undefined symbol")

        broken.setattr(importlib, "import_module", fail)
        with pytest.raises(ValueError, match=r"flash_attn 4 is installed but cannot be loaded: .*undefined symbol"):
            resolve_attention("flash_attn", CUDA, BF16, 64)
    machine.install("flash_attn.cute", lambda q, k, v, cu_seqlens_q, cu_seqlens_k, causal: None)
    with pytest.raises(ValueError, match="flash_attn 4 as installed does not take max_seqlen_q, max_seqlen_k, determ"):
        resolve_attention("flash_attn", CUDA, BF16, 64)


def test_a_head_that_version_3_cannot_compute_deterministically_goes_elsewhere(machine: Machine) -> None:
    machine.set((9, 0), 3)
    torch.use_deterministic_algorithms(True)
    try:
        assert resolve_attention("auto", CUDA, BF16, 256) == "varlen"
        with pytest.raises(
            ValueError, match="flash_attn_3 is deterministic up to a head_dim of 192, the model's is 256"
        ):
            resolve_attention("flash_attn", CUDA, BF16, 256)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_row_as_long_as_the_table_is_not_refused_for_its_bucket(varlen_on_cpu: None) -> None:
    model = LlamaForSFT(tiny_config(), compute_dtype=torch.float32, num_positions=130)
    ids = torch.randint(97, (150,))
    hidden = []
    for model.attention in ("sdpa", "varlen"):
        hidden.append(model(ids, torch.cat([torch.arange(20), torch.arange(130)]), bounds([20, 130]), 130))
    assert hidden[0].equal(hidden[1])
    with pytest.raises(ValueError, match="131 tokens does not fit the RoPE table of 130"):
        model(ids, torch.cat([torch.arange(19), torch.arange(131)]), bounds([19, 131]), 131)
