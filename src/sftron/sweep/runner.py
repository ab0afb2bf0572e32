"""Runs the processes of a sweep one after another, and forwards stop signals to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from sftron.data.child_process import children_of, heard_signals
from sftron.sweep.grid import PlannedRun
from sftron.train.run_directory import read_result

LOG_NAME = "output.log"
"""The file in the run directory that contains the output of all processes, over all starts."""
_POLL_S = 0.2
_NUM_LAST_LINES = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of starting a run. A stopped run continues at its next start; a failed run has a reason."""

    run: PlannedRun
    ending: Literal["completed", "stopped", "failed"]
    seconds: float
    reason: str = ""


class Runner:
    """Starts runs in order. At SIGTERM, SIGUSR1, SIGHUP or Ctrl-C the current run saves and ends, and no other run
    starts; a second Ctrl-C kills it."""

    def __init__(self) -> None:
        self._num_signals = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def stopping(self) -> bool:
        return self._num_signals > 0

    def run_all(self, runs: Sequence[PlannedRun]) -> Iterator[Outcome]:
        """Yields the outcome of each started run when it ends."""
        before = {number: signal.signal(number, self._receive) for number in heard_signals()}
        try:
            for run in runs:
                if self.stopping:
                    return
                yield self._run(run)
        finally:
            self._kill()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self, run: PlannedRun) -> Outcome:
        run.folder.mkdir(parents=True, exist_ok=True)
        started, num_passed_on = time.time(), 0
        # torchrun is in the same folder as the Python interpreter.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment = {**os.environ, "PATH": path}
        with (run.folder / LOG_NAME).open("ab") as log:
            # A terminal sends Ctrl-C to every process of the foreground group. In its own session, the run receives it
            # only once, from this process.
            self._process = subprocess.Popen(
                run.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        while self._process.poll() is None:
            if self._num_signals > num_passed_on:
                num_passed_on = self._num_signals
                for process_id in _ranks_of(self._process.pid, run.command):
                    with suppress(ProcessLookupError):
                        os.kill(process_id, signal.SIGTERM)
            time.sleep(_POLL_S)
        return _outcome(run, self._process.returncode, started, is_stopping=self.stopping)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.stopping:
            self._kill()
        self._num_signals += 1

    def _kill(self) -> None:
        """Kills the process group of the current run; ranks of torchrun exit with it (child_process.py)."""
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _ranks_of(process_id: int, command: Sequence[str]) -> list[int]:
    """Returns the processes that save and end at SIGTERM, without torchrun, which would kill its ranks after 30 s."""
    if not any("torchrun" in word or "torch.distributed" in word for word in command):
        return [process_id]
    return children_of(process_id) or [process_id]


def _outcome(run: PlannedRun, exit_status: int, started: float, *, is_stopping: bool) -> Outcome:
    seconds, path = time.time() - started, run.folder / "result.json"
    result = read_result(run.folder)
    if not path.exists() or (path.stat().st_mtime < started - 1 and result.get("status") != "diverged"):
        result = {}  # of an earlier start; a run that has diverged is not begun again
    status = result.get("status")
    if status == "completed" and exit_status == 0:
        return Outcome(run, "completed", seconds)
    # A run that is stopped while loading has nothing to save and is ended by the signal.
    if status == "preempted" or (is_stopping and status in (None, "running", "killed")):
        return Outcome(run, "stopped", seconds)
    reason = result.get("error")
    if not reason:
        lines = (run.folder / LOG_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
        reason = " / ".join([line.strip() for line in lines if line.strip()][-_NUM_LAST_LINES:])
    return Outcome(run, "failed", seconds, f"exit status {exit_status}: {reason}")
