"""How long a trainer's learning-rate schedule is, against its run: measured by stepping a copy of it."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from sftcheck.restore import restored
from sftcheck.tolerances import SAME_RATE

_LEAST_STEPS, _MOST_STEPS = 20_000, 200_000
"""How many steps a schedule is followed: ten times the run, within these."""
_OF_RUN = 2
"""A schedule that is this much longer or shorter than the run is named."""


def num_steps_of(trainer: Any, num_rows: int) -> int:
    """Returns the number of optimizer steps of the run."""
    args = trainer.args
    if args.max_steps > 0:
        return int(args.max_steps)
    of_batch = trainer._train_batch_size * args.world_size
    num_batches = math.ceil(num_rows / of_batch)
    return math.ceil(math.ceil(num_batches / args.gradient_accumulation_steps) * args.num_train_epochs)


def schedule_note(trainer: Any, num_steps: int) -> str:
    """Describes a schedule whose end is far from the run's end; "" if it fits, is constant or cannot be followed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            horizon = min(max(10 * num_steps, _LEAST_STEPS), _MOST_STEPS)
            rates = np.array(list(islice(rates_of(trainer, num_steps), horizon)))
        except Exception:  # of a schedule that needs more than steps, or of the trainer's own code
            return ""
    rounding = SAME_RATE * rates.max()
    highest = int(np.argmax(rates >= rates.max() - rounding))
    lowest = highest + int(np.argmax(rates[highest:] <= rates[highest:].min() + rounding))
    if highest > num_steps:
        return f"the learning rate rises for {highest:,} steps, and the run has {num_steps:,}"
    if rates[highest] - rates[lowest] <= rounding or num_steps / _OF_RUN <= lowest <= num_steps * _OF_RUN:
        return ""
    if lowest == len(rates) - 1 and len(rates) == horizon:
        is_begun = rates[min(num_steps, lowest)] < 0.9 * rates[highest]  # one without an end, as of inverse roots
        return "" if is_begun else f"the learning rate falls for more than {horizon:,} steps, the run has {num_steps:,}"
    return f"the learning rate is lowest after {lowest:,} steps, and the run has {num_steps:,}"


def rates_of(trainer: Any, num_steps: int) -> Iterator[float]:
    """Yields the learning rate of each step, as far as the schedule goes, of the first group of tensors."""
    given = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)  # within that of accelerate
    tensors = [torch.zeros(1, requires_grad=True) for _ in range(1 if given is None else len(given.base_lrs))]
    optimizer = torch.optim.SGD([{"params": [each]} for each in tensors], lr=trainer.args.learning_rate)
    if given is None:
        with restored(trainer, "lr_scheduler"):
            scheduler = trainer.create_scheduler(num_steps, optimizer)
    else:
        for group, own in zip(optimizer.param_groups, given.optimizer.param_groups, strict=True):
            group.update({name: value for name, value in own.items() if name != "params"})
        scheduler = copy.deepcopy(given, {id(given.optimizer): optimizer})
    while True:
        yield float(optimizer.param_groups[0]["lr"])
        try:
            with warnings.catch_warnings(action="ignore"):  # no optimizer steps here
                scheduler.step()
        except ValueError:  # OneCycleLR has an end
            return
