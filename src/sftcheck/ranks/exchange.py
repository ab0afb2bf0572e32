"""What the ranks of a trainer tell each other while they are checked, so that none waits for a rank that has stopped.

Every exchange is one value as text (plain_values.py) in a group of its own. A rank on which a row has ended sends that
instead of a value, so the row ends on all ranks, and each of them decides by the same list:

    rank 0    value  value  Finished     the row is measured
    rank 1    value  value  Finished

    rank 0    value  value               the row ends on both with rank 1's exception
    rank 1    value  Failed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from sftcheck.faults import Fault
from sftcheck.ranks.plain_values import read_back, written
from sftron.checks.report import Finding, NotMeasuredError

T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank has ended a row, or did not answer."""


@dataclass(frozen=True, slots=True)
class _Value:
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class _Ended:
    """A row that has ended on a rank: measured, with nothing to measure, or by an exception."""

    finding: Finding
    is_failed: bool = False


def _written(message: _Value | _Ended) -> bytes:
    if isinstance(message, _Value):
        return written((message.name, message.value))
    return written((fields_of(message.finding), message.is_failed))


def _read_back(text: bytes) -> _Value | _Ended:
    first, second = read_back(text)
    return _Value(first, second) if isinstance(first, str) else _Ended(finding_of(first), second)


def fields_of(finding: Finding) -> dict[str, Any]:
    """Returns the fields of a finding, with its faults by name, as ranks exchange them."""
    fields = {each: getattr(finding, each) for each in Finding.__dataclass_fields__}
    return fields | {"faults": tuple(each.name for each in finding.faults), "values": dict(finding.values)}


def finding_of(fields: dict[str, Any]) -> Finding:
    faults = tuple(Fault[each] for each in fields.pop("faults"))
    return Finding(**fields, faults=faults)


class Exchange:
    """The ranks of the default process group, which are checked together.

    This is a collective: every rank has to create it.

    Args:
        time_limit: How long a rank waits in one collective of the trainer, in seconds. Here it waits twice as long,
            as the rank that it waits for may wait for a third one in the trainer.
    """

    def __init__(self, time_limit: float) -> None:
        self.rank, self.world_size, self.time_limit = dist.get_rank(), dist.get_world_size(), time_limit
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * time_limit))
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._store, self._row = distributed_c10d._get_default_store(), "the start"

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def gather(self, name: str, value: T) -> list[T]:
        """Returns the values of all ranks, which must call it with the same name. Raises RankError."""
        answers = self._all(_Value(name, value))
        for rank, answer in enumerate(answers):
            if isinstance(answer, _Ended) and answer.is_failed:
                raise RankError(f"rank {rank}: {answer.finding.measured}")
        names = [answer.name if isinstance(answer, _Value) else "the end of the row" for answer in answers]
        if len(set(names)) > 1:
            raise RankError("; ".join(f"rank {rank} is at {name}" for rank, name in enumerate(names)))
        return [answer.value for answer in answers]

    def of_first(self, name: str, call: Callable[[], T]) -> T:
        """Returns what the call gives on rank 0, which alone makes it. Raises RankError if it raises there."""
        found, reason = None, None
        if self.rank == 0:
            try:
                found = call()
            except NotMeasuredError as error:
                reason = str(error)
        found, reason = self.gather(name, (found, reason))[0]
        if reason is not None:
            raise NotMeasuredError(reason)
        return found  # pyright: ignore[reportReturnType]

    def broadcast(self, values: Tensor) -> Tensor:
        """Returns rank 0's CPU tensor, which has the same shape on all ranks."""
        dist.broadcast(values, 0, group=self._group)
        return values

    def row(self, name: str, measure: Callable[[], Finding]) -> list[Finding]:
        """Measures a row on all ranks. Returns their findings: the same one for all if an exception ended it."""
        self._row = name
        with suppress(RuntimeError):  # the process of the store has ended, which the row reports
            self._store.set(f"sftron row of rank {self.rank}", name)
        try:
            return self._end(_measured(measure))
        except RankError as error:
            return [Finding(None, f"not measured: {error}", raised=True)] * self.world_size

    def _end(self, ended: _Ended) -> list[Finding]:
        answers = self._all(ended)
        for rank, answer in enumerate(answers):
            if isinstance(answer, _Ended) and answer.is_failed:
                finding = replace(answer.finding, measured=f"rank {rank}: {answer.finding.measured}")
                return [finding] * self.world_size
        waiting = [str(rank) for rank, answer in enumerate(answers) if isinstance(answer, _Value)]
        if waiting:
            raise RankError(f"ranks {', '.join(waiting)} measure more than the others")
        return [answer.finding for answer in answers]

    def on_all(self, call: Callable[[], T]) -> T:
        """Returns what the call gives on this rank. Raises ValueError on all ranks if it raises one on any."""
        problem, found = "", None
        try:
            found = call()
            ended = _Ended(Finding(True, ""))
        except RankError as error:
            raise ValueError(str(error)) from error
        except ValueError as error:
            problem = str(error)
            ended = _Ended(Finding(None, problem, raised=True), is_failed=True)
        except Exception as error:
            self._all(_Ended(Finding.of_exception(error), is_failed=True))
            raise
        first = next((each for each in self._end_of_all(ended) if each.raised), None)
        if first is not None:
            raise ValueError(problem or first.measured)
        return found  # pyright: ignore[reportReturnType]

    def _end_of_all(self, ended: _Ended) -> list[Finding]:
        try:
            return self._end(ended)
        except RankError as error:
            raise ValueError(str(error)) from error

    def _all(self, message: _Value | _Ended) -> list[Any]:
        own = torch.frombuffer(bytearray(_written(message)), dtype=torch.uint8)
        try:
            sizes = [int(each) for each in self._gathered(torch.tensor([len(own)]))]
            padded = torch.nn.functional.pad(own, (0, max(sizes) - len(own)))
            texts = self._gathered(padded)
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} waited in the row {self._row!r} for {2 * self.time_limit:.0f} s; {self._rows()}"
            ) from error
        return [_read_back(text[:size].numpy().tobytes()) for text, size in zip(texts, sizes, strict=True)]

    def _gathered(self, own: Tensor) -> list[Tensor]:
        found = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(found, own, group=self._group)
        return found

    def _rows(self) -> str:
        """Describes the row in which each rank is."""
        keys = {rank: f"sftron row of rank {rank}" for rank in range(self.world_size)}
        try:
            rows = {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}
        except RuntimeError:
            return "rank 0 has ended"
        return ", ".join(f"rank {rank} is in {rows.get(rank, 'the start')!r}" for rank in keys)


def _measured(measure: Callable[[], Finding]) -> _Ended:
    try:
        return _Ended(measure())
    except NotMeasuredError as error:
        return _Ended(Finding(None, str(error)))
    except RankError:  # all ranks have heard of it, and none will send more
        raise
    except Exception as error:
        return _Ended(Finding.of_exception(error), is_failed=True)


@contextmanager
def time_limit_of_trainer(seconds: float) -> Iterator[None]:
    """Gives the trainer's own collectives over all ranks a time limit; NCCL keeps its own."""
    group = distributed_c10d._get_default_group()
    try:
        options = group._get_backend(torch.device("cpu")).options
    except RuntimeError:  # no backend for the CPU
        yield
        return
    before = options._timeout
    distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        distributed_c10d._set_pg_timeout(before)
