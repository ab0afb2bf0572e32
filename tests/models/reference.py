"""Tiny random models of transformers, of every family, and native ones with the same weights."""

from typing import Any

import torch
import torch.nn.functional as F
import transformers

from sftron.models.architecture import LlamaConfig
from sftron.models.fusion import fuse_state_dict, split_state_dict
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import weighted_loss_sum
from sftron.models.mixtures import spelling_of

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Large enough that logits, and with them every difference, are far from 0.
    "initializer_range": 0.3,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0}

QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 110, "max_window_layers": 1}

QWEN_3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "head_dim": 16,
    "rms_norm_eps": 0.02,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    | {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
}

QWEN_3_5_MOE: dict[str, Any] = QWEN_3_5 | {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}

QWEN_3_NEXT: dict[str, Any] = QWEN_3_5_MOE | {
    "model_type": "qwen3_next",
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
}

SLIDING: dict[str, Any] = {
    "rms_norm_eps": 0.02,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MINISTRAL_ROPE = YARN | {"rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 40, "norm_topk_prob": True, "qkv_bias": False}
MANY = {"num_experts": 12, "num_experts_per_tok": 5}
GROUPS = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GROUPS |= {"n_shared_experts": 2, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1}

LATENT = {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12}
LATENT |= {"num_key_value_heads": 4}

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "head_dim": 12,
    **SLIDING,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "swiglu_alpha": 1.3,
    "swiglu_limit": 1.5,
    "rope_parameters": YARN | {"rope_theta": 3e4, "truncate": False},
}

GEMMA_4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 5,
    "head_dim": 12,
    "global_head_dim": 16,
    "rms_norm_eps": 0.02,
    "sliding_window": 20,
    # With two that share, the third is the one whose keys the next reads, and not the first.
    "layer_types": [*["sliding_attention", "full_attention"], *["sliding_attention"] * 2, "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        "full_attention": {"rope_type": "proportional", "rope_theta": 3e4, "partial_rotary_factor": 0.5},
    },
    "final_logit_softcapping": 20.0,
}
PER_LAYER = {"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 97}
# transformers' class has dropout, and a reference is in training mode.
SEED_OSS = {"model_type": "seed_oss", "head_dim": 12, "residual_dropout": 0.0, "attention_dropout": 0.0}
GRANITE: dict[str, Any] = {
    "rms_norm_eps": 0.02,
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.3,
}
GRANITE_MOE = GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3}
GRANITE_4: dict[str, Any] = GRANITE | {
    "model_type": "granitemoehybrid",
    "shared_intermediate_size": 40,
    "layer_types": ["full_attention", "full_attention"],
    "mamba_n_heads": 8,
    "tie_word_embeddings": True,
}

LFM2: dict[str, Any] = {
    "model_type": "lfm2",
    "norm_eps": 0.02,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_hidden_layers": 3,
    # Of 80, two thirds are 53; 1.3 times these are 68, and the next multiple is 70.
    "intermediate_size": 80,
    "block_ffn_dim_multiplier": 1.3,
    "block_multiple_of": 10,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama 2": {"num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "Llama 3": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "Llama 3.1": {"rope_parameters": LLAMA3_ROPE},
    "Llama 3.2": {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True, "head_dim": 8},
    "SmolLM2": {"tie_word_embeddings": True, "num_attention_heads": 6, "hidden_size": 48},
    "TinyLlama, Yi": {"num_key_value_heads": 1},
    "DeepSeek-coder": {"rope_parameters": LINEAR_ROPE, "num_key_value_heads": 4},
    "Granite code": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "Mistral 0.1": {"model_type": "mistral", "sliding_window": 110},
    "Mistral 0.3": {"model_type": "mistral", "sliding_window": None},
    "Mistral Nemo": {"model_type": "mistral", "sliding_window": None, "head_dim": 12},
    "Ministral 3": {
        "model_type": "ministral3",
        "head_dim": 12,
        "rms_norm_eps": 0.02,
        "rope_parameters": MINISTRAL_ROPE,
    },
    "Qwen 2": {"model_type": "qwen2", "rms_norm_eps": 1e-5},
    "Qwen 2.5": {"model_type": "qwen2", "tie_word_embeddings": True},
    "Qwen 2 with a window": {"model_type": "qwen2", **QWEN_WINDOW},
    "Qwen 3": {"model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": True},
    "Qwen 3 with biases": {"model_type": "qwen3", "head_dim": 12, "attention_bias": True},
    "SmolLM3": {"model_type": "smollm3", "no_rope_layers": [0, 1], "rms_norm_eps": 0.02},
    "OLMo 1": {"model_type": "olmo", "clip_qkv": 0.8},
    "OLMo 2": {"model_type": "olmo2", "rms_norm_eps": 0.02, "attention_bias": True},
    "OLMo 3": {"model_type": "olmo3", **SLIDING, "rope_theta": 3e4, "rope_scaling": YARN},
    "Granite 3": GRANITE | {"model_type": "granite", "tie_word_embeddings": True},
    "Granite 3 MoE": GRANITE_MOE | {"model_type": "granitemoe", "tie_word_embeddings": True},
    "Granite MoE, shared": GRANITE_MOE | {"model_type": "granitemoeshared", "shared_intermediate_size": 40},
    "Granite MoE, shared, without": GRANITE_MOE | {"model_type": "granitemoeshared", "attention_bias": True},
    "Granite 4": GRANITE_4 | {"num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope"},
    "Granite 4 with experts": GRANITE_4 | GRANITE_MOE | {"tie_word_embeddings": False},
    "Phi 1.5, 2": {"model_type": "phi", "layer_norm_eps": 0.02, "partial_rotary_factor": 0.25},
    "Phi with normed heads": {"model_type": "phi", "layer_norm_eps": 0.02, "qk_layernorm": True},
    "Phi 3": {"model_type": "phi3", "rms_norm_eps": 0.02, "sliding_window": 20},
    "Phi 4 mini": {
        "model_type": "phi3",
        "rms_norm_eps": 0.02,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 40,
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.0, 5.0]},
    },
    "StarCoder 2": {"model_type": "starcoder2", "norm_epsilon": 0.02},
    "StarCoder 2 without biases": {"model_type": "starcoder2", "use_bias": False, "tie_word_embeddings": False},
    "StableLM 2 1.6B": {"model_type": "stablelm", "layer_norm_eps": 0.02, "use_qkv_bias": True},
    "StableLM 2 12B": {
        "model_type": "stablelm",
        "layer_norm_eps": 0.02,
        "qk_layernorm": True,
        "use_parallel_residual": True,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
    },
    "Gemma 1": {"model_type": "gemma", "head_dim": 12, "rms_norm_eps": 0.02},
    "Gemma 2": {
        "model_type": "gemma2",
        "head_dim": 12,
        **SLIDING,
        "query_pre_attn_scalar": 7,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 20.0,
    },
    "Gemma 3": {
        "model_type": "gemma3_text",
        "head_dim": 12,
        **SLIDING,
        "query_pre_attn_scalar": 7,
        "rope_theta": 3e4,
        "rope_local_base_freq": 5e3,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "Gemma 4 E2B": GEMMA_4 | PER_LAYER | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "Gemma 4 31B": GEMMA_4
    | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    | {"tie_word_embeddings": False},
    "Gemma 4 12B": GEMMA_4
    | {"model_type": "gemma4_unified_text", "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "Gemma 4 26B-A4B": GEMMA_4
    | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
    "GLM": {"model_type": "glm", "rms_norm_eps": 0.02, "head_dim": 8},
    "GLM 4": {"model_type": "glm4", "rms_norm_eps": 0.02, "head_dim": 8},
    "GLM 4.5": {"model_type": "glm4_moe", "rms_norm_eps": 0.02, "head_dim": 16, **GROUPS, "use_qk_norm": True}
    | {"attention_bias": True},
    "GLM 4.5 Air": {"model_type": "glm4_moe", **GROUPS, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
    | {"first_k_dense_replace": 0, "partial_rotary_factor": 0.25},
    "GLM 4.7 Flash": {"model_type": "glm4_moe_lite", "rms_norm_eps": 0.02, **LATENT, **GROUPS, "v_head_dim": 20}
    | {"mlp_layer_types": ["sparse", "dense"]},
    "DeepSeek V3": {"model_type": "deepseek_v3", "rms_norm_eps": 0.02, **LATENT, **GROUPS, "attention_bias": True}
    | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    "DeepSeek V3 without experts": {"model_type": "deepseek_v3", **LATENT, **GROUPS, "first_k_dense_replace": 2},
    "Moonlight": {"model_type": "deepseek_v3", **LATENT, **GROUPS, "q_lora_rank": None, "rope_interleave": False},
    "dots.llm1": {"model_type": "dots1", "rms_norm_eps": 0.02, **GROUPS, "sliding_window": 20, "max_window_layers": 1}
    | {"attention_bias": True},
    "Solar Open": {"model_type": "solar_open", "rms_norm_eps": 0.02, **GROUPS, "head_dim": 12, "attention_bias": True}
    | {"first_k_dense_replace": 0},
    "Cohere": {"model_type": "cohere", "layer_norm_eps": 0.02, "logit_scale": 0.7, "use_qk_norm": True},
    "Cohere 2": {"model_type": "cohere2", "layer_norm_eps": 0.02, "logit_scale": 0.7, "sliding_window": 20}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "Qwen 3 MoE": {"model_type": "qwen3_moe", "head_dim": 12, "norm_topk_prob": True, **EXPERTS},
    "Qwen 3 MoE with dense layers": {"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [0]},
    "Qwen 2 MoE": {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 40},
    "Qwen 2 MoE with dense layers": {"model_type": "qwen2_moe", **EXPERTS, **SHARED, "decoder_sparse_step": 2},
    "Mixtral": {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2, "rms_norm_eps": 0.02},
    "OLMoE": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "OLMoE with normalized scores": {"model_type": "olmoe", **MANY, "norm_topk_prob": True},
    "Seed OSS": SEED_OSS | {"rms_norm_eps": 0.02},
    "Seed OSS with other biases": SEED_OSS | {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    "ERNIE 4.5": {"model_type": "ernie4_5", "head_dim": 12, "rms_norm_eps": 0.02, "use_bias": True},
    "Arcee": {
        "model_type": "arcee",
        "rms_norm_eps": 0.02,
        "mlp_bias": True,
        "rope_parameters": YARN | {"rope_theta": 3e4},
    },
    "Hunyuan": {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 12,
        "rms_norm_eps": 0.02,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "alpha": 50.0, "beta_fast": 32, "mscale": 1.0},
    },
    "Hunyuan without alpha": {"model_type": "hunyuan_v1_dense", "head_dim": 12, "tie_word_embeddings": True},
    "EXAONE 4 32B": {"model_type": "exaone4", **SLIDING, "rope_parameters": LLAMA3_ROPE},
    "EXAONE 4 1.2B": {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 2}
    | {"head_dim": 12, "rms_norm_eps": 0.02, "tie_word_embeddings": True},
    "CWM": {"model_type": "cwm", "head_dim": 12, **SLIDING, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE},
    "InternLM3": {"model_type": "internlm3", "head_dim": 12, "attention_bias": True, "mlp_bias": True}
    | {"rope_parameters": LINEAR_ROPE},
    "IQuest Coder": {"model_type": "iquestcoder", "head_dim": 12, "rms_norm_eps": 0.02},
    "HyperCLOVA X": {
        "model_type": "hyperclovax",
        "rms_norm_eps": 0.02,
        "embedding_multiplier": 1.7,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.7,
    },
    "Jais 2": {"model_type": "jais2", "layer_norm_eps": 0.02},
    "Apertus": {"model_type": "apertus", "rms_norm_eps": 0.02, "rope_parameters": LLAMA3_ROPE | {"rope_theta": 3e4}},
    "gpt-oss": GPT_OSS,
    "LFM2": LFM2,
    "LFM2 with biases, untied": LFM2
    | {"conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False, "block_auto_adjust_ff_dim": False},
    "Qwen 3.5": QWEN_3_5,
    "Qwen 3.5, tied, as many key heads": QWEN_3_5 | {"linear_num_key_heads": 4, "tie_word_embeddings": True},
    "Qwen 3.5 MoE": QWEN_3_5_MOE,
    "Qwen3-Next": QWEN_3_NEXT,
    "Qwen3-Next with dense layers": QWEN_3_NEXT | {"mlp_only_layers": [0], "norm_topk_prob": False},
}
"""What makes each family what it is, on TINY; `model_type` where it is not llama."""

FIRST_OF_TYPE = {options.get("model_type", "llama"): family for family, options in reversed(FAMILIES.items())}
"""A family of each model type; the names of tensors and keys depend on the type."""


def make_reference(seed: int = 0, *, model_type: str = "llama", **overrides: Any) -> Any:
    torch.manual_seed(seed)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    options = TINY | {"pad_token_id": None} | overrides
    if "vocab_size_per_layer_input" in options:
        options["vocab_size_per_layer_input"] = options["vocab_size"]
    config = transformers.AutoConfig.for_model(model_type, **options, **eager)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name or "act_fn." in name or name.endswith("scale"):
            # transformers starts them at constants, where a norm or a bias left out would not show.
            torch.nn.init.normal_(parameter, mean=float("norm" in name or "scale" in name), std=0.3)
        if name.endswith("A_log"):
            # Slow decays, with which a state outlasts chunks.
            torch.nn.init.normal_(parameter, mean=-3.0)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
        if name.endswith("e_score_correction_bias"):
            # transformers starts it at zero. This is enough to select other experts for most tokens.
            torch.nn.init.normal_(buffer, std=0.3)
    for name, parameter in model.named_parameters():
        if ".experts." in name and "_proj" in name:
            # More than the initial value, so that logits depend on experts as much as on attention.
            torch.nn.init.normal_(parameter, std=0.5)
        if name.endswith("router.proj.weight"):
            # Its logits are those of rows of length 1, and would select experts nearly at random.
            torch.nn.init.normal_(parameter, std=2.0)
    return model


def make_native(
    reference: transformers.PreTrainedModel, config: LlamaConfig | None = None, **options: Any
) -> LlamaForSFT:
    """By default the architecture is what config.json of the reference states."""
    options = {"compute_dtype": torch.float32} | options
    model = LlamaForSFT(config or LlamaConfig.from_hf(reference.config.to_dict()), **options)
    names = [name for name, _ in model.named_parameters()]
    model.load_state_dict(dict(fuse_state_dict(names, model.config, reference.state_dict().__getitem__)))
    return model


make_theirs, make_ours = make_reference, make_native  # the names in the tests of other packages


def tiny_config(**overrides: Any) -> LlamaConfig:
    return LlamaConfig.from_hf({"model_type": "llama", **TINY, **overrides})


def require_same_model(native: LlamaForSFT, reference: Any, lengths: list[int]) -> None:
    """Compares logits, the loss and every gradient, on a pack of random documents of these lengths."""
    input_ids, *rest = pack(lengths)
    documents = input_ids.split(lengths)
    expected_logits = torch.cat([reference(ids[None], use_cache=False).logits[0] for ids in documents])
    targets = torch.cat([F.pad(ids[1:], (0, 1), value=-100) for ids in documents])
    expected_loss = F.cross_entropy(expected_logits, targets, reduction="sum")
    expected_loss.backward()
    hidden = native(input_ids, *rest)
    (positions,) = torch.nonzero(targets >= 0, as_tuple=True)
    loss, _ = weighted_loss_sum(hidden, native.head, positions, targets[positions], torch.ones(len(positions)))
    loss.backward()

    assert expected_logits.abs().max() > 1
    torch.testing.assert_close(native.head.logits(hidden), expected_logits, atol=2e-4, rtol=1e-5)
    torch.testing.assert_close(loss, expected_loss, atol=0, rtol=1e-5)
    trained = {name: each for name, each in native.named_parameters() if each.requires_grad}
    expected = {n: p.grad for n, p in reference.named_parameters()}
    own = ((name, each.grad) for name, each in trained.items())
    gradients = dict(split_state_dict(own, native.config, spelling_of(expected)))
    assert gradients.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for key, gradient in expected.items():
        # A bias of k moves all scores of a query alike, so its gradient is 0 but for rounding where nothing norms it.
        scale = gradient.abs().max().item() if ".k_proj.bias" not in key else largest
        assert gradient.abs().max() > 0, key
        torch.testing.assert_close(gradients[key], gradient, atol=1e-4 * scale, rtol=0, msg=lambda m, k=key: k + m)


def pack(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Returns the arguments of `LlamaForSFT.forward` for random documents of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, TINY["vocab_size"], (sum(lengths),), generator=generator)
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return input_ids, position_ids, cu_seqlens, max(lengths)
