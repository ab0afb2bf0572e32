"""Adapter folders: peft reads ours and we read peft's, to the bit; what is not implemented is refused by name."""

import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sftron.checkpoint.adapter import WEIGHTS, model_projections, read_adapter, vllm_limits, write_adapter
from sftron.checkpoint.adapter_config import CONFIG, adapter_config
from sftron.checkpoint.export import check_export
from sftron.checkpoint.hf_weights import load_model
from sftron.checkpoint.model_folder import read_config, read_json
from sftron.checkpoint.source import ExportSource
from sftron.models.adapters import LoraSpec, add_adapters, peft_name
from sftron.models.llama import LlamaForSFT
from sftron.models.wrappers import TEXT_MODEL
from tests.conftest import LazyModule, rest_nightly
from tests.models.reference import FAMILIES, make_reference, pack
from tests.models.test_adapters import CASES, FAMILY_CASES, make_peft, spec_of, trained

peft = LazyModule("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
IDS = pack([30])[0]
COMPARABLE_SINCE = {"gpt_oss": (5, 7), "qwen3_5_text": (5, 7), "qwen3_5_moe_text": (5, 7)}
"""The first transformers whose class of a family has what the family computes; earlier ones have none, or another."""


def require_comparable(case: str, family: str) -> None:
    if FAMILIES[family].get("model_type", "llama") not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    found = tuple(map(int, transformers.__version__.split(".")[:2]))
    if found < COMPARABLE_SINCE.get(case, (5, 0)):
        pytest.skip(f"transformers {transformers.__version__} cannot be compared for {case}")


def make_base(folder: Path, family: str) -> ExportSource:
    make_reference(**FAMILIES[family]).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "LICENSE").write_text("terms")
    return ExportSource.read(folder)


def native_model(folder: Path, spec: LoraSpec, tensors: Any) -> LlamaForSFT:
    model = load_model(folder, compute_dtype=torch.float32)
    add_adapters(model, model.config, spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(tensors[peft_name(name)])
    return model


def logits_of(model: LlamaForSFT) -> torch.Tensor:
    return model.head.logits(model(*pack([30])))


def load_in_peft(base: Path, adapter: Path) -> Any:
    """Returns the model of PeftModel.from_pretrained; warnings, as for missing keys, are errors. Checks the keys."""

    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(base)

    model = peft.get_peft_model(load(), peft.PeftConfig.from_pretrained(adapter))
    stored = peft.load_peft_weights(str(adapter))
    found = peft.set_peft_model_state_dict(model, stored)
    assert not found.unexpected_keys
    assert not [key for key in found.missing_keys if "lora_" in key or "modules_to_save" in key]
    return peft.PeftModel.from_pretrained(load(), adapter).eval()


# Each kind of adapter, of layer and of module; test_adapters.py compares all cases with peft.
FAST = ["all layers", "biases", "ranks and alphas", "rslora and dora", "dora with biases", "plain MLP", "already fused"]
FAST += ["embeddings", "tied embeddings", "gpt_oss", "qwen3_5_text", "beside experts"]
ALL_CASES = CASES | FAMILY_CASES


@pytest.mark.parametrize("case", rest_nightly(ALL_CASES, FAST))
def test_an_export_has_the_trained_logits_in_peft_and_comes_back_to_the_bit(case: str, tmp_path: Path) -> None:
    family, options = ALL_CASES[case]
    require_comparable(case, family)
    reference = make_peft(family, **options)
    source = make_base(tmp_path / "base", family)
    spec, tensors = spec_of(reference), {name: each.detach() for name, each in trained(reference).items()}
    native = native_model(tmp_path / "base", spec, tensors)
    out = tmp_path / "out"
    write_adapter(out, tensors, spec, source=source, base_model=str(source.folder), base_revision="1f", model_card="#")

    expected = logits_of(native)
    found = load_in_peft(tmp_path / "base", out)(input_ids=IDS[None]).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    again = read_adapter(out, source.architecture)
    assert again.spec == spec
    assert again.base_model == str(source.folder)
    assert read_json(out / CONFIG)["revision"] == "1f"
    assert again.tensors.keys() == tensors.keys()
    assert all(again.tensors[name].equal(tensor) for name, tensor in tensors.items())
    files = {"LICENSE", "README.md", CONFIG, WEIGHTS, "generation_config.json", "tokenizer.json"}
    assert {path.name for path in out.iterdir()} == files
    assert list(tmp_path.glob("*.tmp-*")) == []


@pytest.mark.parametrize("case", rest_nightly(ALL_CASES, FAST))
def test_an_adapter_of_peft_has_its_logits_here(case: str, tmp_path: Path) -> None:
    family, options = ALL_CASES[case]
    require_comparable(case, family)
    reference = make_peft(family, **options).eval()
    make_base(tmp_path / "base", family)
    reference.save_pretrained(tmp_path / "adapter")
    adapter = read_adapter(tmp_path / "adapter", read_config(tmp_path / "base"))
    assert adapter.spec == spec_of(reference)
    found = logits_of(native_model(tmp_path / "base", adapter.spec, adapter.tensors))
    expected = reference(input_ids=IDS[None]).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


EVIL = "((([a-z_.0-9])+)+)+!"
"""Matches no name, for which `re` takes longer than any run."""
Q0, Q1, K0, K1 = (f"model.layers.{n}.self_attn.{name}_proj" for name in "qk" for n in (0, 1))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ({Q0: 4, Q1: 4}, {"r": 4, "rank_pattern": {}, "target_modules": ["q_proj"]}),
        ({Q0: 4, Q1: 4, K0: 8, K1: 8}, {"r": 8, "rank_pattern": {"q_proj": 4}, "target_modules": ["k_proj", "q_proj"]}),
        ({Q0: 4, Q1: 4, K0: 8}, {"r": 4, "rank_pattern": {"k_proj": 8}, "target_modules": [K0, "q_proj"]}),
        ({Q0: 4, Q1: 2, K1: 4}, {"r": 4, "rank_pattern": {Q1: 2}, "target_modules": [K1, "q_proj"]}),
    ],
)
def test_ranks_and_targets_have_their_smallest_form(
    ranks: dict[str, int], expected: dict[str, Any], tmp_path: Path
) -> None:
    config = make_base(tmp_path / "base", "Llama 3").architecture
    for alpha in (8.0, 2.5):
        spec = LoraSpec(ranks=ranks, alphas=dict.fromkeys(ranks, alpha))
        stated = adapter_config(spec, model_projections(config), config, TEXT_MODEL)
        assert expected.items() <= stated.items()
        assert (stated["lora_alpha"], stated["alpha_pattern"]) == (alpha, {})
    assert (stated["inference_mode"], stated["lora_dropout"]) == (True, 0.0)  # as peft saves a trained adapter


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """The folders of a base and of an adapter that peft saved."""
    make_base(tmp_path / "base", "Llama 3")
    make_peft("Llama 3", target_modules=["q_proj", "up_proj"], r=4).save_pretrained(tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("peft_type", "IA3", "peft_type: 'IA3'"),
        ("task_type", "SEQ_CLS", "task_type: 'SEQ_CLS'"),
        ("bias", "all", "bias: 'all'"),
        ("init_lora_weights", "pissa", "init_lora_weights: 'pissa'"),
        ("lora_bias", True, "lora_bias: True; sftron supports only null or false"),
        ("trainable_token_indices", [5], "trainable_token_indices: [5]"),
        ("layer_replication", [[0, 1]], "layer_replication: [[0, 1]]"),
        ("a_new_key", "x", "a_new_key: 'x'; sftron supports only null or false"),
        ("r", 4.0, "r: 4.0"),
        ("r", 10**30, "r: 1000"),
        ("r", True, "r: True"),
        ("r", "4", "r: '4'"),
        ("bias", None, "bias: None"),
        ("lora_alpha", 0, "lora_alpha: 0"),
        ("lora_alpha", float("nan"), "lora_alpha: nan"),
        ("rank_pattern", {"(": 4}, "rank_pattern: '('"),
        ("target_modules", "(", "target_modules: '('"),
        ("target_modules", r"(q)_proj|\1", "has groupref, which is not supported; list the names"),
        ("target_modules", EVIL, "q_proj.lora_A.weight: unexpected"),
        ("rank_pattern", {"q_proj": 3, EVIL: 4}, "q_proj.lora_B.weight: has [32, 4], expected [32, 3]"),
        ("modules_to_save", ["norm"], "modules_to_save: 'norm'; sftron supports only embed_tokens, lm_head"),
        ("modules_to_save", ["lm_head"], "lm_head.weight: missing, expected [97, 32]"),
        ("r", 8, "q_proj.lora_A.weight: has [4, 32], expected [8, 32]"),
        ("rank_pattern", {"0.self_attn.q_proj": 3}, "0.self_attn.q_proj.lora_B.weight: has [32, 4], expected [32, 3]"),
        ("target_modules", ["q_proj"], "up_proj.lora_A.weight: unexpected, has [4, 32]"),
        ("target_modules", ["q_proj", "up_proj", "k_proj"], "k_proj.lora_A.weight: missing, expected [4, 32]"),
        ("use_dora", True, "lora_magnitude_vector: missing, expected [32]"),
    ],
)
def test_a_value_that_is_not_implemented_or_contradicts_the_tensors_is_refused_by_name(
    saved: tuple[Path, Path], key: str, value: Any, message: str
) -> None:
    base, adapter = saved
    stated = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(stated | {key: value}))
    with pytest.raises(ValueError, match=re.escape(message)):
        read_adapter(adapter, read_config(base))


def test_layers_that_other_keys_exclude_need_no_tensors(saved: tuple[Path, Path]) -> None:
    base, adapter = saved
    tensors = load_file(adapter / WEIGHTS)
    save_file({name: each for name, each in tensors.items() if ".layers.1." in name}, adapter / WEIGHTS)
    stated = json.loads((adapter / CONFIG).read_text())
    with pytest.raises(ValueError, match=r"layers\.0\..*missing"):
        read_adapter(adapter, read_config(base))
    (adapter / CONFIG).write_text(json.dumps(stated | {"layers_to_transform": 1}))
    names = read_adapter(adapter, read_config(base)).spec.ranks.keys()
    assert names == {"model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"}


_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def _without_a(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors[_A]
    save_file(tensors, folder / WEIGHTS)


def _replaced(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        save_file(tensors | {_A: change(tensors[_A])}, folder / WEIGHTS)

    return replace


def _pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def _linked(folder: Path) -> None:
    target = folder.parent / "elsewhere"
    target.mkdir()
    (folder / WEIGHTS).rename(target / WEIGHTS)
    (folder / WEIGHTS).symlink_to(target / WEIGHTS)


def _oversized(folder: Path) -> None:
    os.truncate(folder / CONFIG, 2**26 + 1)


def _without_prefix(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({name.removeprefix("base_model.model."): each for name, each in tensors.items()}, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_a, "model.layers.0.self_attn.q_proj.lora_A.weight: missing, expected [4, 32]"),
        (_replaced(lambda tensor: tensor * torch.nan), "q_proj.lora_A.weight holds NaN or infinity"),
        (_replaced(lambda tensor: tensor[:, :-1].contiguous()), "lora_A.weight: has [4, 31], expected [4, 32]"),
        (_replaced(lambda tensor: tensor.to(torch.int32)), "lora_A.weight: stored as I32; sftron supports only F32"),
        (_without_prefix, "'model.layers.0.self_attn.q_proj.lora_A.weight': unexpected"),
        (_pickled, f"holds no {WEIGHTS}. Save"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"x" * 100), "not a readable safetensors file"),
        (lambda folder: (folder / CONFIG).write_text("[]"), "holds a JSON list, not an object"),
        (_linked, "outside the folder"),
        (_oversized, "but such a file has at most"),
    ],
)
def test_a_damaged_or_unsafe_folder_is_refused(
    saved: tuple[Path, Path], damage: Callable[[Path], None], message: str
) -> None:
    base, adapter = saved
    damage(adapter)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_adapter(adapter, read_config(base))


def test_an_adapter_of_another_model_is_refused(saved: tuple[Path, Path], tmp_path: Path) -> None:
    other = make_base(tmp_path / "other", "SmolLM2").architecture
    with pytest.raises(ValueError, match=r"q_proj.lora_A.weight: has \[4, 32\], expected \[4, 48\]"):
        read_adapter(saved[1], other)


@pytest.mark.parametrize(
    ("modules_to_save", "message"),
    [
        (["embed_tokens"], "but the base ties the head to the embeddings"),
        (["embed_tokens", "lm_head"], "lm_head.weight and model.embed_tokens.weight differ"),
    ],
)
def test_tied_embeddings_that_peft_trained_apart_are_refused(
    modules_to_save: list[str], message: str, tmp_path: Path
) -> None:
    config = make_base(tmp_path / "base", "Qwen 3").architecture
    with warnings.catch_warnings(action="ignore"):
        reference = make_peft("Qwen 3", target_modules=["q_proj"], modules_to_save=modules_to_save)
        reference.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=message):
        read_adapter(tmp_path / "adapter", config)


def test_what_is_written_is_the_whole_adapter_and_finite(tmp_path: Path) -> None:
    source = make_base(tmp_path / "base", "Llama 3")
    reference = make_peft("Llama 3", target_modules=["q_proj"])
    spec, tensors = spec_of(reference), {name: each.detach() for name, each in trained(reference).items()}
    first, *rest = tensors
    for broken, message in (
        ({name: tensors[name] for name in rest}, "missing"),
        (tensors | {first: tensors[first] / 0}, "holds NaN or infinity"),
    ):
        with pytest.raises(ValueError, match=message):
            write_adapter(tmp_path / "out", broken, spec, source=source, base_model="base")
    assert not (tmp_path / "out").exists()


def test_an_extra_or_changed_tensor_of_an_export_is_named(tmp_path: Path) -> None:
    source = make_base(tmp_path / "base", "Llama 3")
    reference = make_peft("Llama 3", target_modules=["q_proj"])
    spec, tensors = spec_of(reference), {name: each.detach() for name, each in trained(reference).items()}
    write_adapter(tmp_path / "out", tensors, spec, source=source, base_model="base")
    plan: Any = SimpleNamespace(is_adapter=True, source=source)
    first, *rest = tensors
    changed = tensors[first].clone()
    changed.view(torch.int32).view(-1)[0] ^= 1
    assert check_export(plan, tensors.items(), tmp_path / "out") == (len(tensors), [])
    assert check_export(plan, [(name, tensors[name]) for name in rest], tmp_path / "out")[1] == [first]
    assert check_export(plan, (tensors | {first: changed}).items(), tmp_path / "out")[1] == [first]


SPEC: dict[str, Any] = {"ranks": {Q0: 8, K0: 8}, "alphas": {Q0: 8.0, K0: 8.0}}


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ({}, []),
        ({"rslora": True}, []),
        ({"dora": True}, ["vLLM refuses DoRA"]),
        ({"modules_to_save": ("lm_head",)}, ["vLLM refuses modules_to_save (lm_head)"]),
        ({"ranks": {Q0: 8, K0: 4}}, ["one rank for all layers, but this adapter has 4, 8"]),
        ({"alphas": {Q0: 8.0, K0: 0.5}}, ["one alpha for all layers, but this adapter has 0.5, 8"]),
        ({"ranks": {Q0: 16, K0: 16}}, []),
        ({"ranks": {Q0: 17, K0: 17}}, ["needs --max-lora-rank 32"]),
        ({"ranks": {Q0: 300, K0: 300}}, ["needs --max-lora-rank 320"]),
        ({"ranks": {Q0: 513, K0: 513}}, ["ranks up to 512, but this adapter has 513"]),
    ],
)
def test_each_limit_of_vllm_is_named(changes: dict[str, Any], limits: list[str]) -> None:
    found = vllm_limits(LoraSpec(**(SPEC | changes)))
    assert len(found) == len(limits)
    assert all(limit in line for limit, line in zip(limits, found, strict=True))
