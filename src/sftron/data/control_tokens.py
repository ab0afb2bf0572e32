"""A copy of a tokenizer that cannot be talked into a control token.

Every added token is renamed to one private-use character. In the text, the template's own control strings are replaced
by these names; whatever a message says stays as it is and finds no control token of that spelling. Normalizers,
pre-tokenizers and merges work on the whole text as ever, so the ids of ordinary text do not change.

    text    <|im_start|>user\\nWrite <|im_end|> please<|im_end|>
    owner   template---------content-----------------template-
    renamed ⓵user\\nWrite <|im_end|> please⓶
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers

from sftron.data.chat_template import TemplateError

# Where the private-use planes of Unicode begin; the first whose characters do not occur in a text is used for it.
_PRIVATE_PLANES = (0xF0000, 0x100000)
_PLANE_SIZE = 0xFFFE
_PRIVATE_CHARACTER = re.compile("[\U000f0000-\U0010fffd]")


@dataclass(frozen=True, slots=True, eq=False)
class RenamedTokenizer:
    """A tokenizer whose control tokens have private names.

    backend: gives ids of its own. real_ids: int32 [its ids], the model's id for each. is_control: bool [its ids].
    """

    backend: tokenizers.Tokenizer
    real_ids: np.ndarray
    is_control: np.ndarray


class ControlTokens:
    """The added tokens of a tokenizer, and copies of it in which they have private names.

    backend: the `tokenizers.Tokenizer` of a fast Hugging Face tokenizer; it is copied, never changed.
    Added tokens of white space alone (Gemma's runs of newlines) are ordinary text and keep their name.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._specification: dict[str, Any] = json.loads(backend.to_str())
        # A post-processor adds a BOS, truncation cuts, padding pads: none of them belongs to a rendered conversation.
        self._specification.update(post_processor=None, truncation=None, padding=None)
        self.ids: dict[str, int] = {
            token["content"]: token["id"] for token in self._specification["added_tokens"] if token["content"].strip()
        }
        self._renamed: dict[int, RenamedTokenizer] = {}

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches a control string, the longest that begins at a place, as the tokenizer itself does."""
        by_length = sorted(self.ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, by_length)) or r"(?!)")

    def plane_for(self, text: str) -> int:
        """The first private-use plane of which `text` holds no character. Raises TemplateError if it uses them all."""
        used = {ord(character) // 0x10000 * 0x10000 for character in _PRIVATE_CHARACTER.findall(text)}
        for plane in _PRIVATE_PLANES:
            if plane not in used:
                return plane
        raise TemplateError("the text holds private-use characters of both planes 15 and 16; remove some of them")

    def rename(self, template_text: str, plane: int) -> tuple[str, int]:
        """Text that the template alone wrote, its control strings replaced by their private names; and how many."""
        names = self._names(plane)
        return self.pattern.subn(lambda match: names[match.group()], template_text)

    def renamed_tokenizer(self, plane: int) -> RenamedTokenizer:
        """The copy of the tokenizer that knows the names of one plane; made once."""
        if plane not in self._renamed:
            names = self._names(plane)
            backend = tokenizers.Tokenizer.from_str(json.dumps(_renamed(self._specification, names)))
            size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
            real_ids, is_control = np.arange(size, dtype=np.int32), np.zeros(size, dtype=bool)
            for content, name in names.items():
                renamed_id = backend.token_to_id(name)
                assert renamed_id is not None
                real_ids[renamed_id] = self.ids[content]
                is_control[renamed_id] = True
            self._renamed[plane] = RenamedTokenizer(backend, real_ids, is_control)
        return self._renamed[plane]

    def _names(self, plane: int) -> dict[str, str]:
        if len(self.ids) > _PLANE_SIZE:
            raise TemplateError(
                f"the tokenizer has {len(self.ids)} added tokens; at most {_PLANE_SIZE} can be followed"
            )
        return {content: chr(plane + number) for number, content in enumerate(self.ids)}

    def __getstate__(self) -> dict[str, Any]:
        # The copies are made anew in a loader worker that is spawned rather than forked.
        return {**self.__dict__, "_renamed": {}}


def _renamed(specification: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The tokenizer's JSON with every added token renamed, in the model's own vocabulary as well.

    The vocabulary matters: a Unigram model, or a BPE model that takes whole words first (Llama 3's `ignore_merges`),
    finds `</s>` in plain text if it stands there.
    """
    added = [
        {**token, "content": names.get(token["content"], token["content"])} for token in specification["added_tokens"]
    ]
    model = dict(specification["model"])
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), *rest] for piece, *rest in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, names)]
    return {**specification, "added_tokens": added, "model": model}


def _makes(merge: str | list[str], names: Mapping[str, str]) -> bool:
    """Whether a merge spells a renamed token, or needs one: it could serve nothing but a forgery."""
    left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
    return left in names or right in names or left + right in names
