"""Adapters are trained, and nothing else is: on any number of ranks, over kills and resumes, however rows are packed."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from run_train import main
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sftron.checkpoint.hf_weights import EMBEDDINGS, load_model, read_config
from sftron.data.loader import collate
from sftron.data.packing import lay_out
from sftron.data.types import IGNORE_INDEX, Batch, LabeledConversation
from sftron.models import linear
from sftron.models.adapters import AdapterStart, LoraSpec, peft_name
from sftron.models.generation import greedy_generate
from sftron.models.llama import ACTIVATION_CHECKPOINTING, LlamaForSFT
from sftron.train import loop, step
from sftron.train.lora import resolve_adapters
from sftron.train.ranks import Ranks
from sftron.train.step import loss_of, train_step
from sftron.train.trainer import Trainer
from tests.models.reference import TINY, make_theirs
from tests.train.killed_run import run_killed
from tests.train.ranks import launch, train
from tests.train.runs import bits, chat_line, make_config, make_model_folder, metrics, run, write_rows
from tests.train.sharded_steps import (
    NUM_STEPS,
    LoraCase,
    digests_of_frozen,
    lora_spec,
    save_lora_steps,
    take_lora_steps,
    whole_trained,
)
from tests.train.test_step import CONVERSATIONS, Recording, conversation

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA: dict[str, Any] = {"lora__rank": 4, "checkpoints__export_hf": False, "optimizer__schedule": "constant"}

# Of torch's own compiler, as in test_compilation.py.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
]


# --- What a run changes ---


@dataclass
class Watched:
    """A run whose steps were watched."""

    trainer: Trainer
    frozen: list[dict[str, str]] = field(default_factory=list)
    """The digests of the frozen tensors, before the first step and after the last."""
    trained: list[dict[str, Tensor]] = field(default_factory=list)
    """The trained tensors before the first step and after each."""
    with_gradient: set[str] = field(default_factory=set)
    """The parameters that had a gradient in some step."""
    products: list[torch.Size] = field(default_factory=list)
    """The shapes of the gradients that linear layers computed."""
    steps: list[tuple[Any, float | None, float | None]] = field(default_factory=list)
    """The keys of the conversations, the loss and the gradient's norm of each step."""


def watch(config: Any) -> Watched:
    """Builds and trains a run to its end."""
    watched = Watched(Trainer(config))
    watched.trainer.build()
    model = watched.trainer.model
    original, weight_gradient = loop.train_step, linear._weight_gradient

    def watched_step(model: LlamaForSFT, optimizer: Any, batches: Sequence[Batch], **options: Any) -> Any:
        result = original(model, optimizer, batches, **options)
        keys = [(batch.pack.index, batch.pack.keys) for batch in batches]
        watched.steps.append((keys, result.loss, result.grad_norm))
        watched.trained.append(whole_trained(model))
        return result

    def watched_gradient(*arguments: Any) -> Tensor:
        gradient = weight_gradient(*arguments)
        watched.products.append(gradient.shape)
        return gradient

    def note_gradients(*_: Any) -> None:
        watched.with_gradient |= {name for name, p in model.named_parameters() if p.grad is not None}

    watched.frozen.append(digests_of_frozen(model))
    watched.trained.append(whole_trained(model))
    watched.trainer.optimizer.register_step_pre_hook(note_gradients)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", watched_step)
        patch.setattr(linear, "_weight_gradient", watched_gradient)
        assert watched.trainer.train() == 0
    watched.frozen.append(digests_of_frozen(model))
    return watched


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Watched:
    """Six steps on one rank, saved after the third and the sixth."""
    folder = tmp_path_factory.mktemp("whole")
    write_rows(folder / "rows.jsonl", 200)
    return watch(make_config(folder, model_folder, **LORA, tokens__train_steps=6, checkpoints__interval=3))


def test_every_adapter_is_trained_and_no_bit_of_the_base_changes(whole: Watched, model_folder: Path) -> None:
    """B starts at zero, so A has no gradient in the first step, and moves from the second."""
    first, after_1, after_2, *_, last = whole.trained
    layers = [f"model.layers.{layer}.{part}" for layer in range(2) for part in ("self_attn", "mlp")]
    expected = {f"{p}.{factor}" for p in PROJECTIONS for factor in ("lora_A", "lora_B")}
    assert len(first) == 2 * 7 * 2
    assert {peft_name(name).rpartition(".weight")[0] for name in first} == {
        f"{layer}.{name}" for layer in layers for name in expected if ("mlp" in layer) == (name[0] in "gud")
    }
    assert whole.with_gradient == first.keys()
    for name, value in last.items():
        assert value.count_nonzero() > 0.9 * value.numel(), name
        assert not value.equal(first[name]), name
        assert first[name].any() == name.endswith("lora_A")
        if name.endswith("lora_A"):
            # But for weight decay, which multiplies all of A by one number.
            torch.testing.assert_close(after_1[name] / first[name], torch.full_like(value, 1 - 1e-3), rtol=1e-5, atol=0)
        assert not torch.allclose(after_2[name], after_1[name] * (1 - 1e-3), rtol=1e-4)

    names = {name for name, parameter in whole.trainer.model.named_parameters() if not parameter.requires_grad}
    assert whole.frozen[0] == whole.frozen[1]
    assert whole.frozen[0].keys() == names == {name for name, _ in load_model(model_folder).named_parameters()}
    of_adapters = sum(value.numel() for value in last.values())
    assert sum(value.numel() for value in last.values()) == of_adapters


def test_no_other_parameter_has_optimizer_state_and_no_weight_product_of_a_frozen_layer_is_computed(
    whole: Watched,
) -> None:
    model, optimizer = whole.trainer.model, whole.trainer.optimizer
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    trained = whole.trained[0].keys()
    assert {names[id(parameter)] for parameter in optimizer.state} == trained
    assert {names[id(p)] for group in optimizer.param_groups for p in group["params"]} == trained
    # The products of all A of a layer are one: 4 of A and 7 of B in each of 2 layers and 2 micro-batches of 6 steps.
    weights = {tuple(p.shape) for name, p in model.named_parameters() if name.endswith("_proj.weight")}
    assert weights.isdisjoint(map(tuple, whole.products))
    assert len(whole.products) >= 6 * 2 * 2 * (4 + 7)


# --- Ranks ---


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of tiny models without a tokenizer."""
    folder = tmp_path_factory.mktemp("bases")
    make_theirs().save_pretrained(folder / "llama")
    make_theirs(model_type="qwen3", head_dim=12, tie_word_embeddings=True).save_pretrained(folder / "tied")
    return folder


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory, bases: Path) -> dict[int, list[tuple[LoraCase, list[Any]]]]:
    """What each rank measures of each case, by the number of ranks; one launch each."""
    tied = LoraCase(bases / "tied", mode="selective", dora=True, modules_to_save=("embed_tokens",))
    copies = LoraCase(bases / "llama", mode="full", dp_replicate=2, modules_to_save=("lm_head",))
    cases = {2: [LoraCase(bases / "llama"), tied], 4: [LoraCase(bases / "llama"), copies]}
    found: dict[int, list[tuple[LoraCase, list[Any]]]] = {}
    for num_ranks, some in cases.items():
        folder = tmp_path_factory.mktemp("ranks")
        for rank, ended in enumerate(launch(num_ranks, save_lora_steps, some, folder / "measured", folder=folder)):
            assert ended.exit_code == 0, f"rank {rank} of {num_ranks}: {ended.err[-3000:]}"
        measured = [torch.load(folder / f"measured-{rank}.pt", weights_only=True) for rank in range(num_ranks)]
        found[num_ranks] = [(case, [each[number] for each in measured]) for number, case in enumerate(some)]
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_adapters_are_those_of_one_rank_and_equal_to_the_bit_on_all_ranks(on_ranks: Any, num_ranks: int) -> None:
    """4 micro-batches as 1 x 4, 2 x 2 and 4 x 1, one of them without a target; copies of a model sum once a step."""
    for case, by_rank in on_ranks[num_ranks]:
        alone = take_lora_steps(case, Ranks(device=torch.device("cpu")))
        for rank, sharded in enumerate(by_rank):
            what = f"rank {rank}, {case.name}"
            assert sharded["is_sharded"], what
            assert sharded["is_frozen"], what
            assert sharded["losses"] == pytest.approx(alone["losses"], rel=1e-6), what
            assert sharded["norms"] == pytest.approx(alone["norms"], rel=2e-6), what
            assert sharded["answer"] == alone["answer"], what
            _require_close(sharded["starts"], alone["starts"], 0, f"{what}: the start of")
            _require_close(sharded["trained"], alone["trained"], 1e-6, what)
            for number in range(NUM_STEPS):
                _require_close(sharded["gradients"][number], alone["gradients"][number], 3e-6, f"{what}: gradient of")
            for name, value in by_rank[0]["trained"].items():
                assert sharded["trained"][name].equal(value), f"{what}: {name} is not that of rank 0"
        assert not any(value.equal(alone["starts"][name]) for name, value in alone["trained"].items())


def _require_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], allowed: float, what: str) -> None:
    """Requires tensors of the same names that differ by `allowed` of their norm at most."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        error = (ours[name] - expected).norm() / expected.norm().clip(1e-30)
        assert error <= allowed, f"{what} {name} is off by {error:.1e}"


# --- Kills, resumes and checkpoints ---


def test_a_killed_run_goes_on_with_the_same_bits_and_a_hop_to_two_ranks_and_back_with_the_same_adapters(
    tmp_path: Path, model_folder: Path, whole: Watched
) -> None:
    write_rows(tmp_path / "rows.jsonl", 200)
    options = LORA | {"tokens__train_steps": 6, "checkpoints__interval": 3, "checkpoints__async": False}
    config = make_config(tmp_path, model_folder, **options)
    run_killed(tmp_path / "config.yaml", 5, "in the step")
    assert metrics(config.run_dir)[-1]["step"] == 4
    resumed = watch(config)
    assert resumed.steps == whole.steps[3:]
    assert bits(resumed.trainer) == bits(whole.trainer)
    assert resumed.trainer.loader.state_dict() == whole.trainer.loader.state_dict()
    assert resumed.frozen[0] == whole.frozen[0]
    assert whole.steps[-1][1] != whole.steps[0][1]

    hop = options | {"general__run_name": "hop"}
    for num_ranks, last_step in ((1, 2), (2, 4)):
        layout = {"tokens__batch_accumulation_per_replica": 2 // num_ranks, "tokens__train_steps": last_step}
        make_config(tmp_path, model_folder, **hop | layout)
        for ended in launch(num_ranks, train, tmp_path / "config.yaml", folder=tmp_path):
            assert ended.exit_code == 0, ended.err[-3000:]
    hopped = run(make_config(tmp_path, model_folder, **hop))
    for ours, theirs in zip(metrics(hopped.directory.folder), whole.steps, strict=True):
        assert (ours["loss"], ours["grad_norm"]) == pytest.approx(theirs[1:], rel=2e-6)
    _require_close(whole_trained(hopped.model), whole.trained[-1], 1e-6, "after hops,")


def test_a_checkpoint_holds_the_adapters_and_their_moments_alone(whole: Watched) -> None:
    folder = whole.trainer.directory.checkpoints / "step-6"
    last = whole.trained[-1]
    stored = {name: load_file(folder / f"{name}.safetensors") for name in ("model", "optimizer")}
    assert stored["model"].keys() == last.keys()
    assert all(value.equal(last[name]) for name, value in stored["model"].items())
    fields = ("exp_avg", "exp_avg_sq", "step")
    assert stored["optimizer"].keys() == {f"{each}/{name}" for each in fields for name in last}
    num_trained, num_bytes = sum(value.numel() for value in last.values()), 0
    for name in stored:
        with (folder / f"{name}.safetensors").open("rb") as file:
            num_bytes += file.seek(0, 2) - 8 - int.from_bytes(file.read(8) if not file.seek(0) else b"", "little")
    assert num_bytes == 12 * num_trained + 4 * len(last)  # each with the number of its steps
    base = sum(p.numel() for p in whole.trainer.model.parameters() if not p.requires_grad)
    assert num_bytes < 12 * base / 10
    assert json.loads((folder / "state.json").read_text())["lora"]["ranks"].keys() == {
        peft_name(name).removesuffix(".lora_A.weight") for name in last if name.endswith("lora_A")
    }
