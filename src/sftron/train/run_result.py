"""result.json: how a run ended, or which process runs it, and what has become of that process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULT = "result.json"
_PROC = Path("/proc")


def read_result(folder: Path) -> dict[str, Any]:
    """Reads the result.json of a run directory; empty where there is none that can be read.

    A run whose file says `running` is `killed` where its process is known to be gone; `error` then names the process.
    """
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(result, dict):
        return {}
    if result.get("status") == "running" and is_gone(result.get("process")):
        return killed(result)
    return result


def killed(result: dict[str, Any]) -> dict[str, Any]:
    """The result of a run that was `running` when its process ended without a word."""
    return {
        "status": "killed",
        "error": f"{process_name(result)} is gone, and wrote no result: it was killed, or its machine went down. The "
        "same command goes on from the newest checkpoint",
    }


def process_name(result: dict[str, Any]) -> str:
    """`process 4711 on node-3, started 2026-01-01T12:00:00+00:00`, of a run that is `running`."""
    process = result.get("process")
    if not isinstance(process, dict):
        return "a process that result.json does not name"
    return f"process {process.get('pid')} on {process.get('host')}, started {process.get('started')}"


def this_process() -> dict[str, Any]:
    """What tells this process from every other, also from a later one with the same number.

    {"pid", "host", "started": for people, "start": the system's own word for it, "machine": see `machine`}.
    """
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "start": _start_of(os.getpid()),
        "machine": machine(),
    }


def is_gone(process: Any) -> bool | None:
    """Whether a process that `this_process` has described has ended; None where that cannot be known from here, as of
    another machine, of this one before it was started again, or of another container."""
    if not isinstance(process, dict) or process.get("machine") != machine():
        return None
    pid, start = process.get("pid"), process.get("start")
    if type(pid) is not int or pid <= 0 or not isinstance(start, str):
        return None
    return _start_of(pid) != start


def machine() -> str:
    """Equal where a process id means the same process: containers may share a host's name and not see each other's."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _start_of(pid: int) -> str | None:
    """When a process was started, as the system counts it; None where there is none, or it has ended."""
    if not (_PROC / "self/stat").exists():
        shown = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return shown.stdout.strip() or None
    try:
        # The name, in brackets, may hold anything; behind it come the state and, 19 fields on, the start in ticks.
        fields = (_PROC / f"{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()
