import pytest
import torch

from sftron.kernels import accumulate
from sftron.kernels.accumulate import add_product_

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_products_add_up_in_fp32_and_the_first_overwrites_whatever_was_there(
    device: str, dtype: torch.dtype, rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    monkeypatch.setattr(accumulate, "_ELEMENTS_AT_ONCE", 60)
    torch.manual_seed(0)
    total = torch.full((13, 7), float("nan"), device=device)
    exact = torch.zeros(13, 7, dtype=torch.float64, device=device)
    size = torch.zeros(13, 7, dtype=torch.float64, device=device)
    for number in range(40):
        # As the loss gives them: the left one is a transposed view.
        left, right = (torch.randn(9, n, device=device).to(dtype) for n in (13, 7))
        add_product_(total, left.T, right, is_first=number == 0)
        exact += left.double().T @ right.double()
        size += (left.double().T @ right.double()).abs()
    # Each product is rounded once at most, and the sum is fp32: in bf16 it would stop growing.
    assert ((total.double() - exact).abs() <= rounding * size).all()
    if dtype == torch.bfloat16 and device == "cuda":
        assert ((total.double() - exact).abs() <= 1e-5 * size).all()
