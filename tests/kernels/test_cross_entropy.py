"""The torch twin, and the Triton kernel (interpreted where there is no GPU), against fp64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sftron.kernels import cross_entropy
from sftron.kernels.cross_entropy import add_product_, cross_entropy_gradient_, empty_logits, launch_cross_entropy
from tests.kernels.conftest import DEVICES, NIGHTLY
from tests.kernels.machine_code import compile_for, launches, meta

DEVICE = DEVICES["triton"]
Gradient = Callable[[Tensor, Tensor, Tensor], Tensor]
IMPLEMENTATIONS = {"torch": cross_entropy_gradient_, "triton": launch_cross_entropy}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(params=IMPLEMENTATIONS)
def gradient_(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gradient:
    # Blocks so small that every case has several, the last of them cut off.
    monkeypatch.setattr(cross_entropy, "ELEMENTS_AT_ONCE", 150)
    monkeypatch.setattr(cross_entropy, "MAX_BLOCK", 64)

    def run(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        device = DEVICES[request.param]
        # Rows 64 apart, and NaN between them.
        width = -(-logits.shape[1] // 64) * 64
        on_device = torch.full((len(logits), width), float("nan"), dtype=logits.dtype, device=device)
        on_device = on_device[:, : logits.shape[1]].copy_(logits)
        measures = IMPLEMENTATIONS[request.param](on_device, labels.to(device), weights.to(device))
        logits.copy_(on_device)
        return measures.cpu()

    return run


def case(num_rows: int, vocab_size: int, dtype: torch.dtype, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(vocab_size)
    logits = (scale * torch.randn(num_rows, vocab_size)).to(dtype)
    labels = torch.randint(0, vocab_size, (num_rows,))
    labels[0], labels[-1] = vocab_size - 1, 0
    return logits, labels, torch.rand(num_rows) + 0.5


def require_exact(gradient_: Gradient, logits: Tensor, labels: Tensor, weights: Tensor) -> None:
    """Compares measures and gradient with those of fp64."""
    leaf = logits.double().requires_grad_()
    losses = F.cross_entropy(leaf, labels, reduction="none")
    (exact_gradient,) = torch.autograd.grad((losses * weights).sum(), leaf)
    entropies = torch.special.entr(leaf.detach().softmax(dim=1)).sum(dim=1)
    exact_measures = torch.stack([losses.detach(), entropies, leaf.argmax(dim=1) == labels])
    measures = gradient_(logits, labels, weights)
    assert measures.dtype == torch.float32
    torch.testing.assert_close(measures.double(), exact_measures, atol=1e-5, rtol=1e-6)
    # One rounding of a gradient, on top of fp32 arithmetic. Triton's interpreter cuts bf16 off, a GPU rounds.
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[logits.dtype]
    torch.testing.assert_close(logits.double(), exact_gradient, atol=1e-6, rtol=rounding)


@pytest.mark.parametrize("vocab_size", [1, 50, 64, 192, 200, pytest.param(768, marks=NIGHTLY)])
@DTYPES
def test_measures_and_gradients_are_the_fp64_ones(gradient_: Gradient, dtype: torch.dtype, vocab_size: int) -> None:
    logits, labels, weights = case(5, vocab_size, dtype)
    labels[1] = logits[1].argmax()
    require_exact(gradient_, logits, labels, weights)


@DTYPES
def test_huge_logits_lose_no_digit(gradient_: Gradient, dtype: torch.dtype) -> None:
    """At 1e4 the logsumexp itself is an fp32 number only to 1e-3; losses are differences of logits to the last bit."""
    logits, labels, weights = case(4, 200, dtype)
    require_exact(gradient_, logits + 10240, labels, weights)


def test_a_logit_of_minus_infinity_is_a_token_of_probability_zero(gradient_: Gradient) -> None:
    """A whole block of them at the beginning as well: there is no difference of two infinities."""
    logits, labels, weights = case(3, 200, torch.float32)
    labels[:] = 150
    logits[:, :100] = float("-inf")
    require_exact(gradient_, logits, labels, weights)
    assert not logits[:, :100].any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_makes_its_row_s_loss_nan_and_no_other_s(gradient_: Gradient, bad: float) -> None:
    logits, labels, weights = case(3, 200, torch.float32)
    logits[1, 70] = bad
    measures = gradient_(logits, labels, weights)

    assert measures[0].isnan().tolist() == [False, True, False]
    assert measures[1].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("label", [-100, -1, 200])
def test_a_label_out_of_range_is_an_error_on_a_cpu_and_a_loss_of_nan_on_a_gpu(label: int) -> None:
    logits, labels, weights = case(3, 200, torch.float32)
    labels[1] = label
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        IMPLEMENTATIONS["torch"](logits.clone(), labels, weights)
    losses, _, _ = IMPLEMENTATIONS["triton"](logits.to(DEVICE), labels.to(DEVICE), weights.to(DEVICE))
    assert losses.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("vocab_size", [200, 192])
def test_of_equal_logits_the_first_is_the_argmax(gradient_: Gradient, vocab_size: int) -> None:
    """In bf16 they are common. In one block, and in several."""
    logits, labels, weights = case(4, vocab_size, torch.bfloat16)
    logits[:, [40, 41, 140]] = 20.0
    for label, is_hit in ((40, 1.0), (41, 0.0), (140, 0.0), (39, 0.0)):
        labels[:] = label
        _, _, hits = gradient_(logits.clone(), labels, weights)
        assert hits.tolist() == [is_hit] * 4


def test_labels_and_weights_of_any_stride_are_read_right(gradient_: Gradient) -> None:
    """A column of a table, and one weight for all."""
    logits, labels, _ = case(5, 50, torch.float32)
    table, weights = labels.repeat(2, 1).T.contiguous(), torch.tensor(0.5).expand(5)
    table[:, 1] = 7
    require_exact(gradient_, logits, table[:, 0], weights)


def test_on_a_gpu_rows_begin_at_multiples_of_128_bytes_and_on_a_cpu_nothing_lies_between_them() -> None:
    assert empty_logits(3, 32002, like=torch.empty(0)).stride() == (32002, 1)
    with FakeTensorMode():
        like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
        assert empty_logits(3, 32002, like=like).stride() == (32064, 1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_products_add_up_in_fp32_and_the_first_overwrites_whatever_was_there(
    device: str, dtype: torch.dtype, rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    monkeypatch.setattr(cross_entropy, "_PRODUCTS_AT_ONCE", 60)
    torch.manual_seed(0)
    total = torch.full((13, 7), float("nan"), device=device)
    exact_total = torch.zeros(13, 7, dtype=torch.float64, device=device)
    size = torch.zeros(13, 7, dtype=torch.float64, device=device)
    for number in range(40):
        # As in the loss, the left one is a transposed view.
        left, right = (torch.randn(9, n, device=device).to(dtype) for n in (13, 7))
        add_product_(total, left.T, right, is_first=number == 0)
        exact_total += left.double().T @ right.double()
        size += (left.double().T @ right.double()).abs()
    # Each product is rounded once at most, and the sum is fp32: in bf16 it would stop growing.
    assert ((total.double() - exact_total).abs() <= rounding * size).all()
    if dtype == torch.bfloat16 and device == "cuda":
        assert ((total.double() - exact_total).abs() <= 1e-5 * size).all()


@pytest.mark.nightly
def test_the_machine_code_reads_and_writes_16_bytes_at_once_and_uses_no_local_memory() -> None:
    rows = meta(1536, dtype=torch.int64), meta(1536, dtype=torch.float32)
    codes = compile_for(
        90,
        # A vocabulary of any size; and the fp32 logits of an fp32 model.
        *launches(launch_cross_entropy, meta(1536, 32064)[:, :32002], *rows),
        *launches(launch_cross_entropy, meta(1536, 128256, dtype=torch.float32), *rows),
    )
    for code in codes:
        assert code.global_loads[128] == 2 * 4  # both passes
        assert code.global_stores[128] == 4
        assert code.global_loads.keys() <= {128, 64, 32, 16}
        assert (code.local_bytes, code.spills) == (0, [])
        # A program of 1,024 threads has the 65,536 registers of a processor.
        assert code.resources["REG"] <= 64
