"""Linear layers, alone and behind a norm or SwiGLU, against fp64, with and without recompute."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sftron.models.linear import gated_linear, linear, normed_linear

T, IN, OUT, EPS = 11, 24, 10, 1e-5

Layer = Callable[..., Tensor]


def _ours(recompute: bool) -> dict[str, Layer]:
    return {
        "linear": lambda x, norm, weight, bias: linear(x, weight, bias, recompute=recompute),
        "behind a norm": lambda x, norm, weight, bias: normed_linear(x, norm, EPS, weight, bias, recompute=recompute),
        "behind SwiGLU": lambda x, norm, weight, bias: gated_linear(x, weight[:, : IN // 2], bias, recompute=recompute),
    }


EXACT: dict[str, Layer] = {
    "linear": lambda x, norm, weight, bias: F.linear(x, weight, bias),
    "behind a norm": lambda x, norm, weight, bias: F.linear(F.rms_norm(x, norm.shape, norm, EPS), weight, bias),
    "behind SwiGLU": lambda x, norm, weight, bias: F.linear(
        F.silu(x[:, : IN // 2]) * x[:, IN // 2 :], weight[:, : IN // 2], bias
    ),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("has_bias", [True, False])
def test_output_and_every_gradient_are_those_of_fp64(name: str, has_bias: bool) -> None:
    _, exact = _run(EXACT[name], torch.float64, torch.float64, has_bias)
    for recompute in (False, True):
        output, ours = _run(_ours(recompute)[name], torch.float32, torch.float32, has_bias)
        assert (ours.keys(), output.dtype) == (exact.keys(), torch.float32)
        for key, gradient in exact.items():
            torch.testing.assert_close(ours[key].double(), gradient, rtol=1e-5, atol=1e-5, msg=lambda m, k=key: k + m)


@pytest.mark.parametrize("name", EXACT)
def test_bf16_products_give_fp32_gradients_of_fp32_masters_the_same_with_and_without_recompute(name: str) -> None:
    kept, recomputed = (_run(_ours(r)[name], torch.bfloat16, torch.float32, has_bias=True) for r in (False, True))
    _, exact = _run(EXACT[name], torch.float64, torch.float64, has_bias=True)
    assert kept[0].dtype == torch.bfloat16
    assert kept[0].equal(recomputed[0])
    for key, gradient in exact.items():
        ours = kept[1][key]
        assert ours.dtype == (torch.bfloat16 if key == "x" else torch.float32)
        assert ours.equal(recomputed[1][key])
        assert (ours.double() - gradient).norm() < 0.01 * gradient.norm()


@pytest.mark.parametrize("name", EXACT)
def test_without_gradients_the_output_is_the_same_to_the_bit(name: str) -> None:
    output, _ = _run(_ours(False)[name], torch.bfloat16, torch.float32, has_bias=True)
    with torch.inference_mode():
        assert _ours(True)[name](*_arguments(torch.bfloat16, torch.float32, has_bias=True).values()).equal(output)


def _arguments(dtype: torch.dtype, master_dtype: torch.dtype, has_bias: bool) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    x, norm, weight, bias = torch.randn(T, IN), 1 + 0.3 * torch.randn(IN), torch.randn(OUT, IN), torch.randn(OUT)
    masters = {"norm": norm, "weight": weight, "bias": bias if has_bias else None}
    return {"x": x.bfloat16().to(dtype)} | {k: v if v is None else v.to(master_dtype) for k, v in masters.items()}


def _run(
    layer: Layer, dtype: torch.dtype, master_dtype: torch.dtype, has_bias: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradient of each argument that has one."""
    arguments = _arguments(dtype, master_dtype, has_bias)
    leaves = {name: value.requires_grad_() for name, value in arguments.items() if value is not None}
    output = layer(*arguments.values())
    output.backward(torch.randn(T, OUT, generator=torch.Generator().manual_seed(1)).bfloat16().to(output.dtype))
    return output.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
