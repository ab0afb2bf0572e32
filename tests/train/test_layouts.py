"""general.deterministic: layout: weights and optimizer state have the same bits on any layout, and through hops."""

import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sftron.config import ConfigError, load_config
from sftron.models import exact_sums
from sftron.models.exact_sums import ExactSums, exact_norm
from sftron.models.sharding import mesh_of_one_rank
from sftron.train.measured_memory import LiveMemory
from sftron.train.ranks import end_ranks, start_ranks
from tests.conftest import rest_nightly
from tests.models.reference import EXPERTS
from tests.train import ranks
from tests.train.runs import bits, make_model_folder, metrics, opened, settings, write_config, write_rows

_PACKS_A_STEP = 4


class Layout(NamedTuple):
    num_ranks: int
    dp_replicate: int
    num_workers: int


LAYOUTS = [
    *(Layout(1, 1, 0), Layout(2, 1, 0), Layout(4, 2, 1), Layout(4, 1, 0)),
    *(Layout(1, 1, 2), Layout(2, 1, 1), Layout(4, 2, 0), Layout(2, 1, 2)),
]
FEW = LAYOUTS[:3]
# The sizes of experts leave shards whose last values a fused optimizer would round otherwise.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32": ({}, {}),
    "bfloat16": ({}, {"model__compute_dtype": "bfloat16"}),
    "adapters": ({}, {"lora__rank": 4}),
    "experts": (EXPERTS | {"model_type": "qwen3_moe"}, {"model__router_aux_loss_coef": 0.1}),
}


class Runs:
    """Runs of one model on its rows, in one folder. Each step has four packs, on any layout."""

    def __init__(self, folder: Path, name: str, deterministic: str | bool = "layout") -> None:
        overrides, self._options = MODELS[name]
        self._folder, self._deterministic = folder, deterministic
        self._model = make_model_folder(folder / "model", **overrides)
        write_rows(folder / "rows.jsonl", 200)

    def train(self, run: str, layout: Layout, num_steps: int) -> None:
        """Trains a run up to a step, on so many ranks, from its newest checkpoint if it has one."""
        file = self._config(run, layout, num_steps, deterministic=self._deterministic)
        ended = ranks.launch(layout.num_ranks, ranks.train, file, folder=self._folder)
        assert [each.exit_code for each in ended] == [0] * layout.num_ranks, ended[0].err[-2000:]

    def digest(self, run: str, num_steps: int) -> str:
        """Returns the SHA-256 of all weights and all of the optimizer's state, read by one rank."""
        trainer = opened(load_config(self._config(run, Layout(1, 1, 0), num_steps + 1, deterministic=False)))
        assert trainer.progress.step == num_steps
        return hashlib.sha256(b"".join(bits(trainer))).hexdigest()

    def losses(self, run: str) -> list[tuple[float, float]]:
        return [(line["loss"], line["grad_norm"]) for line in metrics(self._folder / "runs" / run) if "loss" in line]

    def _config(self, run: str, layout: Layout, num_steps: int, *, deterministic: str | bool) -> Path:
        options = {
            "general__run_name": run,
            "general__deterministic": deterministic,
            "tokens__batch_accumulation_per_replica": _PACKS_A_STEP // layout.num_ranks,
            "tokens__train_steps": num_steps,
            "parallelism__dp_replicate": layout.dp_replicate,
            "data__num_workers": layout.num_workers,
            "data__num_lanes": 8,
            "optimizer__schedule": "constant",
            "logging__interval": 1,
        }
        return write_config(
            self._folder / f"{run}.yaml", settings(self._folder, self._model, **options | self._options)
        )


def digests_of(runs: Runs, layouts: Sequence[Layout], num_steps: int) -> dict[str, str]:
    """Returns the digest of a run on each layout, and of one that hops through all of them."""
    found = dict[str, str]()
    for layout in layouts:
        runs.train(name := "-".join(map(str, layout)), layout, num_steps)
        found[name] = runs.digest(name, num_steps)
    for number, layout in enumerate(layouts, start=1):
        runs.train("hops", layout, num_steps * number // len(layouts))
    found["hops"] = runs.digest("hops", num_steps)
    return found


@pytest.mark.parametrize("name", rest_nightly(MODELS, ["bfloat16", "experts"]))
def test_weights_and_optimizer_state_have_the_same_bits_on_any_layout(tmp_path: Path, name: str) -> None:
    runs = Runs(tmp_path, name)
    found = digests_of(runs, FEW, 6)
    assert len(set(found.values())) == 1, found
    first, *others = ("-".join(map(str, layout)) for layout in FEW)
    assert all(runs.losses(each) == runs.losses(first) for each in (*others, "hops"))


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_fifty_steps_have_the_same_bits_on_eight_layouts_and_through_them(tmp_path: Path, name: str) -> None:
    found = digests_of(Runs(tmp_path, name), LAYOUTS, 50)
    print(name, found)
    assert len(set(found.values())) == 1, found


def sum_in_slices(slice_size: int, path: Path) -> None:
    """The gradients of two steps of two packs a rank, reduced in slices, and their norm."""
    exact_sums._SLICE = slice_size
    started, generator = start_ranks(), torch.Generator().manual_seed(int(os.environ["RANK"]))
    reduction, found = exact_sums._ExactReduceScatter(None), list[torch.Tensor]()
    for size in (1, 37, 101):
        for is_last in (False, True):
            reduction.is_last, output = is_last, torch.empty(size)
            packs = torch.randn(size * started.world_size, generator=generator)
            reduction(output, packs, torch.distributed.group.WORLD, None)
        gradient = torch.nn.Parameter(output)
        gradient.grad = output
        found += [output, exact_norm([gradient])]
    assert all(each.isfinite().all() and each.any() for each in found)
    path.with_suffix(f".{started.rank}").write_bytes(b"".join(each.numpy().tobytes() for each in found))
    end_ranks()


def test_sums_in_slices_have_the_same_bits(tmp_path: Path) -> None:
    for slice_size in (2**26, 16):
        ended = ranks.launch(2, sum_in_slices, slice_size, tmp_path / f"{slice_size}", folder=tmp_path)
        assert [each.exit_code for each in ended] == [0, 0], ended[0].err[-2000:]
    for rank in (0, 1):
        whole, sliced = ((tmp_path / f"{size}.{rank}").read_bytes() for size in (2**26, 16))
        assert whole == sliced
        assert len(whole) == 4 * (1 + 37 + 101 + 3)


def test_sums_need_little_memory_beside_their_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_sums, "_SLICE", 2**10, raising=False)
    gradients = torch.randn(2**16)
    reduction = exact_sums._ExactReduceScatter(None)
    with LiveMemory() as memory:
        reduction.sum_in_place(gradients)
    assert memory.peak < 8 * 2**16 + 64 * 2**10
    parameter = torch.nn.Parameter(gradients)
    parameter.grad = gradients
    with LiveMemory() as memory:
        exact_norm([parameter])
    assert memory.peak < 4 * 2**16 + 64 * 2**10  # of the largest one's absolute values


def test_a_tensor_of_another_shape_does_not_replace_a_sum() -> None:
    reduction = exact_sums._ExactReduceScatter(None)
    reduction.is_last = False
    reduction.sum_in_place(torch.ones(4))
    with pytest.raises(AssertionError, match=r"tensors \(4,\) was given \(3,\)"):
        reduction.sum_in_place(torch.ones(3))


def test_without_it_the_bits_depend_on_the_layout(tmp_path: Path) -> None:
    found = digests_of(Runs(tmp_path, "float32", deterministic=True), FEW, 6)
    assert len(set(found.values())) > 1


def test_what_it_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    refused = {"parallelism__context": 2, "optimizer__name": "adamw_8bit"}
    options = {"general__deterministic": "layout", **refused}
    with pytest.raises(ConfigError) as error:
        load_config(write_config(tmp_path / "run.yaml", settings(tmp_path, tmp_path, **options)))
    for name in refused:
        assert name.replace("__", ".") in str(error.value)


def test_a_copy_on_each_rank_is_refused_by_name(tmp_path: Path) -> None:
    """FSDP2 adds their gradients as floats, without a place for another sum."""
    write_rows(tmp_path / "rows.jsonl", 20)
    options = {"general__deterministic": "layout", "parallelism__dp_replicate": 2}
    file = write_config(tmp_path / "run.yaml", settings(tmp_path, make_model_folder(tmp_path / "model"), **options))
    ended = ranks.launch(2, ranks.train, file, folder=tmp_path)
    assert [each.exit_code for each in ended] == [2, 2]
    assert "parallelism.dp_replicate: 2 copies, one on each rank" in ended[0].err
    assert "set dp_replicate to 1" in ended[0].err


@pytest.mark.parametrize("value", [32.0, float("nan"), float("-inf")])
def test_a_gradient_out_of_range_makes_loss_and_gradients_nan(value: float, tmp_path: Path) -> None:
    (ended,) = ranks.launch(1, _out_of_range, value, folder=tmp_path)
    assert ended.exit_code == 0, ended.err


def _out_of_range(value: float) -> int:
    model, mesh = torch.nn.Linear(2, 1, bias=False), mesh_of_one_rank(torch.device("cpu"))
    fully_shard(model, mesh=mesh)
    sums = ExactSums(model, mesh)

    def step(*inputs: float) -> tuple[float, list[float]]:
        """Returns the loss and the gradient of micro-batches; the gradient of each is its input."""
        model.zero_grad()
        for number, each in enumerate(inputs, start=1):
            output = model(torch.tensor([[each, 0.25]])).sum()
            sums.before_backward(torch.tensor(0.5), is_last=number == len(inputs))
            output.backward()
        gradient = model.weight.grad
        assert isinstance(gradient, DTensor)
        return float(sums.finish()), gradient.full_tensor().flatten().tolist()

    loss, gradient = step(value, 0.5)
    assert math.isnan(loss)
    assert not all(map(math.isfinite, gradient))
    assert step(0.125, 0.5) == (1.0, [0.625, 0.5])  # nothing is left of it
    return 0


def test_the_norm_is_that_of_all_gradients() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((7, 3), (5,), (2, 2, 2))]
    generator = torch.Generator().manual_seed(0)
    for scale, parameter in zip((1e-6, 1.0, 30.0), parameters, strict=True):
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    expected = torch.cat([each.grad.double().flatten() for each in parameters if each.grad is not None]).norm()
    assert float(exact_norm(parameters)) == pytest.approx(float(expected), rel=1e-6)
