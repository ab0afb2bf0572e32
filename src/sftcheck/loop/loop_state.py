"""Leaves a loop as it was: its model, the random states, and the optimizers, schedulers and scalers of its step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sftcheck.restore import preserve_attributes, restore_model_after

_KINDS = (Optimizer, LRScheduler, GradScaler)


@contextmanager
def restore_loop_after(model: nn.Module, step: Callable[..., Any], optimizer: Optimizer | None) -> Iterator[None]:
    """Leaves a loop as it was.

    The optimizers, schedulers and scalers that the step names get copies of what they hold, and what they had
    afterwards; an optimizer that it does not name does so from its first step on.
    """
    seen = list[Any]()
    with ExitStack() as stack:
        stack.enter_context(restore_model_after(model))

        def adopt(each: Any, *_: Any) -> None:
            if not any(each is other for other in seen):
                seen.append(each)
                stack.enter_context(preserve_attributes(each))

        for each in [optimizer, *named_by(step)]:
            if isinstance(each, _KINDS):
                adopt(each)
        stack.callback(register_optimizer_step_pre_hook(adopt).remove)
        yield


def named_by(step: Callable[..., Any]) -> list[Any]:
    """Returns the objects that a function uses: of its closure, its module and its `self`, and those in their lists."""
    while isinstance(step, partial):
        step = step.func
    found = list[Any]()
    with suppress(TypeError):
        function = inspect.unwrap(step if hasattr(step, "__code__") or hasattr(step, "__func__") else step.__call__)
        owner = getattr(function, "__self__", None)
        found += vars(owner).values() if hasattr(owner, "__dict__") else ()
        names = inspect.getclosurevars(getattr(function, "__func__", function))
        found += [*names.nonlocals.values(), *names.globals.values()]
    inner = [value for each in found if isinstance(each, (list, tuple)) for value in each]
    return [*found, *inner, *(value for each in found if isinstance(each, dict) for value in each.values())]
