"""The run directory, {output_dir}/{run_name}: its lock, its paths, and result.json with the outcome of the run."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sftron.checkpoint.atomic import remove_unfinished, restore_replaced, sync
from sftron.config import Config
from sftron.errors import without_secrets
from sftron.regular_file import read_json_value, read_lines
from sftron.train.logs import console

RESULT, _LOCK = "result.json", "lock"
NOT_FINITE = "loss or gradients not finite"
"""The error in result.json of a run that ended with status 3."""


_LOCKED = set[Path]()
"""The run directories that this process has locked."""


def read_result(folder: Path) -> dict[str, Any]:
    """Reads the result.json of a run directory; returns {} if it is missing or cannot be read.

    If the status is `running` but no process holds the lock, the status becomes `killed`, and `error` names the
    process.
    """
    try:
        result = read_json_value(folder / RESULT)
    except (OSError, ValueError):
        return {}
    if not isinstance(result, dict):
        return {}
    return _killed(result) if result.get("status") == "running" and not _is_locked(folder) else result


def _is_locked(folder: Path) -> bool:
    """Returns whether a run holds the lock of its directory, on whichever machine; also if that cannot be known."""
    # Not tried by the owner itself: the system would release its lock when the file is closed.
    if folder.absolute() in _LOCKED:
        return True
    try:
        with (folder / _LOCK).open("rb") as lock:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


_WARNED = set[str]()
"""The damaged lines that have been reported; the end of a run reads its records several times."""


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSONL file. An incomplete last line, as a kill or a full disk leaves it, is skipped.

    Raises ValueError with the line of any other that is no object with a step.
    """
    for record in _records(path):
        if isinstance(record, ValueError):
            raise record
        yield record


def intact_records(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a JSONL file without damaged lines, of which the first is reported."""
    records = list(_records(path))
    damaged = [str(each) for each in records if isinstance(each, ValueError)]
    if damaged and damaged[0] not in _WARNED:
        console.warn(f"{damaged[0]}. Damaged lines that are left out: {len(damaged)}")
        _WARNED.add(damaged[0])
    return [each for each in records if not isinstance(each, ValueError)]


def _records(path: Path) -> Iterator[dict[str, Any] | ValueError]:
    """Yields the object of each line, or the problem of a line that is no object with a step, or of the file."""
    try:
        for number, line in enumerate(read_lines(path), start=1):
            try:
                record = json.loads(line) if line.strip() else None
                if record is not None and not _has_step(record):
                    raise ValueError("is not an object with a step")
            except (ValueError, RecursionError) as error:
                if line.endswith(b"\n"):
                    yield ValueError(f"{path}:{number}: is damaged ({error}); remove the line")
            else:
                if record is not None:
                    yield record
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        yield ValueError(f"{path}: cannot be read ({error}); move it away")


def _has_step(record: Any) -> bool:
    step = record.get("step") if isinstance(record, dict) else None
    return type(step) is int and 0 <= step < sys.maxsize


def _killed(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the result of a run whose process ended without writing one."""
    return {
        "status": "killed",
        "error": f"{process_name(result)} ended without a result: something killed it, or its machine went down. "
        "Repeat the command to continue from the newest checkpoint",
    }


def process_name(result: dict[str, Any]) -> str:
    """Returns the process of a `running` result: `process 4711 on node-3, started 2026-01-01T12:00:00+00:00`."""
    process = result.get("process")
    if not isinstance(process, dict):
        return "a process that result.json does not name"
    return f"process {process.get('pid')} on {process.get('host')}, started {process.get('started')}"


def _lock(file: int) -> None:
    """Locks a file; waits a moment for a reader, which `_is_locked` may be."""
    for _ in range(5):
        # Not flock: loader workers would inherit the lock, and hold it for seconds after this process is killed.
        with suppress(BlockingIOError, PermissionError):
            return fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.02)
    return fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


class RunDirectory:
    """The paths of a run, and the lock that keeps other runs out. Only the main rank locks and writes."""

    def __init__(self, folder: Path, *, is_main: bool = True) -> None:
        self.is_main = is_main
        self.folder = folder
        self.extended = ""
        """The user's own code that takes part in the run, for result.json."""
        self.checkpoints = folder / "checkpoints"
        self.metrics = folder / "metrics.jsonl"
        self.evaluations = folder / "evaluations.jsonl"
        self.samples = folder / "samples.html"
        self.console_log = folder / "console.log"

    def acquire(self) -> None:
        """Creates the folder, locks it, and cleans up after a killed start.

        Raises ValueError if it cannot be written, or another run holds the lock.
        """
        if not self.is_main:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # The descriptor is never closed: the system releases the lock when the process ends, for whatever reason.
            lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ValueError(
                f"the run directory {self.folder} cannot be written ({error.strerror}); choose another "
                "general.output_dir or general.run_name"
            ) from error
        try:
            _lock(lock)
        except (BlockingIOError, PermissionError):
            owner = os.read(lock, 1000).decode(errors="replace").strip() or "an unknown process"
            os.close(lock)
            raise ValueError(
                f"another run is still using {self.folder} ({owner}); stop it, or choose another general.run_name"
            ) from None
        except OSError as error:  # ENOLCK, EOPNOTSUPP, ENOSYS: NFS without lockd, Lustre without -o flock
            console.warn(
                f"the file system cannot lock {self.folder} ({error.strerror}), so sftron cannot detect a "
                "second run there. Do not start one, or set general.output_dir to a folder on another file system"
            )
        appended = (self.metrics, self.evaluations, self.console_log)
        if irregular := [path for path in appended if path.exists() and not path.is_file()]:
            raise ValueError(f"the run appends to {irregular[0]}, which is not a regular file; move it away")
        _LOCKED.add(self.folder.absolute())
        os.truncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._clean_up_after_kill()

    def _clean_up_after_kill(self) -> None:
        """Cleans up after an earlier start. The caller holds the lock, so it has ended, on whichever machine it ran."""
        result = read_result(self.folder)
        if result.get("status") == "running":
            result = _killed(result)
            self.write_result(**result)
            console.write(f"killed     {result['error']}")
        for parent in (self.checkpoints, self.folder / "hf", self.folder / "adapter"):
            try:
                restored = restore_replaced(parent)
            except OSError as error:
                raise ValueError(f"{error.filename} cannot be renamed: {error.strerror}") from error
            for folder in restored:
                console.write(f"restored   {folder}, which was about to be replaced when the run was killed")
            remove_unfinished(parent)

    def hf(self, step: int) -> Path:
        return self.folder / "hf" / f"step-{step}"

    def adapter(self, step: int) -> Path:
        return self.folder / "adapter" / f"step-{step}"

    def is_exported(self, config: Config, step: int) -> bool:
        """Returns whether all exports of a step are there; a merge that was refused is not expected."""
        if config.lora is None:
            return self.hf(step).is_dir()
        is_merged = not config.lora.merge or self.hf(step).is_dir() or step in self.refused_merges()
        return self.adapter(step).is_dir() and is_merged

    def refused_merges(self) -> set[int]:
        """Returns the steps whose merges were not accepted."""
        with suppress(AttributeError, KeyError, TypeError, ValueError):
            return {int(step) for step, merge in self._merges().items() if not merge["is_accepted"]}
        return set()

    def record_merge(self, step: int, merge: Mapping[str, Any]) -> None:
        """Adds the measurements of a merge to merge_report.json, by its step."""
        self.write("merge_report.json", {**self._merges(), str(step): merge})

    def _merges(self) -> dict[str, Any]:
        try:
            merges = read_json_value(self.folder / "merge_report.json")
        except (OSError, ValueError):
            return {}
        return merges if isinstance(merges, dict) else {}

    def point(self, name: str, target: Path) -> None:
        """Points the link `name` (`latest` or `best`) at the export `target`, by rename.

        If it cannot, a warning is printed, and a link that names another export is removed, if that can be done: it
        would be taken for this one.
        """
        link, aside, older = self.folder / name, self.folder / f"{name}.tmp", ""
        try:
            aside.unlink(missing_ok=True)
            aside.symlink_to(target.relative_to(self.folder))
            aside.replace(link)
            sync(self.folder)  # before result.json may say that the run is complete
        except OSError as error:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            if link.is_symlink() and not self.names(name, target):
                older = f"; it still names {link.readlink()}: remove it"
                with suppress(OSError):
                    link.unlink()
                    older = "; the link to another export is removed"
                    sync(self.folder)
            console.warn(f"{link} cannot name {target} ({error.strerror}){older}")

    def remove_link(self, name: str) -> None:
        """Removes the link `name` if it is there; if it cannot, a warning is printed."""
        link = self.folder / name
        if not link.is_symlink():
            return
        try:
            target = link.readlink()
            link.unlink()
            sync(self.folder)
            why = "no evaluation found it within the current limits"
            console.write(f"removed    the link {link} to {target}: {why}", is_needed=True)
        except OSError as error:
            console.warn(f"{link} cannot be removed ({error.strerror}); remove it")

    def names(self, name: str, target: Path) -> bool:
        """Returns whether the link `name` is there and leads to `target`."""
        return os.path.realpath(self.folder / name) == os.path.realpath(target)

    def write_result(self, status: str, **facts: Any) -> None:
        """Writes result.json; docs/resume.md lists the statuses. The status running gets the process."""
        if status == "running":
            started = datetime.now(UTC).isoformat(timespec="seconds")
            facts["process"] = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
        extended = {"extended": self.extended} if self.extended else {}
        self.write(RESULT, {"status": status, **extended, **facts})

    def add_to_result(self, **facts: Any) -> None:
        """Adds facts to the result.json of this run."""
        if result := read_result(self.folder):
            self.write_result(**result | facts)

    def write(self, name: str, content: str | Mapping[str, Any]) -> None:
        """Writes a file by rename; if it cannot, the old file stays and a warning is logged.

        JSON is written without secrets, and text as it is: a configuration with a secret is refused before, and a page
        has none. A word of a configuration that equals a variable of the environment must stay readable.
        """
        if not self.is_main:
            return
        aside = self.folder / f"{name}.tmp"
        try:
            text = content if isinstance(content, str) else json.dumps(without_secrets(content), indent=1) + "\n"
            aside.unlink(missing_ok=True)  # opening a pipe would block
            aside.write_text(text, encoding="utf-8")
            sync(aside)  # a loss of power may keep the rename without the content
            aside.replace(self.folder / name)
        except OSError as error:
            console.warn(f"{self.folder / name} cannot be written ({error.strerror}); it stays as it was")
            with suppress(OSError):
                aside.unlink(missing_ok=True)
