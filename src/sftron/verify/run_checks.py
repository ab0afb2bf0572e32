"""Checks by training: a resume, several ranks, and a loss that goes down, in short runs of the real trainer."""

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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sftron.checkpoint.hf_weights import read_config
from sftron.config import Checkpoints, Config, Evaluation, Logging, dump_config
from sftron.config.schema import Parallelism
from sftron.data.types import Batch, Role
from sftron.models.loss import weighted_loss_sum
from sftron.train.setup import make_optimizer
from sftron.train.signals import StopRequest
from sftron.train.step import train_step
from sftron.train.trainer import Trainer
from sftron.verify.model_checks import hidden_states, unless_refused
from sftron.verify.subject import Subject
from sftron.verify.table import Finding, skipped

NUM_STEPS = 4
"""Steps of the run without a stop; the resumed one begins at half of them."""

_NUM_LAYERS, _BYTES_PER_PARAMETER = 2, 12


@dataclass(frozen=True, slots=True)
class Trace:
    """What a run leaves: its steps, digests of weights and optimizer state by name, the data position."""

    status: int
    steps: list[dict[str, Any]]
    digests: dict[str, str]
    data: str


def check_resume(subject: Subject) -> Finding:
    """Compares every bit of a run of 4 steps with one that resumes from a checkpoint in its middle."""
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
    """Returns the user's run with few steps, a shallow model, a folder below scratch, and only what a resume needs."""
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
    """Returns the configuration with another run name and other keys of `checkpoints`."""
    return config.model_copy(
        update={
            "general": config.general.model_copy(update={"run_name": name}),
            "checkpoints": config.checkpoints.model_copy(update=checkpoints),
        }
    )


def _shortage(subject: Subject, config: Config) -> str | None:
    """Returns a message where the disk has no room for three checkpoints, else None."""
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
    """Leaves the signals to the caller."""

    def listen(self) -> None:
        pass


def run_in_silence(config: Config) -> Trace:
    """Trains in this process, without output."""
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
    """Restores torch's setting, which a deterministic run changes for the whole process."""
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
        wrong.append("the data position differs")
    return wrong


_SAME_STEP = 1e-4
"""Relative, in float32, where sums in another order differ by about 1e-6. In bfloat16 several ranks round norms and
gradients that one process does not, which makes 1e-3 after four steps and would hide a mistake."""

_MOST_LINES = 40
"""Lines that are shown from the end of each stream of the processes."""

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
    """Returns the words, before those of the script, that start ranks on this machine, which end with this process."""
    return [sys.executable, "-c", _TORCHRUN, str(os.getpid()), "--standalone", f"--nproc_per_node={num_ranks}"]


def check_ranks(subject: Subject) -> Finding:
    """Compares the short run in one process with the same micro-batches spread over several."""
    if refused := unless_refused(subject):
        return refused
    num_ranks = subject.sizes.ranks or 2
    if subject.ranks.device.type == "cuda" and torch.cuda.device_count() < num_ranks:
        return skipped(f"{num_ranks} ranks need as many GPUs; there are {torch.cuda.device_count()}")
    one = run_in_silence(_in_fp32(short_run(subject, "one"), accumulation=num_ranks))
    several = _in_fp32(short_run(subject, "several"), accumulation=1)
    script, file = subject.scratch / "rank.py", subject.scratch / "several.yaml"
    script.write_text(_SCRIPT, encoding="utf-8")
    file.write_text(dump_config(several), encoding="utf-8")
    ended = subprocess.run(
        [*torchrun(num_ranks), str(script), str(file)],
        env={**os.environ, "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // num_ranks))},
        capture_output=True,
        text=True,
    )
    wrote = _what_ranks_wrote(ended.stdout, ended.stderr)
    if ended.returncode:
        return Finding(False, f"torchrun ended with status {ended.returncode}", "status 0", wrote)
    lines = (several.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [(a["loss"], json.loads(line)["loss"]) for a, line in zip(one.steps, lines, strict=True)]
    # The maximum of a tensor with a NaN is one; the built-in max may pass over it.
    apart = torch.tensor([abs(a - b) / a for a, b in losses], dtype=torch.float64).max().item()
    is_same = apart <= _SAME_STEP
    return Finding(
        is_same,
        f"{num_ranks} processes, {NUM_STEPS} steps: {apart:.1e} apart",
        f"<= {_SAME_STEP:.0e}, relative",
        (
            *(f"step {n}: {a:.6f} of one process, {b:.6f} of {num_ranks}" for n, (a, b) in enumerate(losses, start=1)),
            *(() if is_same else wrote),
        ),
    )


def _what_ranks_wrote(out: str, err: str) -> tuple[str, ...]:
    """Returns the last lines of the processes, without the report of torchrun that follows a failure."""
    of_ranks = re.split(r"^\S+ \S+ \d+ torch/distributed/elastic/\S+\] failed \(exitcode", err, flags=re.MULTILINE)[0]
    lines = [line for text in (of_ranks, out) for line in text.splitlines()[-_MOST_LINES:]]
    return tuple(line for line in lines if line.strip())


def _in_fp32(config: Config, *, accumulation: int) -> Config:
    """Returns the run in float32, with the attention that runs everywhere."""
    tokens = config.tokens.model_copy(update={"batch_accumulation_per_replica": accumulation})
    model = config.model.model_copy(update={"compute_dtype": "float32", "attention": "sdpa"})
    return config.model_copy(update={"tokens": tokens, "model": model})


_NUM_STEPS, _MOST_TOKENS = 6, 256
_SURE = 0.9
"""A stop token that is as likely as this need not become likelier."""


def check_learning(subject: Subject) -> Finding:
    """Compares the loss of a batch and the probability of its stop tokens before and after a few steps.

    It changes the model, so it comes last.
    """
    if refused := unless_refused(subject):
        return refused
    documents, room = [], _MOST_TOKENS
    for document in subject.documents:
        if not documents or len(document) <= room:
            documents.append(document)
            room -= len(document)
    if not documents:
        return skipped("no conversation fits into --tokens")
    batch, model = subject.batch(documents), subject.model
    stop_ids = _stop_ids(subject)
    loss_before, stop_before = _measure(subject, batch, stop_ids)
    optimizer = make_optimizer(subject.config, model.train())
    is_finite = True
    for _ in range(_NUM_STEPS):
        max_norm = subject.config.optimizer.max_grad_norm
        result = train_step(model, optimizer, [batch], max_grad_norm=max_norm, loss_function=subject.loss)
        is_finite &= result.is_finite
    loss, stop = _measure(subject, batch, stop_ids)
    # Written so that no comparison with a NaN passes.
    falls = is_finite and loss < loss_before
    stops = stop is None or stop_before is None or stop >= min(stop_before, _SURE)
    stop_change = "" if stop is None or stop_before is None else f", stop {stop_before:.1%} to {stop:.1%}"
    return Finding(
        falls and stops,
        f"loss {loss_before:.3f} to {loss:.3f}{stop_change}",
        "falls; the stop rises",
        (
            f"{_NUM_STEPS} steps of AdamW at the peak rate {subject.config.optimizer.learning_rate:g} on "
            f"{len(documents)} conversations of {len(batch.input_ids)} tokens",
            "stop: mean probability of the stop tokens that end these answers",
            subject.depth,
        ),
    )


def _stop_ids(subject: Subject) -> set[int]:
    """Returns the ids of the tokens that end the answers of the rows."""
    turns = ((row.tokenized, turn) for row in subject.rows for turn in row.tokenized.turns)
    return {
        int(row.input_ids[turn.stop]) for row, turn in turns if turn.role is Role.ASSISTANT and turn.stop is not None
    }


def _measure(subject: Subject, batch: Batch, stop_ids: set[int]) -> tuple[float, float | None]:
    """Returns the batch's loss, and the mean probability of its stop tokens."""
    model = subject.model
    device = model.head_weight.device
    with torch.no_grad():
        hidden = hidden_states(model.eval(), batch)
        labels = [tensor.to(device) for tensor in (batch.label_positions, batch.labels, batch.loss_weights)]
        total, measures = weighted_loss_sum(hidden, model.head_weight, *labels)
    is_stop = torch.isin(batch.labels, torch.tensor(sorted(stop_ids), dtype=torch.int64))
    stop = measures.losses.cpu()[is_stop].neg().exp().mean().item() if is_stop.any() else math.nan
    return total.item() / batch.weight_sum, None if math.isnan(stop) else stop
