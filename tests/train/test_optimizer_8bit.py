"""AdamW with moments in 8 bits: bitsandbytes' own numbers, on any ranks, and through checkpoints."""

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from sftron.checkpoint.checkpoint import CheckpointError, load_checkpoint
from sftron.models.quantization import from_stored
from sftron.models.sharding import whole
from sftron.train.optimizer import make_by_name, set_learning_rate
from sftron.train.ranks import end_ranks, start_ranks
from sftron.train.trainer import Trainer, open_trainer
from tests.checkpoint.saving import save_checkpoint
from tests.conftest import LazyModule
from tests.train.ranks import launch
from tests.train.runs import bits, make_config, make_model_folder, on_each_step, stop_in
from tests.train.runs import run as run_trainer

bitsandbytes = LazyModule("bitsandbytes")

OPTIONS: dict[str, Any] = {"learning_rate": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


SHAPES = {"wide": (20, 512), "narrow": (24, 192), "low_rank": (320, 16), "odd": (272, 16), "small": (10, 256)}
"""Blocks of 256 values are one row, four rows and sixteen rows; those of `odd` do not fit the shards of two ranks."""


class Matrices(nn.Module):
    def __init__(self, leave_out: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in SHAPES.items():
            if name == leave_out:
                continue
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        self.norm = nn.Parameter(torch.ones(4096))


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Gradients depend on the step and the weights alone, and not on the ranks."""
    for step in steps:
        for number, parameter in enumerate(model.parameters()):
            torch.manual_seed(100 * step + number)
            gradient = 0.1 * whole(parameter.detach()) + torch.randn(parameter.shape)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        set_learning_rate(optimizer, 1e-2 / (1 + step))
        optimizer.step()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def in_8_bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    return {name for name, each in model.named_parameters() if optimizer.state[each]["exp_avg"].dtype == torch.uint8}


def test_updates_are_those_of_bitsandbytes_and_of_torch_to_the_bit() -> None:
    model, reference = Matrices(), Matrices()
    optimizer = make_by_name(model.named_parameters(), **OPTIONS, name="adamw_8bit")
    decay = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    matrices = [reference.get_parameter(name) for name in ("wide", "narrow", "low_rank", "odd")]
    theirs = [
        bitsandbytes.optim.AdamW8bit(matrices, **decay, weight_decay=0.1),
        torch.optim.AdamW([reference.get_parameter("small")], **decay, weight_decay=0.1, fused=True),
        torch.optim.AdamW([reference.get_parameter("norm")], **decay, weight_decay=0.0, fused=True),
    ]

    class Both:
        param_groups = tuple(group for each in theirs for group in each.param_groups)

        def step(self) -> None:
            for each in theirs:
                each.step()

    before = values(model)
    train(model, optimizer, range(4))
    train(reference, Both(), range(4))

    assert in_8_bits(model, optimizer) == {"wide", "narrow", "low_rank", "odd"}
    for name, value in values(model).items():
        assert not value.equal(before[name])
        assert value.equal(reference.get_parameter(name)), name


def train_and_save(folder: Path, leave_out: str | None, checkpoint: Path | None) -> None:
    """Trains two steps and saves, or resumes from a checkpoint; then trains two more."""
    ranks = start_ranks()
    model = Matrices(leave_out)
    if ranks.mesh is not None:
        fully_shard(model, mesh=ranks.mesh)
    optimizer = make_by_name(model.named_parameters(), **OPTIONS, name="adamw_8bit")
    if checkpoint is None:
        train(model, optimizer, range(2))
        save_checkpoint(folder, 2, model, optimizer, ranks=ranks)
    else:
        load_checkpoint(checkpoint, model=model, optimizer=optimizer)
    train(model, optimizer, range(2, 4))
    assert all(isinstance(parameter, DTensor) == (ranks.world_size > 1) for parameter in model.parameters())
    result = values(model)
    if ranks.is_main:
        torch.save({"values": result, "8bit": in_8_bits(model, optimizer)}, folder / "result.pt")
    end_ranks()


def run(num_ranks: int, folder: Path, leave_out: str | None, checkpoint: Path | None = None) -> Any:
    """Returns what `train_and_save` saved, or raises what the first rank wrote to standard error.

    One rank is this process, as each new one imports bitsandbytes for seconds.
    """
    folder.mkdir()
    if num_ranks == 1:
        train_and_save(folder, leave_out, checkpoint)
        return torch.load(folder / "result.pt", weights_only=True)
    for ended in launch(num_ranks, train_and_save, folder, leave_out, checkpoint, folder=folder):
        if ended.exit_code:
            raise RuntimeError(ended.err)
    return torch.load(folder / "result.pt", weights_only=True)


@pytest.mark.parametrize(
    "hops", [[(1, 2), (2, 1)], pytest.param([(1, 1), (2, 2)], marks=pytest.mark.nightly)], ids=["others", "themselves"]
)
def test_one_and_two_ranks_resume_each_other_bit_for_bit(tmp_path: Path, hops: list[tuple[int, int]]) -> None:
    one, two = (run(n, tmp_path / str(n), "odd") for n in (1, 2))
    for number, resumed in hops:
        again = run(resumed, tmp_path / f"{number}-{resumed}", "odd", tmp_path / str(number) / "step-2")
        for each in (two, again):
            assert each["8bit"] == {"wide", "narrow", "low_rank"}
            assert each["values"].keys() == one["values"].keys()
            assert all(value.equal(one["values"][name]) for name, value in each["values"].items())


def test_a_resume_that_would_change_the_type_of_moments_is_refused_with_the_name(tmp_path: Path) -> None:
    assert "odd" in run(1, tmp_path / "1", None)["8bit"]
    written = tmp_path / "1" / "step-2"
    with pytest.raises(RuntimeError, match=r"exp_avg_scale/odd: the model's absent, the checkpoint's \["):
        run(2, tmp_path / "2", None, written)
    model = Matrices()
    plain = make_by_name(model.named_parameters(), **OPTIONS)
    with pytest.raises(CheckpointError, match=r"exp_avg_scale/low_rank: .*Set optimizer.name to the optimizer"):
        load_checkpoint(written, model=model, optimizer=plain)
    assert not plain.state


def test_a_run_in_nf4_and_8_bits_goes_on_after_a_stop_as_if_there_had_been_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model_folder(tmp_path / "model", hidden_size=64, intermediate_size=512)
    options = {
        "optimizer__name": "adamw_8bit",
        "lora__rank": 16,
        "model__frozen_dtype": "nf4",
        "tokens__train_steps": 6,
    }
    without_stop = run_trainer(make_config(tmp_path, folder, **options, general__run_name="without_stop"))
    on_each_step(monkeypatch, stop_in(3))
    config = make_config(tmp_path, folder, **options)
    stopped = run_trainer(config)
    assert stopped.progress.step == 3
    assert bits(stopped) != bits(without_stop)

    unquantized = make_config(tmp_path, folder, **options | {"model__frozen_dtype": "bfloat16"})
    with pytest.raises(ValueError, match="the model's base in NF4: True in the checkpoint, False now"):
        open_trainer(unquantized)

    assert bits(run_trainer(config)) == bits(without_stop)
    dtypes = {value.dtype for state in without_stop.optimizer.state.values() for value in state.values()}
    assert dtypes == {torch.uint8, torch.float32}
    _require_merge_of_what_was_trained(without_stop)


def _require_merge_of_what_was_trained(trainer: Trainer) -> None:
    """The merge adds the adapters to the weights in NF4, with which they were trained, not to those of the base."""
    attention = trainer.model.get_submodule("model.layers.0.self_attn")
    adapter: Any = attention.get_submodule("qkv_proj.adapters.q_proj")
    rows = from_stored(attention.get_parameter("qkv_proj.weight"), torch.float32)[: len(adapter.lora_B)]
    expected = rows + adapter.scale * adapter.lora_B @ adapter.lora_A
    merged = load_file(trainer.directory.folder / "hf" / "step-6" / "model.safetensors")
    torch.testing.assert_close(
        merged["model.layers.0.self_attn.q_proj.weight"].float(), expected.detach(), rtol=2**-8, atol=1e-6
    )


def test_a_missing_package_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    importing = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name == "bitsandbytes":
            raise ImportError("No module named 'bitsandbytes'")
        return importing(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"optimizer\.name: adamw_8bit needs .*pip install 'sftron\[quant\]'"):
        make_by_name(Matrices().named_parameters(), **OPTIONS, name="adamw_8bit")
