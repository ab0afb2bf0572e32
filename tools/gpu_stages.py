"""The stages of tools/gpu.py that ask whether a GPU computes what a CPU computes."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from itertools import accumulate, count
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from sftron.kernels.device import compute_capability, default_device, device_name, gpu_functions, is_gpu
from tools.gpu import ROOT, Parts, SkippedError

BF16, FP32 = torch.bfloat16, torch.float32
ROUNDING = {BF16: 0.02, FP32: 1e-5}
"""The largest accepted root mean square of a difference, as a share of the reference's; bf16 gives 0.002 to 0.006."""
LARGEST_DIFFERENCES = {BF16: (0.003, 0.02), FP32: (1e-4, 1e-3)}
"""The largest accepted differences of a step's loss and gradient norm from those in fp32 on a CPU, as shares. On a CPU,
bf16 changes the loss and the norm of `step` by 0.0004 and 0.002."""
LARGEST_FAMILY_DIFFERENCE = 0.03
"""The largest accepted difference of a family's loss in bf16. Families have larger weights, so that mistakes show. On a
CPU, bf16 changes their losses by 0.01 at most, and their norms, which are not compared, by up to 0.23."""

Numbers = dict[str, Any]


def gpu_of(parts: Parts) -> torch.device:
    """Returns the GPU. Raises RuntimeError if there is none."""
    device = default_device()
    if not is_gpu(device):
        raise RuntimeError("torch finds no GPU; --pretend runs without one")
    return torch.device(device.type, 0)


def share_of_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the largest root mean square of a difference, as a share of the expected values'."""
    shares = []
    for ours, exact in zip(found, expected, strict=True):
        ours, exact = (x.detach().cpu().double() for x in (ours, exact))
        shares.append(((ours - exact).square().mean().sqrt() / exact.square().mean().sqrt().clamp(min=1e-30)).item())
    return max(shares)


def require(name: str, value: float, bound: float) -> float:
    """Returns the value. Raises ValueError unless it is at most the bound."""
    if not value <= bound:
        raise ValueError(f"{name} is {value:.3g}, and rounding gives at most {bound:g}")
    return value


def _random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


# --- 1 One call of each API ---


def apis(parts: Parts) -> None:
    device = gpu_of(parts)
    parts.run("the device", lambda: facts_of(device))
    from sftron.models.attention import BACKENDS

    for backend in BACKENDS:
        for heads in ((4, 4), (4, 2)):
            name = f"{backend}, {heads[0]} and {heads[1]} heads"
            if backend == "flex" and parts.not_on_stand_in(name, "torch.compile cannot trace its tensors"):
                continue
            parts.run(name, partial(_attention, backend, heads, device))
    parts.run("grouped_mm", lambda: _grouped_product(device))
    parts.run("mm and addmm with out_dtype", lambda: _products_in_fp32(device))
    parts.run("fused AdamW", lambda: _update(device, "adamw", bound=1e-5))
    if not parts.not_on_stand_in("8-bit AdamW", "bitsandbytes computes by pointers"):
        parts.run("8-bit AdamW", lambda: _update(device, "adamw_8bit", bound=0.05), needs=["bitsandbytes"])
    parts.run("NF4", lambda: _quantized(device), needs=["bitsandbytes"])
    parts.run("pinned copies", lambda: _pinned_copies(device))
    needs = () if parts.is_pretended else ("fla",)
    parts.run("delta rule" if parts.is_pretended else "delta rule of fla", lambda: _delta_rule(device), needs=needs)


def facts_of(device: torch.device) -> Numbers:
    properties = gpu_functions(device).get_device_properties(device)
    capability = ".".join(map(str, compute_capability(device)))
    return {
        "name": device_name(device),
        "compute capability": capability,
        "GB": properties.total_memory / 1e9,
        "CUDA": torch.version.cuda or "none",
        # "high" is TF32, which TORCH_ALLOW_TF32_CUBLAS_OVERRIDE turns on; no bound of fp32 holds then.
        "precision of fp32 products": torch.get_float32_matmul_precision(),
    }


def _attention(backend: str, heads: tuple[int, int], device: torch.device) -> Numbers:
    from sftron.models.attention import attend_documents, reason_against

    if reason := reason_against(backend, device, BF16, 64):
        raise SkippedError(reason)
    lengths = (5, 130, 1, 64)
    bounds, num_tokens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), sum(lengths)
    inputs = [_random(num_tokens, n, 64) for n in (heads[0], heads[1], heads[1])]
    grad = _random(num_tokens, heads[0], 64)

    def run(name: str, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        attend = attend_documents(name, bounds if name == "sdpa" else bounds.to(device), max(lengths), num_tokens)
        leaves = [x.to(device, dtype).requires_grad_() for x in inputs]
        q, k, v = leaves
        out = attend(q, k, v)
        return [out, *torch.autograd.grad(out, leaves, grad.to(device, dtype))]

    found, expected = run(backend, device, BF16), run("sdpa", torch.device("cpu"), FP32)
    return {"differs by": require("the difference from fp32", share_of_difference(found, expected), ROUNDING[BF16])}


def _grouped_product(device: torch.device) -> Numbers:
    x, weight, ends = _random(48, 32), _random(3, 32, 24), torch.tensor([10, 10, 48], dtype=torch.int32)
    found = F.grouped_mm(x.to(device), weight.to(device), offs=ends.to(device))
    expected = torch.cat([x[:10].float() @ weight[0].float(), x[10:].float() @ weight[2].float()])
    return {"differs by": require("the difference from fp32", share_of_difference([found], [expected]), ROUNDING[BF16])}


def _products_in_fp32(device: torch.device) -> Numbers:
    a, b, total = _random(40, 64), _random(64, 24), _random(40, 24, dtype=FP32)
    found = [torch.mm(a.to(device), b.to(device), out_dtype=FP32)]
    found.append(torch.addmm(total.to(device), a.to(device), b.to(device), out_dtype=FP32))
    product = a.double() @ b.double()
    share = share_of_difference(found, [product, total.double() + product])
    return {"differs by": require("the difference from fp64", share, ROUNDING[FP32])}


def _update(device: torch.device, state: str, *, bound: float) -> Numbers:
    from sftron.train.optimizer import ANY_LAYOUT, make_by_name

    updates = []
    for where, kind in ((device, state), (torch.device("cpu"), ANY_LAYOUT)):
        weight = torch.nn.Parameter(_random(64, 256, dtype=FP32).to(where))
        before, options = weight.detach().clone(), {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        optimizer = make_by_name([("weight", weight)], learning_rate=1e-2, name=kind, **options)
        for seed in (1, 2):
            weight.grad = _random(64, 256 + seed, dtype=FP32)[:, :256].to(where)
            optimizer.step()
        updates.append(weight.detach() - before)
    return {"differs by": require("the difference of the update", share_of_difference(*([x] for x in updates)), bound)}


def _quantized(device: torch.device) -> Numbers:
    from sftron.models.quantization import NF4, from_stored, to_stored

    weight = _random(32, 128, dtype=FP32)
    stored = to_stored(weight, NF4)
    found, expected = from_stored(stored.to(device), BF16), from_stored(stored, BF16)
    return {"differs by": require("the difference", share_of_difference([found], [expected]), ROUNDING[FP32])}


def _pinned_copies(device: torch.device) -> Numbers:
    there = torch.arange(1000).pin_memory()
    assert there.is_pinned()
    on_device = there.to(device, non_blocking=True)
    back = torch.empty(1000, dtype=torch.int64, pin_memory=True)
    back.copy_(on_device, non_blocking=True)
    gpu_functions(device).synchronize()
    if not back.equal(there):
        raise ValueError("what came back from the device is not what was sent")
    return {}


def _delta_rule(device: torch.device) -> Numbers:
    from sftron.models.delta import RecurInDocuments

    bounds, num_tokens = torch.tensor([0, 5, 135, 200], dtype=torch.int32), 200
    inputs = [_random(num_tokens, heads, 64) for heads in (2, 2, 4)]
    decay, beta = -0.1 * _random(num_tokens, 4, dtype=FP32).abs(), _random(num_tokens, 4).sigmoid()

    def run(where: torch.device, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(where, dtype).requires_grad_() for x in inputs]
        q, k, v = leaves
        out = RecurInDocuments(bounds, bounds.to(where))(q, k, v, decay.to(where), beta.to(where, dtype))
        return [out, *torch.autograd.grad(out, leaves, _random(*inputs[2].shape).to(where, dtype))]

    share = share_of_difference(run(device, BF16), run(torch.device("cpu"), FP32))
    return {"differs by": require("the difference from fp32", share, ROUNDING[BF16])}


# --- 2 Training steps ---


def batch_of(lengths: Sequence[int], vocab_size: int) -> Any:
    from sftron.data.loader import collate
    from sftron.data.packing import lay_out
    from tools.bench_step import random_rows

    rows = random_rows(lengths, vocab_size)
    return collate(lay_out(rows, token_budget=sum(lengths), remove_cross_attention=True, pad_id=0), keep_tail=True)


def step(parts: Parts) -> None:
    device = gpu_of(parts)
    for mode in ("selective",) if parts.is_pretended else ("none", "selective", "full"):
        parts.run(f"bf16 on varlen, activations: {mode}", partial(_steps, device, mode))


def _steps(device: torch.device, mode: str) -> Numbers:
    from sftron.train.step import train_step
    from tests.models.reference import make_native, make_reference
    from tools.bench_step import make_optimizer

    sizes: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    reference = make_reference(initializer_range=0.1, **sizes)
    batches, found = [batch_of(lengths, 97) for lengths in ((9, 60, 25), (40, 30))], []
    for where, dtype, attention in ((torch.device("cpu"), FP32, "sdpa"), (device, BF16, "varlen")):
        options = {"compute_dtype": dtype, "attention": attention, "activation_checkpointing": mode}
        model = make_native(reference, **options).to(where)
        optimizer = make_optimizer(model)
        found.append([train_step(model, optimizer, batches, max_grad_norm=1.0) for _ in range(3)])
        if any(each.skipped for each in found[-1]):
            raise ValueError(f"a step made no update: {found[-1]}")
    for exact, ours in zip(*found, strict=True):
        require_same_step(ours, exact, BF16)
    return {"loss": found[1][-1].loss, "fp32 on the CPU": found[0][-1].loss, "norm": found[1][-1].grad_norm}


def require_same_step(ours: Any, exact: Any, dtype: torch.dtype) -> None:
    loss, norm = LARGEST_DIFFERENCES[dtype]
    require("the difference of the losses", abs(ours.loss / exact.loss - 1), loss)
    require("the difference of the norms", abs(ours.grad_norm / exact.grad_norm - 1), norm)


# --- 3 Kernels ---


def kernels(parts: Parts) -> None:
    device = gpu_of(parts)
    sizes = [(3, 64), (50, 37)] if parts.is_pretended else [(3, 64), (50, 37), (70, 2500), (4097, 4096)]
    for name in KERNELS:
        for dtype in (FP32, BF16):
            parts.run(f"{name}, {dtype}".replace("torch.", ""), partial(_kernel, name, dtype, sizes, device))
    if not parts.not_on_stand_in("tests/kernels", "make test runs them, interpreted"):
        parts.run("tests/kernels", lambda: _gpu_tests("tests/kernels"), needs=["pytest", "hypothesis"])


def _kernel(name: str, dtype: torch.dtype, sizes: Sequence[tuple[int, int]], device: torch.device) -> Numbers:
    # Triton's interpreter cuts bf16 off instead of rounding it.
    bound, largest = {FP32: 1e-5, BF16: 2**-7}[dtype], 0.0
    for rows, columns in sizes:
        found, expected = (KERNELS[name](rows, columns, dtype, where) for where in (device, torch.device("cpu")))
        largest = max(largest, share_of_difference(found, expected))
    return {"differs by": require("the difference from the CPU", largest, bound)}


def _norm(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    from sftron.kernels.rms_norm import rms_norm

    x = _random(rows, columns, dtype=dtype).to(device).requires_grad_()
    weight = (1 + 0.3 * _random(columns, dtype=FP32)).to(device).requires_grad_()
    out = rms_norm(x, weight, 1e-5)
    return [out, *torch.autograd.grad(out, [x, weight], _random(rows, columns, dtype=dtype).flip(0).to(device))]


def _swiglu(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    from sftron.kernels.swiglu import swiglu, swiglu_backward

    gate_up, grad = (_random(rows, n * columns, dtype=dtype).to(device) for n in (2, 1))
    return [swiglu(gate_up), *swiglu_backward(grad, gate_up, with_output=True)]


def _rotated(rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, interleaved: bool) -> list[Tensor]:
    from sftron.kernels.rope import rotate_heads
    from sftron.kernels.table import RopeSpec, build_rope_table

    head_dim = 2 * min(columns, 64)
    table = build_rope_table(rows, RopeSpec(theta=1e4, rotary_dim=head_dim)).to(device)
    qkv = _random(rows, 5 * head_dim, dtype=dtype).to(device).requires_grad_()
    positions = (torch.arange(rows, dtype=torch.int32) % 40 % rows).to(device)
    heads = rotate_heads(qkv, positions, table, 3, 1, interleaved)
    return [*heads, *torch.autograd.grad(heads, qkv, [x.detach().flip(0) for x in heads])]


def _loss(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    from sftron.kernels.cross_entropy import cross_entropy_gradient_, empty_logits

    logits = empty_logits(rows, 8 * columns, like=torch.empty(0, dtype=dtype, device=device))
    logits.copy_((3 * _random(rows, 8 * columns, dtype=FP32)).to(dtype))
    labels = (torch.arange(rows) * 7 % (8 * columns)).to(device)
    measures = cross_entropy_gradient_(logits, labels, torch.linspace(0.5, 1.5, rows).to(device))
    return [measures, logits]


def _sums_of_products(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    from sftron.kernels.cross_entropy import add_product_

    total = torch.full((24, columns), float("nan"), device=device)
    for number in range(3):
        left, right = _random(rows, 24 + number, dtype=dtype)[:, :24], _random(rows, columns, dtype=dtype)
        add_product_(total, left.to(device).T, right.to(device), is_first=number == 0)
    return [total]


KERNELS: dict[str, Callable[[int, int, torch.dtype, torch.device], list[Tensor]]] = {
    "RMSNorm": _norm,
    "SwiGLU": _swiglu,
    "RoPE": partial(_rotated, interleaved=False),
    "interleaved RoPE": partial(_rotated, interleaved=True),
    "cross entropy": _loss,
    "sum of products": _sums_of_products,
}
"""The kernels by name, each with the results of its forward and backward pass."""


def tests(parts: Parts) -> None:
    gpu_of(parts)
    needs = ("pytest", "hypothesis", "pydantic", "datasets", "torchdata")
    for folder in ("tests/train", "tests/models"):
        parts.run(folder, partial(_gpu_tests, folder), needs=needs)


def _gpu_tests(folder: str) -> Numbers:
    """Runs the tests that are marked `gpu`; where there is a GPU, these are all of tests/kernels."""
    words = ["-q", "-p", "no:cacheprovider", "-W", "default", "-m", "gpu", folder]
    options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
    ended = subprocess.run([sys.executable, "-m", "pytest", *words], **options)
    print(ended.stdout, ended.stderr)
    last = (ended.stdout.strip().splitlines() or [""])[-1]
    if ended.returncode:
        raise ValueError(f"pytest ended with {ended.returncode}: {last}")
    return {"pytest": last}


# --- 4 Families ---


def families(parts: Parts) -> None:
    from tests.models.reference import FAMILIES

    device = gpu_of(parts)
    of_each_kind = ("Llama 3.1", "Gemma 2", "Cohere", "gpt-oss", "Qwen 3.5 MoE", "LFM2")
    for name in of_each_kind if parts.is_pretended else FAMILIES:
        parts.run(name, partial(_family, FAMILIES[name], device))


def require_in_transformers(options: dict[str, Any]) -> None:
    """Raises SkippedError if the installed transformers has no such model."""
    import transformers

    model_type = options.get("model_type", "llama")
    if model_type not in transformers.CONFIG_MAPPING:
        raise SkippedError(f"transformers {transformers.__version__} has no {model_type}")


def _family(options: dict[str, Any], device: torch.device) -> Numbers:
    """Compares a step on the GPU, in fp32 and in bf16, with the same on the CPU in fp32."""
    from sftron.models.attention import describe_backends
    from sftron.models.llama import attention_of_layers
    from sftron.train.step import train_step
    from tests.models.reference import make_native, make_reference

    require_in_transformers(options)
    batch, reference, numbers = batch_of((9, 30, 25), 97), make_reference(**options), Numbers()
    exact = train_step(make_native(reference), None, [batch], max_grad_norm=None)
    for dtype in (FP32, BF16):
        model = make_native(reference, compute_dtype=dtype)
        model.attention = attention_of_layers("auto", model.config, device, dtype)
        ours = train_step(model.to(device), None, [batch], max_grad_norm=None)
        assert ours.loss is not None
        assert exact.loss is not None
        share = abs(ours.loss / exact.loss - 1)
        numbers[f"{str(dtype).removeprefix('torch.')} on {describe_backends(model.attention)} differs by"] = share
        if dtype == FP32:
            require_same_step(ours, exact, dtype)
        require("the difference of the losses", share, LARGEST_FAMILY_DIFFERENCE)
    return numbers


# --- 5 Runs by command line ---

_SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
_EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
_OF_DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
_LORA = {"lora": {"rank": 8}}


def runs(parts: Parts) -> None:
    """Real head sizes on a GPU; tiny ones on the stand-in."""
    gpu_of(parts)
    from tests.models.reference import GEMMA_4, PER_LAYER, QWEN_3_5

    sizes = {} if parts.is_pretended else _SIZES
    rotations = {"mrope_section": [8, 4, 4]} if sizes else {}
    hybrid = QWEN_3_5 | sizes | (_OF_DELTA if sizes else {})
    hybrid["rope_parameters"] = QWEN_3_5["rope_parameters"] | rotations
    gemma = GEMMA_4 | PER_LAYER | sizes | ({"head_dim": 256, "global_head_dim": 512} if sizes else {})
    whole_blocks = sizes or {"hidden_size": 64, "intermediate_size": 128}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
        "full": (sizes, {}, ()),
        "LoRA": (sizes, _LORA, ()),
        "nf4": (whole_blocks, _LORA | {"model": {"frozen_dtype": "nf4"}}, ("bitsandbytes",)),
        "8bit": (sizes, {"optimizer": {"name": "adamw_8bit"}}, ("bitsandbytes",)),
        "mixture": (sizes | _EXPERTS, {}, ()),
        "hybrid": (hybrid, {}, ()),
        "Gemma 4": (gemma, {}, ()),
    }
    needs = ("pydantic", "datasets", "torchdata", "yaml", "jinja2")
    start = _in_fork if parts.is_pretended else _in_new_process
    for name, (model, settings, packages) in cases.items():
        why = "bitsandbytes computes by pointers" if name == "8bit" else "tests/train/test_pretended_gpu.py has them"
        if name != "LoRA" and parts.not_on_stand_in(name, why):
            continue
        parts.run(name, partial(_run_once, start, model, settings), needs=(*needs, *packages))
    parts.run("deterministic, twice; killed and resumed", partial(_run_thrice, start, sizes), needs=needs)


@contextmanager
def _run_folder(model: dict[str, Any]) -> Iterator[Path]:
    """Yields a folder with a model of random weights, a tokenizer and conversations."""
    from tests.models.reference import make_reference

    require_in_transformers(model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = {"vocab_size": 768, "max_position_embeddings": 256, "initializer_range": 0.1} | model
        make_reference(**options).save_pretrained(folder / "model")
        for path in (ROOT / "tests/assets/tokenizer").iterdir():
            shutil.copyfile(path, folder / "model" / path.name)
        pairs = [(f"What is {n}?", f"{n} is " + "one more than " * (n * 7 % 5) + f"{n}.") for n in range(40)]
        rows = [
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for question, answer in pairs
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        yield folder


Start = Callable[[list[str], int | None], int]
"""A function that runs `sftron` with its arguments and returns the exit status."""


def _train(
    start: Start, folder: Path, run_name: str, settings: dict[str, Any], *, kill_in_step: int | None = None
) -> int:
    """Runs `sftron train` in a process of its own. Returns its exit status."""
    tree: dict[str, Any] = {
        "general": {"run_name": run_name, "output_dir": str(folder / "runs"), "seed": 7},
        "model": {"path": str(folder / "model")},
        "data": {"datasets": [{"path": str(folder / "rows.jsonl")}], "num_workers": 0},
        "tokens": {"sequence_length": 128, "batch_accumulation_per_replica": 2, "train_steps": 8},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoints": {"interval": 2, "async": True},
    }
    for section, keys in settings.items():
        tree.setdefault(section, {}).update(keys)
    config = folder / f"{run_name}.yaml"
    config.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
    return start(["train", "--config", str(config)], kill_in_step)


def _in_new_process(words: list[str], kill_in_step: int | None) -> int:
    code = f"from tools.gpu_stages import run_command; run_command({words}, {kill_in_step})"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode


def _in_fork(words: list[str], kill_in_step: int | None) -> int:
    """As `_in_new_process`, but in a fork of this process, which has the stand-in."""
    process = multiprocessing.get_context("fork").Process(target=run_command, args=(words, kill_in_step))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def run_command(words: list[str], kill_in_step: int | None) -> NoReturn:
    """Runs a command of sftron, which a signal that nothing can catch ends in its n-th step."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from sftron.__main__ import main
    from sftron.errors import exit_with
    from sftron.train import loop

    made, train_step = count(1), loop.train_step

    def killed(*args: Any, **options: Any) -> Any:
        if next(made) == kill_in_step:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(*args, **options)

    loop.train_step = killed
    exit_with(lambda: main(words))


def _lines(folder: Path, run_name: str) -> list[dict[str, Any]]:
    """Returns the metrics of a run. Raises ValueError unless it is complete and its loss became smaller."""
    run = folder / "runs" / run_name
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses, status = [line["loss"] for line in lines], json.loads((run / "result.json").read_text())["status"]
    if status != "completed" or [line["step"] for line in lines] != [*range(1, 9)] or not losses[-1] < losses[0]:
        raise ValueError(f"the run is {status}, with losses {losses}")
    return lines


def _run_once(start: Start, model: dict[str, Any], settings: dict[str, Any]) -> Numbers:
    with _run_folder(model) as folder:
        if status := _train(start, folder, "run", settings):
            raise ValueError(f"sftron train ended with {status}; the log has its output")
        lines = _lines(folder, "run")
    return {"loss": f"{lines[0]['loss']:.4f} to {lines[-1]['loss']:.4f}", "peak GB": lines[-1]["peak_memory_gb"]}


def _run_thrice(start: Start, model: dict[str, Any]) -> Numbers:
    """Two runs, and one that is killed while it saves in the background and goes on, have the same bits."""
    settings, found = {"general": {"deterministic": True}}, {}
    with _run_folder(model) as folder:
        for name in ("first", "second", "killed"):
            if name == "killed":
                if (status := _train(start, folder, name, settings, kill_in_step=6)) != -signal.SIGKILL:
                    raise ValueError(f"the run that was to be killed ended with {status}")
                if not [*(folder / "runs" / name / "checkpoints").glob("step-*")]:
                    raise ValueError("no checkpoint was there when the run was killed")
            if status := _train(start, folder, name, settings):
                raise ValueError(f"the run {name!r} ended with {status}; the log has its output")
            losses = [(line["loss"], line["grad_norm"]) for line in _lines(folder, name)]
            weights = sorted((folder / "runs" / name / "latest").resolve().glob("*.safetensors"))
            assert weights
            found[name] = losses, [sha256(path.read_bytes()).hexdigest() for path in weights]
        for name, each in found.items():
            for what, ours, expected in zip(("losses", "weights"), each, found["first"], strict=True):
                if ours != expected:
                    raise ValueError(f"the {what} of the run {name!r} differ from those of the first")
    return {"weights": "equal to the bit"}


# --- 6 NCCL ---


def nccl(parts: Parts) -> None:
    device = gpu_of(parts)
    parts.run("collectives of one rank", lambda: _collectives(device))
    parts.run("a sharded step", lambda: _sharded_step(device))


def _collectives(device: torch.device) -> Numbers:
    import torch.distributed as dist

    from sftron.models.sharding import mesh_of_one_rank

    mesh_of_one_rank(device)
    x = _random(1000, dtype=FP32)
    for where in (torch.device("cpu"), device):
        for dtype in (FP32, torch.float64, torch.int32, torch.int64):
            ours = x.to(where, dtype, copy=True)
            dist.all_reduce(ours)
            if not ours.cpu().equal(x.to(dtype)):
                raise ValueError(f"the sum of one rank in {dtype} on {where} is not its own value")
    return {"backend": dist.get_backend()}


def _sharded_step(device: torch.device) -> Numbers:
    from sftron.models.sharding import mesh_of_one_rank, shard_model
    from sftron.train.step import train_step
    from tests.models.reference import make_native, make_reference

    reference, batch, found = make_reference(), batch_of((9, 30, 25), 97), []
    for is_sharded in (False, True):
        model = make_native(reference).to(device)
        if is_sharded:
            shard_model(model, mesh_of_one_rank(device))
        found.append(train_step(model, None, [batch], max_grad_norm=None))
    require_same_step(found[1], found[0], FP32)
    return {"loss": found[1].loss, "norm": found[1].grad_norm}
