"""The norm against fp64: the torch twin, Triton's kernels interpreted, their machine code, and autograd around them."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sftron.kernels import rms_norm as rms_norm_module
from sftron.kernels.rms_norm import (
    launch_normalize,
    launch_normalize_backward,
    launch_sizes,
    normalize,
    normalize_backward,
    rms_norm,
)
from tests.kernels.implementations import DEVICES, rounding_error
from tests.kernels.machine_code import Kernel, compile_for_sm90

EPS = 1e-5
IMPLEMENTATIONS = {
    "torch": (normalize, normalize_backward),
    "triton": (launch_normalize, launch_normalize_backward),
}
# Short rows share a tile; 37 and 2500 are no powers of two, nor rows of 37 whole 16-byte accesses.
SHAPES = [(0, 64), (3, 2500), (77, 128), (50, 37)]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("poisoned_memory")
def test_output_and_gradients_are_those_of_fp64(
    name: str, shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several tiles for each program, as on long rows of tokens.
    monkeypatch.setattr(rms_norm_module, "_MAX_PROGRAMS", 2)
    forward, backward = IMPLEMENTATIONS[name]
    x, weight, grad = _inputs(*shape, dtype, DEVICES[name])
    y, rstd = forward(x, weight, EPS)
    grad_x, grad_weight, nothing = backward(grad, x, weight, rstd, with_output=False)
    _, _, again = backward(grad, x, weight, rstd, with_output=True)

    x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
    exact = x64 * (x64.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight64
    exact.backward(grad.double())
    assert (y.dtype, grad_x.dtype, grad_weight.dtype) == (dtype, dtype, torch.float32)
    rounding = rounding_error(dtype, name)
    torch.testing.assert_close(y.double(), exact.detach(), rtol=rounding, atol=1e-6)
    torch.testing.assert_close(grad_x.double(), x64.grad, rtol=rounding, atol=3e-6)
    torch.testing.assert_close(grad_weight.double(), weight64.grad, rtol=1e-5, atol=1e-4)
    assert again.equal(y)
    assert nothing.numel() == 0


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_rows_of_any_stride_and_a_half_precision_weight_are_read_right(name: str) -> None:
    forward, backward = IMPLEMENTATIONS[name]
    x, weight, grad = _inputs(6, 32, torch.bfloat16, DEVICES[name])
    x, grad, weight = x[:, 8:24], grad[:1, :16].expand(6, 16), weight[:16].bfloat16()
    y, rstd = forward(x, weight, EPS)
    expected, expected_rstd = normalize(x.contiguous(), weight.float(), EPS)
    torch.testing.assert_close(y, expected)
    gradients = backward(grad, x, weight, rstd, with_output=False)
    expected = normalize_backward(grad.contiguous(), x.contiguous(), weight.float(), expected_rstd, with_output=False)
    torch.testing.assert_close(gradients, expected)


def test_bf16_is_rounded_once_from_fp32_arithmetic() -> None:
    x, weight, _ = _inputs(20, 64, torch.bfloat16)
    assert normalize(x, weight, EPS)[0].equal(normalize(x.float(), weight, EPS)[0].bfloat16())


def test_autograd_gives_these_gradients_for_any_leading_dimensions() -> None:
    x, weight, grad = _inputs(12, 16, torch.bfloat16)
    leaf, parameter = x.view(3, 4, 16).clone().requires_grad_(), weight.clone().requires_grad_()
    y = rms_norm(leaf, parameter, EPS)
    y.backward(grad.view(3, 4, 16))
    expected, rstd = normalize(x, weight, EPS)
    grad_x, grad_weight, _ = normalize_backward(grad, x, weight, rstd, with_output=False)
    assert y.equal(expected.view(3, 4, 16))
    assert leaf.grad is not None
    assert leaf.grad.equal(grad_x.view(3, 4, 16))
    assert parameter.grad is not None
    assert parameter.grad.equal(grad_weight)
    with torch.no_grad():
        assert rms_norm(leaf, parameter, EPS).equal(y)


@pytest.mark.nightly
def test_machine_code_accesses_16_bytes_at_once_rounds_to_nearest_and_spills_nothing() -> None:
    codes = compile_for_sm90(*_kernels(576), *_kernels(8192))
    for code in codes:
        # 1 / root mean square is one fp32 value a row.
        assert set(code.global_loads) | set(code.global_stores) <= {128, 32}
        assert min(code.global_loads[128], code.global_stores[128]) >= 2
        assert "cvt.rn.bf16x2.f32" in code.ptx
        assert code.local_bytes == 0
        assert not code.spills


@pytest.mark.parametrize("with_output", [True, False])
def test_tracing_for_a_gpu_knows_the_shapes_and_types_of_every_result(with_output: bool) -> None:
    def results(device: str) -> list[Tensor]:
        x, weight, grad = (torch.empty_like(tensor, device=device) for tensor in _inputs(5, 16, torch.bfloat16))
        y, rstd = normalize(x, weight, EPS)
        return [y, rstd, *normalize_backward(grad, x, weight, rstd, with_output=with_output)]

    with FakeTensorMode():
        traced = results("cuda")
    assert {result.device.type for result in traced} == {"cuda"}
    assert [(r.shape, r.dtype, r.stride()) for r in traced] == [(r.shape, r.dtype, r.stride()) for r in results("cpu")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_agrees_with_the_cpu_and_with_itself_to_the_bit() -> None:
    inputs = _inputs(5001, 4096, torch.bfloat16)
    runs = []
    for device in ("cpu", "cuda", "cuda"):
        x, weight, grad = (tensor.to(device) for tensor in inputs)
        y, rstd = normalize(x, weight, EPS)
        runs.append([tensor.cpu() for tensor in (y, *normalize_backward(grad, x, weight, rstd, with_output=True))])
    for on_cpu, on_gpu, again in zip(*runs, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=2**-7, atol=1e-3)
        assert on_gpu.equal(again)


def _inputs(num_rows: int, size: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(0)
    x, weight, grad = torch.randn(num_rows, size), 1 + 0.3 * torch.randn(size), torch.randn(num_rows, size)
    return [tensor.to(device) for tensor in (x.to(dtype), weight, grad.to(dtype))]


def _kernels(size: int) -> list[Kernel]:
    _, sizes = launch_sizes(torch.empty(16384, size, device="meta"))
    num_warps, _ = sizes.pop("num_warps"), sizes.pop("tiles_per_program")
    data, fp32, counts = "*bf16:16", "*fp32:16", {"num_tokens": "i32", "tiles_per_program": "i32"}
    arrays = {"x_ptr": data, "weight_ptr": fp32, "rstd_ptr": fp32} | counts
    gradients = {"grad_ptr": data, "grad_x_ptr": data, "output_ptr": data, "grad_weight_ptr": fp32}
    module = "sftron.kernels.rms_norm"
    return [
        Kernel(f"{module}:normalize_kernel", arrays | {"y_ptr": data, "eps": "fp32"}, sizes, num_warps),
        Kernel(f"{module}:normalize_backward_kernel", arrays | gradients, sizes | {"WITH_OUTPUT": True}, num_warps),
    ]
