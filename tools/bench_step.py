"""Times whole training steps by turns with transformers': tokens a second, peak memory, and whether the loss agrees.

    python tools/bench_step.py --model FOLDER --conversations gsm8k_train.jsonl --memory
    python tools/bench_step.py --gpu --out docs/benchmarks/step-gpu.md

All ways train the same conversations, tokenized before the clock starts, from equal weights in fp32 with bf16 compute
and fused AdamW. Before anything is timed, the losses of the labeled tokens are compared. The exit status is 0 if the
ways were measured, 1 if two of them do not compute the same, and 2 if the arguments cannot be used. Needs torch,
transformers and numpy alone.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import platform
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

# Makes sftron importable without an installation.
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sftron.checkpoint.fusion import fuse_state_dict
from sftron.data.loader import collate
from sftron.data.packing import PoolPacking, lay_out
from sftron.data.types import IGNORE_INDEX, ConversationKey, LabeledConversation
from sftron.models.architecture import LlamaConfig
from sftron.models.attention import resolve_attention
from sftron.models.llama import LlamaForSFT
from sftron.train.flops import find_peak, model_flops
from sftron.train.optimizer import make_adamw
from sftron.train.step import train_step

LARGEST_DIFFERENCE = 0.08
"""The largest accepted difference of token losses between two ways, as a share of their standard deviation. Rounding to
bf16 gives 0.005 to 0.04. Documents that are not isolated give 0.1 with random weights and 1.0 with those of SmolLM2."""

POOL_SIZE = 256
_COMMON = {"max_position_embeddings": 16_384, "rms_norm_eps": 1e-5, "head_dim": None}


def _shape(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, theta: float, tied: bool) -> dict:
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "vocab_size": vocab}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return _COMMON | sizes | heads_of | {"rope_theta": theta, "tie_word_embeddings": tied}


SHAPES = {
    "tiny": _shape(48, 96, 2, 6, 2, 800, 1e4, True),
    "smollm2-135m": _shape(576, 1536, 30, 9, 3, 49_152, 1e5, True),
    "llama3.2-1b": _shape(2048, 8192, 16, 32, 8, 128_256, 5e5, True),
    "llama3-8b": _shape(4096, 14_336, 32, 32, 8, 128_256, 5e5, False),
}


class DifferentLossesError(Exception):
    """The token losses of two ways differ by more than rounding."""


@dataclass(frozen=True, slots=True)
class Row:
    """One tokenized conversation. Its labels are not shifted, as the collators of transformers expect."""

    input_ids: list[int]
    labels: list[int]

    def labeled(self) -> LabeledConversation:
        labels = np.array([*self.labels[1:], IGNORE_INDEX], np.int32)
        return LabeledConversation(
            input_ids=np.array(self.input_ids, np.int32),
            labels=labels,
            loss_weights=(labels != IGNORE_INDEX).astype(np.float32),
            role_ids=np.zeros(len(labels), np.uint8),
            key=ConversationKey(0, 0),
        )


# --- Conversations ---


def rows_of_file(path: Path, tokenizer_folder: Path) -> list[Row]:
    """Returns the conversations of a file with their labels from sftron."""
    from sftron import ChatTokenizer, PackedDataset

    tokenizer = ChatTokenizer.from_pretrained(str(tokenizer_folder))
    preparation = PackedDataset.from_path(path, tokenizer, sequence_length=4096).preparation
    read = preparation.read_many(list(preparation.all_keys()))
    kept = [each for each in read if isinstance(each, LabeledConversation)]
    return [Row(each.input_ids.tolist(), [IGNORE_INDEX, *each.labels[:-1].tolist()]) for each in kept]


def random_rows(lengths: Sequence[int], vocab_size: int, seed: int) -> list[Row]:
    """Returns conversations of random ids, of which the second half is trained."""
    chance = np.random.default_rng(seed)
    all_ids = [chance.integers(vocab_size, size=length).tolist() for length in lengths]
    return [Row(ids, [IGNORE_INDEX] * (len(ids) // 2) + ids[len(ids) // 2 :]) for ids in all_ids]


# --- Ways: a batch of rows, the step that trains it, and the losses of its labeled tokens ---


@dataclass(frozen=True, slots=True)
class StepBatch:
    inputs: Any
    rows: list[Row]
    num_positions: int


@dataclass(slots=True)
class Way:
    """One implementation of training.

    `batches` turns rows into the batches for `step`. `token_losses` returns fp32 losses in the order of the rows.
    """

    name: str
    model: nn.Module
    batches: Callable[[Iterator[Row]], Iterator[StepBatch]]
    step: Callable[[StepBatch], object]
    token_losses: Callable[[Sequence[Row]], Tensor]


def make_reference_model(options: argparse.Namespace) -> Any:
    """Returns transformers' LlamaForCausalLM with fp32 weights: those of a folder, or random ones of a given shape."""
    import transformers

    with torch.device(options.device):
        if options.model:
            load = transformers.LlamaForCausalLM.from_pretrained
            return load(options.model, dtype=torch.float32, attn_implementation="sdpa").train()
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model("llama", **shape_of(options.shape), attn_implementation="sdpa")
        return transformers.AutoModelForCausalLM.from_config(config).train()


def shape_of(text: str) -> dict[str, Any]:
    """Returns the sizes of a shape, given as NAME or NAME:LAYERS. Raises ValueError for other text."""
    name, _, layers = text.partition(":")
    if name not in SHAPES or (layers and not layers.isdecimal()):
        raise ValueError(f"shape {text!r} is not one of {', '.join(SHAPES)}, or such a name and :LAYERS")
    return SHAPES[name] | ({"num_hidden_layers": int(layers)} if layers else {})


def make_native_model(options: argparse.Namespace) -> LlamaForSFT:
    """Returns LlamaForSFT with the weights of the reference model; it computes in bf16."""
    reference = make_reference_model(options)
    config = LlamaConfig.from_hf(reference.config.to_dict())
    attention = resolve_attention("auto", options.device, torch.bfloat16, config.head_dim)
    with options.device:
        model = LlamaForSFT(
            config,
            attention,
            torch.bfloat16,
            max(options.budget, config.max_position_embeddings),
            options.checkpointing,
        )
    own, weights = dict(model.named_parameters()), reference.state_dict()
    with torch.no_grad():
        for name, tensor in fuse_state_dict(own, weights.__getitem__):
            own[name].copy_(tensor)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    parameters = ((name, each) for name, each in model.named_parameters() if each.requires_grad)
    return make_adamw(parameters, learning_rate=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


def transformers_way(name: str, options: argparse.Namespace, *, flat: bool, compiled: bool, liger: bool) -> Way:
    model = make_reference_model(options)
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama  # pyright: ignore[reportMissingImports]

        apply_liger_kernel_to_llama(model=model)
    optimizer = make_optimizer(model)
    forward = torch.compile(model, dynamic=False) if compiled else model

    def collated(rows: list[Row]) -> dict[str, Tensor]:
        from transformers import DataCollatorWithFlattening

        features = [{"input_ids": row.input_ids, "labels": row.labels} for row in rows]
        if flat:
            return DataCollatorWithFlattening()(features)  # pyright: ignore[reportReturnType]
        longest = max(len(row.input_ids) for row in rows)
        fillers = {"input_ids": 0, "labels": IGNORE_INDEX}
        padded = {
            key: torch.tensor([each[key] + [filler] * (longest - len(each[key])) for each in features])
            for key, filler in fillers.items()
        }
        lengths = torch.tensor([len(row.input_ids) for row in rows])
        if int(lengths.min()) == longest:
            return padded
        return padded | {"attention_mask": (torch.arange(longest) < lengths[:, None]).long()}

    def call(function: Callable[..., Any], inputs: dict[str, Tensor]) -> Any:
        moved = {key: tensor.to(options.device) for key, tensor in inputs.items()}
        with torch.autocast(options.device.type, torch.bfloat16):
            # With the default use_cache=True, flattened documents are not isolated.
            return function(**moved, use_cache=False)

    def batches(rows: Iterator[Row]) -> Iterator[StepBatch]:
        while chunk := list(itertools.islice(rows, options.per_step)):
            inputs = collated(chunk)
            yield StepBatch(inputs, chunk, inputs["input_ids"].numel())

    def step(batch: StepBatch) -> None:
        call(forward, batch.inputs).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def token_losses(rows: Sequence[Row]) -> Tensor:
        inputs = collated(list(rows))
        labels = inputs.pop("labels")[:, 1:].to(options.device)
        logits, is_labeled = call(model, inputs).logits[:, :-1], labels != IGNORE_INDEX
        return F.cross_entropy(logits[is_labeled].float(), labels[is_labeled], reduction="none")

    return Way(name, model, batches, step, token_losses)


def native_way(name: str, options: argparse.Namespace, *, pooled: bool, compiled: bool) -> Way:
    model = make_native_model(options)
    optimizer = make_optimizer(model)
    if compiled:
        for block in model.model.layers:
            block.compile()

    def pack(rows: Sequence[Row], budget: int | None = None) -> Any:
        budget = budget or sum(len(row.input_ids) for row in rows)
        conversations = [row.labeled() for row in rows]
        packed = lay_out(conversations, token_budget=budget, remove_cross_attention=True, pad_id=0)
        return collate(packed, keep_tail=options.device.type == "cuda")

    def chosen(rows: Iterator[Row]) -> Iterator[list[Row]]:
        if not pooled:
            while chunk := list(itertools.islice(rows, options.per_step)):
                yield chunk
            return
        packing, pending = PoolPacking(POOL_SIZE), list[Row]()
        while True:
            pending += itertools.islice(rows, POOL_SIZE - len(pending))
            if not pending:
                return
            indices = set(packing.choose([len(row.input_ids) for row in pending], options.budget))
            yield [row for index, row in enumerate(pending) if index in indices]
            pending = [row for index, row in enumerate(pending) if index not in indices]

    def batches(rows: Iterator[Row]) -> Iterator[StepBatch]:
        for chunk in chosen(rows):
            batch = pack(chunk, options.budget if pooled else None)
            yield StepBatch(batch, chunk, len(batch.input_ids))

    def step(batch: StepBatch) -> None:
        train_step(model, optimizer, [batch.inputs], max_grad_norm=1.0)

    @torch.no_grad()
    def token_losses(rows: Sequence[Row]) -> Tensor:
        batch, device = pack(rows), options.device
        bounds = batch.cu_seqlens if model.attention == "sdpa" else batch.cu_seqlens.to(device)
        hidden = model(batch.input_ids.to(device), batch.position_ids.to(device), bounds, batch.max_seqlen)
        logits = F.linear(hidden[batch.label_positions.to(device)], model.head_weight.to(hidden.dtype)).float()
        return F.cross_entropy(logits, batch.labels.to(device), reduction="none")

    return Way(name, model, batches, step, token_losses)


PADDED, FLATTENED, MINIBATCH, POOL = (
    "transformers, padded",
    "transformers, flattened",
    "sftron, minibatch",
    "sftron, pool",
)
_Make = Callable[[str, argparse.Namespace], Way]


def ways_of(options: argparse.Namespace) -> dict[str, _Make]:
    """Returns the factories of the ways by name; there are more ways on a GPU."""

    def theirs(*, flat: bool = False, compiled: bool = False, liger: bool = False) -> _Make:
        return lambda name, options: transformers_way(name, options, flat=flat, compiled=compiled, liger=liger)

    def native(*, pooled: bool, compiled: bool = False) -> _Make:
        return lambda name, options: native_way(name, options, pooled=pooled, compiled=compiled)

    ways = {PADDED: theirs(), FLATTENED: theirs(flat=True), MINIBATCH: native(pooled=False), POOL: native(pooled=True)}
    if options.gpu:
        ways |= {f"{PADDED}, compiled": theirs(compiled=True), f"{POOL}, compiled": native(pooled=True, compiled=True)}
        if find_spec("liger_kernel"):
            ways[f"{PADDED}, compiled, Liger"] = theirs(compiled=True, liger=True)
    return ways


# --- Measuring ---


def require_same_losses(ways: Sequence[Way], rows: Sequence[Row]) -> None:
    """Raises DifferentLossesError if the token losses of two ways differ by more than rounding."""
    reference = ways[0].token_losses(rows).cpu()
    for way in ways[1:]:
        losses = way.token_losses(rows).cpu()
        if losses.shape != reference.shape:
            raise DifferentLossesError(f"{way.name} trains {len(losses)} of these tokens, not {len(reference)}")
        share = ((losses - reference).square().mean().sqrt() / reference.std()).item()
        if not share < LARGEST_DIFFERENCE:
            raise DifferentLossesError(
                f"{way.name} does not compute what {ways[0].name} does: token losses differ by {share:.2f} of their "
                f"spread, and rounding explains less than {LARGEST_DIFFERENCE}; nothing was timed"
            )


def take_turns(ways: Sequence[Way], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Times the steps of all ways in turn, one step at a time. Returns the rates of each way."""
    streams = {way.name: way.batches(itertools.cycle(options.rows)) for way in ways}
    steps: dict[str, list[tuple[float, StepBatch]]] = {way.name: [] for way in ways}
    for way in ways:
        for _ in range(2 if options.gpu else 1):  # creates the optimizer state and compiles
            way.step(next(streams[way.name]))
    for _ in range(options.rounds):
        for way in ways:
            synchronize(options.device)
            started = time.perf_counter()
            batch = next(streams[way.name])
            way.step(batch)
            synchronize(options.device)
            steps[way.name].append((time.perf_counter() - started, batch))
    return {way.name: summary(way, steps[way.name], options) for way in ways}


def summary(way: Way, steps: Sequence[tuple[float, StepBatch]], options: argparse.Namespace) -> dict[str, Any]:
    lengths = [[len(row.input_ids) for row in batch.rows] for _, batch in steps]
    config = LlamaConfig.from_hf(options.hf_config)
    flops = [
        model_flops(
            config,
            num_tokens=sum(each),
            num_labeled=sum(label != IGNORE_INDEX for row in batch.rows for label in row.labels),
            document_lengths=each,
        )
        for each, (_, batch) in zip(lengths, steps, strict=True)
    ]
    num_tokens, seconds = sum(map(sum, lengths)), sum(each for each, _ in steps)
    tflops = sum(flops) / seconds / 1e12
    peak = find_peak(options.device, None).tflops
    return {
        "tokens/s": num_tokens / seconds,
        "median s a step": median(each for each, _ in steps),
        "computed / real": sum(batch.num_positions for _, batch in steps) / num_tokens,
        "TFLOP/s": tflops,
        "mfu": tflops / peak if peak else None,
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_memory_gb(name: str, options: argparse.Namespace) -> float:
    """Returns the memory of the largest step of a way beyond that of the imports, in GB of 1e9 bytes."""
    before = _status("VmRSS")
    way = ways_of(options)[name](name, options)
    batches = list(itertools.islice(way.batches(itertools.cycle(options.rows)), options.rounds))
    if options.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for batch in (batches[0], max(batches, key=lambda batch: batch.num_positions)):
        way.step(batch)
    if options.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return (_status("VmHWM") - before) / 1e9


def _status(field: str) -> int:
    """Returns a memory field of /proc/self/status in bytes.

    getrusage is not used, because it returns the peak of the parent process if that is higher.
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def measured_alone(name: str) -> float:
    """Measures the memory of one way by running this command again in a separate process."""
    command = [sys.executable, *sys.argv, "--memory-of", name]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ValueError(f"the memory of {name} could not be measured: {ended.stderr[-2000:]}")
    return float(ended.stdout.splitlines()[-1])


def benchmark(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    made = ways_of(options)
    names = options.ways or list(made)
    if unknown := [name for name in names if name not in made]:
        raise ValueError(f"--ways {unknown[0]!r} is not one of: {'; '.join(made)}")
    memory = {name: measured_alone(name) for name in names} if options.memory else {}
    # The weights, gradients and AdamW states of all ways do not always fit in GPU memory together.
    groups = [[name] for name in names] if options.gpu else [names]
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        ways = [made[name](name, options) for name in group]
        anchors = ways if len(ways) > 1 or group[0] == names[0] else [made[names[0]](names[0], options), *ways]
        require_same_losses(anchors, options.rows[: options.per_step])
        del anchors
        found |= take_turns(ways, options)
        del ways
        gc.collect()
        torch.compiler.reset()
    return {name: each | ({"peak GB": memory[name]} if memory else {}) for name, each in found.items()}


# --- The command ---


def machine(device: torch.device) -> str:
    packages = [name for name in ("torch", "transformers", "triton", "liger_kernel") if find_spec(name)]
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()} CPU"
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return f"{datetime.date.today()}, {name}, {torch.get_num_threads()} threads, {versions}"


def report(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    columns = list(next(iter(results.values())))
    rows = [
        [name, *("-" if each[key] is None else f"{each[key]:,.4g}" for key in columns)]
        for name, each in results.items()
    ]
    lines = ["| " + " | ".join(row) + " |" for row in (["", *columns], ["---", *["---:"] * len(columns)], *rows)]
    kind = options.model.name if options.model else options.shape
    command = shlex.join(["python", *sys.argv])
    return f"{machine(options.device)}\n\n```\n{command}\n```\n\n{kind}\n\n" + "\n".join(lines) + "\n"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, metavar="FOLDER", help="a Llama in Hugging Face format, with its tokenizer")
    add("--conversations", type=Path, metavar="FILE", help="what to train on; needs --model; else random ids")
    add(
        "--shape",
        metavar="NAME[:LAYERS]",
        help="random weights of a shape; default: smollm2-135m, llama3.2-1b on a GPU",
    )
    add("--gpu", action="store_true", help="on a CUDA device: documents of 512 tokens, compiled ways too")
    add("--ways", nargs="+", metavar="NAME", help="only these")
    add("--per-step", type=int, default=8, help="conversations a step (default: %(default)s; 32 with --gpu)")
    add("--rounds", type=int, default=4, help="steps of each way (default: %(default)s)")
    add("--checkpointing", choices=("none", "selective", "full"), default="none", help="of sftron's model")
    add("--memory", action="store_true", help="also measure the peak memory of each way, in a process of its own")
    add("--quick", action="store_true", help="a tiny shape and two rounds, to see that everything runs")
    add("--out", type=Path, metavar="FILE", help="also write the report there")
    add("--json", type=Path, metavar="FILE", help="also write every number there")
    add("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.device = torch.device("cuda" if options.gpu else "cpu")
    options.shape = "tiny" if options.quick else options.shape or ("llama3.2-1b" if options.gpu else "smollm2-135m")
    if options.quick:
        options.rounds, options.per_step = 2, 4
    elif options.gpu:
        options.per_step = 32
    return options


def read_rows(options: argparse.Namespace) -> None:
    """Sets the rows, the token budget of a pack and the configuration of the model. Raises ValueError."""
    if options.gpu and not torch.cuda.is_available():
        raise ValueError("--gpu, but torch sees no CUDA device; leave it out to measure on the CPU")
    if options.conversations and not options.model:
        raise ValueError("--conversations needs --model, whose tokenizer and chat template they take")
    if options.model:
        options.hf_config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    else:
        options.hf_config = {"model_type": "llama", **shape_of(options.shape)}
    chance = random.Random(0)
    num_rows = options.per_step * (options.rounds + 2) + POOL_SIZE
    if options.conversations:
        rows = rows_of_file(options.conversations, options.model)
        chance.shuffle(rows)
    else:
        longest = 64 if options.quick else 2048
        lengths = [
            512 if options.gpu else min(longest, max(8, round(chance.lognormvariate(4.6, 1.2))))
            for _ in range(num_rows)
        ]
        rows = random_rows(lengths, options.hf_config["vocab_size"], 0)
    # A pack of strategy `pool` holds the mean number of tokens in a step of the other ways. Conversations longer than
    # a pack are left out for all ways.
    mean = sum(len(row.input_ids) for row in rows) / len(rows)
    options.budget = round(mean * options.per_step)
    options.rows = [row for row in rows if len(row.input_ids) <= options.budget][:num_rows]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        read_rows(options)
        if options.memory_of:
            print(peak_memory_gb(options.memory_of, options))
            return 0
        results = benchmark(options)
    except DifferentLossesError as error:
        print(f"bench_step: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"bench_step: {error}", file=sys.stderr)
        return 2
    text = report(results, options)
    print(text)
    for path, content in ((options.out, text), (options.json, json.dumps(results, indent=1) + "\n")):
        if path:
            path.write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
