"""Leaves a trainer as it was: everything that checks or its own code change is put back."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def restored(target: Any, *names: str) -> Iterator[None]:
    """Puts back the attributes of these names."""
    before = {name: getattr(target, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


@contextmanager
def restore_after(trainer: Any) -> Iterator[None]:
    """Leaves the trainer, its model and all random states as they were.

    The trainer gets copies of what it changes in place (its state, its metrics, its callbacks), and its own objects
    afterwards.
    """
    accelerator = trainer.accelerator
    with ExitStack() as stack:
        stack.enter_context(restore_model_after(trainer.model))
        for target in (accelerator, accelerator.gradient_state, trainer.args):
            stack.enter_context(preserve_attributes(target))
        stack.enter_context(preserve_attributes(trainer, copied=("state", "control", "callback_handler"), shared=_DATA))
        yield


_DATA = ("train_dataset", "eval_dataset")
_PACKS = "support_avx512bf16_for_cpu"


@contextmanager
def restore_random_states_after() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def restore_model_after(model: nn.Module) -> Iterator[None]:
    """Leaves a model and all random states as they were.

    Weights and their attributes, buffers, gradients, modes, hooks and configurations are put back.
    """
    with ExitStack() as stack:
        stack.enter_context(restore_random_states_after())
        stack.enter_context(_parameters(model))
        for module in model.modules():
            stack.enter_context(preserve_attributes(module))
            # On a CPU, bitsandbytes packs 4-bit weights in an evaluation, and computes no gradients from then on.
            if getattr(module, _PACKS, False):
                setattr(module, _PACKS, False)
        for configuration in _configurations(model):
            stack.enter_context(preserve_attributes(configuration))
        yield


@contextmanager
def preserve_attributes(target: Any, copied: Sequence[str] = (), shared: Sequence[str] = ()) -> Iterator[None]:
    """Gives the target copies of its containers, tensors and generators, and afterwards what it had.

    Args:
        copied: The names of other objects that it changes in place.
        shared: The names of containers that it does not change.
    """
    before = dict(vars(target))
    for name, value in before.items():
        if name not in shared:
            vars(target)[name] = copy.copy(value) if name in copied else own_copy(value)
    try:
        yield
    finally:
        vars(target).clear()
        vars(target).update(before)


@contextmanager
def _parameters(model: nn.Module) -> Iterator[None]:
    """Removes the gradients, and puts back values, gradients, attributes and what is trainable."""
    parameters = [
        (each, each.data, each.detach().clone(), each.grad, None if each.grad is None else each.grad.clone(),
         each.requires_grad)
        for each in model.parameters()
    ]  # fmt: skip
    with ExitStack() as stack:
        for parameter, *_ in parameters:
            parameter.grad = None
            for target in (parameter, *_objects_of(parameter)):
                stack.enter_context(preserve_attributes(target))
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, data, value, gradient, content, is_trained in parameters:
                    if (parameter.shape, parameter.dtype) != (value.shape, value.dtype):  # packed in another form
                        parameter.data = data
                    if not parameter.equal(value):
                        parameter.copy_(value)
                    parameter.requires_grad_(is_trained)
                    parameter.grad = gradient
                    if gradient is not None and content is not None:
                        gradient.copy_(content)


def _objects_of(parameter: nn.Parameter) -> list[Any]:
    """Returns the objects of which the attributes belong to a parameter, such as how bitsandbytes has quantized it."""
    found, waiting = dict[int, Any](), list(vars(parameter).values())
    while waiting:
        each = waiting.pop()
        if type(each).__module__.partition(".")[0] == "bitsandbytes" and not isinstance(each, nn.Module):
            found[id(each)] = each
            waiting += [inner for inner in vars(each).values() if id(inner) not in found]
    return list(found.values())


def _configurations(model: nn.Module) -> list[Any]:
    """Returns each configuration of the model, those within others too."""
    found: dict[int, Any] = {}
    waiting = [getattr(module, name, None) for module in model.modules() for name in ("config", "generation_config")]
    while waiting:
        each = waiting.pop()
        if id(each) not in found and hasattr(each, "__dict__") and not isinstance(each, type):
            found[id(each)] = each
            waiting += [value for value in vars(each).values() if type(value).__name__.endswith("Config")]
    return list(found.values())


def own_copy(value: Any) -> Any:
    """Returns containers, tensors and random generators copied, those within containers too; all else is shared."""
    if isinstance(value, (np.random.Generator, np.random.RandomState, random.Random)):
        return copy.deepcopy(value)
    if isinstance(value, set):
        return copy.copy(value)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone()
    if not isinstance(value, (dict, list, deque)):
        return value
    copied: Any = copy.copy(value)
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        copied[key] = own_copy(each)
    return copied


def own_collator(trainer: Any, name: str = "data_collator") -> Any:
    """Returns a copy of the trainer's collator and of what is within it, but the tokenizer, the model and the data."""
    collator = getattr(trainer, name)
    shared = (trainer, trainer.model, trainer.processing_class, trainer.train_dataset, trainer.eval_dataset)
    shared += (getattr(collator, "tokenizer", None),)
    try:
        return copy.deepcopy(collator, {id(each): each for each in shared})
    except Exception:  # what holds an open file, a lock or a process
        return collator


def own_dataset(data: Any) -> Any:
    """Returns a data set that shares the rows, and has its own random generators."""
    generators = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    own = {name: own_copy(each) for name, each in getattr(data, "__dict__", {}).items() if isinstance(each, generators)}
    if own:
        data = copy.copy(data)
        vars(data).update(own)
    return data
