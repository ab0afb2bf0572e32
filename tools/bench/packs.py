"""Whole steps on a GPU: documents of one length in full packs, against transformers, compiled, and with Liger.

Of one length, so that transformers' best is to stack them: no padding, no mask. On a CPU with tiny shapes the same code
runs, for tests; torch.compile is traced there and not lowered, as there is nothing to measure.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from sftron.models.llama import BLOCKS, LlamaForSFT
from sftron.models.llama_config import LlamaConfig
from sftron.train.flops import model_flops
from sftron.train.gpu_peaks import find_peak
from tools.bench import conversations, measure, models
from tools.bench.conversations import IdEncoder, Row
from tools.bench.measure import Timed
from tools.bench.ways import OursWay, TransformersWay, Way, each, flatten, pad_to_longest

SHARE_TRAINED = 0.5
LEARNING_RATE = 0.0
"""The work of an update is the same, and the weights of all ways stay equal."""

MFU_WANTED = {"llama3.2-1b": 0.45, "llama3-8b": 0.55}
FASTER_THAN_TRANSFORMERS, FASTER_THAN_LIGER = 1.4, 1.10
THEIRS, THEIRS_COMPILED, LIGER = "transformers", "transformers + compile", "transformers + Liger + compile"

Family = Callable[[], list[Way]]
"""Makes the ways that share a model and an optimizer."""


def run(options: argparse.Namespace, shape: str, device: torch.device) -> dict[str, Any]:
    """One shape: checked, timed by turns, with the matmul rate measured in the same rounds."""
    sizes = models.shape_of(shape)
    num_documents = options.pack_length // options.document_length
    draw = random.Random(options.seed)
    lengths = [options.document_length] * (num_documents * 4)
    rows = conversations.id_rows(lengths, sizes["vocab_size"], draw, SHARE_TRAINED)
    families, left_out = _families(options, sizes, device, num_documents)
    together = _fit_together(sizes, len(families), options.pack_length, device)
    timed: dict[str, Timed] = {}
    checked: dict[str, dict[str, float]] = {}
    parameters: dict[str, int] = {}
    matmul: list[float] = []
    first_pack = rows[:num_documents]
    for group in [families] if together else [[family] for family in families]:
        ways = [way for family in group for way in family()]
        ways, first_losses = _that_run(ways, first_pack, left_out)
        checked |= measure.require_same_losses(ways, first_pack)
        _require_the_loss_of_tokens(first_losses, checked)
        timed |= measure.take_turns(
            ways, rows, options.rounds, device, [first_pack] * 2, between=lambda: matmul.append(matmul_tflops(device))
        )
        parameters |= {way.name: way.num_parameters for way in ways}
        del ways
        _free(device)
    peak = find_peak(device, options.peak_tflops)
    config = LlamaConfig.from_hf({"model_type": "llama", **sizes})
    return {
        "device": str(peak),
        "interleaved": together,
        "left out": left_out,
        "same losses": checked,
        "matmul TFLOP/s": median(matmul),
        "ways": {
            name: _summary(config, each, parameters[name], median(matmul), peak.tflops) for name, each in timed.items()
        },
        "seconds": {name: each.seconds for name, each in timed.items()},
    }


def _families(
    options: argparse.Namespace, sizes: dict[str, Any], device: torch.device, per_step: int
) -> tuple[list[Family], dict[str, str]]:
    """The families, and what is left out, with the reason. All have equal weights: of one seed."""
    encoder, left_out = IdEncoder(), {}

    def build() -> Any:
        return models.make_theirs(None, sizes, device, options.seed)

    def theirs() -> list[Way]:
        model = build()
        optimizer = models.make_optimizer(model, LEARNING_RATE)
        shared = (model, optimizer, encoder)
        return [
            TransformersWay(THEIRS, *shared, pad_to_longest, per_step),
            TransformersWay(THEIRS_COMPILED, *shared, pad_to_longest, per_step, forward=_compiled(model)),
            TransformersWay("transformers, flattened, sdpa", *shared, flatten, per_step),
            TransformersWay("transformers, flattened, flex", *shared, flatten, per_step, attention="flex_attention"),
        ]

    def liger() -> list[Way]:
        from liger_kernel.transformers import apply_liger_kernel_to_llama  # pyright: ignore[reportMissingImports]

        model = build()
        apply_liger_kernel_to_llama(model=model)
        optimizer = models.make_optimizer(model, LEARNING_RATE)
        return [TransformersWay(LIGER, model, optimizer, encoder, pad_to_longest, per_step, forward=_compiled(model))]

    def ours() -> list[Way]:
        first = models.make_ours(build(), options.pack_length)
        optimizer = models.make_optimizer(first, LEARNING_RATE)
        ways: list[Way] = []
        for checkpointing in ("none", "selective"):
            if checkpointing not in BLOCKS:
                continue
            for compiled in (False, True):
                model = models.sharing_weights(first, checkpointing)
                if compiled:
                    _compile_blocks(model)
                name = f"sftron, compile {'on' if compiled else 'off'}, checkpointing {checkpointing}"
                choose = each(per_step)
                ways.append(OursWay(name, model, optimizer, encoder, choose, options.pack_length, keep_tail=True))
        return ways

    families: list[Family] = [theirs, ours]
    if device.type != "cuda":
        left_out[LIGER] = "its kernels need a GPU"
    elif importlib.util.find_spec("liger_kernel") is None:
        left_out[LIGER] = "liger_kernel is not installed (pip install liger-kernel)"
    else:
        families.insert(1, liger)
    return families, left_out


def _compiled(model: Any) -> Any:
    """The whole model at once, which also fuses its loss: transformers' best."""
    return torch.compile(model, dynamic=False, backend=_compiler(next(model.parameters()).device))


def _compile_blocks(model: LlamaForSFT) -> None:
    """As the trainer does."""
    for block in model.model.layers:
        block.compile(backend=_compiler(model.head_weight.device))


def _compiler(device: torch.device) -> str:
    return "inductor" if device.type == "cuda" else "eager"


def _that_run(
    ways: Sequence[Way], first_pack: Sequence[Row], left_out: dict[str, str]
) -> tuple[list[Way], dict[str, float]]:
    """Without transformers' ways that cannot make a step here; one of ours that cannot is an error. And the losses of
    those steps: every pack has one shape, so what is compiled here is what is timed."""
    running, losses = [], {}
    for way in ways:
        try:
            losses[way.name] = way.step(next(way.batches(first_pack)))
        except Exception as error:
            if way.is_ours:
                raise
            left_out[way.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            running.append(way)
    return running, losses


def _require_the_loss_of_tokens(losses: dict[str, float], checked: dict[str, dict[str, float]]) -> None:
    """Raises DifferentLossesError where a step, compiled or not, has another loss than its tokens have on average."""
    for name, loss in losses.items():
        if not abs(loss - checked[name]["loss"]) <= 0.01 * checked[name]["loss"]:
            tokens = f"{checked[name]['loss']:.4f} is the mean over its tokens"
            raise measure.DifferentLossesError(f"{name}: the loss of a step is {loss:.4f}, and {tokens}")


def _fit_together(sizes: dict[str, Any], num_families: int, pack_length: int, device: torch.device) -> bool:
    """Whether all families' weights, gradients and AdamW states fit beside the activations of one step: 25 units of
    2 bytes x hidden size a token and layer, and four times the logits in fp32."""
    if device.type != "cuda":
        return True
    with torch.device("meta"):
        model = LlamaForSFT(LlamaConfig.from_hf({"model_type": "llama", **sizes}))
    states = 16 * num_families * sum(parameter.numel() for parameter in model.parameters())
    activations = 25 * 2 * sizes["hidden_size"] * sizes["num_hidden_layers"] * pack_length
    logits = 4 * 4 * sizes["vocab_size"] * pack_length
    return states + activations + logits < torch.cuda.get_device_properties(device).total_memory


def _free(device: torch.device) -> None:
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def matmul_tflops(device: torch.device) -> float:
    """Of one large bf16 product of random numbers: what this device reaches at all, now."""
    size, repeats = (8192, 5) if device.type == "cuda" else (64, 1)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    torch.mm(left, right)
    measure.wait_for(device)
    started = time.perf_counter()
    for _ in range(repeats):
        torch.mm(left, right)
    measure.wait_for(device)
    return 2 * size**3 * repeats / (time.perf_counter() - started) / 1e12


def _summary(
    config: LlamaConfig, timed: Timed, num_parameters: int, matmul: float, peak: float | None
) -> dict[str, Any]:
    """MFU of the median step by the formula, over the peak and over the matmul rate. peak GB: of one step, with the
    weights and AdamW's state, 12 bytes a parameter."""
    summary = measure.summary(timed)
    flops = [
        model_flops(config, num_tokens=batch.num_tokens, num_labelled=batch.num_trained, document_lengths=batch.lengths)
        for batch in timed.batches
    ]
    tflops = median(f / s for f, s in zip(flops, timed.seconds, strict=True)) / 1e12
    return summary | {
        "TFLOP/s": tflops,
        "mfu": tflops / peak if peak else None,
        "of matmul rate": tflops / matmul,
        "peak GB": (timed.peak_bytes + 12 * num_parameters) / 1e9 if timed.peak_bytes else None,
    }


def targets(shape: str, found: dict[str, Any]) -> dict[str, bool]:
    """What is asked for, in words with what was found, and whether it is reached."""
    ways = found["ways"]
    rates = {name: each["median"] for name, each in ways.items()}
    best = max((name for name in rates if name.startswith("sftron")), key=lambda name: rates[name])
    said: dict[str, bool] = {}

    def over(name: str, least: float) -> None:
        if name in rates:
            ratio = rates[best] / rates[name]
            said[f"{best}, over {name}: {ratio:.2f}x, wanted {least}x"] = ratio >= least

    over(THEIRS, FASTER_THAN_TRANSFORMERS)
    over(LIGER, FASTER_THAN_LIGER)
    wanted, mfu = MFU_WANTED.get(shape.split(":")[0]), ways[best]["mfu"]
    if wanted and mfu:
        said[f"mfu {mfu:.1%}, wanted {wanted:.0%}"] = mfu >= wanted
    return said
