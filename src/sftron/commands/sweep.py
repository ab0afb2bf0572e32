"""Runs the grid of a sweep file, one run after another: `sftron sweep configs/sweep_toggles.yaml`.

`wandb sweep` takes the same file.

A completed run is skipped, and one that has begun continues from its own checkpoints: to continue a sweep, repeat the
command. A run that fails is reported, and the others are run all the same. At Ctrl-C or SIGTERM the run saves and ends.
At the end report.html, report.json and plots/*.png are written next to the runs.

Exit status: 0 all completed, or stopped on request after saving; 1 a run failed; 2 the file or a configuration is bad.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sftron.commands.arguments import integers, make_parser
from sftron.errors import refuse, show

if TYPE_CHECKING:
    from sftron.sweep.grid import PlannedRun, SweepFile


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("sweep", __doc__)
    parser.add_argument("sweep", type=Path, metavar="SWEEP.yaml", help="a sweep file of method grid")
    parser.add_argument("--only", type=integers, metavar="N[,N]", help="these runs alone, as --dry-run numbers them")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the report goes (default: next to the runs)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write report.json there")
    parser.add_argument(
        "--wandb", choices=("disabled", "offline", "online"), default="disabled", help="of the runs (default disabled)"
    )
    parser.add_argument(
        "--drop-checkpoints", action="store_true", help="remove a run's checkpoints once it is completed"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs, and start none")
    parser.add_argument("--report-only", action="store_true", help="start none; report what there is")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    # Imported here, so that --help takes no time.
    from sftron.sweep.grid import SweepError, plan_runs, read_sweep_file

    try:
        sweep = read_sweep_file(options.sweep)
        runs = plan_runs(sweep, wandb_mode=options.wandb)
        states = [run.state() for run in runs]
        if options.dry_run:
            for number, (run, state) in enumerate(zip(runs, states, strict=True)):
                show(f"{number:>3}  {state:<9}  {run.name}\n     {shlex.join(run.command)}")
            return 0
        wanted = range(len(runs)) if options.only is None else options.only
        if beyond := [number for number in wanted if number not in range(len(runs))]:
            raise SweepError(f"--only {beyond[0]}: the runs are numbered 0 to {len(runs) - 1}")
        out = options.out or runs[0].folder.parent
        if options.out is None and (folders := {run.folder.parent for run in runs}) != {out}:
            raise SweepError(f"the runs are in {len(folders)} folders: give the report's folder with --out")
        status = 0
        if not options.report_only:
            waiting = [runs[number] for number in wanted if states[number] != "completed"]
            show(f"sweep      {sweep.name}: {len(runs)} runs, {len(wanted) - len(waiting)} completed before")
            status = run_them(waiting, options)
        if options.only is None:
            report(sweep, runs, out, options.json)
    except (ValueError, OSError) as error:
        return refuse(error)
    return status


def run_them(waiting: Sequence[PlannedRun], options: argparse.Namespace) -> int:
    """Runs the waiting runs one after another. Returns the exit status."""
    from sftron.sweep.runner import LOG_NAME, Runner

    started, runner, endings = time.monotonic(), Runner(), []
    if waiting:
        show(f"           the output of each run is in {waiting[0].folder.parent}/RUN/{LOG_NAME}")
    for outcome in runner.run_all(waiting):
        endings.append(outcome.ending)
        num_left = len(waiting) - len(endings)
        minutes = (time.monotonic() - started) / len(endings) * num_left / 60
        ahead = f"; about {minutes:.0f} min left" if num_left and not runner.stopping else ""
        show(
            f"{outcome.ending:<10} {outcome.run.name}, {outcome.seconds:.0f} s "
            f"({len(endings)} of {len(waiting)}{ahead}){': ' if outcome.reason else ''}{outcome.reason}"
        )
        if outcome.ending == "completed" and options.drop_checkpoints:
            shutil.rmtree(outcome.run.folder / "checkpoints", ignore_errors=True)
    if runner.stopping:
        show("stopped    repeat the command to continue")
    elif "failed" in endings:
        show(f"failed     {endings.count('failed')} of {len(waiting)} runs; the same command tries them again")
    return 1 if "failed" in endings or ("stopped" in endings and not runner.stopping) else 0


def report(sweep: SweepFile, runs: Sequence[PlannedRun], out: Path, json_path: Path | None) -> None:
    from sftron.sweep.comparison import compare
    from sftron.sweep.recorded_run import read_run

    recorded = [read_run(run.folder) for run in runs if run.state() != "new"]
    if not recorded:
        show("no report  no run has begun")
        return
    comparison = compare(f"Sweep {sweep.name}", recorded, num_expected=len(runs), metric=sweep.metric)
    try:
        page = comparison.write(out, json_copy=json_path)
    except OSError as error:
        raise ValueError(f"the report cannot be written: {error}") from error
    show(f"\n{comparison.as_text()}\n\nreport     {page}")
