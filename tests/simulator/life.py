"""One start of a simulated run, and what its tasks ask of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from sftron.config import Config
from sftron.train import run_directory, trainer
from tests.simulator.disk import Disk
from tests.simulator.machine import Group, Machine


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout of ranks and workers; `context` ranks share each pack."""

    num_ranks: int = 1
    context: int = 1
    num_workers: int = 0

    def __str__(self) -> str:
        shared = f", {self.context} share each pack" if self.context > 1 else ""
        return f"{self.num_ranks} ranks{shared}, {self.num_workers} workers each"


class Clock:
    """Stands for the module `time`: some time passes with each look at it, and it jumps as faults want it."""

    def __init__(self) -> None:
        self.now, self.wall = 1000.0, 1.8e9

    def monotonic(self) -> float:
        self.now += 0.001
        return self.now

    perf_counter = process_time = monotonic

    def time(self) -> float:
        return self.wall + self.monotonic()

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        here()[0].machine.event("sleep")


class SimulatedStop:
    """A StopRequest without signals, which only the main thread of a process can receive."""

    def __init__(self) -> None:
        self.received = False

    def listening(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(eq=False)
class Life:
    """One start of a run, until all its ranks have ended or were killed.

    Attributes:
        lines: What the main rank wrote to the console.
        resumed: The checkpoint that was loaded.
        saved_step: The step of the newest checkpoint that the run counted as complete; 0 if it has saved none.
        poisoned: The ranks of whose weights a bit flips in their next step.
        worker_faults: What befalls a worker of a rank: "dies" or "hangs".
        on_search: Called before the run looks for a checkpoint.
    """

    machine: Machine
    disk: Disk
    config: Config
    layout: Layout
    chance: random.Random
    on_search: Callable[[], None]
    lines: list[str] = field(default_factory=list)
    resumed: Path | None = None
    saved_step: int = 0
    poisoned: set[int] = field(default_factory=set)
    worker_faults: dict[int, str] = field(default_factory=dict)
    stops: dict[int, SimulatedStop] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.group, self.group_of_writers = (Group(self.machine, self.layout.num_ranks) for _ in range(2))

    def live(self) -> list[Any]:
        """Runs all ranks to their ends. Returns for each its exit status, its exception, or None if it was killed."""
        global current
        current = self
        try:
            tasks = [self.machine.spawn(rank, f"rank {rank}", self._train) for rank in range(self.layout.num_ranks)]
            self.machine.run()
        finally:
            self.disk.close_all()
            run_directory._LOCKED.clear()
            current = None
        return [task.error or task.result for task in tasks]

    def _train(self) -> int:
        stop = self.stops[here()[1]] = SimulatedStop()
        return trainer.open_trainer(self.config, cast(Any, stop)).train()


current: Life | None = None
"""The life that goes on; there is one at a time."""


def here() -> tuple[Life, int]:
    """Returns the life and the rank of the task that calls this."""
    assert current is not None
    task = current.machine.current
    assert task is not None
    return current, task.rank
