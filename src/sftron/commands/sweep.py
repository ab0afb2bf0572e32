"""Runs the grid of a sweep file, one run after another: `sftron sweep configs/sweep_toggles.yaml`.

`wandb sweep` takes the same file. `wandb agent` also runs other sweeps than grids of plain values, and several runs
at once.

It skips completed runs, and continues begun ones from their own checkpoints: to continue a sweep, repeat the command.
It reports a failed run and goes on with the others. At Ctrl-C or SIGTERM, the run saves and ends. At the end, it writes
report.html, report.json and plots/*.png next to the runs.

Exit status: 0 all completed, or stopped on request after saving; 1 a run failed; 2 the file or a configuration is
invalid.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from sftron.commands.arguments import as_path, make_parser, refusing
from sftron.errors import show
from sftron.visible_text import counted

if TYPE_CHECKING:
    from sftron.compare.grid import PlannedRun, SweepFile

LOG_NAME = "output.log"
"""The file in the run directory with the output of its processes, over all starts."""


@refusing(ValueError, OSError)
def main(arguments: list[str]) -> int:
    parser = make_parser("sweep", __doc__)
    parser.add_argument("sweep", type=as_path, metavar="SWEEP.yaml", help="a sweep file of method grid")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and their commands, and start none")
    options = parser.parse_args(arguments)
    # Imported here, so that --help takes no time.
    from sftron.compare.grid import plan_runs, read_sweep_file

    sweep = read_sweep_file(options.sweep)
    runs = plan_runs(options.sweep, sweep)
    states = [run.state() for run in runs]
    if options.dry_run:
        for run, state in zip(runs, states, strict=True):
            show(f"{state:<9}  {run.name}\n     {shlex.join(run.command)}")
        return 0
    waiting = [run for run, state in zip(runs, states, strict=True) if state != "completed"]
    show(f"sweep      {sweep.name}: {counted(len(runs), 'runs')}, {len(runs) - len(waiting)} completed before")
    status = run_all(waiting)
    report(sweep, runs)
    return status


def run_all(waiting: Sequence[PlannedRun]) -> int:
    """Runs one run after another. Returns the exit status.

    At SIGTERM, SIGUSR1, SIGHUP or Ctrl-C the current run saves and ends, and no other run starts; a second Ctrl-C kills
    it.
    """
    from sftron.data.child_process import heard_signals

    process: subprocess.Popen[bytes] | None = None
    is_stopping = has_failed = False

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal is_stopping
        # Set first: a second signal can be handled in the middle of this function.
        is_second, is_stopping = is_stopping, True
        if process is not None and process.poll() is None:
            with suppress(ProcessLookupError):
                if number == signal.SIGINT and is_second:
                    os.killpg(process.pid, signal.SIGKILL)
                process.terminate()

    before = {number: signal.signal(number, stop) for number in heard_signals()}
    try:
        for run in waiting:
            if is_stopping:
                break
            run.folder.mkdir(parents=True, exist_ok=True)
            # torchrun is in the same folder as the Python interpreter.
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
            with (run.folder / LOG_NAME).open("ab") as log:
                # In its own session: a terminal's Ctrl-C would reach the run a second time.
                process = subprocess.Popen(
                    run.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "PATH": path},
                    start_new_session=True,
                )
            if is_stopping:  # a signal came while this process started
                process.terminate()
            exit_status = _wait_for(process)
            ending = "completed" if exit_status == 0 and run.state() == "completed" else "failed"
            ending = "stopped" if ending == "failed" and is_stopping else ending
            has_failed |= ending == "failed"
            where = f", exit status {exit_status}: see {run.folder / LOG_NAME}" if ending == "failed" else ""
            show(f"{ending:<10} {run.name}{where}")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if is_stopping:
        show("stopped    repeat the command to continue")
    return 1 if has_failed else 0


def _wait_for(process: subprocess.Popen[bytes]) -> int:
    """Returns the exit status. Wakes regularly so that signal handlers run even if the system delivers a signal to
    another thread, as it may while the main thread takes a SIGCHLD; that would not wake a wait without a limit."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=1)


def report(sweep: SweepFile, runs: Sequence[PlannedRun]) -> None:
    from sftron.compare.comparison import compare
    from sftron.compare.recorded_run import read_run

    if recorded := [read_run(run.folder) for run in runs if run.state() != "new"]:
        comparison = compare(f"Sweep {sweep.name}", recorded, num_expected=len(runs), metric=sweep.metric)
        page = comparison.write(runs[0].folder.parent)
        show(f"\n{comparison.as_text()}\n\nreport     {page}")
