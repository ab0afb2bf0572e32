"""Gemma 4: the tensors of the released models, keys that layers share, inputs of layers, and what is refused."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sftron.checkpoint.checkpoint import load_checkpoint, shards_to_store, state_text, write_checkpoint
from sftron.checkpoint.export import export_hf
from sftron.checkpoint.hf_weights import load_model
from sftron.checkpoint.model_folder import read_json
from sftron.checkpoint.source import ExportSource
from sftron.models.architecture import LlamaConfig
from sftron.models.attention import describe_backends
from sftron.models.fusion import expected_shapes
from sftron.models.llama import LlamaForSFT, attention_of_layers
from tests.models.reference import FAMILIES, TINY, make_native, make_reference, pack
from tests.models.test_pretended_families import _batch, _step
from tests.pretended import pretended_gpu

_ROPE = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
_COMMON: dict[str, Any] = {"model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 512, "vocab_size": 262144}
_COMMON |= {"rope_parameters": _ROPE, "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh"}
_SMALL = _COMMON | {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "sliding_window": 512}
_LARGE = _COMMON | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "sliding_window": 1024}
_LARGE |= {"use_bidirectional_attention": "vision", "max_position_embeddings": 262144, "num_kv_shared_layers": 0}


def _types(num_layers: int, period: int) -> list[str]:
    return ["sliding_attention" if number % period else "full_attention" for number in range(1, num_layers + 1)]


def _sizes(hidden: int, inner: int, num_layers: int, num_heads: int, num_kv_heads: int) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(zip(names, (hidden, inner, num_layers, num_heads, num_kv_heads), strict=True))


RELEASED: dict[str, dict[str, Any]] = {
    "E2B": _SMALL
    | _sizes(1536, 6144, 35, 8, 1)
    | {"num_kv_shared_layers": 20, "use_double_wide_mlp": True, "layer_types": _types(35, 5)},
    "E4B": _SMALL | _sizes(2560, 10240, 42, 8, 2) | {"num_kv_shared_layers": 18, "layer_types": _types(42, 6)},
    "12B": _LARGE
    | _sizes(3840, 15360, 48, 16, 8)
    | {"num_global_key_value_heads": 1, "model_type": "gemma4_unified_text", "layer_types": _types(48, 6)},
    "26B-A4B": _LARGE
    | _sizes(2816, 2112, 30, 16, 8)
    | {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    | {"num_global_key_value_heads": 2, "layer_types": _types(30, 6)},
    "31B": _LARGE | _sizes(5376, 21504, 60, 32, 16) | {"num_global_key_value_heads": 4, "layer_types": _types(60, 6)},
}
"""The keys of the released text models from which their tensors follow."""
SHARED = FAMILIES["Gemma 4 E2B"]


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_model_has_the_tensors_of_transformers(name: str) -> None:
    native = LlamaConfig.from_hf(RELEASED[name])
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**RELEASED[name]))
        model = LlamaForSFT(native)
    found = expected_shapes(((name, each.shape) for name, each in model.named_parameters()), native)
    expected = {name: tensor.shape for name, tensor in reference.state_dict().items()}
    del expected["lm_head.weight"]  # tied
    assert found == expected
    assert {native.of_layer(layer).head_dim for layer in native.layers} == {256, 512}


@pytest.mark.parametrize("name", RELEASED)
def test_on_a_gpu_heads_of_256_are_computed_by_varlen_and_those_of_512_by_sdpa(name: str) -> None:
    config = LlamaConfig.from_hf(RELEASED[name])
    with pretended_gpu() as gpu:
        backends = attention_of_layers("auto", config, gpu.device, torch.bfloat16)
        with pytest.raises(ValueError, match=r"'varlen' cannot run here: varlen takes a head_dim of 8 to 256 .* 512"):
            attention_of_layers("varlen", config, gpu.device, torch.bfloat16)
    assert backends == tuple("sdpa" if layer.head_dim == 512 else "varlen" for layer in config.layers)
    counts = Counter(backends)
    assert describe_backends(backends) == f"varlen in {counts['varlen']} layers, sdpa in {counts['sdpa']} layers"


def test_a_step_by_two_backends_waits_for_the_device_once() -> None:
    """sdpa reads the bounds on the CPU, and varlen gets them on the device."""
    reference = make_reference(**FAMILIES["Gemma 4 31B"] | {"global_head_dim": 264})
    batch = _batch(make_native(reference))
    results = []
    with pretended_gpu() as gpu:
        for name in ("auto", "sdpa"):
            model = make_native(reference, compute_dtype=torch.bfloat16).to(gpu.device)
            model.attention = attention_of_layers(name, model.config, gpu.device, torch.bfloat16)
            model.rope_tables.at(batch.position_ids[:1].to(gpu.device))
            gpu.reset()
            results.append(_step(model, batch.pin_memory()))
            assert gpu.waits.total() == 1, gpu.waits
    assert (results[0].loss, results[0].grad_norm) == pytest.approx((results[1].loss, results[1].grad_norm), rel=0.02)


def test_sizes_by_the_number_of_a_layer_are_read_as_those_of_all_full_layers() -> None:
    """transformers 5 saves the first, and the released files have the second."""
    config = transformers.AutoConfig.for_model(**TINY | FAMILIES["Gemma 4 31B"])
    saved = {key: value for key, value in config.to_dict().items() if value is not None}
    assert saved["per_layer_config"]["1"] == {"head_dim": 16, "num_key_value_heads": 1}
    assert LlamaConfig.from_hf(saved) == LlamaConfig.from_hf(TINY | FAMILIES["Gemma 4 31B"])


def test_keys_of_layers_that_read_those_of_another_are_exported_as_they_were(tmp_path: Path) -> None:
    """Released files may hold them. transformers does not load them, and no layer reads them."""
    reference = make_reference(**SHARED)
    reference.save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    extra = {
        f"model.layers.{number}.self_attn.{name}.weight": torch.randn(size)
        for number, size in ((3, 24), (4, 32))
        for name in ("k_proj", "v_proj", "k_norm")
    }
    stored = load_file(path) | extra
    save_file(stored, path, metadata={"format": "pt"})
    native = load_model(tmp_path / "source", compute_dtype=torch.float32)
    batch = pack([40])
    expected = reference(batch[0][None], use_cache=False).logits[0]
    torch.testing.assert_close(native.head.logits(native(*batch)), expected, atol=2e-4, rtol=1e-5)
    export(native, tmp_path)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(exported[name].equal(tensor) for name, tensor in stored.items())
    # Of a layer with its own keys, the same names are the model's.
    save_file(stored | {"model.layers.2.self_attn.v_norm.weight": torch.ones(12)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.2\.self_attn\.v_norm\.weight: unexpected"):
        load_model(tmp_path / "source")


def export(native: LlamaForSFT, folder: Path, **options: Any) -> None:
    source = ExportSource.read(folder / "source")
    options = {"dtype": torch.float32, "stop_token_ids": [3], **options}
    export_hf(native.named_parameters(), folder / "out", source_folder=source, **options)


def test_new_tokens_have_rows_in_both_embeddings_of_an_export(tmp_path: Path) -> None:
    make_reference(**SHARED).save_pretrained(tmp_path / "source")
    native = load_model(tmp_path / "source", compute_dtype=torch.float32, vocab_size=100, initialize_ids=[97, 98, 99])
    export(native, tmp_path, vocab_size=100)
    config = read_json(tmp_path / "out" / "config.json")
    assert (config["vocab_size"], config["vocab_size_per_layer_input"]) == (100, 100)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    for embeddings in (model.model.embed_tokens, model.model.embed_tokens_per_layer):
        mean = embeddings.weight[:97].mean(dim=0)
        torch.testing.assert_close(embeddings.weight[97:], mean.expand(3, -1), atol=1e-6, rtol=0)
    ids = torch.tensor([5, 98, 6, 99, 97])
    expected = model(ids[None], use_cache=False).logits[0]
    logits = native.head.logits(native(ids, torch.arange(5), torch.tensor([0, 5], dtype=torch.int32), 5))
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-5)


def test_a_checkpoint_holds_what_is_not_trained_and_an_earlier_one_need_not(tmp_path: Path) -> None:
    native = make_native(make_reference(**SHARED))
    optimizer = torch.optim.AdamW(each for each in native.parameters() if each.requires_grad)
    shards = shards_to_store(native, optimizer, is_main=True)
    write_checkpoint(tmp_path / "whole", 1, shards, state=state_text(1, {}))
    shards["model"] = {name: each for name, each in shards["model"].items() if "layer_scalar" not in name}
    write_checkpoint(tmp_path / "earlier", 1, shards, state=state_text(1, {}))
    for name, is_restored in (("whole", True), ("earlier", False)):
        other = make_native(make_reference(1, **SHARED))
        before = other.model.layers[0].layer_scalar.clone()
        load_checkpoint(tmp_path / name, model=other, optimizer=None)
        expected = native.model.layers[0].layer_scalar if is_restored else before
        assert other.model.layers[0].layer_scalar.equal(expected)
        assert other.model.norm.weight.equal(native.model.norm.weight)


_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enable_moe_block": 1}, "enable_moe_block: 1 is neither true nor false"),
        (_EXPERTS | {"num_experts": None}, "num_experts is missing or null, and experts need it"),
        (_EXPERTS | {"top_k_experts": 0}, "top_k_experts: 0 is not a whole number from 1"),
        (_EXPERTS | {"top_k_experts": 9}, "top_k_experts: 9 exceeds the 8 experts"),
        (_EXPERTS | {"moe_intermediate_size": None}, "moe_intermediate_size is missing or null, and experts need it"),
        (_EXPERTS | {"model_type": "gemma4_unified_text"}, "enable_moe_block: True; sftron supports only False"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: 'all'; sftron supports only"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input: -1 is not a whole number"),
        ({"vocab_size_per_layer_input": 98}, "vocab_size_per_layer_input: 98; sftron supports only vocab_size: 97"),
        ({"layer_types": ["full_attention"] * 4 + ["sliding_attention"]}, "layer_types: the last is 'sliding_att"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers: 5 is not a whole number below 5"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers: 4, but no layer before has keys of each"),
        ({"global_head_dim": 7}, "global_head_dim.*: a head_dim of 7 is not a positive even number"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "3 key-value heads do not divide"),
        ({"global_head_dim": None}, "global_head_dim.*: a head_dim of None is not a positive even number"),
        ({"per_layer_config": None}, "per_layer_config: None is not an object with the sizes"),
        ({"hidden_size_per_layer_input": 0}, "num_kv_shared_layers: 2, which transformers cannot compute with hidden_"),
        ({"per_layer_config": {"9": {"head_dim": 8}}}, "per_layer_config: .* is not an object with the sizes"),
        ({"per_layer_config": {"1": {"sliding_window": 8}}}, "per_layer_config: sliding_window; sftron supports only"),
        ({"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config: .* in layers of one type"),
        ({"rope_theta": 1e4}, "rope_theta: 10000.0, but sftron does not support this key"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling: .*, but sftron does not support this key",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    LlamaConfig.from_hf(TINY | SHARED)
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_hf(TINY | SHARED | change)
