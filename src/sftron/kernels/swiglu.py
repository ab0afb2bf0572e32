"""SwiGLU, silu(gate) * up (arXiv 2002.05202), on the fused projection; computed in fp32 and rounded once.

On a GPU two Triton kernels, elsewhere the torch expressions below, which are the tests' oracle as well. torch.compile
is given the expressions on every device, as in rms_norm.py.

    shape suffixes: T tokens, F intermediate_size, 2F gate and up side by side, B rows of a block
"""

import torch
from torch import Tensor

_VALUES_IN_CACHE = 2**16
"""For each core. A few fp32 arrays of as many stay in its cache: 3.2 ms against 4.9 ms for 512 x 1536, both passes."""


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up, [T, F] in the input's type. Without a gradient of its own: see models/linear.py."""
    if gate_up_T2F.is_cuda and not torch.compiler.is_compiling():
        return _swiglu_on_gpu(gate_up_T2F)
    output_TF = gate_up_T2F.new_empty(len(gate_up_T2F), gate_up_T2F.shape[1] // 2)
    for rows in _blocks(output_TF):
        gate_BF, up_BF = gate_up_T2F[rows].chunk(2, dim=-1)
        gate_BF = gate_BF.float()
        output_TF[rows] = gate_BF.sigmoid().mul_(gate_BF).mul_(up_BF)
    return output_TF


def swiglu_backward(grad_TF: Tensor, gate_up_T2F: Tensor, *, with_output: bool) -> tuple[Tensor, Tensor]:
    """The gradient of gate_up, and the product [T, F] once more, bit for bit.

    with_output: False gives an empty tensor in the product's place.
    """
    if gate_up_T2F.is_cuda and not torch.compiler.is_compiling():
        return _swiglu_backward_on_gpu(grad_TF, gate_up_T2F, with_output)
    grad_gate_up_T2F = torch.empty_like(gate_up_T2F)
    output_TF = gate_up_T2F.new_empty(grad_TF.shape if with_output else (0,))
    for rows in _blocks(grad_TF):
        gate_BF, up_BF = gate_up_T2F[rows].chunk(2, dim=-1)
        grad_gate_BF, grad_up_BF = grad_gate_up_T2F[rows].chunk(2, dim=-1)
        gate_BF, grad_BF = gate_BF.float(), grad_TF[rows].float()
        sigmoid_BF = gate_BF.sigmoid()
        silu_BF = sigmoid_BF * gate_BF
        if with_output:
            output_TF[rows] = silu_BF * up_BF
        grad_up_BF.copy_(silu_BF * grad_BF)
        # silu'(x) = s + silu(x) (1 - s), with s = sigmoid(x)
        slope_BF = sigmoid_BF.addcmul_(silu_BF, 1 - sigmoid_BF)
        grad_gate_BF.copy_(slope_BF.mul_(up_BF).mul_(grad_BF))
    return grad_gate_up_T2F, output_TF


def _blocks(x_TF: Tensor) -> list[slice]:
    """Of rows; a compiler sees to its blocks itself."""
    if torch.compiler.is_compiling():
        return [slice(None)]
    num_rows = max(1, _VALUES_IN_CACHE * torch.get_num_threads() // x_TF.shape[1])
    return [slice(start, start + num_rows) for start in range(0, len(x_TF), num_rows)]


@torch.library.custom_op("sftron::swiglu", mutates_args=(), device_types="cuda")
def _swiglu_on_gpu(gate_up_T2F: Tensor) -> Tensor:
    from sftron.kernels.swiglu_triton import launch_forward

    return launch_forward(gate_up_T2F)


@_swiglu_on_gpu.register_fake
def _(gate_up_T2F: Tensor) -> Tensor:
    return gate_up_T2F.new_empty(len(gate_up_T2F), gate_up_T2F.shape[1] // 2)


@torch.library.custom_op("sftron::swiglu_backward", mutates_args=(), device_types="cuda")
def _swiglu_backward_on_gpu(grad_TF: Tensor, gate_up_T2F: Tensor, with_output: bool) -> tuple[Tensor, Tensor]:
    from sftron.kernels.swiglu_triton import launch_backward

    return launch_backward(grad_TF, gate_up_T2F, with_output=with_output)


@_swiglu_backward_on_gpu.register_fake
def _(grad_TF: Tensor, gate_up_T2F: Tensor, with_output: bool) -> tuple[Tensor, Tensor]:
    return gate_up_T2F.new_empty(gate_up_T2F.shape), gate_up_T2F.new_empty(grad_TF.shape if with_output else (0,))
