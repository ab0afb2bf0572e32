"""What wandb costs a step: disabled, offline, with no server, and with one that hangs, by turns; see docs/wandb.md.

    python tools/bench_wandb.py --rounds 30

Each way is a process with the same model, which trains a few steps when it is its turn and logs each of them; what its
wandb does meanwhile goes on. A way's figure is the median, over the rounds, of its time to that of `disabled` in the
same round. Beside it stands the processor time of the whole process, all its threads: on a busy machine it tells more,
and it bounds what a step can lose. Exit status: 0 measured, whatever came out.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# The modules beside this file and sftron itself are found without an installation too.
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tools.bench import models

WAYS = ("disabled", "disabled again", "offline", "unreachable", "hanging")
MOST_SLOWER = 0.02
_KEY = "k" * 40


def main() -> int:
    options = _arguments()
    # Open for the whole time: connections to it succeed, and nobody reads what is sent.
    hanging = socket.create_server(("127.0.0.1", 0), backlog=1000)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        refused = free.getsockname()[1]
    ports = {"unreachable": refused, "hanging": hanging.getsockname()[1]}
    context = multiprocessing.get_context("spawn")
    turns: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        pipes: dict[str, Connection] = {}
        for way in WAYS:
            pipes[way], theirs = context.Pipe()
            arguments = (way, ports.get(way), theirs, Path(folder) / way, options)
            context.Process(target=_be_way, args=arguments, daemon=True).start()
            pipes[way].recv()
        for number in range(options.rounds):
            for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                pipes[way].send("go")
                turns[way].append(pipes[way].recv())
        for pipe in pipes.values():
            pipe.send("end")
        lines = {way: pipe.recv() for way, pipe in pipes.items()}
    report = {way: _figures(turns[way], turns["disabled"], options.steps) for way in WAYS}
    print(f"{options.rounds} rounds of {options.steps} steps, shape {options.shape}, {options.tokens} tokens a step")
    for way, found in report.items():
        told = [f"{way:15}", f"{lines[way]} lines in metrics.jsonl"]
        for clock in ("wall", "processor"):
            low, high = found[clock]["quartiles"]
            ratio = f"{found[clock]['ratio']:.4f} ({low:.4f} to {high:.4f})"
            told.append(f"{clock} {found[clock]['milliseconds']:.2f} ms a step, ratio {ratio}")
        print(" | ".join(told))
    if options.json:
        options.json.write_text(json.dumps({"ways": report, "most_slower": MOST_SLOWER}, indent=1) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10, help="of each way in a round (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="a step (default: %(default)s)")
    parser.add_argument("--shape", default="small", help="see tools/bench/models.py (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _figures(turns: list[tuple[float, float]], base: list[tuple[float, float]], num_steps: int) -> dict[str, Any]:
    """turns: seconds by the wall's clock and by the processor's."""
    figures = {}
    for place, clock in enumerate(("wall", "processor")):
        seconds = [turn[place] for turn in turns]
        ratios = [ours / theirs[place] for ours, theirs in zip(seconds, base, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        figures[clock] = {
            "milliseconds": 1e3 * statistics.median(seconds) / num_steps,
            "ratio": statistics.median(ratios),
            "quartiles": (low, high),
        }
    return figures


def _be_way(way: str, port: int | None, pipe: Connection, folder: Path, options: argparse.Namespace) -> None:
    """Train when told to, and answer with the seconds; in the end with the lines of metrics.jsonl."""
    folder.mkdir()
    os.environ |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_DATA_DIR": str(folder)}
    os.environ |= {"WANDB_API_KEY": _KEY, "WANDB_BASE_URL": f"http://127.0.0.1:{port or 9}"}
    from sftron.train.metrics import MetricsLog
    from sftron.train.wandb_log import WandbLog

    torch.set_num_threads(1)
    mode = "offline" if way == "offline" else "online"
    wandb = None
    if not way.startswith("disabled"):
        wandb = WandbLog(lambda: {"mode": mode, "project": "p", "dir": str(folder)})
    log = MetricsLog(folder / "metrics.jsonl", resumed_step=0, wandb=wandb)
    step, metrics = _training(options)
    number = 0
    for _ in range(3):
        step()
    pipe.send("ready")
    while pipe.recv() == "go":
        started, before = time.perf_counter(), time.process_time()
        for _ in range(options.steps):
            step()
            number += 1
            log.write(replace(metrics, step=number))
        pipe.send((time.perf_counter() - started, time.process_time() - before))
    pipe.send(len((folder / "metrics.jsonl").read_bytes().splitlines()))
    os._exit(0)


def _training(options: argparse.Namespace) -> tuple[Any, Any]:
    """A step of the model, and what it would report."""
    from sftron.train.optimizer import make_adamw
    from sftron.train.step import train_step

    theirs = models.make_theirs(None, models.shape_of(options.shape), torch.device("cpu"), seed=1)
    model = models.make_ours(theirs, options.tokens)
    optimizer = make_adamw(model.named_parameters(), learning_rate=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    batch = _batch(options.tokens)

    def step() -> None:
        train_step(model, optimizer, [batch], max_grad_norm=1.0)

    return step, _metrics(options.tokens)


def _batch(num_tokens: int) -> Any:
    import numpy as np

    from sftron.data.dataloader import collate
    from sftron.data.packing import lay_out
    from sftron.data.types import IGNORE_INDEX, ConversationKey, LabeledConversation, Role

    ids = (np.arange(num_tokens) % 700 + 5).astype(np.int32)
    conversation = LabeledConversation(
        input_ids=ids,
        labels=np.append(ids[1:], IGNORE_INDEX).astype(np.int32),
        loss_weights=np.append(np.ones(num_tokens - 1), 0).astype(np.float32),
        role_ids=np.full(num_tokens, Role.ASSISTANT, dtype=np.uint8),
        key=ConversationKey(0, 0),
    )
    pack = lay_out([conversation], token_budget=num_tokens, remove_cross_attention=True, pad_id=0)
    return collate(pack, keep_tail=False)


def _metrics(num_tokens: int) -> Any:
    """As many numbers as a run with three data sets has."""
    from sftron.train.metrics import StepMetrics

    given = dict.fromkeys(StepMetrics.__dataclass_fields__, 1.5)
    counts = {"rows": 1, "conversations": 1, "tokens": 1, "trained_tokens": 1, "epoch": 0.5, "dropped": {"overlong": 1}}
    given |= {"tokens": num_tokens, "trained_tokens": num_tokens, "dropped": {"overlong": 1}, "skipped": None}
    return StepMetrics(**{**given, "datasets": {f"set{n}.jsonl": counts for n in range(3)}})


if __name__ == "__main__":
    sys.exit(main())
