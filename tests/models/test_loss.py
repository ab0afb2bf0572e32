"""Every option of model.loss against dense cross entropy in fp64; the native one's chunks, memory and scale."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sftron.kernels import cross_entropy
from sftron.models import loss as loss_module
from sftron.models.head import Head
from sftron.models.loss import LOSSES, LossSum, resolve_loss, rows_per_chunk
from tests.models.memory import LiveMemory

FP32, BF16 = torch.float32, torch.bfloat16
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

T, H, V = 24, 64, 96
ROUNDING = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
"""Allowed error, as a part of the largest value."""
DTYPES = {
    "native": (torch.float32, torch.bfloat16),
    "liger": (torch.float32, torch.bfloat16),
}
CASES = [(name, dtype) for name in LOSSES for dtype in DTYPES[name]]
ROWS = {"some": [1, 2, 5, 8, 13, 14, 21], "one": [3], "all": list(range(T)), "the first and last": [0, T - 1]}


@pytest.fixture
def option() -> Callable[[str], LossSum]:
    def get(name: str) -> LossSum:
        if name == "liger":
            pytest.importorskip("liger_kernel")
        return lambda hidden, weight, *rest: LOSSES[name](hidden, Head(weight), *rest)

    return get


def weighted_loss_sum(hidden: Tensor, weight: Tensor, *rest: Tensor) -> Any:
    return loss_module.weighted_loss_sum(hidden, Head(weight), *rest)


def case(rows: list[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Hidden states, head (values of dtype, in fp32), label positions, labels, weights of 0.5, 1 and 2."""
    torch.manual_seed(0)
    weights = torch.tensor([0.5, 1.0, 2.0])[torch.arange(len(rows)) % 3]
    hidden = torch.randn(T, H).to(dtype)
    head = (torch.randn(V, H) / 4).to(dtype).float()
    labels = torch.randint(0, V, (len(rows),))
    return tuple(x.to(DEVICE) for x in (hidden, head, torch.tensor(rows, dtype=torch.int64), labels, weights))


def exact(hidden: Tensor, head: Tensor, rows: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    hidden, head = (x.detach().double().requires_grad_() for x in (hidden, head))
    losses = F.cross_entropy(hidden[rows] @ head.T, labels, reduction="none")
    total = (losses * weights).sum()
    return total.detach(), losses.detach(), *torch.autograd.grad(total, [hidden, head])


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=ROUNDING[dtype] * expected.abs().max().item())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_sum_losses_and_gradients_are_the_fp64_ones(option: Any, name: str, dtype: torch.dtype, rows: str) -> None:
    hidden, head, *rest = case(ROWS[rows], dtype)
    total, (losses, *_) = option(name)(hidden.requires_grad_(), head.requires_grad_(), *rest)
    (total / 3).backward()
    exact_total, exact_losses, exact_hidden, exact_head = exact(hidden, head, *rest)

    assert (total.dtype, losses.dtype, losses.requires_grad) == (torch.float32, torch.float32, False)
    assert (hidden.grad.dtype, head.grad.dtype) == (dtype, torch.float32)
    assert_near(total, exact_total, dtype)
    assert_near(losses, exact_losses, dtype)
    assert_near(hidden.grad, exact_hidden / 3, dtype)
    assert_near(head.grad, exact_head / 3, dtype)
    unlabeled = torch.ones(T, dtype=torch.bool).index_fill_(0, rest[0].cpu(), False)
    assert not hidden.grad[unlabeled.to(DEVICE)].any()


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_only_labeled_positions_reach_the_head(option: Any, name: str, dtype: torch.dtype) -> None:
    """What the others hold changes nothing, were it NaN."""
    results = []
    for poison in (0.0, float("nan")):
        hidden, head, *rest = case(ROWS["some"], dtype)
        unlabeled = [row for row in range(T) if row not in ROWS["some"]]
        hidden[unlabeled] = poison
        total, (losses, *_) = option(name)(hidden.requires_grad_(), head.requires_grad_(), *rest)
        total.backward()
        results.append((total, losses, hidden.grad, head.grad))
    assert all(clean.equal(poisoned) for clean, poisoned in zip(*results, strict=True))
    assert results[0][0] > 0


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_no_labeled_position_gives_zero_with_gradients_of_zero(option: Any, name: str, dtype: torch.dtype) -> None:
    hidden, head, *rest = case([], dtype)
    total, (losses, *_) = option(name)(hidden.requires_grad_(), head.requires_grad_(), *rest)
    total.backward()
    assert (total.item(), losses.shape, losses.dtype) == (0.0, (0,), torch.float32)
    for leaf in (hidden, head):
        assert leaf.grad.equal(torch.zeros_like(leaf))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_tied_weight_gets_both_gradients_and_a_frozen_one_none(option: Any, name: str, dtype: torch.dtype) -> None:
    hidden, head, *rest = case(ROWS["some"], dtype)
    option(name)(hidden.requires_grad_(), head, *rest)[0].backward()
    assert_near(hidden.grad, exact(hidden, head, *rest)[2], dtype)
    assert head.grad is None
    ids = torch.randint(0, V, (T,), device=DEVICE)
    embed = F.embedding(ids, head.requires_grad_()).to(dtype)
    option(name)(embed, head, *rest)[0].backward()
    tied = head.detach().double().requires_grad_()
    rows, labels, weights = rest
    losses = F.cross_entropy(F.embedding(ids, tied)[rows] @ tied.T, labels, reduction="none")
    (losses * weights).sum().backward()
    assert_near(head.grad, tied.grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES["native"])
@pytest.mark.parametrize(("with_bias", "softcap"), [(True, None), (False, 1.5), (True, 0.5)])
def test_a_bias_and_a_soft_cap_of_the_head_have_the_fp64_gradients(
    with_bias: bool, softcap: float | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, and saturated: some logits are at 4 times the cap."""
    monkeypatch.setattr(loss_module, "rows_per_chunk", lambda *_, **__: 5)
    hidden, weight, rows, *rest = case(ROWS["all"], dtype)
    bias = torch.randn(V, device=DEVICE).to(dtype).float()
    leaves = [hidden, weight, *([bias] if with_bias else [])]
    exact_hidden, exact_weight, *exact_bias = exact_leaves = [x.double().requires_grad_() for x in leaves]
    logits = exact_hidden[rows] @ exact_weight.T + sum(exact_bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = (F.cross_entropy(logits, rest[0], reduction="none") * rest[1]).sum()
    expected.backward()

    head = Head(weight.requires_grad_(), bias.requires_grad_() if with_bias else None, softcap)
    total, measures = loss_module.weighted_loss_sum(hidden.requires_grad_(), head, rows, *rest)
    total.backward()
    with torch.no_grad():
        assert loss_module.weighted_loss_sum(hidden, head, rows, *rest)[1].losses.equal(measures.losses)
    assert_near(total, expected.detach(), dtype)
    assert_near(head.logits(hidden)[rows].float(), logits.detach(), dtype)
    for leaf, exact_leaf in zip(leaves, exact_leaves, strict=True):
        assert_near(leaf.grad, exact_leaf.grad, dtype)  # pyright: ignore[reportArgumentType]


def test_auto_is_native_which_runs_anywhere_and_other_options_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for device in (cpu, cuda):
        assert resolve_loss("auto", device, head_has="a bias") == "native"
        assert resolve_loss("native", device) == "native"

    def refused(name: str, reason: str, device: torch.device = cuda) -> None:
        with pytest.raises(ValueError, match=f"loss: '{name}'.*{reason}"):
            resolve_loss(name, device)

    refused("cce", "is not one of auto, native, liger")
    refused("liger", "it needs a CUDA device, but the device is 'cpu'", cpu)
    monkeypatch.setattr(loss_module.importlib.util, "find_spec", lambda _: None)
    refused("liger", r"the package is not installed \(pip install .+\)\. Choose 'auto', or 'nat")
    monkeypatch.setattr(loss_module.importlib.util, "find_spec", lambda _: "found")
    monkeypatch.setattr(loss_module, "_liger_takes_weights", lambda: False)
    refused("liger", r"liger_kernel takes no weights per token before 0\.8\.5")
    with pytest.raises(ValueError, match=r"'liger' cannot run here: the head of this model has a bias, which"):
        resolve_loss("liger", cuda, head_has="a bias")


# --- The native option ---


@pytest.mark.parametrize(
    ("rows_per_chunk", "dtype"), [(2048, BF16), (23, FP32), (22, BF16), (22, FP32), (7, BF16), (1, FP32)]
)
def test_how_rows_are_cut_into_chunks_changes_nothing(
    rows_per_chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """23 rows: less than a chunk, one exactly, one row more, many, each alone. Hidden states are only read."""
    monkeypatch.setattr(loss_module, "rows_per_chunk", lambda *_, **__: rows_per_chunk)
    hidden, head, *rest = case(list(range(1, T)), dtype)
    before = hidden.clone()
    total, (losses, _, _) = weighted_loss_sum(hidden.requires_grad_(), head.requires_grad_(), *rest)
    (3 * total).backward()
    exact_total, exact_losses, exact_hidden, exact_head = exact(hidden, head, *rest)
    assert_near(total, exact_total, dtype)
    assert_near(losses, exact_losses, dtype)
    assert_near(hidden.grad, 3 * exact_hidden, dtype)
    assert_near(head.grad, 3 * exact_head, dtype)
    assert hidden.equal(before)


def test_without_gradients_the_losses_are_the_same_to_the_bit() -> None:
    hidden, head, *rest = case(ROWS["some"], torch.float32)
    head.requires_grad_()
    with_graph = weighted_loss_sum(hidden, head, *rest)
    with torch.no_grad():
        without = weighted_loss_sum(hidden, head, *rest)
    assert with_graph[0].requires_grad
    assert not without[0].requires_grad
    assert with_graph[0].equal(without[0])
    assert all(a.equal(b) for a, b in zip(with_graph[1], without[1], strict=True))


def test_losses_are_unweighted_and_in_the_order_of_the_positions() -> None:
    """So that metrics by role or data set need no second pass."""
    hidden, head, rows, labels, weights = case(ROWS["all"], torch.float32)
    order = torch.randperm(T, device=DEVICE)
    _, (losses, _, _) = weighted_loss_sum(hidden, head, rows, labels, weights)
    _, (shuffled, _, _) = weighted_loss_sum(hidden, head, rows[order], labels[order], 5 * weights[order])
    torch.testing.assert_close(shuffled, losses[order])


def test_dividing_by_the_denominator_scales_both_gradients_by_the_same_number() -> None:
    """1 / 2999 lies between two bf16 numbers: were it rounded, all of one gradient would be off by 0.1 %."""
    hidden, head, *rest = case(ROWS["all"], torch.bfloat16)
    gradients = []
    for denominator in (1, 2999):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        (weighted_loss_sum(h, w, *rest)[0] / denominator).backward()
        gradients.append([x.grad.double() for x in (h, w)])
    for whole, scaled in zip(*gradients, strict=True):
        # The mean, in which roundings up and down cancel.
        assert (scaled.abs().sum() * 2999 / whole.abs().sum()).item() == pytest.approx(1, abs=2e-4)


def test_a_second_backward_is_refused_instead_of_being_wrong() -> None:
    hidden, head, *rest = case(ROWS["some"], torch.float32)
    total, _ = weighted_loss_sum(hidden.requires_grad_(), head, *rest)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran already"):
        total.backward()


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that is allocated without being written holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[], ROWS["some"]])
def test_nothing_is_read_before_it_is_written(rows: list[int], dtype: torch.dtype) -> None:
    hidden, head, *rest = case(rows, dtype)
    total, measures = weighted_loss_sum(hidden.requires_grad_(), head.requires_grad_(), *rest)
    total.backward()
    assert all(x.isfinite().all() for x in (total, *measures, hidden.grad, head.grad))


def live_bytes(num_tokens: int, vocab_size: int, width: int, dtype: torch.dtype) -> int:
    """The most bytes alive at a time in forward and backward, beyond the arguments; every position is labeled."""
    hidden = torch.ones(num_tokens, width, dtype=dtype).requires_grad_()
    head = torch.ones(vocab_size, width).requires_grad_()
    rows, labels = torch.arange(num_tokens), torch.zeros(num_tokens, dtype=torch.int64)
    with LiveMemory() as memory:
        weighted_loss_sum(hidden, head, rows, labels, torch.ones(num_tokens))[0].backward()
    return memory.peak


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_at_full_size_is_the_head_s_gradient_and_1_gb(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU's kernels, whose fake twins take any device. All of forward and backward running on fake tensors shows
    as well that nothing in it reads a value back from a device (law 11)."""
    monkeypatch.setattr(loss_module, "cross_entropy_gradient_", cross_entropy._cross_entropy_gradient)
    monkeypatch.setattr(
        loss_module, "add_product_", lambda *args, is_first: cross_entropy._add_product(*args, int(not is_first))
    )
    with FakeTensorMode():
        besides_gradient = live_bytes(16384, 128256, 2048, dtype) - 128256 * 2048 * 4
    assert 0.5e9 < besides_gradient <= 1e9


@pytest.mark.parametrize(
    ("vocab_size", "hidden_size", "needs_head", "num_rows"),
    [
        (262144, 2560, True, 2048),  # Gemma 4 E4B
        (262144, 5376, True, 4096),
        (262144, 2560, False, 640),  # no gradient to read and write
        (128256, 2048, True, 1536),
        (128256, 4096, True, 3200),
        (49152, 576, True, 3968),
    ],
)
def test_a_chunk_is_larger_where_the_head_s_gradient_is(
    vocab_size: int, hidden_size: int, needs_head: bool, num_rows: int
) -> None:
    """As each chunk reads and writes it. The logits are at most 0.4 of the gradient, or 400 MB."""
    weight = torch.empty(vocab_size, hidden_size, dtype=BF16, device="meta")
    assert rows_per_chunk(weight, needs_head=needs_head) == num_rows
    assert num_rows * vocab_size * 2 <= max(400e6, 0.4 * weight.numel() * 4 * needs_head)


def test_only_a_trained_head_makes_the_chunks_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training with a frozen head, and evaluation, need no more memory."""
    chunks = []
    monkeypatch.setattr(loss_module, "empty_logits", lambda n, *_, **__: chunks.append(n) or torch.empty(n, 262144))
    with FakeTensorMode():
        hidden, rows = torch.empty(4096, 2560, requires_grad=True), torch.arange(4096)
        for is_trained in (True, False):
            head = torch.empty(262144, 2560, requires_grad=is_trained)
            weighted_loss_sum(hidden, head, rows, rows, torch.ones(4096))
        with torch.no_grad():
            weighted_loss_sum(hidden, head.requires_grad_(), rows, rows, torch.ones(4096))
    assert chunks == [1024, 256, 256]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fake_tensors_take_the_memory_that_real_ones_do(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "rows_per_chunk", lambda *_, **__: 128)
    with FakeTensorMode():
        fake = live_bytes(300, 1000, 32, dtype)
    assert fake == live_bytes(300, 1000, 32, dtype) > 1000 * 32 * 4 + 128 * 1000 * dtype.itemsize


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no GPU")
def test_memory_on_a_gpu_is_the_head_s_gradient_and_1_gb() -> None:
    num_tokens, vocab_size, width = 16384, 128256, 2048
    hidden = torch.randn(num_tokens, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    head = torch.full((vocab_size, width), 0.01, device="cuda", requires_grad=True)
    rows, labels = torch.arange(num_tokens, device="cuda"), torch.randint(0, vocab_size, (num_tokens,), device="cuda")
    weights = torch.ones(num_tokens, device="cuda")
    weighted_loss_sum(hidden, head, rows, labels, weights)[0].backward()  # cuBLAS takes its workspace
    hidden.grad = head.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weighted_loss_sum(hidden, head, rows, labels, weights)[0].backward()
    assert torch.cuda.max_memory_allocated() - before <= vocab_size * width * 4 + 1e9
