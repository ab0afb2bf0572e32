"""Which model types of transformers keep the conversations of a pack apart: measured on tiny random models, on the CPU.

    python tools/isolation_table.py
    python tools/isolation_table.py --only llama gpt_oss

Writes the table of docs/isolation.md, with the versions that it was made with, or prints the part that is asked for.
Each model has two layers of 32 units and weights so large that a leak cannot hide; a hybrid has a layer of each kind,
and a window is shorter than a conversation.
"""

import argparse
import datetime
import inspect
import logging
import sys
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from sftcheck.check_isolation import POSITIONS_ALONE
from sftron.checks.isolation import Isolation, try_isolation
from sftron.data.for_transformers import FlattenPacks
from sftron.data.packing import lay_out
from sftron.data.types import ConversationKey, LabeledConversation, Pack
from sftron.errors import show

PAGE = Path(__file__).parents[1] / "docs" / "isolation.md"
BEGIN, END = "<!-- the table: tools/isolation_table.py -->", "<!-- end of the table -->"

LENGTHS, VOCABULARY = (9, 21, 13, 6), 96
"""LENGTHS are the lengths of the conversations in the pack, in tokens. The second one is longer than the window and the
chunks below."""

# The usual names of the sizes; each configuration class receives those that it accepts.
SIZES: dict[str, Any] = (
    {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    | {"intermediate_size": 48, "max_position_embeddings": 128, "sliding_window": 16, "attention_chunk_size": 16}
    | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48, "rotary_dim": 4}
    | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128, "ffn_dim": 48, "word_embed_proj_dim": 32}
    | {"num_layers": 2, "num_heads": 4, "attention_heads": 4, "ffn_hidden_size": 48, "dff": 48}
    # Experts
    | {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "n_group": 1, "topk_group": 1, "moe_k": 2}
    # State-space and linear-attention models
    | {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_ssm": 64, "mamba_n_groups": 1}
    | {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "state_size": 8, "expand": 2}
    | {"mamba_chunk_size": 16, "chunk_size": 16, "conv_kernel": 4, "mamba_expand": 2, "block_size": 16}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    | {"linear_num_heads": 4, "linear_head_dim": 8}
    # Embeddings for each layer
    | {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8}
)

LATENT = {"head_dim": 8, "qk_head_dim": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4}
LINEAR_AND_ATTENTION = {"layer_types": ["linear_attention", "full_attention"]}
WINDOW_AND_ATTENTION = {"layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True, eq=False)
class Case:
    """A model type in one of its variants.

    `settings` overrides SIZES; a value of None removes a size.
    """

    model_type: str
    variant: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"`{self.model_type}`" + (f", {self.variant}" if self.variant else "")


def _cases(*model_types: str, **settings: Any) -> list[Case]:
    return [Case(model_type, settings=settings) for model_type in model_types]


CASES: list[Case] = [
    *_cases("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma"),
    *_cases("gemma2", "gemma3_text", "olmo3", "gpt_oss", "ministral", "cohere2", "exaone4", **WINDOW_AND_ATTENTION),
    *_cases("gemma3n_text", "gemma4_text", num_kv_shared_layers=0, **WINDOW_AND_ATTENTION),
    Case("gemma4_text", "experts", WINDOW_AND_ATTENTION | {"enable_moe_block": True, "top_k_experts": 2}),
    *_cases("phi", "phi3", "phimoe", "olmo", "olmo2", "olmoe", "flex_olmo", "smollm3", "ministral3", "starcoder2"),
    *_cases("granite", "granitemoe", "granitemoeshared", "stablelm", "cohere", "glm", "glm4", "glm4_moe", "helium"),
    *_cases("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu", **LATENT),
    *_cases("gpt2", "gpt_neox", "gptj", "codegen", "gpt_bigcode", "nemotron", "persimmon", "arcee", "apertus"),
    *_cases("seed_oss", "hunyuan_v1_dense", "hunyuan_v1_moe", "ernie4_5", "ernie4_5_moe", "bitnet", "doge"),
    *_cases("dots1", n_shared_experts=1),
    *_cases("diffllama", "nanochat", "minimax_m2", "llama4_text", "vaultgemma", "jetmoe", "hyperclovax", "cwm"),
    *_cases("internlm3", "ctrl", "jais2", "laguna", "mellum", "solar_open", "granite_swa", "mimo_v2_flash", "dbrx"),
    Case("gpt_neo", settings={"attention_types": [[["global", "local"], 1]], "window_size": 16}),
    Case("afmoe", settings={**WINDOW_AND_ATTENTION}),
    # Models that make their masks without position_ids
    Case("falcon", "7B", settings={"head_dim": None}),
    Case("falcon", "new decoder", settings={"head_dim": None, "new_decoder_architecture": True, "num_kv_heads": 2}),
    Case("falcon", "alibi", settings={"head_dim": None, "alibi": True}),
    *_cases("opt", "bloom", "mpt", "biogpt", "xglm", "openai-gpt"),
    # Models whose state continues from one conversation to the next
    *_cases("mamba", "falcon_mamba", "rwkv", "falcon_h1"),
    *_cases("mamba2", num_heads=8),
    *_cases("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "minimax", **LINEAR_AND_ATTENTION),
    Case("kimi_linear", settings=LATENT | LINEAR_AND_ATTENTION),
    *_cases("lfm2", "lfm2_moe", layer_types=["conv", "full_attention"]),
    *_cases("granitemoehybrid", layer_types=["mamba", "attention"]),
    *_cases("bamba", attn_layer_indices=[1]),
    *_cases("jamba", attn_layer_period=2, attn_layer_offset=1),
    *_cases("nemotron_h", layers_block_type=["mamba", "attention"]),
    *_cases("recurrent_gemma", block_types=["recurrent", "attention"]),
    *_cases("zamba2", layers_block_type=["mamba", "hybrid"]),
    *_cases("zamba"),
    *_cases("xlstm", v_head_dim=None),
]


def make_config(case: Case) -> transformers.PreTrainedConfig:
    kind = transformers.CONFIG_MAPPING[case.model_type]
    known = {*inspect.signature(kind.__init__).parameters, *kind.attribute_map, *dir(kind)}
    known.update(name for base in kind.__mro__ for name in getattr(base, "__annotations__", {}))
    settings = {key: value for key, value in SIZES.items() if key in known} | dict(case.settings)
    return kind(**{key: value for key, value in settings.items() if value is not None})


def make_model(case: Case, attention: str) -> torch.nn.Module:
    """Returns a random model with large matrices, equal at each call. Exceptions of transformers propagate."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(case), attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    return model.eval()


def make_pack() -> Pack:
    """Returns a pack of four conversations of random tokens."""
    random = np.random.default_rng(0)
    conversations = []
    for number, length in enumerate(LENGTHS):
        ids = random.integers(3, VOCABULARY, length, dtype=np.int32)
        labels, ones = np.append(ids[1:], np.int32(-100)), np.ones(length, np.float32)
        ones[-1] = 0
        key = ConversationKey(0, number)
        conversations.append(LabeledConversation(ids, labels, ones, np.zeros(length, np.uint8), key))
    return lay_out(conversations, token_budget=sum(LENGTHS), remove_cross_attention=True, pad_id=0)


WAYS = {"positions": (POSITIONS_ALONE, False), "keys": (FlattenPacks(), False), "cache": (FlattenPacks(), True)}
"""The ways to call a model, by name: the collator, which determines the keys of a batch, and whether to use a cache."""


@dataclass
class Row:
    """The measurements of a case with these attention implementations."""

    case: Case
    attentions: list[str]
    found: list[float | str]
    """For each of WAYS, the largest difference of the logits of a conversation when its neighbors change, or the
    model's error."""
    from_alone: float
    """The largest difference between the logits of a conversation in the pack and alone, without a cache."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The result of each way: "refuses", "isolated" (to the rounding) or "leaks"."""
        return tuple("refuses" if isinstance(each, str) else "leaks" if each else "isolated" for each in self.found)

    @property
    def verdict(self) -> str:
        """The result with every key and without a cache, as FlattenPacks and transformers' Trainer call a model."""
        return self.kinds[list(WAYS).index("keys")]


def measure(case: Case) -> list[Row]:
    """Measures a case with each attention implementation that runs on a CPU; those with equal results share a row.

    Exceptions of transformers propagate if the model cannot be built or cannot process a single conversation.
    """
    rows: list[Row] = []
    for attention in ("eager", "sdpa"):
        try:
            model = make_model(case, attention)
        except ValueError:
            if attention == "sdpa" and rows:
                continue  # most likely the model has no sdpa implementation
            raise
        row = _measure_model(case, attention, model)
        if rows and rows[-1].kinds == row.kinds:
            rows[-1].attentions.append(attention)
            pairs = zip(rows[-1].found, row.found, strict=True)
            rows[-1].found = [a if isinstance(a, str) or isinstance(b, str) else max(a, b) for a, b in pairs]
            rows[-1].from_alone = max(rows[-1].from_alone, row.from_alone)
        else:
            rows.append(row)
    return rows


def _measure_model(case: Case, attention: str, model: Any) -> Row:
    pack = make_pack()
    model.config.use_cache = False
    from_alone = _from_alone(model, pack)  # raises if the model cannot run at all, with or without packs
    found: list[float | str] = []
    for collator, model.config.use_cache in WAYS.values():
        result = try_isolation(model, collator([pack]))
        if not isinstance(result, Isolation):
            found.append(_on_one_line(result))
        else:
            found.append(result.difference if result.difference > result.rounding else 0.0)
    return Row(case, [attention], found, from_alone)


def _on_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@torch.no_grad()
def _from_alone(model: Any, pack: Pack) -> float:
    batch = POSITIONS_ALONE([pack])
    packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    alone = [model(input_ids=ids).logits for ids in batch["input_ids"].split(LENGTHS, dim=1)]
    return float((packed - torch.cat(alone, dim=1)).abs().max())


def measure_or_reason(case: Case) -> list[Row] | str:
    """Returns the rows, or the reason why there are none."""
    if case.model_type not in transformers.CONFIG_MAPPING:
        return "this transformers has no such model type"
    try:
        return measure(case)
    except Exception as error:
        return _on_one_line(error)[:200]


# The page

HEADER = ("model type", "attention", "`position_ids` alone", "every key", "with a cache", "from alone", "verdict")
USUAL = ("isolated", "isolated", "leaks")
"""The kinds of the rows that share a list instead of having a line of the table each."""


def as_cells(row: Row) -> list[str]:
    found = ["refuses" if isinstance(each, str) else f"{each:.2g}" for each in row.found]
    verdict = row.verdict if row.verdict == "isolated" else f"**{row.verdict}**"
    return [str(row.case), ", ".join(row.attentions), *found, f"{row.from_alone:.0e}", verdict]


def as_list(rows: list[Row]) -> list[str]:
    """Returns the lines for rows of USUAL kinds: the range of their numbers, and their types by attention."""
    with_cache, by_attention = [float(row.found[2]) for row in rows], defaultdict[str, list[str]](list)
    for row in rows:
        by_attention[", ".join(row.attentions)].append(str(row.case))
    most_alone = max(row.from_alone for row in rows)
    parts = [
        "Isolated with `position_ids` alone and with every key. With a cache, logits change by "
        f"{min(with_cache):.2g} to {max(with_cache):.2g}; from alone, by {most_alone:.0e} at most.",
        "",
    ]
    parts += [f"- {attention}: {'; '.join(names)}" for attention, names in by_attention.items()]
    return [line for part in parts for line in textwrap.wrap(part, 120, subsequent_indent="  " * part.startswith("-"),
                                                             break_on_hyphens=False) or [""]]  # fmt: skip


def as_text(found: Mapping[Case, list[Row] | str]) -> str:
    rows = [row for each in found.values() if not isinstance(each, str) for row in each]
    counts = Counter(row.verdict for row in rows)
    not_built = {str(case): reason for case, reason in found.items() if isinstance(reason, str)}
    versions = f"transformers {transformers.__version__} and torch {torch.__version__}"
    lines = [
        f"Made with {versions} on {datetime.date.today()}, on a CPU in float32: {len(rows)} rows, "
        + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        + f"; {len(not_built)} could not be built.",
        "",
    ]
    if usual := [row for row in rows if row.kinds == USUAL]:
        lines += [*as_list(usual), ""]
    others = [as_cells(row) for row in rows if row.kinds != USUAL]
    lines += [f"| {' | '.join(cells)} |" for cells in (HEADER, ["---"] * len(HEADER), *others)]
    refusals: dict[str, list[str]] = {}
    for row in rows:
        if row.verdict == "refuses":
            refusals.setdefault(str(row.found[1]), []).append(str(row.case))
    if refusals:
        lines += ["", "The errors where transformers refuses every key:", ""]
        lines += [f"- {', '.join(cases)}: {message}" for message, cases in refusals.items()]
    if not_built:
        lines += ["", "Not built:", "", *(f"- {case}: {reason}" for case, reason in not_built.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="print the rows of these model types, write nothing")
    options = parser.parse_args()
    transformers.logging.set_verbosity(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # matrices of 32 units are slower with two threads
    cases = [case for case in CASES if not options.only or case.model_type in options.only]
    found: dict[Case, list[Row] | str] = {}
    for number, case in enumerate(cases, 1):
        show(f"{number} of {len(cases)}: {case}", to=sys.stderr)
        found[case] = measure_or_reason(case)
    text = as_text(found)
    if options.only:
        show(text)
    else:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
        show(f"{PAGE} has a new table: {text.partition(chr(10))[0]}")


if __name__ == "__main__":
    main()
