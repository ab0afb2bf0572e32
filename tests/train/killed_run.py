"""A run in a process of its own that is killed at a certain instant, by a signal that nothing can catch."""

import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

from sftron.config import load_config
from sftron.train import loop, saving, trainer
from sftron.train.logs import run_logs

When = Literal["in the step", "in the step's line", "after the step's line", "after the checkpoint"]


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _go(config: Path, step: int, when: When, overrides: list[str]) -> None:
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # for loader workers, as in any run
    train_step, write, save = loop.train_step, run_logs.RunLogs.write_step, saving.write_checkpoint
    append = run_logs.LineFile.append
    reached = -1

    def in_step(*arguments: Any, **options: Any) -> Any:
        nonlocal reached
        reached = run.progress.step + 1
        if reached == step and when == "in the step":
            _kill()
        return train_step(*arguments, **options)

    def in_line(self: run_logs.LineFile, line: bytes) -> None:
        if reached == step and line.startswith(b'{"step"'):
            os.write(self._descriptor, line[: len(line) // 2])
            _kill()
        append(self, line)

    def after_line(self: Any, *arguments: Any, **options: Any) -> None:
        write(self, *arguments, **options)
        if reached == step and when == "after the step's line":
            _kill()

    def after_checkpoint(*arguments: Any, **options: Any) -> Any:
        save(*arguments, **options)
        if reached == step and when == "after the checkpoint":
            _kill()

    loop.train_step, run_logs.RunLogs.write_step = in_step, after_line
    saving.write_checkpoint = after_checkpoint  # pyright: ignore[reportAttributeAccessIssue]
    if when == "in the step's line":
        run_logs.LineFile.append = in_line
    run = trainer.open_trainer(load_config(config, overrides))
    run.train()
    os._exit(3)


def _server() -> Any:
    """Processes that have imported what they need already, and have no threads of this one's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.killed_run"])
    # The server of Python 3.11 imports before it has sys.path.
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    return context


def run_killed(config: Path, step: int, when: When, *overrides: str) -> None:
    """Start the run, and see it killed in `step` or after it."""
    process = _server().Process(target=_go, args=(config, step, when, list(overrides)))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL, process.exitcode
