"""Ranks and devices: the only place that reads RANK, WORLD_SIZE and LOCAL_RANK, and that talks between ranks.

When a rank dies, stalls or fails, the connections of the others break or time out (torch), and torchrun ends what is
left. What is added here is the reason: each rank keeps the phase that it is in, and the first failure, in a store.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sftron.config.errors import show

T = TypeVar("T")

_LATER_THAN_LOADER_S = 5.0
"""By so much the time-out of a collective follows the loader's, which is the cause of it."""
_TIME_TO_GIVE_UP_S = 1.0
"""In which the other ranks notice that one is missing."""
_STORE_PATIENCE_S = 5.0
_NO_ANSWER = "Another rank has died, or has not answered within parallelism.timeout_seconds"


class RankError(RuntimeError):
    """Another rank has failed, or did not answer; the message is the first failure."""


class Phases:
    """The phase that each rank is in, and the first failure of any rank, in the store that torchrun (or rank 0) keeps.

    A rank that is killed or hangs can report nothing; what it wrote here before is still there.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self.enter("the start")

    def enter(self, phase: str) -> None:
        self.own = phase
        self._write(f'in "{phase}"')

    def first_failure(self, error: BaseException) -> str:
        """Returns the failure that came first, which is `error` unless that only reports the end of another rank."""
        answers = [f"rank {self._rank}: {type(error).__name__}: {error}"]

        def ask() -> None:
            failure = answers[0]
            if _reports_another_rank(error) and not isinstance(error, RankError):
                self._write(f'waiting in "{self.own}"')
                time.sleep(_TIME_TO_GIVE_UP_S)
                failure += f". {_NO_ANSWER}: {self._describe()}"
            answers.append(self._store.compare_set("first failure", "", failure).decode())

        def try_to_ask() -> None:
            with suppress(RuntimeError):  # the store has ended with its process
                ask()

        thread = threading.Thread(target=try_to_ask, daemon=True)  # its machine may be gone, and never answer
        thread.start()
        thread.join(_STORE_PATIENCE_S)
        return answers[-1]

    def _write(self, state: str) -> None:
        with suppress(RuntimeError):  # the store has ended with its process; the next collective reports it
            self._store.set(f"rank {self._rank}", state)

    def _describe(self) -> str:
        ranks_in: dict[str, list[str]] = {}
        for rank in range(self._world_size):
            if self._store.check([f"rank {rank}"]):
                ranks_in.setdefault(self._store.get(f"rank {rank}").decode(), []).append(str(rank))
        return "; ".join(f"ranks {state}: {', '.join(ranks)}" for state, ranks in ranks_in.items())


def _reports_another_rank(error: BaseException) -> bool:
    """gloo's errors are plain RuntimeErrors, which only their words tell from others."""
    text = str(error)
    return type(error).__name__.startswith("Dist") or "gloo" in text or "NCCL" in text


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which process of the run this is, the device it computes on, and how it communicates with the others.

    local_rank: the number among the processes of its node.
    mesh: shards parameters, over "dp_replicate" x "dp_shard" or "dp_shard" alone; None for one process.
    phases: the phases of all ranks; None for one process.
    timeout_s: how long a rank waits for the others.
    """

    dp_rank: int
    dp_world_size: int
    device: torch.device
    local_rank: int = 0
    mesh: DeviceMesh | None = None
    phases: Phases | None = None
    timeout_s: float = 600
    _lines: dist.ProcessGroup | None = None
    """What `gather` talks on; None is what everything else talks on."""

    @property
    def is_main(self) -> bool:
        """Whether this process prints, logs and writes."""
        return self.dp_rank == 0

    def at(self, phase: str) -> None:
        """Notes what this rank does from now on, for the message of a failure."""
        if self.phases:
            self.phases.enter(phase)

    @contextmanager
    def failure_reported(self, report: Callable[[str], None], *, refusal: type[ValueError]) -> Iterator[None]:
        """Calls `report` with the failure that came first, on whichever rank.

        Raises RankError where that is another rank's. A `refusal` is raised by all ranks alike.
        """
        try:
            yield
        except refusal as error:
            report(f"{type(error).__name__}: {error}")
            raise
        except BaseException as error:
            if self.phases is None:
                report(f"{type(error).__name__}: {error}")
                raise
            # Communicators whose peers are gone may hang in Python's own end, which nothing else bounds.
            faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=sys.__stderr__ or 2)
            with suppress(OSError):  # a full disk
                show(f"rank {self.dp_rank} was in: {self.phases.own}", to=sys.__stderr__)
            first = self.phases.first_failure(error)
            report(first)
            if first in (str(error), f"rank {self.dp_rank}: {type(error).__name__}: {error}"):
                raise
            raise RankError(first) from error

    def gather(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the `facts` of every rank, in their order, on every rank. They travel as JSON, between CPUs.

        Raises RankError where another rank is gone, or does not answer in time.
        """
        if self.dp_world_size == 1:
            return [dict(facts)]
        try:
            return self._gather(facts)
        except RuntimeError as error:
            if self.phases is None:
                raise
            raise RankError(self.phases.first_failure(error)) from error

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
        lines = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))
        return replace(self, phases=None, _lines=lines)

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
            dist.all_reduce(tensor)
        return tensor


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
    faulthandler.enable(sys.__stderr__ or 2)  # NCCL's time-out aborts the process, and this shows where it was
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s + _LATER_THAN_LOADER_S))
    phases = Phases(_open_store(), dist.get_rank(), world_size)
    mesh = make_mesh(device.type, dp_replicate, dp_shard)
    return Ranks(dist.get_rank(), world_size, device, local_rank, mesh, phases, timeout_s)


def _open_store() -> dist.Store:
    """Connects to the store that torchrun has made for the process group; a restart does not see what was before."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))
    return dist.PrefixStore(f"sftron/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


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
    """Leaves the process group; without it torch warns at exit. Not for use after a failure: it may wait for others."""
    if dist.is_initialized():
        dist.destroy_process_group()


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held so far: of the device, or of this process where the device is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    in_kibibytes = sys.platform != "darwin"  # macOS gives bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if in_kibibytes else 1)
