"""What goes wrong in one rank of a run, at a chosen step."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from sftron.data.dataset import PackedDataset
from sftron.train import evaluation, exports, loop, objective, saving, trainer
from tests.train.ranks import train


@dataclass(frozen=True)
class Fault:
    """what: a signal to `to`, or something else; at: in which call. rank, step: where; 0 is before the first step."""

    what: Literal["SIGTERM", "SIGUSR1", "SIGKILL", "sleep", "raise", "nan", "no memory"]
    at: Literal["step", "save", "load", "answers", "export", "worker", "data"] = "step"
    rank: int = 1
    step: int = 3
    to: Literal["itself", "group", "launcher"] = "itself"
    num_steps: int = 1


def train_with(config: Path, fault: Fault) -> int:
    """What `run_train.py` does, with the fault. Tells when it came in `came-RANK` beside the configuration."""
    if int(os.environ["RANK"]) == fault.rank:
        _prepare(fault, config.with_name(f"{config.stem}-came"))
    return train(config)


def _prepare(fault: Fault, came: Path) -> None:
    reached, main_process = 0, os.getpid()
    do_step = loop.train_step

    def strike() -> None:
        came.write_text(str(time.time()))
        if fault.what == "sleep":
            time.sleep(600)
        elif fault.what == "raise":
            raise RuntimeError("out of luck")
        elif fault.what == "no memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        else:
            number = signal.Signals[fault.what]
            if fault.to == "group":
                os.killpg(os.getpgrp(), number)
            else:
                os.kill(os.getpid() if fault.to == "itself" else os.getppid(), number)

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal reached
        reached += 1
        if fault.at == "step" and reached == fault.step and fault.what != "nan":
            strike()
        return do_step(*arguments, **options)

    def before(module: Any, name: str) -> None:
        call: Callable[..., Any] = getattr(module, name)

        def struck(*arguments: Any, **options: Any) -> Any:
            if reached == fault.step and not came.exists():
                strike()
            return call(*arguments, **options)

        setattr(module, name, struck)

    loop.train_step = counted
    if fault.at == "save":
        before(saving, "write_checkpoint")
    elif fault.at == "load":
        before(trainer, "load_run_model")
    elif fault.at == "answers":
        before(evaluation.Evaluator, "_answer")
    elif fault.at == "export":
        before(exports, "gather_or_raise")  # of the export alone
    elif fault.at in ("worker", "data"):
        give = PackedDataset._pack

        def pack(self: PackedDataset, index: int) -> Any:
            in_worker = os.getpid() != main_process
            if index // 2 == fault.step and in_worker == (fault.at == "worker"):
                strike()
            return give(self, index)

        PackedDataset._pack = pack
    elif fault.what == "nan":
        loss_of = objective.loss_of

        def not_a_number(*arguments: Any) -> torch.Tensor:
            is_bad = fault.step <= reached < fault.step + fault.num_steps
            return loss_of(*arguments) * (float("nan") if is_bad else 1.0)

        objective.loss_of = not_a_number


def train_noting_updates(config: Path, fault: Fault) -> int:
    """`train_with`; and the file `updates-RANK` has a line for each step: whether any bit of its weights changed."""
    rank, step = os.environ["RANK"], loop.train_step

    def noted(model: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        def bits() -> list[bytes]:
            held = [value for state in optimizer.state.values() for value in state.values()]
            return [getattr(t, "_local_tensor", t).detach().numpy().tobytes() for t in [*model.parameters(), *held]]

        before = bits()
        result = step(model, optimizer, *arguments, **options)
        with config.with_name(f"updates-{rank}").open("a") as file:
            file.write(f"{int(before != bits())}\n")
        return result

    loop.train_step = noted
    return train_with(config, fault)
