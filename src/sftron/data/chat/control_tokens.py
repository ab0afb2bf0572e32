"""Copies of a tokenizer in which no text can spell a control token (law 3).

Every control token is renamed to one private-use character. In the rendered text, the template's own control tokens are
replaced by these names; a message's text is unchanged, so it matches no control token. Normalizers, pre-tokenizers and
merges process the whole text as usual, so the ids of ordinary text do not change.

    text    <|im_start|>user\\nWrite <|im_end|> please<|im_end|>
    owner   template---------content-----------------template-
    renamed ⓵user\\nWrite <|im_end|> please⓶
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from sftron.data.chat.byte_pairs import BytePairs
from sftron.data.chat.template import TemplateError
from sftron.data.types import Role

_FIRST_PRIVATE, _LAST_PRIVATE = 0x100000, 0x10FFFD
"""The last private-use block of Unicode. The names are its last characters, which no font is known to use."""
_WHITE_SPACE = " \t\n\r\v\f\u2581"
"""The white space in added tokens; SentencePiece writes a space as U+2581."""
_HTML_TAG = re.compile(
    r"</?(a|b|big|blockquote|br|caption|center|code|dd|del|div|dl|dt|em|h[1-6]|hr|i|img|ins|li|ol|p|pre|q|s|small|span|"
    r"strike|strong|sub|sup|table|tbody|td|tfoot|th|thead|tr|tt|u|ul)>"
)
_LOOKS_LIKE_ONE = re.compile(r"<.+>|\[/?[A-Z_]{3,}\]", re.DOTALL)
_MOST_REMEMBERED_TEXTS, _LONGEST_REMEMBERED_TEXT = 4096, 512

Occurrences = tuple[tuple[int, str], ...]
"""The position and the string of each control token in a text."""


class Tokens(NamedTuple):
    """The tokens of a text. Positions are in bytes of UTF-8."""

    ids: np.ndarray
    """int32 [n], the ids in the model's vocabulary."""
    is_control: np.ndarray
    """bool [n], whether each token is a control token."""
    starts: np.ndarray
    """int64 [n], the position at which each token begins."""
    ends: np.ndarray
    """int64 [n], the position at which each token ends."""


@dataclass(frozen=True, slots=True, eq=False)
class RenamedTokenizer:
    """A tokenizer whose control tokens have private names."""

    backend: tokenizers.Tokenizer
    """The copy of the tokenizer, whose ids may differ from the model's."""
    real_ids: np.ndarray
    """int32 [vocabulary], the model's id for each id of the backend."""
    is_control: np.ndarray
    """bool [vocabulary], whether each id of the backend is a control token."""
    byte_pairs: BytePairs | None
    """The same tokenizer in tiktoken, if tiktoken gives the same ids, else None."""

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the tokens of each text.

        tiktoken is faster, and positions follow from the sizes of its tokens. It is not used for a text that the
        normalizer changes, nor for one at which it fails.
        """
        if self.byte_pairs is not None:
            if all(map(self._is_normalized, texts)):
                try:
                    ids, sizes, counts = self.byte_pairs.encode(texts)
                except BaseException as error:  # a panic is not an Exception
                    if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                        raise
                else:
                    # Arrays of all texts, which are then cut, as the same operations on each text take longer.
                    bounds = np.append(0, counts.cumsum())
                    ends = sizes.cumsum()
                    ends -= np.append(0, ends)[bounds[:-1]].repeat(counts)
                    columns = self.real_ids[ids], self.is_control[ids], ends - sizes, ends
                    return [Tokens(*(column[a:b] for column in columns)) for a, b in pairwise(bounds.tolist())]
            if len(texts) > 1:
                return [tokens for text in texts for tokens in self.encode([text])]
        encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [self._with_offsets(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]

    def _is_normalized(self, text: str) -> bool:
        # `byte_pairs` is set only for tokenizers without a normalizer or with NFC alone.
        return text.isascii() or self.backend.normalizer is None or unicodedata.is_normalized("NFC", text)

    def _with_offsets(self, text: str, encoding: tokenizers.Encoding) -> Tokens:
        ids = np.array(encoding.ids, dtype=np.int64)
        # Not np.array of the pairs, which takes half as long again.
        offsets = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(ids)).reshape(-1, 2).T
        if not text.isascii():
            code_points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
            sizes = 1 + (code_points > 0x7F) + (code_points > 0x7FF) + (code_points > 0xFFFF)
            offsets = np.append(0, sizes.cumsum())[offsets]
        starts, ends = offsets
        return Tokens(self.real_ids[ids], self.is_control[ids], starts, ends)


def num_bytes(text: str) -> int:
    """Returns the size of a text in bytes of UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class ControlTokens:
    """The control tokens of a tokenizer, and copies of the tokenizer in which they have private names.

    Control tokens are the added tokens that are marked as special, look like one (<think>, [INST]), or that a template
    writes itself around messages. All others are ordinary text and keep their names: white space (Gemma's newlines),
    HTML tags (Gemma's <b>, </table>, ...) and words of a domain. The backend is copied, never changed.

    Args:
        own_texts: The texts that templates write around messages.

    Raises:
        TemplateError: There are more control tokens than the private-use block has characters.
    """

    def __init__(self, backend: tokenizers.Tokenizer, own_texts: Iterable[str] = ()) -> None:
        self._specification: dict[str, Any] = json.loads(backend.to_str())
        # A rendered conversation needs no BOS from a post-processor, no truncation and no padding.
        self._specification.update(post_processor=None, truncation=None, padding=None)
        added = [token for token in self._specification["added_tokens"] if token["content"].strip(_WHITE_SPACE)]
        contents = [token["content"] for token in added if not token["special"]]
        words = {content for content in contents if not _LOOKS_LIKE_ONE.fullmatch(content)}
        if words:
            words -= _written(words, "\0".join(own_texts))
        words.update(filter(_HTML_TAG.fullmatch, contents))
        self.ids: dict[str, int] = {token["content"]: token["id"] for token in added if token["content"] not in words}
        first_name = _LAST_PRIVATE - len(self.ids)
        if first_name < _FIRST_PRIVATE:
            most = _LAST_PRIVATE - _FIRST_PRIVATE
            raise TemplateError(f"the tokenizer has {len(self.ids)} added tokens, but at most {most} are supported")
        self._first_characters = tuple({content[0] for content in self.ids})
        self._names = {content: chr(first_name + number) for number, content in enumerate(self.ids)}
        self._contents = {ord(name): content for content, name in self._names.items()}
        self._refused = re.compile(f"[\ud800-\udfff{chr(first_name)}-{chr(_LAST_PRIVATE)}]")
        self._find_in_short = functools.lru_cache(_MOST_REMEMBERED_TEXTS)(self._find)

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """The pattern of a control token's string; like the tokenizer, it matches the longest one at a position."""
        by_length = sorted(self.ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, by_length)) or r"(?!)")

    def require_usable(self, text: str) -> None:
        """Raises TemplateError if a text has a name's character, or a lone surrogate, which no tokenizer accepts."""
        if text.isascii() or (found := self._refused.search(text)) is None:
            return
        if found[0] <= "\udfff":
            problem = f"the text contains half a character ({found[0]!r}, a surrogate without its pair)"
            raise TemplateError(f"{problem}; write the whole character, or remove it")
        raise TemplateError(
            f"the text contains {found[0]!r}, a private-use character that stands for a control token; remove it"
        )

    def is_plain(self, text: str) -> bool:
        """Returns whether the text contains no control token's string, name of one, or lone surrogate."""
        return (text.isascii() or self._refused.search(text) is None) and not self.occurs_in(text)

    def occurs_in(self, text: str) -> bool:
        """Returns whether the text contains a control token's string."""
        # A search for single characters is a hundred times faster than the pattern, and most texts contain none.
        for character in self._first_characters:
            if character in text:
                return self.pattern.search(text) is not None
        return False

    def find(self, text: str) -> Occurrences:
        """Returns the control tokens' strings in a text."""
        # A template writes the same few texts between the messages of all conversations.
        return self._find_in_short(text) if len(text) <= _LONGEST_REMEMBERED_TEXT else self._find(text)

    def _find(self, text: str) -> Occurrences:
        return tuple((match.start(), match.group()) for match in self.pattern.finditer(text))

    def rename(self, text: str, found: Occurrences) -> str:
        """Returns the text with names in place of the strings that `find` has found in it."""
        texts, start = list[str](), 0
        for position, content in found:
            texts += [text[start:position], self._names[content]]
            start = position + len(content)
        return "".join([*texts, text[start:]])

    def restored(self, text: str) -> str:
        """Returns the text that `rename` was given."""
        return text.translate(self._contents)

    @functools.cached_property
    def renamed_tokenizer(self) -> RenamedTokenizer:
        """The copy of the tokenizer in which control tokens have their names."""
        specification = _renamed(self._specification, self._names)
        backend = tokenizers.Tokenizer.from_str(json.dumps(specification))
        vocabulary = backend.get_vocab(with_added_tokens=True)
        size = 1 + max(vocabulary.values())
        real_ids, is_control = np.arange(size, dtype=np.int32), np.zeros(size, dtype=bool)
        id_of_name = {name: vocabulary[name] for name in self._names.values()}
        renamed_ids = list(id_of_name.values())
        real_ids[renamed_ids], is_control[renamed_ids] = list(self.ids.values()), True
        pairs = BytePairs.of(backend, specification, id_of_name, chr(_LAST_PRIVATE))
        return RenamedTokenizer(backend, real_ids, is_control, pairs)


def _written(words: Collection[str], text: str) -> set[str]:
    """Returns the words that are in a text, but not within longer words: "ant" is not written in "assistant"."""
    return {word for word in words if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)}


def allowed_by_role(allowed: Mapping[str, Collection[str]], known: Collection[str]) -> dict[Role, frozenset[str]]:
    """Returns the allowed control tokens by role. Raises TemplateError for an unknown role or control token."""
    by_name = {role.name.lower(): role for role in Role if role not in (Role.TEMPLATE, Role.PADDING)}
    for name, strings in allowed.items():
        if name not in by_name:
            raise TemplateError(f"data.allow_control_tokens: unknown role {name!r}; choose from {', '.join(by_name)}")
        if unknown := sorted(set(strings) - set(known)):
            raise TemplateError(
                f"data.allow_control_tokens.{name}: {', '.join(unknown)} is not a control token of the tokenizer; "
                "remove it, or add the token (tokenizer.add_tokens)"
            )
    return {by_name[name]: frozenset(strings) for name, strings in allowed.items()}


def _renamed(specification: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the tokenizer's JSON with every control token renamed, also in the model's vocabulary.

    If `</s>` stayed in the vocabulary, then a Unigram model, or a BPE model that matches whole words first (Llama 3's
    `ignore_merges`), would find it in plain text.
    """
    added = [
        {**token, "content": names.get(token["content"], token["content"])} for token in specification["added_tokens"]
    ]
    model = dict(specification["model"])
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(token, token), *rest] for token, *rest in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if model.get("merges"):
        # Merges that make or use a renamed token are removed, as only a forged control token could need them.
        model["merges"] = [[a, b] for a, b in model["merges"] if not names.keys() & {a, b, a + b}]
    return {**specification, "added_tokens": added, "model": model}
