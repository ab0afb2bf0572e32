"""Several processes take the steps that one process takes: short runs of the real trainer, started by torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import torch

from sftron.config import Config, dump_config
from sftron.verify.model_checks import unless_refused
from sftron.verify.resume_check import NUM_STEPS, run_in_silence, short_run
from sftron.verify.run_check import Finding, skipped
from sftron.verify.run_subject import Subject

_SAME_STEP = 1e-4
"""Relative, in float32, where sums in another order part by some 1e-6. In bfloat16 several ranks round norms and
gradients that one process does not, which after four steps is 1e-3, and hides what this looks for."""

_MOST_LINES = 40
"""The last ones of each stream of the processes."""

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
    """The short run in one process, and its micro-batches dealt to several."""
    if refused := unless_refused(subject):
        return refused
    num_ranks = subject.sizes.ranks or 2
    if subject.ranks.device.type == "cuda" and torch.cuda.device_count() < num_ranks:
        return skipped(f"{num_ranks} ranks need as many GPUs; there are {torch.cuda.device_count()}")
    one = run_in_silence(_in_fp32(short_run(subject, "one"), accumulation=num_ranks))
    together = _in_fp32(short_run(subject, "several"), accumulation=1)
    script, file = subject.scratch / "rank.py", subject.scratch / "several.yaml"
    script.write_text(_SCRIPT, encoding="utf-8")
    file.write_text(dump_config(together), encoding="utf-8")
    ended = subprocess.run(
        [*torchrun(num_ranks), str(script), str(file)],
        env={**os.environ, "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // num_ranks))},
        capture_output=True,
        text=True,
    )
    wrote = _what_ranks_wrote(ended.stdout, ended.stderr)
    if ended.returncode:
        return Finding(False, f"torchrun ended with status {ended.returncode}", "status 0", wrote)
    lines = (together.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
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
    """The run in float32, with the attention that runs everywhere."""
    tokens = config.tokens.model_copy(update={"batch_accumulation_per_replica": accumulation})
    model = config.model.model_copy(update={"compute_dtype": "float32", "attention": "sdpa"})
    return config.model_copy(update={"tokens": tokens, "model": model})
