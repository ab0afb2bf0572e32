"""Checkpoints of multimodal models: the text model is read, and all else is carried through an export bit for bit."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sftron.checkpoint.adapter import model_projections, read_adapter, tensor_shapes, write_adapter
from sftron.checkpoint.export import export_hf
from sftron.checkpoint.hf_weights import load_model
from sftron.checkpoint.merge import MergeReport, merged_weights
from sftron.checkpoint.model_folder import read_config
from sftron.checkpoint.source import ExportSource
from sftron.checks.reference import load_reference
from sftron.models.adapters import AdapterStart, LoraSpec
from sftron.models.architecture import LlamaConfig
from tests.conftest import rest_nightly
from tests.models.reference import FAMILIES, QWEN_3_5, QWEN_3_5_MOE, TINY, make_reference, pack

_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION_3_5 = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
_VISION_3_5 |= {"out_hidden_size": 32, "num_position_embeddings": 16}
_PATCHES = _VISION | {"image_size": 28, "patch_size": 14}
_SIGLIP = {"model_type": "siglip_vision_model", **_PATCHES}
_CLIP = {"model_type": "clip_vision_model", **_PATCHES, "projection_dim": 16}
_TEXT = {key: value for key, value in TINY.items() if key != "initializer_range"}
_FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
WRAPPERS: dict[str, dict[str, Any]] = {
    "mistral3": {
        "text_config": {"model_type": "mistral", **_TEXT, "head_dim": 8},
        "vision_config": {"model_type": "pixtral", **_PATCHES},
        "tie_word_embeddings": False,
    },
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", **_TEXT, "head_dim": 8},
        "vision_config": _SIGLIP,
        "mm_tokens_per_image": 4,
    },
    "qwen3_5": {
        "text_config": {**_TEXT, **{key: value for key, value in QWEN_3_5.items() if key != "model_type"}},
        "vision_config": _VISION_3_5,
    },
    "qwen3_5_moe": {
        # Two layers, so that the rounding of merged weights stays small.
        "text_config": {**_TEXT, **{key: value for key, value in QWEN_3_5_MOE.items() if key != "model_type"}}
        | {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
        "vision_config": _VISION_3_5,
    },
    "gemma4": {
        "text_config": {**_TEXT, **FAMILIES["Gemma 4 E2B"], **_FOUR_LAYERS},
        "vision_config": _VISION | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        "audio_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16}
        | {"subsampling_conv_channels": [4, 2], "use_clipped_linears": False},  # whose bounds are infinite
    },
    "gemma4_unified": {
        "text_config": {**_TEXT, **FAMILIES["Gemma 4 12B"], **_FOUR_LAYERS},
        "vision_config": {"mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 16},
    },
    "internvl": {
        "text_config": {"model_type": "qwen3", **_TEXT, "head_dim": 12},
        "vision_config": {"model_type": "internvl_vision", **_VISION, "image_size": [28, 28], "patch_size": [14, 14]},
        "downsample_ratio": 0.25,
        "tie_word_embeddings": False,
    },
    "llava": {
        "text_config": {"model_type": "mistral", **_TEXT, "head_dim": 8},
        "vision_config": _CLIP,
        "vision_feature_select_strategy": "full",
    },
    "llava_next": {"text_config": {"model_type": "llama", **_TEXT}, "vision_config": _CLIP, "image_seq_length": 9},
    "llava_onevision": {
        "text_config": {"model_type": "qwen2", **_TEXT},
        "vision_config": _SIGLIP,
        "vision_aspect_ratio": "anyres_max_4",
    },
}
"""The config of a tiny model of each wrapper."""
BESIDE_EXPERTS = "gemma4, 26B-A4B"
_ALL: dict[str, dict[str, Any]] = WRAPPERS | {
    BESIDE_EXPERTS: {
        "text_config": {**_TEXT, **FAMILIES["Gemma 4 26B-A4B"], **_FOUR_LAYERS},
        "vision_config": _VISION | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
    }
}


def make_wrapper(name: str, vocab_size: int = TINY["vocab_size"]) -> Any:
    torch.manual_seed(0)
    given, model_type = _ALL[name], name.partition(",")[0]
    sizes = {key: vocab_size for key in ("vocab_size", "vocab_size_per_layer_input") if key in given["text_config"]}
    config = transformers.AutoConfig.for_model(model_type, **given | {"text_config": given["text_config"] | sizes})
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    return model


def save(model: Any, folder: Path) -> None:
    """Saves the model with a tensor that transformers does not load, where there are such ones."""
    model.save_pretrained(folder)
    if model.config.model_type in ("qwen3_5", "qwen3_5_moe"):
        tensors = load_file(folder / "model.safetensors")
        # Its experts may be spelled otherwise than those of the text model.
        name = "mtp.layers.0.mlp.experts.0.gate_proj.weight"
        tensors[name] = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def export(folder: Path, source: Path | ExportSource, weights: Any, dtype: torch.dtype = torch.float32) -> None:
    export_hf(weights, folder, source_folder=source, dtype=dtype, stop_token_ids=[3])


@pytest.mark.parametrize(
    "model_type", rest_nightly(_ALL, ["mistral3", "gemma3", "gemma4", BESIDE_EXPERTS, "qwen3_5", "internvl"])
)
def test_the_text_model_is_read_and_all_else_is_exported_as_it_was(model_type: str, tmp_path: Path) -> None:
    reference = make_wrapper(model_type)
    save(reference, tmp_path / "source")
    (tmp_path / "source" / "preprocessor_config.json").write_text('{"size": 28}')
    native = load_model(tmp_path / "source", compute_dtype=torch.float32)
    input_ids, *rest = pack([40])
    expected = reference(input_ids[None], use_cache=False).logits[0]
    assert expected.abs().max() > 1
    torch.testing.assert_close(native.head.logits(native(input_ids, *rest)), expected, atol=2e-4, rtol=1e-5)

    source = ExportSource.read(tmp_path / "source")
    assert source.carried
    before = load_file(tmp_path / "source" / "model.safetensors")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    for path in (tmp_path / "source").iterdir():
        path.unlink()
    export(tmp_path / "out", source, native.named_parameters())
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(after[name].equal(tensor) for name, tensor in before.items())
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["text_config"].items() <= written["text_config"].items()
    assert {key: written[key] for key in config.keys() - {"text_config"}} == {
        key: value for key, value in config.items() if key != "text_config"
    }
    assert (tmp_path / "out" / "preprocessor_config.json").exists()
    kind = transformers.AutoModelForImageTextToText
    again, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert all(again.state_dict()[name].equal(tensor) for name, tensor in reference.state_dict().items())
    assert read_config(tmp_path / "out") == native.config


def test_only_the_text_model_changes_and_only_its_type(tmp_path: Path) -> None:
    save(make_wrapper("mistral3"), tmp_path / "source")
    native = load_model(tmp_path / "source", compute_dtype=torch.float32)
    with torch.no_grad():
        for parameter in native.parameters():
            parameter.add_(0.5)
    export(tmp_path / "out", tmp_path / "source", native.named_parameters(), torch.bfloat16)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("source", "out"))
    carried = {name for name in before if "vision_tower" in name or "multi_modal_projector" in name}
    assert len(carried) > 5
    assert {name for name in before if after[name].equal(before[name])} == carried
    assert {after[name].dtype for name in before.keys() - carried} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
@pytest.mark.parametrize("model_type", rest_nightly(_ALL, ["mistral3", "gemma3", "qwen3_5"]))
def test_peft_loads_an_adapter_into_the_class_that_transformers_has_for_the_wrapper(
    model_type: str, tmp_path: Path
) -> None:
    """Layers for images have a q_proj as well, so the targets are whole names."""
    peft = pytest.importorskip("peft")
    save(make_wrapper(model_type), tmp_path / "source")
    config = read_config(tmp_path / "source")
    names = sorted(model_projections(config))
    # One layer without an adapter, and one with another rank.
    ranks = dict.fromkeys(names[1:], 4) | {names[1]: 2}
    spec = LoraSpec(ranks=ranks, alphas=dict.fromkeys(ranks, 8.0), modules_to_save=("embed_tokens",))
    tensors = {name: torch.randn(shape) * 0.3 for name, shape in tensor_shapes(spec, config).items()}
    out, source = tmp_path / "adapter", ExportSource.read(tmp_path / "source")
    write_adapter(out, tensors, spec, source=source, base_model="base")
    again = read_adapter(out, config)
    assert again.spec == spec
    assert all(again.tensors[name].equal(tensor) for name, tensor in tensors.items())

    native = load_model(
        tmp_path / "source", compute_dtype=torch.float32, adapters=AdapterStart(spec=spec, tensors=tensors)
    )
    base = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "source", attn_implementation="eager")
    assert type(base).__name__ == source.config["architectures"][0]
    adapted: Any = peft.PeftModel.from_pretrained(base, out)
    added = {name for name, _ in adapted.named_parameters() if ".lora_" in name}
    assert len(added) == 2 * len(ranks)
    input_ids, *rest = pack([40])
    expected = adapted(input_ids=input_ids[None], use_cache=False).logits[0]
    logits = native.head.logits(native(input_ids, *rest))
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-5)
    # check_sft finds the class that the adapter is named for.
    reference = load_reference(tmp_path / "source", torch.float32, torch.device("cpu"), out)
    torch.testing.assert_close(logits, reference(input_ids[None], use_cache=False).logits[0], atol=1e-3, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
@pytest.mark.parametrize("model_type", rest_nightly(_ALL, ["qwen3_5"]))
def test_a_merge_is_the_model_that_peft_merges_with_all_else_as_it_was(model_type: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    save(make_wrapper(model_type), tmp_path / "source")
    config = read_config(tmp_path / "source")
    ranks = dict.fromkeys(sorted(model_projections(config)), 4)
    spec = LoraSpec(ranks=ranks, alphas=dict.fromkeys(ranks, 8.0))
    tensors = {name: torch.randn(shape) * 0.3 for name, shape in tensor_shapes(spec, config).items()}
    source = ExportSource.read(tmp_path / "source")
    write_adapter(tmp_path / "adapter", tensors, spec, source=source, base_model="base")
    export(tmp_path / "out", source, merged_weights(tmp_path / "source", tensors, spec, MergeReport(torch.float32)))

    kind = transformers.AutoModelForImageTextToText
    base, found = (kind.from_pretrained(tmp_path / folder, attn_implementation="eager") for folder in ("source", "out"))
    before, after = base.state_dict(), found.state_dict()
    changed = {name for name, tensor in after.items() if not tensor.equal(before[name])}
    assert len(changed) == len(ranks)
    adapted: Any = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    merged = adapted.merge_and_unload()
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=1e-5)
    input_ids, *rest = pack([40])
    expected = merged(input_ids=input_ids[None], use_cache=False).logits[0]
    close = {"rtol": 0, "atol": 1e-5 * expected.abs().max().item()}
    torch.testing.assert_close(found(input_ids=input_ids[None], use_cache=False).logits[0], expected, **close)
    native = load_model(tmp_path / "out", compute_dtype=torch.float32)
    torch.testing.assert_close(native.head.logits(native(input_ids, *rest)), expected, **close)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
def test_an_adapter_of_the_text_class_alone_is_read_and_compared_in_that_class(tmp_path: Path) -> None:
    """As peft writes it for the class that AutoModelForCausalLM loads from a folder of Qwen 3.5."""
    peft = pytest.importorskip("peft")
    save(make_wrapper("qwen3_5"), tmp_path / "source")
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source", attn_implementation="eager")
    options = {"r": 4, "target_modules": ["q_proj", "in_proj_qkv", "down_proj"], "init_lora_weights": False}
    adapted: Any = peft.get_peft_model(text, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    adapted.save_pretrained(tmp_path / "adapter")
    read = read_adapter(tmp_path / "adapter", read_config(tmp_path / "source"))
    native = load_model(
        tmp_path / "source", compute_dtype=torch.float32, adapters=AdapterStart(spec=read.spec, tensors=read.tensors)
    )
    reference = load_reference(tmp_path / "source", torch.float32, torch.device("cpu"), tmp_path / "adapter")
    input_ids, *rest = pack([40])
    expected = reference(input_ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(native.head.logits(native(input_ids, *rest)), expected, atol=1e-3, rtol=1e-5)


def test_a_tensor_that_no_part_of_the_model_has_is_refused_by_name(tmp_path: Path) -> None:
    save(make_wrapper("mistral3"), tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    save_file(load_file(path) | {"audio_tower.weight": torch.ones(2)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"audio_tower\.weight"):
        load_model(tmp_path / "source")
    save_file(load_file(path) | {"model.language_model.norm.weight": torch.ones(32)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight and model\.language_model\.norm\.weight"):
        load_model(tmp_path / "source")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, r"text_config is None"),
        ({"tie_word_embeddings": None}, r"tie_word_embeddings: None is neither true nor false"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: True, but sftron does not support"),
        ({"sliding_window": 9}, "sliding_window: 9, but sftron does not support"),
        ({"text_config": {"model_type": "cohere", "head_dim": None}}, "its logits have a factor, which Mistral3For"),
        ({"text_config": {"model_type": "gemma2"}}, "its logits have a soft cap, which Mistral3For"),
        ({"text_config": {"model_type": "phi", "head_dim": None}}, "its logits have a bias, which Mistral3For"),
    ],
)
def test_wrong_keys_of_a_wrapper_are_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = {"model_type": "mistral3", **WRAPPERS["mistral3"]}
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(value, dict) and key in config else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_a_tensor_in_a_wider_type_than_the_others_keeps_it(tmp_path: Path) -> None:
    reference = make_wrapper("mistral3").bfloat16()
    reference.model.language_model.norm.float()
    save(reference, tmp_path / "source")
    native = load_model(tmp_path / "source", compute_dtype=torch.float32)
    export(tmp_path / "out", tmp_path / "source", native.named_parameters(), torch.bfloat16)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("source", "out"))
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16, torch.float32}
    assert all(after[name].equal(tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items())


def test_sizes_missing_from_a_released_text_config_default_to_transformers() -> None:
    """As in google/gemma-3-4b-it."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = {"model_type": "gemma3", "mm_tokens_per_image": 256, "image_token_index": 262144, "text_config": text}
    theirs = transformers.AutoConfig.for_model(**config).get_text_config()
    # LLaVA 1.5 repeats a size.
    ours = LlamaConfig.from_hf(config | {"vocab_size": 262208})
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert [getattr(ours, size) for size in sizes] == [getattr(theirs, size) for size in sizes]
    assert ours.num_attention_heads == 8


def _states_ties(config: dict[str, Any], top: bool | None, text: bool | None) -> dict[str, Any]:
    """Returns a config.json with these values of tie_word_embeddings; None is an absent key."""
    key = "tie_word_embeddings"
    text_config = {name: value for name, value in config["text_config"].items() if name != key}
    config = {name: value for name, value in config.items() if name != key}
    config["text_config"] = text_config | ({} if text is None else {key: text})
    return config | ({} if top is None else {key: top})


@pytest.mark.parametrize("model_type", rest_nightly(WRAPPERS, ["mistral3", "qwen3_5", "llava"]))
def test_a_head_is_tied_where_every_class_of_transformers_has_that_head(model_type: str, tmp_path: Path) -> None:
    """The wrapper's own key decides, and a stored head is tied only if it is the embeddings. Where a class of
    transformers would start with a random head, the folder is refused."""
    reference = make_wrapper(model_type)
    reference.config.tie_word_embeddings = reference.config.text_config.tie_word_embeddings = False
    embeddings = reference.get_input_embeddings().weight
    reference.lm_head.weight = torch.nn.Parameter(torch.randn_like(embeddings) * 0.3)
    save(reference, tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    (head,) = (name for name in tensors if name.endswith("lm_head.weight"))
    heads = {"apart": tensors.pop(head), "equal": embeddings.detach().clone(), "absent": None}
    kinds = [transformers.AutoModelForImageTextToText]
    kinds += [transformers.AutoModelForCausalLM] if model_type == "qwen3_5" else []
    input_ids, *rest = pack([40])
    num_tied = num_refused = 0
    for top, text, weight in itertools.product((None, True, False), (None, True, False), heads.values()):
        (tmp_path / "config.json").write_text(json.dumps(_states_ties(config, top, text)))
        stored = tensors if weight is None else tensors | {head: weight}
        save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
        loaded = [kind.from_pretrained(tmp_path, output_loading_info=True) for kind in kinds]
        if any(info["missing_keys"] for _, info in loaded):
            num_refused += 1
            with pytest.raises(ValueError, match=r"lm_head\.weight: missing|there is no head that suits both"):
                load_model(tmp_path)
            continue
        native = load_model(tmp_path, compute_dtype=torch.float32)
        logits = native.head.logits(native(input_ids, *rest))
        for model, _ in loaded:
            torch.testing.assert_close(logits, model(input_ids[None], use_cache=False).logits[0], atol=2e-4, rtol=1e-5)
        of_wrapper = loaded[0][0]
        is_tied = of_wrapper.get_output_embeddings().weight is of_wrapper.get_input_embeddings().weight
        assert native.config.tie_word_embeddings == is_tied
        num_tied += is_tied
    assert num_tied >= 4
    assert num_refused >= 1


def test_a_folder_of_mistral_3_as_transformers_saves_it_is_read(tmp_path: Path) -> None:
    """The released ones have no key at the top, where the class's default is true, and a head of their own."""
    config = transformers.AutoConfig.for_model("mistral3", **_states_ties(WRAPPERS["mistral3"], None, False))
    model: Any = transformers.AutoModelForImageTextToText.from_config(config)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["tie_word_embeddings"], written["text_config"]["tie_word_embeddings"]) == (True, False)
    native = load_model(tmp_path, compute_dtype=torch.float32)
    assert native.head_weight.equal(model.lm_head.weight)
    # The keys alone would tie it, so a head that differs only in later rows is no reason to.
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["language_model.model.embed_tokens.weight"].clone()
    head[-1] += 1
    save_file(tensors | {"language_model.lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="differ"):
        load_model(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_constant_among_the_weights_is_carried_and_another_value_of_it_is_refused(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """The beta and the eps of xIELU, which transformers stores as buffers."""
    reference = make_reference(**FAMILIES["Apertus"]).to(dtype)
    reference.save_pretrained(tmp_path / "source")
    native = load_model(tmp_path / "source")
    assert not any(name.endswith(("beta", "eps")) for name, _ in native.named_parameters())
    options: dict[str, Any] = {"source_folder": tmp_path / "source", "dtype": dtype, "stop_token_ids": [3]}
    export_hf(native.named_parameters(), tmp_path / "out", **options)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("source", "out"))
    constants = [name for name in before if name.endswith((".act_fn.beta", ".act_fn.eps"))]
    assert len(constants) == 4
    assert all(after[name].equal(before[name]) for name in constants)

    reference.model.layers[1].mlp.act_fn.beta.fill_(0.25)
    reference.save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.act_fn\.beta: 0\.25; sftron supports only 0\.5"):
        load_model(tmp_path / "source")
