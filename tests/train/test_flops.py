"""FLOPs by formula against FLOPs counted while a step runs, and against a sum made by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sftron.data.loader import collate
from sftron.data.packing import lay_out
from sftron.data.types import IGNORE_INDEX, Batch, ConversationKey, LabeledConversation, Role
from sftron.models.adapters import ALL_LINEAR, LoraSpec, add_adapters, match_targets, projections_of
from sftron.models.architecture import LlamaConfig
from sftron.models.causal_convolution import causal_convolution
from sftron.models.delta_layer import DeltaBlock
from sftron.models.delta_rule import recurrent_gated_delta_rule
from sftron.models.llama import LlamaForSFT, blocks_without_weights
from sftron.train.flops import TrainedMatrices, find_peak, peak_of, step_flops
from sftron.train.objective import loss_of
from tests.models.reference import FAMILIES, GPT_OSS, GROUPS, LATENT, QWEN_3_5
from tests.models.reference import TINY as TINY_REFERENCE
from tests.train.conftest import FinishedRun

TINY_SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
}
TINY = LlamaConfig.from_hf(TINY_SIZES | {"model_type": "llama"})
LENGTHS = (9, 1, 17, 30)


def _addmm_flops(total_VH: Tensor, left_VC: Tensor, right_CH: Tensor, **_: object) -> int:
    return 2 * left_VC.shape[0] * left_VC.shape[1] * right_CH.shape[1]


_addmm_flops._get_raw = True  # type: ignore[attr-defined]  # torch's mark of a formula that takes tensors


IN_PLACE = {torch.ops.aten.addmm_: _addmm_flops}
"""What torch does not count: the head's gradient is summed in place."""


def batch_of(lengths: tuple[int, ...], *, num_unused: int = 0, keep_tail: bool = True, isolated: bool = True) -> Batch:
    """Random conversations, a third of their positions labeled."""
    draw = np.random.default_rng(len(lengths))
    conversations = []
    for length in lengths:
        has_label = (draw.random(length) < 1 / 3) & (np.arange(length) < length - 1)
        ids = draw.integers(0, TINY.vocab_size, length).astype(np.int32)
        labels = np.where(has_label, ids, IGNORE_INDEX).astype(np.int32)
        roles = np.full(length, Role.USER, np.uint8)
        conversations.append(
            LabeledConversation(ids, labels, has_label.astype(np.float32), roles, ConversationKey(0, 0))
        )
    budget = sum(lengths) + num_unused
    pack = lay_out(conversations, token_budget=budget, remove_cross_attention=isolated, pad_id=0)
    return collate(pack, keep_tail=keep_tail)


def counted_flops(batch: Batch, activation_checkpointing: str = "none") -> tuple[int, int]:
    """Of the products with weights (mm) and of attention (bmm, dense), as torch sees them run."""
    model = LlamaForSFT(TINY, "sdpa", torch.float32, activation_checkpointing=activation_checkpointing)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        loss_of(model, batch).backward()
    counts = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    attention = sum(flops for name, flops in counts.items() if "bmm" in name)
    return sum(counts.values()) - attention, attention


def test_adapters_take_6_flops_and_frozen_matrices_4_as_torch_counts_them() -> None:
    model = LlamaForSFT(TINY, "sdpa", torch.float32)
    names = match_targets(ALL_LINEAR, list(projections_of(model, TINY)))
    add_adapters(model, TINY, LoraSpec(ranks=dict.fromkeys(names, 4), alphas=dict.fromkeys(names, 8.0)))
    batch = batch_of(LENGTHS)
    num_trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    trained = TrainedMatrices(blocks=False, head=False, adapter_parameters=num_trained)

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        loss_of(model, batch).backward()
    counts = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    weights = sum(flops for name, flops in counts.items() if "bmm" not in name)
    assert step_flops(TINY, [batch], "none", trained).model - attention_flops(LENGTHS) == weights


def attention_flops(lengths: tuple[int, ...]) -> int:
    per_pair = 6 * TINY.num_hidden_layers * TINY.num_attention_heads * TINY.head_dim
    return per_pair * sum(length * (length + 1) for length in lengths)


def test_flops_are_those_that_torch_counts_in_a_step() -> None:
    """Attention too, but for the half above the diagonal, which torch's plain implementation computes."""
    batch = batch_of(LENGTHS)
    weights, attention = counted_flops(batch)
    flops = step_flops(TINY, [batch], "none")

    assert flops.model == flops.hardware
    assert flops.model - attention_flops(LENGTHS) == weights
    dense, causal = (sum(pairs) for pairs in zip(*((n * n, n * (n + 1) // 2) for n in LENGTHS), strict=True))
    assert attention * causal == attention_flops(LENGTHS) * dense


def test_of_experts_those_are_counted_that_a_token_selects() -> None:
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 2}
    sizes = {key: getattr(TINY, key) for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    options = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 16, **experts, **sizes, **heads}
    config, batch = LlamaConfig.from_hf(options), batch_of(LENGTHS)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        loss_of(LlamaForSFT(config, "sdpa", torch.float32), batch).backward()
    counts = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    weights = sum(flops for name, flops in counts.items() if "bmm" not in name)
    pairs = sum(length * (length + 1) for length in LENGTHS)
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    assert step_flops(config, [batch], "none").model - attention == weights


def test_of_latent_attention_those_are_counted_without_its_padding() -> None:
    options = {"model_type": "deepseek_v3", **LATENT, **GROUPS, "num_attention_heads": 4, "hidden_size": 24}
    config = LlamaConfig.from_hf(TINY_SIZES | options | {"num_hidden_layers": 2, "head_dim": None})
    dense, sparse = LlamaForSFT(config, "sdpa", torch.float32).model.layers
    # In each head, 2 for each of the 16 dimensions of a query and the 12 of a value; 1 + 3 pairs.
    assert dense.flops([1, 2]).mixing == 4 * 2 * (16 + 12) * (1 + 3)
    latents = 24 * (24 + 20 + 6) + 24 * 4 * 16 + 20 * 4 * (10 + 12) + 4 * 12 * 24
    assert dense.flops([1, 2]).weights == 2 * 3 * (latents + 3 * 24 * 40)
    assert sparse.flops([1, 2]).weights == 2 * 3 * (latents + 12 * 24 + 3 * 24 * 24 * (3 + 2))


OTHERS = ("bias", "norm.weight", "sinks")


def test_of_gpt_oss_every_weight_is_counted_with_which_a_token_is_multiplied() -> None:
    config = LlamaConfig.from_hf(TINY_REFERENCE | GPT_OSS)
    for block in LlamaForSFT(config, "sdpa", torch.float32).model.layers:
        weights = {name: each.numel() for name, each in block.named_parameters() if not name.endswith(OTHERS)}
        experts = sum(size for name, size in weights.items() if ".experts." in name)
        assert block.flops([1, 2]).weights == 6 * (sum(weights.values()) - experts + experts // 6 * 3)
        assert len(weights) == 5


def test_of_experts_beside_an_mlp_every_weight_is_counted_with_which_a_token_is_multiplied() -> None:
    config = LlamaConfig.from_hf(TINY_REFERENCE | FAMILIES["Gemma 4 26B-A4B"])
    for block in LlamaForSFT(config, "sdpa", torch.float32).model.layers:
        weights = {name: each.numel() for name, each in block.named_parameters() if each.ndim > 1}
        experts = sum(size for name, size in weights.items() if ".experts." in name)
        assert block.flops([1, 2]).weights == 6 * (sum(weights.values()) - experts + experts // 6 * 2)
        assert len(weights) == 7


def test_a_delta_layer_takes_what_torch_counts_in_its_recurrence_written_as_products() -> None:
    config = LlamaConfig.from_hf(TINY_SIZES | QWEN_3_5)
    sizes, num_tokens = config.delta, sum(LENGTHS)
    assert sizes is not None
    torch.manual_seed(0)
    keys, values = (
        (num_tokens, sizes.num_key_heads, sizes.key_dim),
        (num_tokens, sizes.num_value_heads, sizes.value_dim),
    )
    q, k, v = torch.randn(keys), torch.randn(keys), torch.randn(values)
    decay, rate = -torch.rand(values[:2]), torch.rand(values[:2])
    x, taps = torch.randn(num_tokens, sum(sizes.widths)), torch.randn(sum(sizes.widths), sizes.num_taps)
    start = torch.zeros(sizes.num_value_heads, sizes.key_dim, sizes.value_dim)
    served = sizes.num_value_heads // sizes.num_key_heads
    state, outputs = start, []
    with FlopCounterMode(display=False) as counter:
        padded = F.pad(x.T[None], (sizes.num_taps - 1, 0))
        convolved = F.conv1d(padded, taps[:, None], groups=len(taps))[0].T
        for token in range(num_tokens):
            query, key = (
                (each[token] / each[token].norm(dim=-1, keepdim=True)).repeat_interleave(served, 0) for each in (q, k)
            )
            state = state * decay[token].exp()[:, None, None]
            correction = (v[token] - torch.bmm(key[:, None], state)[:, 0]) * rate[token][:, None]
            state = state + torch.bmm(key[:, :, None], correction[:, None])
            outputs.append(torch.bmm(query[:, None], state)[:, 0] * sizes.key_dim**-0.5)
    # It is the same function.
    expected, _ = recurrent_gated_delta_rule(q, k, v, decay, rate, start)
    torch.testing.assert_close(torch.stack(outputs), expected, atol=1e-4, rtol=1e-4)
    bounds = torch.tensor([0, num_tokens], dtype=torch.int32)
    torch.testing.assert_close(F.silu(convolved), causal_convolution(x, taps, bounds), atol=1e-5, rtol=1e-5)
    deltas = [block for block in blocks_without_weights(config) if isinstance(block, DeltaBlock)]
    in_layer = counter.get_total_flops()
    assert in_layer == deltas[0].flops(LENGTHS).mixing

    batch = batch_of(LENGTHS)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        loss_of(LlamaForSFT(config, "sdpa", torch.float32), batch).backward()
    counts = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    weights = sum(flops for name, flops in counts.items() if "bmm" not in name)
    assert 0 < len(deltas) < config.num_hidden_layers
    pairs = sum(length * (length + 1) for length in LENGTHS) * (config.num_hidden_layers - len(deltas))
    attention = 6 * config.num_attention_heads * config.head_dim * pairs
    recurrence = 3 * len(deltas) * in_layer
    assert step_flops(config, [batch], "none").model - attention - recurrence == weights


def test_padding_is_computed_and_not_needed() -> None:
    whole, with_tail = batch_of(LENGTHS), batch_of(LENGTHS, num_unused=20)
    flops = step_flops(TINY, [with_tail], "none")

    assert flops.model == step_flops(TINY, [whole], "none").model
    assert flops.hardware - attention_flops((*LENGTHS, 20)) == counted_flops(with_tail)[0]
    cut_off = step_flops(TINY, [batch_of(LENGTHS, num_unused=20, keep_tail=False)], "none")
    assert cut_off.model == cut_off.hardware == flops.model


def test_without_isolation_attention_counts_the_pack_as_one_document() -> None:
    apart, together = (
        step_flops(TINY, [batch_of(LENGTHS, num_unused=5, isolated=isolated)], "none") for isolated in (True, False)
    )

    expected = attention_flops((sum(LENGTHS),)) - attention_flops(LENGTHS)
    assert together.model - apart.model == together.hardware - apart.hardware == expected > 0


def test_full_recomputation_is_one_more_forward_pass_of_the_blocks_and_selective_is_none() -> None:
    batch = batch_of(LENGTHS)
    none, full, selective = (step_flops(TINY, [batch], name) for name in ("none", "full", "selective"))

    assert full.model == selective.model == selective.hardware == none.hardware
    recomputed = counted_flops(batch, "full")[0] - counted_flops(batch)[0]
    assert recomputed > 0
    assert full.hardware - none.hardware == recomputed + attention_flops(LENGTHS) // 3


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 1000])
def test_a_window_counts_the_pairs_that_it_shows_in_the_layers_that_have_it(window: int) -> None:
    config = replace(TINY, layers=(replace(TINY.layers[0], window=window), *TINY.layers[1:]))
    hidden = sum(max(query + 1 - window, 0) for length in LENGTHS for query in range(length))
    without, with_window = (step_flops(each, [batch_of(LENGTHS)], "full") for each in (TINY, config))
    per_pair = 4 * TINY.num_attention_heads * TINY.head_dim
    assert without.model - with_window.model == 3 * per_pair * hidden
    assert without.hardware - with_window.hardware == 4 * per_pair * hidden


PEAKS = {
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H20": 148.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA GB200": 2500.0,
    "NVIDIA L40S": 362.05,
    "NVIDIA L4": 121.0,
    "NVIDIA RTX A6000": 154.8,
    "AMD Instinct MI300X": 1307.4,
    "NVIDIA A10": 125.0,
    "NVIDIA A10G": 70.0,
    "NVIDIA GeForce RTX 3090": 71.0,
    "NVIDIA GeForce RTX 3090 Ti": 80.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 4090 D": 147.1,
    "NVIDIA GeForce RTX 3090 Ti Laptop GPU": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
}


def test_a_gpu_has_its_dense_bf16_peak_by_name_one_like_it_has_not_and_the_configuration_comes_first() -> None:
    for name, tflops in PEAKS.items():
        peak = peak_of(name)
        assert peak.tflops == tflops
        assert name in str(peak)
        assert ("logging.peak_tflops" in str(peak)) == (tflops is None)
    assert find_peak(torch.device("cpu"), None).tflops is None
    assert find_peak(torch.device("cpu"), 1.5).tflops == 1.5


def test_a_run_names_its_peak_and_measures_every_step_against_it(finished: FinishedRun) -> None:
    text = "\n".join(finished.console)
    assert "peak 0.5 TFLOP/s (logging.peak_tflops); mfu = " in text
    assert "though compute" not in text  # the peak is one that the user knows
    config = finished.trainer.setup.model.architecture
    for step in finished.steps:
        flops = step["tflops"] * 1e12 * step["step_seconds"]
        blocks = 3 * sum(block.flops([step["tokens"]]).weights for block in blocks_without_weights(config))
        head = 6 * config.hidden_size * config.vocab_size * step["trained_tokens"]
        # Attention is what is left: more than every token that sees itself alone, less than one document of all.
        heads = 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
        assert heads * 2 * step["tokens"] < flops - blocks - head < heads * step["tokens"] * (step["tokens"] + 1)
        assert step["mfu"] == pytest.approx(step["tflops"] / 0.5)
        assert step["hfu"] == pytest.approx(step["mfu"])  # on a CPU the padding is cut off
