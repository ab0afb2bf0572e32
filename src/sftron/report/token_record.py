"""A record: what some steps train, token by token, as one file that no library is needed to read.

    a safetensors file    8 bytes: length of the header | the header, JSON | the arrays
    arrays over tokens    TOKEN_ARRAYS has their names
    array over documents  sketch: by which the same conversation is found in another record
    metadata              facts of the run as JSON; the sha256 of everything else

The loss of a record is the mean over its steps, and the loss of a step is the sum of weight x -own over its tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "sftron-record/1"
UNKNOWN_ROLE, NO_TARGET = 255, -100
ADAM, SGD = "Adam", "SGD"
"""The kinds of optimizers whose first update has known parts."""
ROLE_NAMES = (
    "template",
    "system prompts",
    "questions",
    "answers",
    "tool results",
    "reasoning",
    "tool calls",
    "padding",
)
ROLE_NAMES += ("texts",)
"""The names of the roles 0, 1, ... of tokens, as `sftron.data.types.Role` numbers them."""
SKETCH_SIZE = 32
_REMEDY = "record it again, with this release"
_LARGEST_HEADER = 100_000_000
_WINDOW = 12
"""The number of characters of one hash; shorter ones are shared by unlike texts, longer ones lost at each cut."""
_NONE = np.uint64(2**64 - 1)
_TYPES = {"U8": "<u1", "I32": "<i4", "F64": "<f8", "U64": "<u8"}

TOKEN_ARRAYS = {
    "document": "I32",
    "step": "I32",
    "micro_batch": "I32",
    "row": "I32",
    "id": "I32",
    "role": "U8",
    "target": "I32",
    "weight": "F64",
    "position": "I32",
    "sees": "U64",
    "own": "F64",
    "context": "F64",
    "reference": "F64",
}
"""The arrays over tokens [n], with their types.

    document     the conversation; -1 for padding
    row          the row of the micro-batch
    id, role     the token, and who wrote it; UNKNOWN_ROLE
    target       what the loss trains in its place, given the tokens before it; NO_TARGET if nothing
    weight       the factor of -log p(target) in the loss of its step
    position     as the model is given it
    sees         a digest of the ids before it that its prediction may attend to, as the arguments of the call say
    own          log p(target) in the trainer's own call; 0 for a token without target
    context      the same by the reference, with the arguments of that call
    reference    the same by the reference, of the conversation alone; log p(id) for a token without target; NaN for the
                 first one, before which there is nothing
"""


class RecordError(ValueError):
    """A file that is no whole record."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenRecord:
    """What some steps train. The arrays are those of TOKEN_ARRAYS."""

    tokens: Mapping[str, np.ndarray]
    sketches: np.ndarray
    """uint64 [documents, SKETCH_SIZE]"""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> np.ndarray:
        if name not in TOKEN_ARRAYS:
            raise AttributeError(name)
        return self.tokens[name]

    @property
    def num_steps(self) -> int:
        return len(self.facts["losses"])

    @property
    def loss(self) -> float:
        """The mean of the losses that the steps have returned."""
        return math.fsum(self.facts["losses"]) / self.num_steps

    @property
    def is_trained(self) -> np.ndarray:
        """bool [n]: whether the loss depends on the token."""
        return self.tokens["weight"] != 0

    def write(self, path: str | Path) -> None:
        """Raises OSError."""
        header, parts, at = dict[str, Any](), list[bytes](), 0
        arrays = {name: (kind, self.tokens[name]) for name, kind in TOKEN_ARRAYS.items()}
        for name, (kind, array) in {**arrays, "sketch": ("U64", self.sketches)}.items():
            parts.append(np.ascontiguousarray(array, dtype=_TYPES[kind]).tobytes())
            header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + len(parts[-1])]}
            at += len(parts[-1])
        facts = json.dumps(dict(self.facts), allow_nan=True)
        header["__metadata__"] = {"format": FORMAT, "facts": facts, "sha256": _digest(facts, header, b"".join(parts))}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


class TokenArrays:
    """The arrays of a record, in parts."""

    def __init__(self) -> None:
        self._parts: dict[str, list[np.ndarray]] = {name: [] for name in TOKEN_ARRAYS}

    def add(self, size: int, **arrays: Any) -> None:
        """Adds some tokens: arrays [size], or a number for all of them."""
        for name, kind in TOKEN_ARRAYS.items():
            self._parts[name].append(np.broadcast_to(np.asarray(arrays[name]).astype(_TYPES[kind]), (size,)))

    def joined(self) -> dict[str, np.ndarray]:
        return {name: np.concatenate(parts) for name, parts in self._parts.items()}


def read_record(path: str | Path) -> TokenRecord:
    """Raises RecordError, with the name of the file, if it is cut, changed or no record; OSError if it is not there."""
    data = Path(path).read_bytes()
    try:
        return _parsed(data)
    except RecordError as error:
        raise RecordError(f"{path}: {error}; {_REMEDY}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RecordError(f"{path}: not a record of sftron diff record ({type(error).__name__}); {_REMEDY}") from error


def _parsed(data: bytes) -> TokenRecord:
    (size,) = struct.unpack("<Q", data[:8]) if len(data) >= 8 else (len(data),)
    if not 0 < size <= min(len(data) - 8, _LARGEST_HEADER):
        raise RecordError("not a safetensors file, or one that is cut: name a file of sftron diff record")
    header, payload = json.loads(data[8 : 8 + size]), memoryview(data)[8 + size :]
    metadata = header.pop("__metadata__", {})
    if (found := metadata.get("format")) != FORMAT:
        raise RecordError(f"found format {found!r}; wanted {FORMAT!r}, a file of sftron diff record of this release")
    if end := max(each["data_offsets"][1] for each in header.values()) - len(payload):
        raise RecordError(f"{abs(end):,} bytes {'are missing: the file is cut' if end > 0 else 'too many'}")
    if metadata["sha256"] != _digest(metadata["facts"], header, payload):
        raise RecordError("its content does not have the sha256 that is written in it: the file was changed")
    arrays = dict[str, np.ndarray]()
    for name, kind in {**TOKEN_ARRAYS, "sketch": "U64"}.items():
        begin, end = header[name]["data_offsets"]
        array = np.frombuffer(payload[begin:end], dtype=_TYPES[header[name]["dtype"]]).reshape(header[name]["shape"])
        arrays[name] = array.astype(_TYPES[kind])
    sketches = arrays.pop("sketch")
    found = TokenRecord(arrays, sketches, json.loads(metadata["facts"]))
    _require_facts(found.facts)
    _require_arrays(found)
    return found


def _require_facts(facts: Any) -> None:
    """Raises RecordError if a fact that is computed with is missing or has another form."""
    if not isinstance(facts, dict):
        raise RecordError(f"its facts are {type(facts).__name__}; wanted an object")
    losses = facts.get("losses")
    if not isinstance(losses, list) or not losses or not all(map(_is_finite, losses)):
        raise RecordError(f"its losses are {losses!r:.60}; wanted a finite number for each step")
    for name in ("gradient_norms", "weight_norms", "gradient", "optimizer", "update", "rates", "versions", "texts"):
        if not isinstance(facts.get(name, {}), dict):
            raise RecordError(f"its {name} is {facts[name]!r:.60}; wanted an object")
    groups = facts.get("optimizer", {}).get("groups", [])
    if not isinstance(groups, list) or not all(isinstance(each, dict) for each in groups):
        raise RecordError(f"its optimizer has groups {groups!r:.60}; wanted a list of objects")
    numbers = {"gradient_of_loss": facts.get("gradient_of_loss", 1.0)}
    numbers |= {f"gradient.{name}": facts.get("gradient", {}).get(name, 0.0) for name in ("factor", "apart")}
    numbers |= {f"{name} of {key}": value for name in ("gradient_norms", "weight_norms")
                for key, value in facts.get(name, {}).items()}  # fmt: skip
    if update := facts.get("update"):
        numbers |= {f"update.{name}": update.get(name) for name in ("norm", "without_decay", "num_weights")}
        numbers |= {f"optimizer.{name}": each.get(name) for each in groups for name in ("lr", "num_weights")}
    for name, value in numbers.items():
        if not isinstance(value, (int, float)):
            raise RecordError(f"its {name} is {value!r:.60}; wanted a number")


def _require_arrays(record: TokenRecord) -> None:
    """Raises RecordError if the arrays do not fit each other, or hold what no recorder writes."""
    size, sketches = record.id.size, record.sketches
    for name, array in record.tokens.items():
        if array.shape != (size,):
            raise RecordError(f"its array {name} has the shape {array.shape}; wanted ({size},)")
    if not size or sketches.ndim != 2:
        raise RecordError(f"it has {size} tokens, and sketches of the shape {sketches.shape}")
    for name, least, most in (("document", -1, len(sketches)), ("step", 0, record.num_steps)):
        array = record.tokens[name]
        if array.min() < least or array.max() >= most:
            raise RecordError(f"its array {name} has {array.min()} to {array.max()}; wanted {least} to {most - 1}")
    for name, number in not_finite(record.tokens).items():
        raise RecordError(f"its array {name} has {number:,} values that are not finite")


def not_finite(tokens: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Returns the number of values that are NaN or infinite, by the name of the array that has some."""
    found = dict[str, int]()
    for name in ("weight", "own", "context", "reference"):  # nothing is before a first token, so it has no reference
        wrong = np.isinf(tokens[name]) | (np.isnan(tokens[name]) & (name != "reference"))
        found |= {name: int(wrong.sum())} if wrong.any() else {}
    return found


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _digest(facts: str, header: Mapping[str, Any], payload: bytes | memoryview) -> str:
    names = json.dumps({name: each for name, each in header.items() if name != "__metadata__"}, sort_keys=True)
    digest = hashlib.sha256(f"{facts}\n{names}\n".encode())
    digest.update(payload)
    return digest.hexdigest()


# -- facts -------------------------------------------------------------------------------------------------------------


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Returns the options of a torch optimizer's groups, with the number of their weights."""
    kinds = (bool, int, float, str, tuple, list)
    names = ("params", "param_names", "names")  # of each tensor, in thousands
    return [
        {name: value for name, value in group.items() if name not in names and isinstance(value, kinds)}
        | {"num_weights": sum(each.numel() for each in group["params"])}
        for group in optimizer.param_groups
    ]


def installed_versions() -> dict[str, str]:
    """Returns the versions of the libraries that compute a step."""
    found = dict[str, str]()
    for name in ("sftron", "torch", "transformers", "trl", "peft", "accelerate", "numpy"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


# -- hashes ------------------------------------------------------------------------------------------------------------


def sketch_of(text: str) -> np.ndarray:
    """Returns the smallest hashes of all windows of the text without white space, sorted, uint64 [SKETCH_SIZE].

    Of a part of the text, they are the smallest ones of those in the part; so a part has many hashes of the whole.
    Unused places have the largest number.
    """
    letters = np.frombuffer("".join(text.split()).encode("utf-32-le", "replace"), dtype="<u4").astype(np.uint64)
    found = np.full(SKETCH_SIZE, _NONE)
    if not len(letters):
        return found
    window = min(_WINDOW, len(letters))
    hashes = np.zeros(len(letters) - window + 1, dtype=np.uint64)
    for n in range(window):
        hashes = hash_numbers(hashes + letters[n : n + len(hashes)])
    smallest = np.unique(hashes)[:SKETCH_SIZE]
    found[: len(smallest)] = smallest
    return found


def hash_numbers(values: np.ndarray) -> np.ndarray:
    """Returns uint64 hashes of uint64 numbers (splitmix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def prefix_digests(ids: np.ndarray, starts: np.ndarray, attended: np.ndarray | None = None) -> np.ndarray:
    """Returns a digest of the attended ids from `starts[n]` to n, for each n, uint64.

    Args:
        ids: int [n].
        starts: int [n], the first id that each may attend to; it does not fall.
        attended: bool [n], which ids are attended to; all by default.
    """
    is_seen = np.ones(len(ids), dtype=bool) if attended is None else attended
    values, hashes = np.zeros(len(ids), dtype=np.uint64), hash_numbers(ids.astype(np.uint64))
    # A sum of hashes times powers of a number, as a sum of hashes would be the same in any order.
    factors = np.full(len(ids), np.uint64(0x100000001B3), dtype=np.uint64)
    powers = np.cumprod(factors, dtype=np.uint64)
    for start in np.unique(starts):
        (own,) = np.nonzero(starts == start)
        part = slice(int(start), int(own[-1]) + 1)
        seen = is_seen[part]
        terms = np.zeros(len(seen), dtype=np.uint64)
        terms[seen] = hashes[part][seen] * powers[: seen.sum()]
        values[own] = np.cumsum(terms, dtype=np.uint64)[own - int(start)]
    return values
