"""A checkpoint is there whole or not at all, is bitwise what was saved, and is read without pickle (law 12)."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sftron.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from sftron.checkpoint.manifest import (
    CheckpointError,
    Found,
    newest_checkpoint,
    read_state,
    set_aside_newer,
    verify_checkpoint,
)

STATE = {"progress": {"tokens": 2**40}, "data": {"lanes": {"3": "1f:a"}}}


class Small(nn.Module):
    """Two linears; a tied head, as in many models, is one parameter under two names."""

    def __init__(self, seed: int, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.head = nn.Linear(3, width), nn.LayerNorm(width), nn.Linear(width, 3, bias=False)
        self.tied = self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.first(x)))


def make(seed: int = 0, steps: int = 0, width: int = 5) -> tuple[Small, torch.optim.AdamW]:
    model = Small(seed, width)
    decaying = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decaying, "weight_decay": 0.1}, {"params": rest}], lr=1e-2, fused=True)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for number in range(steps):
        torch.manual_seed(number)
        optimizer.zero_grad()
        model(torch.randn(7, 3)).square().sum().backward()
        optimizer.step()


def save(root: Path, step: int, *, seed: int = 0, keep: int = 2) -> Path:
    model, optimizer = make(seed, steps=2)
    return save_checkpoint(root, step, model=model, optimizer=optimizer, state=STATE, keep=keep)


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    tensors = [*model.parameters()]
    tensors += [value for p in model.parameters() for _, value in sorted(optimizer.state[p].items())]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_weights_optimizer_and_state_come_back_bit_for_bit_and_training_goes_on_the_same(tmp_path: Path) -> None:
    model, optimizer = make(seed=0, steps=3)
    folder = save_checkpoint(tmp_path, 3, model=model, optimizer=optimizer, state=STATE, keep=2)
    other, other_optimizer = make(seed=1, steps=1)
    assert bits(other, other_optimizer) != bits(model, optimizer)

    load_checkpoint(folder, model=other, optimizer=other_optimizer)

    assert bits(other, other_optimizer) == bits(model, optimizer)
    assert read_state(folder) == {"step": 3, **STATE}
    assert len(bits(model, optimizer)) == 5 * 4  # exp_avg, exp_avg_sq and step for each
    train(model, optimizer, 3)
    train(other, other_optimizer, 3)
    assert bits(other, other_optimizer) == bits(model, optimizer)


def test_a_checkpoint_before_the_first_update_loads_too(tmp_path: Path) -> None:
    model, optimizer = make()
    folder = save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer, state={}, keep=2)
    other, other_optimizer = make(seed=1)

    load_checkpoint(folder, model=other, optimizer=other_optimizer)

    assert torch.equal(other.first.weight, model.first.weight)
    assert not other_optimizer.state


def test_nothing_is_unpickled_on_the_way_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, 5)
    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("unpickled"))
    model, optimizer = make()

    assert newest_checkpoint(tmp_path).folder == folder
    assert read_state(folder)["step"] == 5
    load_checkpoint(folder, model=model, optimizer=optimizer)


# --- Whole or not at all: see test_faults.py ---


def test_the_newest_are_kept_and_the_one_just_written_always_is(tmp_path: Path) -> None:
    for step in (1, 2, 10, 9):
        save(tmp_path, step, keep=3)
    # By number, not by name; and 9 came after 10, from a run that went on from an older checkpoint.
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


# --- What is broken is found ---


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
DAMAGES: dict[str, Callable[[Path], Any]] = {
    **{f"{file} does not have the manifest's sha256": lambda f, file=file: flip_a_byte(f / file) for file in FILES},
    **{f"{file} has ": lambda f, file=file: (f / file).write_bytes((f / file).read_bytes()[:-1]) for file in FILES},
    **{f"{file} is missing": lambda f, file=file: (f / file).unlink() for file in FILES},
    "MANIFEST.json cannot be read (": lambda f: (f / "MANIFEST.json").unlink(),
    "MANIFEST.json cannot be read (E": lambda f: (f / "MANIFEST.json").write_text(""),
    "MANIFEST.json cannot be read (l": lambda f: (f / "MANIFEST.json").write_text("[]"),
    "MANIFEST.json does not name state.json": lambda f: (f / "MANIFEST.json").write_text(
        json.dumps({"files": {k: v for k, v in json.loads((f / "MANIFEST.json").read_text())["files"].items()
                              if k != "state.json"}})),
}  # fmt: skip


@pytest.mark.parametrize("problem", DAMAGES)
def test_a_broken_checkpoint_is_named_with_its_problem_and_the_one_before_is_taken(
    tmp_path: Path, problem: str
) -> None:
    old, new = save(tmp_path, 10), save(tmp_path, 20)
    assert newest_checkpoint(tmp_path).folder == new
    DAMAGES[problem](new)

    found = newest_checkpoint(tmp_path)

    assert found.folder == old
    assert len(found.rejected) == 1
    assert found.rejected[0].startswith(f"{new}: {problem}")
    assert verify_checkpoint(old) is None


def test_where_no_checkpoint_holds_the_run_is_refused_and_not_started_anew(tmp_path: Path) -> None:
    for step in (10, 20):
        flip_a_byte(save(tmp_path, step) / "model.safetensors")

    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint.*step-20: model.*step-10: model.*move them away"):
        newest_checkpoint(tmp_path)


def test_where_there_never_was_one_there_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "absent") == Found(None, ())
    (tmp_path / "step-9.tmp-abc").mkdir()
    (tmp_path / "step-x").mkdir()
    assert newest_checkpoint(tmp_path) == Found(None, ())


def test_another_models_checkpoint_is_refused_with_names_and_shapes(tmp_path: Path) -> None:
    folder = save(tmp_path, 10)
    model, optimizer = make(width=6)
    before = bits(model, optimizer) if optimizer.state else [p.detach().numpy().tobytes() for p in model.parameters()]

    with pytest.raises(
        CheckpointError, match=r"another model; 5 tensors differ: first\.bias: ours \[6\], the checkpoint's \[5\]"
    ):
        load_checkpoint(folder, model=model, optimizer=optimizer)
    assert [p.detach().numpy().tobytes() for p in model.parameters()] == before

    more, _ = make()
    more.extra = nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"extra\.bias: ours \[1\], the checkpoint's absent"):
        load_checkpoint(folder, model=more, optimizer=torch.optim.AdamW(more.parameters()))
