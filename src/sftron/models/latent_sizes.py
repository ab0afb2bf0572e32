"""The sizes of latent attention (MLA, arXiv 2405.04434) in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """The sizes of a layer with latent attention, under Hugging Face's names."""

    q_lora_rank: int | None
    """The size of the latent of a token's queries; None means that they are projected from the hidden state."""
    kv_lora_rank: int
    """The size of the latent of a token's keys and values."""
    qk_nope_head_dim: int
    """The number of dimensions of a query or key that are not rotated."""
    qk_rope_head_dim: int
    """The number of those that are rotated; of keys, all heads have the same ones."""
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def head_dim(self) -> int:
        """The size to which queries, keys and values are padded, because attention takes heads of one size."""
        return max(self.qk_head_dim, self.v_head_dim)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> LatentSizes:
        return cls(**{key: values[key] for key in LATENT_KEYS})


LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def complete_latent_sizes(values: dict[str, Any], largest: int) -> list[str]:
    """Returns the problems of the sizes. Sets head_dim in `values`, if the sizes are valid."""
    problems = [
        f"{key}: {values[key]!r} is not a whole number from 1 to {largest}"
        for key in LATENT_KEYS
        if (type(values[key]) is not int or not 0 < values[key] <= largest)
        and not (key == "q_lora_rank" and values[key] is None)
    ]
    if problems:
        return problems
    sizes, num_heads = LatentSizes.of(values), values["num_attention_heads"]
    if sizes.qk_rope_head_dim % 2:
        problems.append(f"qk_rope_head_dim: {sizes.qk_rope_head_dim} is not even; halves of it are rotated")
    if values["num_key_value_heads"] != num_heads:
        problems.append(f"num_key_value_heads: {values['num_key_value_heads']}; sftron supports only {num_heads}")
    if values.get("head_dim") not in (None, sizes.qk_rope_head_dim):
        problems.append(
            f"head_dim: {values['head_dim']!r}; sftron supports only qk_rope_head_dim: {sizes.qk_rope_head_dim}"
        )
    if values.get("qk_head_dim") not in (None, sizes.qk_head_dim):
        # The first releases of transformers 5 take it, and later ones the sum.
        problems.append(
            f"qk_head_dim: {values['qk_head_dim']!r}; sftron supports only qk_nope_head_dim + qk_rope_head_dim: "
            f"{sizes.qk_head_dim}"
        )
    if sizes.q_lora_rank is None and values["attention_bias"]:
        problems.append("attention_bias: True, which is not implemented if q_lora_rank is null")
    values["head_dim"] = sizes.head_dim
    return problems
