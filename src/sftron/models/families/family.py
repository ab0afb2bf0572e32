"""How a model family differs from Llama: the fields of a row, and what several rows share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sftron.models.rope_config import RopeKeys

Values = Mapping[str, Any]
"""The keys of a config.json that its family reads, with the defaults of absent ones."""
Pattern = Callable[[Values], list[bool]]
"""Returns one value per layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The ways in which one model_type differs from the others: its keys of config.json, its blocks and its names.

    In `model` and `layer`, a value that is a function is called with the `Values` of the config.json.
    """

    architecture: str
    """The model's class in transformers; loaders select their own class by this name."""
    defaults: Mapping[str, Any]
    """The keys that this family reads in addition to the common ones, each with its default."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """The keys that this family does not read; if one is present, its value must be this one."""
    irrelevant: frozenset[str] = frozenset()
    """Keys of other families, or declared by transformers' class, that have no effect in this one."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """The fields of LlamaConfig that differ from `MODEL`."""
    layer: Mapping[str, Any] = field(default_factory=dict)
    """The fields of every Layer that differ from their defaults, except for its window and its rope."""
    slides: Pattern | None = None
    """Whether each layer has the window, if `layer_types` is absent; None means that all do, if there is a window."""
    rope: RopeKeys = field(default_factory=RopeKeys)
    """The keys of the rotary embeddings."""
    rotates: Pattern | None = None
    """Whether the heads of each layer are rotated; None means that all are."""
    types: Callable[[Values], list[str]] | None = None
    """Returns the `layer_types` of a config.json without them."""
    each_layer: Callable[[Values], list[dict[str, Any]]] | None = None
    """Returns the fields of each Layer that differ from `layer`, in families whose layers differ by their number."""
    problems: Callable[[Values], list[str]] | None = None
    """Returns what is wrong with the values of the family's own keys, with each other or alone."""
    vocab_keys: tuple[str, ...] = ()
    """The keys of config.json for numbers of tokens besides `vocab_size`."""
    is_whole: bool = False
    """Whether the first layers alone are no model, so that checks compute all of them."""
    layer_of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further values of `layer_types`, each with the fields of its Layers that differ from `layer`."""
    router: str = "softmax"
    """The key of ROUTERS in routing.py, if the family has experts."""
    may_lack_experts: bool = False
    """Whether the number of experts of a mixture may be 0; then no layer has any."""
    quant_method: str | None = None
    """The quantization_config.quant_method of checkpoints whose weights can be read, besides those without one."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """The ends of the names of stored tensors that are constants of the computation, each with its value."""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For parts of native names, the parts of Hugging Face's names that replace them; see fusion.py."""


def key(name: str, *, or_else: Any = None) -> Callable[[Values], Any]:
    """Returns a function that returns the value of a key, or `or_else` if the family does not read the key."""
    return lambda values: values.get(name, or_else)


MODEL: dict[str, Any] = {
    "norm": "rms",
    "norm_eps": key("rms_norm_eps"),
    "activation": key("hidden_act"),
    "qkv_bias": key("attention_bias", or_else=False),
    "o_bias": key("attention_bias", or_else=False),
    "mlp_bias": key("mlp_bias", or_else=False),
    "head_bias": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logit_scale": 1.0,
    "logit_softcap": None,
    "clip_qkv": None,
    "output_gate": False,
    "delta": None,
    "per_layer_input_size": None,
    "mixing": None,
}
"""The fields of LlamaConfig that a family may change, as in Llama."""

LARGEST_SIZE = 2**27
"""The bound of all sizes: above any model's, but low enough to compute the memory before it is allocated."""

COMMON: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}
MIXTURE: dict[str, Any] = {
    "num_experts": None,
    "num_local_experts": None,
    "num_experts_per_tok": None,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
"""The keys of all mixtures. The number of experts has two names, of which transformers 4 and 5 write either."""
CORRECTED_MIXTURE: dict[str, Any] = {
    "n_routed_experts": None,
    "num_local_experts": None,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": None,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
"""The keys of mixtures with `CorrectedRouter`. transformers takes either name of the number of experts."""
CORRECTED_FIXED: dict[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
"""Keys of the published code of these models, which transformers' classes do not read."""
CORRECTED_IRRELEVANT = frozenset({"output_router_logits", "num_nextn_predict_layers", "num_mtp_layers"})
"""The last two are the number of layers that predict further tokens, which are carried; see wrappers.py."""
BIASES = {"attention_bias": False, "mlp_bias": False}
QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in COMMON.items() if key not in keys}


def beyond_max_window_layers(values: Values) -> list[bool]:
    has_window = values.get("use_sliding_window", True) and values["sliding_window"] is not None
    return [has_window and number >= values["max_window_layers"] for number in range(values["num_hidden_layers"])]


def not_every(number: int) -> Pattern:
    """Returns the pattern that is False for every layer of that number, counted from 1."""
    return lambda values: [bool((index + 1) % number) for index in range(values["num_hidden_layers"])]
