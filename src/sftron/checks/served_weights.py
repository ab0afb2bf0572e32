"""The log-probabilities of trained answers where they are served, against those of the folder's weights in fp32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from sftron.checkpoint.hf_weights import load_model
from sftron.checks.parity import Ids, native_logits
from sftron.checks.report import Check
from sftron.checks.served_prompts import LogProbabilities
from sftron.visible_text import counted

_MEAN_BOUND, _LARGEST_BOUND = 0.1, 1.0
"""In nats. Rounding to 16 bits moves the mean by less than a thousandth; weights without their adapter, by tenths."""

_REMEDY = (
    "Other weights are served, or quantization changes them. Serve the run's export, with its adapter; if that is, "
    "compare a file in 16 bits, and quantize less."
)


class ServedTurn(NamedTuple):
    """The ids of a conversation up to the end of a trained turn, which begins at `start`."""

    ids: Ids
    start: int


def check_weights(folder: Path, turns: Sequence[ServedTurn], served: LogProbabilities) -> Check:
    """Compares the log-probabilities of the turns' tokens. Computes the model in `folder` in fp32 on the CPU.

    Raises ValueError if the folder cannot be used, or log-probabilities are lacking or NaN.
    """
    model = load_model(folder, compute_dtype=torch.float32)
    differences = list[float]()
    for ids, start in turns:
        with torch.no_grad():
            logits_TV = native_logits(model, [ids])[0].double()
        targets = torch.tensor(ids[start:])[:, None]
        trained = logits_TV[start - 1 : -1].log_softmax(dim=-1).gather(1, targets)[:, 0]
        if not trained.isfinite().all():
            raise ValueError(f"--weights: the weights in {folder} give log-probabilities that are NaN; export others")
        theirs = served.log_probabilities(ids, start)
        if not all(map(math.isfinite, theirs)):
            raise ValueError("--weights: the server gives log-probabilities that are NaN; convert the folder again")
        differences += [there - own for there, own in zip(theirs, trained.tolist(), strict=True)]
    mean, largest = sum(differences) / len(differences), max(differences, key=abs)
    passed = abs(mean) <= _MEAN_BOUND and abs(largest) <= _LARGEST_BOUND
    tokens = f"{counted(len(differences), 'tokens')} of {counted(len(turns), 'turns')}"
    return Check(
        "weights",
        passed,
        f"{tokens}: served minus trained is {mean:+.4f} nats on average, {largest:+.4f} at most",
        f"{_MEAN_BOUND:g}, {_LARGEST_BOUND:g}",
        value=abs(mean),
        remedy="" if passed else _REMEDY,
        faults=() if passed else ("weights",),
    )
