"""The promise of a resume, on the user's own data: short runs of the real trainer, in a folder of their own."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sftron.checkpoint.hf import read_config
from sftron.config import Checkpoints, Config, Evaluation, Logging
from sftron.config.schema import Parallelism
from sftron.train.signals import StopRequest
from sftron.train.trainer import Trainer
from sftron.verify.model_checks import unless_refused
from sftron.verify.run_check import Finding, skipped
from sftron.verify.run_subject import Subject

NUM_STEPS = 4
"""Of the run without a stop; the other begins at its half."""

_NUM_LAYERS, _BYTES_PER_PARAMETER = 2, 12


@dataclass(frozen=True, slots=True)
class Trace:
    """What a run leaves behind: its steps, digests of weights and optimizer state by name, where its data stands."""

    status: int
    steps: list[dict[str, Any]]
    digests: dict[str, str]
    data: str


def check_resume(subject: Subject) -> Finding:
    """A run of 4 steps with a checkpoint on the way, and one that goes on from that checkpoint: all bits."""
    if refused := unless_refused(subject):
        return refused
    config = short_run(subject, "whole")
    if shortage := _shortage(subject, config):
        return skipped(shortage)
    half = NUM_STEPS // 2
    whole = run_in_silence(config)
    checkpoint = config.run_dir / "checkpoints" / f"step-{half}"
    resumed_config = named(config, "resumed", resume=str(checkpoint))
    resumed = run_in_silence(resumed_config)
    shutil.rmtree(config.run_dir)
    shutil.rmtree(resumed_config.run_dir)
    if whole.status or resumed.status:
        return Finding(False, f"a run ended with status {whole.status or resumed.status}", "0: no finite loss?")
    wrong = _differences(whole, resumed, after=half)
    losses = ", ".join(f"{step['loss']:.6f}" for step in whole.steps[half:])
    of = f"first {min(_NUM_LAYERS, subject.num_layers)} of {subject.num_layers} layers, packs of one sequence"
    return Finding(
        not wrong,
        f"steps {half + 1} to {NUM_STEPS} again: {len(wrong) or 'no'} differences",
        "every bit",
        (
            *wrong[:5],
            f"losses {losses}, weights and optimizer state ({len(whole.digests)} tensors), data position",
            of,
        ),
    )


def short_run(subject: Subject, name: str) -> Config:
    """The user's run of a few steps in a folder of the scratch, with a shallow model, and nothing but what a resume
    needs."""
    config, tokens = subject.cut_to(_NUM_LAYERS), subject.config.tokens
    is_pool = config.data.packing.strategy == "pool"
    steps = {
        "train_steps": NUM_STEPS,
        "train_epochs": None,
        "micro_batch_size": 1 if is_pool else tokens.micro_batch_size,
        "batch_accumulation_per_replica": 2,
    }
    general: dict[str, Any] = {"output_dir": str(subject.scratch / "runs"), "run_name": name}
    if subject.ranks.device.type == "cuda":
        general["deterministic"] = True
    return config.model_copy(
        update={
            "general": config.general.model_copy(update=general),
            "tokens": tokens.model_copy(update=steps),
            "data": config.data.model_copy(update={"num_workers": 0}),
            "parallelism": Parallelism(),
            "optimizer": config.optimizer.model_copy(update={"warmup_steps": 1}),
            "checkpoints": Checkpoints(interval=NUM_STEPS // 2, export_hf=False),
            "evaluation": Evaluation(),
            "logging": Logging(),
        }
    )


def named(config: Config, name: str, **checkpoints: Any) -> Config:
    """With another run name, and other keys of `checkpoints`."""
    return config.model_copy(
        update={
            "general": config.general.model_copy(update={"run_name": name}),
            "checkpoints": config.checkpoints.model_copy(update=checkpoints),
        }
    )


def _shortage(subject: Subject, config: Config) -> str | None:
    """Why there is no room for three checkpoints, if so."""
    architecture = read_config(Path(config.model.path))
    width, layers = architecture.hidden_size, min(_NUM_LAYERS, architecture.num_hidden_layers)
    matrices = 1 if architecture.tie_word_embeddings else 2
    parameters = matrices * architecture.vocab_size * width
    parameters += layers * (4 * width * width + 3 * width * architecture.intermediate_size)
    wanted, free = 3.5 * _BYTES_PER_PARAMETER * parameters, shutil.disk_usage(subject.scratch).free
    if wanted < free:
        return None
    return f"needs {wanted / 1e9:.0f} GB in {subject.scratch.parent}, which has {free / 1e9:.0f}: set TMPDIR"


class _NoSignals(StopRequest):
    """These runs leave the signals to whoever called."""

    def listen(self) -> None:
        pass


def run_in_silence(config: Config) -> Trace:
    """Train in this process, in silence."""
    with _as_before(), contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(config, _NoSignals())
        trainer.build()
        status = trainer.train()
        lines = (config.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        trace = Trace(
            status,
            [json.loads(line) for line in lines],
            dict(_digests(trainer)),
            json.dumps(trainer.loader.state_dict(), sort_keys=True),
        )
        del trainer
    gc.collect()
    return trace


@contextmanager
def _as_before() -> Iterator[None]:
    """A deterministic run says so to all of torch."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _digests(trainer: Trainer) -> Iterator[tuple[str, str]]:
    for name, parameter in trainer.model.named_parameters():
        yield name, _digest(parameter)
        for key, value in sorted(trainer.optimizer.state[parameter].items()):
            yield f"{name} {key}", _digest(value)


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def _differences(whole: Trace, resumed: Trace, *, after: int) -> list[str]:
    wrong = []
    for a, b in zip(whole.steps[after:], resumed.steps, strict=True):
        wrong += [
            f"step {a['step']}: {key} is {a[key]} without a stop and {b[key]} after one"
            for key in ("step", "loss", "grad_norm", "learning_rate", "tokens", "trained_tokens", "total_tokens")
            if a[key] != b[key]
        ]
    changed = [name for name, digest in whole.digests.items() if resumed.digests.get(name) != digest]
    if changed or len(whole.digests) != len(resumed.digests):
        wrong.append(f"{len(changed)} of {len(whole.digests)} tensors differ, such as {', '.join(changed[:3])}")
    if whole.data != resumed.data:
        wrong.append("the data stands elsewhere")
    return wrong
