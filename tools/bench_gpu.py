"""All that needs a GPU, in one command under ten minutes: the tests marked gpu, the kernels, whole steps.

    make bench-gpu                    or, without make:
    python tools/bench_gpu.py --out docs/benchmarks/gpu.md

Needs torch with CUDA, triton and transformers; pytest and hypothesis for the tests, liger-kernel to be compared with.
Exit status: 0 all ran and no test failed, 1 something failed (the report says what), 2 there is no GPU.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

PARTS: dict[str, tuple[list[str], int]] = {
    "Tests that need a GPU": (
        ["-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests/kernels", "tests/models"],
        120,
    ),
    "Kernels": (["tools/bench_kernels.py"], 150),
    "Steps": (["tools/bench_step.py", "--device", "cuda"], 300),
}
"""What is run, and the seconds after which it is given up; 570 in all."""


def run_part(arguments: list[str], limit_s: float) -> tuple[str, str]:
    """What it printed, and what went wrong, if anything did. Its standard error goes to the console."""
    if "pytest" in arguments and (missing := [name for name in ("pytest", "hypothesis") if not has(name)]):
        return "", f"left out, as {' and '.join(missing)} are not installed"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(["src", os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    }
    command = [sys.executable, *arguments]
    # A session of its own, so that what the part has started, compilers among it, ends with it: each holds the pipe.
    started = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        printed, _ = started.communicate(timeout=limit_s)
    except BaseException as error:
        os.killpg(started.pid, signal.SIGKILL)
        printed, _ = started.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return printed, f"FAILED: given up after {limit_s:.0f} s"
    return printed, f"FAILED with exit status {started.returncode}" if started.returncode else ""


def has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def main(parts: dict[str, tuple[list[str], int]] = PARTS) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the report")
    parser.add_argument("--without-gpu", action="store_true", help="run all the same, to see that it works")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available() and not options.without_gpu:
        print("bench_gpu: torch sees no GPU; nothing was run", file=sys.stderr)
        return 2
    sections, num_failed = [], 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for title, (arguments, limit_s) in parts.items():
        started = time.perf_counter()
        printed, problem = run_part(arguments, limit_s)
        num_failed += problem.startswith("FAILED")
        took = f"{time.perf_counter() - started:.0f} s"
        body = f"```\n{printed.strip()}\n```" if "pytest" in arguments else printed.strip()
        sections.append("\n\n".join(part for part in (f"# {title} ({took})", problem, body) if part))
        print(sections[-1], flush=True)
        # After each part, so that what was measured is kept whatever comes later.
        options.out.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    print(f"\nthe report: {options.out}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
