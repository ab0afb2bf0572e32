"""Triton kernels, each with an equivalent torch implementation in the same file; importable without Triton."""
