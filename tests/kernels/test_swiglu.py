"""SwiGLU against fp64: the torch twin, Triton's kernels interpreted, and their machine code."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sftron.kernels.swiglu import launch_sizes, launch_swiglu, launch_swiglu_backward, swiglu, swiglu_backward
from tests.kernels.implementations import DEVICES, rounding_error
from tests.kernels.machine_code import Kernel, compile_for_sm90

IMPLEMENTATIONS = {
    "torch": (swiglu, swiglu_backward),
    "triton": (launch_swiglu, launch_swiglu_backward),
}
# Less than a block, more than one, and on a CPU more than one block of rows.
SHAPES = [(0, 16), (1, 37), (5, 1500), (70, 1024)]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("poisoned_memory")
def test_output_and_gradient_are_those_of_fp64(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    forward, backward = IMPLEMENTATIONS[name]
    gate_up, grad = _inputs(*shape, dtype, DEVICES[name])
    output = forward(gate_up)
    grad_gate_up, nothing = backward(grad, gate_up, with_output=False)
    _, again = backward(grad, gate_up, with_output=True)

    gate_up64 = gate_up.double().requires_grad_()
    gate, up = gate_up64.chunk(2, dim=-1)
    exact = F.silu(gate) * up
    exact.backward(grad.double())
    rounding = rounding_error(dtype, name)
    torch.testing.assert_close(output.double(), exact.detach(), rtol=rounding, atol=1e-6)
    torch.testing.assert_close(grad_gate_up.double(), gate_up64.grad, rtol=rounding, atol=1e-6)
    assert again.equal(output)
    assert nothing.numel() == 0


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
# numpy's warning, inside of Triton's interpreter, for 1 / (1 + inf) = 0.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_large_gates_saturate_and_overflow_nothing(name: str) -> None:
    forward, backward = IMPLEMENTATIONS[name]
    gate_up = torch.tensor([[1e4, -1e4, 0.0, 2.0, 2.0, 2.0]], device=DEVICES[name])
    assert forward(gate_up).tolist() == [[2e4, 0.0, 0.0]]
    grad_gate_up, _ = backward(torch.ones_like(gate_up[:, :3]), gate_up, with_output=False)
    assert grad_gate_up.tolist() == [[2.0, 0.0, 1.0, 1e4, 0.0, 0.0]]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_rows_of_any_stride_are_read_right(name: str) -> None:
    forward, backward = IMPLEMENTATIONS[name]
    gate_up, grad = _inputs(6, 32, torch.bfloat16, DEVICES[name])
    gate_up, grad = gate_up[:, 8:40], grad[:1, :16].expand(6, 16)
    torch.testing.assert_close(forward(gate_up), swiglu(gate_up.contiguous()))
    expected = swiglu_backward(grad.contiguous(), gate_up.contiguous(), with_output=False)
    torch.testing.assert_close(backward(grad, gate_up, with_output=False), expected)


@pytest.mark.nightly
def test_machine_code_accesses_each_value_once_16_bytes_at_once_and_rounds_to_nearest() -> None:
    codes = compile_for_sm90(*_kernels(1536), *_kernels(14336))
    for forward, backward in (codes[:2], codes[2:]):
        assert (forward.global_loads, forward.global_stores) == ({128: 2}, {128: 1})
        assert (backward.global_loads, backward.global_stores) == ({128: 3}, {128: 3})
        for code in (forward, backward):
            assert "cvt.rn.bf16x2.f32" in code.ptx
            assert code.local_bytes == 0
            assert not code.spills


@pytest.mark.parametrize("with_output", [True, False])
def test_tracing_for_a_gpu_knows_the_shapes_and_types_of_every_result(with_output: bool) -> None:
    def results(device: str) -> list[Tensor]:
        gate_up, grad = (torch.empty_like(tensor, device=device) for tensor in _inputs(5, 16, torch.bfloat16))
        return [swiglu(gate_up), *swiglu_backward(grad, gate_up, with_output=with_output)]

    with FakeTensorMode():
        traced = results("cuda")
    assert {result.device.type for result in traced} == {"cuda"}
    assert [(r.shape, r.dtype, r.stride()) for r in traced] == [(r.shape, r.dtype, r.stride()) for r in results("cpu")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_agrees_with_the_cpu_beyond_2_to_the_31_values() -> None:
    gate_up = torch.zeros(80_000, 2 * 14336, dtype=torch.bfloat16, device="cuda")
    assert gate_up.numel() > 2**31
    last, grad = _inputs(3, 14336, torch.bfloat16)
    gate_up[-3:] = last.cuda()
    all_grad = torch.zeros(80_000, 14336, dtype=torch.bfloat16, device="cuda")
    all_grad[-3:] = grad.cuda()
    grad_gate_up, output = swiglu_backward(all_grad, gate_up, with_output=True)
    expected = swiglu_backward(grad, last, with_output=True)
    torch.testing.assert_close((grad_gate_up[-3:].cpu(), output[-3:].cpu()), expected, rtol=2**-7, atol=1e-6)
    assert swiglu(gate_up).equal(output)


def _inputs(num_rows: int, size: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(0)
    gate_up, grad = 2 * torch.randn(num_rows, 2 * size), torch.randn(num_rows, size)
    return [tensor.to(dtype).to(device) for tensor in (gate_up, grad)]


def _kernels(size: int) -> list[Kernel]:
    _, sizes = launch_sizes(torch.empty(16384, size, device="meta"))
    num_warps = sizes.pop("num_warps")
    arrays = dict.fromkeys(("gate_up_ptr", "output_ptr"), "*bf16:16")
    gradients = dict.fromkeys(("grad_ptr", "grad_gate_up_ptr"), "*bf16:16")
    module = "sftron.kernels.swiglu"
    return [
        Kernel(f"{module}:swiglu_kernel", arrays, sizes, num_warps),
        Kernel(f"{module}:swiglu_backward_kernel", arrays | gradients, sizes | {"WITH_OUTPUT": True}, num_warps),
    ]
