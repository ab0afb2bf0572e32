"""Every option of model.loss against dense cross entropy in fp64; others' kernels where they are installed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sftron.models import loss_options
from sftron.models.loss import LOSSES, LossSum, loss_function, resolve_loss

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

T, H, V = 24, 64, 96
ROUNDING = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
"""Allowed error, of the largest value."""
DTYPES = {
    "native": (torch.float32, torch.bfloat16),
    "liger": (torch.float32, torch.bfloat16),
    # It knows no fp32, and the interpreter multiplies no bf16 matrices.
    "cce": (torch.bfloat16,) if ON_GPU else (torch.float16,),
}
CASES = [(name, dtype) for name in LOSSES for dtype in DTYPES[name]]


@pytest.fixture
def option(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], LossSum]:
    def get(name: str) -> LossSum:
        if name == "liger":
            pytest.importorskip("liger_kernel")
        if name == "cce":
            tl_utils = pytest.importorskip("cut_cross_entropy.tl_utils")
            if not ON_GPU:  # CUDA's own library, which cannot be interpreted
                from triton import language

                monkeypatch.setattr(tl_utils.tl_libdevice, "log1p", lambda x: language.log(1 + x))
        return loss_function(name)

    return get


def case(rows: list[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Hidden states, head (values of dtype, in fp32), labelled rows, labels, weights of 0.5, 1 and 2."""
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


def assert_near(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=ROUNDING[dtype] * theirs.abs().max().item())


ROWS = {"some": [1, 2, 5, 8, 13, 14, 21], "one": [3], "all": list(range(T)), "the first and last": [0, T - 1]}


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
    unlabelled = torch.ones(T, dtype=torch.bool).index_fill_(0, rest[0].cpu(), False)
    assert not hidden.grad[unlabelled.to(DEVICE)].any()


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_only_labelled_rows_reach_the_head(option: Any, name: str, dtype: torch.dtype) -> None:
    """What the others hold changes nothing, were it NaN."""
    results = []
    for poison in (0.0, float("nan")):
        hidden, head, *rest = case(ROWS["some"], dtype)
        unlabelled = [row for row in range(T) if row not in ROWS["some"]]
        hidden[unlabelled] = poison
        total, (losses, *_) = option(name)(hidden.requires_grad_(), head.requires_grad_(), *rest)
        total.backward()
        results.append((total, losses, hidden.grad, head.grad))
    assert all(clean.equal(poisoned) for clean, poisoned in zip(*results, strict=True))
    assert results[0][0] > 0


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_no_labelled_row_gives_zero_with_gradients_of_zero(option: Any, name: str, dtype: torch.dtype) -> None:
    hidden, head, *rest = case([], dtype)
    total, (losses, *_) = option(name)(hidden.requires_grad_(), head.requires_grad_(), *rest)
    total.backward()
    assert (total.item(), losses.shape, losses.dtype) == (0.0, (0,), torch.float32)
    assert (hidden.grad.shape, head.grad.shape) == (hidden.shape, head.shape)
    assert not hidden.grad.any()
    assert not head.grad.any()


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_tied_weight_gets_both_gradients(option: Any, name: str, dtype: torch.dtype) -> None:
    _, head, *rest = case(ROWS["some"], dtype)
    ids = torch.randint(0, V, (T,), device=DEVICE)
    embed = F.embedding(ids, head.requires_grad_()).to(dtype)
    option(name)(embed, head, *rest)[0].backward()
    tied = head.detach().double().requires_grad_()
    rows, labels, weights = rest
    losses = F.cross_entropy(F.embedding(ids, tied)[rows] @ tied.T, labels, reduction="none")
    (losses * weights).sum().backward()
    assert_near(head.grad, tied.grad, dtype)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_theirs(
    option: Any, name: str, dtype: torch.dtype
) -> None:
    hidden, head, *rest = case(ROWS["some"], dtype)
    option(name)(hidden.requires_grad_(), head, *rest)[0].backward()
    assert_near(hidden.grad, exact(hidden, head, *rest)[2], dtype)
    assert head.grad is None


def test_auto_is_ours_which_runs_anywhere() -> None:
    for device in (torch.device("cpu"), torch.device("cuda")):
        assert resolve_loss("auto", device, torch.bfloat16) == "native"
        assert resolve_loss("native", device, torch.float32) == "native"


@pytest.mark.parametrize("name", ["liger", "cce"])
def test_an_option_that_cannot_run_here_is_an_error_with_the_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    with pytest.raises(ValueError, match=f"loss: '{name}' cannot run here: it needs a CUDA device, this is 'cpu'"):
        resolve_loss(name, torch.device("cpu"), torch.bfloat16)
    monkeypatch.setattr(loss_options.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"the package is not installed \(pip install .+\)\. Choose 'auto', or 'nat"):
        resolve_loss(name, cuda, torch.bfloat16)
    monkeypatch.setattr(loss_options.importlib.util, "find_spec", lambda _: "found")
    monkeypatch.setattr(loss_options, "_liger_takes_weights", lambda: name != "liger")
    if name == "liger":
        with pytest.raises(ValueError, match=r"this liger_kernel knows no weights per token; 0\.8\.5 does"):
            resolve_loss(name, cuda, torch.bfloat16)
        return
    with pytest.raises(ValueError, match="it computes in bfloat16 or float16, the model in float32"):
        resolve_loss(name, cuda, torch.float32)
    assert resolve_loss(name, cuda, torch.bfloat16) == name
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(ValueError, match=r"in an order of chance, and general\.deterministic is true"):
        resolve_loss(name, cuda, torch.bfloat16)


def test_a_name_that_is_none_of_ours_is_an_error_with_all_of_them() -> None:
    with pytest.raises(ValueError, match="loss: 'fused' is not one of auto, native, liger, cce"):
        resolve_loss("fused", torch.device("cpu"), torch.bfloat16)
