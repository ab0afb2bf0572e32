"""Configurations of one library in the environment of a release, each in a process of its own with a time limit.

    python -m tools.failures.cells of_trl packing lora

The libraries are imported once, and each process is a fork. Prints one line of JSON for each configuration.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch

from tools.failures.cell import hush, run
from tools.failures.materials import SCRATCH

SECONDS = 600
"""The most that one configuration may take."""


def _send(module: str, name: str, sender: Connection) -> None:
    sender.send(run(module, name))
    sender.close()


def limited(module: str, name: str) -> dict[str, Any]:
    """Returns what `run` returns in a fork, or why there is nothing, as `broken`."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_send, args=(module, name, sender))
    process.start()
    sender.close()
    try:
        result = receiver.recv() if receiver.poll(SECONDS) else {"broken": f"took longer than {SECONDS} s"}
    except EOFError:
        result = {"broken": "the process ended without a result"}
    process.kill()
    process.join()
    return result


if __name__ == "__main__":
    hush()
    torch.set_num_threads(1)
    __import__(f"tools.failures.{sys.argv[1]}")
    try:
        for configuration in sys.argv[2:]:
            found = limited(sys.argv[1], configuration)
            print("\n" + json.dumps({"configuration": configuration, "result": found}), flush=True)
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)
