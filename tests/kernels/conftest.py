"""Without a GPU, Triton's kernels are interpreted: its own switch, read when a kernel is defined."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
