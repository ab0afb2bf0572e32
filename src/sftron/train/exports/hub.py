"""Pushes exports of a run to a repository on the Hub. A push delays no step, and a failure loses no local export.

Each push is a process of its own: it takes no time from the interpreter that trains, and one that hangs can be ended.
"""

from __future__ import annotations

import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftron.config import Hub
from sftron.errors import show
from sftron.train.logs import console

_WAITS_S = (10.0, 30.0, 60.0, 120.0)
"""The waits before the second and later attempts of a push."""
_LEAST_TIME_S, _LEAST_BYTES_PER_S = 300.0, 1e6
"""A push may take five minutes, and longer where its bytes would take longer at this speed."""
_SHORT_TIME_S = 5.0
"""The wait for pushes after a failure or a signal, which is soon followed by another one on most clusters."""
_TIME_TO_NOTICE_S = 0.2
"""A signal shortens the wait after at most this time."""


@dataclass(frozen=True, slots=True)
class Push:
    """The push of one export."""

    folder: Path
    path_in_repo: str
    """The folder in the repository; "." is its root."""
    step: int

    @property
    def seconds(self) -> float:
        """The longest time that an attempt may take."""
        size = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        return _LEAST_TIME_S + size / _LEAST_BYTES_PER_S

    def command(self, options: Hub) -> str:
        """Returns the command that does the same by hand."""
        words = ["hf", "upload", str(options.push_to), str(self.folder), self.path_in_repo]
        words += ["--private" if options.private else "--no-private", "--commit-message", f"step {self.step}"]
        return shlex.join(words)


class HubPusher:
    """Pushes exports one after another, in a thread that begins with the first; on the main rank of a run."""

    def __init__(self, options: Hub, run_folder: Path) -> None:
        self._options, self._run_folder = options, run_folder
        self._jobs: queue.Queue[Push | None] = queue.Queue()
        self._folders: set[Path] = set()
        self._waiting: list[Push] = []
        self._pushed: list[str] = []
        self._failed: dict[str, str] = {}
        self._thread = threading.Thread(target=self._work, name="pushes to the Hub", daemon=True)
        self._is_over = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # for the two: once the run is over, no process starts and no outcome changes

    def start(self) -> None:
        """Starts the thread, which first compares the owner of the repository with that of the token."""
        self._thread.start()

    def push(self, folder: Path, step: int, path_in_repo: str = ".") -> None:
        """Pushes a folder as soon as the earlier ones are pushed, once. Returns at once."""
        if folder not in self._folders:
            self._folders.add(folder)
            push = Push(folder, path_in_repo, step)
            self._waiting.append(push)
            self._jobs.put(push)

    def finish(self, should_hurry: Callable[[], bool]) -> dict[str, Any]:
        """Waits for the pushes, as long as their sizes allow, and ends those that are not done.

        Args:
            should_hurry: Returns whether the run has failed or is to stop; then the wait is short. A Ctrl-C that raises
                KeyboardInterrupt ends the wait.

        Returns:
            The facts for result.json.
        """
        self._jobs.put(None)
        with suppress(KeyboardInterrupt):
            if not should_hurry():
                self._wait(sum(push.seconds for push in list(self._waiting)), until=should_hurry)
            if should_hurry():
                self._wait(_SHORT_TIME_S)
        with self._lock:
            self._is_over.set()
            if self._process is not None:
                self._process.kill()
        for push in self._waiting:
            self._failed[self._name(push)] = problem = "the push was not done in time"
            self._warn(push, problem)
        return {"repository": self._options.push_to, "pushed": self._pushed, "failed": self._failed}

    def _wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Waits until all pushes are done, the seconds are over, or `until` returns True."""
        if not self._waiting:
            return
        console.write(f"hub        pushing to {self._options.push_to}; the run waits for at most {seconds:,.0f} s")
        end = time.monotonic() + seconds
        while self._thread.is_alive() and not until() and (left := end - time.monotonic()) > 0:
            self._thread.join(min(left, _TIME_TO_NOTICE_S))

    def _work(self) -> None:
        problem = self._run("check", str(self._options.push_to), seconds=_LEAST_TIME_S)
        if problem and not self._is_over.is_set():
            console.write(f"WARNING    exports may not reach {self._options.push_to}: {problem}")
        while (push := self._jobs.get()) is not None:
            problem = self._try(push)
            with self._lock:
                if self._is_over.is_set():
                    return
                self._waiting.remove(push)
                if problem is None:
                    self._pushed.append(self._name(push))
                else:
                    self._failed[self._name(push)] = problem
            if problem is None:
                place = "" if push.path_in_repo == "." else f", folder {push.path_in_repo}"
                console.write(f"hub        {push.folder} is on the Hub, in {self._options.push_to}{place}")
            else:
                self._warn(push, problem)

    def _try(self, push: Push) -> str | None:
        """Returns the problem of the last attempt; None if one succeeded."""
        words = str(self._options.push_to), str(push.folder), push.path_in_repo, f"step {push.step}"
        problem: str | None = None
        for wait in (*_WAITS_S, None):
            problem = self._run("push", *words, "private" if self._options.private else "", seconds=push.seconds)
            if problem is None or wait is None or self._is_over.is_set():
                return problem
            console.write(f"hub        {push.folder} was not pushed: {problem}; the next attempt is in {wait:.0f} s")
            if self._is_over.wait(wait):
                return problem
        return problem

    def _run(self, function: str, *words: str, seconds: float) -> str | None:
        """Calls a function of this module in a process. Returns its problem; None if there was none."""
        script = f"import sys; from sftron.train.exports import hub; sys.exit(hub.report(hub.{function}, sys.argv[1:]))"
        root = str(Path(__file__).parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        try:
            with self._lock:
                if self._is_over.is_set():
                    return "the run is over"
                process = self._process = subprocess.Popen(
                    [sys.executable, "-c", script, *words],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # Ctrl-C stops the run, not the push
                )
        except OSError as error:
            return str(error)
        with process:
            try:
                printed = process.communicate(timeout=seconds)[1]
            except subprocess.TimeoutExpired:
                process.kill()
                return f"no end after {seconds:,.0f} s"
        lines = printed.strip().splitlines() or [f"exit status {process.returncode}"]
        return None if process.returncode == 0 else lines[-1]

    def _warn(self, push: Push, problem: str) -> None:
        console.write(
            f"WARNING    {push.folder} was not pushed: {problem}. It is complete here; this command pushes it:"
        )
        console.write(f"             {push.command(self._options)}")

    def _name(self, push: Push) -> str:
        return str(push.folder.relative_to(self._run_folder))


def require_hub(options: Hub) -> None:
    """Raises ValueError if exports are to be pushed but huggingface_hub is offline or has no token."""
    if options.push_to is None:
        return
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"hub.push_to is {options.push_to}, but HF_HUB_OFFLINE is set: unset it, or remove the key")
    if get_token() is None:
        raise ValueError(
            f"hub.push_to is {options.push_to}, but there is no token for it: run `hf auth login`, or set HF_TOKEN"
        )


# --- In the process of a push ---


def report(function: Callable[..., None], words: list[str]) -> int:
    """Calls the function and prints a failure in one line. Returns the exit status."""
    try:
        function(*words)
    except Exception as error:
        show(f"{type(error).__name__}: {' '.join(str(error).split())}", to=sys.stderr)
        return 1
    return 0


def check(repository: str) -> None:
    """Raises ValueError if the token does not belong to the owner of the repository."""
    from huggingface_hub import HfApi

    found = HfApi().whoami()
    names = [found["name"], *(each["name"] for each in found.get("orgs", []))]
    if repository.partition("/")[0] not in names:
        raise ValueError(f"the token is of {', '.join(names)}, and {repository} is of none of them")


def push(repository: str, folder: str, path_in_repo: str, message: str, private: str) -> None:
    """Creates the repository if it does not exist, and commits the files of the folder to it."""
    from huggingface_hub import HfApi

    api, path = HfApi(), None if path_in_repo == "." else path_in_repo
    api.create_repo(repository, private=bool(private), exist_ok=True)
    api.upload_folder(repo_id=repository, folder_path=folder, path_in_repo=path, commit_message=message)
