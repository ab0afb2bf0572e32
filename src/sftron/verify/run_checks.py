"""Checks with short runs of the real trainer: resume, several ranks, and a decreasing loss (laws 6 and 8)."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sftron.config import Checkpoints, Config, Evaluation, Logging, dump_config
from sftron.config.schema import Parallelism
from sftron.data.types import Batch
from sftron.models.loss import weighted_loss_sum
from sftron.train.setup import local_folder, make_optimizer
from sftron.train.signals import StopRequest
from sftron.train.step import train_step
from sftron.train.trainer import Trainer
from sftron.verify.data_checks import turn_stop_ids
from sftron.verify.model_checks import hidden_states
from sftron.verify.subject import Subject
from sftron.verify.table import Finding, NotMeasuredError, rule

_NUM_STEPS, _NUM_LAYERS = 4, 2
"""The size of the short runs; the uninterrupted one saves a checkpoint after half of its steps."""

_CHECKPOINTS_PER_WEIGHTS = 3.5 * 6
"""The disk space of three checkpoints (fp32 weights and two moments) relative to the model's files in bf16."""


def _short_run(subject: Subject, name: str, **tokens: Any) -> Config:
    """Returns the configuration with few steps and layers, a folder in scratch, and only what a resume needs."""
    config = subject.with_layers(subject.config, _NUM_LAYERS)
    general: dict[str, Any] = {"output_dir": str(subject.scratch / "runs"), "run_name": name}
    if subject.ranks.device.type == "cuda":
        general["deterministic"] = True
    if config.data.packing.strategy == "pool":
        tokens["micro_batch_size"] = 1
    tokens = {"train_steps": _NUM_STEPS, "train_epochs": None, "batch_accumulation_per_replica": 2} | tokens
    return config.model_copy(
        update={
            "general": config.general.model_copy(update=general),
            "tokens": config.tokens.model_copy(update=tokens),
            "data": config.data.model_copy(update={"num_workers": 0}),
            "parallelism": Parallelism(),
            "optimizer": config.optimizer.model_copy(update={"warmup_steps": 1}),
            "checkpoints": Checkpoints(interval=_NUM_STEPS // 2, export_hf=False),
            "evaluation": Evaluation(),
            "logging": Logging(),
        }
    )


class _NoSignals(StopRequest):
    """Installs no signal handlers, so that the caller's handlers remain."""

    def listen(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Trace:
    """The results of a run: its steps, digests of weights and optimizer state by name, and the data position."""

    status: int
    steps: list[dict[str, Any]]
    digests: dict[str, str]
    data: str


def _train(config: Config) -> _Trace:
    """Trains in this process without output to stdout."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            trainer = Trainer(config, _NoSignals())
            trainer.build()
            status = trainer.train()
    finally:  # a deterministic run changes this setting for the whole process
        torch.use_deterministic_algorithms(was_deterministic)
    data = json.dumps(trainer.loader.state_dict(), sort_keys=True)
    trace = _Trace(status, _steps_of(config), dict(_digests(trainer)), data)
    del trainer
    gc.collect()
    return trace


def _steps_of(config: Config) -> list[dict[str, Any]]:
    lines = (config.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _digests(trainer: Trainer) -> Iterator[tuple[str, str]]:
    for name, parameter in trainer.model.named_parameters():
        for key, tensor in {"": parameter, **trainer.optimizer.state[parameter]}.items():
            bits = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            yield f"{name} {key}".strip(), hashlib.sha256(bits.tobytes()).hexdigest()


@rule(
    "resume",
    if_red="A requeued run would be another run. On a GPU set general.deterministic: true; else report what differs.",
)
def resume(subject: Subject) -> Finding:
    """A run that is stopped and resumed is, to the bit, the run without a stop."""
    subject.require_model()
    config = _short_run(subject, "whole")
    weights = local_folder(config.model.path).glob("*.safetensors")
    needed = _CHECKPOINTS_PER_WEIGHTS * sum(path.stat().st_size for path in weights)
    free = shutil.disk_usage(subject.scratch).free
    if needed > free:
        disk = f"{subject.scratch.parent}, which has {free / 1e9:.0f}"
        raise NotMeasuredError(f"needs {needed / 1e9:.0f} GB in {disk}: set TMPDIR")
    half = _NUM_STEPS // 2
    whole = _train(config)
    checkpoint = config.run_dir / "checkpoints" / f"step-{half}"
    resumed_config = _short_run(subject, "resumed")
    checkpoints = resumed_config.checkpoints.model_copy(update={"resume": str(checkpoint)})
    resumed_config = resumed_config.model_copy(update={"checkpoints": checkpoints})
    resumed = _train(resumed_config)
    shutil.rmtree(config.run_dir)
    shutil.rmtree(resumed_config.run_dir)
    if whole.status or resumed.status:
        return Finding(False, f"a run ended with status {whole.status or resumed.status}", "0: no finite loss?")
    wrong = _differences(whole, resumed, after=half)
    losses = ", ".join(f"{step['loss']:.6f}" for step in whole.steps[half:])
    layers = f"{min(_NUM_LAYERS, subject.num_layers)} of {subject.total_layers}"
    return Finding(
        not wrong,
        f"steps {half + 1} to {_NUM_STEPS} again: {len(wrong) or 'no'} differences",
        "every bit",
        (
            *wrong[:5],
            f"losses {losses}, weights and optimizer state ({len(whole.digests)} tensors), data position",
            f"first {layers} layers, packs of one sequence",
        ),
    )


def _differences(whole: _Trace, resumed: _Trace, *, after: int) -> list[str]:
    wrong = []
    for a, b in zip(whole.steps[after:], resumed.steps, strict=True):
        keys = ("step", "loss", "grad_norm", "learning_rate", "tokens", "trained_tokens", "total_tokens")
        unlike = [key for key in keys if a[key] != b[key]]
        wrong += [f"step {a['step']}: {key} is {a[key]} without a stop and {b[key]} after one" for key in unlike]
    changed = sorted(name for name, _ in whole.digests.items() ^ resumed.digests.items())
    if changed:
        wrong.append(f"{len(set(changed))} of {len(whole.digests)} tensors differ, such as {changed[0]}")
    if whole.data != resumed.data:
        wrong.append("the data position differs")
    return wrong


_SAME_STEP = 1e-4
"""The relative tolerance in float32, in which another order of summation gives about 1e-6. In bfloat16, several ranks
round norms and gradients that one process does not round; that gives 1e-3 after four steps and would hide a mistake."""

_MOST_LINES = 40
"""The number of lines shown from the end of each output stream of the processes."""

_SCRIPT = """
import sys
from sftron.train.signals import die_with_torchrun
die_with_torchrun()
from sftron.config import load_config
from sftron.train.ranks import end_ranks
from sftron.train.trainer import Trainer
trainer = Trainer(load_config(sys.argv[1], []))
trainer.build()
status = trainer.train()
end_ranks()
sys.exit(status)
"""


_TORCHRUN = """
import sys
from sftron.data.child_process import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
from torch.distributed.run import main
main()
"""


def torchrun(num_ranks: int) -> list[str]:
    """Returns the words of a torchrun command before the script; its ranks exit together with this process."""
    return [sys.executable, "-c", _TORCHRUN, str(os.getpid()), "--standalone", f"--nproc_per_node={num_ranks}"]


@rule(
    "ranks",
    if_red="A run on several GPUs would be another run. Train on one, and report it.",
)
def ranks(subject: Subject) -> Finding:
    """Several processes take the steps that one process takes."""
    subject.require_model()
    num_ranks = subject.sizes.ranks or 2
    if subject.ranks.device.type == "cuda" and torch.cuda.device_count() < num_ranks:
        raise NotMeasuredError(f"{num_ranks} ranks need as many GPUs; there are {torch.cuda.device_count()}")
    one = _train(_in_fp32(_short_run(subject, "one", batch_accumulation_per_replica=num_ranks)))
    several = _in_fp32(_short_run(subject, "several", batch_accumulation_per_replica=1))
    script, file = subject.scratch / "rank.py", subject.scratch / "several.yaml"
    script.write_text(_SCRIPT, encoding="utf-8")
    file.write_text(dump_config(several), encoding="utf-8")
    ended = subprocess.run(
        [*torchrun(num_ranks), str(script), str(file)],
        env={**os.environ, "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // num_ranks))},
        capture_output=True,
        text=True,
    )
    written = _last_lines(ended.stdout, ended.stderr)
    if ended.returncode:
        return Finding(False, f"torchrun ended with status {ended.returncode}", "status 0", written)
    losses = [(a["loss"], b["loss"]) for a, b in zip(one.steps, _steps_of(several), strict=True)]
    # The maximum of a tensor with NaN is NaN; the built-in max might ignore it.
    apart = torch.tensor([abs(a - b) / a for a, b in losses], dtype=torch.float64).max().item()
    steps = [f"step {n}: {a:.6f} of one process, {b:.6f} of {num_ranks}" for n, (a, b) in enumerate(losses, start=1)]
    return Finding(
        apart <= _SAME_STEP,
        f"{num_ranks} processes, {_NUM_STEPS} steps: {apart:.1e} apart",
        f"<= {_SAME_STEP:.0e}, relative",
        tuple(steps) if apart <= _SAME_STEP else (*steps, *written),
    )


def _last_lines(out: str, err: str) -> tuple[str, ...]:
    """Returns the last lines of the processes' output, without torchrun's failure report at its end."""
    of_ranks = re.split(r"^\S+ \S+ \d+ torch/distributed/elastic/\S+\] failed \(exitcode", err, flags=re.MULTILINE)[0]
    lines = [line for text in (of_ranks, out) for line in text.splitlines()[-_MOST_LINES:]]
    return tuple(line for line in lines if line.strip())


def _in_fp32(config: Config) -> Config:
    """Returns the configuration with float32 and the attention backend that runs on every device."""
    model = config.model.model_copy(update={"compute_dtype": "float32", "attention": "sdpa"})
    return config.model_copy(update={"model": model})


_NUM_UPDATES, _MOST_TOKENS = 6, 256
_SURE = 0.9
"""A stop token with at least this probability need not become more likely."""


@rule(
    "learning",
    if_red="The run would not learn. Lower optimizer.learning_rate if the loss rises or is NaN; look at what is "
    "trained with tools/inspect_data.py.",
)
def learning(subject: Subject) -> Finding:
    """With this optimizer and rate the loss falls on your data, and the stop token becomes likelier."""
    subject.require_model()
    documents, room = [], _MOST_TOKENS
    for document in subject.documents:
        if not documents or len(document) <= room:
            documents.append(document)
            room -= len(document)
    if not documents:
        raise NotMeasuredError("no conversation fits into --tokens")
    batch, model, options = subject.batch(documents), subject.model, subject.config.optimizer
    stop_ids = sorted({token_id for row in subject.rows for token_id in turn_stop_ids(row)})
    loss_before, stop_before = _measure(subject, batch, stop_ids)
    optimizer = make_optimizer(subject.config, model.train())
    results = [
        train_step(model, optimizer, [batch], max_grad_norm=options.max_grad_norm, loss_function=subject.loss)
        for _ in range(_NUM_UPDATES)
    ]
    loss, stop = _measure(subject, batch, stop_ids)
    # Comparisons with NaN are false. A NaN for stop tokens means that the batch has none.
    falls = all(result.is_finite for result in results) and loss < loss_before
    has_stops = not math.isnan(stop_before)
    stop_change = f", stop {stop_before:.1%} to {stop:.1%}" if has_stops else ""
    return Finding(
        falls and (not has_stops or stop >= min(stop_before, _SURE)),
        f"loss {loss_before:.3f} to {loss:.3f}{stop_change}",
        "falls; the stop rises",
        (
            f"{_NUM_UPDATES} steps of AdamW at the peak rate {options.learning_rate:g} on "
            f"{len(documents)} conversations of {len(batch.input_ids)} tokens",
            "stop: mean probability of the stop tokens that end these answers",
            subject.depth,
        ),
    )


def _measure(subject: Subject, batch: Batch, stop_ids: list[int]) -> tuple[float, float]:
    """Returns the loss of the batch, and the mean probability of its stop tokens, or NaN if it has none."""
    model = subject.model.eval()
    labels = [
        tensor.to(model.head_weight.device) for tensor in (batch.label_positions, batch.labels, batch.loss_weights)
    ]
    with torch.no_grad():
        total, measures = weighted_loss_sum(hidden_states(model, batch), model.head_weight, *labels)
    is_stop = torch.isin(batch.labels, torch.tensor(stop_ids, dtype=torch.int64))
    return total.item() / batch.weight_sum, measures.losses.cpu()[is_stop].neg().exp().mean().item()
