"""The norm and SwiGLU against fp64: the torch twins, Triton's kernels interpreted, and their machine code."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sftron.kernels import rms_norm as norm
from sftron.kernels import swiglu as gate
from tests.kernels.conftest import DEVICES, NIGHTLY, rounding_error
from tests.kernels.machine_code import Kernel, compile_for, launches, meta

EPS = 1e-5
OPERATIONS = ["norm", "swiglu"]
# Short rows share a tile of the norm; 37 and 2500 are no powers of two, nor rows of 37 whole 16-byte accesses. Of
# SwiGLU less than a block of columns, more than one, and on a CPU more than one block of rows.
SHAPES = [(0, 64), (3, 2500), (50, 37)]
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make_inputs(operation: str, num_rows: int, size: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Returns x, weight and gradient of the norm, or gate_up and gradient of SwiGLU."""
    torch.manual_seed(0)
    grad = torch.randn(num_rows, size).to(dtype)
    if operation == "norm":
        inputs = [torch.randn(num_rows, size).to(dtype), 1 + 0.3 * torch.randn(size), grad]
    else:
        inputs = [(2 * torch.randn(num_rows, 2 * size)).to(dtype), grad]
    return [tensor.to(device) for tensor in inputs]


def run(operation: str, implementation: str, inputs: list[Tensor], *, with_output: bool = True) -> list[Tensor]:
    """Returns the output, the gradients, and the output computed again."""
    is_triton = implementation == "triton"
    if operation == "norm":
        forward, backward = norm.normalize, norm.normalize_backward
        if is_triton:
            forward, backward = norm.launch_normalize, norm.launch_normalize_backward
        x, weight, grad = inputs
        y, rstd = forward(x, weight, EPS)
        assert (rstd.dtype, rstd.shape) == (torch.float32, (len(x),))
        return [y, *backward(grad, x, weight, rstd, with_output=with_output)]
    forward, backward = gate.swiglu, gate.swiglu_backward
    if is_triton:
        forward, backward = gate.launch_swiglu, gate.launch_swiglu_backward
    gate_up, grad = inputs
    return [forward(gate_up), *backward(grad, gate_up, with_output=with_output)]


def exact(operation: str, inputs: list[Tensor]) -> list[Tensor]:
    *leaves, grad = (x.double().requires_grad_() for x in inputs)
    if operation == "norm":
        x, weight = leaves
        output = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
    else:
        gates, up = leaves[0].chunk(2, dim=-1)
        output = F.silu(gates) * up
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


@pytest.mark.parametrize("implementation", DEVICES)
@pytest.mark.parametrize("shape", [*SHAPES, pytest.param((70, 1024), marks=NIGHTLY)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.usefixtures("poisoned_memory")
def test_output_and_gradients_are_those_of_fp64(
    operation: str, dtype: torch.dtype, shape: tuple[int, int], implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several tiles for each program, as on long rows of tokens.
    monkeypatch.setattr(norm, "_MAX_PROGRAMS", 2)
    inputs = make_inputs(operation, *shape, dtype, DEVICES[implementation])
    output, *gradients, again = run(operation, implementation, inputs)
    rounding = rounding_error(dtype, implementation)
    assert [x.dtype for x in (output, *gradients)] == [inputs[0].dtype, *(x.dtype for x in inputs[:-1])]
    for found, expected in zip([output, *gradients], exact(operation, inputs), strict=True):
        # The weight's gradient is a sum over all rows, in fp32.
        tolerance = {"rtol": 1e-5, "atol": 1e-4} if found.ndim == 1 else {"rtol": rounding, "atol": 3e-6}
        torch.testing.assert_close(found.double(), expected, **tolerance)
    assert again.equal(output)
    assert run(operation, implementation, inputs, with_output=False)[-1].numel() == 0


@pytest.mark.parametrize("implementation", DEVICES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_rows_and_half_precision_weights_of_any_stride_are_read_right(operation: str, implementation: str) -> None:
    x, *weight, grad = make_inputs(operation, 6, 32, torch.bfloat16, DEVICES[implementation])
    x, grad = (x[:, 8:24] if operation == "norm" else x[:, 8:40]), grad[:1, :16].expand(6, 16)
    weight = [each.bfloat16()[::2] for each in weight]
    expected = run(operation, "torch", [x.contiguous(), *(each.float() for each in weight), grad.contiguous()])
    torch.testing.assert_close(run(operation, implementation, [x, *weight, grad]), expected)


@pytest.mark.parametrize("with_output", [True, False])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_tracing_for_a_gpu_knows_the_shapes_and_types_of_every_result(operation: str, with_output: bool) -> None:
    def results(device: str) -> list[Tensor]:
        inputs = [torch.empty_like(x, device=device) for x in make_inputs(operation, 5, 16, torch.bfloat16)]
        return run(operation, "torch", inputs, with_output=with_output)

    with FakeTensorMode():
        traced = results("cuda")
    assert {result.device.type for result in traced} == {"cuda"}
    assert [(r.shape, r.dtype, r.stride()) for r in traced] == [(r.shape, r.dtype, r.stride()) for r in results("cpu")]


def test_a_norm_in_bf16_is_rounded_once_from_fp32_arithmetic() -> None:
    x, weight, _ = make_inputs("norm", 20, 64, torch.bfloat16)
    assert norm.normalize(x, weight, EPS)[0].equal(norm.normalize(x.float(), weight, EPS)[0].bfloat16())


def test_autograd_gives_the_norms_gradients_for_any_leading_dimensions() -> None:
    x, weight, grad = make_inputs("norm", 12, 16, torch.bfloat16)
    leaf, parameter = x.view(3, 4, 16).clone().requires_grad_(), weight.clone().requires_grad_()
    y = norm.rms_norm(leaf, parameter, EPS)
    y.backward(grad.view(3, 4, 16))
    expected, grad_x, grad_weight, _ = run("norm", "torch", [x, weight, grad])
    assert y.equal(expected.view(3, 4, 16))
    assert leaf.grad is not None
    assert leaf.grad.equal(grad_x.view(3, 4, 16))
    assert parameter.grad is not None
    assert parameter.grad.equal(grad_weight)
    with torch.no_grad():
        assert norm.rms_norm(leaf, parameter, EPS).equal(y)


@pytest.mark.parametrize("implementation", DEVICES)
# numpy's warning, inside of Triton's interpreter, for 1 / (1 + inf) = 0.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_large_gates_saturate_and_overflow_nothing(implementation: str) -> None:
    gate_up = torch.tensor([[1e4, -1e4, 0.0, 2.0, 2.0, 2.0]], device=DEVICES[implementation])
    output, grad_gate_up, _ = run("swiglu", implementation, [gate_up, torch.ones_like(gate_up[:, :3])])
    assert output.tolist() == [[2e4, 0.0, 0.0]]
    assert grad_gate_up.tolist() == [[2.0, 0.0, 1.0, 1e4, 0.0, 0.0]]


# --- On a GPU ---


@pytest.mark.parametrize("operation", [pytest.param(each, marks=ON_GPU) for each in OPERATIONS])
def test_the_gpu_agrees_with_the_cpu_and_with_itself_to_the_bit(operation: str) -> None:
    inputs = make_inputs(operation, 5001, 4096, torch.bfloat16)
    runs = [run(operation, "torch", [x.to(device) for x in inputs]) for device in ("cpu", "cuda", "cuda")]
    for on_cpu, on_gpu, again in zip(*runs, strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=2**-7, atol=1e-3)
        assert on_gpu.equal(again)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_values_beyond_2_to_the_31_are_reached() -> None:
    last = make_inputs("swiglu", 3, 14336, torch.bfloat16)
    inputs = [torch.zeros(80_000, x.shape[1], dtype=x.dtype, device="cuda") for x in last]
    assert inputs[0].numel() > 2**31
    for x, rows in zip(inputs, last, strict=True):
        x[-3:] = rows.cuda()
    found = [x[-3:].cpu() for x in run("swiglu", "torch", inputs)]
    torch.testing.assert_close(found, run("swiglu", "torch", last), rtol=2**-7, atol=1e-6)


def kernels(operation: str, size: int) -> list[Kernel]:
    """The kernels of forward and backward, as they are launched on 16,384 rows of bf16."""
    x, weight, rstd = meta(16384, size), meta(size, dtype=torch.float32), meta(16384, dtype=torch.float32)
    if operation == "norm":
        backward = launches(norm.launch_normalize_backward, x, x, weight, rstd, with_output=True)
        return launches(norm.launch_normalize, x, weight, EPS) + backward
    gate_up = meta(16384, 2 * size)
    return launches(gate.launch_swiglu, gate_up) + launches(gate.launch_swiglu_backward, x, gate_up, with_output=True)


@pytest.mark.nightly
def test_machine_code_accesses_16_bytes_at_once_rounds_to_nearest_and_spills_nothing() -> None:
    norms = compile_for(90, *kernels("norm", 576), *kernels("norm", 8192))
    gates = compile_for(90, *kernels("swiglu", 1536), *kernels("swiglu", 14336))
    for code in (*norms, *gates):
        assert "cvt.rn.bf16x2.f32" in code.ptx
        assert (code.local_bytes, code.spills) == (0, [])
    for code in norms:
        # 1 / root mean square is one fp32 value a row.
        assert set(code.global_loads) | set(code.global_stores) <= {128, 32}
        assert min(code.global_loads[128], code.global_stores[128]) >= 2
    for forward, backward in (gates[:2], gates[2:]):
        # Each value is read and written once.
        assert (forward.global_loads, forward.global_stores) == ({128: 2}, {128: 1})
        assert (backward.global_loads, backward.global_stores) == ({128: 3}, {128: 3})
