"""Activation functions of feed-forward networks, as they are or as gates (arXiv 2002.05202), and their gradients.

A gate with SiLU is SwiGLU and has fused kernels (swiglu.py); the others are operations of torch.

    shape suffixes: T tokens, F intermediate_size, 2F concatenated gate and up
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sftron.kernels.swiglu import swiglu, swiglu_backward


class Activation(NamedTuple):
    """An elementwise function, and its derivative times a gradient."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    """(gradient, input) -> gradient of the input"""


def _relu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return grad * (x > 0)


def _relu2_backward(grad: Tensor, x: Tensor) -> Tensor:
    return 2 * grad * x.relu()


_GELU_TANH = Activation(
    partial(F.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward.default, approximate="tanh")
)
_SILU = Activation(F.silu, torch.ops.aten.silu_backward.default)

ACTIVATIONS: dict[str, Activation] = {
    "silu": _SILU,
    "swish": _SILU,
    "gelu": Activation(F.gelu, torch.ops.aten.gelu_backward.default),
    # Three names of one formula (arXiv 1606.08415); transformers computes each with different operations.
    "gelu_pytorch_tanh": _GELU_TANH,
    "gelu_new": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "relu": Activation(F.relu, _relu_backward),
    "relu2": Activation(lambda x: x.relu().square(), _relu2_backward),
}
"""The implemented functions, by transformers' names (hidden_act)."""


def activate(x: Tensor, name: str, *, is_gated: bool) -> Tensor:
    """Returns f(x), or f(gate) * up of the fused projection x = [gate, up]. It is not differentiable."""
    function = ACTIVATIONS[name]
    if not is_gated:
        return function.forward(x)
    if function is _SILU:
        return swiglu(x)
    gate_TF, up_TF = x.chunk(2, dim=-1)
    return function.forward(gate_TF) * up_TF


def activate_backward(
    grad_TF: Tensor, x: Tensor, name: str, *, is_gated: bool, with_output: bool
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of x, and the recomputed output of `activate`, bit for bit.

    Without `with_output` an empty tensor is returned instead of the output.
    """
    function = ACTIVATIONS[name]
    if not is_gated:
        return function.backward(grad_TF, x), function.forward(x) if with_output else x.new_empty(0)
    if function is _SILU:
        return swiglu_backward(grad_TF, x, with_output=with_output)
    gate_TF, up_TF = x.chunk(2, dim=-1)
    active_TF = function.forward(gate_TF)
    grad_x_T2F = torch.cat([function.backward(grad_TF * up_TF, gate_TF), grad_TF * active_TF], dim=-1)
    return grad_x_T2F, active_TF * up_TF if with_output else x.new_empty(0)
