"""Runs, one after another or several at a time, each a process of its own; a stop is passed on to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from sftron.data.child_process import children_of, heard_signals
from sftron.sweep.planned_run import PlannedRun
from sftron.train.run_directory import read_result

LOG_NAME = "output.log"
"""In the run's directory: all that its processes print, over all its starts; console.log is the run's own."""
_POLL_S = 0.2
_LAST_LINES = 5
Ending = Literal["completed", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended this time. stopped: on request, to be gone on with. reason: of a failure."""

    run: PlannedRun
    ending: Ending
    seconds: float
    reason: str = ""


@dataclass(slots=True)
class _Active:
    run: PlannedRun
    process: subprocess.Popen[bytes]
    slot: int
    started: float


class Runner:
    """Starts the runs in order. SIGTERM, SIGUSR1, SIGHUP or Ctrl-C: those under way are asked to save and end, and no
    other begins; a second Ctrl-C kills them."""

    def __init__(self, *, parallel: int = 1, tell: Callable[[Outcome], None] = lambda outcome: None) -> None:
        """tell: is given each outcome as it comes."""
        self.stopping = False
        self._slots = list(range(parallel))
        self._environments = environments(parallel, os.environ)
        self._tell = tell
        self._active: list[_Active] = []
        self._num_signals = 0

    def run_all(self, runs: Sequence[PlannedRun]) -> list[Outcome]:
        """Of the runs that were started, in the order in which they ended."""
        before = {number: signal.signal(number, self._receive) for number in heard_signals()}
        waiting, outcomes = deque(runs), []
        num_passed_on = 0
        try:
            while self._active or (waiting and not self.stopping):
                while waiting and self._slots and not self.stopping:
                    self._start(waiting.popleft())
                if self._num_signals > num_passed_on:
                    num_passed_on = self._num_signals
                    self._pass_on()
                time.sleep(_POLL_S)
                for active in [each for each in self._active if each.process.poll() is not None]:
                    self._active.remove(active)
                    self._slots.append(active.slot)
                    outcomes.append(_outcome(active, is_stopping=self.stopping))
                    self._tell(outcomes[-1])
        finally:
            for active in self._active:
                _kill(active.process)
            for number, handler in before.items():
                signal.signal(number, handler)
        return outcomes

    def _start(self, run: PlannedRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        slot = self._slots.pop(0)
        with (run.folder / LOG_NAME).open("ab") as log:
            process = subprocess.Popen(
                run.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environments[slot],
                # Ctrl-C in a terminal goes to every process of the group: the runs get it from here, once.
                start_new_session=True,
            )
        self._active.append(_Active(run, process, slot, time.time()))

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.stopping = True
        self._num_signals += 1
        if number == signal.SIGINT and self._num_signals > 1:
            for active in self._active:
                _kill(active.process)

    def _pass_on(self) -> None:
        for active in self._active:
            for process_id in _ranks_of(active):
                with suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGTERM)


def environments(parallel: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Of each place for a run: its share of the GPUs, or of the CPU's threads.

    Raises ValueError where there are fewer GPUs than places.
    """
    # torchrun, beside the interpreter that runs this.
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    common = {**environment, "PATH": path}
    devices = _devices(environment) if parallel > 1 else []
    if devices and len(devices) < parallel:
        raise ValueError(f"{parallel} runs at a time want as many GPUs, and there are {len(devices)}")
    if parallel > 1 and not devices:
        common.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // parallel)))
    share = len(devices) // parallel
    return [
        common | ({"CUDA_VISIBLE_DEVICES": ",".join(devices[place * share : (place + 1) * share])} if devices else {})
        for place in range(parallel)
    ]


def _devices(environment: Mapping[str, str]) -> list[str]:
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [device for device in visible.split(",") if device]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _ranks_of(active: _Active) -> list[int]:
    """The processes that save and end at SIGTERM. Not torchrun: it would wait 30 s, then kill, and end with 1."""
    process_id = active.process.pid
    if not any("torchrun" in word or "torch.distributed" in word for word in active.run.command):
        return [process_id]
    return children_of(process_id) or [process_id]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With its process group; ranks of torchrun die with it (child_process.py)."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _outcome(active: _Active, *, is_stopping: bool) -> Outcome:
    run, seconds = active.run, time.time() - active.started
    result = run.folder / "result.json"
    told = read_result(run.folder) if result.exists() and result.stat().st_mtime >= active.started - 1 else {}
    status = told.get("status")
    if status == "completed" and active.process.returncode == 0:
        return Outcome(run, "completed", seconds)
    # A run that is stopped while it loads has nothing to save, and ends by the signal.
    if status == "preempted" or (is_stopping and status in (None, "running", "killed")):
        return Outcome(run, "stopped", seconds)
    reason = told.get("error") or _last_lines(run.folder / LOG_NAME)
    return Outcome(run, "failed", seconds, f"exit status {active.process.returncode}: {reason}")


def _last_lines(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return " / ".join([line.strip() for line in lines if line.strip()][-_LAST_LINES:])
