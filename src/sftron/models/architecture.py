"""The model architecture described by a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from itertools import groupby
from typing import Any

from sftron.kernels.activation import ACTIVATIONS
from sftron.kernels.table import RopeSpec
from sftron.models.delta import DeltaSizes
from sftron.models.families.family import MODEL, Family
from sftron.models.families.table import FAMILIES, family_of
from sftron.models.latent_sizes import LatentSizes, complete_latent_sizes
from sftron.models.mixtures import ADDED_LATER, Mixture, read_mixture
from sftron.models.mxfp4 import quant_method
from sftron.models.rope_config import FULL, SLIDING, is_finite, read_ropes
from sftron.models.wrappers import text_config, wrapper_ties, wrong_head

__all__ = ["DROPOUTS", "FAMILIES", "Layer", "LlamaConfig", "architecture_facts", "family_of", "is_of_the_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The structure of one block. Three fields are keys of tables of classes, which llama.py names."""

    block: str = "norm_before"
    """The key of BLOCKS; it determines the positions of norms and residual connections."""
    attention: str = "rotary"
    """The key of ATTENTIONS; it determines whether heads are normalized or clipped before they are rotated. In a block
    with a state it is the key of DELTA_NETS."""
    mlp: str = "gated"
    """The key of MLPS."""
    window: int | None = None
    """The number of tokens that a token attends to, itself included; None means all tokens up to it."""
    scale: float | None = None
    """The factor of the attention scores; None means 1 / sqrt(head_dim)."""
    softcap: float | None = None
    """The bound of the attention scores, softcap * tanh(score / softcap); None means that they have none."""
    sinks: bool = False
    """Whether each head has a trained logit that takes part in the softmax but has no value."""
    rope: int | None = 0
    """The index in `LlamaConfig.ropes`; None means that heads are not rotated (NoPE)."""
    head_dim: int | None = field(default=None, metadata=ADDED_LATER)
    """This size and the next two replace those of LlamaConfig in this layer, unless they are None."""
    num_key_value_heads: int | None = field(default=None, metadata=ADDED_LATER)
    intermediate_size: int | None = field(default=None, metadata=ADDED_LATER)
    values_are_keys: bool = field(default=False, metadata=ADDED_LATER)
    """Whether there is no v_proj, and values are the keys before their norm and rotation."""
    shares_keys: bool = field(default=False, metadata=ADDED_LATER)
    """Whether the layer reads the keys and values of the last layer before it that has its own and the same window."""

    def __str__(self) -> str:
        return f"Layer({', '.join(f'{name}={value!r}' for name, value in _facts(self).items())})"


_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OWN_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "full_attention_interval", "sliding_window_pattern", "no_rope_layer_interval"),
)
"""Sizes that some families have."""
_LARGEST = {"num_hidden_layers": 2**12, "max_position_embeddings": 2**24}
_LARGEST_SIZE = 2**27
"""The bound of all other sizes: above any model's, but low enough to compute the memory before it is allocated."""

_DEFAULTS: dict[str, Any] = {"tie_word_embeddings": False, "initializer_range": 0.02}
"""The defaults of the keys that every family reads."""

_NULLABLE_NUMBERS = ("clip_qkv", "final_logit_softcapping", "attn_logit_softcapping", "attention_multiplier")
_NULL_IS_A_VALUE = ("num_key_value_heads", "head_dim", "sliding_window", "q_lora_rank", *_NULLABLE_NUMBERS)
"""Keys for which null has a meaning of its own: as many as query heads, hidden_size / heads, and no window, latent or
bound."""
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation")
_MAY_BE_ZERO = ("router_aux_loss_coef", "initializer_range", "rms_norm_eps", "layer_norm_eps", "norm_epsilon")

_OLD_FULL = "attention"
"""The name of FULL in hybrids of transformers 4."""

_FIXED: dict[str, Any] = {
    "rope_interleaved": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "is_decoder": False,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
}
"""Keys for which only one value is implemented."""

DROPOUTS = (
    *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout"),
    *("attention_dropout_prob", "hidden_dropout_prob"),
)
"""Keys of probabilities of dropout."""

_IRRELEVANT = frozenset(
    {
        *("model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type"),
        *("output_attentions", "output_hidden_states", "return_dict"),
        # Splits matrix products and adds the partial results, which only changes the order of summation.
        "pretraining_tp",
        # Training options. This project trains without dropout, and the trainer reports the keys.
        *DROPOUTS,
    }
)
"""Keys that transformers' config classes declare, but that do not affect the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The parameters of the forward pass, under Hugging Face's names where those exist."""

    model_type: str
    """The key of FAMILIES; after this file is read, it determines the names of the weights alone."""
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    norm: str
    """The key of NORMS in layers.py."""
    norm_eps: float
    activation: str
    """The key of ACTIVATIONS in kernels/activation.py, or the activation of an MLP that has no other."""
    max_position_embeddings: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    head_bias: bool
    output_gate: bool
    """Whether q_proj also gives a gate of the attention output, after the query of each head."""
    delta: DeltaSizes | None
    """The sizes of the delta layers, if there are any."""
    clip_qkv: float | None
    """The bound of the absolute values of queries, keys and values (OLMo 1)."""
    embedding_multiplier: float
    residual_multiplier: float
    """The factor of what attention and MLP add to the residual stream."""
    logit_scale: float
    logit_softcap: float | None
    """The bound of the logits, softcap * tanh(logit / softcap)."""
    tie_word_embeddings: bool
    initializer_range: float
    ropes: tuple[RopeSpec, ...]
    """The distinct rotary embeddings of the layers."""
    layers: tuple[Layer, ...]
    """One entry per block."""
    mixture: Mixture | None = None
    """The experts of the layers whose `mlp` has some."""
    per_layer_input_size: int | None = field(default=None, metadata=ADDED_LATER)
    """The size of what each layer reads of a token besides the residual stream, 0 if that is nothing; see gemma4.py.
    None in families of other blocks."""

    def of_layer(self, layer: Layer) -> LlamaConfig:
        """Returns the parameters with the sizes of one layer."""
        sizes = ("head_dim", "num_key_value_heads", "intermediate_size")
        own = {size: value for size in sizes if (value := getattr(layer, size)) is not None}
        return replace(self, **own) if own else self

    @property
    def largest_head_dim(self) -> int:
        return max(self.head_dim, *(layer.head_dim or 0 for layer in self.layers))

    latent: LatentSizes | None = field(default=None, metadata=ADDED_LATER)
    """The sizes of latent attention, if the layers have it; `head_dim` is that of padded heads then."""

    @property
    def head_has(self) -> str | None:
        """What the head computes besides a product."""
        if self.head_bias:
            return "a bias"
        return None if self.logit_softcap is None else f"a soft cap of {self.logit_softcap:g}"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Reads a config.json written by transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).

        An absent or null key has the same default as in transformers' config class for that model_type.

        Raises:
            ValueError: At least one key is missing, unknown, or has an unsupported value. The message lists all of
                them, with the value found and the value expected.
        """
        whole, (config, others) = config, text_config(config)
        family = family_of(config)
        given = {key: value for key, value in config.items() if value is not None}
        defaults = _DEFAULTS | dict(family.defaults)
        nulls = {key: None for key in _NULL_IS_A_VALUE if key in config}
        values: dict[str, Any] = dict.fromkeys(_SIZES) | defaults | nulls | given
        if isinstance(types := values.get("layer_types"), list):
            values["layer_types"] = [FULL if each == _OLD_FULL else each for each in types]
        problems = _unimplemented(given, {*_SIZES, *family.rope.read, *defaults}, family)
        problems += _unknown(others, _IRRELEVANT, others.get("model_type"))
        problems += _wrong_types(values, defaults)
        wrong_sizes = _complete_sizes(values, family) or _wrong_windows(values, family)
        if not wrong_sizes and family.problems is not None:
            wrong_sizes = family.problems(values)
        windows = [] if wrong_sizes else _windows(values, family)
        each_layer = [] if wrong_sizes or family.each_layer is None else family.each_layer(values)
        types = [FULL if window is None else SLIDING for window in windows]
        head_dims = dict.fromkeys((FULL, SLIDING), values.get(family.rope.size))
        head_dims |= {name: own["head_dim"] for name, own in zip(types, each_layer, strict=False) if "head_dim" in own}
        ropes, rope_of_layer, wrong_ropes = read_ropes(
            given,
            replace(family.rope, interleaved=values.get("rope_interleave", family.rope.interleaved)),
            head_dims=head_dims,
            max_positions=values["max_position_embeddings"],
            layer_types=types,
        )
        mixture, is_sparse, wrong_experts = (
            (None, [], [])
            if wrong_sizes
            else read_mixture(values, given, family.router, may_be_empty=family.may_lack_experts)
        )
        problems += wrong_ropes + wrong_sizes + wrong_experts
        of_model = {} if problems else _resolve(MODEL | dict(family.model), values)
        if problems := problems or wrong_head(whole, of_model):
            raise ValueError(
                "config.json describes a model that is not implemented:\n  "
                + "\n  ".join(problems)
                + "\nChoose another checkpoint; remove a key only if the model does not need it."
            )
        values["tie_word_embeddings"] = wrapper_ties(whole, values["tie_word_embeddings"])
        is_dense = [mixture is not None and not each for each in is_sparse]
        return cls(
            model_type=str(config["model_type"]),
            **{key: values[key] for key in ("num_key_value_heads", "head_dim", "max_position_embeddings")},
            **{key: values[key] for key in (*_SIZES, *_DEFAULTS)} | of_model,
            ropes=ropes,
            layers=_layers(values, family, windows, rope_of_layer, each_layer, is_dense=is_dense),
            mixture=mixture,
        )


def _layers(
    values: Mapping[str, Any],
    family: Family,
    windows: Sequence[int | None],
    ropes: Sequence[int],
    each_layer: Sequence[Mapping[str, Any]],
    *,
    is_dense: Sequence[bool],
) -> tuple[Layer, ...]:
    """Returns the layers, given the window and the rope of each, fields of its own, and whether it has no experts in a
    model with some."""
    usual: dict[str, Any] = _resolve(family.layer, values)
    types = values.get("layer_types") or [FULL] * len(windows)
    rotates = [True] * len(windows) if family.rotates is None else family.rotates(values)
    layers = []
    each_layer = each_layer or [{}] * len(windows)
    of_layers = zip(types, windows, ropes, rotates, is_dense, each_layer, strict=True)
    for layer_type, window, rope, rotated, dense, own in of_layers:
        of_layer: dict[str, Any] = usual | ({"mlp": "gated"} if dense else {}) | dict(own)
        of_layer |= family.layer_of.get(layer_type, {})
        has_rope = rotated and layer_type not in family.layer_of
        layers.append(Layer(**of_layer, window=window, rope=rope if has_rope else None))
    return tuple(layers)


def _resolve(fields: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Calls the functions among the values of `fields`."""
    return {name: value(values) if callable(value) else value for name, value in fields.items()}


_FACT = "the model's "


def architecture_facts(config: LlamaConfig) -> dict[str, str]:
    """Returns the entries of a checkpoint's fingerprint for the architecture, which must match to load the weights."""
    layers = ", ".join(f"{len(list(run))} x {layer}" for layer, run in groupby(config.layers))
    mixture = None if config.mixture is None else _facts(config.mixture)
    ropes = ", ".join(str(rope) for rope in config.ropes)
    facts = _facts(config) | {"layers": layers, "ropes": ropes, "mixture": mixture}
    return {f"{_FACT}{name}": str(value) for name, value in facts.items()}


def _facts(described: LlamaConfig | Layer | Mixture) -> dict[str, Any]:
    """Returns the fields as plain values, without those of ADDED_LATER that have their default."""
    later = {each.name: each.default for each in fields(described) if each.metadata == ADDED_LATER}
    return {name: value for name, value in asdict(described).items() if name not in later or value != later[name]}


def is_of_the_model(name: str) -> bool:
    """Returns whether an entry of a fingerprint describes the model: its architecture, adapters or base weights."""
    return name.startswith(_FACT)


def _unimplemented(given: Mapping[str, Any], read: set[str], family: Family) -> list[str]:
    fixed, found = _FIXED | dict(family.fixed), dict(given)
    if family.quant_method is not None and "quantization_config" in given:
        fixed["quantization_config.quant_method"] = family.quant_method
        found["quantization_config.quant_method"] = quant_method(given)
        del found["quantization_config"]
    known = read | {"head_dim"} | fixed.keys() | _IRRELEVANT | family.irrelevant
    return _unknown(found, known, given.get("model_type")) + [
        f"{key}: {found[key]!r}, implemented is {value!r}"
        for key, value in fixed.items()
        if key in found and found[key] != value
    ]


_OF_SOME_FAMILY = {key for family in FAMILIES.values() for key in (*family.defaults, *family.fixed, *family.rope.read)}
# Only Granite 4's class asks for position_embedding_type; published configurations of other families name their rope in
# it. Some wrappers repeat sizes, which every text model states itself.
_OF_SOME_FAMILY -= {"position_embedding_type", *_SIZES}


def _unknown(given: Mapping[str, Any], known: Set[str], model_type: Any) -> list[str]:
    """Returns a problem for each key that is not known and could change the model.

    A key that transformers' config class does not declare, or that has its default, cannot change transformers' model.
    But a few models ask for keys that only other classes declare, so no such key is ignored.
    """
    problems = []
    for key, value in given.items():
        if key in known:
            continue
        never_ignored = key in ("auto_map", "quantization_config") or key in _OF_SOME_FAMILY
        if never_ignored or getattr(_default_config(model_type), key, value) != value:
            problems.append(f"{key}: {value!r}, but no such key is implemented")
    return problems


@cache
def _default_config(model_type: Any) -> Any:
    """Returns transformers' config with all defaults; None if the installed transformers, if any, has no such class.

    The table knows all keys that a class declared when it was added, so this finds those of later transformers.
    """
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return CONFIG_MAPPING[model_type]()
    except (ImportError, KeyError):
        return None


def _wrong_types(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Returns a problem for each key of another type, except for the integers, which `_complete_sizes` checks."""
    problems = []
    for key, default in defaults.items():
        if type(default) is bool and type(values[key]) is not bool:
            problems.append(f"{key}: {values[key]!r} is neither true nor false")
        if key in _MAY_BE_ZERO and not (is_finite(values[key]) and values[key] >= 0):
            problems.append(f"{key}: {values[key]!r} is not a finite number of at least 0")
        is_number = type(default) is float or key in ("query_pre_attn_scalar", *_NULLABLE_NUMBERS)
        is_number = is_number and not (key in _NULLABLE_NUMBERS and values[key] is None)
        if key not in _MAY_BE_ZERO and is_number and not (is_finite(values[key]) and values[key] > 0):
            problems.append(f"{key}: {values[key]!r} is not a finite number above 0")
        if key in _ACTIVATION_KEYS and values[key] not in [*ACTIVATIONS]:
            problems.append(f"{key}: {values[key]!r}, implemented are {', '.join(ACTIVATIONS)}")
    return problems


def _complete_sizes(values: dict[str, Any], family: Family) -> list[str]:
    """Returns the problems of the sizes. Adds sizes that follow from others to `values`, if those others are valid."""
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    # Beside layer_types, a pattern has no effect; EXAONE 4 states one in letters.
    without = {"sliding_window_pattern"} if values.get("layer_types") is not None else set()
    own = [key for key in _OWN_SIZES if key in values and key not in without]
    largest = dict.fromkeys((*_SIZES, *own, "num_key_value_heads", "max_position_embeddings"), _LARGEST_SIZE) | _LARGEST
    problems = [
        f"{key}: {values[key]!r} is not a whole number from 1 to {bound}"
        for key, bound in largest.items()
        if type(values[key]) is not int or not 0 < values[key] <= bound
    ]
    if problems:
        return problems
    if "kv_lora_rank" in family.defaults:
        return complete_latent_sizes(values, _LARGEST_SIZE)
    num_heads, num_kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    derived, head_dim = values["hidden_size"] // num_heads, values.get("head_dim")
    if head_dim is None and family.defaults.get("head_dim") is None:
        head_dim = values["head_dim"] = derived
    if "head_dim" not in family.defaults and head_dim != derived:
        problems.append(f"head_dim: {head_dim!r}, implemented is hidden_size / num_attention_heads: {derived}")
    if num_heads % num_kv_heads:
        problems.append(f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads: {num_heads}")
    delta_heads, delta_kv_heads = values.get("linear_num_value_heads", 1), values.get("linear_num_key_heads", 1)
    if delta_heads % delta_kv_heads:
        problems.append(f"linear_num_key_heads: {delta_kv_heads} does not divide linear_num_value_heads: {delta_heads}")
    if type(head_dim) is not int or not 0 < head_dim <= _LARGEST_SIZE or head_dim % 2:
        problems.append(f"head_dim: {head_dim!r} is not a positive even number; halves of a head are rotated")
    if family.types is not None and values["layer_types"] is None:
        values["layer_types"] = family.types(values)
    return problems


def _wrong_windows(values: Mapping[str, Any], family: Family) -> list[str]:
    layer_types, num_layers = values.get("layer_types"), values["num_hidden_layers"]
    window = values.get("sliding_window")
    # transformers writes 0 where Qwen 2 MoE has no window.
    window, problems = None if window == 0 and not values.get("use_sliding_window", True) else window, []
    if window is not None and (type(window) is not int or window <= 0):
        problems.append(f"sliding_window: {window!r} is not a positive whole number")
    rotated = values.get("no_rope_layers")
    if rotated is not None and (
        not isinstance(rotated, list)
        or len(rotated) != num_layers
        or any(type(each) is not int or each not in (0, 1) for each in rotated)
    ):
        return [*problems, f"no_rope_layers: {rotated!r} has not 0 or 1 for each of num_hidden_layers: {num_layers}"]
    if type(first := values.get("max_window_layers", 0)) is not int:
        return [*problems, f"max_window_layers: {first!r} is not a whole number"]
    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            problem = f"layer_types: {layer_types!r} has not one entry for each of num_hidden_layers: {num_layers}"
            return [*problems, problem]
        known = (FULL, SLIDING, *family.layer_of)
        if other := [name for name in layer_types if name not in known]:
            return [*problems, f"layer_types: {other[0]!r}, implemented are {', '.join(known)}"]
    if any(_sliding(values, family)) and not any(_windows(values, family)):
        use = values.get("use_sliding_window", True)
        problems.append(f"layer_types: 'sliding_attention', but sliding_window: {window}, use_sliding_window: {use}")
    return problems


def _sliding(values: Mapping[str, Any], family: Family) -> list[bool]:
    """Returns whether each layer has the window."""
    if values.get("layer_types") is not None:
        return [name == SLIDING for name in values["layer_types"]]
    if family.slides is not None:
        return family.slides(values)
    return [values.get("sliding_window") is not None] * values["num_hidden_layers"]


def _windows(values: Mapping[str, Any], family: Family) -> list[int | None]:
    """Returns the window of each layer."""
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    return [window if slides else None for slides in _sliding(values, family)]
