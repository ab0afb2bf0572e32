"""Checks with short runs of the real trainer: resume, and a decreasing loss (law 6)."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sftron.checks.report import Finding, NotMeasuredError
from sftron.checks.round_trip import digest
from sftron.checks.subject import Subject
from sftron.config import Checkpoints, Config, Evaluation, Logging
from sftron.config.schema import Parallelism
from sftron.data.types import Batch
from sftron.kernels.device import is_gpu
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import weighted_loss_sum
from sftron.train.build_model import adapter_tensors, make_optimizer
from sftron.train.objective import hidden_states
from sftron.train.places import model_folder
from sftron.train.signals import StopRequest
from sftron.train.step import train_step
from sftron.train.trainer import Trainer, open_trainer
from sftron.visible_text import counted

NUM_STEPS, _HALF, _NUM_LAYERS = 4, 2, 2
"""The size of the short runs; the uninterrupted one saves a checkpoint after half of its steps."""

_NUM_CHECKPOINTS = 3.5
"""The disk space of three checkpoints of 12 bytes for each trained parameter: its fp32 value and two moments."""
_CHECKPOINTS_PER_WEIGHTS = _NUM_CHECKPOINTS * 6
"""The same, relative to the model's files in bf16."""


def short_run(subject: Subject, name: str, **tokens: Any) -> Config:
    """Returns the configuration with few steps and layers, a scratch folder, and only what a resume needs."""
    config = subject.with_layers(subject.setup.config, _NUM_LAYERS)
    general: dict[str, Any] = {"output_dir": str(subject.scratch / "runs"), "run_name": name}
    if is_gpu(subject.ranks.device):
        general["deterministic"] = True
    if config.data.packing.strategy == "pool":
        tokens["micro_batch_size"] = 1
    tokens = {"train_steps": NUM_STEPS, "train_epochs": None, "batch_accumulation_per_replica": 2} | tokens
    return config.model_copy(
        update={
            "general": config.general.model_copy(update=general),
            "tokens": config.tokens.model_copy(update=tokens),
            "data": config.data.model_copy(update={"num_workers": 0}),
            "parallelism": Parallelism(),
            "optimizer": config.optimizer.model_copy(update={"warmup_steps": 1}),
            "checkpoints": Checkpoints(interval=_HALF, export_hf=False),
            "evaluation": Evaluation(),
            "logging": Logging(),
        }
    )


class _NoSignals(StopRequest):
    """Installs no signal handlers, so that the caller's handlers remain."""

    def listen(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Trace:
    """The results of a run: its steps, digests of weights and optimizer state by name, and the data position."""

    status: int
    steps: list[dict[str, Any]]
    digests: dict[str, str]
    data: str
    adapters: dict[str, Tensor]
    """The trained tensors of a run with `lora`; else empty."""


def train(config: Config, on_built: Callable[[Trainer], object] = lambda trainer: None) -> Trace:
    """Trains in this process without output to stdout. Calls `on_built` with the trainer before its first step."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            trainer = open_trainer(config, _NoSignals())
            assert isinstance(trainer, Trainer), "the run has just begun"
            on_built(trainer)
            status = trainer.train()
    finally:  # a deterministic run changes this setting for the whole process
        torch.use_deterministic_algorithms(was_deterministic)
    data = json.dumps(trainer.loader.state_dict(), sort_keys=True)
    adapters = adapter_tensors(trainer.model) if config.lora is not None else {}
    trace = Trace(status, steps_of(config), dict(_digests(trainer)), data, adapters)
    del trainer
    gc.collect()
    return trace


def steps_of(config: Config) -> list[dict[str, Any]]:
    lines = (config.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _digests(trainer: Trainer) -> Iterator[tuple[str, str]]:
    streamed = trainer.model.stream.names if trainer.model.stream else ()
    for name, parameter in trainer.model.named_parameters():
        if name in streamed:  # whatever block is in a buffer
            continue
        for key, tensor in {"": parameter, **trainer.optimizer.state[parameter]}.items():
            yield f"{name} {key}".strip(), digest(tensor)


def resume(subject: Subject) -> Finding:
    config = short_run(subject, "whole")
    needed = _bytes_of_checkpoints(subject, config)
    free = shutil.disk_usage(subject.scratch).free
    if needed > free:
        disk = f"{subject.scratch.parent}, which has {free / 1e9:.0f}"
        raise NotMeasuredError(f"needs {needed / 1e9:.0f} GB in {disk}: set TMPDIR to a larger disk")
    whole = train(config)
    checkpoints = config.checkpoints.model_copy(update={"resume": str(config.run_dir / f"checkpoints/step-{_HALF}")})
    resumed = train(short_run(subject, "resumed").model_copy(update={"checkpoints": checkpoints}))
    shutil.rmtree(subject.scratch / "runs")
    if status := whole.status or resumed.status:
        return Finding(False, f"a run ended with status {status}", "status 0")
    wrong = _differences(whole, resumed)
    losses = ", ".join(f"{step['loss']:.6f}" for step in whole.steps[_HALF:])
    compared = f"losses {losses}, weights and optimizer state ({counted(len(whole.digests), 'tensors')}), data position"
    layers = f"first {subject.first_layers(_NUM_LAYERS)} of {subject.total_layers} layers, packs of one sequence"
    measured = f"steps {_HALF + 1} to {NUM_STEPS} again: {len(wrong) or 'no'} differences"
    return Finding(not wrong, measured, "every bit", (*wrong[:5], compared, layers))


def _bytes_of_checkpoints(subject: Subject, config: Config) -> float:
    if (adapters := subject.setup.model.adapters) is not None:
        return _NUM_CHECKPOINTS * 12 * adapters.num_trained
    weights = model_folder(config).glob("*.safetensors")
    return _CHECKPOINTS_PER_WEIGHTS * sum(path.stat().st_size for path in weights)


def _differences(whole: Trace, resumed: Trace) -> list[str]:
    wrong = []
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens", "trained_tokens", "total_tokens", "rows")
    for a, b in zip(whole.steps[_HALF:], resumed.steps, strict=True):
        unlike = [key for key in keys if a[key] != b[key]]
        wrong += [f"step {a['step']}: {key} is {a[key]} uninterrupted, {b[key]} resumed" for key in unlike]
    changed = sorted(name for name, _ in whole.digests.items() ^ resumed.digests.items())
    if changed:
        wrong.append(f"{len(set(changed))} of {len(whole.digests)} tensors differ, such as {changed[0]}")
    if whole.data != resumed.data:
        wrong.append("the data position differs")
    return wrong


_NUM_UPDATES, _MOST_TOKENS = 6, 256
_SURE = 0.9
"""A stop token with at least this probability need not become more likely."""
_SHOWN = 0.0005
"""The smallest probability to show with one decimal of a percent."""


def learning(subject: Subject) -> Finding:
    with subject.at_start() as model:
        return _learning(subject, model)


def _learning(subject: Subject, model: LlamaForSFT) -> Finding:
    options = subject.config.optimizer
    documents, room = [], _MOST_TOKENS
    for document in subject.require_documents(1):
        if not documents or len(document) <= room:
            documents.append(document)
            room -= len(document)
    batch = subject.batch(documents)
    stop_ids = sorted({token_id for row in subject.rows for token_id in row.tokenized.stop_ids})
    loss_before, stop_before = _measure(subject, batch, stop_ids)
    optimizer = make_optimizer(subject.config, model.train())
    is_finite = True
    for _ in range(_NUM_UPDATES):
        step = train_step(model, optimizer, [batch], subject.objective, max_grad_norm=options.max_grad_norm)
        is_finite = is_finite and step.is_finite
    loss, stop = _measure(subject, batch, stop_ids)
    # Comparisons with NaN are false. A NaN for stop tokens means that the batch has none.
    has_stops = not math.isnan(stop_before)
    is_right = is_finite and loss < loss_before and (not has_stops or _is_learned(stop_before, stop))
    stop_change = f", stop {_shown(stop_before)} to {_shown(stop)}" if has_stops else ""
    detail = (
        f"{_NUM_UPDATES} steps of AdamW at the peak rate {options.learning_rate:g} on "
        f"{counted(len(documents), 'conversations')} of {len(batch.input_ids)} tokens",
        "stop: mean probability of the stop tokens that end these answers",
    )
    return Finding(is_right, f"loss {loss_before:.3f} to {loss:.3f}{stop_change}", "falls; the stop rises", detail)


def _is_learned(before: float, after: float) -> bool:
    """Returns whether a stop token became more likely; at least twice as likely, if it stays below 0.05%."""
    return after >= _SURE or after > (before if after >= _SHOWN else 2 * before)


def _shown(probability: float) -> str:
    return f"{probability:.1%}" if probability >= _SHOWN or not probability else f"{probability:.1e}"


def _measure(subject: Subject, batch: Batch, stop_ids: list[int]) -> tuple[float, float]:
    """Returns the loss of the batch, and the mean probability of its stop tokens, or NaN if it has none."""
    model = subject.model.eval()
    labels = [each.to(model.head_weight.device) for each in (batch.label_positions, batch.labels, batch.loss_weights)]
    with torch.no_grad():
        total, measures = weighted_loss_sum(hidden_states(model, batch), model.head, *labels)
    is_stop = torch.isin(batch.labels, torch.tensor(stop_ids, dtype=torch.int64))
    return total.item() / batch.weight_sum, measures.losses.cpu()[is_stop].neg().exp().mean().item()
