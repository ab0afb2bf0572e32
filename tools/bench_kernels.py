"""Kernels timed by turns with what they replace: RoPE, attention, loss, RMSNorm and SwiGLU.

    python tools/bench_kernels.py --out docs/benchmarks/kernels-gpu.md --json kernels.json
    python tools/bench_kernels.py --device cpu --quick      shows that it runs; these times mean nothing

Needs torch, triton and transformers; Liger's kernels are timed where liger_kernel is installed. Every result is
checked before it is timed. Exit status: 0 measured, whatever the targets; 1 a result is wrong, so that nothing was
timed after it; 2 the arguments cannot be used.
"""

import argparse
import datetime
import importlib.util
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

# The cases and sftron itself are found without an installation too.
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from tools.bench.kernels import CASES, QUICK, Case, Sizes, Target, Way

TOLERANCE = 0.02
"""Root mean square of the error as a share of the reference's; rounding to bf16 gives 0.002 to 0.006."""

FLUSH_BYTES, SLEEP_CYCLES = 2**28, 10**7
"""Read before each run, four times the largest L2 cache; then 5 ms, in which the host launches what is timed."""

HOW = (
    "Medians and quartiles of {rounds} rounds, each way once a round, between CUDA events. Before each the L2 cache "
    "is emptied, and launches are queued so that the host's time is not in it. Rates are by the least bytes or "
    "operations that the computation takes. Extra memory is the peak above what was held before, results included."
)


class WrongResultError(Exception):
    """Two ways do not compute the same."""


def measure(case: Case, rounds: int, device: torch.device) -> dict[str, Any]:
    """Times in ms, rates and memory of each way, after its result was checked; targets against what was measured."""
    reference = case.reference()
    ways, left_out = [], list(case.left_out)
    for way in case.ways:
        try:
            check(case.title, way, reference)
            ways.append(way)
        except torch.OutOfMemoryError:
            left_out.append(f"{way.name}, the device's memory does not hold it")
    del reference
    peaks = {way.name: extra_gb(way.run, device) for way in ways}
    flush = torch.zeros(FLUSH_BYTES // 4 if device.type == "cuda" else 0, dtype=torch.int32, device=device)
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            times[way.name].append(milliseconds(way.run, flush))
    scale = 1e6 if case.unit == "GB/s" else 1e9
    measured = {
        name: {
            "ms": median(each),
            "quartiles": [quantiles(each, n=4, method="inclusive")[i] for i in (0, 2)],
            "rate": case.work / median(each) / scale,
            "extra GB": peaks[name],
        }
        for name, each in times.items()
    }
    targets = [found for target in case.targets if (found := against(target, measured))]
    return {"title": case.title, "unit": case.unit, "ways": measured, "targets": targets, "left out": left_out}


def check(title: str, way: Way, reference: Sequence[Tensor]) -> None:
    """Raises: WrongResultError where a result of `way` differs from the reference by more than rounding."""
    found = way.run()
    for i, (ours, exact) in enumerate(zip(found, reference, strict=True) if way.is_checked else ()):
        error = ((ours.float() - exact.float()).square().mean().sqrt() / exact.float().square().mean().sqrt()).item()
        if not error < TOLERANCE:
            raise WrongResultError(
                f"{title}: output {i} of {way.name} is off by {error:.3g} of the reference's root mean square, "
                f"rounding explains less than {TOLERANCE}. Nothing is timed that computes something else."
            )


def extra_gb(run: Callable[[], object], device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 1e9


def milliseconds(run: Callable[[], object], flush: Tensor) -> float:
    if not flush.is_cuda:
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3
    flush.sum()  # read, not written: dirty lines would be written back while the run is timed
    torch.cuda._sleep(SLEEP_CYCLES)
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    run()
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended)


def against(target: Target, measured: dict[str, Any]) -> dict[str, Any] | None:
    """None where one of the ways was left out."""
    names = [target.way, *([target.other] if target.other else [])]
    if not all(name in measured for name in names):
        return None
    if target.other:
        value = measured[target.way]["ms"] / measured[target.other]["ms"]
    else:
        value = measured[target.way]["extra GB"]
    if value is None:
        return None
    is_met = value <= target.bound if target.is_most else value >= target.bound
    wanted = f"at {'most' if target.is_most else 'least'} {target.bound:.3g} {target.text}"
    return {"target": wanted, "measured": value, "met": is_met}


def markdown(results: dict[str, Any]) -> str:
    parts = [
        "# Kernels, timed by turns",
        ", ".join(f"{name} {value}" for name, value in results["machine"].items()),
        f"```\n{results['command']}\n```",
        results["how"],
    ]
    for case in results["cases"]:
        lines = [f"| | ms | quartiles | {case['unit']} | extra GB |", "|---|---:|---:|---:|---:|"]
        for name, way in case["ways"].items():
            low, high = way["quartiles"]
            extra = "-" if way["extra GB"] is None else f"{way['extra GB']:.2f}"
            lines.append(f"| {name} | {way['ms']:.4g} | {low:.4g} to {high:.4g} | {way['rate']:.4g} | {extra} |")
        notes = [
            f"- target {each['target']}: measured {each['measured']:.3g}: {'met' if each['met'] else 'MISSED'}"
            for each in case["targets"]
        ]
        notes += [f"- left out: {each}" for each in case["left out"]]
        parts += [f"## {case['title']}", "\n".join(lines), *(["\n".join(notes)] if notes else [])]
    return "\n\n".join(parts) + "\n"


def machine(device: torch.device) -> dict[str, str]:
    packages = ("torch", "triton", "transformers", "liger_kernel", "flash_attn")
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages if importlib.util.find_spec(name)},
    }


def main() -> int:
    options = parse_arguments()
    device = torch.device(options.device)
    sizes, rounds = (QUICK, 2) if options.quick else (Sizes(), options.rounds)
    if options.quick:
        torch.set_num_threads(1)  # on a busy machine, threads for 64 tokens wait for each other
    torch.manual_seed(0)
    results: dict[str, Any] = {
        "machine": machine(device),
        "command": shlex.join(["python", *sys.argv]),
        "how": "Times of a --quick run or of a CPU mean nothing."
        if options.quick or device.type == "cpu"
        else HOW.format(rounds=rounds),
        "cases": [],
    }
    for name in options.cases:
        for case in CASES[name](sizes, device):
            started = time.perf_counter()
            try:
                results["cases"].append(measure(replace(case, targets=()) if options.quick else case, rounds, device))
            except WrongResultError as error:
                print(error, file=sys.stderr)
                return 1
            print(f"{case.title}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    report = markdown(results)
    print(report)
    if options.out:
        options.out.write_text(report, encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda", help="default: %(default)s")
    add("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES), help="default: all")
    add("--rounds", type=int, default=20, help="default: %(default)s")
    add("--quick", action="store_true", help="tiny shapes and two rounds")
    add("--out", type=Path, metavar="FILE", help="the report, in Markdown")
    add("--json", type=Path, metavar="FILE", help="every number")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --quick shows that it runs")
    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu wants --quick: full shapes take hours on a CPU")
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: quartiles want at least 2")
    return options


if __name__ == "__main__":
    sys.exit(main())
