"""Every kernel fits every supported GPU, and the reader of machine code sees what known machine code does."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from sftron.kernels.cross_entropy import launch_cross_entropy
from sftron.kernels.operators import OPS
from sftron.kernels.rms_norm import launch_normalize_backward
from sftron.kernels.swiglu import launch_swiglu_backward
from sftron.models.architecture import LlamaConfig
from sftron.models.block import Documents, LlamaBlock
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import weighted_loss_sum
from tests.kernels.machine_code import Kernel, MachineCode, compile_for, kernels_on_meta, launches, meta

ASSETS = Path(__file__).parents[1] / "assets"
ARCHITECTURES = (80, 89, 90, 100, 120)
"""A100, L40S and RTX 4090, H100, B200, RTX 5090; times 10."""
SHARED_BYTES = 99 * 1024
"""The shared memory of a program on the smallest of them (89 and 120)."""
LOCAL_BYTES = {"cross_entropy_gradient_kernel": 336, "normalize_backward_kernel": 16, "rotate_kernel": 40}
"""The largest local memory of a thread, for registers that do not fit; other kernels have none."""


# --- Every kernel ---


class Calls(TorchDispatchMode):
    """Records the different calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[str, Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "sftron":
            call = func._opname, args, kwargs or {}
            # Without the strides of gradients, which differ with the stand-in for attention.
            self.found[repr(tree_map_only(Tensor, lambda x: (x.shape, x.dtype), call))] = call
        return func(*args, **(kwargs or {}))


def calls_of(config: dict[str, Any], activation_checkpointing: str) -> list[tuple[str, Any, Any]]:
    """The calls of operators in a step of 4,096 tokens in bf16, with a trained head."""
    from tests.models.memory import attend

    num_tokens = 4096
    with torch.device("meta"):
        model = LlamaForSFT(
            LlamaConfig.from_hf(config),
            compute_dtype=torch.bfloat16,
            activation_checkpointing=activation_checkpointing,
            num_positions=num_tokens,
        )
    ids, weights = meta(num_tokens, dtype=torch.int64), meta(num_tokens, dtype=torch.float32)
    # Short documents, because recurrences of delta layers take a while even without values.
    bounds = torch.arange(0, num_tokens + 1, 64)
    documents = Documents(bounds, bounds.to("meta"), 64, num_tokens, model.recomputes)
    mixes = [attend if isinstance(block, LlamaBlock) else block.within(documents) for block in model.blocks]
    with kernels_on_meta(), Calls() as calls:
        hidden = model.model(ids, model.rope_tables.at(ids), mixes, model.compute_dtype)
        weighted_loss_sum(hidden, model.head, ids, ids, weights)[0].backward()
    return [call for call in calls.found.values() if call[0] != "add_product_"]  # a product of torch


@cache
def published_kernels() -> list[Kernel]:
    """The different kernels of steps of all published models, in bf16 and fp32."""
    published = json.loads((ASSETS / "published_configs.json").read_text(encoding="utf-8"))["implemented"]
    calls = [call for config in published.values() for call in calls_of(config, "selective")]
    wide = tree_map_only(Tensor, lambda x: x.float() if x.dtype == torch.bfloat16 else x, calls)
    found = {repr(each): each for name, args, kwargs in calls + wide for each in launches(OPS[name], *args, **kwargs)}
    return list(found.values())


def require_fitting(architecture: int, kernels: list[Kernel]) -> list[MachineCode]:
    codes = compile_for(architecture, *kernels, with_sass=False)
    for kernel, code in zip(kernels, codes, strict=True):
        assert code.resources["SHARED"] <= SHARED_BYTES, kernel
        assert code.local_bytes <= LOCAL_BYTES.get(kernel.name.partition(":")[2], 0), kernel
    return codes


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_of_every_published_model_fits(architecture: int) -> None:
    kernels = published_kernels()
    assert len(kernels) > 400
    assert len({kernel.name for kernel in kernels}) == 6
    require_fitting(architecture, kernels)


def test_a_kernel_of_each_kind_fits_the_smallest_gpu_and_moves_16_bytes_at_once() -> None:
    x, rows, weights = meta(4096, 8192), meta(4096, dtype=torch.int64), meta(4096, dtype=torch.float32)
    table = meta(4096, 128, dtype=torch.float32)
    kernels = [
        *launches(launch_cross_entropy, meta(4096, 32064)[:, :32002], rows, weights),
        *launches(launch_normalize_backward, x, x, meta(8192, dtype=torch.float32), weights, with_output=True),
        *launches(launch_swiglu_backward, x, meta(4096, 16384), with_output=True),
        *launches(OPS["rotate_heads"], meta(4096, 80 * 128), rows, table, 64, 8, True),
    ]
    for code in require_fitting(120, kernels):
        accesses = re.findall(r"(?:ld|st)\.global\S*\.b16\b", code.ptx)
        assert len(accesses) <= 1  # the logit of the label


# --- The reader ---


@triton.jit
def copy_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets))


@triton.jit
def center_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Holds the whole block between reading and writing it."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(y_ptr + offsets, x - tl.sum(x) / BLOCK)


COPY, CENTER = (f"tests.kernels.test_machine_code:{name}_kernel" for name in ("copy", "center"))


@pytest.mark.nightly
def test_accesses_are_as_wide_as_alignment_allows() -> None:
    aligned, unaligned = compile_for(
        90,
        Kernel(COPY, {"x_ptr": "*bf16:16", "y_ptr": "*bf16:16"}, {"BLOCK": 1024}),
        Kernel(COPY, {"x_ptr": "*bf16", "y_ptr": "*bf16:16"}, {"BLOCK": 1024}),
    )
    assert aligned.global_loads == aligned.global_stores == {128: 1}
    assert (unaligned.global_loads, unaligned.global_stores) == ({16: 8}, {128: 1})
    assert aligned.local_bytes == 0
    assert not aligned.spills
    assert "st.global.v4" in aligned.ptx


@pytest.mark.nightly
def test_local_memory_is_seen() -> None:
    """A thread has 255 registers: a warp that holds 2048 fp32 values needs 64 of them each, for 16384 values 512."""
    few, many = (Kernel(CENTER, {"x_ptr": "*fp32:16", "y_ptr": "*fp32:16"}, {"BLOCK": n}, 1) for n in (2048, 16384))
    few, many = compile_for(90, few, many)
    assert (few.local_bytes, few.spills) == (0, [])
    assert many.local_bytes > 0
    assert many.spills
