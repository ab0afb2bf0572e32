import pytest
import torch
import torch.nn.functional as F

from sftron.models import loss as loss_module
from sftron.models.loss import weighted_loss_sum

T, H, V = 40, 16, 50


def _case(num_rows: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    rows = torch.randperm(T)[:num_rows].sort().values
    return torch.randn(T, H), torch.randn(V, H), rows, torch.randint(0, V, (num_rows,)), torch.rand(num_rows)


def _exact(hidden: torch.Tensor, head: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sum, losses and gradients in fp64, by torch's own cross entropy."""
    rows, labels, weights = rest
    hidden, head = (x.double().requires_grad_() for x in (hidden, head))
    losses = F.cross_entropy(hidden[rows] @ head.T, labels, reduction="none")
    total = (losses * weights).sum()
    return total.detach(), losses.detach(), *torch.autograd.grad(total, [hidden, head])


@pytest.mark.parametrize("rows_per_chunk", [2048, 23, 7, 1])
def test_the_loss_and_its_gradients_are_the_fp64_ones(rows_per_chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "ROWS_PER_CHUNK", rows_per_chunk)
    hidden, head, *rest = _case(23)
    hidden.requires_grad_()
    head.requires_grad_()
    total, losses = weighted_loss_sum(hidden, head, *rest)
    (3 * total).backward()
    exact_total, exact_losses, exact_hidden, exact_head = _exact(hidden.detach(), head.detach(), *rest)
    torch.testing.assert_close(total.double(), exact_total, atol=0, rtol=1e-6)
    torch.testing.assert_close(losses.double(), exact_losses, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), 3 * exact_hidden, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(head.grad.double(), 3 * exact_head, atol=1e-5, rtol=1e-5)
    assert not losses.requires_grad


def test_bf16_hidden_states_give_an_fp32_head_gradient_near_the_exact_one() -> None:
    hidden, head, *rest = _case(30)
    hidden = hidden.bfloat16().requires_grad_()
    head = head.bfloat16().float().requires_grad_()
    total, _ = weighted_loss_sum(hidden, head, *rest)
    total.backward()
    exact_total, _, exact_hidden, exact_head = _exact(hidden.detach(), head.detach(), *rest)
    assert (hidden.grad.dtype, head.grad.dtype, total.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    torch.testing.assert_close(total.double(), exact_total, atol=0, rtol=1e-2)
    torch.testing.assert_close(hidden.grad.double(), exact_hidden, atol=0.05, rtol=0.05)
    torch.testing.assert_close(head.grad.double(), exact_head, atol=0.05, rtol=0.05)


def test_no_labelled_row_gives_zero_with_gradients_of_zero() -> None:
    hidden, head, *rest = _case(0)
    hidden.requires_grad_()
    head.requires_grad_()
    total, losses = weighted_loss_sum(hidden, head, *rest)
    total.backward()
    assert (total.item(), len(losses)) == (0.0, 0)
    assert not hidden.grad.any()
    assert not head.grad.any()


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_theirs() -> None:
    hidden, head, *rest = _case(10)
    hidden.requires_grad_()
    total, _ = weighted_loss_sum(hidden, head, *rest)
    total.backward()
    torch.testing.assert_close(hidden.grad.double(), _exact(hidden.detach(), head, *rest)[2], atol=1e-5, rtol=1e-5)
    assert head.grad is None


def test_without_gradients_the_losses_are_the_same_to_the_bit() -> None:
    hidden, head, *rest = _case(23)
    head.requires_grad_()
    with_graph = weighted_loss_sum(hidden, head, *rest)
    with torch.no_grad():
        without = weighted_loss_sum(hidden, head, *rest)
    assert with_graph[0].requires_grad
    assert not without[0].requires_grad
    assert all(a.equal(b) for a, b in zip(with_graph, without, strict=True))


def test_a_tied_weight_gets_both_gradients() -> None:
    _, head, rows, labels, weights = _case(10)
    head.requires_grad_()
    ids = torch.randint(0, V, (T,))
    weighted_loss_sum(F.embedding(ids, head), head, rows, labels, weights)[0].backward()
    exact = head.detach().double().requires_grad_()
    losses = F.cross_entropy(F.embedding(ids, exact)[rows] @ exact.T, labels, reduction="none")
    (losses * weights).sum().backward()
    torch.testing.assert_close(head.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)


def test_a_second_backward_is_refused_instead_of_being_wrong() -> None:
    hidden, head, *rest = _case(5)
    total, _ = weighted_loss_sum(hidden.requires_grad_(), head, *rest)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran already"):
        total.backward()
