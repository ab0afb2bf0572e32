"""LlamaForSFT: isolation of documents, its options, and blocks of other families behind its tables."""

import pytest
import torch

from sftron.models.llama import LlamaForSFT
from sftron.models.loss import weighted_loss_sum
from tests.models.reference import TINY, make_native, make_reference, pack, tiny_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changing_one_document_leaves_every_other_bit_identical(dtype: torch.dtype) -> None:
    native = make_native(make_reference(), compute_dtype=dtype)
    lengths = [7, 1, 30, 12]
    input_ids, *rest = pack(lengths)
    before = native(input_ids, *rest).split(lengths)
    for changed in range(len(lengths)):
        documents = list(input_ids.split(lengths))
        documents[changed] = (documents[changed] + 1) % TINY["vocab_size"]
        after = native(torch.cat(documents), *rest).split(lengths)
        is_equal = [a.equal(b) for a, b in zip(before, after, strict=True)]
        assert is_equal == [index != changed for index in range(len(lengths))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_gives_the_same_output_and_gradients_to_the_bit(mode: str, dtype: torch.dtype) -> None:
    reference = make_reference(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    results = []
    for activation_checkpointing in ("none", mode):
        native = make_native(reference, activation_checkpointing=activation_checkpointing, compute_dtype=dtype)
        hidden = native(*pack([20, 5]))
        hidden.float().square().sum().backward()
        assert (hidden.dtype, {p.dtype for p in native.parameters()}) == (dtype, {torch.float32})
        results.append([hidden, *(p.grad for p in native.parameters())])
    assert all(a.equal(b) for a, b in zip(*results, strict=True))
    assert {gradient.dtype for gradient in results[0][1:]} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_bit(dtype: torch.dtype) -> None:
    native, batch = make_native(make_reference(), compute_dtype=dtype), pack([30, 12])
    found = []
    for enabled in (False, True):
        native.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            hidden, rows = native(*batch), torch.arange(20)
            loss, measures = weighted_loss_sum(hidden, native.head, rows, batch[0][rows], torch.ones(20))
        loss.backward()
        found.append([hidden.detach(), loss.detach(), *measures, *(p.grad.clone() for p in native.parameters())])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


def test_the_rope_table_survives_meta_construction_casts_and_inference_mode() -> None:
    expected = make_native(make_reference())
    with torch.device("meta"):
        native = LlamaForSFT(expected.config, compute_dtype=torch.float32)
    assert {p.device.type for p in native.parameters()} == {"meta"}
    native.to_empty(device="cpu")
    native.load_state_dict(expected.state_dict())
    native.to(torch.bfloat16).to(torch.float32)
    with torch.inference_mode():
        native(*pack([8]))
    assert native.rope_tables.on(torch.device("cpu"))[0].equal(expected.rope_tables.on(torch.device("cpu"))[0])
    assert not [key for key in native.state_dict() if "rope" in key]
    native(*pack([8])).sum().backward()


def test_a_document_longer_than_the_rope_table_is_refused_with_both_lengths() -> None:
    batch = pack([129])
    with pytest.raises(ValueError, match=r"129 tokens .* 128 positions"):
        LlamaForSFT(tiny_config())(*batch)
    LlamaForSFT(tiny_config(), num_positions=129)(*batch)


def test_a_frozen_parameter_gets_no_gradient_and_all_others_do() -> None:
    """Some of each kind are frozen, in the first of two layers."""
    native, batch = make_native(make_reference(attention_bias=True, mlp_bias=True)), pack([20, 5])
    native(*batch).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in native.named_parameters()}
    native.zero_grad()
    kinds = ("layers.0.self_attn.qkv_proj.weight", "layers.0.mlp.down_proj", "layers.0.self_attn.o_proj.bias")
    frozen = {name for name in expected if any(kind in name for kind in kinds)} | {"model.embed_tokens.weight"}
    assert len(frozen) == 5
    for name, parameter in native.named_parameters():
        parameter.requires_grad_(name not in frozen)
    native(*batch).square().sum().backward()
    for name, parameter in native.named_parameters():
        if name == "lm_head.weight" or name in frozen:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            assert parameter.grad.equal(expected[name]), name
