"""One block without its attention, forward and backward: kernels of our own or torch.compile, and what each mode keeps.

    python tools/bench_block.py --shape 8b --tokens 16384 --json block.json

Variants take turns, so that a slow moment of the machine meets all of them. Attention gives back its queries.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from sftron.kernels.rope_table import build_rope_table
from sftron.models.llama import BLOCKS, LlamaBlock
from sftron.models.llama_config import LlamaConfig

SHAPES = {
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
}
"""SmolLM2 135M, Llama 3.2 1B, Llama 3.1 8B."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of a forward and backward pass: the median, and the middle half of all runs.

    peak_gigabytes: on a GPU, at most allocated beyond what was there before the pass.
    """

    variant: str
    median_ms: float
    quarter_ms: float
    three_quarters_ms: float
    peak_gigabytes: float | None


def measure(shape: str, num_tokens: int, device: torch.device, num_runs: int) -> list[Timing]:
    """Every way of activation checkpointing, as it is and compiled, bf16 with fp32 masters."""
    config = LlamaConfig.from_hf({"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 8, **SHAPES[shape]})
    table_PD = build_rope_table(num_tokens, config.head_dim, 10000.0, None).to(device)
    x_TH = torch.randn(num_tokens, config.hidden_size, device=device, dtype=torch.bfloat16)
    variants: dict[str, Callable[[], None]] = {}
    for mode in BLOCKS:
        for compiled in ("", " compiled"):
            block = BLOCKS[mode](config).to(device)
            if compiled:
                block.compile()
            variants[mode + compiled] = _pass(block, x_TH, table_PD)
    for run in variants.values():
        for _ in range(3):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    peaks: dict[str, float | None] = dict.fromkeys(variants)
    for _ in range(num_runs):
        for name, run in variants.items():
            started, before = _now(device), _reset_peak(device)
            run()
            seconds[name].append(_now(device) - started)
            if device.type == "cuda":
                peaks[name] = (torch.cuda.max_memory_allocated(device) - before) / 1e9
    return [_timing(name, runs, peaks[name]) for name, runs in seconds.items()]


def _pass(block: LlamaBlock, x_TH: Tensor, table_PD: Tensor) -> Callable[[], None]:
    position_ids = torch.arange(len(x_TH), device=x_TH.device)

    def run() -> None:
        block.zero_grad(set_to_none=True)
        x = x_TH.detach().requires_grad_()
        block(x, position_ids, table_PD, lambda q, k, v: q).backward(x_TH)

    return run


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _reset_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _timing(name: str, seconds: list[float], peak_gigabytes: float | None) -> Timing:
    quarters = [1000 * value for value in statistics.quantiles(seconds, n=4)]
    return Timing(name, quarters[1], quarters[0], quarters[2], peak_gigabytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write the timings here")
    arguments = parser.parse_args()
    timings = measure(arguments.shape, arguments.tokens, torch.device(arguments.device), arguments.runs)
    for timing in timings:
        peak = "" if timing.peak_gigabytes is None else f"  {timing.peak_gigabytes:6.2f} GB"
        spread = f"{timing.quarter_ms:.2f} to {timing.three_quarters_ms:.2f}"
        print(f"{timing.variant:20} {timing.median_ms:8.2f} ms  ({spread}){peak}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(timing) for timing in timings], indent=1) + "\n")


if __name__ == "__main__":
    main()
