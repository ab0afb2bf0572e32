"""Greedy decoding with a key-value cache, through the blocks that training uses.

shape suffixes: T new tokens, S cached and new tokens, N query heads, K key-value heads, D head size, V vocab_size
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sftron.models.attention import attend_causally
from sftron.models.llama import LlamaForSFT


@dataclass(frozen=True, slots=True)
class Generation:
    """What was generated; both have one entry a step.

    token_ids: the new tokens, the stop token included if one was reached.
    margins: logit of the chosen token less that of the runner-up. Near 0, rounding alone decides.
    """

    token_ids: tuple[int, ...]
    margins: tuple[float, ...]


class _CachedAttention:
    """One layer's attention with the keys and values of all tokens so far."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_cached = 0
        self.keys = self.values = torch.empty(0)

    def __call__(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if self.num_cached == 0:
            self.keys, self.values = (x.new_empty(self.capacity, *x.shape[1:]) for x in (k_TKD, v_TKD))
        start, self.num_cached = self.num_cached, self.num_cached + len(k_TKD)
        self.keys[start : self.num_cached] = k_TKD
        self.values[start : self.num_cached] = v_TKD
        return attend_causally(q_TND, self.keys[: self.num_cached], self.values[: self.num_cached])


@torch.no_grad()  # not inference_mode: sharded weights, made whole here, have to serve training afterwards
def greedy_generate(
    model: LlamaForSFT,
    prompt_ids: list[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
    dtype: torch.dtype | None = None,
) -> Generation:
    """Continues `prompt_ids` by the most likely token each, until one of `stop_ids` or `max_new_tokens`.

    dtype: to compute in, by default the model's compute_dtype. One token at a time, the type of the parameters is
        faster than another one, in which each weight is read, converted and written for a single row.

    Raises: ValueError if the prompt is empty, or prompt and new tokens exceed the model's positions.
    """
    if not prompt_ids:
        raise ValueError("The prompt holds no token, so there is nothing to continue.")
    capacity = len(prompt_ids) + max_new_tokens
    model.check_positions(capacity)
    caches = [_CachedAttention(capacity) for _ in range(model.config.num_hidden_layers)]
    device = model.head_weight.device
    dtype = dtype or model.compute_dtype
    head_VH = model.head_weight.to(dtype)
    token_ids: list[int] = []
    margins: list[float] = []
    new_ids = prompt_ids
    while len(token_ids) < max_new_tokens and not (token_ids and token_ids[-1] in stop_ids):
        start = caches[0].num_cached
        position_ids = torch.arange(start, start + len(new_ids), device=device)
        hidden_TH = model.attend_with(caches, torch.tensor(new_ids, device=device), position_ids, dtype)
        logits_V = F.linear(hidden_TH[-1], head_VH).float()
        (best, second), (token_id, _) = (x.tolist() for x in logits_V.topk(2))
        token_ids.append(token_id)
        margins.append(best - second)
        new_ids = [token_id]
    return Generation(tuple(token_ids), tuple(margins))
