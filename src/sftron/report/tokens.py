"""The texts of tokens, the names of roles, and counts of tokens by role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sftron.data.types import Role

Decode = Callable[[list[int]], str]
"""A function that decodes ids into text without omitting anything. For a Hugging Face tokenizer:
`partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)`."""


def token_texts(decode: Decode, ids: Sequence[int]) -> list[tuple[str, int]]:
    """Splits decoded text into (text, number of tokens); texts join to `decode(ids)`, numbers add up to all ids.

        ids      5      6      7    8      9        bytes  "a"  E2     98     83   "b"
        texts    "a", 1 "☃", 3             "b", 1

    A boundary is set after a token if the text up to it is a prefix of the whole text. This excludes incomplete
    characters, which decode to U+FFFD. The work is linear in `ids`: for each token, only the previous two texts are
    decoded again, because SentencePiece strips the space of the first one. A decoder that changes text across tokens
    yields coarser texts, but they still join exactly.
    """
    ids, text = list(ids), decode(list(ids))
    texts: list[tuple[str, int]] = []
    starts: list[int] = []
    num_read = start = 0  # the characters of `text` and the tokens in `texts` so far
    for end in range(1, len(ids) + 1):
        context = starts[-2] if len(starts) >= 2 else 0
        before, after = decode(ids[context:start]), decode(ids[context:end])
        added = after[len(before) :]
        if not after.startswith(before) or not text.startswith(added, num_read) or not (added or texts):
            continue
        if added:
            texts.append((added, end - start))
            starts.append(start)
        else:
            texts[-1] = (texts[-1][0], texts[-1][1] + end - start)
        num_read += len(added)
        start = end
    rest, num_rest = text[num_read:], len(ids) - start
    if texts and bool(rest) != bool(num_rest):
        last_text, last_tokens = texts.pop()
        rest, num_rest = last_text + rest, last_tokens + num_rest
    return [*texts, (rest, num_rest)] if rest or num_rest else texts


def role_name(role: Role) -> str:
    return role.name.lower().replace("_", " ")


@dataclass(slots=True)
class RoleCount:
    """The number of tokens and of trained tokens, by role."""

    tokens: Counter[Role] = field(default_factory=Counter)
    trained: Counter[Role] = field(default_factory=Counter)

    def add(self, role_ids: np.ndarray, trained: np.ndarray) -> None:
        """Adds tokens; role_ids (uint8) and trained (bool) are [n]."""
        for counter, ids in ((self.tokens, role_ids), (self.trained, role_ids[trained])):
            values, counts = np.unique(ids, return_counts=True)
            counter.update({Role(int(value)): int(count) for value, count in zip(values, counts, strict=True)})

    @property
    def num_tokens(self) -> int:
        return self.tokens.total()

    @property
    def num_trained_tokens(self) -> int:
        return self.trained.total()

    def as_dict(self) -> dict[str, Any]:
        by_role = {
            role.name.lower(): {"num_tokens": self.tokens[role], "num_trained_tokens": self.trained[role]}
            for role in sorted(self.tokens)
        }
        return {"num_tokens": self.num_tokens, "num_trained_tokens": self.num_trained_tokens, "by_role": by_role}
