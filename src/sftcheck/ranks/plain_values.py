"""Values as text, in which ranks exchange them: nothing that is read back can run code, as a pickle can."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor


def written(value: Any) -> bytes:
    """Returns a value as JSON: numbers, texts, None, lists, tuples, dictionaries, arrays and tensors within each other.

    Raises TypeError for a value of another type.
    """
    return json.dumps(_plain(value)).encode()


def read_back(text: bytes) -> Any:
    """Returns the value that `written` was given; tensors are on the CPU."""
    return _value(json.loads(text))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return value.item()
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(each)] for key, each in value.items()]}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {"array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, Tensor) and value.layout is torch.strided:
        content = value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return {"tensor": [str(value.dtype).partition(".")[2], list(value.shape), base64.b64encode(content).decode()]}
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent to other ranks")


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tuple":
        return tuple(map(_value, content))
    if kind == "dict":
        return {_value(key): _value(each) for key, each in content}
    name, shape, text = content
    data = bytearray(base64.b64decode(text))
    if kind == "array":
        return np.frombuffer(data, dtype=np.dtype(name)).reshape(shape)
    dtype = getattr(torch, name)
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
