"""Others' kernels for cross entropy from hidden states, behind the signature of ours; see loss.py.

shape suffixes: R labelled rows, H hidden_size, V vocab_size
"""

import importlib.util
import inspect

import torch
from torch import Tensor

_PACKAGES = {"liger": ("liger_kernel", "liger-kernel"), "cce": ("cut_cross_entropy", "cut-cross-entropy")}
"""What is imported, and what pip calls it."""


def reason_against(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why "liger" or "cce" cannot run on `device` in `dtype`; None if it can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, this is {device.type!r}"
    module, package = _PACKAGES[name]
    if importlib.util.find_spec(module) is None:
        return f"the package is not installed (pip install {package})"
    if name == "liger":
        return None if _liger_takes_weights() else "this liger_kernel knows no weights per token; 0.8.5 does"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, the model in {str(dtype).removeprefix('torch.')}"
    if torch.are_deterministic_algorithms_enabled():
        return "it adds up gradients in an order of chance, and general.deterministic is true"
    return None


def _liger_takes_weights() -> bool:
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

    return "token_grad_output" in inspect.signature(fused_linear_cross_entropy_forward).parameters


def liger_gradients(
    hidden_RH: Tensor, head_VH: Tensor, labels: Tensor, loss_weights: Tensor, needs_head: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Losses of the rows ([1, R]), gradient of the hidden states, and of the head (fp32).

    Below Liger's own autograd function, which makes gradients in the forward pass only for a plain sum or mean. For
    weights of the tokens it would project twice; given them beforehand, its inner function need not.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

    if not len(hidden_RH):  # it divides by the number of rows
        grad_head_VH = torch.zeros_like(head_VH, dtype=torch.float32) if needs_head else None
        return loss_weights.new_empty(1, 0), hidden_RH, grad_head_VH
    losses_R, _, _, _, grad_hidden_RH, grad_head_VH, _ = fused_linear_cross_entropy_forward(
        hidden_RH,
        head_VH,
        labels,
        reduction="none",
        accum_dtype=torch.float32,
        token_grad_output=loss_weights,
        compute_gradients=True,
        weight_requires_grad=needs_head,
    )
    # It adds up in fp32 and then rounds to the head's type.
    return losses_R[None], grad_hidden_RH, None if grad_head_VH is None else grad_head_VH.float()


def cce_losses(hidden_RH: Tensor, head_VH: Tensor, labels: Tensor) -> Tensor:
    """Loss of each row, fp32, through which autograd passes; no gradient is left out for being small."""
    from cut_cross_entropy import linear_cross_entropy

    if not len(hidden_RH):
        return (hidden_RH @ head_VH[:1].T).sum(dim=1).float()
    return linear_cross_entropy(hidden_RH, head_VH, labels, reduction="none", filter_eps=None).float()
