"""Leaves a trainer as it was: everything that checks or its own code change is put back."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator
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
def untouched(trainer: Any) -> Iterator[None]:
    """Leaves the trainer, its model and all random states as they were.

    Weights, buffers, gradients, modes, hooks and configurations are put back; the trainer gets copies of what it
    changes in place (its state, its metrics, its callbacks), and its own objects afterwards.
    """
    with ExitStack() as stack:
        stack.enter_context(_random_states())
        stack.enter_context(_model(trainer.model))
        stack.enter_context(_accelerator(trainer.accelerator))
        for target in (trainer, trainer.args):
            stack.enter_context(_attributes(target))
        yield


@contextmanager
def _random_states() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


_COPIED = ("state", "control", "callback_handler")
"""Objects of a Trainer that it changes in place while it trains; containers are copied whatever their name."""
_DATA = ("train_dataset", "eval_dataset")


@contextmanager
def _attributes(target: Any) -> Iterator[None]:
    """Gives the target copies of its containers and states, and afterwards what it had."""
    before = dict(vars(target))
    for name, value in before.items():
        if name in _COPIED:
            vars(target)[name] = copy.copy(value)
        elif name not in _DATA:
            vars(target)[name] = own_copy(value)
    try:
        yield
    finally:
        vars(target).clear()
        vars(target).update(before)


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


@contextmanager
def _accelerator(accelerator: Any) -> Iterator[None]:
    from accelerate.state import GradientState

    before = dict(vars(accelerator))
    lists = {name: list(value) for name, value in before.items() if isinstance(value, list)}
    shared = dict(GradientState._shared_state)
    references = list(shared.get("dataloader_references", ()))
    try:
        yield
    finally:
        vars(accelerator).clear()
        vars(accelerator).update(before)
        for name, values in lists.items():
            before[name][:] = values
        GradientState._shared_state.clear()
        GradientState._shared_state.update(shared)
        if references:
            shared["dataloader_references"][:] = references


@contextmanager
def _model(model: nn.Module) -> Iterator[None]:
    """Puts back weights, gradients, buffers, modes, hooks, patched methods, and configurations."""
    parameters = [(each, each.detach().clone(), each.grad, each.requires_grad) for each in model.parameters()]
    gradients = [None if gradient is None else gradient.clone() for _, _, gradient, _ in parameters]
    buffers = [(each, each.clone()) for each in model.buffers()]
    modules = [(module, dict(vars(module)), _copies(vars(module))) for module in model.modules()]
    configurations = list(_configurations(model))
    for parameter, *_ in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for module, attributes, containers in modules:
            vars(module).clear()
            vars(module).update(attributes)
            for name, items in containers.items():
                attributes[name].clear()
                attributes[name].update(items)
        with torch.no_grad():
            for (parameter, value, gradient, is_trained), content in zip(parameters, gradients, strict=True):
                if not parameter.equal(value):
                    parameter.copy_(value)
                parameter.requires_grad_(is_trained)
                parameter.grad = gradient
                if gradient is not None and content is not None:
                    gradient.copy_(content)
            for buffer, value in buffers:
                buffer.copy_(value)
        for configuration, attributes in configurations:
            vars(configuration).clear()
            vars(configuration).update(attributes)


def _copies(attributes: dict[str, Any]) -> dict[str, dict[Any, Any]]:
    """Returns copies of a module's dictionaries, which hold its parameters, buffers, modules and hooks."""
    return {name: dict(value) for name, value in attributes.items() if isinstance(value, dict)}


def _configurations(model: nn.Module) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields each configuration of the model, those within others too, with copies of its attributes."""
    seen = set[int]()
    waiting = [getattr(module, name, None) for module in model.modules() for name in ("config", "generation_config")]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen or not hasattr(each, "__dict__") or isinstance(each, type):
            continue
        seen.add(id(each))
        attributes = dict(vars(each))
        waiting += [value for value in attributes.values() if type(value).__name__.endswith("Config")]
        yield (
            each,
            {
                name: copy.deepcopy(value) if isinstance(value, (list, dict)) and not name.startswith("_") else value
                for name, value in attributes.items()
            },
        )
