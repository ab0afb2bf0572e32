"""What bench_kernels.py times: each case is one computation, in several ways.

shape suffixes: T tokens, N query heads, K key-value heads, D head size, W = (N + 2K) * D, H hidden size,
F intermediate size, V vocabulary, R labelled rows
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from sftron.kernels import rms_norm, swiglu
from sftron.kernels.rope import rotate_heads
from sftron.kernels.rope_table import build_rope_table
from sftron.models.attention import BACKENDS, Attend, attend_documents, reason_against
from sftron.models.loss import weighted_loss_sum

OURS = "sftron"


@dataclass(frozen=True, slots=True)
class Way:
    """run: does it once, and returns what is compared with the case's reference, unless it is there for its time."""

    name: str
    run: Callable[[], Sequence[Tensor]]
    is_checked: bool = True


@dataclass(frozen=True, slots=True)
class Target:
    """A bound for the time of one way as a multiple of another's, or else for its extra memory in GB.

    text: follows the number. is_most: at most the bound, else at least.
    """

    bound: float
    text: str
    way: str
    other: str | None = None
    is_most: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """work: the bytes or operations that one run takes at the least, for every way the same; unit: GB/s or TFLOP/s."""

    title: str
    unit: str
    work: float
    reference: Callable[[], Sequence[Tensor]]
    ways: Sequence[Way]
    targets: Sequence[Target] = ()
    left_out: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    num_tokens: int = 16384
    document: int = 512
    heads: tuple[tuple[int, int, int], ...] = ((32, 8, 128), (32, 8, 64))  # N, K, D of Llama 8B and 1B
    hidden: tuple[int, ...] = (2048, 4096)
    intermediate: int = 14336
    vocabulary: int = 128256


QUICK = Sizes(num_tokens=64, document=16, heads=((4, 2, 64),), hidden=(32,), intermediate=48, vocabulary=97)


def rope_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    num_heads, num_kv_heads, head_dim = sizes.heads[0]
    counts, num_tokens = (num_heads, num_kv_heads, num_kv_heads), sizes.num_tokens
    shape = f"T={num_tokens}, {num_heads}/{num_kv_heads} heads of {head_dim}, bf16"
    table = build_rope_table(num_tokens, head_dim, 500000.0, None).to(device)
    position_ids = (torch.arange(num_tokens, device=device) % sizes.document).int()
    cos, sin = (x.repeat(1, 2)[None] for x in table[position_ids].chunk(2, dim=-1))
    rounded = cos.bfloat16(), sin.bfloat16()

    qkv = _random(num_tokens, sum(counts) * head_dim, device=device)
    q, k, _ = (_as_theirs(x) for x in qkv.unflatten(-1, (-1, head_dim)).split(counts, dim=1))
    source = _random(num_tokens, sum(counts[:2]) * head_dim, device=device)
    target = torch.empty_like(source)
    exact = partial(apply_rotary_pos_emb, q.float(), k.float(), cos, sin)
    in_place = qkv.clone(), q.clone(), k.clone()
    copy, eager = "torch copy_ of the same bytes", "transformers, eager"
    ways = [
        Way(OURS, lambda: rotate_heads(in_place[0], position_ids, table, num_heads, num_kv_heads)[:2]),
        Way(copy, lambda: [target.copy_(source)], is_checked=False),
        Way(eager, lambda: _as_ours(*apply_rotary_pos_emb(q, k, *rounded))),
    ]
    targets = [
        Target(0.90, "of the copy rate", copy, OURS),
        Target(4, "times the speed of eager transformers", eager, OURS),
    ]
    if _has_liger(device):
        from liger_kernel.transformers.rope import liger_rotary_pos_emb

        ways.append(Way("Liger", lambda: _as_ours(*liger_rotary_pos_emb(*in_place[1:], *rounded))))
        targets.append(Target(1.15, "times the speed of Liger", "Liger", OURS))
    yield Case(
        title=f"RoPE, forward: {shape}", unit="GB/s", work=2 * source.nbytes,
        reference=lambda: _as_ours(*exact()), ways=ways, targets=targets,
    )  # fmt: skip

    grads = [_random(num_tokens, count, head_dim, device=device) for count in counts]
    back_table = torch.cat([table[:, : head_dim // 2], -table[:, head_dim // 2 :]], dim=-1)

    def cat_and_rotate() -> list[Tensor]:
        grad_TW = torch.cat(grads, dim=1).flatten(1)
        rotate_heads(grad_TW, position_ids, back_table, num_heads, num_kv_heads)
        return [grad_TW]

    def rotated_back() -> list[Tensor]:
        dq, dk, _ = (_as_theirs(x.float()) for x in grads)
        return [torch.cat([*_as_ours(*apply_rotary_pos_emb(dq, dk, cos, -sin)), grads[2].float()], dim=1).flatten(1)]

    cat = "torch.cat, then our rotation in place"
    backward = torch.ops.sftron.rotate_heads_backward
    yield Case(
        title=f"RoPE, backward: {shape}", unit="GB/s", work=2 * qkv.nbytes, reference=rotated_back,
        ways=[Way(OURS, lambda: [backward(*grads, position_ids, table)]), Way(cat, cat_and_rotate)],
        targets=[Target(1.6, "times the speed of cat and rotation", cat, OURS)],
    )  # fmt: skip


def _as_theirs(x_TND: Tensor) -> Tensor:
    """[1, N, T, D] as transformers has it, a view of a projection of its own."""
    return x_TND.contiguous().transpose(0, 1)[None]


def _as_ours(*heads: Tensor) -> list[Tensor]:
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
        # Two products forward and four backward, as in the formula of a step's FLOPs; none for recomputed scores.
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
                ways=[Way(name, partial(run, attend, inputs, grad)) for name, attend in attends.items()],
                left_out=left_out,
            )  # fmt: skip


@torch.no_grad()
def _attend(attend: Attend, qkv: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    return [attend(*qkv)]


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
    labelled_RH, plain_head_VH = hidden_TH.detach()[rows], head_VH.detach()

    def three_products() -> list[Tensor]:
        logits_RV = labelled_RH @ plain_head_VH.T
        return [logits_RV @ plain_head_VH, logits_RV.T @ labelled_RH]

    def full_logits(hidden_TH: Tensor, head_VH: Tensor) -> Tensor:
        return F.cross_entropy((hidden_TH @ head_VH.T).float(), all_labels, reduction="sum")

    one, inputs = torch.ones((), device=device), (hidden_TH, head_VH)
    products, plain = "three plain matrix products", "F.cross_entropy on full logits"
    ways = [
        Way(OURS, lambda: _with_gradients(lambda x, w: weighted_loss_sum(x, w, rows, labels, weights)[0], inputs, one)),
        Way(products, three_products, is_checked=False),
        Way(plain, lambda: _with_gradients(full_logits, inputs, one)),
    ]
    allowed = 4 * head_VH.numel() / 1e9 + 1
    targets = [Target(allowed, "GB of extra memory, the head's gradient in fp32 and 1", OURS, is_most=True)]
    if share == 1:
        targets.append(Target(1.25, "times the time of three products", OURS, products, is_most=True))
    if _has_liger(device):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        ways.append(Way("Liger", lambda: _with_gradients(lambda x, w: liger(w, x, all_labels), inputs, one)))
        if share >= 0.5:
            targets.append(Target(1.5 if share == 1 else 3, "times the speed of Liger", "Liger", OURS))
    return Case(
        title=f"Loss and its gradients, {share:.0%} labelled: T={num_tokens}, V={vocabulary}, H={hidden_size}, bf16",
        unit="TFLOP/s", work=6 * hidden_size * vocabulary * len(rows),
        reference=lambda: _with_gradients(full_logits, [x.detach().float().requires_grad_() for x in inputs], one),
        ways=ways, targets=targets,
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

    def ours() -> list[Tensor]:
        plain_T2F = gate_up_T2F.detach()
        return [swiglu.swiglu(plain_T2F), swiglu.swiglu_backward(grad_TF, plain_T2F, with_output=False)[0]]

    yield _fused_case(
        f"SwiGLU, forward and backward: T={sizes.num_tokens}, F={sizes.intermediate}, bf16", 8 * grad_TF.nbytes,
        ours, gated, (gate_up_T2F,), grad_TF,
    )  # fmt: skip


def _fused_case(
    title: str, work: float, ours: Callable[[], Sequence[Tensor]], plain: Callable[..., Tensor],
    inputs: Sequence[Tensor], grad: Tensor,
) -> Case:  # fmt: skip
    compiled = torch.compile(plain, fullgraph=True, backend="inductor" if grad.is_cuda else "eager")
    exact = [x.detach().float().requires_grad_() for x in inputs]
    ways = [
        Way(OURS, ours),
        Way("torch, eager", partial(_with_gradients, plain, inputs, grad)),
        Way("torch.compile", partial(_with_gradients, compiled, inputs, grad)),
    ]
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
