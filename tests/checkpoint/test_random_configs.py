"""Random values of every key that a config class declares: refused by name, or exported with transformers' logits."""

import dataclasses
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from sftron.checkpoint.export import export_hf
from sftron.checkpoint.hf_weights import load_model
from sftron.models.families.table import FAMILIES as MODEL_TYPES
from tests.checkpoint.test_exported_logits import quiet as quiet
from tests.models.reference import TINY, make_reference, pack

INPUT_IDS, *REST = pack([60])
NUM_CONFIGS = 20
VALUES: dict[str, list[Any]] = {
    "hidden_size": [32, 48],
    "intermediate_size": [24, 40],
    "num_hidden_layers": [3],
    "num_attention_heads": [4],
    "num_key_value_heads": [1, 2, 4],
    "head_dim": [8, 16],
    "max_position_embeddings": [40, 128],
    "original_max_position_embeddings": [24, 4096],
    "pad_token_id": [1],
    "sliding_window": [None, 7, 20, 4096],
    "sliding_window_pattern": [2, 3, "LLG"],
    "max_window_layers": [0, 1, 2, 9],
    "mlp_only_layers": [None, [], [0], [1]],
    "no_rope_layers": [None, [0, 1, 1], [1, 0, 0]],
    "no_rope_layer_interval": [2, 3, 4],
    "query_pre_attn_scalar": [5, 64],
    "hidden_act": ["silu", "gelu", "gelu_pytorch_tanh", "relu"],
    "hidden_activation": ["silu", "gelu", "gelu_pytorch_tanh", "relu"],
    "num_experts": [4, 6],
    "num_local_experts": [4, 6],
    "num_experts_per_tok": [1, 3],
    "moe_intermediate_size": [16, 24],
    "shared_expert_intermediate_size": [16, 24],
    "decoder_sparse_step": [1, 2],
    "n_routed_experts": [8, 12],
    "n_shared_experts": [1, 2],
    "n_group": [1, 2, 4],
    "topk_group": [1, 2],
    "first_k_dense_replace": [0, 1, 2],
    "num_mtp_layers": [0, 1],
    "mlp_layer_types": [None, ["dense", "sparse", "sparse"], ["sparse", "sparse", "dense"]],
    "q_lora_rank": [None, 16, 24],
    "kv_lora_rank": [16, 20],
    "qk_nope_head_dim": [8, 10],
    "qk_rope_head_dim": [6, 8],
    "v_head_dim": [12, 20],
    "shared_intermediate_size": [16, 24],
    "position_embedding_type": [None, "rope", "nope"],
    # The class checks them in models without Mamba layers, too.
    "mamba_n_heads": [8],
    "mamba_d_head": ["auto"],
    "mamba_n_groups": [1],
    "mamba_d_state": [8],
    "mamba_d_conv": [4],
    "mamba_expand": [2],
    "mamba_chunk_size": [16],
    "time_step_limit": [[0.0, 8.0]],
    "linear_num_key_heads": [2],
    "linear_num_value_heads": [2, 4],
    "linear_key_head_dim": [8, 12],
    "linear_value_head_dim": [8, 10],
    "linear_conv_kernel_dim": [2, 4],
    "conv_L_cache": [1, 3, 4],
    "full_attn_idxs": [None, [], [0, 2]],
    "block_multiple_of": [1, 10],
    "logit_scale": [0.5, 1.7],
    "hidden_size_per_layer_input": [0, 10],
    "vocab_size_per_layer_input": [97],
    "num_kv_shared_layers": [0, 1],
    "top_k_experts": [1, 3],
    "use_bidirectional_attention": [None, "vision", "all"],
    "pretraining_tp": [1, 2],
}
LARGE = ("size", "dim", "heads", "experts", "layers", "tok", "num_", "pad_token_id", "rank")
"""Parts of the names of keys whose defaults are those of large models."""
FIXED = {"vocab_size", "initializer_range", "rope_parameters"}
"""Keys of every config; test_exported_logits.py has the ropes."""


def _value(field: Any, model_type: str, has_delta: bool, choose: random.Random) -> Any:
    name, kind = field.name, str(field.type)
    if name == "layer_types":
        other = "linear_attention" if has_delta else "sliding_attention"
        other = {"granitemoehybrid": "full_attention", "lfm2": "conv"}.get(model_type, other)
        return choose.choice([None, choose.choices(["full_attention", other], k=3)])
    if name in VALUES:
        return choose.choice(VALUES[name])
    if name.endswith("token_id"):
        return choose.choice([None, 5])
    if "bool" in kind:
        return choose.choice([True, False])
    if "eps" in name:
        return choose.choice([1e-6, 0.02])
    assert "float" in kind, f"{name}: {kind} needs values here"
    return choose.choice([field.default, 0.5, 1.7 if "dropout" not in name and "pdrop" not in name else 0.1])


def _config(model_type: str, choose: random.Random) -> dict[str, Any]:
    """Returns random values of random keys, and of all whose defaults would make a large model."""
    base = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    own = {"tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"}
    fields = dataclasses.fields(transformers.CONFIG_MAPPING[model_type])
    fields = [each for each in fields if each.name not in base - own and each.name not in FIXED]
    fields = [each for each in fields if any(part in each.name for part in LARGE) or choose.random() < 0.6]
    has_delta = any(each.name.startswith("linear_") for each in fields)
    values = {each.name: _value(each, model_type, has_delta, choose) for each in fields}
    # Latent attention has as many key-value heads as query heads.
    return values | ({"num_key_value_heads": 4} if "kv_lora_rank" in values and choose.random() < 0.8 else {})


def _logits(folder: Path) -> Tensor:
    options: Any = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)(
            INPUT_IDS[None], use_cache=False
        ).logits[0]


@pytest.mark.nightly
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_random_values_of_every_key_are_refused_by_name_or_exported_with_equal_logits(
    model_type: str, tmp_path: Path
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_CONFIGS):
        values = _config(model_type, random.Random(f"{model_type} {seed}"))
        common = {key: TINY[key] for key in ("vocab_size", "initializer_range")}
        try:
            make_reference(seed, model_type=model_type, **common | values).save_pretrained(tmp_path / "source")
            path = tmp_path / "source" / "config.json"
            saved = json.loads(path.read_text())
            path.write_text(json.dumps({key: saved[key] for key in ("model_type", *FIXED)} | values))
            expected = _logits(tmp_path / "source")
        except Exception as error:  # of any type, from transformers alone
            counts[f"transformers: {type(error).__name__}: {error}"] += 1
            continue
        try:
            native = load_model(tmp_path / "source", compute_dtype=torch.float32, num_positions=128)
        except ValueError as error:
            named = [line.split(":")[0].strip() for line in str(error).splitlines()[1:-1]]
            counts["refused: " + ", ".join(named)] += 1
            continue
        with torch.no_grad():
            logits = native.head.logits(native(INPUT_IDS, *REST))
        atol = 1e-4 * expected.abs().max().item()
        torch.testing.assert_close(logits, expected, rtol=0, atol=atol, msg=lambda m, v=values: f"{m}\n{v}")
        options: dict[str, Any] = {"source_folder": tmp_path / "source", "dtype": torch.float32, "stop_token_ids": [3]}
        export_hf(native.named_parameters(), tmp_path / "out", **options)
        assert _logits(tmp_path / "out").equal(expected), values
        counts["equal"] += 1
    print(f"{model_type}: {dict(counts)}")
    assert counts["equal"] >= 3, counts
