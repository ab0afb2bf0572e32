"""The reference: the model itself in float32, without dropout, autocast and a loss of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sftcheck.interception import intercepted
from sftcheck.loop.call import Call
from sftcheck.loop.loop_model import LoopModel
from sftcheck.record.fused import NO_LOGITS_REMEDY, OF_THE_LOSS, without_autocast
from sftcheck.record.passes import in_float32, log_probabilities


class Reference:
    """Computes log-probabilities as the model would in float32.

    Args:
        model: The model of a loop or a trainer. One in another type is copied, and the copy converted.
    """

    def __init__(self, model: LoopModel) -> None:
        self._model, module = model, model.module
        floating = [each for each in module.parameters() if each.is_floating_point()]
        is_rounded = any(each.dtype != torch.float32 for each in floating)
        self.is_quantized = len(floating) < len(list(module.parameters()))
        """Whether weights are no floats; then the reference computes with them as they are."""
        self.module: nn.Module = copy.deepcopy(module).float() if is_rounded and not self.is_quantized else module
        if self.module is not module:
            # A trainer may have put a forward of its own on an instance, whose copy would still compute the original.
            for each in self.module.modules():
                vars(each).pop("forward", None)
        self.device = next(module.parameters()).device

    def beside_neighbors(self, call: Call, targets: np.ndarray) -> np.ndarray:
        """Returns log p(target) at the tokens [B, T] before the targets, with the arguments of a call.

        Args:
            targets: int [B, T], IGNORE_INDEX for none.
        """
        args, kwargs = call.with_ids(call.ids)
        kwargs = {name: value for name, value in kwargs.items() if name not in OF_THE_LOSS}
        return log_probabilities(self._logits(args, kwargs, call.ids), targets)

    def alone(self, call: Call, ids: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Returns log p(targets[n]) after ids[: n] of a conversation [n], with nothing beside it; NaN for the first."""
        own = torch.from_numpy(ids.astype(np.int64))[None].to(self.device)
        args, kwargs = call.alone(own, self.module)
        found = np.full(len(ids), np.nan)
        if len(ids) > 1:
            logits = self._logits(args, {"use_cache": False, **kwargs} if "input_ids" in kwargs else kwargs, own)
            found[1:] = log_probabilities(logits[:, :-1], targets[None, 1:])[0]
        return found

    def _logits(self, args: Any, kwargs: Any, ids: Tensor) -> Tensor:
        heads, found = list[Tensor](), list[Tensor]()

        def on_head(_module: nn.Module, output: Any) -> None:
            if (logits := self._model.logits_of(output)) is not None:
                heads.append(logits)

        def on_output(_module: nn.Module, output: Any) -> None:
            if (logits := self._model.logits_of(output)) is not None and logits.ndim == 3:
                found.append(logits)

        head = self.module.get_submodule(self._model.head)
        with self._as_reference(), in_float32(self.device):
            inner = [] if head is self.module else [head]
            with intercepted(inner, on_output=on_head), intercepted([self.module], on_output=on_output):
                self.module(*args, **kwargs)
        if not (found or heads):
            raise ValueError(f"the model gives no logits without its labels; {NO_LOGITS_REMEDY}")
        logits = found[-1] if found else torch.cat([each.reshape(len(ids), -1, each.shape[-1]) for each in heads], 1)
        if logits.shape[:2] != ids.shape:
            raise ValueError(f"the model gives logits for {logits.shape[1]} of {ids.shape[1]} tokens of a row")
        return logits

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """Switches dropout and autocast off."""
        modes = [(each, each.training) for each in self.module.modules()]
        self.module.eval()
        try:
            with without_autocast(self.module):
                yield
        finally:
            for module, mode in modes:
                module.training = mode
