"""Processes that are the ranks of one run, with the environment that torchrun gives them.

They are forked from a server that has imported torch once: a rank is there in a tenth of a second instead of in five.
"""

import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sftron.data.child_process import die_with_parent
from sftron.data.loader import _end_all_workers

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


@dataclass(frozen=True)
class Launcher:
    """A process that starts ranks and waits for them. wait: its exit status, None after so many seconds."""

    pid: int
    wait: Callable[[float], int | None]


def start_forked(
    config: Path, num_ranks: int, folder: Path, work: Callable[..., int] | None = None, *arguments: Any
) -> Launcher:
    """A launcher that does what torchrun does, though its ranks are forked: there in a second instead of in ten.

    It keeps their store, ends all when one fails, and writes their statuses to the file `exit-codes`.
    """
    process = _SERVER.Process(
        target=_be_launcher, args=(num_ranks, _free_port(), folder, work or train, (config, *arguments))
    )
    process.start()

    def wait(timeout_s: float) -> int | None:
        process.join(timeout_s)
        return process.exitcode

    assert process.pid is not None
    return Launcher(process.pid, wait)


def _be_launcher(num_ranks: int, port: int, folder: Path, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=_be_rank, args=(rank, num_ranks, port, folder, work, arguments, os.getpid()))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)  # after the forks

    def pass_on(number: int, _frame: object) -> None:
        for process in processes:
            if process.is_alive():
                os.kill(process.pid or 0, number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_on)
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            pass_on(signal.SIGTERM, None)
            for process in processes:
                process.join(8)
                process.kill()
        time.sleep(0.02)
    del store
    (folder / "exit-codes").write_text(json.dumps([process.exitcode for process in processes]))
    os._exit(1 if any(process.exitcode for process in processes) else 0)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def launch(
    num_ranks: int, work: Callable[..., Any], *arguments: Any, folder: Path, timeout_s: float = 200
) -> list[Ended]:
    """Call `work(*arguments)` on so many ranks; how each ended, in their order. folder: for what they say."""
    port = _free_port()
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
    rank: int,
    num_ranks: int,
    port: int,
    folder: Path,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    launcher: int | None = None,
) -> None:
    if launcher is not None:
        die_with_parent(launcher)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the launcher's
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        os.dup2(os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # for loader workers, as in any run
    try:
        status = work(*arguments)
    except BaseException:
        traceback.print_exc()
        status = 1
    _end_all_workers()  # as at a process's own exit, which a fork does not have
    sys.stdout.flush()
    os._exit(status or 0)


def train(config: Path, *arguments: str) -> int:
    """What `python run_train.py --config CONFIG` does."""
    from sftron.commands.train import run as main

    return main(["--config", str(config), *arguments])


def save_gradients(folder: Path) -> None:
    """The gradients of one step over the batches of `LAYOUTS`, whatever their spread over ranks."""
    from sftron.models.sharding import shard_model, whole
    from sftron.train.ranks import Dimensions, end_ranks, start_ranks
    from sftron.train.step import train_step
    from tests.models.reference import EXPERTS, FAMILIES, GPT_OSS, make_ours, make_theirs
    from tests.train.test_step import Recording
    from tests.train.test_token_losses import CONVERSATIONS, batch_of, with_roles

    class WholeRecording(Recording):
        def step(self, closure: object = None) -> None:
            self.gradients = {n: whole(p.grad) for n, p in self.model.named_parameters() if p.grad is not None}

    untrained = with_roles(5, 8, trained=frozenset())
    batches = [batch_of(CONVERSATIONS[:3]), batch_of([untrained]), batch_of([]), batch_of(CONVERSATIONS[3:])]
    weight_sum = sum(batch.weight_sum for batch in batches)
    ranks = start_ranks()
    num_ranks = ranks.dp_world_size
    kinds: dict[str, tuple[dict[str, Any], float]] = {
        "untied": ({}, 0.0),
        "tied": ({"tie_word_embeddings": True}, 0.0),
        "experts": ({"model_type": "qwen3_moe", **EXPERTS}, 0.3),
        "sinks": (GPT_OSS, 0.3),
        "beside": (FAMILIES["Gemma 4 26B-A4B"], 0.3),
    }
    copies = [*((kind, 1) for kind in kinds), *([("untied", 2), ("experts", 2)] if num_ranks == 4 else [])]
    for kind, dp_replicate in copies:
        options, router_aux_loss_coef = kinds[kind]
        model = make_ours(make_theirs(**options))
        if num_ranks > 1:
            shard_model(model, Dimensions(replicate=dp_replicate, shard=num_ranks // dp_replicate).mesh("cpu"))
        recording = WholeRecording(model)
        result = train_step(
            model,
            recording,
            batches[ranks.dp_rank :: num_ranks],
            max_grad_norm=None,
            num_datasets=2,
            with_untrained=True,
            denominator=weight_sum,
            router_aux_loss_coef=router_aux_loss_coef,
            sum_over_ranks=ranks.sum,
        )
        assert result.token_losses is not None
        if ranks.is_main:
            path = folder / f"gradients-{num_ranks}-{dp_replicate}-{kind}.pt"
            losses = asdict(result.token_losses)
            losses["experts"] = {} if result.expert_load is None else asdict(result.expert_load)
            torch.save({"loss": result.loss, "norm": result.grad_norm, "tokens": losses, **recording.gradients}, path)
    end_ranks()


def run_script(script: str, file: str) -> int:
    """Runs a script with its one argument, and returns its exit status."""
    sys.argv = [script, file]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0
