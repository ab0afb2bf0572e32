"""Configurations as dotted keys, and what is different between them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sftron.config import Config

_TOLD_APART_BY = ("general.run_name", "general.output_dir", "general.seed")
_WITHOUT_BEARING = (
    "logging.",
    "checkpoints.interval",
    "checkpoints.keep_last",
    "checkpoints.async",
    "checkpoints.export",
    "checkpoints.resume",
)
"""Beginnings of keys that change no weight of a run that goes on from itself."""


def flat(config: Config) -> dict[str, Any]:
    """Every key, dotted, with its value; lists are values."""
    return dict(_flat(config.model_dump(mode="json"), ""))


def _flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def differences(theirs: Config, ours: Config) -> list[str]:
    """Of the keys that decide what is trained, in words: `optimizer.learning_rate is 0.001 there and 0.0004 here`."""
    there, here = flat(theirs), flat(ours)
    return [
        f"{key} is {words(there.get(key))} there and {words(here.get(key))} here"
        for key in there | here
        if there.get(key) != here.get(key) and not key.startswith(_WITHOUT_BEARING)
    ]


def varying_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys that are not the same for all, apart from the seed, names and what has no bearing on the training."""
    keys = {key: None for config in configs for key in config}
    return [
        key
        for key in keys
        if len({json.dumps(config.get(key)) for config in configs}) > 1
        and key not in _TOLD_APART_BY
        and not key.startswith(_WITHOUT_BEARING)
    ]


def words(value: Any) -> str:
    """A value, short, as YAML has it."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, where no other key ends alike."""
    last = [key.rsplit(".", 1)[-1] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}
