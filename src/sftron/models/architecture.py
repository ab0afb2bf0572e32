"""The model architecture described by a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import groupby
from typing import Any

from sftron.kernels.table import RopeSpec
from sftron.models.config_keys import (
    DEFAULTS,
    DROPOUTS,
    IRRELEVANT,
    NULL_IS_A_VALUE,
    OLD_FULL,
    SIZES,
    complete_sizes,
    unimplemented,
    unknown_keys,
    windows_of_layers,
    wrong_types,
    wrong_windows,
)
from sftron.models.delta import DeltaSizes
from sftron.models.families.family import MODEL, Family
from sftron.models.families.table import FAMILIES, family_of
from sftron.models.mixtures import ADDED_LATER, Mixture, read_mixture
from sftron.models.rope_config import FULL, SLIDING, read_ropes
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
    mixing: object | None = field(default=None, metadata=ADDED_LATER)
    """A dataclass of the sizes that only one kind of layer has, such as latent attention; its file reads them."""

    def of_layer(self, layer: Layer) -> LlamaConfig:
        """Returns the parameters with the sizes of one layer."""
        sizes = ("head_dim", "num_key_value_heads", "intermediate_size")
        own = {size: value for size in sizes if (value := getattr(layer, size)) is not None}
        return replace(self, **own) if own else self

    @property
    def head_has(self) -> str | None:
        """What the head computes besides a product."""
        if self.head_bias:
            return "a bias"
        return None if self.logit_softcap is None else f"a soft cap of {self.logit_softcap:g}"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Reads a config.json written by transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).

        An absent key has the same default as in transformers' config class for that model_type, and a null means what
        it does there.

        Raises:
            ValueError: At least one key is missing, unknown, or has an unsupported value. The message lists all of
                them, with the value found and the value expected.
        """
        whole, (config, others) = config, text_config(config)
        family = family_of(config)
        given = {key: value for key, value in config.items() if value is not None}
        defaults = DEFAULTS | dict(family.defaults)
        nulls: dict[str, Any] = {key: None for key in NULL_IS_A_VALUE if key in config}
        # To transformers, null is false, also where true is the default.
        nulls |= {key: False for key, default in defaults.items() if default is True and key in config}
        values: dict[str, Any] = dict.fromkeys(SIZES) | defaults | nulls | given
        if isinstance(types := values.get("layer_types"), list):
            values["layer_types"] = [FULL if each == OLD_FULL else each for each in types]
        problems = unimplemented(given, {*SIZES, *family.rope.read, *defaults}, family)
        problems += unknown_keys(others, IRRELEVANT, others.get("model_type"))
        problems += wrong_types(values, defaults)
        wrong_sizes = complete_sizes(values, family) or wrong_windows(values, family)
        if not wrong_sizes and family.problems is not None:
            wrong_sizes = family.problems(values)
        stated = [] if wrong_sizes else _stated_layers(values, family)
        head_dims = dict.fromkeys((FULL, SLIDING), values.get(family.rope.size))
        head_dims |= {each.rope_type: each.own["head_dim"] for each in stated if "head_dim" in each.own}
        ropes, rope_of_layer, wrong_ropes = read_ropes(
            given,
            replace(family.rope, interleaved=values.get("rope_interleave", family.rope.interleaved)),
            head_dims=head_dims,
            max_positions=values["max_position_embeddings"],
            layer_types=[each.rope_type for each in stated],
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
                "sftron does not support the model that config.json describes:\n  "
                + "\n  ".join(problems)
                + "\nChoose another checkpoint; remove a key only if the model does not need it."
            )
        values["tie_word_embeddings"] = wrapper_ties(whole, values["tie_word_embeddings"])
        usual = _resolve(family.layer, values)
        return cls(
            model_type=str(config["model_type"]),
            **{key: values[key] for key in ("num_key_value_heads", "head_dim", "max_position_embeddings")},
            **{key: values[key] for key in (*SIZES, *DEFAULTS)} | of_model,
            ropes=ropes,
            layers=tuple(
                each.layer(usual, rope=rope, is_dense=mixture is not None and not has_experts)
                for each, rope, has_experts in zip(stated, rope_of_layer, is_sparse, strict=True)
            ),
            mixture=mixture,
        )


@dataclass(frozen=True, slots=True)
class _StatedLayer:
    """What config.json states of one layer, besides its rope and its experts."""

    window: int | None
    is_rotated: bool
    own: Mapping[str, Any]
    """The fields of Layer that it has by its number or by its entry in layer_types."""

    @property
    def rope_type(self) -> str:
        return FULL if self.window is None else SLIDING

    def layer(self, usual: Mapping[str, Any], *, rope: int, is_dense: bool) -> Layer:
        """Returns the layer, given the fields of every layer, and whether it has no experts in a model with some."""
        stated: dict[str, Any] = {**usual, **({"mlp": "gated"} if is_dense else {}), **self.own}
        return Layer(**stated, window=self.window, rope=rope if self.is_rotated else None)


def _stated_layers(values: Mapping[str, Any], family: Family) -> list[_StatedLayer]:
    number = values["num_hidden_layers"]
    types = values.get("layer_types") or [FULL] * number
    rotates = [True] * number if family.rotates is None else family.rotates(values)
    each_layer = [{}] * number if family.each_layer is None else family.each_layer(values)
    return [
        _StatedLayer(window, rotated and name not in family.layer_of, {**own, **family.layer_of.get(name, {})})
        for name, window, rotated, own in zip(
            types, windows_of_layers(values, family), rotates, each_layer, strict=True
        )
    ]


def _resolve(fields: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Calls the functions among the values of `fields`."""
    return {name: value(values) if callable(value) else value for name, value in fields.items()}


OF_THE_MODEL = "the model's "
"""Begins every entry of a checkpoint's fingerprint that describes the model: its architecture, adapters or base."""


def architecture_facts(config: LlamaConfig) -> dict[str, str]:
    """Returns the entries of a checkpoint's fingerprint for the architecture, which must match to load the weights."""
    layers = ", ".join(f"{len(list(run))} x {layer}" for layer, run in groupby(config.layers))
    mixture = None if config.mixture is None else _facts(config.mixture)
    ropes = ", ".join(str(rope) for rope in config.ropes)
    facts = _facts(config) | {"layers": layers, "ropes": ropes, "mixture": mixture}
    return {f"{OF_THE_MODEL}{name}": str(value) for name, value in facts.items()}


def _facts(described: LlamaConfig | Layer | Mixture) -> dict[str, Any]:
    """Returns the fields as plain values, without those of ADDED_LATER that have their default."""
    later = {each.name: each.default for each in fields(described) if each.metadata == ADDED_LATER}
    return {name: value for name, value in asdict(described).items() if name not in later or value != later[name]}


def is_of_the_model(name: str) -> bool:
    """Returns whether an entry of a fingerprint describes the model: its architecture, adapters or base weights."""
    return name.startswith(OF_THE_MODEL)
