"""Our own loss: its chunks, its memory, its scale. What every option owes is in test_loss_options.py."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sftron.kernels import accumulate, cross_entropy
from sftron.models import loss as loss_module
from sftron.models.loss import weighted_loss_sum
from tests.models.live_memory import LiveMemory
from tests.models.test_loss_options import DEVICE, assert_near, exact

T, H, V = 40, 16, 50


def case(num_rows: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    rows = torch.randperm(T)[:num_rows].sort().values
    made = torch.randn(T, H), torch.randn(V, H), rows, torch.randint(0, V, (num_rows,)), torch.rand(num_rows)
    return tuple(x.to(DEVICE) for x in made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_per_chunk", [2048, 24, 23, 22, 7, 1])
def test_how_rows_are_cut_into_chunks_changes_nothing(
    rows_per_chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """23 rows: less than a chunk, one exactly, one row more, many, each alone."""
    monkeypatch.setattr(loss_module, "_rows_per_chunk", lambda _: rows_per_chunk)
    hidden, head, *rest = case(23)
    hidden, head = hidden.to(dtype).requires_grad_(), head.to(dtype).float().requires_grad_()
    total, (losses, _, _) = weighted_loss_sum(hidden, head, *rest)
    (3 * total).backward()
    exact_total, exact_losses, exact_hidden, exact_head = exact(hidden, head, *rest)
    assert_near(total, exact_total, dtype)
    assert_near(losses, exact_losses, dtype)
    assert_near(hidden.grad, 3 * exact_hidden, dtype)
    assert_near(head.grad, 3 * exact_head, dtype)


def test_chunks_are_as_long_as_the_vocabulary_allows() -> None:
    def rows(vocab_size: int, dtype: torch.dtype = torch.bfloat16) -> int:
        return loss_module._rows_per_chunk(torch.empty(vocab_size, 1, dtype=dtype, device="meta"))

    assert [rows(size) for size in (32000, 49152, 128256, 248320, 10**9)] == [4096, 3968, 1536, 768, 128]
    assert rows(128256, torch.float32) == 768


def test_without_gradients_the_losses_are_the_same_to_the_bit() -> None:
    hidden, head, *rest = case(23)
    head.requires_grad_()
    with_graph = weighted_loss_sum(hidden, head, *rest)
    with torch.no_grad():
        without = weighted_loss_sum(hidden, head, *rest)
    assert with_graph[0].requires_grad
    assert not without[0].requires_grad
    assert with_graph[0].equal(without[0])
    assert all(a.equal(b) for a, b in zip(with_graph[1], without[1], strict=True))


def test_hidden_states_are_only_read() -> None:
    hidden, head, *rest = case(T)
    before = hidden.clone()
    weighted_loss_sum(hidden.requires_grad_(), head, *rest)[0].backward()
    assert hidden.equal(before)


def test_losses_are_unweighted_and_in_the_order_of_the_rows() -> None:
    """So that metrics by role or data set need no second pass."""
    hidden, head, rows, labels, weights = case(23)
    order = torch.randperm(23, device=DEVICE)
    _, (losses, _, _) = weighted_loss_sum(hidden, head, rows, labels, weights)
    _, (shuffled, _, _) = weighted_loss_sum(hidden, head, rows[order], labels[order], 5 * weights[order])
    torch.testing.assert_close(shuffled, losses[order])


def test_dividing_by_the_denominator_scales_both_gradients_by_the_same_number() -> None:
    """1 / 2999 lies between two bf16 numbers: were it rounded, all of one gradient would be off by 0.1 %."""
    hidden, head, *rest = case(T)
    gradients = []
    for denominator in (1, 2999):
        h, w = hidden.bfloat16().requires_grad_(), head.bfloat16().float().requires_grad_()
        (weighted_loss_sum(h, w, *rest)[0] / denominator).backward()
        gradients.append([x.grad.double() for x in (h, w)])
    for whole, scaled in zip(*gradients, strict=True):
        # The mean, in which roundings up and down cancel.
        assert (scaled.abs().sum() * 2999 / whole.abs().sum()).item() == pytest.approx(1, abs=2e-4)


def test_a_second_backward_is_refused_instead_of_being_wrong() -> None:
    hidden, head, *rest = case(5)
    total, _ = weighted_loss_sum(hidden.requires_grad_(), head, *rest)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran already"):
        total.backward()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Whatever is allocated without being written holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 23])
def test_nothing_is_read_before_it_is_written(num_rows: int, dtype: torch.dtype) -> None:
    hidden, head, *rest = case(num_rows)
    hidden, head = hidden.to(dtype).requires_grad_(), head.requires_grad_()
    total, measures = weighted_loss_sum(hidden, head, *rest)
    total.backward()
    assert all(x.isfinite().all() for x in (total, *measures, hidden.grad, head.grad))


# --- Memory ---


def live_bytes(T: int, V: int, H: int, dtype: torch.dtype) -> int:
    """The most bytes alive at a time in forward and backward, beyond the arguments; every row is labelled."""
    hidden, head = torch.ones(T, H, dtype=dtype).requires_grad_(), torch.ones(V, H).requires_grad_()
    rows, labels, weights = torch.arange(T), torch.zeros(T, dtype=torch.int64), torch.ones(T)
    with LiveMemory() as memory:
        weighted_loss_sum(hidden, head, rows, labels, weights)[0].backward()
    return memory.peak


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_at_full_size_is_the_head_s_gradient_and_1_gb(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU's kernels, whose fake twins take any device. All of forward and backward running on fake tensors shows
    as well that nothing in it reads a value back from a device (law 11)."""
    monkeypatch.setattr(loss_module, "cross_entropy_gradient_", cross_entropy._cross_entropy_gradient_cuda)
    monkeypatch.setattr(
        loss_module, "add_product_", lambda *args, is_first: accumulate._add_product_cuda(*args, int(not is_first))
    )
    with FakeTensorMode():
        beside_gradient = live_bytes(16384, 128256, 2048, dtype) - 128256 * 2048 * 4
    assert 0.5e9 < beside_gradient <= 1e9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_on_a_cpu_at_full_size_is_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks of the eleven, as a CPU takes them in many small pieces; the rows left out are added up."""
    num_rows = 1537
    with FakeTensorMode():
        beside_gradient = live_bytes(num_rows, 128256, 2048, dtype) - 128256 * 2048 * 4
    assert 0.4e9 < beside_gradient <= 1e9 - (16384 - num_rows) * 2048 * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fake_tensors_take_the_memory_that_real_ones_do(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_rows_per_chunk", lambda _: 128)
    with FakeTensorMode():
        fake = live_bytes(300, 1000, 32, dtype)
    assert fake == live_bytes(300, 1000, 32, dtype) > 1000 * 32 * 4 + 128 * 1000 * dtype.itemsize


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_memory_on_a_gpu_is_the_head_s_gradient_and_1_gb() -> None:
    T, V, H = 16384, 128256, 2048
    hidden = torch.randn(T, H, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    head = torch.full((V, H), 0.01, device="cuda", requires_grad=True)
    rows, labels = torch.arange(T, device="cuda"), torch.randint(0, V, (T,), device="cuda")
    weights = torch.ones(T, device="cuda")
    weighted_loss_sum(hidden, head, rows, labels, weights)[0].backward()  # cuBLAS takes its workspace
    hidden.grad = head.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weighted_loss_sum(hidden, head, rows, labels, weights)[0].backward()
    assert torch.cuda.max_memory_allocated() - before <= V * H * 4 + 1e9
