"""A simulated run: sftron's Trainer with everything of a run that stops and resumes, and stand-ins for the rest.

Real: Trainer, Steps, Saver, checkpoints and their shards, Progress, RunDirectory, the files of lines, `latest` and
`best`, `find_start` and `load_start`, Evaluator, PackedDataset, lanes, mixtures, streams, planned packing, PackLoader.

Replaced, because each would cost a run more time than it can find faults:

    model and step   model.py; ranks divide its matrix by rows, as a DTensor needs a process group
    rows             data.py; tokenizers and formats neither stop nor resume
    loader workers   data.py; copies of the dataset instead of processes
    processes        machine.py; ranks, and the writers of background saves, are tasks
    disk             disk.py, behind the functions of `os` and `open`
    exports          one file, published as real exports are; nothing is pushed
    console          the lines of the main rank are kept for the checks
    signals, time    an attribute, and a counter
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from sftron import errors
from sftron.checkpoint import atomic
from sftron.config import Config
from sftron.data import dataset
from sftron.data.lanes.order import StreamOrder
from sftron.data.types import ContextRank
from sftron.train import build_run, evaluation, exports, loop, ranks, resume, run_directory, saving, step, trainer
from sftron.train.build_data import make_dataset
from sftron.train.flops import StepFlops
from sftron.train.logs import console, run_logs
from sftron.train.run import Setup
from tests.simulator import life, model
from tests.simulator.data import SimulatedLoader, prepared
from tests.simulator.disk import REAL, REAL_OPEN, Raw
from tests.simulator.life import Clock, here
from tests.simulator.machine import SimulatedRanks

_WINDOW = 16
"""The rows of a stream that are shuffled together; by default, all rows of so small a stream would be."""


# --- The setup of a rank ---


def _make_setup(*_: Any, **__: Any) -> Setup:
    """Returns the setup of the rank that calls this."""
    own, rank = here()
    layout, config = own.layout, own.config
    num_dp = layout.num_ranks // layout.context
    these = ranks.Ranks(
        device=torch.device("cpu"),
        rank=rank,
        world_size=layout.num_ranks,
        local_rank=rank,
        dp_rank=rank // layout.context,
        dp_world_size=num_dp,
        context=ContextRank(rank % layout.context, layout.context),
        dimensions=ranks.Dimensions(shard=num_dp, context=layout.context),
    )
    rows, lengths = prepared(config)
    rows = rows.of_process()
    packs = make_dataset(config, rows, dp_rank=these.dp_rank, dp_world_size=num_dp, row_lengths=lengths)
    described: Any = SimpleNamespace(
        folder=Path("model"),
        architecture=SimpleNamespace(mixture=None, vocab_size=1000),
        fingerprint={},
        trained=None,
        adapters=None,
        loss="native",
        peak=SimpleNamespace(tflops=None),
        router_aux_loss_coef=0.0,
        export_source=(),
    )
    data: Any = SimpleNamespace(
        dataset=packs,
        preparation=rows,
        chat_tokenizer=rows.chat_tokenizer,
        sample=SimpleNamespace(stop_ids=()),
        projection=None,
        evaluation_sets=(SimpleNamespace(name="held_out", fingerprint="made up", conversations=(), limit=None),),
        questions=[],
        file_stamps=[],
        is_evaluated=config.checkpoints.keep_best is not None,
        fingerprints={},
    )
    return Setup(config, SimulatedRanks.of(these, own.group, own.group_of_writers), data, described)


class _Written:
    """The Future of a background save, for whose end a task waits while the others go on."""

    def __init__(self, work: Callable[[], None]) -> None:
        own, rank = here()
        self._machine, self._task = own.machine, own.machine.spawn(rank, f"writer {rank}", work)

    def done(self) -> bool:
        self._machine.event("poll")
        return self._task.ended

    def result(self, _timeout_s: float | None = None) -> None:
        self._machine.wait(lambda: self._task.ended)
        if self._task.error is not None:
            raise self._task.error


# --- What the checks want to know ---


def _say(line: str, *_: Any, **_options: Any) -> None:
    own, rank = here()
    if rank == 0:
        own.lines.append(line)


def _find_start(*arguments: Any) -> Any:
    own, rank = here()
    if rank == 0:
        own.on_search()
    start = resume.find_start(*arguments)
    if rank == 0:
        own.resumed = start.folder
    return start


def _succeeded(saver: saving.Saver, real: Callable[..., None] = saving.Saver._succeeded) -> None:
    real(saver)
    own, rank = here()
    if rank == 0:
        own.saved_step = saver.saved_step


# --- The disk ---


def _on_disk(name: str) -> Callable[..., Any]:
    """Returns what stands for a function of `os`: the disk's for what simulated tasks do in its folder."""
    real, own_name = REAL[name], {"replace": "rename", "remove": "unlink"}.get(name, name)

    def call(path: Any, *arguments: Any, **options: Any) -> Any:
        own, where = life.current, arguments[0] if name == "symlink" else path
        if own is None or own.machine.current is None or not own.disk.owns(where):
            return real(path, *arguments, **options)
        return getattr(own.disk, own_name)(path, *arguments)

    return call


def _fdopen(descriptor: int, mode: str = "r", buffering: int = -1, **options: Any) -> Any:
    own = life.current
    if own is None or (task := own.machine.current) is None or not own.disk.owns(descriptor):
        return REAL["fdopen"](descriptor, mode, buffering, **options)
    if "r" in mode:
        own.disk.forget(descriptor)
        return REAL["fdopen"](descriptor, mode, buffering, **options)
    closefd = options.get("closefd", True)
    raw = Raw(descriptor, closefd=closefd, is_killed=lambda: task.dead or own is not life.current)
    return io.BufferedWriter(raw, max(buffering, io.DEFAULT_BUFFER_SIZE))


def _open(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
    own = life.current
    if own is None or own.machine.current is None or not own.disk.owns(path) or "r" in mode:
        return REAL_OPEN(path, mode, *arguments, **options)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if "a" in mode else os.O_TRUNC)
    file = _fdopen(os.open(path, flags, 0o666), "wb")
    return file if "b" in mode else io.TextIOWrapper(file, encoding="utf-8")


# --- All of it ---


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _token_hex(num_bytes: int) -> str:
    return f"{here()[0].chance.getrandbits(8 * num_bytes):0{2 * num_bytes}x}"


def _replacements(clock: Clock) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields modules and classes with what stands for their names."""
    for module in (build_run, evaluation, loop, run_directory, run_logs, saving, step, trainer):
        yield module, {"time": clock}
    for module in (atomic, build_run):
        yield module, {"secrets": SimpleNamespace(token_hex=_token_hex)}
    yield os, {name: _on_disk(name) for name in REAL if name != "fdopen"} | {"fdopen": _fdopen}
    yield os, {"getpid": lambda: 4711}
    yield io, {"open": _open}
    yield shutil, {"_use_fd_functions": False}  # which would name files by descriptors of their folders
    yield console, dict.fromkeys(("start", "log_to", "hide_progress", "write_short"), _nothing)
    bar = SimpleNamespace(update=_nothing, time_left=None)
    yield console, {"write": _say, "RunProgress": lambda: bar}
    # Looking for secrets in each string, and YAML, would take four fifths of the time.
    yield errors, {"_secrets": tuple}
    yield trainer, {"dump_config": Config.model_dump_json}
    texts = ("describe_run", "describe_settings", "warn_of_busy_cores")
    yield trainer, {"description": SimpleNamespace(**dict.fromkeys(texts, _nothing))}
    yield loop, {"description": SimpleNamespace(**dict.fromkeys(texts, _nothing))}
    ends = ("show_answers", "conclude", "conclude_not_finite", "describe_finished")
    yield trainer, {"conclusion": SimpleNamespace(**dict.fromkeys(ends, _nothing)), "divergence": _nothing}
    yield trainer, {"start_ranks": lambda *_, **__: _make_setup().ranks, "build_run": _make_setup}
    yield trainer, {"mix_report": lambda *_: {}, "find_start": _find_start}
    yield trainer, {"load_run_model": model.load_matrix}
    yield trainer, {"make_optimizer": lambda _, matrix, *__: model.Moments(matrix.parameters())}
    yield loop, {"train_step": model.train_step, "step_flops": lambda *_: StepFlops(0, 0)}
    yield step, {"peak_memory_bytes": lambda _: 0}
    yield saving, {"train_step": model.train_step, "shards_to_store": model.shards_to_store}
    yield saving, {"_in_background": _Written}
    yield saving.Saver, {"_succeeded": lambda saver: _succeeded(saver)}
    yield evaluation, {"measure_set": model.measure_set, "whole_head": nullcontext}
    yield exports, {"open_weights": model.open_weights, "write_export": model.write_export}
    exporter = SimpleNamespace(plan=_nothing)
    yield exports.RunExports, {"_exporter": lambda *_, **__: exporter, "_export_model": model.export_model}
    yield dataset, {"StreamOrder": partial(StreamOrder, window=_WINDOW)}


@contextmanager
def simulated(clock: Clock) -> Iterator[None]:
    """Replaces what the module names, within the context."""
    with ExitStack() as stack:
        for target, names in _replacements(clock):
            for name, value in names.items():
                stack.enter_context(patch.object(target, name, value))
        stack.enter_context(patch("torchdata.stateful_dataloader.StatefulDataLoader", SimulatedLoader))
        yield
