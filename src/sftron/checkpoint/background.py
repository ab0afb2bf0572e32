"""A checkpoint written beside the training: the tensors are copied to host memory, then a thread takes its time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sftron.checkpoint.checkpoint import StoredRows


class HostCopy:
    """Memory for a copy of what this rank writes, taken at the first copy and used again for every later one.

    It has the size of the rank's masters and optimizer state, 12 bytes a parameter. Of a GPU it is pinned: a copy
    runs at the speed of the bus.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def take(self, rows: StoredRows) -> StoredRows:
        """The same rows, in memory that training does not touch; the copy before this one is overwritten."""
        copied = {
            kind: {name: replace(each, tensor=self._copy((kind, name), each.tensor)) for name, each in named.items()}
            for kind, named in rows.items()
        }
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copied

    def _copy(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)


class Background:
    """One call in a thread of its own. The thread does not keep a process alive that ends."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # for the loop to raise
            self._error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Raises what the call has raised, if it has ended."""
        self._thread.join(timeout_s)
        if not self.is_running and self._error is not None:
            raise self._error
