"""Runs of a mixture of experts: resume, export, adapters, and what is refused before weights are read."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sftron.checkpoint.hf_weights import load_model
from sftron.checkpoint.model_folder import read_config
from sftron.commands.convert import main as convert
from sftron.config.load import load_config
from sftron.models.generation import greedy_generate
from sftron.models.routing import is_correction
from sftron.train import build_model
from sftron.train.build_run import build_run
from sftron.train.ranks import start_ranks
from tests.checkpoint.test_wrappers import WRAPPERS
from tests.conftest import ASSETS
from tests.models.packed_experts import pack_experts
from tests.models.reference import EXPERTS, FAMILIES, GPT_OSS, make_native, make_reference, pack
from tests.train.runs import make_config, make_model_folder, metrics, run, settings, write_config, write_rows

MOE: dict[str, Any] = {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 40}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "moe", **MOE, output_router_logits=True)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_and_exports_the_keys_of_its_source(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"optimizer__schedule": "constant"}
    whole = run(make_config(tmp_path, folder, general__run_name="whole", tokens__train_steps=6, **options))
    output = capsys.readouterr().out
    assert "6 experts in 2 layers, 2 and a shared one a token; routers trained" in output
    assert "router_aux_loss_coef 0.001 (config.json)" in output
    run(make_config(tmp_path, folder, tokens__train_steps=3, **options))
    resumed = run(make_config(tmp_path, folder, tokens__train_steps=6, **options))
    for (name, a), (_, b) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert a.equal(b), name
    steps = metrics(whole.directory.folder)
    assert [step["experts"] for step in steps] == [step["experts"] for step in metrics(resumed.directory.folder)]
    assert all(2 < step["experts"]["aux_loss"] < 4 for step in steps)
    assert all(1 / 6 < step["experts"]["largest_share"] <= 1 / 2 for step in steps)
    assert "router_aux_loss_coef: 0.001" in (whole.directory.folder / "config.yaml").read_text()
    latest = whole.directory.folder / "latest"
    exported, source = (load_file(each / "model.safetensors") for each in (latest, folder))
    assert exported.keys() == source.keys()
    experts = [name for name in source if re.search(r"experts\.\d\.|\.gate\.weight", name)]
    assert len(experts) == 2 * (6 * 3 + 1)
    assert not any(exported[name].equal(source[name]) for name in experts)
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(latest, experts_implementation="eager")
    assert all(value.equal(exported_value) for value, exported_value in _same(reference, whole.model))


def _same(reference: Any, native: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    ours = dict(native.named_parameters())
    return [(value, ours[name].detach()) for name, value in reference.state_dict().items() if name in ours]


def test_frozen_routers_keep_every_bit(tmp_path: Path, folder: Path) -> None:
    trainer = run(make_config(tmp_path, folder, model__freeze_router=True, tokens__train_steps=2))
    before = dict(load_model(folder, compute_dtype=torch.float32).named_parameters())
    for name, parameter in trainer.model.named_parameters():
        is_router = name.endswith(".mlp.gate.weight")
        assert parameter.requires_grad != is_router
        assert parameter.equal(before[name]) == is_router, name


def test_adapters_of_attention_and_the_shared_expert_are_trained_and_those_of_experts_refused(
    tmp_path: Path, folder: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl")
    tree = settings(tmp_path, folder, tokens__train_steps=2)
    trainer = run(load_config(write_config(tmp_path / "a.yaml", tree | {"lora": {"rank": 4}})))
    trained = {name.rpartition(".adapters.")[2] for name, p in trainer.model.named_parameters() if p.requires_grad}
    kinds = {name.split(".")[0] for name in trained}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "shared_expert_gate"}
    ends = [
        ({"rank": 4, "targets": ["experts.gate_up_proj"]}, "adapters of experts and routers are not implemented"),
        ({"rank": 4, "targets": ["gate"]}, "adapters of experts and routers are not implemented"),
    ]
    for number, (lora, message) in enumerate(ends):
        refused = load_config(write_config(tmp_path / f"{number}.yaml", tree | {"lora": lora}))
        with pytest.raises(ValueError, match=message):
            build_run(refused, start_ranks())


def test_adapters_of_a_model_with_experts_beside_its_mlps_are_of_attention_and_mlps_and_no_router_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_model_folder(tmp_path / "model", **FAMILIES["Gemma 4 26B-A4B"])
    write_rows(tmp_path / "rows.jsonl")
    tree = settings(tmp_path, folder, tokens__train_steps=2)
    trainer = run(load_config(write_config(tmp_path / "a.yaml", tree | {"lora": {"rank": 4}})))
    trained = {name.rpartition(".adapters.")[2] for name, p in trainer.model.named_parameters() if p.requires_grad}
    kinds = {name.split(".")[0] for name in trained}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert "6 experts in 5 layers, 2 a token; routers frozen; router_aux_loss_coef 0" in capsys.readouterr().out
    before, after = (load_file(each / "model.safetensors") for each in (folder, trainer.directory.folder / "latest"))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert {name.split(".")[-2] for name in changed} == kinds
    for target in ("router.proj", "experts.down_proj"):
        lora = {"rank": 4, "targets": [target]}
        refused = load_config(write_config(tmp_path / "b.yaml", tree | {"lora": lora}))
        with pytest.raises(ValueError, match="adapters of experts and routers are not implemented"):
            build_run(refused, start_ranks())


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "shared_experts.up_proj"]])
def test_adapters_that_peft_would_take_for_those_of_experts_are_refused(
    tmp_path: Path, corrected: Path, targets: Any
) -> None:
    """peft loads such an adapter without them, and its logits are others."""
    write_rows(tmp_path / "rows.jsonl")
    tree = settings(tmp_path, corrected, tokens__train_steps=1)
    for chosen in (targets, ["q_proj", "o_proj"]):
        lora = {"rank": 4, "targets": chosen}
        config = load_config(write_config(tmp_path / "a.yaml", tree | {"lora": lora}))
        if chosen is targets:
            with pytest.raises(ValueError, match=r"peft silently drops in glm4_moe, .*; set lora\.targets: \["):
                run(config)
        else:
            run(config)


def test_a_run_does_not_go_on_from_an_adapter_that_peft_would_load_in_part(
    tmp_path: Path, corrected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "rows.jsonl")
    tree = settings(tmp_path, corrected, tokens__train_steps=1)
    for targets in (["q_proj", "shared_experts.up_proj"], ["q_proj", "o_proj"]):
        lora = {"rank": 4, "targets": targets}
        with monkeypatch.context() as earlier:  # in which such an adapter was trained
            earlier.setattr(build_model, "_TAKEN_FOR_EXPERTS", frozenset())
            trainer = run(load_config(write_config(tmp_path / "a.yaml", tree | {"lora": lora})))
        adapter = trainer.directory.adapter(1).rename(tmp_path / targets[1])
        shutil.rmtree(trainer.directory.folder)
        config = load_config(write_config(tmp_path / "b.yaml", tree | {"lora": {"adapter": str(adapter)}}))
        if "o_proj" in targets:
            run(config)
        else:
            with pytest.raises(
                ValueError, match=r"^lora\.adapter: .* peft silently drops in glm4_moe, .* experts; merge it into"
            ):
                run(config)


def test_what_only_a_mixture_has_or_lacks_is_refused_before_weights_are_read(
    tmp_path: Path, folder: Path, model_folder: Path, corrected: Path
) -> None:
    for where, options, message in (
        (model_folder, {"model__router_aux_loss_coef": 0.1}, "router_aux_loss_coef is set, but .* no experts"),
        (model_folder, {"model__freeze_router": True}, "freeze_router is set, but .* no experts"),
        (folder, {"model__compile": "on"}, "compile: on is not implemented for mixtures of experts"),
        (corrected, {"model__router_aux_loss_coef": 0.1}, "have no auxiliary loss .a fixed correction"),
    ):
        with pytest.raises(ValueError, match=message):
            build_run(make_config(tmp_path, where, **options), start_ranks())


@pytest.fixture(scope="module")
def corrected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GLM 4.5 in bf16, whose corrections are in fp32, with a layer that transformers does not load."""
    options: dict[str, Any] = {"output_router_logits": True, "num_nextn_predict_layers": 1}
    folder = make_model_folder(tmp_path_factory.mktemp("models") / "glm", **FAMILIES["GLM 4.5"] | options)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: each if is_correction(name) else each.bfloat16() for name, each in tensors.items()}
    further = {"model.layers.2.eh_proj.weight": torch.randn(32, 64), "model.layers.2.mlp.gate.weight": torch.ones(2)}
    save_file(tensors | further, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_corrections_and_layers_that_are_not_loaded_keep_every_bit_in_runs_checkpoints_and_exports(
    tmp_path: Path, corrected: Path
) -> None:
    options: dict[str, Any] = {"optimizer__schedule": "constant", "optimizer__learning_rate": 1e-2}
    whole = run(make_config(tmp_path, corrected, general__run_name="whole", tokens__train_steps=4, **options))
    run(make_config(tmp_path, corrected, tokens__train_steps=2, **options))
    resumed = run(make_config(tmp_path, corrected, tokens__train_steps=4, **options))
    for (name, a), (_, b) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert a.equal(b), name
        assert a.requires_grad != is_correction(name)
    assert all(1 / 12 < step["experts"]["largest_share"] <= 1 / 3 for step in metrics(whole.directory.folder))

    latest, source = whole.directory.folder / "latest", load_file(corrected / "model.safetensors")
    exported = load_file(latest / "model.safetensors")
    assert exported.keys() == source.keys()
    kept = {name for name in source if is_correction(name) or name.startswith("model.layers.2.")}
    assert len(kept) == 3
    assert {name for name in source if exported[name].equal(source[name])} == kept
    assert all(exported[name].dtype == torch.float32 for name in kept)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(latest, output_loading_info=True)
    assert loaded[1].pop("unexpected_keys") == {name for name in kept if not is_correction(name)}
    assert not any(loaded[1].values()), loaded[1]

    checkpoint = whole.directory.checkpoints / "step-4"
    assert convert([str(checkpoint), str(tmp_path / "converted")]) == 0
    assert (tmp_path / "converted" / "model.safetensors").read_bytes() == (latest / "model.safetensors").read_bytes()
    assert convert([str(corrected), str(tmp_path / "native")]) == 0
    begun = {"checkpoints__resume": str(tmp_path / "native"), "checkpoints__load": "weights"}
    again = run(make_config(tmp_path, corrected, general__run_name="begun", tokens__train_steps=4, **options | begun))
    assert all(a.equal(b) for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True))


def test_a_layer_beyond_the_last_one_is_refused_if_config_json_states_no_such_layers(
    tmp_path: Path, corrected: Path
) -> None:
    folder = shutil.copytree(corrected, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match=r"model\.layers\.2\.eh_proj\.weight: unexpected"):
        load_model(folder)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss whose experts are in MXFP4."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 32, "vocab_size": 768}
    reference = make_reference(**(GPT_OSS | sizes), initializer_range=0.1)
    folder = pack_experts(reference, tmp_path_factory.mktemp("gpt_oss"))["mxfp4"]
    shutil.copytree(ASSETS / "tokenizer", folder, dirs_exist_ok=True)
    return folder


def test_a_run_from_weights_in_mxfp4_resumes_and_exports_them_in_its_own_type(
    tmp_path: Path, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"optimizer__schedule": "constant", "optimizer__learning_rate": 1e-3}
    whole = run(make_config(tmp_path, packed, general__run_name="whole", tokens__train_steps=4, **options))
    output = capsys.readouterr().out
    assert "6 experts in 2 layers, 3 a token; routers trained; router_aux_loss_coef 0 (config.json)" in output
    assert "the experts are stored in MXFP4 and read as bfloat16, exactly; an export stores them as float32" in output
    run(make_config(tmp_path, packed, tokens__train_steps=2, **options))
    resumed = run(make_config(tmp_path, packed, tokens__train_steps=4, **options))
    before = dict(load_model(packed, compute_dtype=torch.float32).named_parameters())
    for (name, a), (_, b) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert a.equal(b), name
        assert not a.equal(before[name]), name
    latest = whole.directory.folder / "latest"
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(latest, output_loading_info=True)
    assert not any(loaded[1].values()), loaded[1]
    pairs = _same(loaded[0], whole.model)
    assert len(pairs) == 2 * 9 + 3  # of a layer, all but q, k, v and the router have the native name
    assert all(value.equal(trained) for value, trained in pairs)


def test_adapters_on_weights_in_mxfp4_are_merged_into_the_same_weights_in_bf16(tmp_path: Path, packed: Path) -> None:
    write_rows(tmp_path / "rows.jsonl")
    tree = settings(tmp_path, packed, tokens__train_steps=2)
    trainer = run(load_config(write_config(tmp_path / "a.yaml", tree | {"lora": {"rank": 4}})))
    trained = {name.rpartition(".adapters.")[2] for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(trainer.directory.hf(2), output_loading_info=True)
    assert not any(loaded[1].values()), loaded[1]
    base = dict(load_model(packed, compute_dtype=torch.float32).named_parameters())
    experts = {name: value for name, value in loaded[0].state_dict().items() if ".experts." in name or "sinks" in name}
    assert len(experts) == 2 * 5
    assert all(value.equal(base[name]) for name, value in experts.items())


def test_a_run_takes_the_factor_of_a_wrapper_from_its_text_model(tmp_path: Path) -> None:
    text = WRAPPERS["qwen3_5_moe"]["text_config"] | {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))
    options: Any = SimpleNamespace(router_aux_loss_coef=None, freeze_router=False, compile="off")
    architecture = read_config(tmp_path)
    assert build_model._router_aux_loss_coef(SimpleNamespace(model=options), architecture, tmp_path) == 0.3  # pyright: ignore[reportArgumentType]


SPELLED = ["Mixtral", "Qwen 2 MoE", "Qwen 3 MoE with dense layers", "OLMoE", "Qwen 3.5 MoE", "Qwen3-Next"]
SPELLED += ["GLM 4.5", "Granite MoE, shared", "Granite 4 with experts"]


@pytest.mark.parametrize("family", SPELLED)
def test_fused_and_separate_experts_are_the_same_model_and_greedy_tokens_are_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    reference = make_reference(**FAMILIES[family])
    reference.save_pretrained(tmp_path / "separate")
    config = json.loads((tmp_path / "separate" / "config.json").read_text())
    (tmp_path / "fused").mkdir()
    (tmp_path / "fused" / "config.json").write_text(json.dumps(config))
    save_file(reference.state_dict(), tmp_path / "fused" / "model.safetensors")
    separate, fused = (load_model(tmp_path / each, compute_dtype=torch.float32) for each in ("separate", "fused"))
    expected = dict(make_native(reference).named_parameters())
    for model in (separate, fused):
        assert all(parameter.equal(expected[name]) for name, parameter in model.named_parameters())
    inputs = pack([30])[0][None]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
    tokens = reference.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    generation = greedy_generate(separate, inputs[0].tolist(), 20, ())
    assert list(generation.token_ids) == tokens[0, 30:].tolist()
    assert len(set(generation.token_ids)) > 3
