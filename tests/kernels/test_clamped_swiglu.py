"""The clamped SwiGLU of gpt-oss, against its definition in fp64 and autograd."""

import pytest
import torch

from sftron.kernels import clamped_swiglu as module
from sftron.kernels.clamped_swiglu import clamped_swiglu, clamped_swiglu_backward
from tests.kernels.conftest import DEVICES

DEVICE = DEVICES["triton"]

CONSTANTS = {"alpha": 1.702, "limit": 7.0}


def by_definition(gate_up: torch.Tensor, *, alpha: float, limit: float) -> torch.Tensor:
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate / (1 + torch.exp(-alpha * gate))


@pytest.mark.parametrize("constants", [CONSTANTS, {"alpha": 0.6, "limit": 1.5}], ids=["gpt-oss", "others"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_product_and_gradient_match_the_definition_in_fp64(
    constants: dict[str, float], dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_VALUES_ON_CPU", "_VALUES_ON_GPU"):
        monkeypatch.setattr(module, name, 100)  # several blocks of rows, and a last one that is not whole
    torch.manual_seed(0)
    limit = constants["limit"]
    gate_up, grad = (torch.randn(37, 48) * limit).to(DEVICE, dtype), torch.randn(37, 24).to(DEVICE, dtype)
    exact = gate_up.double().requires_grad_()
    expected = by_definition(exact, **constants)
    expected.backward(grad.double())
    is_clamped = exact.grad == 0
    assert 0.1 < is_clamped[:, ::2].double().mean() < 0.5 < 3 * is_clamped[:, 1::2].double().mean()

    product = clamped_swiglu(gate_up, **constants)
    grad_gate_up, again = clamped_swiglu_backward(grad, gate_up, **constants)
    assert product.dtype == grad_gate_up.dtype == dtype
    assert again.equal(product)
    assert grad_gate_up[is_clamped].count_nonzero() == 0
    for found, wanted in ((product, expected), (grad_gate_up, exact.grad)):
        torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=tolerance)


def test_an_input_at_its_bound_has_the_gradient_of_torch_clamp() -> None:
    gate_up = torch.tensor([[7.0, 7.0, 7.0, -7.0, 7.5, 7.5, -9.0, -7.5]], device=DEVICE).requires_grad_()
    gate, up = gate_up[:, ::2].clamp(max=7.0), gate_up[:, 1::2].clamp(-7.0, 7.0)
    ((up + 1) * gate * (1.702 * gate).sigmoid()).sum().backward()
    found, _ = clamped_swiglu_backward(torch.ones(1, 4, device=DEVICE), gate_up.detach(), **CONSTANTS)
    torch.testing.assert_close(found, gate_up.grad)
    assert (found[0, 4:] == 0).tolist() == [True, True, False, True]


def test_two_blocks_on_the_meta_device_need_the_memory_of_all_blocks_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions of memory would take minutes with all of them."""
    from sftron.train.measured_memory import LiveMemory

    monkeypatch.setattr(module, "_VALUES_ON_GPU", 100)
    peaks = {}
    for device, on_cpu in (("cpu", 100 // torch.get_num_threads()), ("meta", 1)):
        monkeypatch.setattr(module, "_VALUES_ON_CPU", on_cpu)
        gate_up, grad = torch.zeros(37, 48, device=device), torch.zeros(37, 24, device=device)
        num_blocks = len(list(module._blocks(gate_up, grad)))
        assert num_blocks > 8 if device == "cpu" else num_blocks < 3
        with LiveMemory() as product:
            clamped_swiglu(gate_up, **CONSTANTS)
        with LiveMemory() as gradient:
            clamped_swiglu_backward(grad, gate_up, **CONSTANTS)
        peaks[device] = product.peak, gradient.peak
    assert peaks["meta"] == peaks["cpu"]
