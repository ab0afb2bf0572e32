"""Train under simulated faults, and see that nothing is lost: `python -m tests.simulator.simulate --seed 7` replays one
seed, `python -m tests.simulator.simulate [--runs 10000] [--first-seed 0] [--workers 1] [--out FILE.json]` runs many.

A seed decides the settings of a run, its layouts, the order in which ranks go on, and all faults. Real lanes, loader,
saves and resumes run over a simulated disk, clock, ranks and workers (tests/simulator); docs/decisions.md says what is
simulated. Exit 1 if anything did not hold, with the schedule of the seed.
"""

import argparse
import json
import multiprocessing
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sftron import __version__
from sftron.errors import exit_with, show
from tests.simulator.drill import Drill, Found
from tests.simulator.life import Clock
from tests.simulator.run import simulated

_SEEDS_AT_ONCE = 50


def run_seeds(seeds: range, *, on_event: Callable[[str], object] = lambda event: None) -> Iterator[Found]:
    """Yields what each seed shows. The folders are in memory where there is /dev/shm."""
    torch.set_num_threads(1)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        ends: dict[str, Any] = {}
        for seed in seeds:
            clock = Clock()
            with simulated(clock):
                found = Drill(seed, Path(folder), clock, ends, on_event=on_event).run()
            yield found


def _run_chunk(seeds: range) -> list[Found]:
    return list(run_seeds(seeds))


def _run_all(seeds: range, num_workers: int) -> Iterator[Found]:
    chunks = [seeds[start : start + _SEEDS_AT_ONCE] for start in range(0, len(seeds), _SEEDS_AT_ONCE)]
    if num_workers == 1:
        yield from run_seeds(seeds)
        return
    with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
        for found in pool.imap(_run_chunk, chunks):
            yield from found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, metavar="N", help="replay this seed: print its schedule and its digest")
    parser.add_argument("--trace", action="store_true", help="with --seed, print every event too")
    parser.add_argument("--runs", type=int, default=1000, metavar="N")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="the number of processes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what was run and found to this file, as JSON")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error(f"--runs {options.runs}: wanted at least 1, as no run shows nothing")
    if options.workers < 1:
        parser.error(f"--workers {options.workers}: wanted at least 1")
    if options.trace and options.seed is None:
        parser.error("--trace prints the events of one seed; give it (--seed N)")
    if options.out and options.seed is not None:
        parser.error("--out takes the numbers of many runs, and --seed is one; give one of the two")
    if options.out and not options.out.parent.is_dir():  # before hours of runs
        parser.error(f"--out {options.out}: {options.out.parent} is no folder; make it, or give another file")
    if options.seed is not None:
        (found,) = run_seeds(
            range(options.seed, options.seed + 1), on_event=show if options.trace else lambda event: None
        )
        _print(found)
        show(f"digest {found.digest}")
        return 1 if found.violations else 0
    began, faults, failures = time.monotonic(), Counter[str](), list[dict[str, Any]]()
    seeds = range(options.first_seed, options.first_seed + options.runs)
    for found in _run_all(seeds, options.workers):
        faults += found.faults
        if found.violations:
            failures.append({"seed": found.seed, "violations": found.violations, "schedule": found.schedule})
            _print(found)
    seconds = time.monotonic() - began
    show(
        f"{len(seeds)} runs in {seconds:.0f} s; faults: {', '.join(f'{n} {kind}' for kind, n in faults.most_common())}"
    )
    show(f"seeds that failed: {', '.join(str(each['seed']) for each in failures) or 'none'}")
    if options.out:
        versions = {"sftron": __version__, "torch": torch.__version__, "python": platform.python_version()}
        found = {"runs": len(seeds), "first_seed": seeds.start, "seconds": round(seconds), "faults": faults}
        found |= {"failures": failures, "date": datetime.now(UTC).date().isoformat(), "versions": versions}
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if failures else 0


def _print(found: Found) -> None:
    show(f"seed {found.seed}: {f'{len(found.violations)} violated' if found.violations else 'everything held'}")
    for line in found.schedule:
        show(f"    {line}")
    for line in found.violations:
        show(f"  VIOLATED  {line}")


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
