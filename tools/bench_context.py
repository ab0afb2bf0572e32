"""Times training steps on one conversation that 1, 2, 4 ... ranks share, and checks that they compute the same.

    python tools/bench_context.py --tokens 131072 --ranks 2 4 8 --out docs/benchmarks/context.md
    python tools/bench_context.py --device cpu

The weights are random, from one seed, in fp32 with fused AdamW, and sharded over the ranks. The numbers of ranks take
turns: in each, new processes make a step to warm up, one whose memory is measured, and the timed ones. Losses and
gradient norms of the first steps are compared. The exit status is 1 if they differ, and 2 for unusable arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

# Makes sftron and tools importable without an installation.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing.spawn import ProcessException, start_processes

from sftron.commands.arguments import positive
from sftron.data.loader import collate
from sftron.data.packing import lay_out
from sftron.errors import exit_with, refuse, show
from sftron.models.architecture import LlamaConfig
from sftron.models.attention import resolve_attention
from sftron.models.context import share_heads
from sftron.models.llama import ACTIVATION_CHECKPOINTING, LlamaForSFT
from sftron.models.sharding import shard_model
from sftron.train.measured_memory import peak_of_step, resident_memory
from sftron.train.ranks import end_ranks, start_ranks
from sftron.train.step import train_step
from tools.bench_report import WrongResultError, benchmark_parser, markdown_table, report_head, write_report
from tools.bench_step import SHAPES, shape_of, synchronize
from tools.bench_ways import make_optimizer, random_rows

DEFAULTS = {
    "cuda": {"shape": "llama3.2-1b", "tokens": 32_768, "dtype": torch.bfloat16, "checkpointing": "full"},
    "cpu": {"shape": "tiny", "tokens": 96, "dtype": torch.float32, "checkpointing": "none"},
}
LARGEST_DIFFERENCE = {torch.bfloat16: 1e-3, torch.float32: 1e-5}
"""The largest accepted difference of losses and gradient norms, as a share. On a CPU, norms differ by 1.6e-4 and 7e-7,
and with rotations by the positions of a part by 3.3e-3 and 3.6e-5; a loss of random weights would not show these."""


def measure(local_rank: int, num_ranks: int, port: int, options: argparse.Namespace, path: Path) -> None:
    """Measures the steps of this rank of `num_ranks` that share the conversation; the first one writes those of all."""
    os.environ |= {"RANK": str(local_rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
    ranks, baseline, config = start_ranks(context=num_ranks), resident_memory(), options.config
    attention = resolve_attention("auto", ranks.device, options.dtype, config.head_dim, config.layers)
    torch.manual_seed(0)
    with ranks.device:
        model = LlamaForSFT(config, attention, options.dtype, options.tokens, options.checkpointing)
    if ranks.mesh is not None:
        shard_model(model, ranks.mesh, ranks.context_group)
    rows = random_rows([options.tokens], config.vocab_size, trained_share=1.0)
    pack = lay_out(rows, token_budget=options.tokens, remove_cross_attention=True, pad_id=0)
    batches = [collate(pack, keep_tail=True, context=ranks.context)]
    step = partial(train_step, model, make_optimizer(model), batches, max_grad_norm=1.0, sum_over_ranks=ranks.sum)
    sent, seconds, exchange = list[int](), list[float](), dist.all_to_all_single

    def counting(output: torch.Tensor, x: torch.Tensor, received: list[int], sizes: list[int], **group: Any) -> None:
        sent.append((sum(sizes) - sizes[local_rank]) * x.element_size())
        exchange(output, x, received, sizes, **group)

    with patch.object(dist, "all_to_all_single", counting):
        first = step()
    with peak_of_step(model, ranks.device, baseline) as peak:
        step()
    for _ in range(options.rounds):
        ranks.gather({})  # all begin together
        started = time.perf_counter()
        step()
        synchronize(ranks.device)
        seconds.append(time.perf_counter() - started)
    memory = peak().resident if ranks.device.type == "cpu" else peak().tensors
    own = {"loss": first.loss, "norm": first.grad_norm, "seconds": seconds, "memory": memory or 0, "sent": sum(sent)}
    everyone = ranks.gather(own)
    if ranks.is_main:
        path.write_text(json.dumps(everyone), encoding="utf-8")
    end_ranks()


def bytes_by_formula(num_ranks: int, options: argparse.Namespace) -> float:
    """Returns the bytes that a rank sends in a step on average, by the formula of docs/long-context.md."""
    config = options.config
    shares = share_heads(config.num_attention_heads, config.num_key_value_heads, num_ranks)
    numbers = options.tokens / num_ranks * 2 * sum(shares.queries + shares.keys) * config.head_dim
    num_passes = 3 if options.checkpointing == "full" else 2  # forward, again where it is computed again, and backward
    return len(config.layers) * num_passes * options.dtype.itemsize * numbers * (num_ranks - 1) / num_ranks


def benchmark(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the numbers of a step for each number of ranks. Raises WrongResultError if they compute other results."""
    turns: dict[int, list[Any]] = {number: [] for number in options.ranks}
    with tempfile.TemporaryDirectory() as folder:
        for number in options.ranks * options.turns:
            path = Path(folder) / "measured.json"
            start_processes(measure, (number, get_free_port(), options, path), number, start_method="forkserver")
            turns[number].append(json.loads(path.read_text(encoding="utf-8")))
    results = [summary(number, measured, options) for number, measured in turns.items()]
    require_same(results, options.dtype)
    return results


def summary(num_ranks: int, turns: list[list[dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
    """Returns the numbers over all turns and ranks. A step has the time of its slowest rank."""
    seconds = [max(times) for turn in turns for times in zip(*(each["seconds"] for each in turn), strict=True)]
    everyone = [each for turn in turns for each in turn]
    return {
        "ranks": num_ranks,
        "tokens": options.tokens,
        "best s a step": min(seconds),
        "median s a step": median(seconds),
        "tokens/s": options.tokens / median(seconds),
        "peak GB of the busiest rank": max(each["memory"] for each in everyone) / 1e9,
        "MB sent by a rank in a step": sum(each["sent"] for each in everyone) / len(everyone) / 1e6,
        "MB by formula": bytes_by_formula(num_ranks, options) / 1e6,
        "loss": everyone[0]["loss"],
        "norm": everyone[0]["norm"],
    }


def require_same(results: list[dict[str, Any]], dtype: torch.dtype) -> None:
    """Adds the differences from the first result. Raises WrongResultError if they are more than rounding."""
    first = results[0]
    for each in results:
        for name in ("loss", "norm"):
            each[f"{name} differs"] = share = abs(each[name] / first[name] - 1)
            if not share <= LARGEST_DIFFERENCE[dtype]:
                raise WrongResultError(
                    f"the {name} is {each[name]} on {each['ranks']} ranks and {first[name]} on {first['ranks']}, a "
                    f"difference of {share:.1e}; rounding to {dtype} gives less than {LARGEST_DIFFERENCE[dtype]}"
                )


def report(results: list[dict[str, Any]], options: argparse.Namespace) -> str:
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "CPU, a thread a rank"
    head = report_head(["python", "tools/bench_context.py", *options.words], machine, "torch", "triton", "flash_attn")
    sizes = f"{options.shape}, {options.dtype}, activation_checkpointing: {options.checkpointing}"
    formats = {"ranks": "d", "tokens": ",", "loss": ".6f", "norm": ".6f", "loss differs": ".1e", "norm differs": ".1e"}
    rows = [[format(value, formats.get(name, ",.4g")) for name, value in each.items()] for each in results]
    return f"{head}\n\n{sizes}\n\n{markdown_table(list(results[0]), rows)}\n"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--device", choices=tuple(DEFAULTS), default="cuda", help="(default: %(default)s); cpu: gloo and tiny sizes")
    add("--ranks", type=positive, nargs="+", metavar="N", help="default: 1, 2, 4 ... up to the GPUs; 1 and 2 on a CPU")
    add("--tokens", type=positive, help="of the conversation (default: 32768; 96 on a CPU)")
    add("--shape", metavar="NAME[:LAYERS]", help=f"{', '.join(SHAPES)} (default: llama3.2-1b; tiny on a CPU)")
    add("--checkpointing", choices=ACTIVATION_CHECKPOINTING, help="(default: full; none on a CPU)")
    add("--turns", type=positive, default=2, help="of each number of ranks (default: %(default)s)")
    add("--rounds", type=positive, default=4, help="timed steps of a turn (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="also write the report there")
    add("--json", type=Path, metavar="FILE", help="also write every number there")
    options = parser.parse_args(arguments)
    most = 2 if options.device == "cpu" else torch.cuda.device_count()
    defaults = {"ranks": [2**n for n in range(most.bit_length())], **DEFAULTS[options.device]}
    given = {name: value for name, value in vars(options).items() if value is not None or name not in defaults}
    return argparse.Namespace(**defaults | given, words=arguments)


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    if options.device == "cuda" and (number := torch.cuda.device_count()) < 2:
        show(f"bench_context: skipped, because torch finds {number} GPUs and ranks that share a pack need two")
        return 0
    try:
        options.config = LlamaConfig.from_hf({"model_type": "llama", **shape_of(options.shape)})
        results = benchmark(options)
        write_report(report(results, options), results, out=options.out, json_file=options.json)
        return 0
    except (WrongResultError, ValueError, OSError, ProcessException) as error:
        refused = refuse(error, "bench_context")
        return 1 if isinstance(error, WrongResultError) else refused


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
