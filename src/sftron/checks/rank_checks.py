"""Checks that several processes train as one does, whether each rank has its own packs or ranks share them (law 8)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sftron.checks.report import Finding, NotMeasuredError
from sftron.checks.run_checks import NUM_STEPS, short_run, steps_of, train
from sftron.checks.subject import Subject
from sftron.config import Config, dump_config
from sftron.config.schema import Parallelism
from sftron.data.loader import collate
from sftron.kernels.device import is_gpu, num_gpus
from sftron.models.sharding import whole_head
from sftron.train.objective import hidden_states
from sftron.train.trainer import Trainer

_SAME_STEP = 1e-4
"""The relative tolerance in float32, in which another order of summation gives about 1e-6. In bfloat16, several ranks
round norms and gradients that one process does not round; that gives 1e-3 after four steps and would hide a mistake."""

_MOST_LINES = 80
"""The number of lines shown from the end of each output stream of the processes."""

_SAME_ADAPTERS = 1e-3
"""The same for trained adapters. Adam divides by the size of gradients, so rounding moves values without a gradient."""

_SCRIPT = """
import os, sys
from sftron.train.signals import die_with_torchrun
die_with_torchrun()
from sftron.config import load_config
from sftron.errors import exit_with
from sftron.train.ranks import end_ranks
from sftron.train.trainer import open_trainer
trainer = open_trainer(load_config(sys.argv[1], []))
if trainer.ranks.context.size > 1:
    from safetensors.torch import save_file
    from sftron.checks.rank_checks import first_hidden_states
    save_file({"hidden": first_hidden_states(trainer)}, f"{sys.argv[1]}-hidden-{os.environ['RANK']}.safetensors")
status = trainer.train()
if trainer.config.lora is not None:
    from safetensors.torch import save_file
    from sftron.train.build_model import adapter_tensors
    save_file(adapter_tensors(trainer.model), f"{sys.argv[1]}-{os.environ['RANK']}.safetensors")
end_ranks()
exit_with(lambda: status)
"""


_TORCHRUN = """
import sys
from sftron.data.child_process import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
from torch.distributed.run import main
main()
"""


def torchrun(num_ranks: int) -> list[str]:
    """Returns the torchrun command up to the script; its ranks end together with this process."""
    return [sys.executable, "-c", _TORCHRUN, str(os.getpid()), "--standalone", f"--nproc_per_node={num_ranks}"]


def ranks(subject: Subject) -> Finding:
    num_ranks = subject.num_ranks
    one = _in_fp32(short_run(subject, "one", batch_accumulation_per_replica=num_ranks))
    several = _in_fp32(short_run(subject, "several", batch_accumulation_per_replica=1))
    _require_devices(subject, num_ranks)
    of_one = train(one)
    file, status, written = _launch(subject, several, num_ranks)
    if status:
        return Finding(False, f"torchrun ended with status {status}", "status 0", written)
    apart, steps = _compare_steps(of_one.steps, steps_of(several), "loss", f"of {num_ranks}")
    measured = f"{num_ranks} processes, {NUM_STEPS} steps: {apart:.1e} apart"
    allowed, is_right, unlike = f"<= {_SAME_STEP:.0e}, relative", apart <= _SAME_STEP, ()
    if subject.config.lora is not None:
        files = [Path(f"{file}-{rank}.safetensors") for rank in range(num_ranks)]
        distance, unlike = _compare_adapters(of_one.adapters, [load_file(each) for each in files])
        is_right = is_right and distance <= _SAME_ADAPTERS and not unlike
        measured = f"{num_ranks} processes: loss {apart:.0e}, adapters {distance:.0e} apart"
        allowed = f"<= {_SAME_STEP:.0e}, {_SAME_ADAPTERS:.0e}"
    return Finding(is_right, measured, allowed, (*unlike[:5], *steps, *(() if is_right else written)))


def context(subject: Subject) -> Finding:
    num_ranks, hidden = subject.num_sharing, list[Tensor]()
    one = _in_fp32(short_run(subject, "unshared"))
    shared = _in_fp32(short_run(subject, "shared"))
    shared = shared.model_copy(update={"parallelism": Parallelism(context=num_ranks)})
    _require_devices(subject, num_ranks)
    of_one = train(one, lambda trainer: hidden.append(first_hidden_states(trainer)))
    file, status, written = _launch(subject, shared, num_ranks)
    if status:
        return Finding(False, f"torchrun ended with status {status}", "status 0", written)
    loss, losses = _compare_steps(of_one.steps, steps_of(shared), "loss", f"of {num_ranks} that share")
    norm, norms = _compare_steps(of_one.steps, steps_of(shared), "grad_norm", f"of {num_ranks} that share")
    parts = [load_file(f"{file}-hidden-{rank}.safetensors")["hidden"] for rank in range(num_ranks)]
    change = ((torch.cat(parts) - hidden[0]).abs().max() / hidden[0].abs().max()).item()
    is_right = bool((torch.tensor([loss, norm, change]) <= _SAME_STEP).all())  # False for NaN
    measured = f"{num_ranks} ranks a pack: loss {loss:.0e}, norm {norm:.0e}, hidden {change:.0e} apart"
    sizes = f"the first pack has {len(hidden[0])} tokens: {' + '.join(str(len(part)) for part in parts)}"
    return Finding(
        is_right, measured, f"<= {_SAME_STEP:.0e}, relative", (sizes, *losses, *norms, *(() if is_right else written))
    )


def first_hidden_states(trainer: Trainer) -> Tensor:
    """Returns the hidden states of the first pack, or of this rank's part of it, fp32 [T, H] on the CPU."""
    dataset = trainer.setup.data.dataset
    dataset.seek(0, {})  # the main rank has drawn a pack to show it; the loader seeks again
    batch = collate(next(iter(dataset)), keep_tail=False, context=trainer.ranks.context)
    with torch.no_grad(), whole_head(trainer.model):
        return hidden_states(trainer.model, batch).float().cpu()


def _require_devices(subject: Subject, num_ranks: int) -> None:
    if is_gpu(subject.ranks.device) and num_gpus() < num_ranks:
        raise NotMeasuredError(f"{num_ranks} ranks need {num_ranks} GPUs, but this machine has {num_gpus()}")


def _launch(subject: Subject, config: Config, num_ranks: int) -> tuple[Path, int, tuple[str, ...]]:
    """Trains with this number of ranks. Returns the configuration file, the exit status, and the end of the output."""
    script, file = subject.scratch / "rank.py", subject.scratch / f"{config.general.run_name}.yaml"
    script.write_text(_SCRIPT, encoding="utf-8")
    file.write_text(dump_config(config), encoding="utf-8")
    ended = subprocess.run(
        [*torchrun(num_ranks), str(script), str(file)],
        env={**os.environ, "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // num_ranks))},
        capture_output=True,
        text=True,
    )
    written = (line for text in (ended.stderr, ended.stdout) for line in text.splitlines()[-_MOST_LINES:])
    return file, ended.returncode, tuple(written)


def _compare_steps(
    of_one: Sequence[Mapping[str, Any]], of_ranks: Sequence[Mapping[str, Any]], key: str, others: str
) -> tuple[float, list[str]]:
    """Returns the largest relative difference of a number over the steps, and a line for each step."""
    pairs = [(a[key], b[key]) for a, b in zip(of_one, of_ranks, strict=True)]
    # The maximum of a tensor with NaN is NaN; the built-in max might ignore it.
    apart = torch.tensor([abs(a - b) / a for a, b in pairs], dtype=torch.float64).max().item()
    lines = [f"step {n}: {key} {a:.6f} of one process, {b:.6f} {others}" for n, (a, b) in enumerate(pairs, start=1)]
    return apart, lines


def _compare_adapters(
    of_one: Mapping[str, Tensor], of_ranks: Sequence[Mapping[str, Tensor]]
) -> tuple[float, tuple[str, ...]]:
    """Returns the largest relative distance between a rank's tensor and the single process's, and the names of tensors
    that differ in any bit between ranks."""
    distances, unlike = [], []
    for name, value in of_one.items():
        found = [each[name] for each in of_ranks]
        distances += [(each - value).norm() / value.norm() for each in found]
        if not all(each.equal(found[0]) for each in found):
            unlike.append(f"{name} differs between ranks")
    return torch.stack(distances).max().item(), tuple(unlike)


def _in_fp32(config: Config) -> Config:
    """Returns the configuration with float32 and the attention backend that runs on every device."""
    model = config.model.model_copy(update={"compute_dtype": "float32", "attention": "sdpa"})
    return config.model_copy(update={"model": model})
