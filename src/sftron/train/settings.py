"""The settings of a run, and the steps for which each value was in force."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from sftron.checkpoint.checkpoint import CheckpointError
from sftron.config import Config
from sftron.errors import without_secrets


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one configuration key between two starts of the run."""

    step: int
    """The first step that is trained with `new`."""
    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.old)} -> {shown(self.new)}"


@dataclass(frozen=True, slots=True)
class Settings:
    """The resolved configuration in force (as JSON values, without secrets), and its changes so far.

    A checkpoint stores the settings of its steps. After a kill, a resume therefore starts from the settings of the
    saved steps, even if other settings were tried in between.
    """

    config: Mapping[str, Any]
    changes: tuple[Change, ...] = ()

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Returns the settings of a new run."""
        return cls(without_secrets(config.model_dump(mode="json")))

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Settings:
        """Restores the settings from a checkpoint's state. Raises CheckpointError if the state is invalid."""
        try:
            kept = state["settings"]
            return cls(dict(kept["config"]), tuple(Change(**each) for each in kept["changes"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's settings are invalid ({error!r})") from error

    def state(self) -> dict[str, Any]:
        """Returns the settings for a checkpoint, as JSON values."""
        return {"config": self.config, "changes": [asdict(each) for each in self.changes]}

    def changes_to(self, now: Settings, *, after_step: int) -> tuple[Change, ...]:
        """Returns a change for every key whose value differs in `now`; it takes effect after step `after_step`."""
        old, new = dict(_dotted(self.config)), dict(_dotted(now.config))
        return tuple(
            Change(after_step + 1, key, old.get(key), new.get(key)) for key in old | new if old.get(key) != new.get(key)
        )

    def changed_at(self, step: int) -> dict[str, list[Any]]:
        """Returns the keys that change at `step`, each with its old and new value."""
        return {each.key: [each.old, each.new] for each in self.changes if each.step == step}

    def periods(self) -> dict[str, list[tuple[int, int | None, Any]]]:
        """Returns for each changed key its values, as (first step, last step or None if still in force, value)."""
        periods: dict[str, list[tuple[int, int | None, Any]]] = {}
        for change in self.changes:
            own = periods.setdefault(change.key, [(1, None, change.old)])
            own[-1] = (own[-1][0], change.step - 1, own[-1][2])
            own.append((change.step, None, change.new))
        return periods

    def as_comment(self) -> str:
        """Returns the comment at the top of config.yaml; empty if nothing has changed."""
        lines = [
            f"#   {key}: " + ", ".join(f"{shown(value)} {period_words(first, last)}" for first, last, value in own)
            for key, own in self.periods().items()
        ]
        return "\n".join(["# Settings that changed during the run:", *lines, ""]) if lines else ""

    def as_config(self) -> Config | None:
        """Returns the configuration; None if this version of sftron cannot read it."""
        try:
            return Config.model_validate(self.config)
        except ValidationError:
            return None


def shown(value: Any) -> str:
    """Returns a value as JSON, which is one line of ASCII."""
    return json.dumps(value)


def period_words(first: int, last: int | None) -> str:
    if last is None:
        return f"from step {first} on"
    return f"in step {first}" if first == last else f"in steps {first} to {last}"


def _dotted(tree: Mapping[str, Any] | Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every value with its dotted key; items in a list of mappings have an index, as in data.datasets.0.path."""
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        is_mappings = isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value)
        if is_mappings or (isinstance(value, Mapping) and value):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
