"""config.json: read as transformers reads it, or refused by name."""

import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from sftron.kernels.activation import ACTIVATIONS
from sftron.models import config_keys
from sftron.models.architecture import DROPOUTS, FAMILIES, LlamaConfig, architecture_facts, is_of_the_model
from sftron.models.families.family import CORRECTED_IRRELEVANT
from sftron.models.mixtures import Mixture, stated_aux_coefficient
from tests.models.reference import (
    EXPERTS,
    LINEAR_ROPE,
    LLAMA3_ROPE,
    TINY,
    make_native,
    make_reference,
    pack,
    tiny_config,
)

BASE: dict[str, Any] = {"model_type": "llama", **TINY}
PUBLISHED = json.loads((Path(__file__).parents[1] / "assets" / "published_configs.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "scaling",
    [None, {"rope_type": "linear", "factor": 2.0}, {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}],
)
def test_both_forms_of_rope_and_the_oldest_name_of_its_type_are_read_alike(scaling: dict[str, Any] | None) -> None:
    config = LlamaConfig.from_hf(BASE | {"rope_theta": 7e4, "rope_scaling": scaling})
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4, **(scaling or {})}}
    assert config == LlamaConfig.from_hf(BASE | new)
    oldest = {key.removeprefix("rope_"): value for key, value in (scaling or {}).items()}
    assert config == LlamaConfig.from_hf(BASE | new | {"rope_scaling": oldest or None})
    (rope,) = config.ropes
    assert rope.theta == 7e4
    assert (rope.scaling is None) == (scaling is None)


def test_facts_of_a_checkpoint_differ_with_what_weights_depend_on() -> None:
    facts = architecture_facts(tiny_config())
    assert all(is_of_the_model(name) for name in facts)
    for change in ({"rms_norm_eps": 1e-3}, {"model_type": "mistral", "sliding_window": 9, "num_key_value_heads": 2}):
        changed = architecture_facts(LlamaConfig.from_hf(BASE | change))
        assert changed.keys() == facts.keys()
        assert changed != facts


_SAME = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
_SAME = (*_SAME, "max_position_embeddings", "tie_word_embeddings", "initializer_range")
_BIASES = {"qkv_bias": "q_proj|qkv_proj", "o_bias": "o_proj|dense", "mlp_bias": "up_proj|fc1|c_fc|gate_up_proj"}


def _by_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of LlamaConfig as transformers' config class and model have them."""
    reference = transformers.AutoConfig.for_model(**config)
    # Else it has no sizes that differ by layer (Gemma 4).
    reference.allow_global_per_layer_attribute_access = True
    with torch.device("meta"):
        reference.num_hidden_layers, layer_types = 1, getattr(reference, "layer_types", None)
        if layer_types is not None:
            # Of a hybrid, a layer with attention.
            reference.layer_types = [each for each in layer_types if each not in ("linear_attention", "conv")][:1]
        # Of a mixture with dense layers, a layer with experts.
        reference.first_k_dense_replace, reference.mlp_layer_types = 0, ["sparse"]
        reference.num_kv_shared_layers = 0  # those of others cannot be read by the first
        layer = transformers.AutoModelForCausalLM.from_config(reference).model.layers[0]
    # Mistral has no layer_types, as each of its layers slides.
    num_layers, window = config["num_hidden_layers"], getattr(reference, "sliding_window", None)
    slides = [True] * num_layers if layer_types is None else [each == "sliding_attention" for each in layer_types]
    names = dict(layer.named_parameters())
    biased = {key: bool(re.findall(rf"\.({kinds})\.bias", " ".join(names))) for key, kinds in _BIASES.items()}
    found_eps = {
        value
        for part, each in layer.named_modules()
        for name in ("eps", "variance_epsilon")
        # Those of latents are not in the configuration.
        if isinstance(value := getattr(each, name, None), float) and "_a_layernorm" not in part
    }
    (eps,) = found_eps or {1e-5}  # OLMo 1's is not in its configuration
    # Where every layer has experts, transformers has no size of a dense layer.
    unused = {key: each for key, each in FAMILIES[config["model_type"]].defaults.items() if key == "intermediate_size"}
    found = {key: getattr(reference, key, unused.get(key)) for key in _SAME}
    if getattr(layer, "block_sparse_moe", layer) is None:  # the MLP beside experts is the only one
        found["intermediate_size"] = layer.shared_mlp.hidden_size
    if hasattr(layer, "feed_forward"):  # LFM2's is not the stated one
        found["intermediate_size"] = layer.feed_forward.w1.out_features
    return found | {
        "num_hidden_layers": num_layers,
        "head_dim": _head_dim_by_transformers(layer.self_attn),
        **biased,
        "norm_eps": eps,
        "windows": [window if each else None for each in slides],
        "experts": _experts_by_transformers(_mlp_by_transformers(layer)),
    }


def _head_dim_by_transformers(attention: Any) -> int:
    return attention.head_dim if hasattr(attention, "head_dim") else max(attention.qk_head_dim, attention.v_head_dim)


def _mlp_by_transformers(layer: Any) -> Any:
    """Granite names its experts after Mixtral's, and has those of all tokens beside them. Gemma 4's are the layer's."""
    if getattr(layer, "enable_moe_block", False):
        layer.router.num_experts, layer.router.top_k = layer.experts.num_experts, layer.router.config.top_k_experts
        return layer
    if not hasattr(layer, "block_sparse_moe"):
        return layer.mlp if hasattr(layer, "mlp") else layer.feed_forward
    if layer.block_sparse_moe is not None:
        layer.block_sparse_moe.shared_expert = getattr(layer, "shared_mlp", None)
    return layer.block_sparse_moe or layer.shared_mlp


def _experts_by_transformers(mlp: Any) -> Mixture | None:
    if not hasattr(mlp, "experts"):
        return None
    shared, experts, router = getattr(mlp, "shared_expert", None), mlp.experts, getattr(mlp, "router", mlp)
    router, shared = getattr(router, "gate", router), getattr(mlp, "shared_experts", shared)
    options: dict[str, Any] = {}
    if hasattr(router, "e_score_correction_bias"):
        groups = {"num_groups": router.num_group, "num_selected_groups": router.topk_group}
        options = {"router": "corrected", "score_scale": router.routed_scaling_factor, **groups}
    is_clamped = hasattr(experts, "limit")
    return Mixture(
        num_experts=router.num_experts,
        num_selected=router.top_k,
        intermediate_size=experts.intermediate_size if is_clamped else experts.intermediate_dim,
        normalizes=getattr(router, "norm_topk_prob", True),
        shared_size=None if shared is None else getattr(shared, "intermediate_size", shared.hidden_size),
        **({"swiglu_alpha": experts.alpha, "swiglu_limit": experts.limit} if is_clamped else options),
    )


def _native(config: dict[str, Any]) -> dict[str, Any]:
    native = LlamaConfig.from_hf(config)
    return {key: getattr(native, key) for key in (*_SAME, "num_hidden_layers", "head_dim", *_BIASES, "norm_eps")} | {
        "windows": [layer.window for layer in native.layers],
        "experts": native.mixture,
    }


@pytest.mark.parametrize("name", PUBLISHED["implemented"])
def test_a_published_config_is_read_as_transformers_reads_it(name: str) -> None:
    config = PUBLISHED["implemented"][name]
    assert _native(config) == _by_transformers(config)


_MOST = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)
_MOST |= {"num_experts_per_tok": 4, "top_k_experts": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 10}
_MOST |= {"vocab_size_per_layer_input": 97}


def _small(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a tiny model with all keys of a published one but the sizes."""
    kv_heads = config.get("num_key_value_heads")
    small = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    small |= {
        "vocab_size": 97,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "pad_token_id": None,
        "dtype" if "dtype" in config else "torch_dtype": "float32",
    }
    small |= {key: min(config[key], most) for key, most in _MOST.items() if config.get(key) is not None}
    small |= {"num_key_value_heads": None if kv_heads is None else 2} if "num_key_value_heads" in config else {}
    small |= {"dtype": "float32"} if "dtype" in config else {}
    if "kv_lora_rank" in config:
        latent = {
            "q_lora_rank": 24,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
        }
        small |= {"num_key_value_heads": 4} | {key: size for key, size in latent.items() if config[key] is not None}
    small |= {"n_group": 4, "topk_group": 2} if config.get("n_group", 1) > 1 else {}
    small |= {key: 16 for key in ("head_dim",) if key in config}
    small |= {"shared_intermediate_size": 40, "mamba_d_head": 1} if "mamba_d_head" in config else {}
    small |= {key: config[key][-4:] for key in ("layer_types", "no_rope_layers") if key in config}
    if config.get("num_kv_shared_layers"):  # those that share need one of their kind before them
        small["layer_types"] = ["sliding_attention", "full_attention"] * 2
    small |= {key: 7 for key in ("sliding_window",) if config.get(key) is not None}
    rope = config.get("rope_scaling") or {}
    if "long_factor" in rope:
        count = int(16 * config.get("partial_rotary_factor", 1.0)) // 2
        small["rope_scaling"] = rope | {key: rope[key][:count] for key in ("long_factor", "short_factor")}
    return config | small


@pytest.mark.parametrize("name", PUBLISHED["implemented"])
def test_all_but_the_sizes_of_a_published_config_computes_what_it_does_in_transformers(name: str) -> None:
    """Every scale, norm, activation, window and bound: a tiny model with the same other keys has the same logits."""
    config = _small(PUBLISHED["implemented"][name])
    reference = make_reference(**config).eval()
    native = make_native(reference, LlamaConfig.from_hf(config))
    batch = pack([30])
    with torch.no_grad():
        expected = reference(batch[0][None], use_cache=False).logits[0]
        torch.testing.assert_close(native.head.logits(native(*batch)), expected, atol=2e-4, rtol=1e-5)


NULLABLE = {
    "llama": {"num_key_value_heads", "head_dim"},
    "mistral": {"head_dim", "sliding_window"},
    "qwen2": {"num_key_value_heads", "sliding_window"},
    "qwen3": {"num_key_value_heads", "sliding_window"},
    "smollm3": {"num_key_value_heads", "sliding_window"},
    "ministral3": {"sliding_window"},
    "olmo": {"num_key_value_heads", "clip_qkv"},
    "olmo2": {"num_key_value_heads"},
    "phi3": {"num_key_value_heads", "sliding_window"},
    "starcoder2": {"sliding_window"},
    "olmo3": {"num_key_value_heads"},
    **{key: {"num_key_value_heads"} for key in ("granite", "granitemoe", "granitemoeshared", "granitemoehybrid")},
    "phi": {"num_key_value_heads"},
    "stablelm": set(),
    "gemma": set(),
    "gemma2": {"attn_logit_softcapping", "final_logit_softcapping"},
    "gemma3_text": {"final_logit_softcapping"},
    "glm": set(),
    "glm4": set(),
    "glm4_moe": set(),
    "glm4_moe_lite": {"q_lora_rank", "mlp_layer_types"},
    "deepseek_v3": {"q_lora_rank", "num_key_value_heads"},
    "dots1": {"num_key_value_heads", "sliding_window"},
    "solar_open": set(),
    "cohere": {"num_key_value_heads"},
    "cohere2": {"num_key_value_heads"},
    "mixtral": {"sliding_window", "head_dim"},
    "qwen2_moe": {"mlp_only_layers"},
    "qwen3_moe": {"sliding_window", "mlp_only_layers"},
    "olmoe": {"num_key_value_heads", "clip_qkv"},
    "seed_oss": {"num_key_value_heads"},
    "ernie4_5": {"num_key_value_heads"},
    "arcee": {"num_key_value_heads", "head_dim"},
    "hunyuan_v1_dense": {"num_key_value_heads"},
    "exaone4": set(),
    "apertus": {"num_key_value_heads"},
    "cwm": set(),
    "internlm3": {"num_key_value_heads"},
    "iquestcoder": {"num_key_value_heads"},
    "hyperclovax": {"num_key_value_heads", "head_dim", "attention_multiplier"},
    "jais2": {"num_key_value_heads", "head_dim"},
    "gpt_oss": set(),
    "qwen3_5_text": set(),
    "gemma4_text": {"final_logit_softcapping", "use_bidirectional_attention", "num_experts", "top_k_experts"},
    "gemma4_unified_text": {"final_logit_softcapping"},
    "qwen3_5_moe_text": set(),
    "qwen3_next": {"mlp_only_layers"},
    "lfm2": {"layer_types", "full_attn_idxs"},
}
"""The keys whose null means something to transformers; of other keys it is an error to it."""


_NEEDED: dict[str, dict[str, Any]] = {
    "gemma4_text": {"vocab_size_per_layer_input": TINY["vocab_size"]},
    # Latent attention computes as many keys as queries; the default of their number is that of the published models.
    "glm4_moe_lite": {"num_key_value_heads": 32},
    "deepseek_v3": {"num_key_value_heads": 32},
    # transformers has no defaults of these.
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    # By default, all layers of Granite 4 have a mechanism that is not implemented.
    "granitemoehybrid": {"layer_types": ["full_attention"] * 4},
}


@pytest.mark.parametrize("has_nulls", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_absent_and_null_keys_mean_what_they_mean_to_transformers(model_type: str, has_nulls: bool) -> None:
    sizes = {key: TINY[key] for key in ("vocab_size", "intermediate_size")} | {
        "num_hidden_layers": 4,
        "pad_token_id": 0,
    }
    # As many heads as every default of key-value heads divides.
    config = {"model_type": model_type, **sizes, "num_attention_heads": 32, "hidden_size": 256}
    config |= _NEEDED.get(model_type, {})
    config |= {"head_dim": 8} if model_type == "hunyuan_v1_dense" else {}  # without it, transformers fails
    nulls = dict.fromkeys(NULLABLE[model_type]) if has_nulls else {}
    other_nulls = {"rope_scaling": None, "rope_theta": None, "unheard_of": None} if has_nulls else {}
    assert _native(config | nulls | other_nulls) == _by_transformers(config | nulls)


@pytest.mark.parametrize("window", [{}, {"sliding_window": None}, {"sliding_window": 7}])
@pytest.mark.parametrize(
    "layers",
    [{}, {"max_window_layers": 2}, {"max_window_layers": 1}, {"layer_types": ["sliding_attention", "full_attention"]}],
)
@pytest.mark.parametrize("use", [{}, {"use_sliding_window": False}, {"use_sliding_window": True}])
def test_a_qwen_window_is_read_as_transformers_reads_it(
    window: dict[str, Any], layers: dict[str, Any], use: dict[str, Any]
) -> None:
    config = {"model_type": "qwen2", **TINY, **window, **layers, **use}
    try:
        make_reference(**config)(torch.zeros(1, 9, dtype=torch.long), use_cache=False)
    except ValueError:
        with pytest.raises(ValueError, match="layer_types: 'sliding_attention', but sliding_window: "):
            LlamaConfig.from_hf(config)
    else:
        assert _native(config)["windows"] == _by_transformers(config)["windows"]


@pytest.mark.parametrize("dense", [{}, {"mlp_only_layers": [0, 3]}, {"decoder_sparse_step": 2}])
@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe", "qwen3_next"])
def test_experts_are_in_the_layers_where_transformers_has_them(model_type: str, dense: dict[str, Any]) -> None:
    reference = make_reference(model_type=model_type, **EXPERTS, **dense, num_hidden_layers=5)
    native = LlamaConfig.from_hf(reference.config.to_dict())
    expected = [hasattr(layer.mlp, "experts") for layer in reference.model.layers]
    assert [layer.mlp != "gated" for layer in native.layers] == expected
    assert any(expected)


def test_the_factor_of_the_auxiliary_loss_is_the_one_that_transformers_would_use() -> None:
    usual = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "qwen3_next", "gpt_oss")
    usual += ("granitemoe", "granitemoeshared", "granitemoehybrid")
    families = {**dict.fromkeys(usual, 0.001), "olmoe": 0.01}
    for model_type, default in families.items():
        assert transformers.AutoConfig.for_model(model_type).router_aux_loss_coef == default
        for stated, expected in (({}, default), ({"router_aux_loss_coef": 0.3}, 0.3), ({"router_aux_loss_coef": 0}, 0)):
            config = {"output_router_logits": True, **stated}
            assert stated_aux_coefficient(config, FAMILIES[model_type].defaults) == expected
            assert stated_aux_coefficient(stated, FAMILIES[model_type].defaults) == 0


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_key_that_transformers_reads_is_read_or_refused_and_any_other_is_ignored(model_type: str) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 256, "intermediate_size": 48, "num_attention_heads": 32}
    config = {"model_type": model_type, "num_hidden_layers": 4, **sizes, **_NEEDED.get(model_type, {})}
    reference = transformers.AutoConfig.for_model(model_type)
    source = inspect.getsource(inspect.getmodule(transformers.AutoModelForCausalLM._model_mapping[type(reference)]))
    asked = set(re.findall(r'getattr\(\s*(?:self\.)?config,\s*"(\w+)"', source)) - _HAVE_NO_EFFECT
    declared = reference.to_dict().keys() - _HAVE_NO_EFFECT - _HAS_NO_EFFECT_IN.get(model_type, set())
    assert len(declared) > 10
    for key in declared | asked:
        with pytest.raises(ValueError, match=rf"\b{key}\b"):
            LlamaConfig.from_hf(config | {key: "a value that no key has"})
    unheard_of = {"unheard_of": 3, "transformers.js_config": {}, "unsloth_version": "2026"}
    assert LlamaConfig.from_hf(config | unheard_of) == LlamaConfig.from_hf(config)


_HAVE_NO_EFFECT = {
    *("architectures", "dtype", "transformers_version", "_name_or_path", "use_cache", "return_dict", "pretraining_tp"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type"),
    *("output_attentions", "output_hidden_states", *DROPOUTS),
}


# Beside layer_types, without longrope, and without Mamba layers; any position embedding but "rope" is none. Also what
# only the code of generation reads, or nothing.
_HAS_NO_EFFECT_IN = {
    "gemma3_text": {"_sliding_window_pattern"},
    "phi3": {"original_max_position_embeddings"},
    "gemma4_text": {"num_experts", "top_k_experts", "moe_intermediate_size"},  # without enable_moe_block
    "hunyuan_v1_dense": {"eod_token_id"},
    "granitemoehybrid": FAMILIES["granitemoehybrid"].irrelevant | {"position_embedding_type"},
}
_CORRECTED = ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "dots1", "solar_open")
_HAS_NO_EFFECT_IN |= {key: {*CORRECTED_IRRELEVANT, "qk_head_dim"} for key in _CORRECTED}


def test_a_key_of_a_later_transformers_is_refused_unless_it_has_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_keys, "_default_config", lambda _: SimpleNamespace(later=1.5))
    assert LlamaConfig.from_hf(BASE | {"later": 1.5}) == LlamaConfig.from_hf(BASE)
    with pytest.raises(ValueError, match=r"later: 2\.5, but sftron does not support this key"):
        LlamaConfig.from_hf(BASE | {"later": 2.5})


REFUSED = {
    "deepseek-ai/DeepSeek-V3": r"quantization_config: .*'fp8'.*, but sftron does not support this key",
    "casperhansen/llama-3-8b-instruct-awq": r"quantization_config: .*'awq'.*, but sftron does not support this key",
}


@pytest.mark.parametrize("name", PUBLISHED["refused"])
def test_what_is_not_implemented_is_refused_with_the_key_its_value_and_what_is(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]) as caught:
        LlamaConfig.from_hf(PUBLISHED["refused"][name])
    if PUBLISHED["refused"][name]["model_type"] not in FAMILIES:
        assert "sftron supports only llama, mistral" in str(caught.value)


def test_all_problems_are_named_at_once_with_both_values() -> None:
    wrong = {"hidden_act": "mish", "quantization_config": {"bits": 4}, "rope_scaling": {"rope_type": "axial"}}
    with pytest.raises(ValueError, match="does not support") as caught:
        LlamaConfig.from_hf({key: value for key, value in BASE.items() if key != "vocab_size"} | wrong)
    assert set(str(caught.value).splitlines()[1:-1]) == {
        f"  hidden_act: 'mish'; sftron supports only {', '.join(ACTIVATIONS)}",
        "  quantization_config: {'bits': 4}, but sftron does not support this key",
        "  rope_scaling.rope_type: 'axial'; sftron supports only default, linear, dynamic, llama3, yarn, longrope",
        "  vocab_size: None is not a whole number from 1 to 134217728",
    }


_DEEPSEEK = {"model_type": "deepseek_v3", "num_key_value_heads": 4}
_LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
_GEMMA_3_ROPES = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "model_type is None; sftron supports only llama, mistral"),
        ({"model_type": "phimoe", "num_local_experts": 16}, "mixture of experts .num_local_experts: 16"),
        ({"model_type": "?", "kv_lora_rank": 512, "n_routed_experts": 8}, r"experts .*, latent attention .*rank: 512"),
        ({"model_type": "?", "mamba_d_state": 16}, r"It has state-space layers \(mamba_d_state: 16\)\."),
        ({"model_type": "?", "conv_L_cache": 3}, "short convolutions .conv_L_cache: 3"),
        ({"model_type": "?", "is_encoder_decoder": True}, "an encoder .is_encoder_decoder: True"),
        ({"model_type": "?", "text_config": {"kv_lora_rank": 8}, "vision_config": {"depth": 1}}, "attention .*images"),
        ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts: 0 is not a whole number from 1"),
        ({"model_type": "olmoe", "num_experts_per_tok": 65}, "num_experts_per_tok: 65 exceeds the 64 experts"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv: 8.0; sftron supports only None"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers: 3 is not a list"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_local_experts": 8}, "num_local_experts: 8 contradicts"),
        ({"model_type": "gpt_oss", "swiglu_limit": 0.0}, "swiglu_limit: 0.0 is not a finite number above 0"),
        ({"model_type": "gpt_oss", "hidden_act": "gelu"}, "hidden_act: 'gelu'; sftron supports only 'silu'"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise: 0.1; sftron supports only 0.0"),
        ({**_DEEPSEEK, "num_key_value_heads": 2}, "num_key_value_heads: 2; sftron supports only 4"),
        ({**_DEEPSEEK, "kv_lora_rank": 0}, "kv_lora_rank: 0 is not a whole number from 1"),
        ({**_DEEPSEEK, "qk_rope_head_dim": 7}, "qk_rope_head_dim: 7 is not even"),
        ({**_DEEPSEEK, "head_dim": 128}, "head_dim: 128; sftron supports only qk_rope_head_dim: 64"),
        ({**_DEEPSEEK, "attention_bias": True, "q_lora_rank": None}, "attention_bias: True, .* if q_lora_rank is null"),
        ({**_DEEPSEEK, "scoring_func": "softmax"}, "scoring_func: 'softmax'; sftron supports only 'sigmoid'"),
        ({"model_type": "dots1"}, "n_routed_experts is missing or null, and experts need it"),
        ({**_DEEPSEEK, "n_group": 3}, "n_group: 3 does not divide the 256 experts into groups of at least 2"),
        ({**_DEEPSEEK, "n_group": 256}, "n_group: 256 does not divide the 256 experts"),
        ({**_DEEPSEEK, "topk_group": 9}, "topk_group: 9 exceeds n_group: 8"),
        ({**_DEEPSEEK, "num_experts_per_tok": 129}, "129 exceeds the 128 experts of topk_group: 4"),
        ({**_DEEPSEEK, "num_local_experts": 16, "n_routed_experts": 8}, "n_routed_experts: 8 contradicts"),
        ({**_DEEPSEEK, "first_k_dense_replace": -1}, "first_k_dense_replace: -1 is not a whole number of at least 0"),
        ({**_DEEPSEEK, "n_shared_experts": 0}, "n_shared_experts: 0 is not a whole number from 1"),
        ({**_DEEPSEEK, "quantization_config": {"quant_method": "fp8"}}, "quantization_config: .*'fp8'"),
        ({**_DEEPSEEK, "model_type": "glm4_moe_lite", "mlp_layer_types": ["dense"]}, "mlp_layer_types: .* 2 layers"),
        ({**_DEEPSEEK, "model_type": "glm4_moe_lite", "first_k_dense_replace": 3}, "first_k_dense_replace: 3; sftron"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads: 4"),
        ({"head_dim": 7}, "head_dim: 7 is not a positive even number"),
        ({"model_type": "qwen2", "max_window_layers": "28"}, "max_window_layers: '28' is not a whole number"),
        ({"hidden_size": "32"}, "hidden_size: '32' is not a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads: 0 is not a whole number from 1"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: '1e-5' is not a finite number of at least 0"),
        ({"initializer_range": float("nan")}, "initializer_range: nan is not a finite number"),
        ({"rope_theta": float("inf")}, "rope_theta: inf is not a finite number above 0"),
        ({"rope_scaling": "linear"}, "rope_scaling.factor: missing"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor: missing in rope_type 'linear'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "rope_scaling.beta: 1, unknown to rope"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor: 0 is not a finite number above 0"),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "rope_theta: 1.0 contradicts .* 2.0"),
        ({"rope_scaling": LINEAR_ROPE, "rope_parameters": LLAMA3_ROPE}, "rope_scaling: .* contradicts rope_parameters"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: 0.5; sftron supports only 1.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}}, "truncate: 1 is neither true nor false"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": "32"}},
            "beta_fast: '32' is not a finite",
        ),
        ({"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0] * 4}}, "long_factor: missing in"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4}},
            "short_factor: .* is not a list of 4 finite numbers",
        ),
        ({"model_type": "phi3", "rope_scaling": LINEAR_ROPE}, "'linear'; sftron supports only default, longrope"),
        (
            {"model_type": "ministral3", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "'dynamic'; sftron supports only default, linear, llama3, yarn",
        ),
        (
            {"model_type": "olmo3", "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling.type: 'linear', which transformers 5 ignores in this family; name it rope_type",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}},
            "rope_scaling.alpha: 1000.0, unknown to rope_type 'dynamic'",
        ),
        (
            {"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 0.0}},
            "rope_scaling.alpha: 0.0 is not a finite number above 0",
        ),
        ({"model_type": "phi", "partial_rotary_factor": 1.5}, "partial_rotary_factor: 1.5 of head_dim 8"),
        ({"model_type": "phi", "partial_rotary_factor": 0.4}, "partial_rotary_factor: 0.4 of head_dim 8"),
        ({"model_type": "phi", "partial_rotary_factor": True}, "partial_rotary_factor: True of head_dim 8"),
        ({"partial_rotary_factor": True}, "partial_rotary_factor: True; sftron supports only 1.0"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_theta: 1 is not above 1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "head_dim: 2 rotated dimensions"),
        (
            {"model_type": "phi3", "max_position_embeddings": "x", "rope_scaling": _LONGROPE},
            "max_position_embeddings: 'x' is not a whole number",
        ),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern: 0 is not a whole number"),
        (
            {"model_type": "gemma3_text", "rope_local_base_freq": 5e3, "rope_parameters": _GEMMA_3_ROPES},
            r"rope_local_base_freq: 5000.0 contradicts rope_parameters.sliding_attention.rope_theta: 10000.0",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, r"no_rope_layers: \[1\]; it must have 0 or 1 for each"),
        ({"model_type": "smollm3", "no_rope_layers": [1, "0"]}, "no_rope_layers: .*; it must have 0 or 1 for each"),
        ({"rope_interleaved": True}, "rope_interleaved: True; sftron supports only False"),
        ({"auto_map": {"AutoModel": "modeling_x.X"}}, "auto_map: .*sftron does not support this key"),
        ({"sliding_window": 4096}, "sliding_window: 4096, but sftron does not support"),
        ({"model_type": "mistral", "mlp_bias": True}, "mlp_bias: True; sftron supports only False"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window: 0 is not a positive"),
        ({"model_type": "qwen2", "attention_bias": False}, "attention_bias: False; sftron supports only True"),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention"]},
            "a list of 1; wanted a list of num_hid",
        ),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 2}, "layer_types: 'linear_attention'"),
        ({"model_type": "granitemoehybrid"}, "layer_types: 'mamba'; sftron supports only full_attention"),
        ({"model_type": "granitemoehybrid", "layer_types": ["attention", "mamba"]}, "layer_types: 'mamba'"),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["full_attention", "linear_attention"]},
            "layer_types: 'linear_attention'; sftron supports only full_attention",
        ),
        ({"model_type": "granitemoeshared", "num_local_experts": 0}, "num_local_experts: 0 is not a whole number"),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["attention"] * 2, "shared_intermediate_size": 0},
            "shared_intermediate_size: 0 is not a whole number",
        ),
        (
            {"model_type": "lfm2_moe", "conv_L_cache": 3, "num_experts": 8},
            "experts .num_experts: 8.*, short convolutions",
        ),
        ({"model_type": "lfm2", "conv_L_cache": 0}, "conv_L_cache: 0 is not a whole number from 1"),
        ({"model_type": "lfm2", "block_multiple_of": 0}, "block_multiple_of: 0 is not a whole number from 1"),
        ({"model_type": "lfm2", "block_ff_dim": 3.0}, "block_ff_dim: 3.0 is not a whole number from 1"),
        ({"model_type": "lfm2", "block_ffn_dim_multiplier": "1"}, "block_ffn_dim_multiplier: '1' is not a finite"),
        ({"model_type": "lfm2", "block_ffn_dim_multiplier": 1e7}, "48 and block_ffn_dim_multiplier: 10000000.0 give"),
        ({"model_type": "lfm2", "block_ffn_dim_multiplier": float("inf")}, "block_ffn_dim_multiplier: inf is not a"),
        ({"model_type": "lfm2", "full_attn_idxs": 3}, "full_attn_idxs: 3 is not a list of whole numbers"),
        ({"model_type": "lfm2", "tie_embedding": 1}, "tie_embedding: 1 is neither true nor false"),
        ({"model_type": "qwen3_next", "use_sliding_window": True}, "use_sliding_window: True; sftron supports only"),
        ({"model_type": "qwen3", "attention_bias": "yes"}, "attention_bias: 'yes' is neither true nor false"),
    ],
)
def test_a_wrong_value_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_hf(BASE | change)
