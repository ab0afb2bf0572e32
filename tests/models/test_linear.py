"""Linear layers, alone and after a norm or SwiGLU, against fp64, with and without recompute, whole and frozen."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sftron.models import linear as linear_module
from sftron.models.linear import gated_linear, linear, normed_linear

T, IN, OUT, EPS = 11, 24, 10, 1e-5

Layer = Callable[..., Tensor]


def _native(recompute: bool) -> dict[str, Layer]:
    return {
        "linear": lambda x, norm, weight, bias: linear(x, weight, bias, recompute=recompute),
        "after a norm": lambda x, norm, weight, bias: normed_linear(x, norm, EPS, weight, bias, recompute=recompute),
        "after SwiGLU": lambda x, norm, weight, bias: gated_linear(x, weight[:, : IN // 2], bias, recompute=recompute),
    }


EXACT: dict[str, Layer] = {
    "linear": lambda x, norm, weight, bias: F.linear(x, weight, bias),
    "after a norm": lambda x, norm, weight, bias: F.linear(F.rms_norm(x, norm.shape, norm, EPS), weight, bias),
    "after SwiGLU": lambda x, norm, weight, bias: F.linear(
        F.silu(x[:, : IN // 2]) * x[:, IN // 2 :], weight[:, : IN // 2], bias
    ),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("has_bias", [True, False])
def test_output_and_every_gradient_are_those_of_fp64(name: str, has_bias: bool) -> None:
    _, exact = _run(EXACT[name], torch.float64, torch.float64, has_bias)
    for recompute in (False, True):
        output, gradients = _run(_native(recompute)[name], torch.float32, torch.float32, has_bias)
        assert (gradients.keys(), output.dtype) == (exact.keys(), torch.float32)
        for key, gradient in exact.items():
            torch.testing.assert_close(
                gradients[key].double(), gradient, rtol=1e-5, atol=1e-5, msg=lambda m, k=key: k + m
            )


@pytest.mark.parametrize("name", EXACT)
def test_bf16_products_give_fp32_gradients_of_fp32_masters_the_same_with_and_without_recompute(name: str) -> None:
    kept, recomputed = (_run(_native(r)[name], torch.bfloat16, torch.float32, has_bias=True) for r in (False, True))
    _, exact = _run(EXACT[name], torch.float64, torch.float64, has_bias=True)
    assert kept[0].dtype == torch.bfloat16
    assert kept[0].equal(recomputed[0])
    with torch.inference_mode():
        assert _native(True)[name](*_arguments(torch.bfloat16, torch.float32, True).values()).equal(kept[0])
    for key, gradient in exact.items():
        assert kept[1][key].dtype == (torch.bfloat16 if key == "x" else torch.float32)
        assert kept[1][key].equal(recomputed[1][key])
        assert (kept[1][key].double() - gradient).norm() < 0.01 * gradient.norm()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", EXACT)
def test_a_frozen_linear_makes_no_gradient_of_its_weight_and_keeps_no_input_for_it(
    name: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, arguments = _native(recompute)[name], _arguments(torch.bfloat16, torch.float32, has_bias=True)
    _, expected = _run(layer, torch.bfloat16, torch.float32, has_bias=True)
    made: list[torch.Size] = []
    make = linear_module._weight_gradient
    monkeypatch.setattr(linear_module, "_weight_gradient", lambda *a: made.append(a[0].shape) or make(*a))
    leaves = {key: value.requires_grad_(key in ("x", "norm")) for key, value in arguments.items()}
    shapes: list[torch.Size] = []
    with saved_tensors_hooks(lambda x: shapes.append(x.shape) or x, lambda x: x):
        output = layer(*leaves.values())
    output.backward(_output_gradient(output.dtype))
    assert made == []
    assert {key for key, leaf in leaves.items() if leaf.grad is not None} == expected.keys() - {"weight", "bias"}
    assert all(leaf.grad.equal(expected[key]) for key, leaf in leaves.items() if leaf.grad is not None)
    # x alone, which the norm's and SwiGLU's own gradients start from.
    rows = [shape for shape in shapes if len(shape) == 2 and shape[0] == T]
    assert rows == ([] if name == "linear" else [(T, IN)])


def _arguments(dtype: torch.dtype, master_dtype: torch.dtype, has_bias: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    x, norm, weight, bias = torch.randn(T, IN), 1 + 0.3 * torch.randn(IN), torch.randn(OUT, IN), torch.randn(OUT)
    masters = {"norm": norm, "weight": weight, "bias": bias}
    arguments = {"x": x.bfloat16().to(dtype)} | {key: value.to(master_dtype) for key, value in masters.items()}
    return arguments if has_bias else arguments | {"bias": None}  # pyright: ignore[reportReturnType]


def _output_gradient(dtype: torch.dtype) -> Tensor:
    return torch.randn(T, OUT, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype)


def _run(
    layer: Layer, dtype: torch.dtype, master_dtype: torch.dtype, has_bias: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradient of each argument that has one."""
    arguments = _arguments(dtype, master_dtype, has_bias)
    leaves = {name: value.requires_grad_() for name, value in arguments.items() if value is not None}
    output = layer(*arguments.values())
    output.backward(_output_gradient(output.dtype))
    return output.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
