"""A machine of simulated ranks: tasks of which exactly one runs at a time, in an order that a seed decides.

A task is a thread: the main thread of a rank, or one that it starts (the writer of a background save). A task gives
way only in `Machine.event`, which stands before each change on disk and at each step, pack and collective, and where it
waits. There the machine counts, lets planned faults happen, and draws who goes on. A killed task never changes anything
again: its next event raises Killed, and so do all that its handlers and `finally` blocks attempt.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from sftron.train.ranks import RankError, Ranks


class Killed(BaseException):
    """The task was killed; nothing may catch it."""


class StuckError(Exception):
    """No task can go on, and no fault explains it."""


@dataclass(eq=False)
class Task:
    """A thread of a rank."""

    rank: int
    name: str
    work: Callable[[], Any]
    dead: bool = False
    hangs: bool = False
    ended: bool = False
    result: Any = None
    error: BaseException | None = None
    is_ready: Callable[[], bool] = lambda: True
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class Machine:
    """Runs tasks until all of them have ended.

    Args:
        chance: Decides who goes on.
        on_event: Called with (number of the event, task, what, where) before each; makes the faults.
    """

    switches = 0.1
    """How often another task goes on at an event at which the task need not wait."""

    def __init__(self, chance: random.Random, on_event: Callable[[int, Task, str, str], None]) -> None:
        self.chance, self._on_event = chance, on_event
        self.tasks: list[Task] = []
        self.number = 0
        self._by_thread: dict[int, Task] = {}
        self._idle = threading.Semaphore(0)

    @property
    def current(self) -> Task | None:
        """The task that calls this; None for what is not simulated."""
        return self._by_thread.get(threading.get_ident())

    def spawn(self, rank: int, name: str, work: Callable[[], Any]) -> Task:
        task = Task(rank, name, work)
        self.tasks.append(task)

        def live() -> None:
            self._by_thread[threading.get_ident()] = task
            task.turn.acquire()
            try:
                if not task.dead:
                    task.result = work()
            except Killed:
                task.dead = True
            except BaseException as error:
                task.error = error
            task.ended = True
            if name.startswith("rank"):  # its other threads end with its process
                for each in self.tasks:
                    each.dead |= each.rank == rank
            del self._by_thread[threading.get_ident()]
            self._pass_on()

        thread = threading.Thread(target=live, daemon=True)
        thread.start()
        return task

    def run(self) -> None:
        self._pass_on()
        self._idle.acquire()

    # -- in a task ----------------------------------------------------------------------------------------------------

    def event(self, what: str, where: str = "") -> None:
        """Counts an event of the task that calls this, which may be its last one."""
        task = self.current
        if task is None:
            return
        if not task.dead:
            self.number += 1
            self._on_event(self.number, task, what, where)
            if task.hangs:
                self.wait(lambda: False)
            elif self.chance.random() < self.switches:
                self.wait(lambda: True)
        if task.dead:
            raise Killed

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Lets others go on, at least until `is_ready`."""
        task = self.current
        assert task is not None
        if task.dead:
            raise Killed
        task.is_ready = is_ready
        self._pass_on()
        task.turn.acquire()
        task.is_ready = lambda: True
        if task.dead:
            raise Killed

    def kill(self, ranks: set[int] | None = None) -> None:
        """Kills all tasks of some ranks, or of all."""
        for task in self.tasks:
            task.dead |= ranks is None or task.rank in ranks

    def _pass_on(self) -> None:
        living = [task for task in self.tasks if not task.ended]
        if not living:
            self._idle.release()
            return
        dead = [task for task in living if task.dead]
        ready = dead[:1] or [task for task in living if not task.hangs and task.is_ready()]
        if not ready:  # every rank waits for one that hangs, or for nothing
            hangs = [task for task in living if task.hangs]
            for task in hangs or living:
                task.dead = True
            if not hangs:
                for task in living:
                    task.error = StuckError(f"{task.name} waits for nothing")
            ready = [task for task in living if task.dead][:1]
        (ready[0] if len(ready) == 1 else self.chance.choice(ready)).turn.release()


# --- Collectives ---


class Group:
    """The collectives of the ranks of one run, in memory, for their n-th call each.

    When a rank has died, or hangs while all others wait, the others' calls raise RankError, as a broken connection or a
    time-out does.
    """

    def __init__(self, machine: Machine, world_size: int) -> None:
        self._machine, self._world_size = machine, world_size
        self._calls: dict[int, dict[int, Any]] = {}
        self._made = dict.fromkeys(range(world_size), 0)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._machine.event("gather")
        number = self._made[rank]
        self._made[rank] += 1
        call = self._calls.setdefault(number, {})
        call[rank] = value
        mains = [task for task in self._machine.tasks if task.name.startswith("rank")]

        def is_lost() -> bool:
            return any(task.dead or task.ended for task in mains if task.rank not in call)

        self._machine.wait(lambda: len(call) == self._world_size or is_lost())
        if len(call) < self._world_size:
            raise RankError("Another rank has died, or has not answered within parallelism.timeout_seconds")
        return [call[each] for each in range(self._world_size)]


class SimulatedRanks(Ranks):
    """Ranks whose collectives are those of a Group; `with_own_group` has another one."""

    _exchange: Callable[[int, Any], list[Any]]
    _others: Group

    @classmethod
    def of(cls, ranks: Ranks, group: Group, others: Group) -> SimulatedRanks:
        made = object.__new__(cls)  # not by the constructor, because Ranks is frozen
        for each in fields(Ranks):
            object.__setattr__(made, each.name, getattr(ranks, each.name))
        object.__setattr__(made, "_exchange", group.exchange)
        object.__setattr__(made, "_others", others)
        return made

    def gather(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        if self.world_size == 1:
            return [dict(facts)]
        return [json.loads(text) for text in self._exchange(self.rank, json.dumps(facts))]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.world_size > 1:
            total = torch.stack(self._exchange(self.rank, tensor.clone())).sum(0)
            tensor.copy_(total.to(tensor.dtype))
        return tensor

    def with_own_group(self) -> Ranks:
        return self if self.world_size == 1 else self.of(self, self._others, self._others)
