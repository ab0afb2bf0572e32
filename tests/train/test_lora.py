"""Adapters are trained, and nothing else is: on any number of ranks, over kills and resumes, in any packing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from sftron.checkpoint.hf_weights import EMBEDDINGS, load_model
from sftron.checkpoint.model_folder import read_config
from sftron.commands.train import run as main
from sftron.data.loader import collate
from sftron.data.packing import lay_out
from sftron.data.types import IGNORE_INDEX, Batch, LabeledConversation
from sftron.models import linear
from sftron.models.adapters import AdapterStart, LoraSpec, peft_name
from sftron.models.generation import greedy_generate
from sftron.models.layers import RMSNorm
from sftron.models.llama import ACTIVATION_CHECKPOINTING, LlamaForSFT
from sftron.train import loop
from sftron.train.build_model import resolve_adapters
from sftron.train.ranks import Ranks
from sftron.train.step import train_step
from sftron.train.trainer import Trainer, open_setup
from tests.models.reference import TINY, make_theirs
from tests.train.killed_run import run_killed
from tests.train.ranks import launch, train
from tests.train.runs import bits, chat_line, make_config, make_model_folder, metrics, opened, run, write_rows
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
    watched = Watched(opened(config))
    model = watched.trainer.model
    original, weight_gradient = loop.train_step, linear._weight_gradient

    def watched_step(model: LlamaForSFT, optimizer: Any, batches: Sequence[Batch], *rest: Any, **options: Any) -> Any:
        result = original(model, optimizer, batches, *rest, **options)
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
    cases = {2: [LoraCase(bases / "llama"), tied], 4: [copies]}
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


def _without_lora(**options: Any) -> dict[str, Any]:
    return {key: value for key, value in (LORA | options).items() if not key.startswith("lora__")}


REFUSED: dict[str, dict[str, Any]] = {
    "lora.rank": {"lora__rank": 2, "lora__alpha": 8},
    "lora.alpha": {"lora__alpha": 4},
    "lora.targets": {"lora__targets": ["q_proj", "v_proj"]},
    "lora.rslora": {"lora__rslora": True},
    "lora.dora": {"lora__dora": True},
    "lora.modules_to_save": {"lora__modules_to_save": ["lm_head"]},
    "base weights": {"model__path": "other"},
    "base in NF4": {},  # absent now, in a run without adapters
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_checkpoint_of_other_adapters_or_another_base_is_refused_by_name(
    whole: Watched, tmp_path: Path, model_folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = LORA | {"tokens__train_steps": 7} | REFUSED[name]
    if name == "base in NF4":
        options = _without_lora(tokens__train_steps=7)
    if name == "base weights":
        other = Path(shutil.copytree(model_folder, tmp_path / "other"))
        weights = load_file(other / "model.safetensors")
        weights["model.layers.1.mlp.up_proj.weight"].view(-1)[7] += 1e-3
        save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
        options["model__path"] = str(other)
    folder = whole.trainer.directory.folder
    make_config(folder.parents[1], model_folder, **options)
    before = (folder / "config.yaml").read_bytes()

    assert main(["--config", str(folder.parents[1] / "config.yaml")]) == 2
    said = capsys.readouterr().err
    assert f"the model's {name}: " in said
    assert "Restore them, or start another run (general.run_name)" in said
    assert (folder / "config.yaml").read_bytes() == before


def test_a_checkpoint_of_full_fine_tuning_is_refused_by_a_run_with_adapters_and_by_its_weights(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = run(make_config(tmp_path, model_folder, **_without_lora(tokens__train_steps=1)))
    capsys.readouterr()
    weights = {"checkpoints__resume": str(full.directory.checkpoints / "step-1"), "checkpoints__load": "weights"}
    for options in ({}, weights | {"general__run_name": "other"}):
        make_config(tmp_path, model_folder, **LORA | options | {"tokens__train_steps": 2})
        assert main(["--config", str(tmp_path / "config.yaml")]) == 2
        assert "the model's lora.rank: absent in the checkpoint, 4 now" in capsys.readouterr().err


# --- What is computed ---


def _leaves(spec: LoraSpec, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Random factors, B among them, by peft's names; in bf16's numbers, so that any type holds them."""
    generator = torch.Generator().manual_seed(5)
    values = {}
    for name, rank in spec.ranks.items():
        num_rows, in_features = shapes[f"{name}.weight"]
        values[f"{name}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator) / in_features
        values[f"{name}.lora_B.weight"] = torch.randn(num_rows, rank, generator=generator)
        if spec.dora:
            values[f"{name}.lora_magnitude_vector"] = 1 + torch.rand(num_rows, generator=generator)
    return {name: value.bfloat16().float() for name, value in values.items()}


def _gradients_of_transformers(
    spec: LoraSpec, values: dict[str, Tensor], rows: Sequence[Sequence[LabeledConversation]]
) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of the factors in fp64, with transformers' model of the weights W + alpha / r B A.

    Each of `rows` is one document after another, without a bound between them.
    """
    reference = make_theirs().double()
    leaves = {name: value.double().requires_grad_() for name, value in values.items()}
    weights = dict(reference.named_parameters())
    for name, rank in spec.ranks.items():
        a, b = (leaves[f"{name}.lora_{factor}.weight"] for factor in "AB")
        weight = weights[f"{name}.weight"] + spec.alphas[name] / (rank**0.5 if spec.rslora else rank) * b @ a
        if spec.dora:
            weight = weight * (leaves[f"{name}.lora_magnitude_vector"] / weight.norm(dim=1).detach())[:, None]
        weights[f"{name}.weight"] = weight
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        ids, labels, loss_weights = (
            torch.from_numpy(np.concatenate([getattr(each, name) for each in row]))
            for name in ("input_ids", "labels", "loss_weights")
        )
        logits = torch.func.functional_call(reference, weights, (ids.long()[None],)).logits[0]
        losses = F.cross_entropy(logits, labels.long(), reduction="none", ignore_index=IGNORE_INDEX)
        total = total + (losses * loss_weights.double()).sum()
    loss = total / sum(each.loss_weights.astype(np.float64).sum() for row in rows for each in row)
    loss.backward()
    return loss.item(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def _load(folder: Path, spec: LoraSpec, values: dict[str, Tensor], **options: Any) -> LlamaForSFT:
    options = {"compute_dtype": torch.float32} | options
    return load_model(folder, adapters=AdapterStart(spec=spec, tensors=values), **options)


def _shapes(folder: Path) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in load_file(folder / "model.safetensors").items()}


def _step(model: LlamaForSFT, batches: Sequence[Batch]) -> tuple[float | None, dict[str, Tensor]]:
    """The loss, and the gradients by native name."""
    recording = Recording(model)
    return train_step(model, recording, batches, max_grad_norm=None).loss, recording.gradients


def _batches(packs: Sequence[Sequence[LabeledConversation]], *, is_isolated: bool = True) -> list[Batch]:
    return [
        collate(lay_out(pack, token_budget=40, remove_cross_attention=is_isolated, pad_id=0), keep_tail=False)
        for pack in packs
    ]


@pytest.mark.parametrize("share_trained", [0.5, 1.0])
@pytest.mark.parametrize(("is_isolated", "options"), [(True, {}), (True, {"dora": True}), (False, {"rslora": True})])
def test_gradients_of_packs_are_those_of_transformers_on_single_conversations_with_merged_weights(
    bases: Path, is_isolated: bool, share_trained: float, options: dict[str, Any]
) -> None:
    """Both toggles: without isolation, what is in a pack is one document; share_trained 1 trains the prompts too."""
    spec = lora_spec(read_config(bases / "llama"), **options)
    values = _leaves(spec, _shapes(bases / "llama"))
    model = _load(bases / "llama", spec, values)
    four = [conversation(len(each), number, share_trained=share_trained) for number, each in enumerate(CONVERSATIONS)]
    layouts = [[four], [four[:2], four[2:]], [[each] for each in four]]
    for packs in layouts[:2] if is_isolated else layouts[1:2]:
        rows = layouts[2] if is_isolated else packs
        expected_loss, expected = _gradients_of_transformers(spec, values, rows)
        loss, gradients = _step(model, _batches(packs, is_isolated=is_isolated))
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        ours = {peft_name(name): gradient.double() for name, gradient in gradients.items()}
        _require_close(ours, expected, 3e-5, "the gradient of")
        assert min(gradient.norm() for gradient in expected.values()) > 1e-3


PLAIN = [(is_dora, dtype, ()) for is_dora in (False, True) for dtype in (torch.float32, torch.bfloat16)]
# The compiler takes seconds; a block of DoRA in bf16 has the most in one graph.
COMPILED = pytest.param(True, torch.bfloat16, ("selective",), marks=pytest.mark.nightly)


@pytest.mark.parametrize(("is_dora", "dtype", "compiled"), [*PLAIN, COMPILED])
def test_gradients_have_the_same_bits_whatever_is_recomputed_and_compiled(
    bases: Path, is_dora: bool, dtype: torch.dtype, compiled: tuple[str, ...]
) -> None:
    spec = lora_spec(read_config(bases / "llama"), dora=is_dora)
    spec = replace(spec, alphas=dict.fromkeys(spec.alphas, 8.0))
    options = {"compute_dtype": dtype, "frozen_dtype": dtype}
    values, batches = _leaves(spec, _shapes(bases / "llama")), _batches([CONVERSATIONS])
    expected_loss, expected = _step(_load(bases / "llama", spec, values, **options), batches)
    assert len(expected) == len(values)
    modes = [*((mode, False) for mode in ACTIVATION_CHECKPOINTING), *((mode, True) for mode in compiled)]
    for mode, is_compiled in modes:
        model = _load(bases / "llama", spec, values, activation_checkpointing=mode, **options)
        if is_compiled:
            torch._dynamo.reset()
            for block in model.model.layers:
                block.compile(backend="aot_eager")
        loss, gradients = _step(model, batches)
        assert loss == expected_loss, (mode, is_compiled)
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradients[name].equal(gradient), (mode, is_compiled, name)


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_frozen_bf16_weights_give_the_bits_of_fp32_masters_where_bf16_is_computed(bases: Path, name: str) -> None:
    modules = ("embed_tokens",) if name == "tied" else ()
    alone, found = Ranks(device=torch.device("cpu")), []
    for frozen_dtype in (torch.float32, torch.bfloat16):
        case = LoraCase(bases / name, torch.bfloat16, frozen_dtype, modules_to_save=modules)
        found.append(take_lora_steps(case, alone))
    masters, frozen = found
    assert frozen["losses"] == masters["losses"]
    assert frozen["norms"] == masters["norms"]
    assert frozen["answer"] == masters["answer"]
    assert frozen["trained"].keys() == masters["trained"].keys()
    for key, value in masters["trained"].items():
        assert value.dtype == torch.float32
        assert frozen["trained"][key].equal(value), key


def test_doubling_alpha_doubles_what_an_adapter_adds_and_rslora_multiplies_it_by_the_root_of_the_rank(
    bases: Path,
) -> None:
    config = read_config(bases / "llama")
    plain = lora_spec(config)
    values = _leaves(plain, _shapes(bases / "llama"))
    base = load_model(bases / "llama", compute_dtype=torch.float32)
    norm = RMSNorm(config.hidden_size, config.norm_eps)
    x = torch.randn(9, TINY["hidden_size"], generator=torch.Generator().manual_seed(0))

    def added(spec: LoraSpec) -> Tensor:
        """By the adapters of a layer, for each of its rows."""
        models = (_load(bases / "llama", spec, values), base)
        ours, theirs = (each.get_submodule("model.layers.0.self_attn.qkv_proj")(x, norm) for each in models)
        return (ours - theirs).detach()

    once = added(plain)
    twice = added(replace(plain, alphas={name: 2 * alpha for name, alpha in plain.alphas.items()}))
    torch.testing.assert_close(twice, 2 * once, rtol=1e-5, atol=1e-5)
    ranks = [plain.ranks[f"model.layers.0.self_attn.{name}"] for name in ("q_proj", "k_proj", "v_proj")]
    heads = (TINY["num_attention_heads"], TINY["num_key_value_heads"], TINY["num_key_value_heads"])
    rows = torch.cat([torch.full((8 * n,), rank**0.5) for rank, n in zip(ranks, heads, strict=True)])
    torch.testing.assert_close(added(replace(plain, rslora=True)), once * rows, rtol=1e-5, atol=1e-5)
    assert once.abs().mean() > 0.1


@pytest.mark.parametrize("is_dora", [False, True])
def test_an_untrained_adapter_changes_no_answer_and_answers_with_a_cache_are_those_without(
    bases: Path, is_dora: bool
) -> None:
    spec = lora_spec(read_config(bases / "llama"), dora=is_dora)
    base = load_model(bases / "llama", compute_dtype=torch.float32)
    untrained = _load(bases / "llama", spec, {})
    prompt = [3, 1, 4, 1, 5]
    expected = greedy_generate(base, prompt, 24, stop_ids=())
    assert greedy_generate(untrained, prompt, 24, stop_ids=()).token_ids == expected.token_ids
    with torch.no_grad():
        ours, theirs = (model(*_row(prompt)) for model in (untrained, base))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)

    trained = _load(bases / "llama", spec, _leaves(spec, _shapes(bases / "llama")))
    cached = greedy_generate(trained, prompt, 24, stop_ids=())
    ids = list(prompt)
    for _ in range(24):
        with torch.no_grad():
            hidden = trained(*_row(ids))
        ids.append(int(trained.head.logits(hidden[-1]).argmax()))
    assert cached.token_ids == tuple(ids[len(prompt) :])
    assert cached.token_ids != expected.token_ids
    assert min(cached.margins) > 1e-3


def _row(ids: list[int]) -> tuple[Tensor, Tensor, Tensor, int]:
    return torch.tensor(ids), torch.arange(len(ids)), torch.tensor([0, len(ids)], dtype=torch.int32), len(ids)


# --- Modules that are trained in full, and what is refused ---


@pytest.mark.parametrize(("is_tied", "modules"), [(True, ["embed_tokens"]), (False, ["embed_tokens", "lm_head"])])
def test_modules_to_save_are_trained_in_full_and_restored(tmp_path: Path, is_tied: bool, modules: list[str]) -> None:
    folder = make_model_folder(tmp_path / "model", tie_word_embeddings=is_tied)
    options = LORA | {"tokens__train_steps": 3, "checkpoints__interval": 2, "lora__modules_to_save": modules}
    straight = watch(make_config(tmp_path, folder, **options))
    names = {"embed_tokens": EMBEDDINGS, "lm_head": "lm_head.weight"}
    saved = {names[name] for name in modules}
    first, last = straight.trained[0], straight.trained[-1]
    assert len(first) == 28 + len(modules)
    assert saved < first.keys() == straight.with_gradient
    base = load_file(folder / "model.safetensors")
    for name in saved:
        assert first[name].equal(base[name])
        moved = (last[name] != first[name]).any(dim=1)
        # Every row of a head has a gradient, and every row decays.
        assert moved.all(), f"{name}: {moved.sum()} of {len(moved)} rows moved"
        assert (last[name] - first[name]).abs().max() > 5e-3
    assert straight.frozen[0] == straight.frozen[1]
    assert straight.frozen[0].keys().isdisjoint(saved)

    resume = {"checkpoints__resume": str(straight.trainer.directory.checkpoints / "step-2"), "general__run_name": "b"}
    resumed = run(make_config(tmp_path, folder, **options | resume))
    assert bits(resumed) == bits(straight.trainer)


def test_new_tokens_are_trained_where_their_embeddings_are(tmp_path: Path, model_folder: Path) -> None:
    template = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|done|>{% endfor %}"
    (tmp_path / "own.jinja").write_text(template)
    new = {"tokenizer__chat_template": str(tmp_path / "own.jinja"), "tokenizer__add_tokens": ["<|turn|>", "<|done|>"]}
    trained = LORA | new | {"tokens__train_steps": 2, "lora__modules_to_save": ["embed_tokens", "lm_head"]}
    watched = watch(make_config(tmp_path, model_folder, **trained))
    vocabulary = watched.trainer.setup.data.chat_tokenizer.tokenizer.get_vocab()
    ids = [vocabulary[token] for token in ("<|turn|>", "<|done|>")]
    for name in (EMBEDDINGS, "lm_head.weight"):
        base = load_file(model_folder / "model.safetensors")[name]
        known = torch.tensor([row not in ids for row in range(len(base))])
        torch.testing.assert_close(watched.trained[0][name][ids], base[known].mean(dim=0).expand(2, -1))
        assert (watched.trained[-1][name][ids] != watched.trained[0][name][ids]).all()

    for modules, message in (([], "their embeddings would not be trained"), (["embed_tokens"], "add lm_head to lora")):
        with pytest.raises(ValueError, match=message):
            open_setup(make_config(tmp_path, model_folder, **trained | {"lora__modules_to_save": modules}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"targets": ["q_proj", "lm_head"]},
            "lora.targets: 'lm_head' is no linear layer of this model. The layers are ",
        ),
        ({"targets": ["lm_head"]}, "list it in modules_to_save"),
        ({"targets": "lm_head"}, "lora.targets: 'lm_head' matches no linear layer"),
        ({"targets": ["embed_tokens"]}, "list it in modules_to_save"),
        ({"targets": ["q_proj", "qkv_proj"]}, "lora.targets: 'qkv_proj' is no linear layer"),
        ({"targets": ["experts.0.w1"]}, "lora.targets: 'experts.0.w1' is no linear layer"),
        ({"targets": "q_proj"}, "an expression has to match a whole name, such as model.layers.0.self_attn.q_proj"),
        ({"targets": r".*\.experts\..*"}, r"lora.targets: '.*\\.experts\\..*' matches no linear layer"),
        ({"modules_to_save": ["lm_head"]}, "lora.modules_to_save: lm_head is tied to the embeddings in this model"),
    ],
)
def test_what_a_model_does_not_have_is_refused_by_name(
    tmp_path: Path, model_folder: Path, bases: Path, options: dict[str, Any], message: str
) -> None:
    config = make_config(tmp_path, model_folder, **{f"lora__{key}": value for key, value in options.items()})
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_adapters(config, read_config(bases / "tied"))


# --- A whole run ---


def test_a_run_with_adapters_evaluates_keeps_the_best_and_saves_no_weights_without_a_finite_loss(
    tmp_path: Path, model_folder: Path, held_out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(chat_line("What is 3?") + "\n")
    options = LORA | {
        "evaluation__datasets": [{"path": str(held_out)}],
        "evaluation__prompts": str(tmp_path / "prompts.jsonl"),
        "evaluation__max_new_tokens": 4,
        "evaluation__interval": 1,
        "checkpoints__keep_best": "eval/other/loss",
        "checkpoints__interval": 1,
        "checkpoints__keep_last": 2,
    }
    healthy = run(make_config(tmp_path, model_folder, **options, tokens__train_steps=4))
    folder = healthy.directory.folder
    found = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    losses = [each["sets"]["other"]["loss"] for each in found]
    assert [each["step"] for each in found] == [0, 1, 2, 3, 4]
    assert losses[0] > losses[1] > losses[2]
    assert len(found[0]["answers"]) == 1
    best = json.loads((folder / "best.json").read_text())
    assert best["value"] == min(losses)
    assert best["step"] == losses.index(min(losses))

    capsys.readouterr()
    make_config(tmp_path, model_folder, **options | {"tokens__train_steps": 8, "optimizer__learning_rate": 1e38})
    assert main(["--config", str(tmp_path / "config.yaml")]) == 3
    said = capsys.readouterr().out
    assert "the loss or gradients after step 5 are not finite, so the weights are not saved" in said
    steps = {int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*")}
    assert steps == {3, 4, best["step"]}
