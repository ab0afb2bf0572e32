"""Frozen matrices that stay in files: two buffers hold those of two blocks, and a thread fills the one not in use.

    forward     block 0 1 2 3 4 5        fetches   0 1 2 3 4 5
    backward    block 5 4 3 2 1 0        fetches         3 2 1 0      5 and 4 are still there
    forward     block 0 1 2 3 4 5        fetches       2 3 4 5        0 and 1 are still there

Between its uses, a streamed parameter is one byte pattern in all elements, NaN in every type, so what reads a block
that was not fetched shows. No streamed matrix is kept for the backward pass: it saves the matrix's place, and fetches
the block again. Of embeddings, only the rows of the tokens are read. The head stays in memory: products with a part of
its rows would sum its gradients in another order, to other bits.

On a GPU the thread fills one pinned buffer of the host, from which a stream of its own copies the block at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sftron.kernels.device import gpu_functions, is_gpu, pinned_bytes
from sftron.models.layers import saved_by
from sftron.models.quantization import is_matrix

_ALIGNMENT = 64
"""The bytes at whose multiples matrices begin in a buffer."""
_ROWS_AT_A_TIME = 4096


class Source(Protocol):
    """Where streamed matrices are stored, by native names."""

    def fill(self, name: str, out: Tensor) -> None:
        """Reads a whole matrix into `out`, a contiguous tensor on the CPU. Raises OSError."""
        ...

    def fill_rows(self, name: str, rows: Sequence[int], out: Tensor) -> None:
        """Reads some rows of a matrix into `out`, [len(rows), ...]. Raises OSError."""
        ...


class _Matrix(NamedTuple):
    """A streamed parameter."""

    name: str
    module: nn.Module
    key: str
    """Its name in the module."""
    shape: torch.Size
    dtype: torch.dtype
    start: int
    """Its first byte in the buffer of its block."""

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def view_of(self, buffer: Tensor) -> Tensor:
        """Returns the matrix in a buffer of its block."""
        return buffer[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)

    def put(self, value: Tensor) -> None:
        self.module._parameters[self.key] = value  # pyright: ignore[reportArgumentType]


class _Saved(NamedTuple):
    """The place of a view of a buffer, in place of the view, for the backward pass."""

    block: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class WeightStream:
    """Streams the frozen matrices of a model's blocks, and the rows of its frozen embeddings.

    Attributes:
        names: The native names of the streamed parameters.
        waited: The seconds for which the model has waited for weights.
    """

    def __init__(self, model: Any) -> None:
        """`model` is on the meta device, with its adapters and the types of its frozen matrices."""
        self._blocks: list[list[_Matrix]] = []
        for number, block in enumerate(model.model.layers):
            self._blocks.append(_matrices(block, f"model.layers.{number}."))
        self._tables: list[_Matrix] = []
        for name, module in model.model.named_children():
            if isinstance(module, nn.Embedding) and module.weight is not model.head_weight:
                self._tables += _matrices(module, f"model.{name}.")
        self.names = {each.name for each in self._all()}
        self._sizes = [sum(_aligned(each.nbytes) for each in own) for own in self._blocks]
        self.waited = 0.0
        self.buffers: list[Tensor] = []
        self._holds: list[int | None] = [None, None]
        """The block in each buffer, or that is being fetched there."""
        self._slot = 0
        """The buffer of the current block; the next one is fetched into the other."""
        self._pending: Future[Any] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def parameters(self) -> Iterator[Tensor]:
        return (each.module.get_parameter(each.key) for each in self._all())

    def release(self) -> None:
        """Empties the streamed parameters, so that nothing allocates them; `open` makes what is in their place."""
        for each in self._all():
            each.put(_frozen(torch.empty(0, dtype=each.dtype, device="meta")))

    @property
    def stored_as(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """The shape and the type of each streamed matrix."""
        return {each.name: (each.shape, each.dtype) for each in self._all()}

    @property
    def buffer_bytes(self) -> int:
        """The size of both buffers."""
        return 2 * max(self._sizes)

    @property
    def bytes_per_pass(self) -> int:
        """What a forward and backward pass read of the blocks, after the first one."""
        return sum(self._sizes[2:]) + sum(self._sizes[:-2])

    @property
    def bytes_of_token(self) -> int:
        """What is read for a token of its embeddings."""
        return sum(each.nbytes // each.shape[0] for each in self._tables)

    def open(self, model: Any, source: Source, device: torch.device, *, mode: str) -> None:
        """Makes the buffers, and has the blocks of the model fetch their matrices.

        Args:
            mode: The model's activation checkpointing, one of ACTIVATION_CHECKPOINTING.
        """
        self._source, self._device = source, device
        self.buffers = [torch.empty(max(self._sizes), dtype=torch.uint8, device=device) for _ in range(2)]
        if is_gpu(device):
            self._staging = pinned_bytes(max(self._sizes))
            self._side = gpu_functions(device).Stream(device)
            self._copied = None
        nothing = {dtype: _nan(dtype, device) for dtype in {each.dtype for each in self._all()}}
        self._absent = {each.name: _frozen(nothing[each.dtype].expand(each.shape)) for each in self._all()}
        for each in self._all():
            each.put(self._absent[each.name])
        for number, block in enumerate(model.model.layers):
            forward = partial(self._forward, number, type(block).forward.__get__(block), mode == "full")
            if mode == "full":
                forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
            block.forward = forward
        for table in self._tables:
            table.module.forward = partial(self._rows, table)

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all streamed matrices by name, in parts that are valid until the next one, without the thread."""
        for table in self._tables:
            for first in range(0, table.shape[0], _ROWS_AT_A_TIME):
                rows = range(first, min(first + _ROWS_AT_A_TIME, table.shape[0]))
                yield table.name, self._read_rows(table, rows).to(self._device)
        for matrix in (each for own in self._blocks for each in own):
            part = torch.empty(matrix.shape, dtype=matrix.dtype)
            self._source.fill(matrix.name, part)
            yield matrix.name, part.to(self._device)

    def close(self) -> None:
        """Ends the thread after what it reads now. A later use of the model starts another one."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    # --- The use of a block ---

    def _forward(self, block: int, forward: Any, recomputes: bool, *arguments: Any) -> Tensor:
        self._require(block)
        if recomputes or not torch.is_grad_enabled():
            # What the recomputation saves is used before the next block is computed again: autograd takes the nodes of
            # later blocks first.
            return forward(*arguments)
        with saved_by(partial(self._pack, block), self._unpack):
            return forward(*arguments)

    def _pack(self, block: int, saved: Tensor) -> Tensor | _Saved:
        if saved.untyped_storage()._cdata != self.buffers[self._slot].untyped_storage()._cdata:
            return saved
        return _Saved(block, saved.dtype, saved.shape, saved.stride(), int(saved.storage_offset()))

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if not isinstance(saved, _Saved):
            return saved
        self._require(saved.block)
        buffer = self.buffers[self._slot].view(saved.dtype)
        return buffer.as_strided(saved.shape, saved.stride, saved.offset)

    def _require(self, block: int) -> None:
        """Has the block in its parameters, and the next one on its way."""
        current = self._holds[self._slot]
        if block == current:
            return
        started, other = time.perf_counter(), 1 - self._slot
        if self._holds[other] != block:
            self._wait()
            self._fetch(block, other)
        self._wait()
        self.waited += time.perf_counter() - started
        self._slot = other
        for matrix in self._blocks[current] if current is not None else ():
            matrix.put(self._absent[matrix.name])
        for matrix in self._blocks[block]:
            matrix.put(_frozen(matrix.view_of(self.buffers[other])))
        following = self._after(block, current)
        if following is not None and self._holds[1 - other] != following:
            self._fetch(following, 1 - other)

    def _after(self, block: int, before: int | None) -> int | None:
        """Returns the block that is probably needed next."""
        last = len(self._blocks) - 1
        if last == 0:
            return None
        if block == last:
            return last - 1 if torch.is_grad_enabled() else 0
        return block - 1 if before is not None and 0 < block < before else block + 1

    # --- Reading ---

    def _fetch(self, block: int, slot: int) -> None:
        self._thread = self._thread or ThreadPoolExecutor(1, "weights")
        self._holds[slot] = block
        free = None
        if is_gpu(self._device):
            free = gpu_functions(self._device).Event()
            free.record(gpu_functions(self._device).current_stream(self._device))
        self._pending = self._thread.submit(self._read, block, self.buffers[slot], free)

    def _wait(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            copied = pending.result()
        except BaseException:  # so that it is read again
            self._holds[1 - self._slot] = None
            raise
        if copied is not None:
            gpu_functions(self._device).current_stream(self._device).wait_event(copied)

    def _read(self, block: int, buffer: Tensor, free: Any) -> Any:
        """Fills a buffer, on a GPU once the event `free` has passed there. Returns the event of the copy."""
        host = buffer if free is None else self._staging
        if free is not None and self._copied is not None:
            self._copied.synchronize()  # the last copy reads the same memory of the host
        for matrix in self._blocks[block]:
            self._source.fill(matrix.name, matrix.view_of(host))
        if free is None:
            return None
        functions, size = gpu_functions(self._device), self._sizes[block]
        with functions.stream(self._side):
            self._side.wait_event(free)
            buffer[:size].copy_(host[:size], non_blocking=True)
            self._copied = functions.Event()
            self._copied.record(self._side)
        return self._copied

    def _rows(self, table: _Matrix, ids: Tensor) -> Tensor:
        """Returns the embeddings of tokens. On a GPU, the host waits for the ids and for the copy of the rows."""
        started = time.perf_counter()
        unique, inverse = ids.cpu().unique(return_inverse=True)
        rows = self._read_rows(table, unique.tolist())[inverse].to(self._device)
        self.waited += time.perf_counter() - started
        return rows

    def _read_rows(self, table: _Matrix, rows: Sequence[int]) -> Tensor:
        out = torch.empty(len(rows), *table.shape[1:], dtype=table.dtype)
        self._source.fill_rows(table.name, rows, out)
        return out

    def _all(self) -> Iterator[_Matrix]:
        yield from self._tables
        for own in self._blocks:
            yield from own


def _matrices(module: nn.Module, prefix: str) -> list[_Matrix]:
    """Returns the frozen matrices of a module, one after another in a buffer."""
    found: list[_Matrix] = []
    start = 0
    for name, parameter in module.named_parameters():
        if parameter.requires_grad or not is_matrix(name, parameter):
            continue
        parent, _, key = name.rpartition(".")
        owner = module.get_submodule(parent)
        found.append(_Matrix(prefix + name, owner, key, parameter.shape, parameter.dtype, start))
        start += _aligned(found[-1].nbytes)
    return found


def _frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def _nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns one element that is NaN: of NF4, a byte of which are scales that are NaN."""
    return torch.full((dtype.itemsize,), 255, dtype=torch.uint8, device=device).view(dtype)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
