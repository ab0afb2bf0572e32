"""Times whole training steps by turns with transformers': tokens a second, peak memory, and whether the loss agrees.

    python tools/bench_step.py --model FOLDER --conversations gsm8k_train.jsonl --memory
    python tools/bench_step.py --gpu --out docs/benchmarks/step-gpu.md

All ways train the same conversations, tokenized before the clock starts, from equal weights in fp32 with bf16 compute
and fused AdamW. With peft and "sftron, LoRA", the weights are frozen in the compute type, and adapters of rank 16 on
all linear layers are trained in fp32. With "sftron, LoRA, streamed", the frozen weights stay in a file. Before
anything is timed, the losses of the labeled tokens are compared. The exit status is 0 if the ways were measured, 1 if
two of them do not compute the same, and 2 if the arguments cannot be used. With peft installed, its way is timed too.
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
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

# Makes sftron and tools importable without an installation.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sftron.checkpoint.hf_weights import StreamedBase, load_model
from sftron.checkpoint.model_folder import read_config
from sftron.commands.arguments import positive
from sftron.data.loader import collate
from sftron.data.packing import PoolPacking, lay_out
from sftron.data.types import IGNORE_INDEX, ConversationKey, LabeledConversation
from sftron.errors import exit_with, refuse, show
from sftron.models.adapters import (
    ALL_LINEAR,
    AdapterStart,
    LoraSpec,
    add_adapters,
    initial_value,
    match_targets,
    projections_of,
)
from sftron.models.architecture import LlamaConfig
from sftron.models.fusion import fuse_state_dict
from sftron.models.llama import LlamaForSFT, attention_of_layers
from sftron.models.weight_stream import WeightStream
from sftron.train.flops import TrainedMatrices, find_peak, model_flops
from sftron.train.measured_memory import memory_status
from sftron.train.optimizer import make_by_name
from sftron.train.step import train_step
from tools.bench_report import WrongResultError, benchmark_parser, markdown_table, report_head, write_report

POOL_SIZE = 256
RANK, ALPHA = 16, 32
PEFT, FULL = "peft, flattened", "sftron, minibatch"
"""The ways that the others are compared with."""
LIGER, FA2_LIGER = "transformers, padded, compiled, Liger", "transformers, flattened, FA2, Liger"
FA2, PEFT_FA2 = "transformers, flattened, FA2", "peft, flattened, FA2"
FLASH_ATTENTION = next((name for name in ("flash_attn", "kernels") if find_spec(name)), "flash_attn")
"""Where transformers has flash-attention 2 from: the package, or else the Hub's kernel, which `kernels` downloads."""
NEEDS = {
    PEFT: ("peft",),
    LIGER: ("liger_kernel",),
    FA2: (FLASH_ATTENTION,),
    PEFT_FA2: ("peft", FLASH_ATTENTION),
    FA2_LIGER: ("liger_kernel", FLASH_ATTENTION),
}
"""The modules that ways need besides transformers. Without flash-attention, flattened rows take a T x T mask."""
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


# --- The ways ---


def rows_of_file(path: Path, tokenizer_folder: Path) -> list[LabeledConversation]:
    from sftron import ChatTokenizer, PackedDataset

    tokenizer = ChatTokenizer.from_pretrained(str(tokenizer_folder))
    preparation = PackedDataset.from_path(path, tokenizer, sequence_length=4096).preparation
    rows = preparation.read_many(list(preparation.all_keys()))
    return [row for row in rows if isinstance(row, LabeledConversation)]


def random_rows(lengths: Sequence[int], vocab_size: int, *, trained_share: float = 0.5) -> list[LabeledConversation]:
    """Returns conversations of random ids, of which the last `trained_share` is trained."""
    chance, rows = np.random.default_rng(0), []
    for length in lengths:
        ids = chance.integers(vocab_size, size=length).astype(np.int32)
        labels = np.append(ids[1:], np.int32(IGNORE_INDEX))
        labels[: max(0, int(length * (1 - trained_share)) - 1)] = IGNORE_INDEX
        weights = (labels != IGNORE_INDEX).astype(np.float32)
        rows.append(LabeledConversation(ids, labels, weights, np.zeros(length, np.uint8), ConversationKey(0, 0)))
    return rows


@dataclass(frozen=True, slots=True)
class StepBatch:
    inputs: Any
    rows: list[LabeledConversation]
    num_positions: int


@dataclass(frozen=True, slots=True)
class Way:
    """One implementation of training.

    `batches` turns rows into the batches for `step`. `token_losses` returns fp32 losses in the order of the rows.
    """

    name: str
    batches: Callable[[Iterator[LabeledConversation]], Iterator[StepBatch]]
    step: Callable[[StepBatch], object]
    token_losses: Callable[[list[LabeledConversation]], Tensor]
    trained: TrainedMatrices
    stream: WeightStream | None = None


def make_reference_model(options: argparse.Namespace, attention: str = "sdpa") -> Any:
    """Returns transformers' LlamaForCausalLM with fp32 weights: those of a folder, or random ones."""
    import transformers

    with torch.device(options.device):
        if options.model:
            load = transformers.LlamaForCausalLM.from_pretrained
            return load(options.model, dtype=torch.float32, attn_implementation=attention).train()
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**options.hf_config, attn_implementation=attention)
        return transformers.AutoModelForCausalLM.from_config(config).train()


def make_native_model(options: argparse.Namespace, *, lora: bool) -> LlamaForSFT:
    """Returns LlamaForSFT with the weights of the reference model."""
    reference = make_reference_model(options)
    config = LlamaConfig.from_hf(reference.config.to_dict())
    attention = attention_of_layers("auto", config, options.device, options.dtype)
    with options.device:
        max_positions = max(options.budget, config.max_position_embeddings)
        model = LlamaForSFT(config, attention, options.dtype, max_positions, options.checkpointing)
    own, weights = dict(model.named_parameters()), reference.state_dict()
    with torch.no_grad():
        for name, tensor in fuse_state_dict(own, config, weights.__getitem__):
            own[name].copy_(tensor)
    return with_native_adapters(model, options.dtype) if lora else model


def make_streamed_model(options: argparse.Namespace) -> LlamaForSFT:
    """Returns LlamaForSFT with adapters, whose frozen weights stream from a file in the compute type."""
    home = tempfile.TemporaryDirectory()
    folder = Path(home.name)
    make_reference_model(options).to(options.dtype).save_pretrained(folder)
    config = read_config(folder)
    model = load_model(
        folder,
        attention_of_layers("auto", config, options.device, options.dtype),
        options.dtype,
        max(options.budget, config.max_position_embeddings),
        options.checkpointing,
        device=options.device,
        adapters=AdapterStart(spec=_lora_spec(config)),
        frozen_dtype=options.dtype,
        stream=StreamedBase(folder, ""),
    )
    weakref.finalize(model, home.cleanup)  # a file that is removed counts as changed
    return model


def _lora_spec(config: LlamaConfig) -> LoraSpec:
    """Returns adapters of all linear layers of a model with this architecture."""
    with torch.device("meta"):
        return spec_of(list(projections_of(LlamaForSFT(config), config)))


def spec_of(names: Sequence[str]) -> LoraSpec:
    return LoraSpec(ranks=dict.fromkeys(names, RANK), alphas=dict.fromkeys(names, ALPHA))


@torch.no_grad()
def with_native_adapters(model: LlamaForSFT, dtype: torch.dtype) -> LlamaForSFT:
    names = match_targets(ALL_LINEAR, list(projections_of(model, model.config)))
    add_adapters(model, model.config, spec_of(names))
    for name, each in model.named_parameters():
        if each.requires_grad:
            each.copy_(initial_value(name, each.shape, seed=0, init="default", row_norms=lambda _: Tensor()))
        elif each.ndim >= 2:
            each.data = each.data.to(dtype)
    return model


def trained_matrices(model: nn.Module, *, lora: bool) -> TrainedMatrices:
    if not lora:
        return TrainedMatrices()
    num_trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    return TrainedMatrices(blocks=False, head=False, adapter_parameters=num_trained)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = ((name, each) for name, each in model.named_parameters() if each.requires_grad)
    return make_by_name(parameters, learning_rate=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


def collated(rows: list[LabeledConversation], *, flat: bool) -> dict[str, Tensor]:
    """Returns the inputs of transformers' model: one row without padding if `flat`, else padded rows."""
    from transformers import DataCollatorWithFlattening

    # Labels are shifted back, because transformers shifts them itself.
    features = [
        {"input_ids": row.input_ids.tolist(), "labels": [IGNORE_INDEX, *row.labels[:-1].tolist()]} for row in rows
    ]
    if flat:
        return DataCollatorWithFlattening()(features)  # pyright: ignore[reportReturnType]
    inputs = {
        key: pad_sequence([torch.tensor(each[key]) for each in features], batch_first=True, padding_value=filler)
        for key, filler in (("input_ids", 0), ("labels", IGNORE_INDEX))
    }
    lengths, longest = torch.tensor([len(row) for row in rows]), max(map(len, rows))
    if int(lengths.min()) < longest:
        inputs["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return inputs


def transformers_way(
    name: str,
    options: argparse.Namespace,
    *,
    flat: bool,
    lora: bool = False,
    compiled: bool = False,
    liger: bool = False,
    attention: str = "sdpa",
) -> Way:
    model = make_reference_model(options, attention)
    if lora:
        import peft

        adapters = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=ALL_LINEAR)
        model: Any = peft.get_peft_model(model.to(options.dtype), adapters)
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama  # pyright: ignore[reportMissingImports]

        apply_liger_kernel_to_llama(model=model)
    optimizer = make_optimizer(model)
    forward = torch.compile(model, dynamic=False) if compiled else model

    def call(function: Callable[..., Any], inputs: dict[str, Tensor]) -> Any:
        moved = {key: tensor.to(options.device) for key, tensor in inputs.items()}
        with torch.autocast(options.device.type, torch.bfloat16, enabled=options.dtype != torch.float32):
            # With the default use_cache=True, flattened documents are not isolated.
            return function(**moved, use_cache=False)

    def batches(rows: Iterator[LabeledConversation]) -> Iterator[StepBatch]:
        while chunk := list(itertools.islice(rows, options.per_step)):
            inputs = collated(chunk, flat=flat)
            yield StepBatch(inputs, chunk, inputs["input_ids"].numel())

    def step(batch: StepBatch) -> None:
        call(forward, batch.inputs).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def token_losses(rows: list[LabeledConversation]) -> Tensor:
        inputs = collated(rows, flat=flat)
        labels = inputs.pop("labels")[:, 1:].to(options.device)
        logits, is_labeled = call(model, inputs).logits[:, :-1], labels != IGNORE_INDEX
        return F.cross_entropy(logits[is_labeled].float(), labels[is_labeled], reduction="none")

    return Way(name, batches, step, token_losses, trained_matrices(model, lora=lora))


def native_way(
    name: str,
    options: argparse.Namespace,
    *,
    pooled: bool,
    lora: bool = False,
    compiled: bool = False,
    streams: bool = False,
) -> Way:
    model = make_streamed_model(options) if streams else make_native_model(options, lora=lora)
    optimizer = make_optimizer(model)
    if compiled:
        for block in model.model.layers:
            block.compile()

    def pack(rows: list[LabeledConversation], budget: int) -> Any:
        packed = lay_out(rows, token_budget=budget, remove_cross_attention=True, pad_id=0)
        return collate(packed, keep_tail=options.device.type == "cuda")

    def chosen(rows: Iterator[LabeledConversation]) -> Iterator[tuple[list[LabeledConversation], int]]:
        """Yields the rows of each pack, and its budget."""
        while not pooled:
            chunk = list(itertools.islice(rows, options.per_step))
            yield chunk, sum(map(len, chunk))
        packing, pending = PoolPacking(POOL_SIZE), list[LabeledConversation]()
        while True:
            pending += itertools.islice(rows, POOL_SIZE - len(pending))
            indices = set(packing.choose([len(row) for row in pending], options.budget))
            yield [row for index, row in enumerate(pending) if index in indices], options.budget
            pending = [row for index, row in enumerate(pending) if index not in indices]

    def batches(rows: Iterator[LabeledConversation]) -> Iterator[StepBatch]:
        for chunk, budget in chosen(rows):
            batch = pack(chunk, budget)
            yield StepBatch(batch, chunk, len(batch.input_ids))

    def step(batch: StepBatch) -> None:
        train_step(model, optimizer, [batch.inputs], max_grad_norm=1.0)

    @torch.no_grad()
    def token_losses(rows: list[LabeledConversation]) -> Tensor:
        batch, device = pack(rows, sum(map(len, rows))), options.device
        ids, positions = batch.input_ids.to(device), batch.position_ids.to(device)
        hidden = model(ids, positions, batch.cu_seqlens, batch.max_seqlen)
        logits = model.head.logits(hidden[batch.label_positions.to(device)]).float()
        return F.cross_entropy(logits, batch.labels.to(device), reduction="none")

    return Way(name, batches, step, token_losses, trained_matrices(model, lora=lora), model.stream)


def ways_of(options: argparse.Namespace) -> dict[str, Callable[[], Way]]:
    """Returns the functions that make the ways, by name; those of packages that are not installed are left out."""
    ways = {
        "transformers, padded": partial(transformers_way, flat=False),
        "transformers, flattened": partial(transformers_way, flat=True),
        FULL: partial(native_way, pooled=False),
        "sftron, pool": partial(native_way, pooled=True),
        PEFT: partial(transformers_way, flat=True, lora=True),
        "sftron, LoRA": partial(native_way, pooled=False, lora=True),
        "sftron, LoRA, streamed": partial(native_way, pooled=False, lora=True, streams=True),
    }
    if options.gpu:
        ways["transformers, padded, compiled"] = partial(transformers_way, flat=False, compiled=True)
        ways["sftron, pool, compiled"] = partial(native_way, pooled=True, compiled=True)
        ways[LIGER] = partial(transformers_way, flat=False, compiled=True, liger=True)
        with_fa2 = partial(transformers_way, flat=True, attention="flash_attention_2")
        ways |= {FA2: with_fa2, FA2_LIGER: partial(with_fa2, liger=True), PEFT_FA2: partial(with_fa2, lora=True)}
    missing = {name for name, modules in NEEDS.items() if any(find_spec(module) is None for module in modules)}
    return {name: partial(make, name, options) for name, make in ways.items() if name not in missing}


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
    waited = {way.name: way.stream.waited for way in ways if way.stream}
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
    for way in ways:
        if way.stream:
            seconds = (way.stream.waited - waited[way.name]) / options.rounds
            found[way.name]["s a step waited for weights"] = seconds
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
    columns = list({key: None for each in results.values() for key in each})
    rows = [
        [name, *("-" if each.get(key) is None else f"{each[key]:,.4g}" for key in columns)]
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
