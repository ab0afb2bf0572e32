"""What a GPU computes at most: dense bf16, by the vendors' data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

_DENSE_BF16_TFLOPS: dict[str, float] = {
    r"GB[23]00": 2500.0,
    r"B[23]00": 2250.0,
    r"H[12]00 NVL": 835.5,
    r"H[18]00 PCIe": 756.0,
    r"(H100|H200|H800|GH200)": 989.4,
    r"H20": 148.0,
    r"A[18]00": 312.0,
    r"A30": 165.0,
    r"A40": 149.7,
    r"A10": 125.0,
    r"RTX A6000": 154.8,
    r"L40S": 362.05,
    r"L40": 181.05,
    r"L4": 121.0,
    r"RTX 6000 Ada": 364.2,
    r"RTX PRO 6000 Blackwell Workstation": 503.8,
    r"RTX 3090$": 71.0,
    r"RTX 4090$": 165.2,
    r"RTX 5090$": 209.5,
    r"MI300X": 1307.4,
    r"MI325X": 1307.4,
}
"""By a pattern in the device's name; the first that is found counts. TFLOP/s, fp32 accumulation.

The sheets' larger numbers are with sparsity, twice as high, and no training reaches them: 1,979 for an H100 is 989.4.
Of an H100 or H200, what is neither NVL nor PCIe is SXM. A laptop's RTX 4090 is another chip, hence the ends of lines.
"""


@dataclass(frozen=True, slots=True)
class Peak:
    """tflops: TFLOP/s of one GPU, which mfu is measured against; None if not known. source: whose it is, in words."""

    tflops: float | None
    source: str

    def __str__(self) -> str:
        if self.tflops is None:
            return f"peak unknown ({self.source}): no mfu; set logging.peak_tflops to the device's dense bf16 TFLOP/s"
        return f"peak {self.tflops:g} TFLOP/s ({self.source}); mfu = FLOPs the model needs / seconds / peak"


def find_peak(device: torch.device, peak_tflops: float | None) -> Peak:
    """peak_tflops: logging.peak_tflops, which goes before the table."""
    if peak_tflops is not None:
        return Peak(peak_tflops, "logging.peak_tflops")
    if device.type != "cuda":
        return Peak(None, device.type)
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(device_name: str) -> Peak:
    """By the name that torch.cuda.get_device_name gives."""
    for pattern, tflops in _DENSE_BF16_TFLOPS.items():
        # A slice of a GPU (MIG) has a slice of its peak.
        if " MIG " not in device_name and re.search(rf"\b{pattern}\b", device_name):
            return Peak(tflops, f"{device_name}, bf16 dense")
    return Peak(None, device_name)
