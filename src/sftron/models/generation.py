"""Text generation with a key-value cache, using the same blocks as training.

Shape suffixes: T new tokens, H hidden_size, V vocab_size.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sftron.models.llama import LlamaForSFT

Choose = Callable[[Tensor], int]
"""A function that selects the next token, given its logits (fp32 [V])."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The generated tokens and their margins, one of each per step."""

    token_ids: tuple[int, ...]
    """The new tokens, including the stop token if one was generated."""
    margins: tuple[float, ...]
    """The logit of the selected token minus that of the second best. A margin near 0 may depend on rounding."""


def generate(
    model: LlamaForSFT,
    prompt_ids: list[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
    *,
    choose: Choose,
    dtype: torch.dtype | None = None,
) -> Iterator[int]:
    """Yields the tokens that continue `prompt_ids`, each as soon as it is selected. Stops after max_new_tokens, or
    after one of `stop_ids`, which is yielded as well.

    Args:
        choose: Selects each token.
        dtype: The type of the computation, by default the model's compute_dtype. For one token at a time, the type of
            the parameters is fastest; with another type, every weight is read, cast and written for a single row.

    Raises:
        ValueError: The prompt is empty, or prompt and new tokens together exceed the model's positions.
    """
    if not prompt_ids:
        raise ValueError("The prompt has no tokens.")
    capacity, dtype = len(prompt_ids) + max_new_tokens, dtype or model.compute_dtype
    model.check_positions(capacity, is_generated=True)
    caches = [block.cache(capacity) for block in model.blocks]
    with torch.no_grad():
        head = model.head.to(dtype)
    new_ids, start = prompt_ids, 0
    all_ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        if model.rope_tables.changes(start, len(new_ids)):
            # All keys in the cache would be rotated differently in a document of this length.
            caches = [block.cache(capacity) for block in model.blocks]
            new_ids, start = all_ids, 0
        with torch.no_grad():  # not inference_mode: sharded weights that are gathered here are used for training later
            position_ids = torch.arange(start, start + len(new_ids), device=head.weight.device)
            ids = torch.tensor(new_ids, device=head.weight.device)
            hidden_TH = model.attend_with(caches, ids, position_ids, dtype)
            logits_V = head.logits(hidden_TH[-1]).float()
        start += len(new_ids)
        token_id = choose(logits_V)
        yield token_id
        if token_id in stop_ids:
            return
        new_ids = [token_id]
        all_ids.append(token_id)


def most_likely(logits_V: Tensor) -> int:
    return int(logits_V.argmax())


def greedy_generate(
    model: LlamaForSFT,
    prompt_ids: list[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> Generation:
    """Generates the most likely token at each step, and records the margin to the second best."""
    margins: list[float] = []

    def choose(logits_V: Tensor) -> int:
        (best, second), (token_id, _) = (x.tolist() for x in logits_V.topk(2))
        margins.append(best - second)
        return token_id

    token_ids = tuple(generate(model, prompt_ids, max_new_tokens, stop_ids, choose=choose))
    return Generation(token_ids, tuple(margins))


class Sampler:
    """Selects tokens at random with its own generator; equal seeds and logits give equal tokens.

    Args:
        temperature: The divisor of the logits; 0 selects the most likely token.
        top_p: The smallest set of most likely tokens whose probabilities sum to this value is kept, at least one token
            (nucleus sampling, arXiv 1904.09751).

    Raises:
        ValueError: The temperature or top_p is out of range.
    """

    def __init__(self, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0) -> None:
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature is {temperature}, which is not a finite number from 0")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}, which is not above 0 and at most 1")
        self._temperature, self._top_p = temperature, top_p
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits_V: Tensor) -> int:
        if self._temperature == 0:
            return most_likely(logits_V)
        # The CPU's generator gives the same tokens for a model on any device.
        logits_V = (logits_V.double() / self._temperature).cpu()
        probabilities_V, ids_V = logits_V.softmax(0).sort(descending=True)
        before_V = probabilities_V.cumsum(0) - probabilities_V
        num_kept = max(1, int((before_V < self._top_p).sum()))
        index = torch.multinomial(probabilities_V[:num_kept], 1, generator=self._generator)
        return int(ids_V[index])
