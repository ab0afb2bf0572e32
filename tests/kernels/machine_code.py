"""Triton kernels compiled to machine code where there is no GPU, and what that code does to memory.

`*bf16:16` states what Triton's launcher finds out by itself: that a pointer or an integer is divisible by 16. An
integer that is 1 at run time is a constant to the launcher. All kernels of a call are compiled in one process, without
TRITON_INTERPRET, which is read when a kernel is defined.
"""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sftron.kernels import cross_entropy, rms_norm, rope, swiglu

Constant = int | float | bool | str | None


@dataclass(frozen=True, slots=True)
class Kernel:
    """name: `module:function`. signature: argument to Triton type, `*bf16:16`, `i32`; constants: the constexprs."""

    name: str
    signature: Mapping[str, str]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    num_warps: int = 4


@dataclass(frozen=True, slots=True)
class MachineCode:
    """ptx, sass: the text. resources: cuobjdump's line, in bytes (STACK, LOCAL) and registers (REG), and the bytes of
    shared memory that the launcher asks for (SHARED)."""

    ptx: str
    sass: str
    resources: Mapping[str, int]

    @property
    def global_loads(self) -> Counter[int]:
        """Bits of an access to number of load instructions, `cp.async` included; TMA is not among them."""
        return Counter(_bits(op) for op in self.opcodes if op.split(".")[0] in ("LDG", "LDGSTS"))

    @property
    def global_stores(self) -> Counter[int]:
        return Counter(_bits(op) for op in self.opcodes if op.split(".")[0] == "STG")

    @property
    def spills(self) -> list[str]:
        """Instructions that read or write local memory: registers that did not fit, or arrays indexed at run time."""
        return [op for op in self.opcodes if op.split(".")[0] in ("LDL", "STL")]

    @property
    def local_bytes(self) -> int:
        return self.resources["STACK"] + self.resources["LOCAL"]

    @property
    def opcodes(self) -> list[str]:
        return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", self.sass)


@contextmanager
def kernels_on_meta() -> Iterator[pytest.MonkeyPatch]:
    """Kernels take tensors of the meta device, and the operators' fake functions compute on them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (cross_entropy, rms_norm, rope, swiglu):
            for name in {"is_gpu", "runs_kernels"} & vars(module).keys():
                patch.setattr(module, name, lambda _: True)
        yield patch


def launches(function: Callable[..., object], *arguments: object, **options: object) -> list[Kernel]:
    """The kernels that a function of kernels/*.py launches, as Triton's launcher would specialize them.

    Tensors are on the meta device and begin at a multiple of 16 bytes, as torch allocates them.
    """
    module, found = inspect.getmodule(function), []
    assert module is not None
    with kernels_on_meta() as patch:
        for name, each in vars(module).copy().items():
            if name.endswith("_kernel"):
                patch.setattr(module, name, _Recorder(f"{module.__name__}:{name}", each.arg_names, found))
        function(*arguments, **options)
    return found


@dataclass(frozen=True, slots=True)
class _Recorder:
    """In the place of a kernel: kernel[grid](*arguments, **options)."""

    name: str
    arg_names: Sequence[str]
    found: list[Kernel]

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: object, num_warps: int = 4, **options: object) -> None:
        given = dict(zip(self.arg_names, arguments, strict=False)) | options
        types = {name: _type(value) for name, value in given.items() if not name.isupper()}
        signature = {name: kind for name, kind in types.items() if kind is not None}
        constants = {name: value for name, value in given.items() if name not in signature}
        self.found.append(Kernel(self.name, signature, constants, num_warps))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _type(value: object) -> str | None:
    """The type in Triton's notation; None if the launcher makes the value a constant."""
    if isinstance(value, Tensor):
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32"}
        return f"*{(names | {torch.int64: 'i64'})[value.dtype]}:16"
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int)
    assert abs(value) < 2**31
    return None if value == 1 else "i32" if value % 16 else "i32:16"


def compile_for(architecture: int, *kernels: Kernel, with_sass: bool = True) -> list[MachineCode]:
    """The machine code of each kernel, in order, for 80, 89, 90, 100 or 120, a compute capability times 10.

    Without its text (`sass`), which takes twice as long, resources are known all the same.

    Raises: AssertionError with the compiler's message if one fails.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    wanted = json.dumps([asdict(kernel) for kernel in kernels])
    # Users do not see this warning of Triton 3.9 either (kernels/__init__.py).
    command = [
        sys.executable,
        "-W",
        "error:TRITON_DEFAULT_FP_FUSION",
        str(Path(__file__)),
        str(architecture),
        "sass" if with_sass else "",
    ]
    done = subprocess.run(command, input=wanted, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [MachineCode(**code) for code in json.loads(done.stdout.splitlines()[-1])]


def _bits(opcode: str) -> int:
    sizes = {"128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
    return next((sizes[part] for part in opcode.split(".") if part in sizes), 32)


def _compile(kernel: Kernel, architecture: int, *, with_sass: bool) -> dict[str, object]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = kernel.name.partition(":")
    function = getattr(importlib.import_module(module), name)
    while not isinstance(function, triton.JITFunction):
        function = function.fn  # under @triton.autotune or @triton.heuristics
    assert sorted(function.arg_names) == sorted([*kernel.signature, *kernel.constants]), function.arg_names
    types = {argument: kernel.signature.get(argument, "constexpr") for argument in function.arg_names}
    divisible = [(i,) for i, argument in enumerate(types) if types[argument].endswith(":16")]
    compiled = triton.compile(
        ASTSource(
            function,
            {argument: kind.removesuffix(":16") for argument, kind in types.items()},
            dict(kernel.constants),
            {index: [["tt.divisibility", 16]] for index in divisible},
        ),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": kernel.num_warps},
    )
    cubin = compiled.asm["cubin"]
    found = re.findall(r"(REG|STACK|LOCAL):(\d+)", _cuobjdump(cubin, "-res-usage"))
    resources = {name: int(size) for name, size in found} | {"SHARED": compiled.metadata.shared}
    return {"ptx": compiled.asm["ptx"], "sass": _cuobjdump(cubin, "-sass") if with_sass else "", "resources": resources}


def _cuobjdump(cubin: bytes, option: str) -> str:
    import tempfile

    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    _, architecture, sass = sys.argv
    kernels = [Kernel(**kernel) for kernel in json.load(sys.stdin)]
    print(json.dumps([_compile(kernel, int(architecture), with_sass=bool(sass)) for kernel in kernels]))
