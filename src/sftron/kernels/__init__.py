"""Triton kernels, each with an equivalent torch implementation in the same file; importable without Triton."""

import os

# Triton 3.9 warns at the first kernel that 3.10 will no longer fuse products and sums unless this says so. That would
# change bits and speed. It is read when a kernel is compiled.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
