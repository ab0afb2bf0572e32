"""The two implementations of an operation, "torch" and "triton": where they run, and how exactly."""

import torch

DEVICES = {"torch": "cpu", "triton": "cuda" if torch.cuda.is_available() else "cpu"}


def rounding_error(dtype: torch.dtype, implementation: str) -> float:
    """Largest relative error of a result rounded once: half a unit in the last place, and fp32's own error.

    Triton's interpreter cuts bf16 off instead of rounding it, up to a whole unit; machine code rounds to nearest.
    """
    unit = {torch.float32: 0.0, torch.bfloat16: 2**-7}[dtype]
    return 3e-6 + (unit if (implementation, DEVICES[implementation]) == ("triton", "cpu") else unit / 2)
