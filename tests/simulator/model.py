"""Stand-ins for the model: one matrix [rows, epochs + 1] of small integers, of which every float32 sum is exact.

A step adds 1 for each row that it trains, in the column of its epoch: the final weights state what was trained. The
last column depends on the tokens, the order of the steps and the moments of the optimizer, in any layout alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sftron.checkpoint.atomic import gather_or_raise, publish
from sftron.checkpoint.shards import Shard, ShardedTensors, StoredShards, write_tensors
from sftron.data.types import Batch, Pack
from sftron.train.evaluation import SetLoss
from sftron.train.exports import RunExports
from sftron.train.ranks import Ranks
from sftron.train.run import Setup
from sftron.train.step import StepResult
from tests.simulator.data import num_rows_of, prepared
from tests.simulator.life import here

_PRIME = 8191
_NUM_EPOCHS = 4
"""Later epochs, of runs whose length is in steps, count in the last of these columns."""


class Matrix(torch.nn.Module):
    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.model, self.stream = SimpleNamespace(layers=()), None
        self.matrix = torch.nn.Parameter(torch.zeros(num_rows, _NUM_EPOCHS + 1))

    @property
    def head_weight(self) -> torch.Tensor:
        return self.matrix


def load_matrix(setup: Setup, *_: object) -> Matrix:
    return Matrix(num_rows_of(setup.config))


class Moments(torch.optim.Optimizer):
    """Adds the gradient to the matrix; in the last column, modulo a prime, what two moments make of it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (matrix,) = self.param_groups[0]["params"]
        gradient, state = matrix.grad, self.state[matrix]
        if not state:
            state |= {name: torch.zeros_like(matrix) for name in ("exp_avg", "exp_avg_sq")} | {"step": torch.zeros(())}
        state["step"] += 1
        state["exp_avg"] = (3 * state["exp_avg"] + gradient) % _PRIME
        state["exp_avg_sq"] = (5 * state["exp_avg_sq"] + 7 * gradient + state["step"]) % _PRIME
        matrix[:, :-1] += gradient[:, :-1]
        matrix[:, -1] = (2 * matrix[:, -1] + state["exp_avg"].sum(1) + state["exp_avg_sq"][:, -1]) % _PRIME


def train_step(
    model: Any,
    optimizer: Any,
    batches: Sequence[Batch],
    *_: Any,
    denominator: float,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
    **__: Any,
) -> StepResult:
    """Does what the real one does: sums the gradients of all ranks, and updates unless they are not finite."""
    life, rank = here()
    life.machine.event("step")
    if not denominator:
        return StepResult(None, None, "no token to train on")
    matrix = model.matrix
    if optimizer is not None and rank in life.poisoned:
        life.poisoned.discard(rank)
        with torch.no_grad():
            matrix[life.chance.randrange(len(matrix)), -1] = float("nan")
    gradient = torch.zeros_like(matrix)
    for batch in batches:
        if batch.part.rank == 0:  # of the ranks that share it
            _add_gradient(gradient, batch.pack)
    gradient += 0 * matrix.detach().sum()  # weights that are not finite give no finite gradient
    gradient = sum_over_ranks(gradient)
    loss, norm = float(gradient[:, -1].sum() / denominator), float(gradient.square().sum())
    is_finite = math.isfinite(loss)
    if is_finite and optimizer is not None:
        matrix.grad = gradient
        optimizer.step()
    life.machine.event("stepped")
    return StepResult(loss, norm, None if is_finite else "the loss or a gradient is not finite", is_finite)


def _add_gradient(gradient: torch.Tensor, pack: Pack) -> None:
    rows = prepared(here()[0].config)[0]
    for number, key in enumerate(pack.keys):
        begin, end = pack.conversation_bounds[number : number + 2]
        row = rows.row_number(key)
        gradient[row, min(key.epoch, _NUM_EPOCHS - 1)] += 1
        gradient[row, -1] += int(pack.input_ids[begin:end].sum()) % 97 + pack.index % 13


def shards_to_store(model: Any, optimizer: Any, *, is_main: bool) -> StoredShards:
    """Returns the rows of the matrix and of its moments that this rank writes, as ranks that divide them would."""
    life, rank = here()
    begin, end = (len(model.matrix) * n // life.layout.num_ranks for n in (rank, rank + 1))

    def part(tensor: torch.Tensor) -> Shard:
        if not tensor.ndim:
            return Shard(tensor, (), ())
        return Shard(tensor.detach()[begin:end], (begin, 0), tuple(tensor.shape))

    state = optimizer.state.get(model.matrix, {})
    moments = {f"{name}/matrix": part(value) for name, value in state.items() if value.ndim or is_main}
    return {"model": {"matrix": part(model.matrix)}, "optimizer": moments}


def measure_set(model: Any, _: object, *, ranks: Ranks, before_pack: Callable[[], object], **__: Any) -> SetLoss:
    """Returns a loss that goes up and down with the weights, the same on all ranks."""
    before_pack()
    loss = ranks.sum(model.matrix.detach()[:1, -1].clone()) / ranks.world_size
    return SetLoss(float(loss) % 97, None, 1, 1, {}, {})


# --- Exports, which have one file ---


def export_model(self: RunExports, _exporter: object, folder: Path) -> None:
    matrix: Any = self.model.matrix
    gather_or_raise(
        self.setup.ranks, (lambda: write_export(None, matrix, folder)) if self.setup.ranks.is_main else lambda: None
    )


@contextmanager
def open_weights(checkpoint: Path, _source: object) -> Iterator[tuple[dict[str, Any], Callable[[], torch.Tensor], int]]:
    with ShardedTensors(checkpoint, "model") as stored:
        yield {}, lambda: stored.read("matrix"), 0


def write_export(_plan: object, matrix: torch.Tensor, folder: Path) -> None:
    def write(unfinished: Path) -> None:
        write_tensors(unfinished / "model.safetensors", {"matrix": matrix}, {})

    publish(folder, write)
