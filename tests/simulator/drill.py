"""One seed: a run under a schedule of faults, life after life until it is complete, and what must hold of it."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sftron.checkpoint.shards import CheckpointError
from sftron.data.loader import WorkerError
from sftron.train.ranks import RankError
from tests.simulator.checks import (
    End,
    is_intact,
    last_step,
    newest_step,
    status_of,
    steps_in,
    unsound_files,
    wrong_counts,
    wrong_exports,
)
from tests.simulator.disk import Disk, Ordering, broken_medium, no_space
from tests.simulator.draws import Fault, config_of, draw_checkpoints, draw_data, draw_faults, draw_layout
from tests.simulator.life import Clock, Layout, Life
from tests.simulator.machine import Machine, Task

_FAULTY_LIVES, _MOST_LIVES = 4, 7
"""Rot before the first life without a fault is found in it, and moved away before the next one."""


@dataclass(frozen=True)
class Found:
    """What a seed has shown."""

    seed: int
    schedule: tuple[str, ...]
    violations: tuple[str, ...]
    faults: Counter[str]
    digest: str
    """Of every event and of the end."""


@dataclass
class Drill:
    """A run on one disk.

    Args:
        folder: Where the disk is; most quickly in memory.
        ends: The ends of runs that were left alone, by their data; those that are missing are added.
        is_faulty: Whether there are faults; without, it is the run that is left alone.
        on_event: Called with each line of the trace.
    """

    seed: int
    folder: Path
    clock: Clock
    ends: dict[str, End]
    is_faulty: bool = True
    on_event: Callable[[str], object] = lambda line: None
    schedule: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        chance = self.chance = random.Random(self.seed)
        self._digest = hashlib.blake2b(digest_size=16)
        self.data = draw_data(chance)
        self.layout = draw_layout(chance, self.data["data"]["num_lanes"])
        self.options = draw_checkpoints(chance)
        if chance.random() < 0.4:
            self.options["keep_best"] = "eval/held_out/loss"
        ordering: Ordering = chance.choice(("ordered", "unordered"))
        self.root = self.folder / "disk"
        self.disk = Disk(self.root, lambda what, where: self.machine.event(what, where), self._spoil, ordering)
        self.run_folder = self.root / "out" / "run"
        self.checkpoints = self.run_folder / "checkpoints"
        self.saved_step, self.said = 0, ""
        self.rotten: set[str] = set()

    def run(self) -> Found:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        self._note(f"{self.data} {self.options}, {self.disk.ordering} disk, {self.layout}")
        for number in range(_MOST_LIVES):
            is_faulty = self.is_faulty and number < _FAULTY_LIVES
            if is_faulty and number and self.chance.random() < 0.3:
                self.faults["hop"] += 1
                self.layout = draw_layout(self.chance, self.data["data"]["num_lanes"])
                self.options |= draw_checkpoints(self.chance)
                self._note(f"on {self.layout}, {self.options}")
            if self._live(draw_faults(self.chance, self.layout.num_ranks) if is_faulty else []) or self.violations:
                break
        else:
            self._require(False, "the run is not complete after lives without a fault")
        if self.is_faulty and not self.violations and self.chance.random() < 0.3:
            self._start_again()
        if not self.violations:
            self._check_end()
        return Found(self.seed, (*self.schedule,), (*self.violations,), self.faults, self._digest.hexdigest())

    def _live(self, faults: list[Fault]) -> bool:
        """Starts the run once, and returns whether it is complete."""
        self._planned, self._lasting = faults, dict[str, int]()
        self._struck: set[str] = set()
        self._has_searched, self._expected_step, self._broken = False, 0, list[Path]()
        self.machine = Machine(self.chance, self._on_event)
        config = config_of(self.root / "out", self.data, self.layout, self.options)
        self.life = Life(self.machine, self.disk, config, self.layout, self.chance, self._on_search)
        ends = self.life.live()
        self.said += "\n".join(self.life.lines)
        self.saved_step = max(self.saved_step, self.life.saved_step)
        status = status_of(self.run_folder)
        words = [end if isinstance(end, int) else repr(end)[:200] for end in ends]
        self._note(f"ended with {words}, {status}; saved: step {self.saved_step}")
        self._check_start(ends)
        self._check_errors(ends, status)
        if not self._struck - {"ask to stop"} and ends == [0] * len(ends):
            self._check_housekeeping()
        if "lose power" in self._struck:
            self._lose_power()
        for folder in steps_in(self.checkpoints).values():
            self._require(folder.name in self.rotten or is_intact(folder), f"{folder.name} is not whole")
        newest = newest_step(self.checkpoints)
        is_sure = not self.faults["fail an fsync"]  # nothing is synced above a run directory if that fails
        self._require(
            newest >= self.saved_step or not is_sure, f"step {self.saved_step} was saved, and the newest is {newest}"
        )
        for problem in unsound_files(self.run_folder):
            self._require(False, problem)
        if status == "completed" and "lose power" not in self._struck and ends == [0] * len(ends):
            return True
        if any(isinstance(end, CheckpointError) for end in ends):
            self._move_away()
        elif self.is_faulty and self.chance.random() < 0.15:
            self._rot()
        return False

    def _start_again(self) -> None:
        """Starts a complete run once more, perhaps after a loss of power: it has to stay as it is."""
        if self.chance.random() < 0.5:
            self.faults["lose power"] += 1
            self._lose_power()
        is_complete = self._live([])
        self._require(is_complete, "a complete run that was started again is not complete")

    def _lose_power(self) -> None:
        for line in self.disk.lose_power(self.chance):
            self._note(f"lost: {line}")

    # -- between lives ------------------------------------------------------------------------------------------------

    def _move_away(self) -> None:
        """What an operator does when every checkpoint is damaged."""
        for folder in [each for each in steps_in(self.checkpoints).values() if not is_intact(each)]:
            self.disk.rename(folder, folder.with_name(f"{folder.name}.moved-{len(self.schedule)}"))
            self._note(f"moved {folder.name} away")
        self.saved_step = 0

    def _rot(self) -> None:
        """Changes a bit of one of the two newest checkpoints, or cuts one of its files."""
        folders = [*steps_in(self.checkpoints).values()][:2]
        if not folders:
            return
        folder = self.chance.choice(folders)
        path = self.chance.choice(sorted(folder.iterdir()))
        content = bytearray(path.read_bytes())
        if not content:
            return
        # A changed bit of a manifest may change nothing; the tests of checkpoints change each.
        if path.name != "MANIFEST.json" and self.chance.random() < 0.5:
            content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
        else:
            del content[self.chance.randrange(len(content)) :]
        self.disk.rot(path, bytes(content))
        self.rotten.add(folder.name)
        self.faults["rot"] += 1
        self._note(f"rot in {folder.name}/{path.name}")
        self.saved_step = newest_step(self.checkpoints)

    # -- faults in a life ---------------------------------------------------------------------------------------------

    def _on_event(self, number: int, task: Task, what: str, where: str) -> None:
        event = f"{number} {task.name}: {what} {where}"
        self._digest.update(f"{event}\n".encode())
        self.on_event(event)
        self._lasting = {kind: end for kind, end in self._lasting.items() if end > number}
        if "torchrun" in self._struck and "torchrun" not in self._lasting:
            self.machine.kill()
        for fault in [each for each in self._planned if each.place in ("", what)]:
            fault.countdown -= 1
            if fault.countdown < 0:
                self._planned.remove(fault)
                self._note(f"{fault.kind} (rank {fault.rank}, {fault.length}) at {event}")
                self._strike(fault, number)

    def _strike(self, fault: Fault, number: int) -> None:
        kind, rank = fault.kind, fault.rank
        self.faults[kind] += 1
        self._struck.add(kind)
        if kind in ("kill all", "lose power"):
            self.machine.kill()
        elif kind == "kill a rank":
            self.machine.kill({rank})
            self._struck.add("torchrun")  # which ends the others after a while
            self._lasting["torchrun"] = number + fault.length
        elif kind == "hang a rank":
            for task in self.machine.tasks:
                task.hangs |= task.rank == rank
        elif kind in ("fill the disk", "fail an fsync", "slow the disk"):
            self._lasting[kind] = number + fault.length
        elif kind == "jump in time":
            self.clock.now += fault.length * 60
            self.clock.wall += (fault.length - 100) * 3600
        elif kind in ("a worker dies", "a worker hangs"):
            self.life.worker_faults[rank] = kind.split()[-1]
        elif kind == "flip a bit":
            self.life.poisoned.add(rank)
        elif rank in self.life.stops:
            self.life.stops[rank].received = True

    def _spoil(self, what: str, size: int) -> tuple[OSError | None, int]:
        if "slow the disk" in self._lasting:
            self.clock.now += 60
        if "fill the disk" in self._lasting and what in ("write", "create", "mkdir", "symlink"):
            return no_space(), self.chance.randint(0, size) if self.chance.random() < 0.3 else 0
        if what == "fsync" and self._lasting.pop("fail an fsync", None):
            return broken_medium(), 0
        # A system call may write less than it was given.
        return None, self.chance.randint(1, size) if size and self.chance.random() < 0.1 else size

    # -- what must hold -----------------------------------------------------------------------------------------------

    def _on_search(self) -> None:
        """Notes which checkpoint the run has to find, and which damaged ones it passes over."""
        for folder in self.run_folder.glob("*/*.replaced-*"):
            self._require(False, f"{folder.name} was to be replaced when the run was killed, and is not restored")
        self._has_searched, self._expected_step = True, newest_step(self.checkpoints)
        self._broken = [folder for step, folder in steps_in(self.checkpoints).items() if step > self._expected_step]

    def _check_start(self, ends: list[Any]) -> None:
        if not self._has_searched:
            return
        life, expected = self.life, self._expected_step
        refusals = "\n".join(str(end) for end in ends if isinstance(end, CheckpointError))
        if refusals:
            self._require(not expected and bool(self._broken), f"step {expected} is intact, and refused: {refusals}")
            for folder in self._broken:
                self._require(str(folder) in refusals, f"{folder.name} was refused without its path: {refusals}")
        if life.resumed is not None:
            name = f"step-{expected}"
            self._require(life.resumed.name == name, f"{life.resumed.name} was loaded, and {name} is the newest intact")
        if life.saved_step:  # the run went on from there
            self._require(life.resumed is not None or not expected, f"the run began anew beside step {expected}")
            said = "\n".join(line for line in life.lines if line.startswith("broken"))
            for folder in self._broken:
                self._require(str(folder) in said, f"{folder.name} is damaged, and was passed over without a word")
                is_aside = not folder.exists() or is_intact(folder)
                self._require(is_aside, f"{folder.name} is damaged, and stands among new checkpoints")

    def _check_errors(self, ends: list[Any], status: str) -> None:
        ordinary: tuple[type[BaseException], ...] = (RankError, WorkerError)
        if self._struck & {"fill the disk", "fail an fsync"}:
            ordinary += (OSError,)
        if self.rotten:
            ordinary += (CheckpointError,)
        if "fill the disk" in self._struck:
            ordinary += (ValueError,)  # the run directory cannot be written
        for end in ends:
            is_ordinary = isinstance(end, ordinary) or not isinstance(end, BaseException)
            self._require(is_ordinary, f"a rank ended with {end!r}")
            is_early = "checkpoints in a row" in str(end) and "3 checkpoints in a row" not in str(end)
            self._require(not is_early, f"a run ends after the third missed checkpoint, not with {end!r}")
        is_refused = any(isinstance(end, CheckpointError) for end in ends)
        if not self._struck and not is_refused:
            self._require(ends == [0] * len(ends), f"a life without a fault ended with {ends}")
            self._require(status == "completed", f"a life without a fault ended as {status}")

    def _check_housekeeping(self) -> None:
        """What a life without a fault leaves: its last step is saved, and so many checkpoints as are to be kept."""
        if not self.life.saved_step:  # a complete run that was started again stays as it is
            return
        left = sorted(each.name for each in self.run_folder.glob("*/*.tmp-*"))
        self._require(not left, f"{', '.join(left)}: unfinished, and not removed")
        kept, keep_last = [*steps_in(self.checkpoints)], self.options["keep_last"]
        most = keep_last + ("keep_best" in self.options)
        self._require(len(kept) <= most, f"steps {kept} are kept, at most {most} should be")
        first = int(self.life.resumed.name[5:]) if self.life.resumed else 0
        if self.options["interval"] == 1 and self.life.saved_step - first >= keep_last:
            self._require(len(kept) >= keep_last, f"steps {kept} are kept, at least {keep_last} should be")
        last = last_step(self.run_folder)
        self._require(kept[0] == last, f"the run ended after step {last}, and step {kept[0]} is its newest")
        stated = json.loads((self.run_folder / "result.json").read_bytes()).get("step")
        self._require(stated == last, f"the run ended after step {last}, and result.json has {stated}")
        if (every := self.options["export_interval"]) and not self._struck:  # a stop leaves an export to the next start
            wanted = {step for step in range(first + 1, last + 1) if step % every == 0}
            missing = wanted - steps_in(self.run_folder / "hf").keys()
            self._require(not missing, f"steps {sorted(missing)} are not exported")

    def _check_end(self) -> None:
        self.end = End.of(self.run_folder)
        self._digest.update(repr(self.end).encode())
        has_best = "keep_best" in self.options
        is_spared = not self.faults.keys() & {"rot", "fill the disk", "fail an fsync"}
        problems: list[Iterable[str]] = [wrong_exports(self.run_folder, self.said, has_best=has_best and is_spared)]
        if "train_epochs" in self.data["tokens"]:
            problems.append(wrong_counts(self.run_folder, self.data["tokens"]["train_epochs"]))
        if self.is_faulty:
            excused = set[str]() if has_best else {"evaluations", "best"}
            if not is_spared:  # if the best is lost or cannot be saved, the search for it begins again
                excused.add("best")
            # A run goes on without lines that cannot be written, and says so.
            excused |= {name for name in ("metrics", "evaluations") if f"{name}.jsonl cannot be written" in self.said}
            alone = self._left_alone()
            problems.append([] if alone is None else self.end.differences(alone, excused))
        for each in problems:
            for problem in each:
                self._require(False, problem)

    def _left_alone(self) -> End | None:
        """Returns the end of the undisturbed run; None if something did not hold of it."""
        name = json.dumps(self.data)
        if name not in self.ends:
            drill = Drill(0, self.folder / "alone", self.clock, self.ends, is_faulty=False)
            drill.data, drill.layout = self.data, Layout()
            drill.options["keep_best"] = "eval/held_out/loss"
            found = drill.run()
            for violation in found.violations:
                self._require(False, f"without a fault: {violation}")
            if found.violations:
                return None
            self.ends[name] = drill.end
        return self.ends[name]

    def _require(self, law: bool, otherwise: str) -> None:
        if not law:
            self.violations.append(otherwise.replace(str(self.folder), ""))

    def _note(self, line: str) -> None:
        line = line.replace(str(self.folder), "")
        self.schedule.append(line)
        self._digest.update(f"{line}\n".encode())
