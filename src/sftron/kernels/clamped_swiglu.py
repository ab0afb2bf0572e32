"""SwiGLU of clamped inputs, (up + 1) * gate * sigmoid(alpha * gate) (gpt-oss, arXiv 2508.10925), in plain torch.

The gate is at most `limit`, and up is between -limit and limit. The columns of gate and up alternate. It is computed in
fp32 and rounded once.

    shape suffixes: T tokens, F intermediate_size, 2F columns of gate and up in turn, B rows of a block
"""

import operator
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

_VALUES_ON_CPU, _VALUES_ON_GPU = 2**16, 2**26
"""The number of elements of a block, on a CPU for each core: a few fp32 arrays fit into its cache, or into 2 GB."""

_is_inside = operator.lt if torch.__version__ >= "2.14" else operator.le
"""Compares an input with its bound: torch.clamp has no gradient at the bound from torch 2.14 on (pytorch#195931)."""


def clamped_swiglu(gate_up_T2F: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Returns the product, [T, F] in the input's type. It is not differentiable; see models/experts.py."""
    output_TF = gate_up_T2F.new_empty(len(gate_up_T2F), gate_up_T2F.shape[1] // 2)
    for gate_up_B2F, output_BF in _blocks(gate_up_T2F, output_TF):
        gate_BF, up_BF = _clamped(gate_up_B2F, limit)
        output_BF.copy_((gate_BF * alpha).sigmoid_().mul_(gate_BF).mul_(up_BF + 1))
    return output_TF


def clamped_swiglu_backward(
    grad_TF: Tensor, gate_up_T2F: Tensor, *, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of gate_up, and the recomputed product [T, F], bit for bit.

    An input beyond its bound has no gradient. An input at its bound has the gradient of the installed torch's clamp,
    which transformers uses.
    """
    grad_gate_up_T2F, output_TF = torch.empty_like(gate_up_T2F), torch.empty_like(grad_TF)
    for grad_BF, gate_up_B2F, grad_gate_up_B2F, output_BF in _blocks(grad_TF, gate_up_T2F, grad_gate_up_T2F, output_TF):
        gate_BF, up_BF = _clamped(gate_up_B2F, limit)
        grad_BF, up_BF = grad_BF.float(), up_BF + 1
        sigmoid_BF = (gate_BF * alpha).sigmoid_()
        gated_BF = sigmoid_BF * gate_BF
        output_BF.copy_(gated_BF * up_BF)
        grad_gate_up_B2F[:, 1::2] = grad_BF * gated_BF * _is_inside(gate_up_B2F[:, 1::2].abs(), limit)
        # f'(x) = s + alpha f(x) (1 - s), with f(x) = x s and s = sigmoid(alpha x)
        slope_BF = sigmoid_BF.addcmul(gated_BF, 1 - sigmoid_BF, value=alpha)
        grad_gate_up_B2F[:, ::2] = slope_BF.mul_(up_BF).mul_(grad_BF).mul_(_is_inside(gate_up_B2F[:, ::2], limit))
    return grad_gate_up_T2F, output_TF


def _clamped(gate_up_B2F: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    gate_BF, up_BF = gate_up_B2F[:, ::2].float(), gate_up_B2F[:, 1::2].float()
    return gate_BF.clamp(max=limit), up_BF.clamp(-limit, limit)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Returns the rows of all tensors in blocks.

    On the meta device, where memory is all that counts, these are two blocks of a GPU, the larger ones: while the
    second is computed, the temporaries of the first still exist, and no later block needs more.
    """
    is_on_cpu = tensors[0].device.type == "cpu"
    size = _VALUES_ON_CPU * torch.get_num_threads() if is_on_cpu else _VALUES_ON_GPU
    num_rows = max(1, 2 * size // max(each.shape[1] for each in tensors))
    blocks = zip(*(each.split(num_rows) for each in tensors), strict=True)
    return islice(blocks, 2) if tensors[0].is_meta else blocks
