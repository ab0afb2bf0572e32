"""Processes that are the ranks of one run, as torchrun starts them, with the laws that several ranks have to keep.

`python -m tests.train.ranks LAW FOLDER` is one rank; `launch` starts them all.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.conftest import ROOT


def launch(num_ranks: int, arguments: Sequence[str], timeout_s: float = 120) -> list[subprocess.CompletedProcess[str]]:
    """Run `python ARGUMENTS` as so many ranks; what each said, in their order."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=timeout_s)
            ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
    return ended


def save_gradients(folder: Path) -> None:
    """The gradients of one step over the batches of `LAYOUTS`, whatever their spread over ranks."""
    from sftron.models.sharding import shard_model, whole
    from sftron.train.distributed import start_ranks
    from sftron.train.step import train_step
    from tests.models.reference import make_ours, make_theirs
    from tests.train.test_step import CONVERSATIONS, Recording, batch_of, conversation

    class WholeRecording(Recording):
        def step(self, closure: object = None) -> None:
            self.gradients = {n: whole(p.grad) for n, p in self.model.named_parameters() if p.grad is not None}

    untrained = conversation(8, 5, share_trained=0.0)
    batches = [batch_of(CONVERSATIONS[:3]), batch_of([untrained]), batch_of([]), batch_of(CONVERSATIONS[3:])]
    weight_sum = sum(batch.weight_sum for batch in batches)
    for tied in (False, True):
        for dp_replicate in (1, 2) if int(os.environ["WORLD_SIZE"]) == 4 and not tied else (1,):
            ranks = start_ranks(dp_replicate) if not torch.distributed.is_initialized() else _again(dp_replicate)
            model = make_ours(make_theirs(tie_word_embeddings=tied))
            if ranks.mesh is not None:
                shard_model(model, ranks.mesh)
            recording = WholeRecording(model)
            own = batches[ranks.dp_rank :: ranks.dp_world_size]
            result = train_step(
                model, recording, own, max_grad_norm=None, weight_sum=weight_sum, sum_over_ranks=ranks.sum
            )
            if ranks.is_main:
                name = f"gradients-{ranks.dp_world_size}-{dp_replicate}-{tied}.pt"
                torch.save({"loss": result.loss, "norm": result.grad_norm, **recording.gradients}, folder / name)


def _again(dp_replicate: int) -> object:
    from sftron.train import distributed

    distributed.end_ranks()
    return distributed.start_ranks(dp_replicate)


LAWS: dict[str, Callable[[Path], None]] = {"save_gradients": save_gradients}

if __name__ == "__main__":
    LAWS[sys.argv[1]](Path(sys.argv[2]))
