"""Ranks and devices. The only place that reads RANK, WORLD_SIZE and LOCAL_RANK, and that talks between ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sftron.train.watch import Watch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which process of the run this is, the device it computes on, and how it talks to the others.

    local_rank: among the processes of its node.
    mesh: over which parameters are sharded, "dp_replicate" x "dp_shard" or "dp_shard" alone; None for one process.
    watch: over the others; None for one process.
    timeout_s: how long it waits for the others.
    """

    dp_rank: int
    dp_world_size: int
    device: torch.device
    local_rank: int = 0
    mesh: DeviceMesh | None = None
    watch: Watch | None = None
    timeout_s: float = 600
    _lines: dist.ProcessGroup | None = None
    """What `gather` talks on; None is what everything else talks on."""

    @property
    def is_main(self) -> bool:
        """Whether this process prints, logs and writes."""
        return self.dp_rank == 0

    def at(self, phase: str) -> None:
        """What is done from now on, on all ranks: for those who find that this one does not come."""
        if self.watch:
            self.watch.at(phase)

    def blame(self, error: BaseException) -> str:
        """The failure, of whichever rank, that came first, where `error` ended this one; all others end with it."""
        return self.watch.blame(error) if self.watch else f"{type(error).__name__}: {error}"

    def gather(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The `facts` of every rank, in their order, on every rank. They travel as JSON, between CPUs."""
        if self.dp_world_size == 1:
            return [dict(facts)]
        with _waiting(self.watch):
            return self._gather(facts)

    def _gather(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        mine = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
        lengths = [int(length) for length in self._gather_alike(torch.tensor([len(mine)]))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(mine)] = mine
        texts = zip(self._gather_alike(padded), lengths, strict=True)
        return [json.loads(text[:length].numpy().tobytes()) for text, length in texts]

    def _gather_alike(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        everyone = [torch.empty_like(tensor) for _ in range(self.dp_world_size)]
        dist.all_gather(everyone, tensor, group=self._lines)
        return everyone

    def on_lines_of_their_own(self) -> Ranks:
        """The same ranks, whose `gather` may be called in a thread beside everything else; every rank has to ask."""
        if self.dp_world_size == 1:
            return self
        return replace(
            self, watch=None, _lines=dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))
        )

    def together(self, make: Callable[[], T]) -> T:
        """What `make` returns on this rank. Raises ValueError on all ranks where it does on one, so that none is left
        waiting for another; the message names the rank."""
        try:
            result, problem = make(), None
        except ValueError as error:
            result, problem = None, error
        problems = [facts["problem"] for facts in self.gather({"problem": None if problem is None else str(problem)})]
        if problem is not None:
            raise problem
        if any(problems):
            raise ValueError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text))
        return result  # pyright: ignore[reportReturnType]  # None only beside a problem

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        return self.any_of(flag=flag)["flag"]

    def any_of(self, **flags: bool) -> dict[str, bool]:
        """Which of the flags are set on some rank."""
        everyone = self.gather(flags)
        return {name: any(own[name] for own in everyone) for name in flags}

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, replaced by its sum over all ranks."""
        if self.dp_world_size > 1:
            with _waiting(self.watch):
                dist.all_reduce(tensor)
        return tensor


@contextmanager
def _waiting(watch: Watch | None) -> Iterator[None]:
    if watch:
        watch.waits(True)
    yield
    if watch:  # not after an error: who has not waited to the end still waits
        watch.waits(False)


def start_ranks(dp_replicate: int = 1, dp_shard: int | None = None, timeout_s: float = 600) -> Ranks:
    """Read what torchrun set and join the others, or take one process alone.

    dp_replicate, dp_shard: copies of the model, and ranks that share one; None takes all that are left.
    timeout_s: how long a rank waits for the others before it takes them for dead.

    Raises: ValueError where they do not multiply to the number of ranks.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    dp_shard = _shard_size(dp_replicate, dp_shard, world_size)
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if world_size == 1:
        return Ranks(0, 1, device)
    # Small facts travel between the CPUs, so that no GPU is waited for; gradients and weights between the GPUs.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # A loader's time-out is timeout_s, and should come first, as it is the cause.
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s + 4))
    watch = _start_watch(timeout_s)
    mesh = make_mesh(device.type, dp_replicate, dp_shard)
    return Ranks(dist.get_rank(), world_size, device, local_rank, mesh, watch, timeout_s)


_watches: list[Watch] = []


def _start_watch(timeout_s: float) -> Watch:
    """Over the store that torchrun has made for the process group; a restart of its does not see what was before."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))
    own = dist.PrefixStore(f"sftron/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    watch = Watch(own, dist.get_rank(), dist.get_world_size(), timeout_s)
    watch.start()
    _watches.append(watch)
    return watch


def make_mesh(device_type: str, dp_replicate: int, dp_shard: int) -> DeviceMesh:
    """Ranks that follow one another share a copy of the model: most often those of one node."""
    if dp_replicate == 1:
        return init_device_mesh(device_type, (dp_shard,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(device_type, (dp_replicate, dp_shard), mesh_dim_names=("dp_replicate", "dp_shard"))


def _shard_size(dp_replicate: int, dp_shard: int | None, world_size: int) -> int:
    if dp_shard is None and world_size % dp_replicate == 0:
        return world_size // dp_replicate
    if dp_shard is None or dp_replicate * dp_shard != world_size:
        product = f"{dp_replicate} x {dp_shard or 'auto'}"
        raise ValueError(
            f"parallelism.dp_replicate x dp_shard is {product}, but {world_size} ranks were started. Give numbers "
            "whose product is that, leave dp_shard on auto, or start other ranks (torchrun --nproc_per_node)"
        )
    return dp_shard


def end_ranks() -> None:
    """Leave the others in peace; without it torch warns at exit. Not after a failure: the watch ends that."""
    while _watches:
        _watches.pop().stop()
    if dist.is_initialized():
        dist.destroy_process_group()


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held so far: of the device, or of this process where the device is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource
    import sys

    in_kibibytes = sys.platform != "darwin"  # macOS gives bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if in_kibibytes else 1)
