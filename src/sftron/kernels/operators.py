"""Operators of torch for functions that launch kernels; torch.compile and fake tensors take each as a single node.

They are registered with torch.library.Library, because a call of a `torch.library.custom_op` costs the host three times
as much (`normalize`: 11 us instead of 4 us, on one core of an EPYC). Such costs limit the speed of small models.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

OPS: dict[str, Callable[..., Any]] = {}
"""The function of each operator by its name in torch.ops.sftron. A stand-in for a GPU can register them for its own
dispatch key."""

_LIBRARY = torch.library.Library("sftron", "FRAGMENT")


def operator(
    name: str,
    function: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    mutates: Sequence[str] = (),
    devices: Sequence[str] = ("CUDA",),
) -> Callable[..., Any]:
    """Returns torch.ops.sftron.`name`, which calls the function on these devices; it is not differentiable.

    Args:
        function: Annotated with the types of its arguments and results, from which the schema is inferred.
        fake: Takes the same arguments and returns uninitialized results, without reading a value.
        mutates: The arguments that the function writes to.
        devices: Dispatch keys.
    """
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates), tags=torch.Tag.pt2_compliant_tag)
    for device in devices:
        _LIBRARY.impl(name, function if device == "CPU" else _on_device_of_first(function), device)
    torch.library.register_fake(f"sftron::{name}", fake, lib=_LIBRARY)
    OPS[name] = function
    return getattr(torch.ops.sftron, name).default


def _on_device_of_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the device of the first argument the current one during a call, because Triton launches kernels there."""

    @wraps(function)
    def launch(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.accelerator.device_index(first.device.index):
            return function(first, *args, **kwargs)

    return launch
