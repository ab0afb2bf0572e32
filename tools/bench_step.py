"""Times whole training steps by turns with transformers': tokens a second, peak memory, and whether the loss agrees.

    python tools/bench_step.py --model FOLDER --conversations gsm8k_train.jsonl --memory
    python tools/bench_step.py --gpu --out docs/benchmarks/step-gpu.md

All ways train the same conversations, tokenized before the clock starts, from equal weights in fp32 with bf16 compute
and fused AdamW. With peft and "sftron, LoRA", the weights are frozen in the compute type, and adapters of rank 16 on
all linear layers are trained in fp32. Before anything is timed, the losses of the labeled tokens are compared. The exit
status is 0 if the ways were measured, 1 if two of them do not compute the same, and 2 if the arguments cannot be used.
With peft installed, its way is timed too.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

# Makes sftron and tools importable without an installation.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from torch import Tensor

from sftron.commands.arguments import positive
from sftron.data.types import IGNORE_INDEX
from sftron.errors import exit_with, refuse, show
from sftron.models.architecture import LlamaConfig
from sftron.train.flops import find_peak, model_flops
from sftron.train.measured_memory import memory_status
from tools.bench_report import WrongResultError, benchmark_parser, markdown_table, report_head, write_report
from tools.bench_ways import FULL, PEFT, POOL_SIZE, StepBatch, Way, random_rows, rows_of_file, ways_of

LARGEST_DIFFERENCE = 0.08
"""The largest accepted difference of token losses between two ways, as a share of their standard deviation. Rounding to
bf16 gives 0.005 to 0.04. Documents that are not isolated give 0.1 with random weights and 1.0 with those of SmolLM2."""

_SHAPE_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "rope_theta", "tie_word_embeddings"),
)
SHAPES = {
    "tiny": (48, 96, 2, 6, 2, 800, 1e4, True),
    "smollm2-135m": (576, 1536, 30, 9, 3, 49_152, 1e5, True),
    "llama3.2-1b": (2048, 8192, 16, 32, 8, 128_256, 5e5, True),
    "llama3-8b": (4096, 14_336, 32, 32, 8, 128_256, 5e5, False),
}
"""The values of _SHAPE_KEYS by name."""


# --- Measuring ---


def token_losses(ways: Sequence[Way], options: argparse.Namespace, expected: Tensor | None = None) -> Tensor:
    """Returns the token losses of the first way, or `expected`.

    Raises WrongResultError if the losses of a way differ from them by more than rounding.
    """
    rows = options.rows[: options.per_step]
    for way in ways:
        losses = way.token_losses(rows).cpu()
        expected = losses if expected is None else expected
        if losses.shape != expected.shape:
            raise WrongResultError(f"{way.name} trains {len(losses)} of these tokens, not {len(expected)}")
        share = ((losses - expected).square().mean().sqrt() / expected.std()).item()
        if not share < LARGEST_DIFFERENCE:
            raise WrongResultError(
                f"{way.name} does not compute what {first_way(options)} does: the token losses differ by {share:.2f} "
                f"of their spread, and rounding gives less than {LARGEST_DIFFERENCE}; nothing was timed"
            )
    assert expected is not None
    return expected


def first_way(options: argparse.Namespace) -> str:
    """Returns the name of the way with whose losses those of the others are compared."""
    return (options.ways or list(ways_of(options)))[0]


def take_turns(ways: Sequence[Way], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Times the steps of all ways in turn, one step at a time. Returns the rates of each way."""
    streams = {way.name: way.batches(itertools.cycle(options.rows)) for way in ways}
    steps: dict[str, list[tuple[float, StepBatch]]] = {way.name: [] for way in ways}
    for way in ways:
        for _ in range(2 if options.gpu else 1):  # creates the optimizer state and compiles
            way.step(next(streams[way.name]))
    if options.gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(options.rounds):
        for way in ways:
            synchronize(options.device)
            started = time.perf_counter()
            batch = next(streams[way.name])
            way.step(batch)
            synchronize(options.device)
            steps[way.name].append((time.perf_counter() - started, batch))
    found = {way.name: summary(way, steps[way.name], options) for way in ways}
    if options.gpu:  # there, one way at a time
        peak = torch.cuda.max_memory_allocated() / 1e9
        found = {name: {**each, "peak GB": peak} for name, each in found.items()}
    return found


def summary(way: Way, steps: Sequence[tuple[float, StepBatch]], options: argparse.Namespace) -> dict[str, Any]:
    rows = [row for _, batch in steps for row in batch.rows]
    num_tokens, seconds = sum(map(len, rows)), sum(each for each, _ in steps)
    num_labeled = sum(int((row.labels != IGNORE_INDEX).sum()) for row in rows)
    config, lengths = LlamaConfig.from_hf(options.hf_config), [len(row) for row in rows]
    flops = model_flops(config, num_labeled=num_labeled, document_lengths=lengths, trained=way.trained)
    peak = find_peak(options.device, None).tflops
    return {
        "tokens/s": num_tokens / seconds,
        "median s a step": median(each for each, _ in steps),
        "computed / real": sum(batch.num_positions for _, batch in steps) / num_tokens,
        "TFLOP/s": flops / seconds / 1e12,
        "mfu": flops / seconds / 1e12 / peak if peak else None,
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_memory_gb(name: str, options: argparse.Namespace) -> float:
    """Returns the resident memory of the largest step of a way beyond that of the imports, in GB of 1e9 bytes.

    The peak is reset before the steps, because it also counts what was needed to make the model.
    """
    before = memory_status("VmRSS")
    way = ways_of(options)[name]()
    batches = list(itertools.islice(way.batches(itertools.cycle(options.rows)), options.rounds))
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    for batch in (batches[0], max(batches, key=lambda batch: batch.num_positions)):
        way.step(batch)
    return (memory_status("VmHWM") - before) / 1e9


def measured_alone(name: str, words: Sequence[str]) -> float:
    """Measures the memory of one way by running this script again in a separate process."""
    command = [sys.executable, __file__, *words, "--memory-of", name]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ValueError(f"the memory of {name} could not be measured: {ended.stderr[-2000:]}")
    return float(ended.stdout.splitlines()[-1])


def measure(
    names: Sequence[str], options: argparse.Namespace, expected: Tensor | None
) -> tuple[dict[str, dict[str, Any]], Tensor]:
    """Times some ways by turns. Returns their numbers, and the token losses for the next."""
    make = ways_of(options)
    ways = [make[name]() for name in names]
    expected = token_losses(ways, options, expected)
    found = take_turns(ways, options)
    del ways
    gc.collect()
    torch.compiler.reset()
    return found, expected


def benchmark(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    make = ways_of(options)
    names = options.ways or list(make)
    if unknown := [name for name in names if name not in make]:
        raise ValueError(f"--ways {unknown[0]!r} is not one of: {'; '.join(make)}")
    alone = options.memory and not options.gpu
    memory = {name: {"peak GB": measured_alone(name, options.words)} for name in names} if alone else {}
    # The weights, gradients and AdamW states of all ways do not always fit in GPU memory together.
    groups = [[name] for name in names] if options.gpu else [names]
    found: dict[str, dict[str, Any]] = {}
    expected = None
    for group in groups:
        measured, expected = measure(group, options, expected)
        found |= measured
    for other in (each for each in (PEFT, FULL) if each in found):
        for each in found.values():
            each[f"/ {other}"] = each["tokens/s"] / found[other]["tokens/s"]
    return {name: each | memory.get(name, {}) for name, each in found.items()}


# --- The command ---


def report(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    machine = torch.cuda.get_device_name() if options.gpu else f"{platform.machine()} CPU"
    packages = ("torch", "transformers", "peft", "triton", "liger_kernel")
    columns = list(next(iter(results.values())))
    rows = [
        [name, *("-" if each[key] is None else f"{each[key]:,.4g}" for key in columns)]
        for name, each in results.items()
    ]
    kind = options.model.name if options.model else options.shape
    head = report_head(
        ["python", "tools/bench_step.py", *options.words], f"{machine}, {torch.get_num_threads()} threads", *packages
    )
    return f"{head}\n\n{kind}\n\n{markdown_table(['', *columns], rows)}\n"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--model", type=Path, metavar="FOLDER", help="a Llama in Hugging Face format, with its tokenizer")
    add("--conversations", type=Path, metavar="FILE", help="what to train on; needs --model; else random ids")
    shape_help = "random weights of a shape; default: smollm2-135m, llama3.2-1b on a GPU"
    add("--shape", metavar="NAME[:LAYERS]", help=shape_help)
    add("--gpu", action="store_true", help="on a CUDA device: documents of 512 tokens, compiled ways too")
    add("--ways", nargs="+", metavar="NAME", help="only these")
    add("--per-step", type=positive, help="conversations a step (default: 8; 32 with --gpu)")
    add("--rounds", type=positive, default=4, help="steps of each way (default: %(default)s)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the products (default: %(default)s)")
    add("--checkpointing", choices=("none", "selective", "full"), default="none", help="of sftron's model")
    add("--memory", action="store_true", help="also the peak memory of each way, on a CPU in a process of its own")
    add("--quick", action="store_true", help="a tiny shape and two rounds, to see that everything runs")
    add("--out", type=Path, metavar="FILE", help="also write the report there")
    add("--json", type=Path, metavar="FILE", help="also write every number there")
    add("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.device, options.dtype = torch.device("cuda" if options.gpu else "cpu"), getattr(torch, options.dtype)
    options.shape = "tiny" if options.quick else options.shape or ("llama3.2-1b" if options.gpu else "smollm2-135m")
    if options.quick:
        options.rounds, options.per_step = 2, 4
    options.per_step = options.per_step or (32 if options.gpu else 8)
    options.words = arguments
    return options


def shape_of(text: str) -> dict[str, Any]:
    """Returns the sizes of a shape, given as NAME or NAME:LAYERS. Raises ValueError for other text."""
    name, _, layers = text.partition(":")
    if name not in SHAPES or (layers and not layers.isdecimal()):
        raise ValueError(f"shape {text!r} is not one of {', '.join(SHAPES)}, or such a name and :LAYERS")
    sizes = {"max_position_embeddings": 16_384, "rms_norm_eps": 1e-5, "head_dim": None}
    sizes |= zip(_SHAPE_KEYS, SHAPES[name], strict=True)
    return sizes | ({"num_hidden_layers": int(layers)} if layers else {})


def read_rows(options: argparse.Namespace) -> None:
    """Sets the rows, the token budget of a pack and the configuration of the model. Raises ValueError."""
    if options.gpu and not torch.cuda.is_available():
        raise ValueError("--gpu: torch finds no CUDA device; leave it out to measure on the CPU")
    if options.conversations and not options.model:
        raise ValueError("--conversations needs --model, for its tokenizer and chat template")
    chance = random.Random(0)
    num_rows = options.per_step * (options.rounds + 2) + POOL_SIZE
    if options.model:
        options.hf_config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    else:
        options.hf_config = {"model_type": "llama", **shape_of(options.shape)}
    if options.conversations:
        rows = rows_of_file(options.conversations, options.model)
        chance.shuffle(rows)
    else:
        longest = 64 if options.quick else 2048
        lengths = [min(longest, max(8, round(chance.lognormvariate(4.6, 1.2)))) for _ in range(num_rows)]
        rows = random_rows([512] * num_rows if options.gpu else lengths, options.hf_config["vocab_size"])
    # A pack of strategy `pool` holds the mean number of tokens in a step of the other ways. Conversations longer than
    # a pack are left out for all ways.
    options.budget = round(sum(map(len, rows)) / len(rows) * options.per_step)
    options.rows = [row for row in rows if len(row) <= options.budget][:num_rows]


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    try:
        read_rows(options)
        if options.memory_of:
            show(str(peak_memory_gb(options.memory_of, options)))
            return 0
        results = benchmark(options)
        text = report(results, options)
        show(text)
        write_report(text, results, out=options.out, json_file=options.json)
    except (WrongResultError, ValueError, OSError) as error:
        refused = refuse(error, "bench_step")
        return 1 if isinstance(error, WrongResultError) else refused
    return 0


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
