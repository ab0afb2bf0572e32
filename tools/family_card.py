"""Measures each model family against transformers, and writes its row into docs/models/index.md.

    python tools/family_card.py all
    python tools/family_card.py qwen3 gemma3_text

Each family has a random model in fp32 on the CPU, whose norms and biases are far from their initial values. The
reference is transformers' class of the family, with eager attention, one conversation at a time. The exit status is 0
if every family is within rounding, 1 if one is not, and 2 if an argument is no family.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

# Makes sftron and tools importable without an installation.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
import transformers
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from sftcheck.check_isolation import POSITIONS_ALONE
from sftron.checkpoint.export import export_hf
from sftron.checkpoint.hf_weights import load_model
from sftron.checks.parity import FP32_TOLERANCE, check_generation, check_neighbors
from sftron.data.loader import collate
from sftron.data.packing import lay_out
from sftron.data.types import IGNORE_INDEX, Batch, LabeledConversation, Pack
from sftron.errors import exit_with, show
from sftron.models.architecture import FAMILIES
from sftron.models.fusion import split_state_dict
from sftron.models.llama import LlamaForSFT
from sftron.train.objective import hidden_states, loss_of
from tools.bench_step import random_rows

PAGE = Path(__file__).parents[1] / "docs" / "models" / "index.md"
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 8192}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048}
LENGTHS = (320, 17, 200, 63, 64, 65, 1, 130)
"""The lengths of the conversations, in tokens; windows are 64 tokens long."""
QUICK_SIZES = {"hidden_size": 64, "intermediate_size": 48, "head_dim": 16, "vocab_size": 160}
QUICK_LENGTHS = (70, 5, 1, 66)
NUM_NEW_TOKENS, NUM_STEPS = 24, 5
BOUNDS = {"logits": FP32_TOLERANCE.logits, "loss": 1e-5, "gradients": 1e-4}
"""The largest differences that are accepted as rounding. That of the loss is divided by the loss, that of a gradient by
its largest value."""

_WINDOW = {"sliding_window": 64, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}
_GEMMA_4 = _WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 128}
_GEMMA_4 |= {"final_logit_softcapping": 30.0}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_CORRECTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_LATENT = _CORRECTED | {"num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32}
_LATENT |= {"qk_rope_head_dim": 32, "head_dim": 32, "v_head_dim": 48}
_ROPE_3_5 = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
_ROPE_GPT_OSS = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": False}
_ROPE_GPT_OSS |= {"original_max_position_embeddings": 64}
_HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": _ROPE_3_5 | {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
}
_GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 1 / 64}
_GRANITE |= {"logits_scaling": 8.0}
_GRANITE_MOE = _GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "seed_oss": {"residual_dropout": 0.0, "attention_dropout": 0.0},
    "mistral": {"sliding_window": 64},
    "olmo3": _WINDOW,
    "exaone4": _WINDOW,
    "cwm": _WINDOW,
    "hyperclovax": {"embedding_multiplier": 10.0, "attention_multiplier": 1 / 64, "logits_scaling": 0.125},
    "granite": _GRANITE,
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE | {"shared_intermediate_size": 256},
    "granitemoehybrid": _GRANITE_MOE
    | {"layer_types": ["full_attention"] * 4, "mamba_n_heads": 8}
    | {"shared_intermediate_size": 256, "position_embedding_type": "rope"},
    "phi3": {"sliding_window": 64},
    "starcoder2": {"sliding_window": 64},
    "gemma2": _WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3_text": _WINDOW,
    "gemma4_text": _GEMMA_4
    | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 8192}
    | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    # With four layers, rounding alone is 1.2e-4 of the largest gradient of the embeddings; transformers' own gradients
    # differ by up to 6e-5 from those in float64.
    "gemma4_unified_text": _GEMMA_4
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_hidden_layers": 2}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "cohere2": _WINDOW,
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 256},
    "qwen3_moe": _EXPERTS | {"norm_topk_prob": True},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128},
    "glm4_moe": _CORRECTED | {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5},
    "deepseek_v3": _LATENT | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    "glm4_moe_lite": _LATENT,
    "dots1": _CORRECTED | {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "solar_open": _CORRECTED,
    # The limit is left at 7, which few gates exceed: at a gate within rounding of it, gradients differ by far more.
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128}
    | _WINDOW
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": _ROPE_GPT_OSS},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID | _EXPERTS | {"shared_expert_intermediate_size": 128},
    "qwen3_next": _HYBRID | _EXPERTS | {"shared_expert_intermediate_size": 128, "rope_parameters": _ROPE_3_5},
}
"""The settings of a family in addition to SIZES; all others are the defaults of its config class."""


class Speed(NamedTuple):
    tokens_per_second: float
    peak_bytes: int
    """The largest sum of the tensors that exist at one time, beyond the weights."""


# --- Models ---


@torch.no_grad()
def make_reference(model_type: str, settings: dict[str, Any]) -> Any:
    """Returns transformers' model with random weights, in which a constant or a layer that is left out shows."""
    torch.manual_seed(0)
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "pad_token_id": None}
    if "vocab_size_per_layer_input" in settings:
        settings = settings | {"vocab_size_per_layer_input": settings["vocab_size"]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings, **options))
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
        elif name.endswith("A_log"):
            parameter.normal_(-3.0, 1.0)  # slow decays, with which a state outlasts a conversation
        else:
            parameter.normal_(float("norm" in name), 0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3)
    # Otherwise generate() would stop at tokens of the config class.
    model.generation_config = transformers.GenerationConfig()
    return model.train()


def make_fast_reference(reference: Any) -> Any:
    """Returns the same model with the attention and the experts that transformers selects by default."""
    config = AutoConfig.for_model(**reference.config.to_dict())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(reference.state_dict())
    return model.train()


def load_native(folder: Path) -> LlamaForSFT:
    return load_model(folder, compute_dtype=torch.float32)


def make_pack(rows: Sequence[LabeledConversation]) -> Pack:
    return lay_out(list(rows), token_budget=sum(map(len, rows)), remove_cross_attention=True, pad_id=0)


def as_batch(rows: Sequence[LabeledConversation]) -> Batch:
    return collate(make_pack(rows), keep_tail=False)


# --- Measurements ---


def native_results(native: LlamaForSFT, batches: Sequence[Batch]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns logits, the loss and the gradients by Hugging Face's names."""
    native.zero_grad()
    loss = torch.zeros(())
    for batch in batches:
        loss = loss + loss_of(native, batch)
    loss.backward()
    with torch.no_grad():
        logits = torch.cat([native.head.logits(hidden_states(native, batch)) for batch in batches])
    gradients = ((name, each.grad) for name, each in native.named_parameters() if each.grad is not None)
    return logits, loss.detach(), {name: grad.clone() for name, grad in split_state_dict(gradients, native.config)}


def reference_results(reference: Any, rows: Sequence[LabeledConversation]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    reference.zero_grad()
    logits, loss = [], torch.zeros(())
    for row in rows:
        found = reference(torch.from_numpy(row.input_ids)[None].long(), use_cache=False).logits[0]
        labels = torch.from_numpy(row.labels).long()
        loss = loss + torch.nn.functional.cross_entropy(found, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        logits.append(found.detach())
    loss.backward()
    gradients = {name: each.grad.clone() for name, each in reference.named_parameters() if each.grad is not None}
    return torch.cat(logits), loss.detach(), gradients


def compare(native: Any, reference: Any) -> dict[str, float]:
    """Compares two results of the functions above. A gradient that one of the two lacks is an infinite difference."""
    (logits, loss, gradients), (other_logits, other_loss, others) = native, reference
    largest = max(float(grad.abs().max()) for grad in others.values())
    distance = 0.0 if gradients.keys() == others.keys() else float("inf")
    for name in gradients.keys() & others.keys():
        # A bias of k moves all scores of a query alike, so its gradient is 0 but for rounding.
        scale = largest if ".k_proj.bias" in name else float(others[name].abs().max())
        found = float((gradients[name] - others[name]).abs().max()) / (scale or 1.0)
        distance = max(distance, found) if isfinite(found) else float("inf")
    logits_distance = float((logits - other_logits).abs().max())
    return {"logits": logits_distance, "loss": float((loss / other_loss - 1).abs()), "gradients": distance}


def compare_export(native: LlamaForSFT, reference: Any, source: Path, out: Path) -> tuple[str, int]:
    """Returns what transformers finds in an export, and the number of tensors and keys that are wrong."""
    export_hf(native.named_parameters(), out, source_folder=source, dtype=torch.float32, stop_token_ids=[3])
    loaded: Any = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    again, info = loaded
    before, after = reference.state_dict(), again.state_dict()
    num_equal = sum(name in after and after[name].equal(tensor) for name, tensor in before.items())
    missing, unexpected = len(info["missing_keys"]), len(info["unexpected_keys"])
    text = f"{num_equal} of {len(before)}"
    text += f"; keys: {missing} missing, {unexpected} unexpected" if missing or unexpected else ""
    return text, len(before) - num_equal + len(before.keys() ^ after.keys()) + sum(map(len, info.values()))


@torch.no_grad()
def isolates_flat_rows(model: Any, rows: Sequence[LabeledConversation], expected: Tensor) -> bool:
    inputs = POSITIONS_ALONE([make_pack(rows)])
    del inputs["labels"]
    distance = (model(**inputs, use_cache=False).logits[0] - expected).abs().max()
    return bool(distance < 1e-3 * expected.abs().max())


def peak_bytes(step: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    assert profiled.profiler is not None
    results: Any = profiled.profiler.kineto_results
    events = [each for each in results.events() if each.name() == "[memory]"]
    held = torch.tensor([each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())])
    return int(held.cumsum(0).max())


def take_turns(ways: Sequence[Callable[[], object]], num_tokens: int, num_steps: int) -> list[Speed]:
    """Times forward and backward of each way in turn. The peaks are those of a step that is not timed."""
    peaks, seconds = [peak_bytes(way) for way in ways], [list[float]() for _ in ways]
    for _ in range(num_steps):
        for way, found in zip(ways, seconds, strict=True):
            started = time.perf_counter()
            way()
            found.append(time.perf_counter() - started)
    return [Speed(num_tokens / median(each), peak) for each, peak in zip(seconds, peaks, strict=True)]


def measure(
    model_type: str, sizes: dict[str, Any], lengths: Sequence[int] = LENGTHS, num_steps: int = NUM_STEPS
) -> list[str]:
    """Returns the row of the family, which states in its first cell if a difference is more than rounding."""
    settings = sizes | SETTINGS.get(model_type, {})
    rows = random_rows(lengths, settings["vocab_size"])
    reference, batch = make_reference(model_type, settings), as_batch(rows)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "source")
        reference.save_pretrained(source)
        native = load_native(source)
        export, num_export_errors = compare_export(native, reference, source, Path(scratch, "out"))
    expected = reference_results(reference, rows)
    packed = compare(native_results(native, [batch]), expected)
    alone = compare(native_results(native, [as_batch([row]) for row in rows]), expected)
    prompts = [row.input_ids.tolist() for row in rows if len(row) > 1][:3]
    reference.eval()
    greedy, *_ = check_generation(native, reference, prompts, NUM_NEW_TOKENS, {}, FP32_TOLERANCE.logits)
    isolation = check_neighbors(native, [row.input_ids.tolist() for row in rows])
    fast = make_fast_reference(reference)
    del reference
    is_flat = isolates_flat_rows(fast, rows, expected[0])
    inputs = [POSITIONS_ALONE([make_pack(each)]) for each in ([rows] if is_flat else [[row] for row in rows])]
    num_labeled = len(batch.labels)

    def native_step() -> None:
        native.zero_grad()
        (loss_of(native, batch) / num_labeled).backward()

    def reference_step() -> None:
        fast.zero_grad()
        for each in inputs:
            fast(**each, use_cache=False, num_items_in_batch=num_labeled).loss.backward()

    ours, theirs = take_turns([native_step, reference_step], sum(lengths), num_steps)
    worst = {key: max(packed[key], alone[key]) for key in BOUNDS}
    passed = all(worst[key] <= bound for key, bound in BOUNDS.items())
    passed = passed and isolation.passed and not num_export_errors and greedy.passed
    apart = isolation.measured
    if isolation.passed:
        apart = "rounding" if "rounding" in isolation.allowed else "bitwise"
    speed = f"{ours.tokens_per_second / theirs.tokens_per_second:.2f}{'' if is_flat else ' (alone)'}"
    return [
        model_type if passed else f"{model_type} **differs**",
        f"{worst['logits']:.0e}",
        f"{worst['gradients']:.0e}",
        apart,
        export,
        greedy.measured,
        speed,
        f"{ours.peak_bytes / theirs.peak_bytes:.2f}",
        f"{datetime.date.today()}, torch {torch.__version__}, transformers {transformers.__version__}",
    ]


# --- The table ---

INDEX = """# Every family, measured

Each row compares a family with transformers' own class of it in fp32 on a CPU, with random weights: the largest
differences of logits and of gradients (divided by the largest value of the gradient), packed and alone; conversations
that change a bit of another; the tensors of an export that transformers loads with equal bits; and the speed and memory
of forward and backward, divided by those of transformers on a flat row. Where a flat row of transformers does not
isolate conversations, its speed is that of one conversation at a time ("alone"). This measures them again:

```
python tools/family_card.py all
```

"""
HEADER = [
    "model_type",
    "logits",
    "gradients",
    "isolation",
    "export",
    "greedy generation",
    "speed",
    "memory",
    "measured",
]


def as_table(*rows: Sequence[str]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write(model_type: str, row: Sequence[str], index: Path) -> None:
    """Writes the row of the family into the page. The rows of other families are kept."""
    rows = dict[str, str]()
    if index.exists():
        found = re.findall(r"^(\| (\w+)\b.*\n)", index.read_text(encoding="utf-8"), re.MULTILINE)
        rows = {name: line for line, name in found}
    rows[model_type] = as_table(row)
    index.write_text(
        INDEX + as_table(HEADER, ["---"] * len(HEADER)) + "".join(rows[name] for name in FAMILIES if name in rows),
        encoding="utf-8",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="+", metavar="FAMILY", help="values of model_type, or all")
    parser.add_argument("--out", type=Path, default=PAGE, metavar="FILE", help="default: docs/models/index.md")
    parser.add_argument("--quick", action="store_true", help="a tiny shape and one step, to see that everything runs")
    options = parser.parse_args(arguments)
    names = [*FAMILIES] if options.families == ["all"] else options.families
    if unknown := [name for name in names if name not in FAMILIES]:
        parser.error(f"{unknown[0]!r} is no family; choose from {', '.join(FAMILIES)}, or all")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sizes = SIZES | (QUICK_SIZES if options.quick else {})
    measured = {"lengths": QUICK_LENGTHS, "num_steps": 1} if options.quick else {}
    failed = []
    for name in names:
        row = measure(name, sizes, **measured)
        write(name, row, options.out)
        show(", ".join(row))
        failed += [] if row[0] == name else [name]
        gc.collect()
    return 1 if failed else 0


if __name__ == "__main__":
    exit_with(main)
