"""Ranks and devices. The only place that reads RANK, WORLD_SIZE and LOCAL_RANK."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which process of the run this is, and the device it computes on."""

    dp_rank: int
    dp_world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process prints, logs and writes."""
        return self.dp_rank == 0


def start_ranks() -> Ranks:
    """Read what torchrun set, or take one process alone. Raises ValueError for more than one rank."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != 1:
        raise ValueError(
            f"{world_size} ranks were started; training over several is not implemented yet. "
            "Use torchrun --nproc_per_node=1"
        )
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    return Ranks(dp_rank=int(os.environ.get("RANK", "0")), dp_world_size=world_size, device=device)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held so far: of the device, or of this process where the device is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource
    import sys

    in_kibibytes = sys.platform != "darwin"  # macOS gives bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if in_kibibytes else 1)
