"""One call of a loop's model: which argument is the ids, and what the others say of documents.

Arguments are told apart by their form where it is unambiguous, and by the names that the field has for them elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_IDS = ("input_ids", "inputs", "input", "tokens", "token_ids", "ids", "idx", "x")
_POSITIONS = ("position_ids", "positions", "pos", "input_pos")
_DOCUMENTS = ("document", "doc_id", "seq_idx", "sequence_id", "segment")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Argument:
    """A tensor, a number or another object within the arguments of a call."""

    name: str
    value: Any

    @property
    def is_integer(self) -> bool:
        value = self.value
        return isinstance(value, Tensor) and not (value.is_floating_point() or value.dtype is torch.bool)


class Call:
    """The arguments of one call. Raises ValueError if none of them is the ids."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        pairs, self._structure = pytree.tree_flatten_with_path((args, dict(kwargs)))
        names = _names(module, args)
        self._arguments = [_Argument(_name(path, names), value) for path, value in pairs]
        self._at = self._index_of_ids()

    def _index_of_ids(self) -> int:
        numbers = [n for n, each in enumerate(self._arguments) if each.is_integer and each.value.ndim in (1, 2)]
        named = [n for name in _IDS for n in numbers if self._arguments[n].name == name]
        if not numbers:
            names = ", ".join(each.name for each in self._arguments) or "none"
            raise ValueError(
                f"step calls the model without ids, as integers [B, T]; its arguments: {names}. Embed them within it"
            )
        return (named or numbers)[0]

    @property
    def given_ids(self) -> Tensor:
        """The ids of the call, [B, T] or [T]."""
        return self._arguments[self._at].value

    @cached_property
    def ids(self) -> Tensor:
        """int64 [B, T]; a single row if they are passed flat."""
        ids = self.given_ids.detach().long()
        return ids if ids.ndim == 2 else ids[None]

    @property
    def seen(self) -> dict[str, Any]:
        """The arguments by name."""
        return {each.name: each.value for each in self._arguments}

    # -- what the arguments say --------------------------------------------------------------------------------------

    def of_tokens(self, value: Any) -> np.ndarray | None:
        """Returns an argument as [B, T] if it has one number for each token, or for each of a row; else None."""
        if not isinstance(value, Tensor) or value.is_floating_point():
            return None
        shape = tuple(self.ids.shape)
        if value.numel() == self.ids.numel():
            return value.detach().cpu().numpy().reshape(shape).astype(np.int64)
        if value.numel() == shape[1] and value.ndim in (1, 2):
            return np.broadcast_to(value.detach().cpu().numpy().reshape(1, -1).astype(np.int64), shape)
        return None

    @cached_property
    def positions(self) -> np.ndarray | None:
        """[B, T], if they are passed and restart anywhere, or are not 0, 1, 2, ... in each row."""
        for each in self._others():
            found = self.of_tokens(each.value) if each.is_integer else None
            if found is not None and (each.name in _POSITIONS or _are_positions(found)):
                is_arange = (found == np.arange(found.shape[1])).all()
                return None if is_arange else found
        return None

    @cached_property
    def starts(self) -> set[int]:
        """Where documents begin in the flat order of the tokens, by cumulative lengths, lengths or document numbers."""
        size, starts = self.ids.numel(), set[int]()
        for each in self._others():
            if not each.is_integer:
                continue
            values = each.value.detach().reshape(-1).tolist()
            if _are_bounds(values, size):
                starts.update(values[:-1])
            elif "len" in each.name and len(values) > 1 and sum(values) == size and min(values) > 0:
                starts.update(accumulate(values[:-1], initial=0))
            elif any(word in each.name for word in _DOCUMENTS) and (found := self.of_tokens(each.value)) is not None:
                starts.update((np.flatnonzero(np.diff(found.reshape(-1))) + 1).tolist())
        return starts

    @property
    def attention_mask(self) -> np.ndarray | None:
        """[B, T], if one with a number for each token is passed."""
        value = next((each.value for each in self._others() if each.name in ("attention_mask", "attn_mask")), None)
        return self.of_tokens(value) if isinstance(value, Tensor) and value.ndim == 2 else None

    def _others(self) -> list[_Argument]:
        return [each for n, each in enumerate(self._arguments) if n != self._at]

    # -- the same call with other ids --------------------------------------------------------------------------------

    def with_ids(self, ids: Tensor) -> Arguments:
        """Returns the arguments with ids of the same shape."""
        values = [each.value for each in self._arguments]
        values[self._at] = ids.reshape(self.given_ids.shape).to(self.given_ids.dtype)
        return pytree.tree_unflatten(values, self._structure)

    def alone(self, ids: Tensor, module: nn.Module) -> Arguments:
        """Returns arguments for rows [B, n] that each hold one conversation; one row, if the ids are passed flat.

        They are the ids and nothing else, as a server passes them, if the model takes that. Otherwise they are all
        arguments, cut to this length: the positions and bounds of one conversation, and the beginning of what has a
        value for each token.
        """
        ids = ids.reshape(ids.shape if self.given_ids.ndim == 2 else (-1,)).to(self.given_ids.dtype)
        (args, kwargs), name = self.with_ids(self.given_ids), self._arguments[self._at].name
        bare: Arguments = ((), {name: ids}) if name in kwargs else ((ids,), {})
        is_argument = name in kwargs or (bool(args) and isinstance(args[0], Tensor))  # else it is within another
        if is_argument and _takes(module, bare):
            return bare
        values = [ids if n == self._at else self._cut(each, ids) for n, each in enumerate(self._arguments)]
        return pytree.tree_unflatten(values, self._structure)

    def _cut(self, argument: _Argument, ids: Tensor) -> Any:
        value, size = argument.value, ids.shape[-1]
        if isinstance(value, int):
            return size if "max" in argument.name else value
        if (found := self.of_tokens(value)) is not None:
            if argument.name in _POSITIONS or _are_positions(found):
                return torch.arange(size, dtype=value.dtype, device=value.device).expand(ids.shape)
            return value[..., :1].expand(ids.shape)
        if argument.is_integer and _are_bounds(value.reshape(-1).tolist(), self.ids.numel()):
            return torch.arange(0, ids.numel() + 1, size, dtype=value.dtype, device=value.device)
        return value


def _takes(module: nn.Module, arguments: Arguments) -> bool:
    try:
        inspect.signature(module.forward).bind(*arguments[0], **arguments[1])
    except TypeError:
        return False
    return True


def _names(module: nn.Module, args: Sequence[Any]) -> list[str]:
    """Returns the names of positional arguments."""
    parameters = inspect.signature(module.forward).parameters.values()
    names = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_POSITIONAL]
    return [names[n] if n < len(names) else f"argument {n}" for n in range(len(args))]


def _name(path: Sequence[Any], names: Sequence[str]) -> str:
    keys = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]
    if keys[0] == "0" and len(keys) == 2:
        return names[int(keys[1])]
    return keys[-1]


def _are_positions(rows: np.ndarray) -> bool:
    """Returns whether each row counts up from 0, and begins again anywhere."""
    goes_on = (np.diff(rows) == 1) | (rows[:, 1:] == 0)
    return bool((rows[:, 0] == 0).all() and goes_on.all() and rows.max(initial=0) > 1)


def _are_bounds(values: Sequence[int], size: int) -> bool:
    """Returns whether these are cumulative lengths of documents, such as cu_seqlens."""
    is_sorted = all(a <= b for a, b in pairwise(values))
    return len(values) > 1 and values[0] == 0 and values[-1] == size and is_sorted
