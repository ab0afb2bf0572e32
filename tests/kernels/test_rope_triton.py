import re

import pytest
import torch
import triton
from torch import Tensor

from sftron.kernels.rope_triton import PAIRS, rotate
from tests.kernels.machine_code import Kernel, MachineCode, compile_for_sm90
from tests.kernels.rope_cases import SHAPES, Case, gradients, make_case, turned

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def split(case: Case, qkv: Tensor) -> tuple[Tensor, ...]:
    heads = qkv.unflatten(-1, (-1, case.table.shape[1]))
    return heads.split([case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1)


def launch(case: Case, heads: tuple[Tensor, ...], out: tuple[Tensor, ...], *, inverse: bool) -> None:
    rotate(heads, out, case.position_ids.to(DEVICE), case.table.to(DEVICE), inverse=inverse)


def poisoned(case: Case) -> Tensor:
    return torch.full_like(case.qkv, torch.nan, device=DEVICE)


@pytest.mark.parametrize("num_tokens", [0, 1, 11])
@pytest.mark.parametrize("shape", SHAPES)
def test_queries_and_keys_are_rotated_in_place_in_one_launch(shape: tuple[int, int, int], num_tokens: int) -> None:
    case = make_case(*shape, num_tokens)
    qkv = torch.cat([case.qkv, case.qkv.new_full((1, case.qkv.shape[1]), torch.nan)]).to(DEVICE)
    q, k, _ = split(case, qkv[:-1])
    launch(case, (q, k), (q, k), inverse=False)
    torch.testing.assert_close(qkv[:-1].cpu().double(), turned(case), rtol=0, atol=1e-6)
    assert qkv[-1].isnan().all()  # the row after the last one


@pytest.mark.parametrize("shape", SHAPES)
def test_out_of_place_every_number_is_written_and_nothing_else(shape: tuple[int, int, int]) -> None:
    case = make_case(*shape)
    out = [torch.full((9, *x.shape[1:]), torch.nan, device=DEVICE) for x in split(case, case.qkv)]
    launch(case, split(case, case.qkv.to(DEVICE)), tuple(x[:7] for x in out), inverse=False)
    ours = torch.cat(out, dim=1).flatten(1).cpu()
    torch.testing.assert_close(ours[:7].double(), turned(case), rtol=0, atol=1e-6)
    assert ours[7:].isnan().all()


@pytest.mark.parametrize("layout", gradients(make_case(3, 1, 64)))
@pytest.mark.parametrize("shape", [(3, 1, 64), (2, 2, 80)])
def test_gradients_of_any_strides_become_one_fused_gradient(shape: tuple[int, int, int], layout: str) -> None:
    case = make_case(*shape)
    heads, grad = tuple(x.to(DEVICE) for x in gradients(case)[layout]), poisoned(case)
    launch(case, heads, split(case, grad), inverse=True)
    expected = turned(case._replace(qkv=torch.cat(heads, dim=1).flatten(1).cpu()), inverse=True)
    torch.testing.assert_close(grad.cpu().double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_bf16_is_rounded_once_from_fp32_arithmetic(position_dtype: torch.dtype) -> None:
    case = make_case(3, 1, 64, dtype=torch.bfloat16)
    case = case._replace(position_ids=case.position_ids.to(position_dtype))
    ours = poisoned(case)
    launch(case, split(case, case.qkv.to(DEVICE)), split(case, ours), inverse=False)
    # A GPU rounds to nearest, which is half a unit in the last place; Triton's interpreter cuts off, which is one.
    unit = 2**-8 if DEVICE.type == "cuda" else 2**-7
    torch.testing.assert_close(ours.cpu().double(), turned(case), rtol=unit, atol=1e-6)


@pytest.mark.parametrize("position", [-1, 41, 2**31 - 1])
def test_a_position_outside_the_table_poisons_its_token_and_no_other(position: int) -> None:
    case = make_case(3, 1, 64)
    expected = turned(case)
    case.position_ids[3] = position
    ours = poisoned(case)
    launch(case, split(case, case.qkv.to(DEVICE)), split(case, ours), inverse=False)
    q, k, v = split(case, ours[3:4].cpu())
    assert q.isnan().all() and k.isnan().all() and v.isfinite().all()  # noqa: PT018
    others = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(ours[others].cpu().double(), expected[others], rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_rows_beyond_two_gibi_numbers_are_reached() -> None:
    case = make_case(2, 1, 64, 1)
    stride = 2**31 + 64
    buffer = torch.empty(stride + case.qkv.shape[1], dtype=torch.bfloat16, device=DEVICE)
    qkv = buffer.as_strided((2, case.qkv.shape[1]), (stride, 1))
    qkv.copy_(case.qkv.expand(2, -1))
    case = case._replace(position_ids=torch.tensor([40, 40]).int())
    q, k, _ = split(case, qkv)
    launch(case, (q, k), (q, k), inverse=False)
    assert qkv[0].equal(qkv[1])


def kernel(head_dim: int, num_heads: int, num_kv_heads: int, *, inverse: bool) -> Kernel:
    """The kernel as it is launched on contiguous gradients, or on the fused buffer."""
    heads = [f"{name}{part}" for name in ("q", "k", "v") for part in ("", "_out")]
    types = {"ptr": "*bf16:16", "t": "i32:16", "h": "i32:16"}
    signature = {f"{head}_{suffix}": kind for head in heads for suffix, kind in types.items()}
    signature |= {"position_ptr": "*i32:16", "table_ptr": "*fp32:16", "num_tokens": "i32", "num_positions": "i32"}
    columns = 1 << (head_dim // 2 - 1).bit_length()
    sizes = {"NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "HALF": head_dim // 2}
    constants = {"q_d": 1, "k_d": 1, "v_d": 1, **sizes, "ROWS": PAIRS // columns, "COLUMNS": columns}
    return Kernel("sftron.kernels.rope_triton:rotate_kernel", signature, {**constants, "INVERSE": inverse})


@pytest.fixture(scope="module")
def codes() -> list[MachineCode]:
    shapes = [(64, 9, 3), (80, 32, 32), (128, 32, 8)]
    return compile_for_sm90(*(kernel(*shape, inverse=inverse) for shape in shapes for inverse in (False, True)))


def test_on_sm_90_heads_and_table_move_in_16_bytes(codes: list[MachineCode]) -> None:
    """Each thread has two rows of a tile: of q, k and v two halves, of cos and sin 8 numbers in fp32.

    What is narrower are the positions of the rows.
    """
    for code in codes:
        assert code.global_stores == {128: 3 * 4}
        assert code.global_loads[128] == 3 * 4 + 2 * 8
        assert set(code.global_loads) == {32, 128}
        assert code.global_loads[32] <= 4


def test_on_sm_90_nothing_spills_and_no_memory_is_shared(codes: list[MachineCode]) -> None:
    for code in codes:
        assert (code.local_bytes, code.spills, code.resources["SHARED"]) == (0, [], 0)
        # So that half of the threads an SM can hold have loads under way. Triton 3.6 and 3.7 take 80 for D=128 backward
        # (768 threads of 2048), and spill where they are held to 64.
        assert code.resources["REG"] <= (64 if TRITON >= (3, 8) else 80)


def test_on_sm_90_bf16_is_rounded_to_nearest(codes: list[MachineCode]) -> None:
    for code in codes:
        assert set(re.findall(r"cvt\S+bf16\S*\.f32", code.ptx)) == {"cvt.rn.bf16x2.f32"}
