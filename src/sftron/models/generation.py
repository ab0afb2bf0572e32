"""Decoding with a key-value cache, through the blocks that training uses.

shape suffixes: T new tokens, S cached and new tokens, N query heads, K key-value heads, D head size, V vocab_size
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sftron.models.attention import attend_causally
from sftron.models.attention_kernels import refuse
from sftron.models.llama import LlamaForSFT

Choose = Callable[[Tensor], int]
"""Returns the next token, from its logits (fp32 [V])."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The generated tokens; both fields have one entry a step."""

    token_ids: tuple[int, ...]
    """The new tokens, the stop token included if one was reached."""
    margins: tuple[float, ...]
    """The logit of the chosen token less that of the runner-up. Near 0, rounding alone decides."""


class _CachedAttention:
    """One layer's attention with the keys and values of all tokens so far."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_cached = 0
        self.keys = self.values = torch.empty(0)

    def __call__(
        self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, window: int | None = None, sinks_N: Tensor | None = None
    ) -> Tensor:
        refuse("generation", sinks_N=sinks_N)
        if self.num_cached == 0:
            self.keys, self.values = (x.new_empty(self.capacity, *x.shape[1:]) for x in (k_TKD, v_TKD))
        start, self.num_cached = self.num_cached, self.num_cached + len(k_TKD)
        self.keys[start : self.num_cached] = k_TKD
        self.values[start : self.num_cached] = v_TKD
        return attend_causally(q_TND, self.keys[: self.num_cached], self.values[: self.num_cached], window)


class CachedRow:
    """A row of tokens that grows, with the keys and values of those it has.

    Args:
        capacity: tokens that it may grow to.
        dtype: the type of the computation, by default the model's compute_dtype. One token at a time, the type of the
            parameters is faster than another one, in which each weight is read, converted and written for a single row.

    Raises:
        ValueError: the capacity exceeds the model's positions.
    """

    def __init__(self, model: LlamaForSFT, capacity: int, dtype: torch.dtype | None = None) -> None:
        model.check_positions(capacity)
        self._model, self._dtype = model, dtype or model.compute_dtype
        self._caches = [_CachedAttention(capacity) for _ in range(model.config.num_hidden_layers)]
        self._head_VH = model.head_weight.detach().to(self._dtype)

    @torch.no_grad()  # not inference_mode: sharded weights, made whole here, have to serve training afterwards
    def extend(self, token_ids: list[int]) -> Tensor:
        """Appends these tokens, at least one, to the row. Returns the logits (fp32 [V]) of the one that follows."""
        start, device = self._caches[0].num_cached, self._head_VH.device
        position_ids = torch.arange(start, start + len(token_ids), device=device)
        ids = torch.tensor(token_ids, device=device)
        hidden_TH = self._model.attend_with(self._caches, ids, position_ids, self._dtype)
        return F.linear(hidden_TH[-1], self._head_VH).float()


def generate(
    model: LlamaForSFT,
    prompt_ids: list[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
    *,
    choose: Choose,
    dtype: torch.dtype | None = None,
) -> Iterator[int]:
    """Yields tokens that continue `prompt_ids`, each as soon as it is chosen, until one of `stop_ids`, which is the
    last, or max_new_tokens. dtype: see `CachedRow`.

    Raises:
        ValueError: the prompt is empty, or prompt and new tokens exceed the model's positions.
    """
    if not prompt_ids:
        raise ValueError("The prompt holds no token, so there is nothing to continue.")
    row = CachedRow(model, len(prompt_ids) + max_new_tokens, dtype)
    new_ids = prompt_ids
    for _ in range(max_new_tokens):
        token_id = choose(row.extend(new_ids))
        yield token_id
        if token_id in stop_ids:
            return
        new_ids = [token_id]


def most_likely(logits_V: Tensor) -> int:
    return int(logits_V.argmax())


def greedy_generate(
    model: LlamaForSFT,
    prompt_ids: list[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
    dtype: torch.dtype | None = None,
) -> Generation:
    """Generates by the most likely token each, with how clearly each was chosen."""
    margins: list[float] = []

    def choose(logits_V: Tensor) -> int:
        (best, second), (token_id, _) = (x.tolist() for x in logits_V.topk(2))
        margins.append(best - second)
        return token_id

    token_ids = tuple(generate(model, prompt_ids, max_new_tokens, stop_ids, choose=choose, dtype=dtype))
    return Generation(token_ids, tuple(margins))


class Sampler:
    """Chooses tokens at random, by a generator of its own: the same seed and logits give the same tokens.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_p: keeps as many of the likeliest tokens as it takes for their probabilities to sum to this, and the
            likeliest always (arXiv 1904.09751).
    """

    def __init__(self, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0) -> None:
        self._temperature, self._top_p = temperature, top_p
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits_V: Tensor) -> int:
        if self._temperature == 0:
            return most_likely(logits_V)
        # On the CPU, whose generator is the same whatever the model is on.
        logits_V = (logits_V.double() / self._temperature).cpu()
        probabilities_V, ids_V = logits_V.softmax(0).sort(descending=True)
        before_V = probabilities_V.cumsum(0) - probabilities_V
        num_kept = max(1, int((before_V < self._top_p).sum()))
        index = torch.multinomial(probabilities_V[:num_kept], 1, generator=self._generator)
        return int(ids_V[index])
