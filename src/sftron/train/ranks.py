"""Ranks and devices: torchrun's environment, the device mesh, and small collectives between ranks.

When a rank dies, stalls or fails, the connections of the other ranks break or time out (torch), and torchrun ends the
remaining processes. This module adds the reason: a shared store keeps the phase of each rank and the first failure.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
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

from sftron.data.types import WHOLE_ROW, ContextRank
from sftron.errors import show
from sftron.kernels.device import collective_backends, default_device, expand_segments, gpu_functions, is_gpu, num_gpus
from sftron.visible_text import counted

T = TypeVar("T")

_LATER_THAN_LOADER_S = 5.0
"""How much longer the time-out of a collective is than the loader's, whose time-out may be the cause of the wait."""
_TIME_TO_GIVE_UP_S = 1.0
"""The time that other ranks get to notice that a rank is missing."""
_STORE_PATIENCE_S = 5.0
_NO_CONNECTION = (
    "The ranks could not connect to each other. If the host's name stands for an address that the other nodes do not "
    "reach, such as 127.0.1.1, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network interface between the "
    "nodes (`ip address` lists them) on each node"
)
_NO_ANSWER = "Another rank has died, or has not answered within parallelism.timeout_seconds"


class RankError(RuntimeError):
    """Another rank has failed or did not answer. The message is the first failure."""


class Phases:
    """The current phase of each rank and the first failure of any rank, in the store of torchrun (or rank 0).

    A rank that is killed or hangs cannot report anything, but its last entry in the store remains.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self.enter("the start")

    def enter(self, phase: str) -> None:
        self.own = phase
        self._write(f'in "{phase}"')

    def first_failure(self, error: BaseException) -> str:
        """Returns the first failure of any rank.

        It is `error`, unless another rank failed earlier or `error` only reports the loss of another rank.
        """
        answers = [f"rank {self._rank}: {type(error).__name__}: {error}"]

        def compare() -> None:
            failure = answers[0]
            with suppress(RuntimeError):  # the process of the store has ended
                if _reports_another_rank(error):
                    self._write(f'waiting in "{self.own}"')
                    time.sleep(_TIME_TO_GIVE_UP_S)
                    failure += f". {_NO_ANSWER}: {self._describe()}"
                answers.append(self._store.compare_set("first failure", "", failure).decode())

        # In a thread, because the store never answers if its machine is down.
        thread = threading.Thread(target=compare, daemon=True)
        thread.start()
        thread.join(_STORE_PATIENCE_S)
        return answers[-1]

    def _write(self, state: str) -> None:
        with suppress(RuntimeError):  # the process of the store has ended; the next collective reports it
            self._store.set(f"rank {self._rank}", state)

    def _describe(self) -> str:
        ranks_in: dict[str, list[str]] = {}
        for rank in range(self._world_size):
            if self._store.check([f"rank {rank}"]):
                ranks_in.setdefault(self._store.get(f"rank {rank}").decode(), []).append(str(rank))
        return "; ".join(f"ranks {state}: {', '.join(ranks)}" for state, ranks in ranks_in.items())


def _reports_another_rank(error: BaseException) -> bool:
    """Returns whether a collective failed because of another rank; gloo's errors can only be known by their text."""
    is_of_collective = type(error).__name__.startswith("Dist") or "gloo" in str(error) or "NCCL" in str(error)
    return is_of_collective and not isinstance(error, RankError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The sizes of the dimensions of parallelism, in the order of the ranks: consecutive ones, most often those of one
    node, differ in the last dimension. Ranks that differ in another dimension than `context` compute different packs.

        replicate 1, shard 2, context 2    rank  0 1 2 3    packs  a a b b    part of a pack  0 1 0 1
    """

    replicate: int = 1
    """The number of copies of the model."""
    shard: int = 1
    """The number of ranks with different packs that share a copy."""
    context: int = 1
    """The number of ranks that share each pack."""

    @property
    def num_shards(self) -> int:
        """The number of ranks among which a copy is divided. Those that share a pack divide it too, because each has a
        part of every gradient."""
        return self.shard * self.context

    @property
    def size(self) -> int:
        return self.replicate * self.num_shards

    def mesh(self, device_type: str) -> DeviceMesh:
        """Returns the mesh of the parameters: `shard` with all ranks of a copy, and `replicate` if there are copies."""
        sizes = {"replicate": self.replicate, "shard": self.num_shards}
        if self.replicate == 1:
            del sizes["replicate"]
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def context_group(self, timeout: timedelta) -> dist.ProcessGroup | None:
        """Returns the process group of the ranks that share this rank's packs; None if it shares them with no other.

        This is a collective: every rank has to call it.
        """
        if self.context == 1:
            return None
        group, _ = dist.new_subgroups(self.context, timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        return group


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's ranks, its device, and its collectives with the other ranks; by default, of a single process.

    Three things are kept apart. `rank` is the number of a process in the run. `dp_rank` is its number among the
    processes that compute different packs, which lanes and evaluation use. `context` is its place among those that
    share each pack. `dimensions` are the sizes of the layout.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """The number of this process among those of its node."""
    dp_rank: int = 0
    """The number of this process among those that compute different packs."""
    dp_world_size: int = 1
    context: ContextRank = WHOLE_ROW
    context_group: dist.ProcessGroup | None = None
    """The ranks that share each pack; None if this rank shares them with no other."""
    dimensions: Dimensions = Dimensions()
    mesh: DeviceMesh | None = None
    """The device mesh by which parameters are sharded; None for one process."""
    phases: Phases | None = None
    timeout_s: float = 600
    """The time that a rank waits for the others, in seconds."""
    group: dist.ProcessGroup | None = None
    """The process group of `gather`; None for that of the run."""

    @property
    def is_planned(self) -> bool:
        """Whether this process stands for the first of several ranks, none of which exists; see `start_ranks`."""
        return self.world_size < self.dimensions.size

    @property
    def is_main(self) -> bool:
        """Whether this process prints, logs and writes."""
        return self.rank == 0

    def at(self, phase: str) -> None:
        """Records the phase that this rank enters, for failure messages."""
        if self.phases:
            self.phases.enter(phase)

    @contextmanager
    def failure_reported(self, report: Callable[[str], None], *, refusal: type[ValueError]) -> Iterator[None]:
        """Calls `report` with the first failure of any rank, if the body of the context raises.

        Raises RankError if the first failure was on another rank; otherwise the exception of this rank propagates. An
        exception of type `refusal` is raised by all ranks alike, so it is reported as it is.
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
            # Communicators whose peers are gone may hang during the shutdown of Python, which has no other time limit.
            faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=sys.__stderr__ or 2)
            with suppress(OSError):  # a full disk
                show(f"rank {self.rank} was in: {self.phases.own}", to=sys.__stderr__)
            first = self.phases.first_failure(error)
            report(first)
            if first in (str(error), f"rank {self.rank}: {type(error).__name__}: {error}"):
                raise
            raise RankError(first) from error

    # -- collectives on JSON values, between CPUs --------------------------------------------------------------------

    def gather(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the `facts` of every rank, in their order; a collective.

        Raises RankError if another rank has ended or does not answer in time.
        """
        if self.world_size == 1:
            return [dict(facts)]

        def gather_alike(tensor: torch.Tensor) -> list[torch.Tensor]:
            gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
            dist.all_gather(gathered, tensor, group=self.group)
            return gathered

        # As JSON: dist.all_gather_object would unpickle what it receives.
        own = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
        try:
            lengths = [int(length) for length in gather_alike(torch.tensor([len(own)]))]
            texts = gather_alike(torch.nn.functional.pad(own, (0, max(lengths) - len(own))))
        except RuntimeError as error:
            if self.phases is None:
                raise
            raise RankError(self.phases.first_failure(error)) from error
        return [json.loads(text[:length].numpy().tobytes()) for text, length in zip(texts, lengths, strict=True)]

    def all_or_raise(self, make: Callable[[], T]) -> T:
        """Calls `make` on every rank and returns its result on this rank; a collective.

        If `make` raises ValueError on any rank, all ranks raise ValueError, so that no rank waits for another. The
        message names the rank.
        """
        try:
            result, problem = make(), None
        except ValueError as error:
            result, problem = None, error
        everyone = self.gather({"problem": None if problem is None else str(problem)})
        if problem is not None:
            raise problem
        if problems := [f"rank {n}: {facts['problem']}" for n, facts in enumerate(everyone) if facts["problem"]]:
            raise ValueError("; ".join(problems))
        return result  # pyright: ignore[reportReturnType]  # None only with a problem

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank; a collective."""
        return self.any_of(flag=flag)["flag"]

    def any_of(self, **flags: bool) -> dict[str, bool]:
        """Returns for each flag whether it is set on any rank; a collective."""
        everyone = self.gather(flags)
        return {name: any(own[name] for own in everyone) for name in flags}

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums the tensor over all ranks, in place, and returns it; a collective.

        Of a pack that ranks share, each has to give a part of the sum, or all but one have to give 0.
        """
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def with_own_group(self) -> Ranks:
        """Returns the same ranks with a process group of their own, so that a thread can call `gather` concurrently.

        This is a collective: every rank has to call it.
        """
        if self.world_size == 1:
            return self
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))
        return replace(self, phases=None, group=group)


def start_ranks(
    dp_replicate: int = 1, dp_shard: int | None = None, timeout_s: float = 600, context: int = 1, *, plans: bool = False
) -> Ranks:
    """Joins the process group of a run under torchrun; without torchrun, returns a single process.

    Args:
        dp_replicate: The number of copies of the model.
        dp_shard: The number of ranks with different packs that share a copy; None divides all ranks among the copies.
        timeout_s: How long a rank waits for the others, in seconds, before it considers them dead.
        context: The number of ranks that share each pack.
        plans: Whether a process without torchrun may stand for the first of several ranks, to predict what they do.

    Raises:
        ValueError: On all ranks: dp_replicate x dp_shard x context is not the number of ranks, or a node has fewer GPUs
            than ranks.
    """
    world_size, local_rank = _number_of("WORLD_SIZE", 1), _number_of("LOCAL_RANK", 0)
    for name in ("RANK", "MASTER_PORT", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        _number_of(name, 0)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if world_size > 1 and missing:
        raise ValueError(
            f"WORLD_SIZE is {world_size} in the environment (a scheduler may have set it), but torchrun "
            f"did not set {', '.join(missing)}: unset WORLD_SIZE for one process, or start all ranks (torchrun "
            f"--nproc_per_node={world_size} -m sftron train ...)"
        )
    num_shards = dp_shard or max(1, world_size // (dp_replicate * context))
    dimensions = Dimensions(replicate=dp_replicate, shard=num_shards, context=context)
    plans = plans and "WORLD_SIZE" not in os.environ
    if dimensions.size != world_size and not plans:
        raise ValueError(
            f"parallelism: dp_replicate {dp_replicate} x dp_shard {dp_shard or 'auto'} x context {context} needs "
            f"{dimensions.size} ranks, but {world_size} were started; set dp_shard to auto, make the product "
            f"{world_size}, or start {dimensions.size} ranks (torchrun --nproc_per_node={dimensions.size})"
        )
    if world_size == 1:
        device = _take_device(local_rank)
        return Ranks(device=device, dp_world_size=dimensions.size // context, dimensions=dimensions)
    faulthandler.enable(sys.__stderr__ or 2)  # NCCL's time-out aborts the process; this prints the stack
    timeout = timedelta(seconds=timeout_s + _LATER_THAN_LOADER_S)
    try:
        dist.init_process_group(collective_backends(default_device()), timeout=timeout)
    except RuntimeError as error:
        error.add_note(_NO_CONNECTION)
        raise
    rank = dist.get_rank()
    everyone = Ranks(device=torch.device("cpu"), rank=rank, world_size=world_size)
    device = everyone.all_or_raise(lambda: _take_device(local_rank))
    return Ranks(
        device=device,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        dp_rank=rank // context,
        dp_world_size=world_size // context,
        context=ContextRank(rank % context, context),
        context_group=dimensions.context_group(timeout),
        dimensions=dimensions,
        mesh=dimensions.mesh(device.type),
        phases=Phases(_open_store(), rank, world_size),
        timeout_s=timeout_s,
    )


def _number_of(name: str, default: int) -> int:
    """Returns a number that torchrun sets in the environment. Raises ValueError."""
    value = os.environ.get(name, str(default))
    if not (value.isascii() and value.isdigit() and len(value) < 10) or (name == "WORLD_SIZE" and int(value) == 0):
        raise ValueError(f"{name} is {value[:60]!r} in the environment, and torchrun sets a number: unset {name}")
    return int(value)


def _take_device(local_rank: int) -> torch.device:
    """Returns the device of the rank with this number in its node, and makes it the current one.

    Raises ValueError if the node has fewer GPUs than ranks.
    """
    device = default_device()
    if not is_gpu(device):
        return device
    num_ranks, num_seen = _number_of("LOCAL_WORLD_SIZE", local_rank + 1), num_gpus()
    # torchrun lets all ranks of a node see the same GPUs; srun --gpus-per-task=1 lets each see its own, as number 0.
    has_own = num_seen == 1 and "TORCHELASTIC_RUN_ID" not in os.environ
    if num_ranks > num_seen and not has_own:
        raise ValueError(
            f"{num_ranks} ranks were started on {socket.gethostname()}, but they see {counted(num_seen, 'GPUs')} "
            f"there; start at most {num_seen} (torchrun --nproc_per_node={num_seen}), make more GPUs visible "
            '(CUDA_VISIBLE_DEVICES), or train on the CPU (CUDA_VISIBLE_DEVICES="")'
        )
    device = torch.device(device.type, 0 if has_own else local_rank)
    expand_segments()
    gpu_functions(device).set_device(device)
    return device


def _open_store() -> dist.Store:
    """Connects to the store that torchrun made for the process group; after a restart, it starts empty."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))
    return dist.PrefixStore(f"sftron/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def end_ranks() -> None:
    """Destroys the process group, as torch wants it; not to be called after a failure, because it may wait."""
    if dist.is_initialized():
        dist.destroy_process_group()
