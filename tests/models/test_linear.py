"""Linear layers, alone and after a norm or SwiGLU, against fp64, with and without recompute, whole, frozen, adapted."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sftron.models import linear as linear_module
from sftron.models.linear import LowRank, linear

T, IN, OUT, EPS = 11, 24, 10, 1e-5

Layer = Callable[..., Tensor]


def _native(recompute: bool, adapters: Sequence[LowRank] = ()) -> dict[str, Layer]:
    options: dict[str, Any] = {"recompute": recompute, "adapters": adapters}
    gated = options | {"activation": "silu", "is_gated": True}
    return {
        "linear": lambda x, norm, weight, bias: linear(x, weight, bias, **options),
        "after a norm": lambda x, norm, weight, bias: linear(x, weight, bias, norm_weight_H=norm, eps=EPS, **options),
        "after SwiGLU": lambda x, norm, weight, bias: linear(x, weight[:, : IN // 2], bias, **gated),
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


# The first row, the number of rows and the rank of each adapter.
ADAPTERS = {
    "one of all rows": [(0, OUT, 4)],
    "one of some rows": [(3, 5, 1)],
    "three of a fused layer": [(0, 4, 3), (4, 2, 1), (6, 4, 5)],
    "two, not in the order of the rows, with a gap": [(7, 3, 2), (0, 5, 2)],
}
IN_FP32, IN_BF16 = (torch.float32, 1e-6), (torch.bfloat16, 0.01)


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize(("dtype", "limit"), [IN_FP32, IN_BF16])
@pytest.mark.parametrize("ranges", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("name", EXACT)
def test_adapters_add_their_product_and_have_the_gradients_of_fp64(
    name: str, ranges: list[tuple[int, int, int]], dtype: torch.dtype, limit: float, is_frozen: bool
) -> None:
    theirs = _adapters(name, ranges, torch.float64)

    def with_deltas(x: Tensor, norm: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return EXACT[name](x, norm, weight + _delta(theirs), bias)

    exact_output, exact = _run_adapted(with_deltas, theirs, torch.float64, torch.float64, is_frozen)
    assert ("weight" in exact) != is_frozen
    found = []
    for recompute in (False, True):
        adapters = _adapters(name, ranges, torch.float32)
        layer = _native(recompute, adapters)[name]
        output, gradients = _run_adapted(layer, adapters, dtype, torch.float32, is_frozen)
        with torch.inference_mode():
            assert layer(*_arguments(dtype, torch.float32, has_bias=True).values()).equal(output)
        found.append([output, *gradients.values()])
        assert gradients.keys() == exact.keys()
        assert all(each.dtype == (dtype if key == "x" else torch.float32) for key, each in gradients.items())
        for key, each in exact.items():
            assert (gradients[key].double() - each).norm() < limit * each.norm(), key
        assert (output.double() - exact_output).norm() < limit * exact_output.norm()
    assert all(kept.equal(recomputed) for kept, recomputed in zip(*found, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", EXACT)
def test_a_frozen_linear_with_adapters_saves_its_input_once_and_casts_of_no_weight(name: str, recompute: bool) -> None:
    adapters = _adapters(name, ADAPTERS["three of a fused layer"], torch.float32)
    arguments = _arguments(torch.bfloat16, torch.float32, has_bias=True)
    stored = {x.data_ptr() for x in (arguments["weight"], *(x for _, _, *factors in adapters for x in factors))}
    arguments["x"].requires_grad_()
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        _native(recompute, adapters)[name](*arguments.values())
    of_tokens = [tuple(each.shape[1:]) for each in saved if len(each) == T and each.ndim == 2]
    input_size, sum_of_ranks = (IN // 2 if name == "after SwiGLU" else IN), 9
    again = [] if recompute or name == "linear" else [(input_size,)]
    assert of_tokens == [(IN,), *again, (sum_of_ranks,)]
    assert {each.data_ptr() for each in saved if len(each) != T and each.ndim == 2} == stored


def _adapters(name: str, ranges: list[tuple[int, int, int]], dtype: torch.dtype) -> list[LowRank]:
    """Random adapters with equal values in any type."""
    generator, size = torch.Generator().manual_seed(2), IN // 2 if name == "after SwiGLU" else IN

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    return [LowRank(row, 0.5 + row, random(rank, size), random(num_rows, rank)) for row, num_rows, rank in ranges]


def _delta(adapters: Sequence[LowRank]) -> Tensor:
    """The sum of scale x B @ A, in the shape of the weight."""
    total_OI = torch.zeros(OUT, IN, dtype=torch.float64)
    for row, scale, a, b in adapters:
        total_OI = total_OI + F.pad(scale * b @ a, (0, IN - a.shape[1], row, OUT - row - len(b)))
    return total_OI


def _run_adapted(
    layer: Layer, adapters: Sequence[LowRank], dtype: torch.dtype, master_dtype: torch.dtype, is_frozen: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradient of each argument and factor that has one."""
    leaves = _arguments(dtype, master_dtype, has_bias=True)
    for key, leaf in leaves.items():
        leaf.requires_grad_(key in ("x", "norm") or not is_frozen)
    output = layer(*leaves.values())
    output.backward(_output_gradient(output.dtype))
    factors = {f"{name} of {row}": each for row, _, a, b in adapters for name, each in (("A", a), ("B", b))}
    return output.detach(), {name: each.grad for name, each in (leaves | factors).items() if each.grad is not None}


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
