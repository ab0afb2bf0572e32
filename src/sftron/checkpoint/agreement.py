"""Ranks that succeed together or fail together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Party(Protocol):
    """The ranks of a run, as far as a checkpoint has to know them (train/ranks.py's `Ranks`)."""

    @property
    def dp_rank(self) -> int: ...

    @property
    def dp_world_size(self) -> int: ...

    def gather(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every rank's JSON, on every rank."""
        ...


class Alone:
    """A single process."""

    dp_rank, dp_world_size = 0, 1

    def gather(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [dict(facts)]


def on_all(party: Party, make: Callable[[], Any]) -> list[Any]:
    """What `make` returns (JSON) on every rank, on every rank.

    Raises OSError on all ranks where it raises OSError on one, so that none goes on without the others.
    """
    mine: dict[str, Any]
    failure: OSError | None = None
    try:
        mine = {"value": make()}
    except OSError as error:
        failure, mine = error, {"error": f"{type(error).__name__}: {error}"}
    everyone = party.gather(mine)
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {facts['error']}" for rank, facts in enumerate(everyone) if "error" in facts]
    if failed:
        raise OSError("; ".join(failed))
    return [facts["value"] for facts in everyone]


def on_main(party: Party, make: Callable[[], Any]) -> Any:
    """What `make`, called on the main rank only, returns there. Raises OSError everywhere where it does there."""
    return on_all(party, make if party.dp_rank == 0 else lambda: None)[0]
