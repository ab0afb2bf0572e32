"""Layers with a short convolution: what a config.json states of them, caches, and documents that stay apart."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sftron.models.architecture import LlamaConfig
from sftron.models.generation import greedy_generate
from sftron.models.short_convolution import ShortConvolutionBlock
from tests.conftest import rest_nightly
from tests.models.reference import FAMILIES, LFM2, TINY, make_native, make_reference, pack, require_same_model

BIASED = FAMILIES["LFM2 with biases, untied"]
LENGTHS = [3, 1, 64, 2, 5, 4, 1, 1]
"""Shorter than the taps, as many, and longer; several of one token next to each other."""


@pytest.mark.parametrize("options", [LFM2, BIASED, {**LFM2, "conv_L_cache": 1}, {**LFM2, "conv_L_cache": 7}])
def test_documents_of_each_length_have_the_logits_and_gradients_of_transformers(options: dict[str, Any]) -> None:
    reference = make_reference(**options)
    require_same_model(make_native(reference), reference, LENGTHS)


@pytest.mark.parametrize("dtype", rest_nightly([torch.float32, torch.bfloat16], [torch.float32]))
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_document_of_nan_changes_no_bit_of_another_or_of_its_gradients(mode: str, dtype: torch.dtype) -> None:
    """Law 7, in every layer with a convolution: NaN would show any product of two documents, even one by zero."""
    options: dict[str, Any] = BIASED | {"layer_types": ["conv"] * 3}
    native = make_native(make_reference(**options), compute_dtype=dtype, activation_checkpointing=mode)
    assert all(isinstance(block, ShortConvolutionBlock) for block in native.blocks)
    input_ids, *rest = pack(LENGTHS)
    embed = native.model.embed_tokens

    def outputs_and_gradients(changed: int) -> list[list[Tensor]]:
        inputs = [each.detach().clone() for each in embed(input_ids).split(LENGTHS)]
        if changed >= 0:
            inputs[changed] *= float("nan")
        inputs_TH = torch.cat(inputs).requires_grad_()
        handle = embed.register_forward_hook(lambda *_: inputs_TH)
        hidden_TH = native(input_ids, *rest)
        handle.remove()
        hidden_TH.float().square().sum().backward()
        assert inputs_TH.grad is not None
        return [list(each.split(LENGTHS)) for each in (hidden_TH.detach(), inputs_TH.grad)]

    before = outputs_and_gradients(-1)
    for changed in range(len(LENGTHS)):
        for old, new in zip(before, outputs_and_gradients(changed), strict=True):
            is_equal = [x.equal(y) for x, y in zip(old, new, strict=True)]
            assert is_equal == [number != changed for number in range(len(LENGTHS))]


@pytest.mark.parametrize("num_prompt", [1, 2, 3, 5, 30])
def test_generation_with_a_cache_has_the_margins_of_whole_documents(num_prompt: int) -> None:
    native = make_native(make_reference(**BIASED))
    input_ids = pack([num_prompt])[0]
    generation = greedy_generate(native, input_ids.tolist(), 6, ())
    row = torch.cat([input_ids, torch.tensor(generation.token_ids)])
    with torch.no_grad():
        best = native.head.logits(native(row, *pack([len(row)])[1:])).topk(2)
    assert best.indices[num_prompt - 1 : -1, 0].tolist() == list(generation.token_ids)
    margins = (best.values[:, 0] - best.values[:, 1])[num_prompt - 1 : -1]
    torch.testing.assert_close(torch.tensor(generation.margins), margins, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "stated",
    [
        {"block_ff_dim": 100},
        {"block_ff_dim": 100, "intermediate_size": 48},
        {"block_ff_dim": 100, "block_auto_adjust_ff_dim": False},
        {"block_multiple_of": 1},
        {"block_ffn_dim_multiplier": 2},
        {"tie_embedding": False},
        {"tie_embedding": True, "tie_word_embeddings": False},
        {"full_attn_idxs": [0, 2]},
        {"full_attn_idxs": []},
        {"full_attn_idxs": [0], "layer_types": ["conv", "full_attention", "conv"]},
        {"layer_types": None},
    ],
    ids=str,
)
def test_the_names_of_published_configurations_mean_what_they_mean_to_transformers(stated: dict[str, Any]) -> None:
    config: dict[str, Any] = TINY | LFM2 | {"layer_types": None} | stated
    reference, native = make_reference(**config), LlamaConfig.from_hf(config)
    layers = reference.model.layers
    assert native.intermediate_size == layers[0].feed_forward.w1.out_features
    assert native.tie_word_embeddings == (reference.lm_head.weight is reference.model.embed_tokens.weight)
    blocks = ["short_convolution" if hasattr(layer, "conv") else "norm_before" for layer in layers]
    assert [layer.block for layer in native.layers] == blocks
    require_same_model(make_native(reference, native), reference, [3, 20])


def test_a_rank_can_have_as_little_as_one_channel() -> None:
    block = make_native(make_reference(**LFM2)).blocks[0]
    assert block.num_heads == TINY["hidden_size"]
