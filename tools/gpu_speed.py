"""The stages of tools/gpu.py that measure time: training steps of several trainers, and compiled blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tools.gpu import Parts
from tools.gpu_stages import BF16, batch_of, gpu_of, require_in_transformers, require_same_step

_OFTEN = ["--gpu", "--rounds", "8"]
SHAPES: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "1B": (
        [*_OFTEN, "--shape", "llama3.2-1b", "--per-step", "16"],
        (
            "sftron, minibatch",
            "transformers, flattened, FA2",
            "sftron, pool",
            "transformers, flattened, FA2, Liger",
            "transformers, flattened",
            "transformers, padded",
        ),
    ),
    "8B": (
        [*_OFTEN, "--shape", "llama3-8b", "--per-step", "8"],
        ("sftron, LoRA", "peft, flattened, FA2", "peft, flattened"),
    ),
}
"""The arguments of tools/bench_step.py, and its ways by worth. They fit 80 GB with the activations of all layers."""

COMPILED = ("Llama 3.1", "Gemma 3", "OLMo 2", "Cohere", "Phi 3", "Qwen 3.5", "LFM2")
"""The families whose blocks are compiled: one of each kind of block."""


def speed(parts: Parts) -> None:
    device = gpu_of(parts)
    from tools import bench_kernels, bench_step

    for shape, (arguments, ways) in SHAPES.items():
        options = bench_step.parse_arguments([*arguments, "--ways", *ways])
        options.device = device
        bench_step.read_rows(options)
        expected: list[Tensor] = []

        def measure(way: str, options: Any = options, expected: list[Tensor] = expected) -> dict[str, Any]:
            found, losses = bench_step.measure([way], options, expected[0] if expected else None)
            expected[:] = [losses]
            numbers = found[way]
            return {key: value for key, value in numbers.items() if value is not None}

        for way in ways:
            parts.run(f"{shape}: {way}", partial(measure, way), needs=bench_step.NEEDS.get(way, ()))
    for name in bench_kernels.CASES:
        parts.run(f"kernels: {name}", partial(_kernel_rates, name, device))


def _kernel_rates(name: str, device: torch.device) -> dict[str, Any]:
    """Returns the rate of each implementation by case, as tools/bench_kernels.py measures it."""
    from tools.bench_kernels import Sizes, measured_cases

    rates = {}
    for case in measured_cases([name], Sizes(), 10, device):
        ways = [f"{way} {numbers['rate']:.4g}" for way, numbers in case["ways"].items()]
        rates[case["title"]] = ", ".join([*ways, *case["left out"]]) + f" {case['unit']}"
    return rates


def compiled(parts: Parts) -> None:
    device = gpu_of(parts)
    from tests.models.reference import FAMILIES

    for name in COMPILED:
        parts.run(name, partial(_compiled, FAMILIES[name], device))


def _compiled(options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Compares a step of compiled blocks with the same of blocks that are not compiled."""
    from sftron.models.llama import attention_of_layers
    from sftron.train.step import train_step
    from tests.models.reference import make_native, make_reference

    require_in_transformers(options)
    smaller: dict[str, Any] = options | {"initializer_range": 0.1}
    batch, reference, found = batch_of((9, 30, 25), 97), make_reference(**smaller), []
    for is_compiled in (False, True):
        model = make_native(reference, compute_dtype=BF16)
        model.attention = attention_of_layers("auto", model.config, device, BF16)
        model.to(device)
        if is_compiled:
            torch.compiler.reset()
            for block in model.model.layers:
                block.compile()
        found.append(train_step(model, None, [batch], max_grad_norm=None))
    require_same_step(found[1], found[0], BF16)
    return {"loss": found[1].loss, "not compiled": found[0].loss}
