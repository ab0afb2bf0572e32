"""Every family that is the block of llama.py, against transformers' own class of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from sftron.checkpoint.fusion import split_state_dict
from sftron.checkpoint.hf_export import export_hf
from sftron.checkpoint.hf_weights import load_model
from sftron.models.architecture import LlamaConfig
from sftron.models.families import FAMILIES as MODEL_TYPES
from sftron.models.generation import greedy_generate
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import weighted_loss_sum
from tests.models.reference import FAMILIES, LINEAR_ROPE, QWEN_WINDOW, TINY, make_ours, make_theirs, pack

PACKED, ALONE = [60, 1, 39], [100]
"""100 tokens are beyond the original context of LLAMA3_ROPE, and further than LINEAR_ROPE's 128 / 4."""


def test_the_table_holds_every_model_type_that_is_implemented() -> None:
    assert {options.get("model_type", "llama") for options in FAMILIES.values()} == MODEL_TYPES.keys()


@pytest.mark.parametrize("lengths", [ALONE, PACKED], ids=["alone", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_every_gradient_are_those_of_transformers(family: str, lengths: list[int]) -> None:
    theirs = make_theirs(**FAMILIES[family])
    ours = make_ours(theirs)
    input_ids, *rest = pack(lengths)
    documents = input_ids.split(lengths)

    their_logits = torch.cat([theirs(ids[None], use_cache=False).logits[0] for ids in documents])
    targets = torch.cat([F.pad(ids[1:], (0, 1), value=-100) for ids in documents])
    their_loss = F.cross_entropy(their_logits, targets, reduction="sum")
    their_loss.backward()
    hidden = ours(input_ids, *rest)
    (rows,) = torch.nonzero(targets >= 0, as_tuple=True)
    loss, _ = weighted_loss_sum(hidden, ours.head_weight, rows, targets[rows], torch.ones(len(rows)))
    loss.backward()

    assert their_logits.abs().max() > 1
    torch.testing.assert_close(F.linear(hidden, ours.head_weight), their_logits, atol=2e-4, rtol=1e-5)
    torch.testing.assert_close(loss, their_loss, atol=0, rtol=1e-5)
    our_gradients = dict(split_state_dict(((n, p.grad) for n, p in ours.named_parameters()), ours.config))
    their_gradients = {n: p.grad for n, p in theirs.named_parameters()}
    assert our_gradients.keys() == their_gradients.keys()
    largest = max(gradient.abs().max().item() for gradient in their_gradients.values())
    for key, gradient in their_gradients.items():
        # A bias of k moves all scores of a query alike, so its gradient is 0 but for rounding where nothing norms it.
        scale = gradient.abs().max().item() if ".k_proj.bias" not in key else largest
        assert gradient.abs().max() > 0, key
        torch.testing.assert_close(our_gradients[key], gradient, atol=1e-4 * scale, rtol=0, msg=lambda m, k=key: k + m)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_the_source_to_the_bit_and_transformers_misses_nothing(family: str, tmp_path: Path) -> None:
    theirs = make_theirs(**FAMILIES[family])
    theirs.save_pretrained(tmp_path / "source")
    ours = load_model(tmp_path / "source", compute_dtype=torch.float32)
    options: dict[str, Any] = {"dtype": torch.float32, "stop_token_ids": [3]}
    export_hf(ours.named_parameters(), tmp_path / "out", source_folder=tmp_path / "source", **options)

    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert type(again) is type(theirs)
    before, after = theirs.state_dict(), again.state_dict()
    assert after.keys() == before.keys()
    assert all(after[name].equal(tensor) for name, tensor in before.items())
    stored = [load_file(tmp_path / folder / "model.safetensors").keys() for folder in ("source", "out")]
    assert stored[0] == stored[1]
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("source", "out")]
    assert configs[0].items() <= configs[1].items()


@pytest.mark.parametrize("family", ["Mistral 0.1", "Qwen 2", "Qwen 3 with biases", "Granite code"])
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    theirs = make_theirs(**FAMILIES[family])
    inputs = pack([40])[0][None]
    expected = theirs.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=20, eos_token_id=None
    )
    generation = greedy_generate(make_ours(theirs), inputs[0].tolist(), 20, ())
    assert list(generation.token_ids) == expected[0, 40:].tolist()
    assert len(set(generation.token_ids)) > 3


WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"model_type": "mistral", "sliding_window": 20},
    "qwen2": {"model_type": "qwen2", **QWEN_WINDOW, "sliding_window": 20},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, **QWEN_WINDOW, "sliding_window": 20},
}


@pytest.mark.parametrize("name", WINDOWED)
def test_a_document_as_long_as_the_window_is_right_and_one_token_more_is_refused(name: str) -> None:
    theirs = make_theirs(**WINDOWED[name])
    without = make_theirs(**WINDOWED[name] | {"sliding_window": None})
    ours = make_ours(theirs)
    assert ours.config.sliding_window == 20
    for length, is_the_same in ((20, True), (21, False)):
        ids = pack([length])[0][None]
        last = [model(ids, use_cache=False).logits[0, -1] for model in (theirs, without)]
        assert torch.allclose(*last, atol=1e-4) == is_the_same
    logits = F.linear(ours(*pack([20])), ours.head_weight)
    torch.testing.assert_close(logits, theirs(pack([20])[0][None]).logits[0], atol=2e-4, rtol=1e-5)
    with pytest.raises(ValueError, match=r"document of 21 tokens exceeds .* sliding window of 20 .*longest_document"):
        ours(*pack([21]))
    with pytest.raises(ValueError, match=r"document of 21 tokens exceeds .* sliding window of 20"):
        greedy_generate(ours, [1] * 11, 10, ())
    greedy_generate(ours, [1] * 10, 10, ())


def test_an_unused_tail_longer_than_the_window_changes_nothing_and_is_not_refused() -> None:
    theirs = make_theirs(**WINDOWED["mistral"])
    ours = make_ours(theirs, longest_document=20)
    lengths = [20, 7, 50]
    input_ids, *rest = pack(lengths)
    logits = F.linear(ours(input_ids, *rest), ours.head_weight).split(lengths)
    for ids, given in list(zip(input_ids.split(lengths), logits, strict=True))[:-1]:
        torch.testing.assert_close(given, theirs(ids[None]).logits[0], atol=2e-4, rtol=1e-5)
    with pytest.raises(ValueError, match=r"document of 21 tokens exceeds .* sliding window of 20"):
        LlamaForSFT(ours.config, longest_document=21)


PUBLISHED = json.loads((Path(__file__).parents[1] / "assets" / "published_configs.json").read_text(encoding="utf-8"))


def _by_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of LlamaConfig as transformers' config class and model have them."""
    theirs = transformers.AutoConfig.for_model(**config)
    rope = theirs.rope_parameters
    with torch.device("meta"):
        theirs.num_hidden_layers, layer_types = 1, getattr(theirs, "layer_types", None)
        if layer_types is not None:
            theirs.layer_types = layer_types[:1]
        layer = transformers.AutoModelForCausalLM.from_config(theirs).model.layers[0]
    # Mistral has no layer_types, as each of its layers slides.
    slides = "sliding_attention" in layer_types if layer_types is not None else True
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    same = (*same, "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "initializer_range")
    return {key: getattr(theirs, key) for key in same} | {
        "num_hidden_layers": config["num_hidden_layers"],
        "head_dim": layer.self_attn.head_dim,
        "qkv_bias": layer.self_attn.q_proj.bias is not None,
        "o_bias": layer.self_attn.o_proj.bias is not None,
        "mlp_bias": layer.mlp.down_proj.bias is not None,
        "qk_norm": hasattr(layer.self_attn, "q_norm"),
        "sliding_window": getattr(theirs, "sliding_window", None) if slides else None,
        "rope_theta": rope["rope_theta"],
        "rope_type": rope["rope_type"],
        "rope_factor": rope.get("factor"),
    }


def _by_ours(config: dict[str, Any]) -> dict[str, Any]:
    ours = LlamaConfig.from_hf(config)
    fields = {key: getattr(ours, key) for key in LlamaConfig.__slots__ if key != "rope_scaling"}
    kinds = {"NoneType": "default", "LinearScaling": "linear", "Llama3Scaling": "llama3"}
    kind = kinds[type(ours.rope_scaling).__name__]
    return fields | {"rope_type": kind, "rope_factor": getattr(ours.rope_scaling, "factor", None)}


@pytest.mark.parametrize("name", PUBLISHED["implemented"])
def test_a_published_config_is_read_as_transformers_reads_it(name: str) -> None:
    config = PUBLISHED["implemented"][name]
    assert _by_ours(config) == _by_transformers(config)


KNOWN = {
    "meta-llama/Llama-3.2-1B-Instruct": {"head_dim": 64, "rope_factor": 32.0, "tie_word_embeddings": True},
    "deepseek-ai/deepseek-coder-6.7b-instruct": {"rope_type": "linear", "rope_factor": 4.0, "rope_theta": 100000},
    "ibm-granite/granite-8b-code-instruct-4k": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "mistralai/Mistral-7B-v0.1": {"sliding_window": 4096, "head_dim": 128, "qkv_bias": False},
    "mistralai/Mistral-7B-Instruct-v0.3": {"sliding_window": None},
    "mistralai/Mistral-Nemo-Base-2407": {"head_dim": 128, "hidden_size": 5120},
    "Qwen/Qwen2.5-7B": {"qkv_bias": True, "o_bias": False, "sliding_window": None, "head_dim": 128},
    "Qwen/Qwen3-0.6B": {"qk_norm": True, "qkv_bias": False, "head_dim": 128, "hidden_size": 1024},
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_special_of_a_family_is_read(name: str) -> None:
    fields = _by_ours(PUBLISHED["implemented"][name])
    assert {key: fields[key] for key in KNOWN[name]} == KNOWN[name]


NULLABLE = {
    "llama": {"num_key_value_heads", "head_dim"},
    "mistral": {"head_dim", "sliding_window"},
    "qwen2": {"num_key_value_heads", "sliding_window"},
    "qwen3": {"num_key_value_heads", "sliding_window"},
}
"""What transformers takes a null for; of other keys it is an error to it."""


@pytest.mark.parametrize("has_nulls", [False, True])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_absent_and_null_keys_are_what_transformers_class_of_that_type_takes_them_for(
    model_type: str, has_nulls: bool
) -> None:
    sizes = {key: TINY[key] for key in ("vocab_size", "intermediate_size", "num_hidden_layers")}
    # As many heads as every default of key-value heads divides.
    config = {"model_type": model_type, **sizes, "num_attention_heads": 32, "hidden_size": 64}
    nulls = dict.fromkeys(NULLABLE[model_type]) if has_nulls else {}
    rope_nulls = {"rope_scaling": None, "rope_theta": None} if has_nulls else {}
    assert _by_ours(config | nulls | rope_nulls) == _by_transformers(config | nulls)


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
        theirs = make_theirs(**config)
        theirs(torch.zeros(1, 9, dtype=torch.long), use_cache=False)
    except ValueError:
        with pytest.raises(ValueError, match="layer_types: 'sliding_attention', but sliding_window: "):
            LlamaConfig.from_hf(config)
    else:
        assert _by_ours(config)["sliding_window"] == _by_transformers(config)["sliding_window"]


REFUSED = {
    "HuggingFaceTB/SmolLM3-3B": r"'smollm3'.*no rotary embedding \(no_rope_layers: .*no_rope_layer_interval: 4\)",
    "ibm-granite/granite-3.1-8b-instruct": r"'granite'.*embedding_multiplier: 12.0, residual_multiplier: 0.22",
    "mistralai/Mixtral-8x7B-v0.1": r"'mixtral'.*mixture of experts \(num_local_experts: 8, num_experts_per_tok: 2\)",
    "Qwen/Qwen3-30B-A3B": r"'qwen3_moe'.*mixture of experts \(num_experts: 128",
    "google/gemma-2-9b": r"'gemma2'.*1 \+ weight.*hidden_activation: 'gelu_pytorch_tanh'",
    "microsoft/phi-2": r"'phi'.*partial_rotary_factor: 0.4",
    "Qwen/Qwen2.5-7B-Instruct with YaRN": r"rope_scaling.rope_type: 'yarn', implemented are default, linear, llama3",
    "01-ai/Yi-6B-200K with dynamic scaling": r"rope_scaling.rope_type: 'dynamic', implemented are default, linear",
    "casperhansen/llama-3-8b-instruct-awq": r"quantization_config: .*'awq'.*, but no such key is implemented",
}


@pytest.mark.parametrize("name", PUBLISHED["refused"])
def test_what_is_not_implemented_is_refused_with_the_key_its_value_and_what_is(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]) as caught:
        LlamaConfig.from_hf(PUBLISHED["refused"][name])
    model_type = PUBLISHED["refused"][name]["model_type"]
    if model_type not in MODEL_TYPES:
        assert "implemented are llama, mistral, qwen2, qwen3" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2", "attention_bias": False}, "attention_bias: False, implemented is True"),
        ({"model_type": "qwen2", "use_mrope": True}, "use_mrope: True, implemented is False"),
        ({"model_type": "mistral", "mlp_bias": True}, "mlp_bias: True, implemented is False"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, "layer_types: .*no such key"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window: 0, a positive integer"),
        ({"model_type": "llama", "sliding_window": 4096}, "sliding_window: 4096, but no such key"),
        ({"model_type": "qwen3", "head_dim": None}, "head_dim: None, a positive even number"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "one for each of num_hidden_layers: 2"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 2}, "layer_types: 'linear_attention'"),
        ({"model_type": "qwen3", "attention_bias": "yes"}, "attention_bias: 'yes', true or false is needed"),
        *(
            ({key: value}, f"{key}: {value!r}, a finite number")
            for key in ("rms_norm_eps", "initializer_range", "rope_theta")
            for value in (float("nan"), float("inf"), -1e-5)
        ),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: '1e-5', a finite number from 0 on is needed"),
        ({"rope_scaling": LINEAR_ROPE | {"rope_type": "longrope"}}, "rope_type: 'longrope', implemented are default"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5, implemented is 1.0"),
        ({"auto_map": {"AutoModel": "modeling_x.X"}}, "auto_map: .*no such key"),
        ({"model_type": None}, "model_type is None, implemented are llama, mistral, qwen2, qwen3"),
        ({"model_type": "phimoe", "num_local_experts": 16}, "mixture of experts .num_local_experts: 16"),
    ],
)
def test_a_wrong_value_of_a_family_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_hf({"model_type": "llama", **TINY, **change})
