"""Processes that are the ranks of one run, with the environment that torchrun gives them.

They are forked from a server that has imported torch once: a rank is there in a tenth of a second instead of in five.
"""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
# The server imports by itself, without pytest's own path.
os.environ["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.train.ranks", "sftron.train.trainer", "tests.models.reference"])


@dataclass(frozen=True)
class Ended:
    exit_code: int | None
    out: str
    err: str


def launch(
    num_ranks: int, work: Callable[..., Any], *arguments: Any, folder: Path, timeout_s: float = 200
) -> list[Ended]:
    """Call `work(*arguments)` on so many ranks; how each ended, in their order. folder: for what they say."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [
        _SERVER.Process(target=_be_rank, args=(rank, num_ranks, port, folder, work, arguments))
        for rank in range(num_ranks)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout_s)
    finally:
        for process in processes:
            process.kill()
    return [
        Ended(process.exitcode, *((folder / f"{name}-{rank}").read_text() for name in ("out", "err")))
        for rank, process in enumerate(processes)
    ]


def _be_rank(
    rank: int, num_ranks: int, port: int, folder: Path, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        os.dup2(os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
    torch.set_num_threads(1)
    sys.exit(work(*arguments))


def train(config: Path) -> int:
    """What `python run_train.py --config CONFIG` does."""
    from run_train import main

    return main(["--config", str(config)])


def save_gradients(folder: Path) -> None:
    """The gradients of one step over the batches of `LAYOUTS`, whatever their spread over ranks."""
    from sftron.models.sharding import shard_model, whole
    from sftron.train.distributed import end_ranks, make_mesh, start_ranks
    from sftron.train.step import train_step
    from tests.models.reference import make_ours, make_theirs
    from tests.train.test_step import CONVERSATIONS, Recording, batch_of, conversation

    class WholeRecording(Recording):
        def step(self, closure: object = None) -> None:
            self.gradients = {n: whole(p.grad) for n, p in self.model.named_parameters() if p.grad is not None}

    untrained = conversation(8, 5, share_trained=0.0)
    batches = [batch_of(CONVERSATIONS[:3]), batch_of([untrained]), batch_of([]), batch_of(CONVERSATIONS[3:])]
    weight_sum = sum(batch.weight_sum for batch in batches)
    ranks = start_ranks()
    num_ranks = ranks.dp_world_size
    for tied, dp_replicate in [(False, 1), (True, 1), *([(False, 2)] if num_ranks == 4 else [])]:
        model = make_ours(make_theirs(tie_word_embeddings=tied))
        if num_ranks > 1:
            shard_model(model, make_mesh("cpu", dp_replicate, num_ranks // dp_replicate))
        recording = WholeRecording(model)
        result = train_step(
            model,
            recording,
            batches[ranks.dp_rank :: num_ranks],
            max_grad_norm=None,
            weight_sum=weight_sum,
            sum_over_ranks=ranks.sum,
        )
        if ranks.is_main:
            path = folder / f"gradients-{num_ranks}-{dp_replicate}-{tied}.pt"
            torch.save({"loss": result.loss, "norm": result.grad_norm, **recording.gradients}, path)
    end_ranks()
