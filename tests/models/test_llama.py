"""LlamaForSFT against transformers: outputs, every gradient, isolation."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sftron.checkpoint.fusion import split_state_dict
from sftron.models.architecture import LlamaConfig
from sftron.models.attention import attend_documents
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import weighted_loss_sum
from tests.models.reference import LLAMA3_ROPE, TINY, make_ours, make_theirs, pack

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "as many key-value heads as heads": {"num_key_value_heads": 4},
    "one key-value head": {"num_key_value_heads": 1},
    "head_dim of its own": {"head_dim": 12},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied embeddings": {"tie_word_embeddings": True},
    "llama3 scaling": {"rope_parameters": LLAMA3_ROPE},
    "linear scaling": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "another epsilon": {"rms_norm_eps": 0.1},
    "another theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_loss_and_every_gradient_are_those_of_transformers(name: str) -> None:
    theirs = make_theirs(**ARCHITECTURES[name])
    ours = make_ours(theirs)
    # Longer than the original context of LLAMA3_ROPE, so that its scaled frequencies matter.
    input_ids, position_ids, cu_seqlens, max_seqlen = pack([100])

    their_logits = theirs(input_ids[None], use_cache=False).logits[0]
    their_loss = F.cross_entropy(their_logits[:-1], input_ids[1:], reduction="sum")
    their_loss.backward()
    hidden = ours(input_ids, position_ids, cu_seqlens, max_seqlen)
    rows = torch.arange(99)
    loss, _ = weighted_loss_sum(hidden, ours.head_weight, rows, input_ids[1:], torch.ones(99))
    loss.backward()

    assert their_logits.abs().max() > 1
    torch.testing.assert_close(F.linear(hidden, ours.head_weight), their_logits, atol=2e-4, rtol=1e-5)
    torch.testing.assert_close(loss, their_loss, atol=0, rtol=1e-5)
    our_gradients = dict(split_state_dict(((n, p.grad) for n, p in ours.named_parameters()), ours.config))
    their_gradients = {n: p.grad for n, p in theirs.named_parameters()}
    assert our_gradients.keys() == their_gradients.keys()
    for key, gradient in their_gradients.items():
        assert gradient.abs().max() > 0, key
        scale = gradient.abs().max().item()
        torch.testing.assert_close(our_gradients[key], gradient, atol=1e-4 * scale, rtol=0, msg=lambda m, k=key: k + m)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changing_one_document_leaves_every_other_bit_identical(dtype: torch.dtype) -> None:
    ours = make_ours(make_theirs(), compute_dtype=dtype)
    lengths = [7, 1, 30, 12]
    input_ids, *rest = pack(lengths)
    before = ours(input_ids, *rest).split(lengths)
    for changed in range(len(lengths)):
        documents = list(input_ids.split(lengths))
        documents[changed] = (documents[changed] + 1) % TINY["vocab_size"]
        after = ours(torch.cat(documents), *rest).split(lengths)
        is_equal = [a.equal(b) for a, b in zip(before, after, strict=True)]
        assert is_equal == [index != changed for index in range(len(lengths))]


def test_gradients_of_a_pack_are_the_sum_of_its_documents_alone() -> None:
    ours = make_ours(make_theirs(tie_word_embeddings=True))
    lengths = [9, 1, 20]
    input_ids, position_ids, cu_seqlens, max_seqlen = pack(lengths)

    def backward(ids: torch.Tensor, positions: torch.Tensor, bounds: torch.Tensor, longest: int) -> torch.Tensor:
        hidden = ours(ids, positions, bounds, longest)
        rows = torch.arange(len(ids))
        loss, _ = weighted_loss_sum(hidden, ours.head_weight, rows, ids, torch.ones(len(ids)))
        loss.backward()
        return loss.detach()

    packed_loss = backward(input_ids, position_ids, cu_seqlens, max_seqlen)
    packed = {name: parameter.grad.clone() for name, parameter in ours.named_parameters()}
    ours.zero_grad()
    documents = zip(input_ids.split(lengths), position_ids.split(lengths), lengths, strict=True)
    alone_loss = sum(backward(ids, pos, torch.tensor([0, n]).int(), n) for ids, pos, n in documents)
    torch.testing.assert_close(packed_loss, alone_loss)
    for name, parameter in ours.named_parameters():
        assert parameter.grad.abs().max() > 0
        torch.testing.assert_close(packed[name], parameter.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_gives_the_same_output_and_gradients_to_the_bit(mode: str, dtype: torch.dtype) -> None:
    theirs = make_theirs(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    results = []
    for activation_checkpointing in ("none", mode):
        ours = make_ours(theirs, activation_checkpointing=activation_checkpointing, compute_dtype=dtype)
        hidden = ours(*pack([20, 5]))
        hidden.float().square().sum().backward()
        results.append([hidden, *(p.grad for p in ours.parameters())])
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


def test_bf16_compute_keeps_fp32_parameters_and_gradients() -> None:
    ours = make_ours(make_theirs(attention_bias=True), compute_dtype=torch.bfloat16)
    hidden = ours(*pack([8]))
    hidden.float().square().sum().backward()
    assert hidden.dtype == torch.bfloat16
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in ours.parameters() if p.grad is not None} == {torch.float32}


def test_a_layer_without_an_attention_of_its_own_is_an_error() -> None:
    ours = make_ours(make_theirs())
    ids, position_ids, cu_seqlens, max_seqlen = pack([5])
    attend = attend_documents("sdpa", cu_seqlens, max_seqlen, len(ids))
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        ours.attend_with([attend], ids, position_ids, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_bit(dtype: torch.dtype) -> None:
    ours, batch = make_ours(make_theirs(), compute_dtype=dtype), pack([30, 12])
    found = []
    for enabled in (False, True):
        ours.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            hidden, rows = ours(*batch), torch.arange(20)
            loss, measures = weighted_loss_sum(hidden, ours.head_weight, rows, batch[0][rows], torch.ones(20))
        loss.backward()
        found.append([hidden.detach(), loss.detach(), *measures, *(p.grad.clone() for p in ours.parameters())])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


def test_the_rope_table_survives_meta_construction_casts_and_inference_mode() -> None:
    theirs = make_theirs()
    expected = make_ours(theirs)
    with torch.device("meta"):
        ours = LlamaForSFT(expected.config, compute_dtype=torch.float32)
    assert {p.device.type for p in ours.parameters()} == {"meta"}
    ours.to_empty(device="cpu")
    ours.load_state_dict(expected.state_dict())
    ours.to(torch.bfloat16).to(torch.float32)
    with torch.inference_mode():
        ours(*pack([8]))
    assert ours.rope_table.on(torch.device("cpu")).equal(expected.rope_table.on(torch.device("cpu")))
    assert not [key for key in ours.state_dict() if "rope" in key]
    ours(*pack([8])).sum().backward()


def test_a_document_longer_than_the_rope_table_is_refused_with_both_lengths() -> None:
    config = LlamaConfig.from_hf({"model_type": "llama", **TINY})
    batch = pack([129])
    with pytest.raises(ValueError, match=r"129 tokens .* 128 positions"):
        LlamaForSFT(config)(*batch)
    LlamaForSFT(config, num_positions=129)(*batch)


@pytest.mark.parametrize(("option", "value"), [("attention", "auto"), ("activation_checkpointing", "some")])
def test_an_unknown_option_is_refused_by_name(option: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{option}: '{value}'"):
        LlamaForSFT(LlamaConfig.from_hf({"model_type": "llama", **TINY}), **{option: value})
