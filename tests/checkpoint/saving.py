"""Small models and their checkpoints; system calls that fail or at which the process dies; ranks that are threads."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from sftron.checkpoint.atomic import ProcessGroup, SingleProcess
from sftron.checkpoint.checkpoint import prune, shards_to_store, state_text, write_checkpoint
from sftron.checkpoint.shards import Shard

STATE = {"progress": {"tokens": 2**40}, "data": {"lanes": {"3": "1f:a"}}}
CALLS = ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir")
"""All that change files and folders, here and in pathlib and shutil."""


def save_checkpoint(
    root: Path, step: int, model: nn.Module, optimizer: Any, *, keep: int = 2, ranks: ProcessGroup | None = None
) -> Path:
    """Writes root/step-<step> and prunes, as a run does."""
    ranks = ranks or SingleProcess()
    shards = shards_to_store(model, optimizer, is_main=ranks.rank == 0)
    folder = write_checkpoint(root / f"step-{step}", step, shards, state=state_text(step, STATE), ranks=ranks)
    if ranks.rank == 0:
        prune(root, step, keep)
    return folder


class Small(nn.Module):
    """Two linears; a tied head, as in many models, is one parameter under two names."""

    def __init__(self, seed: int, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.head = nn.Linear(3, width), nn.LayerNorm(width), nn.Linear(width, 3, bias=False)
        self.tied = self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.first(x)))


def make(seed: int = 0, steps: int = 0, width: int = 5) -> tuple[Small, torch.optim.AdamW]:
    model = Small(seed, width)
    decaying = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decaying, "weight_decay": 0.1}, {"params": rest}], lr=1e-2, fused=True)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for number in range(steps):
        torch.manual_seed(number)
        optimizer.zero_grad()
        model(torch.randn(7, 3)).square().sum().backward()
        optimizer.step()


def save(root: Path, step: int, *, seed: int = 0, keep: int = 2) -> Path:
    return save_checkpoint(root, step, *make(seed, steps=2), keep=keep)


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    tensors = [*model.parameters()]
    tensors += [value for p in model.parameters() for _, value in sorted(optimizer.state.get(p, {}).items())]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def grid(tensor: torch.Tensor, splits: tuple[int, ...]) -> list[Shard]:
    """The parts of a tensor that is split into so many in each dimension."""
    parts = [Shard(tensor, (0,) * tensor.ndim, tuple(tensor.shape))]
    for dimension, num_parts in enumerate(splits):
        size = -(-tensor.shape[dimension] // num_parts)
        parts = [
            Shard(piece, tuple(o + n * size * (d == dimension) for d, o in enumerate(part.offset)), part.shape)
            for part in parts
            for n, piece in enumerate(part.tensor.split(size, dim=dimension))
        ]
    return parts


@contextmanager
def at_system_call(number: int, act: Callable[[], Any]) -> Iterator[list[str]]:
    """Calls `act` instead of the system call of that number, counted from 0. Yields the names of all calls so far."""
    made: list[str] = []

    def hook(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            if len(made) == number + 1:
                act()
            return original(*arguments, **options)

        return call

    with ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(patch.object(os, name, hook(name, getattr(os, name))))
        yield made


def killed(number: int, work: Callable[[], Any]) -> bool:
    """Returns whether a copy of this process was killed at the system call of that number, and not done before."""
    if (process := os.fork()) == 0:
        try:
            signal.alarm(30)
            with at_system_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(process, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


class ThreadRanks:
    """One of several ranks, each a thread (sftron.checkpoint.atomic.ProcessGroup)."""

    def __init__(self, rank: int, texts: list[str], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(texts)
        self._texts, self._barrier = texts, barrier

    def gather(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._texts[self.rank] = json.dumps(facts)
        self._barrier.wait(10)
        everyone = [json.loads(text) for text in self._texts]
        self._barrier.wait(10)
        return everyone


def on_ranks(num_ranks: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Returns what `work` returns, or the OSError that it raises, on each rank."""
    texts, barrier = [""] * num_ranks, threading.Barrier(num_ranks)
    results: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, texts, barrier))
        except OSError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
