"""Tries sftron on a GPU, stage by stage, and reports what passed, what failed, and how fast it is.

    python tools/gpu.py                              all stages, in about ten minutes on one GPU
    python tools/gpu.py --only step kernels          only these
    python tools/gpu.py --budget 540                 stops in time; the same command again goes on
    python tools/gpu.py --pretend                    stages 1 to 6 on a device that computes on the CPU

Needs torch, triton and transformers, and no installation of sftron. A stage is a process of its own and consists of
parts, each of which is written to --out as it ends. A part that fails, hangs or kills its process does not stop the
next: the stage is started again after it. What needs a package that is missing is skipped by name. Called again with
the same --out, only what has no result yet is run. The exit status is 1 if a part failed, and 2 for unusable arguments.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # makes sftron and tools importable without an installation

FAILED, SKIPPED, PASSED, NOT_PRETENDED = "FAILED", "skipped", "passed", "not on the stand-in"
_STARTED, _ENDED = "started", "ended"
_START, _WHOLE = "the start", ""
"""The names of the parts of a stage before its first part, and of the stage itself."""
_LEAST_TIME = 5.0
"""No stage is started with fewer seconds of the budget left."""
_PACKAGES = (
    *("torch", "triton", "transformers", "flash-attn", "flash-attn-3", "flash-attn-4", "kernels", "liger-kernel"),
    *("peft", "bitsandbytes", "flash-linear-attention", "pydantic", "datasets", "torchdata", "pytest"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    function: str
    """The module and the function, as in tools.gpu_stages:step, which takes Parts."""
    limit: float
    """The seconds that one part may take."""
    is_pretended: bool = True
    launches_kernels: bool = False
    """Whether the stand-in interprets our kernels instead of computing torch's expressions."""


_HOME = "tools.gpu_stages"
STAGES = {
    "apis": Stage(function=f"{_HOME}:apis", limit=120),
    "step": Stage(function=f"{_HOME}:step", limit=90),
    "kernels": Stage(function=f"{_HOME}:kernels", limit=150, launches_kernels=True),
    "nccl": Stage(function=f"{_HOME}:nccl", limit=60),
    "runs": Stage(function=f"{_HOME}:runs", limit=120),
    "speed": Stage(function="tools.gpu_speed:speed", limit=150, is_pretended=False),
    "families": Stage(function=f"{_HOME}:families", limit=60),
    "compile": Stage(function="tools.gpu_speed:compiled", limit=120, is_pretended=False),
    "tests": Stage(function=f"{_HOME}:tests", limit=300, is_pretended=False),
}
"""The stages by worth: what is first is done if the time is not enough for all."""


class SkippedError(Exception):
    """A part cannot run here; the message names what is missing."""


class Results:
    """The lines of the file: one when a part starts, one when it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, stage: str, part: str, status: str, **facts: Any) -> None:
        line = json.dumps({"stage": stage, "part": part, "status": status, **facts}) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Returns the last line of each part, in the order of these lines."""
        if not self.path.exists():
            return {}
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for line in map(json.loads, self.path.read_text(encoding="utf-8").splitlines()):
            key = line["stage"], line["part"]
            found.pop(key, None)
            found[key] = line
        return found

    def has_ended(self, stage: str, part: str = _WHOLE) -> bool:
        """Returns whether there is a result; a part that was skipped is tried again."""
        return self.read().get((stage, part), {}).get("status") in (FAILED, PASSED, NOT_PRETENDED, _ENDED)

    def of_stage(self, stage: str) -> list[dict[str, Any]]:
        return [line for (name, part), line in self.read().items() if name == stage and part != _WHOLE]


# --- In the process of a stage ---


class Parts:
    """Runs the parts of a stage that have no result yet, and writes the result of each."""

    def __init__(self, results: Results, stage: str, *, is_pretended: bool) -> None:
        self._results, self._stage, self.is_pretended = results, stage, is_pretended

    def run(self, name: str, measure: Callable[[], dict[str, Any] | None], *, needs: Sequence[str] = ()) -> None:
        """Runs a part.

        Args:
            measure: Returns the numbers of the report. An exception is the reason of the failure.
            needs: The modules without which the part is skipped.
        """
        if self._results.has_ended(self._stage, name):
            return
        started = time.perf_counter()
        self._results.write(self._stage, name, _STARTED)
        facts: dict[str, Any] = {}
        is_broken = False
        try:
            if missing := [each for each in needs if find_spec(each) is None]:
                raise SkippedError(f"{', '.join(missing)} not installed")
            status, facts["numbers"] = PASSED, measure() or {}
        except SkippedError as error:
            status, facts["reason"] = SKIPPED, str(error)
        except Exception as error:
            traceback.print_exc()
            status, facts["reason"] = FAILED, _reason(error)
            is_broken = type(error).__name__ == "AcceleratorError"
        self._results.write(self._stage, name, status, seconds=round(time.perf_counter() - started, 1), **facts)
        if is_broken:  # CUDA refuses all that follows in this process
            raise SystemExit(1)

    def not_on_stand_in(self, name: str, reason: str) -> bool:
        """Names a part that the stand-in cannot compute. Returns whether this is the stand-in."""
        if self.is_pretended:
            self._results.write(self._stage, name, NOT_PRETENDED, reason=reason)
        return self.is_pretended


def _reason(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno})"


def run_stage(name: str, stage: Stage, results: Results, *, is_pretended: bool) -> None:
    """Runs a stage in this process."""
    parts = Parts(results, name, is_pretended=is_pretended)
    results.write(name, _START, _STARTED)
    if is_pretended:
        import tests.pretended

        device = tests.pretended.pretended_gpu(launches_kernels=stage.launches_kernels)
    else:
        device = nullcontext()
    module, _, function = stage.function.partition(":")
    with device:
        run = getattr(importlib.import_module(module), function)
        results.write(name, _START, PASSED)
        run(parts)


# --- In the first process ---


_OF_STAND_IN = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def watch(name: str, stage: Stage, results: Results, *, is_pretended: bool, deadline: float) -> bool:
    """Runs the process of a stage until it ends, a part takes longer than its limit, or the deadline is reached.
    Returns whether the stage has to be started again after a part that ended its process."""
    command = [sys.executable, __file__, "--out", str(results.path), "--stage", name, stage.function]
    command += ["--pretend"] * is_pretended + ["--launches-kernels"] * stage.launches_kernels
    env = os.environ | (_OF_STAND_IN if is_pretended else {})
    log = results.path.with_suffix(f".{name}.log")
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, env=env, start_new_session=True)
    reason, size, since = "", -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.05)
        if (now := results.path.stat().st_size) != size:
            size, since = now, time.monotonic()
        if time.monotonic() > deadline or time.monotonic() - since > stage.limit:
            reason = f"no result within {stage.limit:g} s" if time.monotonic() <= deadline else "the budget is spent"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if time.monotonic() > deadline:
        return False
    last = results.of_stage(name)[-1:]
    is_open = bool(last) and last[0]["status"] == _STARTED
    if process.returncode == 0:
        results.write(name, _WHOLE, _ENDED)
        return False
    if not reason and process.returncode < 0:
        reason = f"killed by {signal.Signals(-process.returncode).name}"
    if not reason:
        printed = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        reason = f"exit status {process.returncode}: {printed[:300]}"
    if is_open or not last:
        part = last[0]["part"] if last else _START
        results.write(name, part, FAILED, reason=reason)
        if part == _START:
            results.write(name, _WHOLE, _ENDED)
            return False
        return True
    if last[0]["status"] == FAILED:  # the part was written, and then the process ended itself
        return True
    results.write(name, "the end", FAILED, reason=reason)
    results.write(name, _WHOLE, _ENDED)
    return False


def run_all(names: Sequence[str], results: Results, options: argparse.Namespace) -> list[str]:
    """Runs the stages that have no result yet. Returns the names of those for which there was no time."""
    deadline, not_run = time.monotonic() + options.budget, list[str]()
    for name in names:
        stage = STAGES[name]
        if options.pretend and not stage.is_pretended:
            results.write(name, _START, NOT_PRETENDED, reason="it needs a GPU")
            continue
        is_skipped = any(line["status"] == SKIPPED for line in results.of_stage(name))
        if results.has_ended(name) and not is_skipped:
            continue
        again = True
        while again and (is_in_time := deadline - time.monotonic() > _LEAST_TIME):
            again = watch(name, stage, results, is_pretended=options.pretend, deadline=deadline)
        if not is_in_time or time.monotonic() > deadline:
            not_run.append(name)
        print(f"{name}: {_summary(results.of_stage(name))}", flush=True)
    return not_run


def _summary(lines: Sequence[dict[str, Any]]) -> str:
    counts = {status: sum(line["status"] == status for line in lines) for status in (PASSED, FAILED, SKIPPED)}
    return ", ".join(f"{number} {status}" for status, number in counts.items() if number) or "nothing"


def report(names: Sequence[str], results: Results, not_run: Sequence[str], command: Sequence[str]) -> str:
    """Returns the date, the versions, the command, and a table of all parts, in Markdown."""
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    table = ["| stage | part | result | s | numbers |", "| --- | --- | --- | ---: | --- |"]
    for name in names:
        for line in results.of_stage(name):
            if line["part"] == _START and line["status"] == PASSED:
                continue
            numbers = ", ".join(f"{key} {_short(value)}" for key, value in line.get("numbers", {}).items())
            text = (line.get("reason") or numbers).replace("|", "\\|")
            status = "cut off" if line["status"] == _STARTED else line["status"]
            table.append(f"| {name} | {line['part']} | {status} | {line.get('seconds', '')} | {text} |")
    table += [f"| {name} | | cut off | | the budget is spent: run the same command again |" for name in not_run]
    head = f"{datetime.date.today()}, Python {sys.version.split()[0]}, {', '.join(versions)}"
    return "\n\n".join([head, f"```\n{shlex.join(command)}\n```", "\n".join(table)]) + "\n"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/gpu.jsonl"), metavar="FILE", help="results (default: %(default)s)")
    add("--only", nargs="+", choices=tuple(STAGES), metavar="STAGE", help=f"of {', '.join(STAGES)} (default: all)")
    add("--budget", type=float, default=3600.0, metavar="S", help="seconds for all (default: %(default).0f)")
    add("--pretend", action="store_true", help="on a device that computes on the CPU, with tiny sizes")
    add("--stage", nargs=2, help=argparse.SUPPRESS)
    add("--launches-kernels", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    results = Results(options.out.absolute())
    if options.stage:
        name, function = options.stage
        stage = Stage(function=function, limit=0, launches_kernels=options.launches_kernels)
        run_stage(name, stage, results, is_pretended=options.pretend)
        return 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    first = results.read().get(("", ""), {"is_pretended": options.pretend})
    if first["is_pretended"] != options.pretend:
        kinds = {True: "the stand-in", False: "a GPU"}
        wrong = f"{options.out} has results of {kinds[first['is_pretended']]}, not of {kinds[options.pretend]}"
        print(f"gpu: {wrong}: give another --out", file=sys.stderr)
        return 2
    results.write("", "", _ENDED, is_pretended=options.pretend)
    names = options.only or list(STAGES)
    not_run = run_all(names, results, options)
    text = report(names, results, not_run, ["python", "tools/gpu.py", *arguments])
    options.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    return int(any(line["status"] == FAILED for name in names for line in results.of_stage(name)))


if __name__ == "__main__":
    from tools import gpu  # the classes of a stage are those of this module, not of __main__

    sys.exit(gpu.main(sys.argv[1:]))
