"""What a model generates of a conversation, found by transformers alone; nothing of sftron is used.

Each assistant's turn is compared with its prompt: what both begin with is the prompt, and all after
it, up to and with the stop token, is the model's.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase


class CannotCompareError(Exception):
    """transformers' renderings do not show which tokens of a turn are the model's; the reason."""


class Oracle:
    """One template with one tokenizer. stops: the control strings that end a turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, stops: Sequence[str]) -> None:
        self.tokenizer, self.template = tokenizer, template
        self._stop = re.compile("|".join(map(re.escape, stops)))

    def render(self, messages: Sequence[Any], tools: Sequence[Any] = (), *, prompt: bool = False, **kwargs: Any) -> Any:
        return self.tokenizer.apply_chat_template(
            copy.deepcopy(list(messages)),
            tools=copy.deepcopy(list(tools)) or None,
            chat_template=self.template,
            add_generation_prompt=prompt,
            **{"tokenize": False, **kwargs},
        )

    def ids(self, messages: Sequence[Any], tools: Sequence[Any] = ()) -> list[int]:
        return self.render(messages, tools, tokenize=True, return_dict=False)

    def mask(self, messages: Sequence[Any], tools: Sequence[Any] = ()) -> list[bool]:
        """Of each token of `ids`, whether the model generates it. Raises CannotCompareError."""
        text = self.render(messages, tools)
        firsts, ids = self._tokens(text)
        assert ids == self.ids(messages, tools)
        is_written = [False] * len(ids)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                start = self._start(text, messages[:number], tools)
                end = self._end(text, start, self.render(messages[: number + 1], tools))
                is_written = [was or start <= first < end for was, first in zip(is_written, firsts, strict=True)]
        return is_written

    def _tokens(self, text: str) -> tuple[list[int], list[int]]:
        """Where each token begins, and its id."""
        encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        return [first for first, _ in encoding.offsets], encoding.ids

    def _start(self, text: str, history: Sequence[Any], tools: Sequence[Any]) -> int:
        """The character with which the model begins: after the last whole token, and whole word, of the prompt."""
        prompt, closed = self.render(history, tools, prompt=True), self.render(history, tools)
        if text.startswith(prompt):
            return len(prompt)
        firsts, ids = self._tokens(text)
        prompt_firsts, prompt_ids = self._tokens(prompt)
        shared = next(n for n, (one, other) in enumerate(zip(ids, prompt_ids, strict=False)) if one != other)
        start = min(firsts[shared], prompt_firsts[shared])
        while start and not (text[start - 1] in "\n >]" or prompt[start] in "\n <["):
            start -= 1
        if start <= len(_common(prompt, closed)):
            raise CannotCompareError("the history is rendered otherwise once more follows")
        return start

    def _end(self, text: str, start: int, until: str) -> int:
        """The end of the last stop token of the turn. The whole text may hold less of it (its thoughts) or end it
        otherwise; then it is the first one there."""
        stops = [found.end() for found in self._stop.finditer(text, start)]
        within = [end for end in stops if end <= len(until)] if text.startswith(until) else stops[:1]
        if not within:
            raise CannotCompareError("no stop token follows")
        return within[-1]


def _common(one: str, other: str) -> str:
    length = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]
