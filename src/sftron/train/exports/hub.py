"""Pushes exports of a run to a repository on the Hub. A push delays no step, and a failure loses no local export.

The thread is a daemon, and not that of `upload_folder(run_as_future=True)`, which Python waits for at its end: a Hub
that does not answer would keep a finished run alive.
"""

from __future__ import annotations

import queue
import shlex
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftron.config import Hub
from sftron.train.logs import console

_SILENCE_S = 60.0
"""A request that the Hub does not answer for so long has failed; huggingface_hub repeats some of them."""
_LEAST_TIME_S, _LEAST_BYTES_PER_S = 300.0, 1e6
"""The run waits five minutes for a push, and longer where its bytes would take longer at this speed."""
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
        """The longest time that the run waits for it."""
        size = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        return _LEAST_TIME_S + size / _LEAST_BYTES_PER_S

    def command(self, options: Hub) -> str:
        """Returns the command that does the same by hand."""
        words = ["hf", "upload", str(options.push_to), str(self.folder), self.path_in_repo]
        words += ["--private" if options.private else "--no-private", "--commit-message", f"step {self.step}"]
        return shlex.join(words)


class HubPusher:
    """Pushes exports one after another, each once, in a thread that ends with the process; on the main rank of a run.

    So no step replaces a later one, and a push dies with its run.
    """

    def __init__(self, options: Hub, run_folder: Path) -> None:
        self._options, self._run_folder = options, run_folder
        self._jobs: queue.Queue[Push | None] = queue.Queue()
        self._folders: set[Path] = set()
        self._waiting: list[Push] = []
        self._pushed: list[str] = []
        self._failed: dict[str, str] = {}
        self._thread = threading.Thread(target=self._work, name="pushes to the Hub", daemon=True)
        self._is_over = False
        self._lock = threading.Lock()  # for the above: once the run is over, no push begins and no outcome changes

    def start(self) -> None:
        """Starts the thread, which first makes the repository, so that a refusal is known before the steps."""
        self._thread.start()

    def push(self, folder: Path, step: int, path_in_repo: str = ".") -> None:
        """Pushes a folder as soon as the earlier ones are pushed, once. Returns at once."""
        if folder not in self._folders:
            self._folders.add(folder)
            push = Push(folder, path_in_repo, step)
            self._waiting.append(push)
            self._jobs.put(push)

    def finish(self, should_hurry: Callable[[], bool]) -> dict[str, Any]:
        """Waits for the pushes, as long as their sizes allow, and gives up those that are not done.

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
            self._is_over = True
        for push in self._waiting:
            self._record_failure(push, "the push was not done in time")
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
        if problem := self._try(None):
            console.write(f"WARNING    exports may not reach {self._options.push_to}: {problem}")
        while (push := self._jobs.get()) is not None and not self._is_over:
            problem = self._try(push)
            with self._lock:
                if self._is_over:
                    return
                self._waiting.remove(push)
                if problem is not None:
                    self._record_failure(push, problem)
                    continue
                self._pushed.append(self._name(push))
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
                api.upload_folder(
                    repo_id=repository,
                    folder_path=push.folder,
                    path_in_repo=None if push.path_in_repo == "." else push.path_in_repo,
                    commit_message=f"step {push.step}",
                )
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        return None

    def _record_failure(self, push: Push, problem: str) -> None:
        self._failed[self._name(push)] = problem
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
