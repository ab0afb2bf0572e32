"""What a seed draws: the data of a run, its layouts and checkpoints, and its faults."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from sftron.config import Config
from tests.simulator.life import Layout

Kind = Literal[
    "kill a rank",
    "kill all",
    "lose power",
    "fill the disk",
    "fail an fsync",
    "slow the disk",
    "jump in time",
    "a worker dies",
    "a worker hangs",
    "hang a rank",
    "ask to stop",
    "flip a bit",
    "rot",
    "hop",
]
"""The faults: the last two come between lives."""
_FREQUENCIES = {"kill a rank": 3, "kill all": 4, "lose power": 6, "fill the disk": 2, "a worker dies": 2}
_IN_A_LIFE = {kind: _FREQUENCIES.get(kind, 1) for kind in get_args(Kind) if kind not in ("rot", "hop")}
_PLACES = ("rename", "fsync", "write", "create", "mkdir", "unlink", "symlink", "rmdir", "gather", "step", "pack")
_PACKS_A_STEP = 4


@dataclass
class Fault:
    kind: Kind
    rank: int
    place: str
    """The event at which it comes; empty for any."""
    countdown: int
    """How many such events come before."""
    length: int
    """How many events it lasts, if it lasts."""


def draw_data(chance: random.Random) -> dict[str, Any]:
    """Draws what the end of a run depends on; few values, because each has a run that is left alone."""
    kind = chance.choice(("planned", "lanes", "minibatch", "mixture", "stream"))
    pool = {"packing": {"pool_size": 6}}
    if kind == "stream":
        data = {"datasets": [{"path": "40", "streaming": True}], "num_lanes": 8, **pool}
        return {"data": data, "tokens": {"train_steps": 9}}
    if kind == "mixture":
        datasets = [{"path": "13", "weight": 2.0}, {"path": "8", "weight": 1.0}]
        return {"data": {"datasets": datasets, "num_lanes": 8, **pool}, "tokens": {"train_steps": 8}}
    num_rows, num_epochs = chance.choice(((40, 2), (30, 3), (72, 1)))
    data = {"datasets": [{"path": str(num_rows)}]}
    tokens = {"train_epochs": num_epochs}
    if kind == "minibatch":
        data |= {"num_lanes": 4, "packing": {"strategy": "minibatch"}}
        return {"data": data, "tokens": tokens | {"micro_batch_size": 2}}
    return {"data": {**data, "num_lanes": "auto" if kind == "planned" else 8, **pool}, "tokens": tokens}


def draw_layout(chance: random.Random, num_lanes: int | Literal["auto"]) -> Layout:
    num_ranks, context = chance.choice(((1, 1), (1, 1), (2, 1), (2, 1), (4, 1), (2, 2), (4, 2)))
    fitting = [n for n in range(4) if num_lanes == "auto" or num_lanes % (num_ranks // context * max(1, n)) == 0]
    return Layout(num_ranks, context, chance.choice(fitting))


def draw_checkpoints(chance: random.Random) -> dict[str, Any]:
    return {
        "interval": chance.choice((1, 2, 2, 3, "auto")),
        "keep_last": chance.choice((2, 2, 3)),
        "async": chance.random() < 0.4,
        "export_interval": chance.choice((None, 2)),
    }


def config_of(output: Path, data: dict[str, Any], layout: Layout, checkpoints: dict[str, Any]) -> Config:
    accumulation = _PACKS_A_STEP * layout.context // layout.num_ranks
    evaluation = {"datasets": [{"path": "held out"}], "interval": 2} if "keep_best" in checkpoints else {}
    tree = {
        "general": {"run_name": "run", "output_dir": str(output), "seed": 7},
        "model": {"path": "model"},
        "data": {**data["data"], "num_workers": layout.num_workers, "max_dropped_share": 1.0},
        "tokens": {"sequence_length": 24, "batch_accumulation_per_replica": accumulation, **data["tokens"]},
        "parallelism": {"context": layout.context},
        "optimizer": {"schedule": "constant", "learning_rate": 1.0},
        "checkpoints": checkpoints,
        "evaluation": evaluation,
    }
    return Config.model_validate(tree)


def draw_faults(chance: random.Random, num_ranks: int) -> list[Fault]:
    """Draws the faults of one life."""
    faults = list[Fault]()
    for kind in chance.choices([*_IN_A_LIFE], [*_IN_A_LIFE.values()], k=chance.choice((1, 1, 2, 3))):
        place = chance.choice(("", *_PLACES))
        countdown = chance.randint(0, 12 if place else 250 * num_ranks)
        faults.append(Fault(kind, chance.randrange(num_ranks), place, countdown, chance.randint(5, 200)))
    return faults
