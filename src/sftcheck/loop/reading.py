"""What a loop trains, read from the gradient of its loss at the logits.

    logits          0     0     0     0      put in place of those that the head gives
    gradient       1/4  -3/4   1/4   1/4     of a cross-entropy with target 1: softmax - onehot
    weight          1                        of the token: the gradient at the target, by 1/4 - 1

Whatever a loop calls its labels, wherever it shifts them, and whichever value it ignores: the target is the token that
the gradient raises, and a position without a gradient is not trained. Equal logits make it exact, however certain the
model is, and need no backward pass of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sftcheck.loop.call import Call
from sftcheck.tolerances import LIKE_CROSS_ENTROPY
from sftron.data.types import IGNORE_INDEX


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What the loss of one micro-batch trains."""

    call: Call
    targets: np.ndarray
    """int64 [B, T]: the token that is to follow the one at the same index, or IGNORE_INDEX."""
    weights: np.ndarray
    """float64 [B, T]: the weight of its cross-entropy in the loss of the step; 0 where there is no target."""
    has_gradient: bool
    """Whether any gradient reached the logits of this micro-batch."""


def read(call: Call, logits: Sequence[Tensor]) -> Reading:
    """Returns the targets and weights that the gradients of logits show.

    Args:
        logits: Those of the call [..., V], with gradients, in order; several, if the head is called for parts of the
            tokens.

    Raises:
        ValueError: The head is called for some tokens alone, or the loss has no single target at a token.
    """
    shape, width = tuple(call.ids.shape), logits[0].shape[-1]
    parts = list(logits)
    if sum(each.numel() for each in parts) > call.ids.numel() * width:  # computed again for the backward pass
        parts = [each for each in parts if each.grad is not None]
    has_gradient = any(each.grad is not None for each in parts)
    num_logits = sum(each.numel() for each in parts) // width
    if has_gradient and num_logits != call.ids.numel():
        raise ValueError(
            f"the head gives logits for {num_logits:,} of {call.ids.numel():,} tokens, and the check cannot tell "
            "which; compute the logits of all tokens for this check"
        )
    if not has_gradient:
        return Reading(call, np.full(shape, IGNORE_INDEX, dtype=np.int64), np.zeros(shape), False)
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parts]
    gradient = torch.cat([each.reshape(shape[0], -1, width) for each in gradients], dim=1)
    lowest, targets = gradient.min(dim=-1)
    is_trained = lowest < 0
    if num_wrong := int(((gradient < 0).sum(dim=-1) > 1).sum()):
        raise ValueError(
            f"the loss has several targets at each of {num_wrong:,} positions (soft labels or negative weights); give "
            "verify_step a loss with one target for each trained token"
        )
    # A head may be wider than the vocabulary that the loss takes.
    values = torch.cat([each.detach().reshape(shape[0], -1, width) for each in parts], dim=1)
    values = values.masked_fill(gradient == 0, -torch.inf)
    certainty = (values.gather(-1, targets[..., None])[..., 0] - values.logsumexp(-1)).exp().double()
    weights = torch.where(is_trained, -lowest.double() / (1 - certainty), 0.0)
    targets = torch.where(is_trained, targets, IGNORE_INDEX)
    return Reading(call, targets.cpu().numpy(), weights.cpu().numpy(), True)


def is_cross_entropy(logits: Sequence[Tensor], is_trained: np.ndarray) -> bool:
    """Returns whether the gradient at the tokens that are no target is the softmax of the logits, times one number.

    Smoothed labels and losses that weigh a token by its probability look like a cross-entropy with another weight where
    all logits are equal.

    Args:
        logits: Unlike ones [..., V], with gradients, of which the lowest at each position is that of its target.
        is_trained: bool [B, T].
    """
    rows, ratios = torch.from_numpy(is_trained.reshape(-1)), list[Tensor]()
    gradient = torch.cat([each.grad.flatten(0, -2) for each in logits if each.grad is not None])[rows.nonzero()[:, 0]]
    softmax = torch.cat([each.detach().flatten(0, -2) for each in logits]).float().softmax(-1)[rows.nonzero()[:, 0]]
    for own, share in zip(gradient.float(), softmax, strict=True):
        is_other = own != 0  # a head may be wider than the vocabulary
        is_other[own.argmin()] = False
        ratios.append((own / share)[is_other])
    every = torch.cat(ratios)
    return float(every.std()) <= LIKE_CROSS_ENTROPY * abs(float(every.mean()))
