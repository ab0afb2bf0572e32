"""Measurements with torch alone that prove what each loop of loop_zoo.py claims about itself.

They share no code with sftron: a tensor of zeros is added to what the head gives, and its gradient is that of the real
loss at the real logits; tokens are changed, and gradients of single micro-batches are compared with those of a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def _head(model: nn.Module) -> nn.Module:
    return next(
        module for name, module in model.named_modules() if name.endswith("lm_head") and hasattr(module, "weight")
    )


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    before = {name: each.clone() for name, each in model.state_dict().items()}
    try:
        yield
    finally:
        model.load_state_dict(before)
        model.zero_grad(set_to_none=True)


def _ids_and_gradients(loop: Any, batches: list[Any]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns (ids [B, T], gradients [B, T, V], logits [B, T, V] of the head) of each micro-batch of one step."""
    found: list[tuple[Tensor, Tensor]] = []
    ids: list[Tensor] = []

    def see(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids.append(args[0] if args else kwargs["input_ids"])

    def add(_module: Any, _inputs: Any, logits: Tensor) -> Tensor:
        zeros = torch.zeros_like(logits, requires_grad=True)
        found.append((zeros, logits.detach()))
        return logits + zeros

    handles = [
        loop.model.register_forward_pre_hook(see, with_kwargs=True),
        _head(loop.model).register_forward_hook(add),
    ]
    with _unchanged(loop.model):
        loop.step(batches)
    for handle in handles:
        handle.remove()
    gradients = [torch.zeros_like(zeros) if zeros.grad is None else zeros.grad for zeros, _ in found]
    return [(own, each, logits) for own, each, (_, logits) in zip(ids, gradients, found, strict=True)]


def _steps(loop: Any) -> list[list[Any]]:
    return [loop.batches[at : at + 2] for at in range(0, len(loop.batches) - 1, 2)]


def _targets(gradients: Tensor) -> Tensor:
    lowest, target = gradients.min(-1)
    return target.where(lowest < 0, -1)


def trained(loop: Any) -> str:
    """Returns the text of what the loss raises, with … in place of what it does not."""
    texts = []
    for step in _steps(loop):
        for _, gradients, _ in _ids_and_gradients(loop, step):
            for row in _targets(gradients).tolist():
                spans: list[list[int]] = [[]]
                for target in row:
                    if target >= 0:
                        spans[-1].append(target)
                    elif spans[-1]:
                        spans.append([])
                texts.append("…".join(loop.tokenizer.decode(span) for span in spans))
    return "\n¶\n".join(texts)


def is_next_token(loop: Any) -> bool:
    """Returns whether the loss raises the token behind each position, or none."""
    found = []
    for step in _steps(loop):
        for ids, gradients, _ in _ids_and_gradients(loop, step):
            targets = _targets(gradients)[:, :-1]
            found.append(bool(((targets == ids[:, 1:]) | (targets < 0)).all()))
    return all(found)


def weights(loop: Any, *, all_tokens: bool = False) -> Tensor:
    """Returns the weight of each trained token in the first step: the gradient at its target, by p - 1."""
    found = []
    for _, gradients, logits in _ids_and_gradients(loop, loop.batches[:2]):
        lowest, target = gradients.float().min(-1)
        probability = logits.float().softmax(-1).gather(-1, target[..., None])[..., 0]
        own = torch.where(lowest < 0, lowest / (probability - 1), 0.0)
        found.append(own.flatten() if all_tokens else own[own > 0])
    if all_tokens:
        return nn.utils.rnn.pad_sequence(found, True)
    return torch.cat(found)


def _gradient(loop: Any, batches: list[Any]) -> Tensor:
    with _unchanged(loop.model):
        loop.step(batches)
        return torch.cat([each.grad.flatten() for each in loop.model.parameters() if each.grad is not None])


def grows_with_the_step(loop: Any) -> bool:
    """Returns whether a step over the same micro-batch twice has twice the gradient of a step over it."""
    one, two = _gradient(loop, loop.batches[:1]), _gradient(loop, loop.batches[:1] * 2)
    return bool(torch.allclose(two, 2 * one, rtol=1e-3, atol=1e-5))


def kept_gradient(loop: Any) -> float:
    """Returns how far the gradient of a step is from the weighted sum of those of its micro-batches, relative.

    The weights are the numbers of their targets, by which a step over one of them has divided it.
    """
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in loop.batches[:2]]
    parts = [_gradient(loop, [batch]) * count for batch, count in zip(loop.batches[:2], counts, strict=True)]
    whole = sum(parts) / sum(counts)
    return float((_gradient(loop, loop.batches[:2]) - whole).norm() / whole.norm())


def _logits_with(loop: Any, batch: Any, changed: Any = None) -> Tensor:
    """Returns the logits of a batch, or of one with other ids, within a step over it."""
    kept: list[Tensor] = []
    handle = _head(loop.model).register_forward_hook(lambda _module, _inputs, logits: kept.append(logits.detach()))
    with _unchanged(loop.model):
        loop.step([{**batch, "input_ids": batch["input_ids"] if changed is None else changed}])
    handle.remove()
    return kept[0]


def _border(batch: Any) -> int:
    return int((batch["document_ids"][0] == 1).nonzero()[0])


def leaks(loop: Any) -> bool:
    """Returns whether tokens of a pack's first conversation change the logits of the others."""
    batch = loop.batches[0]
    border, ids = _border(batch), batch["input_ids"].clone()
    ids[:, 3 : border - 3] = (ids[:, 3 : border - 3] + 7) % 400
    change = (_logits_with(loop, batch) - _logits_with(loop, batch, ids))[:, border:].abs().max()
    return float(change) > 1e-4


def changes_behind(loop: Any) -> bool:
    """Returns whether the second conversation of a pack has other logits than alone."""
    batch = loop.batches[0]
    border = _border(batch)
    alone = {name: each[:, border:] for name, each in batch.items()}
    alone["document_ids"] = alone["document_ids"] - 1
    length = int((alone["document_ids"] == 0).sum())
    difference = _logits_with(loop, batch)[:, border : border + length] - _logits_with(loop, alone)[:, :length]
    return float(difference.abs().max()) > 1e-3
