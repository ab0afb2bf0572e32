"""The one way in which checks watch, change and end a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import nn


class ForwardIntercepted(BaseException):
    """Ends a call of a model in which nothing more is wanted; no trainer's `except Exception` catches it."""


def end_forward(*_: Any) -> None:
    raise ForwardIntercepted


@contextmanager
def intercepted(
    modules: Iterable[nn.Module],
    *,
    on_call: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    on_output: Callable[[nn.Module, Any], Any] | None = None,
) -> Iterator[None]:
    """Calls functions before and after each call of these modules; `end_forward` in one of them leaves the context.

    Args:
        on_call: Takes a module with the arguments of its call; may return other arguments (args, kwargs).
        on_output: Takes a module with what it returns; may return another output.
    """

    def after(module: nn.Module, _inputs: Any, output: Any) -> Any:
        return None if on_output is None else on_output(module, output)

    with ExitStack() as stack:
        for module in modules:
            if on_call is not None:
                stack.callback(module.register_forward_pre_hook(on_call, with_kwargs=True).remove)
            if on_output is not None:
                stack.callback(module.register_forward_hook(after).remove)
        with suppress(ForwardIntercepted):
            yield
