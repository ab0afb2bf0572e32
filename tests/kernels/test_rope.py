"""The table against transformers; the rotation against complex numbers, by the torch twin and the Triton kernel."""

import re
from dataclasses import asdict, replace
from typing import NamedTuple

import pytest
import torch
import triton
from torch import Tensor
from transformers import LlamaConfig as ReferenceConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from sftron.kernels.operators import OPS
from sftron.kernels.rope import launch_rotate, rotate_heads, rotate_on_cpu, split_heads
from sftron.kernels.table import LinearScaling, Llama3Scaling, RopeScaling, RopeSpec, build_rope_table
from tests.kernels.conftest import DEVICES, rounding_error
from tests.kernels.machine_code import Kernel, MachineCode, compile_for, launches, meta

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
IMPLEMENTATIONS = {"torch": rotate_on_cpu, "triton": launch_rotate}
# (N, K, D): as many key-value heads as query heads, and fewer; powers of two, and not.
SHAPES = [(4, 4, 64), (6, 2, 80), (3, 1, 96), (5, 5, 128), (2, 1, 256)]
# Shapes with the dimensions that are rotated, and whether these are interleaved.
LAYOUTS = [(*shape, shape[2], False) for shape in SHAPES]
LAYOUTS += [(3, 1, 80, 32, False), (2, 2, 64, 16, False), (2, 1, 256, 64, False), (3, 1, 96, 72, False)]
LAYOUTS += [(3, 1, 80, 80, True), (2, 2, 128, 64, True), (2, 1, 64, 16, True)]
SCALINGS: dict[str, RopeScaling | None] = {
    "default": None,
    "linear": LinearScaling(factor=3.0),
    "llama3": Llama3Scaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
}


@pytest.mark.parametrize("rope_type", SCALINGS)
def test_the_table_is_that_of_transformers_to_the_bit(rope_type: str) -> None:
    scaling = SCALINGS[rope_type]
    parameters = {} if scaling is None else asdict(scaling)
    config = ReferenceConfig(
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": rope_type, "rope_theta": 500000.0, **parameters},
    )
    positions = torch.cat([torch.arange(100), torch.arange(130972, 131072)])
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0), positions[None])
    spec = RopeSpec(theta=500000.0, rotary_dim=64, scaling=scaling)
    table = build_rope_table(131072, spec)
    assert table[positions].equal(torch.cat([cos[0, :, :32], sin[0, :, :32]], dim=-1))
    assert scaling is None or not table[:100].equal(build_rope_table(100, replace(spec, scaling=None)))


class Case(NamedTuple):
    """qkv [T, W], position_ids int32 [T], table [P, D]"""

    qkv: Tensor
    position_ids: Tensor
    table: Tensor
    num_heads: int
    num_kv_heads: int
    interleaved: bool = False


def make_case(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    num_tokens: int = 7,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Random heads at positions that restart twice, out of order, up to the last one of the table."""
    torch.manual_seed(0)
    position_ids = torch.tensor([0, 1, 2, 0, 40, 7, 3, 5, 8, 0, 39])[:num_tokens].int()
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    table = build_rope_table(41, RopeSpec(theta=10000.0, rotary_dim=rotary_dim or head_dim))
    return Case(qkv, position_ids, table, num_heads, num_kv_heads, interleaved)


def turned(case: Case, *, inverse: bool = False) -> Tensor:
    """qkv in fp64; each pair of dimensions of q and k is a complex number, turned by the angle of its position."""
    num_rotated, (cos, sin) = case.num_heads + case.num_kv_heads, case.table.double().chunk(2, dim=-1)
    turn = torch.complex(cos, -sin if inverse else sin)[case.position_ids, None]
    heads, rotary_dim = case.qkv.double().unflatten(-1, (num_rotated + case.num_kv_heads, -1)), case.table.shape[1]
    rotated, unrotated = heads[:, :num_rotated, :rotary_dim], heads[:, :num_rotated, rotary_dim:]
    sizes, dim = ((-1, 2), 3) if case.interleaved else ((2, -1), 2)
    rotated = turn * torch.complex(*rotated.unflatten(2, sizes).unbind(dim))
    rotated = torch.stack([rotated.real, rotated.imag], dim=dim).flatten(2)
    return torch.cat([torch.cat([rotated, unrotated], dim=2), heads[:, num_rotated:]], dim=1).flatten(1)


def gradients(case: Case) -> dict[str, tuple[Tensor, ...]]:
    """Gradients of q, k and v, laid out as a copy, as SDPA's, as a sum's, and as every second number."""
    torch.manual_seed(1)
    plain = [torch.randn_like(x) for x in split(case, case.qkv)]
    return {
        "contiguous": tuple(plain),
        "transposed": tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in plain),
        "expanded": tuple(x[:1, :1, :1].expand(x.shape) for x in plain),
        "every second": tuple(x.repeat_interleave(2, dim=-1)[..., ::2] for x in plain),
    }


def split(case: Case, qkv: Tensor) -> list[Tensor]:
    return list(split_heads(qkv, case.num_heads, case.num_kv_heads))


def launch(name: str, case: Case, heads: list[Tensor], out: list[Tensor], *, inverse: bool) -> None:
    device = DEVICES[name]
    heads = [x.to(device) for x in heads]
    options = {"inverse": inverse, "interleaved": case.interleaved}
    IMPLEMENTATIONS[name](heads, out, case.position_ids.to(device), case.table.to(device), **options)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_tokens", [0, 11])
@pytest.mark.parametrize("shape", LAYOUTS)
def test_queries_and_keys_are_turned_and_nothing_else_is_written(
    shape: tuple[int, int, int, int, bool], num_tokens: int, name: str
) -> None:
    case = make_case(*shape, num_tokens)
    out = [torch.full((num_tokens + 2, *x.shape[1:]), torch.nan, device=DEVICES[name]) for x in split(case, case.qkv)]
    launch(name, case, split(case, case.qkv), [x[:num_tokens] for x in out], inverse=False)
    found = torch.cat(out, dim=1).flatten(1).cpu()
    torch.testing.assert_close(found[:num_tokens].double(), turned(case), rtol=0, atol=1e-6)
    assert found[num_tokens:].isnan().all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", gradients(make_case(3, 1, 64)))
@pytest.mark.parametrize(
    "shape", [(3, 1, 64, 64, False), (2, 2, 80, 80, False), (2, 1, 80, 20, False), (2, 1, 80, 32, True)]
)
def test_gradients_of_any_strides_become_one_fused_gradient(
    shape: tuple[int, int, int, int, bool], layout: str, name: str
) -> None:
    case = make_case(*shape)
    heads = list(gradients(case)[layout])
    grad = torch.full_like(case.qkv, torch.nan, device=DEVICES[name])
    launch(name, case, heads, split(case, grad), inverse=True)
    expected = turned(case._replace(qkv=torch.cat(heads, dim=1).flatten(1)), inverse=True)
    torch.testing.assert_close(grad.cpu().double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_bf16_is_rounded_once_from_fp32_arithmetic(position_dtype: torch.dtype, name: str) -> None:
    case = make_case(3, 1, 64, dtype=torch.bfloat16)
    case = case._replace(position_ids=case.position_ids.to(position_dtype))
    found = torch.full_like(case.qkv, torch.nan, device=DEVICES[name])
    launch(name, case, split(case, case.qkv), split(case, found), inverse=False)
    torch.testing.assert_close(found.cpu().double(), turned(case), rtol=rounding_error(torch.bfloat16, name), atol=1e-6)


@pytest.mark.parametrize("position", [-1, 41, 2**31 - 1])
def test_a_position_outside_the_table_is_an_error_on_a_cpu_and_poisons_its_token_alone_on_a_gpu(position: int) -> None:
    case = make_case(3, 1, 64)
    expected = turned(case)
    case.position_ids[3] = position
    with pytest.raises(ValueError, match=rf"position_ids range from .*{position}.*from 0 to 40"):
        rotate_heads(*case)
    found = torch.full_like(case.qkv, torch.nan, device=DEVICES["triton"])
    launch("triton", case, split(case, case.qkv), split(case, found), inverse=False)
    q, k, v = split(case, found[3:4].cpu())
    assert q.isnan().all() and k.isnan().all() and v.isfinite().all()  # noqa: PT018
    others = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(found[others].cpu().double(), expected[others], rtol=0, atol=1e-6)


# --- The operation, and its gradient ---


def test_the_rotation_is_that_of_transformers_to_the_bit_and_changes_no_input() -> None:
    case = make_case(3, 1, 64)
    before = case.qkv.clone()
    q, k, v = split(case, case.qkv)
    cos, sin = (x.repeat(1, 2) for x in case.table[case.position_ids].chunk(2, dim=-1))
    for found, expected in zip(rotate_heads(*case), (*apply_rotary_pos_emb(q, k, cos, sin), v), strict=True):
        assert found.equal(expected)
        assert found.is_contiguous()
    assert case.qkv.equal(before)


def test_shapes_that_do_not_fit_are_an_error() -> None:
    case = make_case(3, 1, 8)
    for wrong in (case._replace(num_kv_heads=2), case._replace(position_ids=case.position_ids[1:])):
        with pytest.raises(ValueError, match="qkv_TW has shape"):
            rotate_heads(*wrong)


@pytest.mark.parametrize("missing", [(0,), (1, 2)])
def test_heads_that_nothing_uses_have_a_gradient_of_zero(missing: tuple[int, ...]) -> None:
    case = make_case(3, 1, 8)
    grads, leaf = gradients(case)["contiguous"], case.qkv.clone().requires_grad_()
    used, heads = [i for i in range(3) if i not in missing], rotate_heads(leaf, *case[1:])
    (found,) = torch.autograd.grad([heads[i] for i in used], leaf, [grads[i] for i in used])
    dense = [torch.zeros_like(grad) if i in missing else grad for i, grad in enumerate(grads)]
    expected = turned(case._replace(qkv=torch.cat(dense, dim=1).flatten(1)), inverse=True)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICES["triton"] == "cpu", reason="needs a CUDA device")
def test_rows_beyond_two_gibi_numbers_are_reached() -> None:
    case = make_case(2, 1, 64, num_tokens=1)
    stride = 2**31 + 64
    buffer = torch.empty(stride + case.qkv.shape[1], dtype=torch.bfloat16, device="cuda")
    qkv = buffer.as_strided((2, case.qkv.shape[1]), (stride, 1))
    qkv.copy_(case.qkv.expand(2, -1))
    case = case._replace(position_ids=torch.tensor([40, 40]).int())
    launch("triton", case, split(case, qkv), split(case, qkv), inverse=False)
    assert qkv[0].equal(qkv[1])


# --- Machine code ---


def kernels(num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, interleaved: bool) -> list[Kernel]:
    """The kernels as they are launched on the fused buffer, and on contiguous gradients."""
    num_tokens = 4096
    rows, table = meta(num_tokens, dtype=torch.int32), meta(41, rotary_dim, dtype=torch.float32)
    qkv = meta(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    grads = [meta(num_tokens, number, head_dim) for number in (num_heads, num_kv_heads, num_kv_heads)]
    forward = launches(OPS["rotate_heads"], qkv, rows, table, num_heads, num_kv_heads, interleaved)
    return forward + launches(OPS["rotate_heads_backward"], *grads, rows, table, interleaved)


PLAIN = [(9, 3, 64, 64, False), (32, 32, 80, 80, False), (32, 8, 128, 128, False)]
# The rotated part of DeepSeek's heads, and the heads of Cohere
INTERLEAVED = [(128, 1, 64, 64, True), (64, 8, 128, 128, True)]
GLM4 = (32, 2, 128, 64, True)


def codes_of(*shapes: tuple[int, int, int, int, bool]) -> list[MachineCode]:
    return compile_for(90, *(kernel for shape in shapes for kernel in kernels(*shape)))


@pytest.mark.nightly
def test_on_sm_90_heads_and_table_move_in_16_bytes_and_nothing_spills() -> None:
    """Each thread has 16 pairs of a tile: of q, k and v 4 accesses, of cos and sin 8 numbers in fp32.

    What is narrower are the positions of its rows.
    """
    plain, interleaved, glm4 = codes_of(*PLAIN), codes_of(*INTERLEAVED), codes_of(GLM4)
    for code in (*plain, *interleaved, *glm4):
        assert code.global_stores == {128: 3 * 4}
        assert code.global_loads[128] == 3 * 4 + 2 * 8
        assert set(code.global_loads) == {32, 128}
        assert code.global_loads[32] <= (4 if code in plain else 5)
        # With interleaved pairs of a part of each head, ptxas prefers 48 registers and 11 accesses to local memory.
        assert code.local_bytes <= (40 if code in glm4 else 0)
        assert len(code.spills) <= (11 if code in glm4 else 0)
        assert code.resources["SHARED"] == 0
        # So that half of the threads an SM can hold have loads under way. Triton 3.6 and 3.7 take 80 for D=128 backward
        # (768 threads of 2048), and spill where they are held to 64.
        assert code.resources["REG"] <= (64 if TRITON >= (3, 8) else 80)
        roundings = set(re.findall(r"cvt\S+bf16\S*\.f32", code.ptx))
        assert roundings == {"cvt.rn.bf16x2.f32"} if code in plain else {r[:6] for r in roundings} == {"cvt.rn"}
