"""A checkpoint is bitwise what was saved, on any number of ranks (law 12)."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement

from sftron.checkpoint.checkpoint import (
    MODEL,
    OPTIMIZER,
    CheckpointError,
    LatestCheckpoint,
    load_checkpoint,
    newest_checkpoint,
    read_state,
    set_aside_newer,
)
from sftron.checkpoint.shards import Shard, ShardedTensors, file_name, write_shards
from sftron.train.optimizer import make_by_name
from sftron.train.ranks import end_ranks, start_ranks
from tests.checkpoint.saving import STATE, Small, bits, grid, make, names_in, save, save_checkpoint, train
from tests.train.ranks import launch


@pytest.mark.parametrize("steps", [3, 0])
def test_weights_optimizer_and_state_come_back_bit_for_bit_and_training_goes_on_the_same(
    tmp_path: Path, steps: int
) -> None:
    """Also before the first update, when the optimizer has no state."""
    model, optimizer = make(seed=0, steps=steps)
    folder = save_checkpoint(tmp_path, 3, model, optimizer)
    other, other_optimizer = make(seed=1, steps=min(1, steps))
    assert bits(other, other_optimizer) != bits(model, optimizer)

    load_checkpoint(folder, model=other, optimizer=other_optimizer)

    assert read_state(folder) == {"step": 3, **STATE}
    assert len(bits(model, optimizer)) == 5 * (4 if steps else 1)  # exp_avg, exp_avg_sq and step for each
    for _ in range(2):
        assert bits(other, other_optimizer) == bits(model, optimizer)
        train(model, optimizer, 3)
        train(other, other_optimizer, 3)


def test_the_newest_are_kept_and_the_one_just_written_always_is(tmp_path: Path) -> None:
    for step in (1, 2, 10, 9):
        save(tmp_path, step, keep=3)
    # By number, not by name; and 9 came after 10, from a run that resumed from an older checkpoint.
    assert names_in(tmp_path) == ["step-1", "step-10", "step-2", "step-9"]
    save(tmp_path, 11, keep=2)
    assert names_in(tmp_path) == ["step-10", "step-11"]


def test_newer_checkpoints_make_way_and_stay_on_disk(tmp_path: Path) -> None:
    for _ in range(2):
        for step in (5, 10, 15):
            save(tmp_path, step, keep=9)
        moved = set_aside_newer(tmp_path, 5)

    assert [path.name for path in moved] == ["step-10.aside-2", "step-15.aside-2"]
    assert newest_checkpoint(tmp_path).folder == tmp_path / "step-5"
    assert names_in(tmp_path) == ["step-10.aside", "step-10.aside-2", "step-15.aside", "step-15.aside-2", "step-5"]


def test_a_run_with_only_broken_checkpoints_is_refused_and_a_run_without_any_has_none(
    tmp_path: Path,
) -> None:
    assert newest_checkpoint(tmp_path / "absent") == LatestCheckpoint(None, ())
    (tmp_path / "step-9.tmp-abc").mkdir()
    (tmp_path / "step-x").mkdir()
    assert newest_checkpoint(tmp_path) == LatestCheckpoint(None, ())
    for step in (10, 20):
        (save(tmp_path, step) / "model.safetensors").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"(?s)every checkpoint.*step-20: model.*step-10: model.*Move these checkpoints away"
    ):
        newest_checkpoint(tmp_path)


def test_another_models_checkpoint_is_refused_with_names_and_shapes_and_changes_nothing(tmp_path: Path) -> None:
    folder = save(tmp_path, 10)
    model, optimizer = make(steps=1, width=6)
    before = bits(model, optimizer)
    wrong = r"5 tensors differ: first\.bias: the model's \[6\], the checkpoint's \[5\]"
    with pytest.raises(CheckpointError, match=wrong):
        load_checkpoint(folder, model=model, optimizer=optimizer)
    assert bits(model, optimizer) == before

    more, _ = make()
    more.extra = nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"extra\.bias: the model's \[1\], the checkpoint's absent"):
        load_checkpoint(folder, model=more, optimizer=torch.optim.AdamW(more.parameters()))


# --- What is trained, and how it is split ---


def test_a_checkpoint_holds_all_weights_and_the_optimizer_state_of_exactly_what_is_trained(tmp_path: Path) -> None:
    def make_frozen(seed: int, frozen: str) -> tuple[Small, torch.optim.AdamW]:
        model = Small(seed)
        getattr(model, frozen).requires_grad_(False)
        options = {"learning_rate": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        return model, make_by_name(model.named_parameters(), **options)

    model, optimizer = make_frozen(0, "first")
    train(model, optimizer, 2)
    folder = save_checkpoint(tmp_path, 2, model, optimizer)
    trained = {"norm.weight", "norm.bias", "head.weight"}
    with ShardedTensors(folder, MODEL) as stored, ShardedTensors(folder, OPTIMIZER) as moments:
        assert stored.shapes().keys() == dict(model.named_parameters()).keys()
        assert {key.partition("/")[2] for key in moments.shapes()} == trained
    other, other_optimizer = make_frozen(1, "first")
    load_checkpoint(folder, model=other, optimizer=other_optimizer)
    for each, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        assert each.first.weight.grad is None
        train(each, its_optimizer, 2)
    assert bits(model, optimizer) == bits(other, other_optimizer)
    other, other_optimizer = make_frozen(1, "head")
    wrong = r"exp_avg/first\.bias: the model's \[\d\], the checkpoint's absent"
    with pytest.raises(CheckpointError, match=wrong):
        load_checkpoint(folder, model=other, optimizer=other_optimizer)


def write_parts(folder: Path, parts: list[Shard]) -> None:
    folder.mkdir(exist_ok=True)
    for rank, shard in enumerate(parts):
        named = {"w": shard} | ({"step/w": Shard(torch.tensor(3.0), (), ())} if rank == 0 else {})
        write_shards(folder / file_name(MODEL, rank, len(parts)), named)


@pytest.mark.parametrize("splits", [(1, 1), (3, 1), (1, 4), (2, 3)])
def test_tensors_split_in_any_dimension_are_read_in_any_other_parts(tmp_path: Path, splits: tuple[int, int]) -> None:
    tensor = torch.randn(7, 10)
    write_parts(tmp_path, grid(tensor, splits))
    with ShardedTensors(tmp_path, MODEL) as stored:
        assert stored.shapes() == {"w": tensor.shape, "step/w": ()}
        assert stored.read("w").equal(tensor)
        assert stored.read("step/w") == 3
        for others in ((1, 1), (2, 1), (1, 3), (4, 5)):
            for part in grid(tensor, others):
                assert stored.read("w", part.offset, part.tensor.shape).equal(part.tensor)
        assert stored.read("w", (7, 0), (0, 10)).shape == (0, 10)  # of a rank that has no row


def test_parts_that_leave_a_gap_or_overlap_are_refused(tmp_path: Path) -> None:
    tensor = torch.randn(4, 6)
    parts = grid(tensor, (1, 3))
    twice, outside = [parts[0], parts[1], replace(parts[2], offset=(0, 3))], [replace(parts[0], offset=(0, 6))]
    crossed = [*grid(tensor, (2, 1)), *grid(tensor, (1, 2))]
    for number, wrong in enumerate((parts[:2], [*parts, parts[1]], crossed, twice, [*parts[1:], *outside])):
        write_parts(tmp_path / str(number), wrong)
        stored = ShardedTensors(tmp_path / str(number), MODEL)
        with pytest.raises(CheckpointError, match=r"parts of w do not cover its shape \[4, 6\] once"), stored:
            pass


@pytest.mark.parametrize("content", [b"", b"no safetensors", (10**9).to_bytes(8, "little") + b"{}", None])
def test_a_part_that_cannot_be_read_is_refused_by_its_path(tmp_path: Path, content: bytes | None) -> None:
    write_parts(tmp_path, grid(torch.randn(4, 6), (1, 2)))
    path = tmp_path / file_name(MODEL, 1, 2)
    if content is None:
        save_file({"w": torch.zeros(4, 3)}, path)  # without the places of its tensors
    else:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))}: not a readable part of a checkpoint: "):
        ShardedTensors(tmp_path, MODEL).__enter__()


def test_tensors_split_in_dimension_1_over_two_ranks_are_read_by_one(tmp_path: Path) -> None:
    """As tensor parallelism splits them, by torch's own placements, through save and load."""
    expected, expected_optimizer = make(seed=3, steps=2)
    save_checkpoint(tmp_path, 1, expected, expected_optimizer)
    ended = launch(2, save_split, tmp_path, folder=tmp_path)
    assert [each.exit_code for each in ended] == [0, 0], ended[0].err
    model, optimizer = make(seed=9)
    load_checkpoint(tmp_path / "step-2", model=model, optimizer=optimizer)
    assert bits(model, optimizer) == bits(expected, expected_optimizer)


def save_split(root: Path) -> None:
    """Saves step-1 again, its tensors split in their last dimension, and loads that as it is split."""
    ranks = start_ranks()
    assert ranks.mesh is not None
    model, optimizer = make(seed=5, steps=1)
    load_checkpoint(root / "step-1", model=model, optimizer=optimizer)
    states = {}
    for module in (model.first, model.norm, model.head):
        for name, parameter in list(module.named_parameters()):
            shards = [ShardPlacement(parameter.ndim - 1)]
            new = nn.Parameter(distribute_tensor(parameter.detach(), ranks.mesh, shards))
            states[new] = {
                field: distribute_tensor(value, ranks.mesh, shards) if value.ndim else value
                for field, value in optimizer.state[parameter].items()
            }
            setattr(module, name, new)
    assert isinstance(model.head.weight, DTensor)
    assert model.head.weight.to_local().shape == (3, 3 - ranks.rank)  # of [3, 5]
    split_optimizer = torch.optim.AdamW(model.parameters())
    split_optimizer.state.update(states)
    folder = save_checkpoint(root, 2, model, split_optimizer, ranks=ranks)
    before = model.head.weight.to_local().clone()
    with torch.no_grad():
        model.head.weight.to_local().zero_()
    load_checkpoint(folder, model=model, optimizer=split_optimizer)
    assert model.head.weight.to_local().equal(before)
    end_ranks()
