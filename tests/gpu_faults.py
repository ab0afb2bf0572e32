"""Stages for tests of tools/gpu.py, of which each has a fault of its own."""

import os
import signal
import sys
import time

from tools.gpu import Parts


class AcceleratorError(RuntimeError):
    """As torch's, after which CUDA refuses everything in the process."""


def raises(parts: Parts) -> None:
    def fail() -> None:
        raise ValueError("the loss is 3, not 4")

    parts.run("one", fail)
    parts.run("two", process_of_part)


def breaks_the_device(parts: Parts) -> None:
    def fail() -> None:
        raise AcceleratorError("CUDA error: an illegal memory access")

    parts.run("zero", process_of_part)
    parts.run("one", fail)
    parts.run("two", process_of_part)


def hangs(parts: Parts) -> None:
    parts.run("one", lambda: time.sleep(60))
    parts.run("two", process_of_part)


def is_killed(parts: Parts) -> None:
    parts.run("one", lambda: os.kill(os.getpid(), signal.SIGKILL))
    parts.run("two", process_of_part)


def exits(parts: Parts) -> None:
    parts.run("one", process_of_part)
    sys.exit("no device is left")


def lacks_a_package(parts: Parts) -> None:
    parts.run("one", process_of_part, needs=["no_such_package"])


def passes(parts: Parts) -> None:
    parts.run("one", process_of_part)


def takes_its_time(parts: Parts) -> None:
    parts.run("one", process_of_part)
    parts.run("two", lambda: time.sleep(float(os.environ.get("SECONDS_OF_A_PART", "0"))))


def process_of_part() -> dict[str, int]:
    return {"pid": os.getpid()}
