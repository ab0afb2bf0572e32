"""The operators of torch: schemas, fake kernels and compilation, on a CPU with interpreted kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from sftron.kernels import cross_entropy, operators, rms_norm, rope, swiglu
from sftron.kernels.operators import OPS
from tests.kernels.conftest import DEVICES

DEVICE = DEVICES["triton"]
T, H, V = 6, 16, 24
BF16 = torch.bfloat16
MODULES = (cross_entropy, rms_norm, rope, swiglu)  # each defines its operators when it is imported


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32, device=DEVICE).to(dtype)


def arguments(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    fp32, rows = torch.float32, torch.arange(T, device=DEVICE)
    table, weights = random(T, 4, dtype=fp32), random(T, dtype=fp32).abs()
    return {
        "normalize": ((random(T, H), random(H, dtype=fp32), 1e-5), {}),
        "normalize_backward": ((random(T, H), random(T, H), random(H), weights), {"with_output": True}),
        "swiglu": ((random(T, 2 * H),), {}),
        "swiglu_backward": ((random(T, H), random(T, 2 * H)), {"with_output": False}),
        "rotate_heads": ((random(T, 4 * 8), rows, table, 2, 1, False), {}),
        "rotate_heads_backward": ((random(T, 2, 8), random(T, 1, 8), random(T, 1, 8), rows, table, True), {}),
        "cross_entropy_gradient_": (
            (cross_entropy.empty_logits(T, V, like=weights).copy_(random(T, V)), rows, weights),
            {},
        ),
        "add_product_": ((random(V, H, dtype=fp32), random(T, V).T, random(T, H), 1), {}),
    }[name]


def add_product(total: Tensor, left: Tensor, right: Tensor, beta: int) -> None:
    """A CPU has no product of bf16 with the type of its sum."""
    total.addmm_(left.float(), right.float(), beta=beta)


@pytest.fixture
def _operators_on_this_device() -> Iterator[None]:
    """Registers the functions of a GPU's operators for the CPU."""
    with torch.library._scoped_library("sftron", "IMPL") as library:
        for name, function in OPS.items():
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"sftron::{name}", DEVICE.upper()):
                library.impl(name, add_product if name == "add_product_" else function, DEVICE.upper())
        yield


@pytest.mark.parametrize("name", OPS)
@pytest.mark.usefixtures("_operators_on_this_device")
def test_schema_and_fake_results_are_those_of_the_function(name: str) -> None:
    """torch's own checks; they change a schema's mutations, types, shapes, strides and devices into errors."""
    args, kwargs = arguments(name)
    tests = ["test_schema", "test_faketensor", "test_aot_dispatch_static"]
    torch.library.opcheck(getattr(torch.ops.sftron, name).default, args, kwargs, test_utils=tests)


def test_a_kernel_is_launched_on_the_gpu_of_its_first_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    current, registered = [0], dict[str, Callable[..., Any]]()

    @contextmanager
    def device_index(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    def function(x: Tensor) -> Tensor:
        seen.append(current[-1])
        return x

    library = SimpleNamespace(define=lambda *_, **__: None, impl=lambda _, impl, key: registered.update({key: impl}))
    monkeypatch.setattr(operators, "_LIBRARY", library)
    monkeypatch.setattr(torch.library, "register_fake", lambda *_, **__: None)
    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    monkeypatch.setitem(OPS, "normalize", OPS["normalize"])
    operators.operator("normalize", function, fake=function, devices=["CPU", "CUDA"])
    seen: list[int] = []
    registered["CUDA"](SimpleNamespace(device=torch.device("cuda", 1)))
    registered["CPU"](torch.zeros(1))
    assert (seen, current) == ([1, 0], [0])


# torch.compile itself makes an instance of each autograd function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_graph_holds_the_rotation_and_its_gradient_as_a_node_each(interleaved: bool) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    qkv, rows, table, *sizes = arguments("rotate_heads")[0]
    sizes[-1] = interleaved

    def gradient(function: Any) -> Tensor:
        leaf = qkv.clone().requires_grad_()
        heads = function(leaf, rows, table, *sizes)
        return torch.autograd.grad(sum((x.float() ** 2).sum() for x in heads), leaf)[0]

    compiled = torch.compile(rope.rotate_heads, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    assert gradient(compiled).equal(gradient(rope.rotate_heads))
    nodes = [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    forward, backward = torch.ops.sftron.rotate_heads.default, torch.ops.sftron.rotate_heads_backward.default
    assert (nodes.count(forward), nodes.count(backward)) == (1, 1)
