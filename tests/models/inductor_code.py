"""Inductor's code for CUDA where there is no GPU: the graphs of a model's blocks, with kernels as sm_90 machine code.

The tensors are fake ones of a CUDA device, with shapes and without data, so nothing is computed. torch needs a CUDA
build, whose parts that ask a driver are replaced. The model is compiled in a process of its own, without
TRITON_INTERPRET, which is read when a kernel is defined.
"""

from __future__ import annotations

import heapq
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

T = 1024


@dataclass(frozen=True, slots=True)
class Compiled:
    """graphs: the Python code that runs each graph; kernels: name to bytes of machine code; without_gradient: the
    parameters of blocks that have none."""

    graphs: list[str]
    kernels: dict[str, int]
    without_gradient: list[str]


def compile_for_cuda(config: Mapping[str, Any], activation_checkpointing: str, cache: Path) -> Compiled:
    """Compiles the blocks of a model with this config.json in bf16, forward and backward.

    Args:
        cache: An empty folder for what inductor and Triton write.

    Raises:
        AssertionError: The compiler failed; its message.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    wanted = json.dumps([dict(config), activation_checkpointing])
    command = [sys.executable, str(Path(__file__))]
    done = subprocess.run(command, input=wanted, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Compiled(**json.loads(done.stdout.splitlines()[-1]))


def _compile(config: Mapping[str, Any], activation_checkpointing: str) -> Compiled:
    import torch
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    from sftron.models.architecture import LlamaConfig
    from sftron.models.llama import LlamaForSFT

    graphs: list[str] = []
    kernels: dict[str, int] = {}

    def compile_graph(graph: Any, inputs: Sequence[Any], **options: Any) -> Callable[[list[Any]], Any]:
        compile_fx_inner(graph, inputs, **options)

        def run(arguments: list[Any]) -> Any:
            return graph(*arguments)

        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return run

    with ExitStack() as stack:
        for replaced in _without_a_driver(kernels):
            stack.enter_context(replaced)
        stack.enter_context(mock.patch.object(GraphLowering, "save_output_code", graphs.append))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        with torch.device("cuda"):
            options: dict[str, Any] = {"activation_checkpointing": activation_checkpointing, "num_positions": T}
            model = LlamaForSFT(LlamaConfig.from_hf(dict(config)), compute_dtype=torch.bfloat16, **options)
            ids = torch.zeros(T, dtype=torch.int64)
        backend = partial(compile_fx, inner_compile=compile_graph)
        for block in model.model.layers:
            block.compile(backend=backend)
        hidden = model.attend_with(map(_stand_in, model.model.layers), ids, ids, torch.bfloat16)
        named = {n: p for n, p in model.model.layers.named_parameters() if p.requires_grad}
        gradients = gradients_in_python([hidden.float().sum()], [*named.values()])
    missing = [name for name, gradient in zip(named, gradients, strict=True) if gradient is None]
    return Compiled(graphs, kernels, missing)


def _stand_in(block: Any) -> Callable[..., Any]:
    """Returns what stands for the part of a block that is not compiled, by which tokens read each other. It is not
    that part, but every gradient depends on every input."""
    from sftron.models.delta_layer import DeltaBlock
    from sftron.models.short_convolution import ShortConvolutionBlock
    from tests.models.memory import attend

    def read(sizes: Any, qkv_TW: Any, weight_WJ: Any, g_TN: Any, beta_TN: Any) -> Any:
        v_TNE = qkv_TW.split(sizes.widths, dim=1)[2].unflatten(1, (sizes.num_value_heads, -1))
        return (v_TNE * (g_TN * beta_TN)[..., None] * weight_WJ.sum()).to(qkv_TW.dtype)

    if isinstance(block, ShortConvolutionBlock):
        return lambda x_TW, weight_WJ: x_TW * weight_WJ.sum(dim=1).to(x_TW.dtype)
    return read if isinstance(block, DeltaBlock) else attend


def _without_a_driver(kernels: dict[str, int]) -> list[Any]:
    """Returns what replaces the parts of torch and Triton that ask a driver; kernels are compiled and not loaded."""
    import torch
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import async_compile
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    sizes = {"warp_size": 32, "max_threads_per_block": 1024, "max_threads_per_multi_processor": 2048}
    memory = {"total_memory": 80 << 30, "L2_cache_size": 50 << 20, "shared_memory_per_block_optin": 227 << 10}
    named: dict[str, Any] = {"name": "NVIDIA H100 80GB HBM3", "gcnArchName": ""}
    named |= {"major": 9, "minor": 0, "multi_processor_count": 132, "regs_per_multiprocessor": 65536}
    properties = SimpleNamespace(**named, **sizes, **memory)

    def compile_kernel(_: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        assert device_str == "cuda", f"{name} is a kernel for {device_str}"
        tuner = async_compile._load_triton_kernel_from_source(name, source)
        for each in tuner.configs:
            tuner._precompile_config(each)
        return tuner

    compile_code = triton.compile

    def compile_to_machine_code(*arguments: Any, **options: Any) -> Any:
        compiled = compile_code(*arguments, **options)
        kernels[compiled.metadata.name] = len(compiled.asm["cubin"])
        return compiled

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    answers: dict[str, Any] = {"is_available": True, "is_bf16_supported": True, "device_count": 1, "current_device": 0}
    answers |= {"get_device_properties": properties, "get_device_capability": (9, 0)}

    def answer(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    of_torch = {name: answer(value) for name, value in answers.items() if name.startswith(("device", "current", "get"))}
    of_inductor = {name: staticmethod(answer(v)) for name, v in answers.items() if hasattr(CudaInterface, name)}
    return [
        mock.patch.object(torch.autograd, "grad", gradients_in_python),
        mock.patch.object(torch._C._autograd, "_get_current_graph_task_keep_graph", return_value=False),
        mock.patch.multiple(torch.cuda, **of_torch),
        mock.patch.multiple(CudaInterface, **of_inductor),
        mock.patch.object(async_compile.AsyncCompile, "triton", compile_kernel),
        mock.patch.object(triton, "compile", compile_to_machine_code),
        mock.patch.object(triton_helpers, "set_driver_to_gpu"),
        mock.patch.object(triton.runtime.driver, "_active", driver),
        # Folding of constants computes with them, and padding of products measures on the device.
        torch._inductor.config.patch(joint_graph_constant_folding=False, shape_padding=False),
        torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False),
    ]


def gradients_in_python(
    outputs: Sequence[Any], inputs: Sequence[Any], grad_outputs: Any = None, **_: Any
) -> tuple[Any, ...]:
    """torch.autograd.grad in Python, in the order of the engine, which asks a driver about each GPU. An input that no
    output depends on has None."""
    import torch
    from torch.autograd.function import BackwardCFunction
    from torch.autograd.graph import get_gradient_edge

    wanted = [get_gradient_edge(x)[:2] for x in inputs]
    leads: dict[Any, bool] = {}

    def leads_to_inputs(node: Any) -> bool:
        if node not in leads:
            leads[node] = any(edge in wanted or (edge[0] and leads_to_inputs(edge[0])) for edge in node.next_functions)
        return leads[node]

    found: dict[Any, dict[int, Any]] = {}
    numbers, waiting = count(), []

    def give(node: Any, number: int, gradient: Any) -> None:
        if node is None or gradient is None:
            return
        of_input = node._input_metadata[number]  # the engine undoes broadcasts and casts
        gradient = gradient.sum_to_size(of_input.shape).to(of_input.dtype)
        if node not in found:
            found[node] = {}
            heapq.heappush(waiting, (-node._sequence_nr(), next(numbers), node))
        found[node][number] = found[node][number] + gradient if number in found[node] else gradient

    with torch.no_grad():
        for x, gradient in zip(outputs, grad_outputs or repeat(None), strict=False):
            give(*get_gradient_edge(x)[:2], torch.ones_like(x) if gradient is None else gradient)
        while waiting:
            node = heapq.heappop(waiting)[-1]
            if not leads_to_inputs(node):
                continue
            if isinstance(node, BackwardCFunction):
                given = [
                    found[node][i] if i in found[node] else torch.zeros(x.shape, dtype=x.dtype, device=x.device)
                    for i, x in enumerate(node._input_metadata)
                ]
                results = _as_tuple(node.apply(*given))
                # The arguments that are no tensors have no edges.
                results = [x for x, is_needed in zip(results, node.needs_input_grad, strict=False) if is_needed]
                edges = [edge for edge in node.next_functions if edge[0] is not None]
            else:
                results = _as_tuple(node(*(found[node].get(i) for i in range(len(node._input_metadata)))))
                edges = node.next_functions
            for edge, gradient in zip(edges, results, strict=True):
                give(*edge, gradient)
    return tuple(found.get(node, {}).get(number) for node, number in wanted)


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


if __name__ == "__main__":
    print(json.dumps(asdict(_compile(*json.load(sys.stdin)))))
