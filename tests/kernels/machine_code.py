"""Triton kernels compiled to sm_90 machine code where there is no GPU, and what that code does to memory.

`*bf16:16` states what Triton's launcher finds out by itself: that a pointer or an integer is divisible by 16. An
integer that is 1 at run time is a constant to the launcher. All kernels of a call are compiled in one process, without
TRITON_INTERPRET, which is read when a kernel is defined.
"""

import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

Constant = int | float | bool | str | None


@dataclass(frozen=True, slots=True)
class Kernel:
    """name: `module:function`. signature: argument to Triton type, `*bf16:16`, `i32`; constants: the constexprs."""

    name: str
    signature: Mapping[str, str]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class MachineCode:
    """ptx, sass: the text. resources: cuobjdump's line, in bytes (STACK, LOCAL, SHARED) and registers (REG)."""

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


def compile_for_sm90(*kernels: Kernel) -> list[MachineCode]:
    """The machine code of each kernel, in order. Raises: AssertionError with the compiler's message if one fails."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    wanted = json.dumps([asdict(kernel) for kernel in kernels])
    command = [sys.executable, str(Path(__file__))]
    done = subprocess.run(command, input=wanted, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [MachineCode(**code) for code in json.loads(done.stdout.splitlines()[-1])]


def _bits(opcode: str) -> int:
    sizes = {"128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
    return next((sizes[part] for part in opcode.split(".") if part in sizes), 32)


def _compile(kernel: Kernel) -> dict[str, object]:
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
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": kernel.num_warps, "num_stages": kernel.num_stages},
    )
    found = re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", _cuobjdump(compiled.asm["cubin"], "-res-usage"))
    resources = {name: int(size) for name, size in found}
    return {"ptx": compiled.asm["ptx"], "sass": _cuobjdump(compiled.asm["cubin"], "-sass"), "resources": resources}


def _cuobjdump(cubin: bytes, option: str) -> str:
    import tempfile

    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    print(json.dumps([_compile(Kernel(**kernel)) for kernel in json.load(sys.stdin)]))
