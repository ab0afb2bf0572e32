"""xIELU, against its definition in transformers with autograd in fp64."""

import pytest
import torch
from transformers.activations import ACT2CLS

from sftron.kernels.xielu import BETA, EPS, xielu
from tests.kernels.conftest import DEVICES

DEVICE = DEVICES["triton"]

ALPHAS = [(0.2, -1.3), (-2.0, 1.5)]
# Of both signs, large and small, at 0, and on both sides of the bound of the exponential.
EDGES = [0.0, -1e-7, 1e-7, 2 * EPS, -30.0, 40.0]


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(37, 40) * 3, torch.tensor(EDGES).repeat(37, 1)], dim=1)
    return x.to(DEVICE, dtype), torch.randn(x.shape).to(DEVICE, dtype)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("alphas", ALPHAS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2**-8)]
)
def test_values_and_every_gradient_are_those_of_the_definition_in_fp64(
    alphas: tuple[float, float], dtype: torch.dtype, tolerance: float
) -> None:
    x, grad = inputs(dtype)
    reference, exact = ACT2CLS["xielu"](dtype=torch.float64).to(DEVICE), x.double().requires_grad_()
    assert (reference.beta, reference.eps) == (BETA, EPS)
    for parameter, value in zip((reference.alpha_p, reference.alpha_n), alphas, strict=True):
        torch.nn.init.constant_(parameter, value)
    expected = reference(exact)
    expected.backward(grad.double())

    ours = [
        x.requires_grad_(),
        *(torch.tensor([each], dtype=torch.float64, device=DEVICE).requires_grad_() for each in alphas),
    ]
    found = xielu(*ours)
    found.backward(grad)
    assert found.dtype == x.grad.dtype == dtype
    for mine, theirs in ((found, expected), (x.grad, exact.grad)):
        torch.testing.assert_close(mine.double(), theirs, atol=min(tolerance, 1e-6), rtol=tolerance)
    for mine, theirs in zip(ours[1:], (reference.alpha_p, reference.alpha_n), strict=True):
        assert theirs.grad.abs() > 1
        # The sum over all elements is in fp32, of terms up to 40^2.
        torch.testing.assert_close(mine.grad, theirs.grad, atol=0, rtol=1e-12 if dtype == torch.float64 else 1e-5)


def test_frozen_parameters_have_no_gradient_and_change_none_of_the_input() -> None:
    found = []
    for is_trained in (True, False):
        x, grad = inputs(torch.float32)
        alphas = [torch.tensor([value], device=DEVICE, requires_grad=is_trained) for value in ALPHAS[0]]
        xielu(x.requires_grad_(), *alphas).backward(grad)
        assert all((alpha.grad is not None) == is_trained for alpha in alphas)
        found.append(x.grad)
    assert found[0].equal(found[1])
