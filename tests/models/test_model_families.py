"""Every family that LlamaForSFT computes, against transformers' own class of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from sftron.checkpoint.export import export_hf
from sftron.checkpoint.hf_weights import load_model
from sftron.models.architecture import FAMILIES as MODEL_TYPES
from sftron.models.generation import greedy_generate
from sftron.models.llama import ACTIVATION_CHECKPOINTING
from tests.conftest import rest_nightly
from tests.models.reference import (
    FAMILIES,
    FIRST_OF_TYPE,
    GPT_OSS,
    QWEN_WINDOW,
    make_native,
    make_reference,
    pack,
    require_same_model,
)


def test_the_table_holds_every_model_type_that_is_implemented() -> None:
    assert {options.get("model_type", "llama") for options in FAMILIES.values()} == MODEL_TYPES.keys()


# 70 tokens are beyond the original context of LLAMA3_ROPE, and further than LINEAR_ROPE's 128 / 4.
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_every_gradient_are_those_of_transformers(family: str) -> None:
    reference = make_reference(**FAMILIES[family])
    require_same_model(make_native(reference), reference, [29, 1, 70])


BIASED_OR_TIED = ["SmolLM2", "Granite code", "StarCoder 2 without biases", "Qwen 3.5, tied, as many key heads"]
BESIDE_EXPERTS = "Gemma 4 26B-A4B"


@pytest.mark.parametrize("family", rest_nightly(FAMILIES, [*FIRST_OF_TYPE.values(), *BIASED_OR_TIED, BESIDE_EXPERTS]))
def test_an_export_is_the_source_to_the_bit_and_transformers_misses_nothing(family: str, tmp_path: Path) -> None:
    reference = make_reference(**FAMILIES[family])
    reference.save_pretrained(tmp_path / "source")
    native = load_model(tmp_path / "source", compute_dtype=torch.float32)
    options: dict[str, Any] = {"dtype": torch.float32, "stop_token_ids": [3]}
    export_hf(native.named_parameters(), tmp_path / "out", source_folder=tmp_path / "source", **options)

    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert type(again) is type(reference)
    before, after = reference.state_dict(), again.state_dict()
    assert after.keys() == before.keys()
    assert all(after[name].equal(tensor) for name, tensor in before.items())
    stored = [load_file(tmp_path / folder / "model.safetensors").keys() for folder in ("source", "out")]
    assert stored[0] == stored[1]
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("source", "out")]
    assert configs[0] == {key: configs[1][key] for key in configs[0]}


GENERATED = ["Llama 3.2", "Mistral 0.1", "Qwen 2", "Qwen 3 with biases", "Granite code", "SmolLM3", "OLMo 1", "OLMo 3"]
GENERATED += ["Granite 3", "Phi 1.5, 2", "StarCoder 2", "StableLM 2 12B", "Gemma 2", "Gemma 3", "GLM 4", "Cohere 2"]
GENERATED += ["Ministral 3", "Qwen 3.5", "gpt-oss", "Gemma 4 E2B", "Gemma 4 31B", "ERNIE 4.5", "Hunyuan"]
GENERATED += ["LFM2", "LFM2 with biases, untied", BESIDE_EXPERTS]
GENERATED += ["EXAONE 4 32B", "Apertus", "GLM 4.5", "GLM 4.5 Air", "GLM 4.7 Flash", "DeepSeek V3", "Granite 4"]
SEEDS = {"Phi 1.5, 2": 2, "StableLM 2 12B": 4, "Gemma 2": 3, "Apertus": 2, BESIDE_EXPERTS: 4}
"""For families whose random model of seed 0 repeats few tokens; every one of StarCoder 2 does."""


# No cache, window, multiplier or state is without one of these.
FAST = ["Llama 3.2", "OLMo 3", "Granite 3", "Phi 1.5, 2", "Gemma 2", "GLM 4", "Cohere 2", "Ministral 3", "Qwen 3.5"]
FAST += ["Gemma 4 E2B", "DeepSeek V3", "LFM2", BESIDE_EXPERTS]


@pytest.mark.parametrize("family", rest_nightly(GENERATED, FAST))
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    reference = make_reference(SEEDS.get(family, 0), **FAMILIES[family])
    inputs = pack([40])[0][None]
    expected = reference.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=20, eos_token_id=None
    )
    generation = greedy_generate(make_native(reference), inputs[0].tolist(), 20, ())
    assert list(generation.token_ids) == expected[0, 40:].tolist()
    assert len(set(generation.token_ids)) > (1 if family == "StarCoder 2" else 3)


WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"model_type": "mistral", "sliding_window": 20},
    "qwen2": {"model_type": "qwen2", **QWEN_WINDOW, "sliding_window": 20},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, **QWEN_WINDOW, "sliding_window": 20},
    "gpt_oss": GPT_OSS,
    "gemma4_text": FAMILIES["Gemma 4 E2B"],
}


@pytest.mark.parametrize("lengths", [[70], [19, 1, 20, 21, 22], [41, 40, 5]], ids=["alone", "around it", "twice it"])
@pytest.mark.parametrize("name", WINDOWED)
def test_documents_longer_than_the_window_are_those_of_transformers(name: str, lengths: list[int]) -> None:
    reference = make_reference(**WINDOWED[name])
    has_types = "layer_types" in WINDOWED[name]
    wide = {"sliding_window": 128 if has_types else None}
    without = make_reference(**WINDOWED[name] | wide)
    for length in (20, 21):
        ids = pack([length])[0][None]
        last = [model(ids, use_cache=False).logits[0, -1] for model in (reference, without)]
        assert torch.allclose(*last, atol=1e-4) == (length == 20)
    require_same_model(make_native(reference), reference, lengths)


@pytest.mark.parametrize("name", WINDOWED)
def test_greedy_tokens_through_a_window_are_those_of_transformers(name: str) -> None:
    reference = make_reference(**WINDOWED[name])
    native = make_native(reference)
    for num_prompt in (15, 20, 33):
        inputs = pack([num_prompt], seed=num_prompt)[0][None]
        expected = reference.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=12, eos_token_id=None
        )
        assert list(greedy_generate(native, inputs[0].tolist(), 12, ()).token_ids) == expected[0, num_prompt:].tolist()


KINDS = ["OLMo 2", "Gemma 2", "Gemma 3", "StarCoder 2", "Phi 1.5, 2", "StableLM 2 12B", "Cohere 2", "gpt-oss"]
KINDS += ["Gemma 4 E2B", "Gemma 4 31B", "Apertus", "DeepSeek V3 without experts", "LFM2"]
KINDS += ["LFM2 with biases, untied"]
"""A family of each block, norm, MLP and attention."""


@pytest.mark.parametrize("family", KINDS)
def test_a_changed_document_changes_no_bit_of_another_in_any_kind_of_block(family: str) -> None:
    native = make_native(make_reference(**FAMILIES[family]))
    lengths = [19, 1, 20, 21, 41]
    input_ids, *rest = pack(lengths)
    with torch.no_grad():
        before = native(input_ids, *rest).split(lengths)
        for number, length in enumerate(lengths):
            changed = input_ids.clone()
            start = sum(lengths[:number])
            changed[start : start + length] = (changed[start : start + length] + 1) % 97
            after = native(changed, *rest).split(lengths)
            is_same = [bool(x.equal(y)) for x, y in zip(before, after, strict=True)]
            assert is_same == [other != number for other in range(len(lengths))]


@pytest.mark.parametrize("family", [*KINDS, BESIDE_EXPERTS])
def test_what_is_recomputed_changes_no_bit_of_a_gradient_in_any_kind_of_block(family: str) -> None:
    reference, batch = make_reference(**FAMILIES[family]), pack([20, 1, 30])
    found = []
    for mode in ACTIVATION_CHECKPOINTING:
        native = make_native(reference, activation_checkpointing=mode)
        native(*batch).square().sum().backward()
        found.append({name: each.grad for name, each in native.named_parameters() if each.grad is not None})
    assert len(found[0]) > 10
    for other in found[1:]:
        assert all(other[name].equal(grad) for name, grad in found[0].items())
