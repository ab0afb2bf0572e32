"""A head that is fused with the loss: there are no logits, but the loss has a gradient at the last hidden states.

hidden states    0                    put in place of what the decoder gives
gradient         w (p W - W[target])  of w times a cross-entropy; p is the softmax of equal logits
weight           w                    its length, by that of the gradient of the cross-entropy by the model's own head
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sftcheck.loop.call import Call
from sftcheck.loop.loop_model import LoopModel
from sftcheck.loop.reading import Reading
from sftron.data.types import IGNORE_INDEX
from sftron.user_code import naming_the_line

OF_THE_LOSS = (
    *("labels", "shift_labels", "num_items_in_batch", "fused_lm_head", "logits_to_keep", "num_logits_to_keep"),
    *("output_router_logits", "return_dict", "skip_logits", "return_token_accuracy", "use_token_scaling"),
)
"""Arguments with which a model computes a loss, or leaves out logits."""

_APART = 1e-3
"""Relative, of the gradient at a hidden state from the same multiple of a cross-entropy's."""
NO_LOGITS_REMEDY = (
    "switch off what fuses the head with the loss (use_liger_kernel, loss_type='chunked_nll', cut cross-entropy) for "
    "this record"
)


class FusedHead:
    """The head of a model that is given labels, and returns a loss without logits.

    Raises ValueError, with the remedy, if the call does not show what its loss is.
    """

    def __init__(self, model: LoopModel, decoder: nn.Module | None, call: Call) -> None:
        self._owner, self._model, self._call = model, model.unwrapped, call
        head = self._model.get_output_embeddings() if hasattr(self._model, "get_output_embeddings") else None
        self._targets = targets_of(call)
        if decoder is None or head is None or self._targets is None:
            raise ValueError(f"no module of the model gives logits [..., vocabulary]; {NO_LOGITS_REMEDY}")
        self._decoder, self._head = decoder, head

    @staticmethod
    def refuse_optimizer() -> None:
        raise ValueError(
            f"the step changes the weights of the head, and its logits are not known before; {NO_LOGITS_REMEDY}"
        )

    def logits(self, decoded: Any, autocast: torch.dtype | None = None) -> Tensor:
        """Returns the logits [B, T, V] of the model's own head for what its decoder has returned.

        Args:
            autocast: The type in which they are computed; by default float32, whatever type the weights have.
        """

        def head(hidden: Tensor) -> Tensor:
            weight, bias = self._head.weight, getattr(self._head, "bias", None)
            return nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())

        given = {name: value for name, value in self._call.seen.items() if name not in OF_THE_LOSS}
        with (
            naming_the_line("without its labels, the model raises", f"; {NO_LOGITS_REMEDY}"),
            calls_instead(self._decoder, lambda *_, **__: decoded),
            calls_instead(self._head, head),
            without_autocast(self._model),
            torch.autocast(self._head.weight.device.type, autocast, enabled=autocast is not None),
        ):
            found = self._owner.logits_of(self._model(**given))
        if found is None:
            raise ValueError(f"the model gives no logits without its labels; {NO_LOGITS_REMEDY}")
        return found

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Gives the head float32 weights, as hidden states of float32 have an exact gradient."""
        own = {each: each.data for each in self._head.parameters() if each.is_floating_point()}
        try:
            for each, data in own.items():
                each.data = data.float()
            yield
        finally:
            for each, data in own.items():
                each.data, each.grad = data, None

    def read(self, decoded: Any, gradient: Tensor) -> Reading:
        """Returns what the loss trains, by its gradient at the last hidden states [B, T, H]."""
        assert self._targets is not None
        at = torch.from_numpy(self._targets != IGNORE_INDEX).to(gradient.device)
        wanted = torch.from_numpy(self._targets[self._targets != IGNORE_INDEX]).to(gradient.device)
        with torch.enable_grad():
            hidden = decoded.last_hidden_state.detach().requires_grad_()
            logits = self.logits(with_hidden(decoded, hidden))[at]
            entropies = nn.functional.cross_entropy(logits, wanted, reduction="sum")
            (expected,) = torch.autograd.grad(entropies, hidden)
        found, expected = gradient.double(), expected.double()
        weights = (found * expected).sum(-1) / expected.square().sum(-1).clamp_min(1e-300)
        apart = (found - weights[..., None] * expected).norm(dim=-1) > _APART * found.norm(dim=-1)
        if number := int(apart.sum()):
            raise ValueError(
                f"at {number:,} tokens, the loss is no cross-entropy of the call's labels; {NO_LOGITS_REMEDY}"
            )
        own = weights.cpu().numpy()
        return Reading(self._call, np.where(own == 0, IGNORE_INDEX, self._targets), own, True)


def with_hidden(decoded: Any, hidden: Tensor) -> Any:
    """Returns what a decoder has returned, with other last hidden states."""
    changed = copy.copy(decoded)
    changed.last_hidden_state = hidden
    return changed


@contextmanager
def without_autocast(module: nn.Module) -> Iterator[None]:
    """Takes off accelerate's autocast, which is a `forward` of the object."""
    attributes = vars(module)
    before = attributes.get("forward")
    if before is not None and "_original_forward" in attributes:
        attributes["forward"] = attributes["_original_forward"]
    try:
        yield
    finally:
        if before is not None:
            attributes["forward"] = before


@contextmanager
def calls_instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Computes `forward` in place of the module's own."""
    attributes = vars(module)
    before = {"forward": attributes["forward"]} if "forward" in attributes else {}
    attributes["forward"] = forward
    try:
        yield
    finally:
        del attributes["forward"]
        attributes.update(before)


def targets_of(call: Call) -> np.ndarray | None:
    """Returns the labels of a call, int64 [B, T], at the token before each; None if it has none."""
    labels, found = call.seen.get("shift_labels"), np.full(tuple(call.ids.shape), IGNORE_INDEX, dtype=np.int64)
    if labels is None and isinstance(own := call.seen.get("labels"), Tensor):
        labels = own[:, 1:]
    if not isinstance(labels, Tensor) or labels.shape[0] != len(found) or labels.shape[1] > found.shape[1]:
        return None
    found[:, : labels.shape[1]] = labels.cpu().numpy()
    return found
