"""A zoo of broken and sound trainers on several ranks, for verify_trainer.

    python -m tests.sftcheck.rank_zoo                   # prints one line for each set-up
    python -m tests.sftcheck.rank_zoo --only NAME ...
    python -m tests.sftcheck.rank_zoo --prove           # measures that each is what it claims, without sftron

Each set-up is a function that returns the trainer, on every rank; its docstring says what is wrong. The ranks are
processes on this machine, over gloo.
"""

import argparse
import json
import os
import socket
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

# They add their set-ups to RANK_ZOO.
import tests.sftcheck.rank_zoo_parts
import tests.sftcheck.rank_zoo_rows  # noqa: F401
from tests.sftcheck.rank_materials import RANK_ZOO
from tests.sftcheck.set_up import SetUp
from tests.sftcheck.trainer_zoo import hush

_TIME_LIMIT_S = 60


def run(set_up: SetUp, prove: bool) -> dict[str, Any]:
    """Verifies or proves one set-up, on every rank. Its result has no `problem` if it is as expected."""
    from accelerate.state import AcceleratorState

    started, rows, faults = time.monotonic(), {}, {}
    AcceleratorState._reset_state()
    try:
        trainer = set_up.make()
        if prove:
            problem = "" if set_up.proof(trainer) else "the proof does not hold"
        else:
            from sftron import verify_trainer

            report = verify_trainer(trainer, time_limit=_TIME_LIMIT_S)
            rows = {row.name: (row.status, row.measured) for row in report.checks}
            faults = {row.name: row.faults for row in report.failed}
            problem = set_up.problem(report)
    except Exception as error:
        if "--trace" in sys.argv:
            traceback.print_exc()
        problem = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    seconds = time.monotonic() - started
    return {"name": set_up.name, "problem": problem, "rows": rows, "faults": faults, "seconds": seconds}


def _rank(rank: int, num_ranks: int, port: int, names: list[str], prove: bool, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    hush()
    dist.init_process_group("gloo")
    with (Path(folder) / f"{rank}.jsonl").open("a", encoding="utf-8") as file:
        for name in names:
            result = run(RANK_ZOO[name], prove)
            file.write(json.dumps(result) + "\n")
            file.flush()
            if rank == 0:
                print(shown(result), flush=True)
                for row, (status, measured) in result["rows"].items() if result["problem"] else ():
                    print(f"     {status} {row}: {measured}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def shown(result: dict[str, Any]) -> str:
    failed = ", ".join(name for name, (status, _) in result["rows"].items() if status == "FAIL") or "nothing"
    verdict = f"NOT as expected: {result['problem']}" if result["problem"] else "as expected"
    mark, expected = "!!" if result["problem"] else "ok", ", ".join(RANK_ZOO[result["name"]].fails) or "sound"
    return f"{mark} {result['name']:34} {expected:34} {failed:34} {result['seconds']:5.1f} s  {verdict}"


def results(names: list[str], folder: Path, prove: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Returns the results of set-ups on all ranks, by name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for num_ranks in sorted({RANK_ZOO[name].ranks for name in names}):
        chosen = [name for name in names if RANK_ZOO[name].ranks == num_ranks]
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        own = folder / str(num_ranks)
        own.mkdir(parents=True, exist_ok=True)
        torch.multiprocessing.spawn(_rank, (num_ranks, port, chosen, prove, str(own)), nprocs=num_ranks)
        for rank in range(num_ranks):
            for line in (own / f"{rank}.jsonl").read_text(encoding="utf-8").splitlines():
                result = json.loads(line)
                found.setdefault(result["name"], []).append(result)
    return found


def main() -> int:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(RANK_ZOO), choices=list(RANK_ZOO), metavar="NAME")
    parser.add_argument("--prove", action="store_true", help="run the proofs instead of verify_trainer")
    parser.add_argument("--trace", action="store_true", help="print tracebacks")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = results(chosen.only, Path(folder), chosen.prove)
    wrong = [name for name, ranks in found.items() if any(each["problem"] for each in ranks)]
    print(f"{len(found)} set-ups, {len(found) - len(wrong)} as expected, {len(wrong)} not: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
