"""Pushes exports of a run to a repository on the Hub. A push delays no step, and a failure loses no local export.

The thread is a daemon. Python would wait for the thread of `upload_folder(run_as_future=True)` at exit, so a Hub that
does not answer would keep a finished run alive.
"""

from __future__ import annotations

import queue
import shlex
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from sftron.config import Hub
from sftron.train.logs import console

_SILENCE_S = 60.0
"""A request fails if the Hub does not answer for this long; huggingface_hub repeats some requests."""
_LEAST_TIME_S, _LEAST_BYTES_PER_S = 300.0, 1e6
"""The run waits five minutes for a push, and longer where its bytes would take longer at this speed."""
_SHORT_TIME_S = 5.0
"""The wait for pushes after a failure or a signal; most clusters soon send another signal."""
_TIME_TO_NOTICE_S = 0.2
"""How soon a signal shortens the wait, at most."""


class Push(NamedTuple):
    """The push of one export."""

    folder: Path
    path_in_repo: str
    """The folder in the repository; "." is its root."""
    step: int


class HubPusher:
    """Pushes exports one after another, each once, in a thread that ends with the process; on the main rank of a run.

    So no push overwrites a later step's, and a push dies with its run.
    """

    def __init__(self, options: Hub, run_folder: Path) -> None:
        self._options, self._run_folder = options, run_folder
        self._pushes: dict[Path, Push] = {}
        self._problems: dict[Path, str | None] = {}  # of each push that has ended; None if it has succeeded
        self._jobs: queue.Queue[Push | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="pushes to the Hub", daemon=True)
        self._is_over = False  # once it is, no push begins

    def start(self) -> None:
        """Starts the thread. It first creates the repository, so that a refusal shows before the steps."""
        self._thread.start()

    def push(self, folder: Path, step: int, path_in_repo: str = ".") -> None:
        """Pushes a folder as soon as the earlier ones are pushed, once. Returns at once."""
        if folder not in self._pushes:
            self._pushes[folder] = Push(folder, path_in_repo, step)
            self._jobs.put(self._pushes[folder])

    def finish(self, should_hurry: Callable[[], bool]) -> dict[str, Any]:
        """Waits for the pushes, longer for large ones, and then gives up the unfinished ones.

        Args:
            should_hurry: Returns whether the run has failed or is to stop; then the wait is short. A Ctrl-C that raises
                KeyboardInterrupt ends the wait.

        Returns:
            The facts for result.json.
        """
        self._jobs.put(None)
        waiting = self._pushes.keys() - self._problems.keys()
        num_bytes = sum(file.stat().st_size for each in waiting for file in each.rglob("*") if file.is_file())
        seconds = len(waiting) * _LEAST_TIME_S + num_bytes / _LEAST_BYTES_PER_S
        if seconds:
            console.write(f"hub        pushing to {self._options.push_to}; the run waits for at most {seconds:,.0f} s")
        deadline, is_hurried = time.monotonic() + seconds, False
        with suppress(KeyboardInterrupt):
            while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
                if not is_hurried and should_hurry():
                    deadline, is_hurried = min(deadline, time.monotonic() + _SHORT_TIME_S), True
                else:
                    self._thread.join(min(left, _TIME_TO_NOTICE_S))
        self._is_over = True
        problems = dict(self._problems)  # a push that ends only now does not change the outcome
        for folder, push in self._pushes.items():
            if folder not in problems:
                problems[folder] = "the push did not finish in time"
                self._report_failure(push, "the push did not finish in time")
        names = {folder: str(folder.relative_to(self._run_folder)) for folder in problems}
        return {
            "repository": self._options.push_to,
            "pushed": [names[folder] for folder, problem in problems.items() if problem is None],
            "failed": {names[folder]: problem for folder, problem in problems.items() if problem is not None},
        }

    def _work(self) -> None:
        if problem := self._try(None):
            console.warn(f"exports may not reach {self._options.push_to}: {problem}")
        while (push := self._jobs.get()) is not None and not self._is_over:
            problem = self._try(push)
            if self._is_over:
                return
            self._problems[push.folder] = problem
            if problem is not None:
                self._report_failure(push, problem)
            else:
                place = "" if push.path_in_repo == "." else f", folder {push.path_in_repo}"
                console.write(f"hub        {push.folder} is on the Hub, in {self._options.push_to}{place}")

    def _try(self, push: Push | None) -> str | None:
        """Makes the repository if it does not exist, and commits the files of a push. Returns its problem, if any."""
        from huggingface_hub import HfApi, get_session
        from huggingface_hub.utils import disable_progress_bars

        try:
            get_session().timeout = _SILENCE_S  # by default, it waits for ever
            disable_progress_bars()
            api, repository = HfApi(), str(self._options.push_to)
            api.create_repo(repository, private=self._options.private, exist_ok=True)
            if push is not None:
                place = None if push.path_in_repo == "." else push.path_in_repo
                message = f"step {push.step}"
                api.upload_folder(
                    repo_id=repository, folder_path=push.folder, path_in_repo=place, commit_message=message
                )
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        return None

    def _report_failure(self, push: Push, problem: str) -> None:
        command = ["hf", "upload", str(self._options.push_to), str(push.folder), push.path_in_repo]
        command += ["--private" if self._options.private else "--no-private"]
        command += ["--commit-message", f"step {push.step}"]
        console.warn(f"{push.folder} was not pushed: {problem}. It is complete here; this command pushes it:")
        console.write(f"             {shlex.join(command)}")


def require_hub(options: Hub) -> None:
    """Raises ValueError if huggingface_hub, which is to push exports, is offline or has no token."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"hub.push_to is {options.push_to}, but HF_HUB_OFFLINE is set: unset it, or remove the key")
    if get_token() is None:
        raise ValueError(f"hub.push_to is {options.push_to}, but no token is set: run `hf auth login`, or set HF_TOKEN")
