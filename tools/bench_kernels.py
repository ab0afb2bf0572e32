"""Times the kernels by turns with what they replace: RoPE, attention, loss, RMSNorm and SwiGLU.

    python tools/bench_kernels.py --out docs/benchmarks/kernels-gpu.md
    python tools/bench_kernels.py --device cpu --quick      shows that it runs; these times mean nothing

Every result is checked before it is timed, and each case is written as it ends. What does not fit the device is named,
and the next is tried. Liger's kernels are timed where liger_kernel is installed. The exit status is 0 if every case was
measured, 1 if a result is wrong or a case does not fit, and 2 if the arguments cannot be used. Needs torch, triton and
transformers.

Shape suffixes: T tokens, N query heads, K key-value heads, D head size, W = (N + 2K) * D, H hidden size,
F intermediate size, V vocabulary, R labeled rows.
"""

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

# Makes sftron and tools importable without an installation.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from sftron.commands.arguments import positive
from sftron.errors import exit_with, refuse, show
from sftron.kernels import rms_norm, swiglu
from sftron.kernels.device import device_name
from sftron.kernels.rope import rotate_heads
from sftron.kernels.table import RopeSpec, build_rope_table
from sftron.models.attention import BACKENDS, Attend, attend_documents, reason_against
from sftron.models.head import Head
from sftron.models.loss import weighted_loss_sum
from tools.bench_report import WrongResultError, benchmark_parser, markdown_table, report_head, write_report

TOLERANCE = 0.02
"""The largest accepted ratio of the error's root mean square to the reference's; bf16 rounding gives 0.002 to 0.006."""

FLUSH_BYTES, SLEEP_CYCLES = 2**28, 10**7
"""Before each timed call, four times the size of the largest L2 cache is read. The GPU then sleeps for 5 ms, while the
host launches the call."""


_ROWS_AT_ONCE = 1024
"""The rows of the chunks in which the reference of the loss is computed."""

Run = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One computation with several implementations."""

    title: str
    unit: str
    """GB/s or TFLOP/s."""
    work: float
    """The minimum number of bytes or operations that the computation takes."""
    reference: Run
    ways: dict[str, Run]
    left_out: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    num_tokens: int = 16384
    document: int = 512
    heads: tuple[tuple[int, int, int], ...] = ((32, 8, 128), (32, 8, 64))  # N, K, D for Llama 8B and 1B
    hidden: tuple[int, ...] = (2048, 4096)
    intermediate: int = 14336
    vocabulary: int = 128256


QUICK = Sizes(num_tokens=64, document=16, heads=((4, 2, 64),), hidden=(32,), intermediate=48, vocabulary=97)


def rope_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    num_heads, num_kv_heads, head_dim = sizes.heads[0]
    counts, num_tokens = (num_heads, num_kv_heads, num_kv_heads), sizes.num_tokens
    shape = f"T={num_tokens}, {num_heads}/{num_kv_heads} heads of {head_dim}, bf16"
    table = build_rope_table(num_tokens, RopeSpec(theta=500000.0, rotary_dim=head_dim)).to(device)
    position_ids = (torch.arange(num_tokens, device=device) % sizes.document).int()
    cos, sin = (x.repeat(1, 2)[None] for x in table[position_ids].chunk(2, dim=-1))
    rounded = cos.bfloat16(), sin.bfloat16()
    qkv = _random(num_tokens, sum(counts) * head_dim, device=device)
    q, k, _ = (_as_reference(x) for x in qkv.unflatten(-1, (-1, head_dim)).split(counts, dim=1))
    ways: dict[str, Run] = {
        "sftron": lambda: rotate_heads(qkv, position_ids, table, num_heads, num_kv_heads)[:2],
        "transformers, eager": lambda: _as_native(*apply_rotary_pos_emb(q, k, *rounded)),
    }
    if _has_liger(device):
        from liger_kernel.transformers.rope import liger_rotary_pos_emb

        in_place = q.clone(), k.clone()
        ways["Liger"] = lambda: _as_native(*liger_rotary_pos_emb(*in_place, *rounded))
    yield Case(
        title=f"RoPE, forward: {shape}", unit="GB/s", work=2 * (q.nbytes + k.nbytes), ways=ways,
        reference=lambda: _as_native(*apply_rotary_pos_emb(q.float(), k.float(), cos, sin)),
    )  # fmt: skip

    grads = [_random(num_tokens, count, head_dim, device=device) for count in counts]

    def rotated_back() -> list[Tensor]:
        dq, dk, dv = (x.float() for x in grads)
        rotated = _as_native(*apply_rotary_pos_emb(_as_reference(dq), _as_reference(dk), cos, -sin))
        return [torch.cat([*rotated, dv], dim=1).flatten(1)]

    backward = torch.ops.sftron.rotate_heads_backward
    yield Case(
        title=f"RoPE, backward: {shape}", unit="GB/s", work=2 * qkv.nbytes, reference=rotated_back,
        ways={"sftron": lambda: [backward(*grads, position_ids, table, False)]},
    )  # fmt: skip


def _as_reference(x_TND: Tensor) -> Tensor:
    """Returns the tensor as [1, N, T, D], the layout of transformers: a transposed view of contiguous [T, N, D]."""
    return x_TND.contiguous().transpose(0, 1)[None]


def _as_native(*heads: Tensor) -> list[Tensor]:
    return [x[0].transpose(0, 1) for x in heads]


def attention_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    lengths = [sizes.document] * (sizes.num_tokens // sizes.document)
    on_cpu = torch.tensor([0, *lengths]).cumsum(0).int()
    on_device = on_cpu.to(device)
    for num_heads, num_kv_heads, head_dim in sizes.heads:
        reasons = {name: reason_against(name, device, torch.bfloat16, head_dim) for name in BACKENDS}
        attends = {
            name: attend_documents(name, on_cpu if name == "sdpa" else on_device, max(lengths), sizes.num_tokens)
            for name, reason in reasons.items()
            if not reason
        }
        qkv = [_random(sizes.num_tokens, n, head_dim, device=device) for n in (num_heads, num_kv_heads, num_kv_heads)]
        grad = _random(sizes.num_tokens, num_heads, head_dim, device=device)
        # Two products forward and four backward, as in `model_flops`; recomputed scores are not counted.
        operations = 2 * num_heads * head_dim * sum(length * (length + 1) for length in lengths)
        shape = f"T={sizes.num_tokens} in documents of {sizes.document}, {num_heads}/{num_kv_heads} heads of {head_dim}"
        left_out = [f"{name}, {reason}" for name, reason in reasons.items() if reason]
        for what, run, work in (
            ("forward", _attend, operations),
            ("forward and backward", _with_gradients, 3 * operations),
        ):
            inputs = [x.detach().requires_grad_() for x in qkv]
            exact = [x.detach().float().requires_grad_() for x in qkv]
            yield Case(
                title=f"Attention, {what}: {shape}, bf16", unit="TFLOP/s", work=work,
                reference=partial(run, attends["sdpa"], exact, grad.float()),
                ways={name: partial(run, attend, inputs, grad) for name, attend in attends.items()},
                left_out=left_out,
            )  # fmt: skip


@torch.no_grad()
def _attend(attend: Attend, qkv: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    q_TND, k_TKD, v_TKD = qkv
    return [attend(q_TND, k_TKD, v_TKD)]


def loss_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    for hidden_size in sizes.hidden:
        hidden_TH = _random(sizes.num_tokens, hidden_size, device=device).requires_grad_()
        head_VH = (_random(sizes.vocabulary, hidden_size, device=device) * hidden_size**-0.5).requires_grad_()
        for share in (1.0, 0.5, 0.25):
            yield _loss_case(hidden_TH, head_VH, share)


def _loss_case(hidden_TH: Tensor, head_VH: Tensor, share: float) -> Case:
    (num_tokens, hidden_size), vocabulary, device = hidden_TH.shape, len(head_VH), hidden_TH.device
    rows = torch.randperm(num_tokens, device=device)[: int(num_tokens * share)].sort().values
    labels, weights = torch.randint(vocabulary, rows.shape, device=device), torch.ones(len(rows), device=device)
    all_labels = torch.full((num_tokens,), -100, device=device).index_copy_(0, rows, labels)

    def full_logits(hidden_TH: Tensor, head_VH: Tensor) -> Tensor:
        return F.cross_entropy((hidden_TH @ head_VH.T).float(), all_labels, reduction="sum")

    def native(hidden_TH: Tensor, head_VH: Tensor) -> Tensor:
        return weighted_loss_sum(hidden_TH, Head(head_VH), rows, labels, weights)[0]

    one, inputs = torch.ones((), device=device), (hidden_TH, head_VH)
    ways: dict[str, Run] = {
        "sftron": lambda: _with_gradients(native, inputs, one),
        "F.cross_entropy on full logits": lambda: _with_gradients(full_logits, inputs, one),
    }
    if _has_liger(device):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        ways["Liger"] = lambda: _with_gradients(lambda x, w: liger(w, x, all_labels), inputs, one)

    def exact() -> list[Tensor]:
        """In chunks: all logits in fp32 and their gradient take 27 GB."""
        hidden, head = (x.detach().float().requires_grad_() for x in inputs)
        loss = torch.zeros((), device=device)
        for chunk, labels in zip(hidden.split(_ROWS_AT_ONCE), all_labels.split(_ROWS_AT_ONCE), strict=True):
            part = F.cross_entropy(chunk @ head.T, labels, reduction="sum")
            part.backward()
            loss += part.detach()
        assert hidden.grad is not None
        assert head.grad is not None
        return [loss, hidden.grad, head.grad]

    return Case(
        title=f"Loss and its gradients, {share:.0%} labeled: T={num_tokens}, V={vocabulary}, H={hidden_size}, bf16",
        unit="TFLOP/s", work=6 * hidden_size * vocabulary * len(rows),
        reference=exact,
        ways=ways,
    )  # fmt: skip


def norm_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    hidden_size = sizes.hidden[-1]
    x_TH = _random(sizes.num_tokens, hidden_size, device=device).requires_grad_()
    weight_H = torch.rand(hidden_size, device=device).add_(0.5).requires_grad_()
    grad_TH = _random(sizes.num_tokens, hidden_size, device=device)

    def norm(x_TH: Tensor, weight_H: Tensor) -> Tensor:
        return F.rms_norm(x_TH.float(), weight_H.shape, weight_H, 1e-5).to(x_TH.dtype)

    yield _fused_case(
        f"RMSNorm, forward and backward: T={sizes.num_tokens}, H={hidden_size}, bf16", 5 * x_TH.nbytes,
        lambda: _with_gradients(lambda x, weight: rms_norm.rms_norm(x, weight, 1e-5), (x_TH, weight_H), grad_TH),
        norm, (x_TH, weight_H), grad_TH,
    )  # fmt: skip

    gate_up_T2F = _random(sizes.num_tokens, 2 * sizes.intermediate, device=device).requires_grad_()
    grad_TF = _random(sizes.num_tokens, sizes.intermediate, device=device)

    def gated(gate_up_T2F: Tensor) -> Tensor:
        gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
        return F.silu(gate_TF) * up_TF

    def native() -> list[Tensor]:
        plain_T2F = gate_up_T2F.detach()
        return [swiglu.swiglu(plain_T2F), swiglu.swiglu_backward(grad_TF, plain_T2F, with_output=False)[0]]

    yield _fused_case(
        f"SwiGLU, forward and backward: T={sizes.num_tokens}, F={sizes.intermediate}, bf16", 8 * grad_TF.nbytes,
        native, gated, (gate_up_T2F,), grad_TF,
    )  # fmt: skip


def _fused_case(
    title: str, work: float, native: Run, plain: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor
) -> Case:
    compiled = torch.compile(plain, fullgraph=True, backend="inductor" if grad.is_cuda else "eager")
    exact = [x.detach().float().requires_grad_() for x in inputs]
    ways: dict[str, Run] = {
        "sftron": native,
        "torch, eager": partial(_with_gradients, plain, inputs, grad),
        "torch.compile": partial(_with_gradients, compiled, inputs, grad),
    }
    reference = partial(_with_gradients, plain, exact, grad.float())
    return Case(title=title, unit="GB/s", work=work, reference=reference, ways=ways)


def _with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad.to(output.dtype))]


def _random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def _has_liger(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None


CASES = {"rope": rope_cases, "attention": attention_cases, "loss": loss_cases, "norm": norm_cases}


# --- Measuring ---


def measure(case: Case, rounds: int, device: torch.device) -> dict[str, Any]:
    """Checks the result of each way, then times them in turn. Returns milliseconds and rates by way.

    A way that does not fit the device is left out. Raises torch.OutOfMemoryError if the reference does not.
    """
    reference, ways, left_out = case.reference(), dict[str, Run](), list(case.left_out)
    for name, run in case.ways.items():
        try:
            check(f"{case.title}: {name}", run(), reference)
        except torch.OutOfMemoryError as error:
            left_out.append(f"{name}, {_first_line(error)}")
        else:
            ways[name] = run
    del reference
    flush = torch.zeros(FLUSH_BYTES // 4 if device.type == "cuda" else 0, dtype=torch.int32, device=device)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            times[name].append(milliseconds(run, flush))
    scale = 1e6 if case.unit == "GB/s" else 1e9
    measured = {
        name: {
            "ms": median(each),
            "quartiles": quantiles(each, n=4, method="inclusive")[::2],
            "rate": case.work / median(each) / scale,
        }
        for name, each in times.items()
    }
    return {"title": case.title, "unit": case.unit, "ways": measured, "left out": left_out}


def _first_line(error: BaseException) -> str:
    return str(error).partition(". ")[0]


def check(name: str, found: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
    """Raises WrongResultError if a result differs from the reference by more than rounding."""
    for index, (native, exact) in enumerate(zip(found, reference, strict=True)):
        error = ((native.float() - exact.float()).square().mean().sqrt() / exact.float().square().mean().sqrt()).item()
        if not error < TOLERANCE:
            raise WrongResultError(
                f"{name}: output {index} differs by {error:.3g} of the reference's root mean square; rounding gives "
                f"less than {TOLERANCE}, so nothing is timed"
            )


def milliseconds(run: Callable[[], object], flush: Tensor) -> float:
    if not flush.is_cuda:
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3
    flush.sum()  # A write would leave dirty cache lines, whose write-back would be timed too.
    torch.cuda._sleep(SLEEP_CYCLES)
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    run()
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended)


def section(case: dict[str, Any]) -> str:
    """Returns the part of the report about one case."""
    rows = [
        [name, f"{way['ms']:.4g}", "{:.4g} to {:.4g}".format(*way["quartiles"]), f"{way['rate']:.4g}"]
        for name, way in case["ways"].items()
    ]
    table = [markdown_table(["", "ms", "quartiles", case["unit"]], rows)] if rows else []
    return "\n\n".join(["", f"## {case['title']}", *table, *(f"Left out: {each}." for each in case["left out"])])


def measured_cases(names: Sequence[str], sizes: Sizes, rounds: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields the numbers of each case as it ends; one that does not fit the device has no ways."""
    for name in names:
        cases = CASES[name](sizes, device)
        while True:
            title = f"The inputs of {name}"
            try:
                if (case := next(cases, None)) is None:
                    break
                title = case.title
                yield measure(case, rounds, device)
            except torch.OutOfMemoryError as error:
                yield {"title": title, "unit": "", "ways": {}, "left out": [f"the case, {_first_line(error)}"]}


def main(arguments: list[str]) -> int:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda", help="default: %(default)s")
    add("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES), help="default: all")
    add("--rounds", type=positive, default=20, help="at least 2 (default: %(default)s)")
    add("--quick", action="store_true", help="tiny shapes and two rounds")
    add("--out", type=Path, metavar="FILE", help="also write the report there, in Markdown")
    add("--json", type=Path, metavar="FILE", help="also write every number there")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --device cpu --quick shows that it runs")
    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu needs --quick, because full shapes take hours on a CPU")
    device = torch.device(options.device)
    sizes, rounds = (QUICK, 2) if options.quick else (Sizes(), max(2, options.rounds))
    torch.manual_seed(0)
    command, cases = ["python", "tools/bench_kernels.py", *arguments], list[dict[str, Any]]()
    packages = ("torch", "triton", "transformers", "liger_kernel", "flash_attn")
    text = report_head(command, device_name(device), *packages)
    show(text)
    try:
        for case in measured_cases(options.cases, sizes, rounds, device):
            cases.append(case)
            text += section(case)
            show(section(case))
            write_report(text + "\n", cases, out=options.out, json_file=options.json)
    except (WrongResultError, OSError) as error:
        refused = refuse(error, "bench_kernels")
        return 1 if isinstance(error, WrongResultError) else refused
    return 0 if all(case["ways"] for case in cases) else 1


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
