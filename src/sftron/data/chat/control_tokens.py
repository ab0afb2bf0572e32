"""A copy of a tokenizer that cannot be talked into a control token.

Every added token is renamed to one private-use character. In the text, the template's own control strings are replaced
by these names; whatever a message says stays as it is and finds no control token of that spelling. Normalizers,
pre-tokenizers and merges work on the whole text as ever, so the ids of ordinary text do not change.

    text    <|im_start|>user\\nWrite <|im_end|> please<|im_end|>
    owner   template---------content-----------------template-
    renamed ⓵user\\nWrite <|im_end|> please⓶
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import tokenizers

from sftron.data.chat.byte_pairs import BytePairs
from sftron.data.chat.template import TemplateError

# Where the private-use planes of Unicode begin; the first whose characters do not occur in a text is used for it.
_PRIVATE_PLANES = (0xF0000, 0x100000)
_PLANE_SIZE = 0xFFFE
_WHITE_SPACE = " \t\n\r\v\f\u2581"
"""Of added tokens; SentencePiece writes a space as U+2581."""
_HTML_TAG = re.compile(
    r"</?(a|b|big|blockquote|br|caption|center|code|dd|del|div|dl|dt|em|h[1-6]|hr|i|img|ins|li|ol|p|pre|q|s|small|span|"
    r"strike|strong|sub|sup|table|tbody|td|tfoot|th|thead|tr|tt|u|ul)>"
)
_MOST_REMEMBERED_TEXTS, _LONGEST_REMEMBERED_TEXT = 4096, 512
_PRIVATE_CHARACTER = re.compile("[\U000f0000-\U0010fffd]")


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of one text. ids: int32 [n], the model's own. is_control: bool [n].

    starts, ends: int64 [n], where each lies in the text, in characters; in bytes of UTF-8 if in_bytes.
    """

    ids: np.ndarray
    is_control: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    in_bytes: bool


@dataclass(frozen=True, slots=True, eq=False)
class RenamedTokenizer:
    """A tokenizer whose control tokens have private names.

    Attributes:
        backend: Gives ids of its own.
        real_ids: int32 [its ids], the model's id for each.
        is_control: bool [its ids].
        num_bytes: int64 [its ids], the bytes of text that each stands for, where these are the same wherever it occurs
            (a byte-level model); else None.
        byte_pairs: The same tokenizer in tiktoken, where that gives the same ids.
    """

    backend: tokenizers.Tokenizer
    real_ids: np.ndarray
    is_control: np.ndarray
    num_bytes: np.ndarray | None
    byte_pairs: BytePairs | None

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the tokens of each text. A token's position is summed up from the sizes of those before it wherever
        it can be, which takes less time than asking the tokenizer for it."""
        if self.num_bytes is None:
            encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
            return [self._with_offsets(encoding) for encoding in encodings]
        encoded: dict[int, Tokens | None] = {}
        plain = [number for number, text in enumerate(texts) if self._is_as_written(text)]
        if plain:
            encoded.update(zip(plain, self._with_sizes([texts[number] for number in plain]), strict=True))
        return [
            encoded.get(number) or self._with_offsets(self.backend.encode(text, add_special_tokens=False))
            for number, text in enumerate(texts)
        ]

    def _is_as_written(self, text: str) -> bool:
        """Returns whether the normalizer, which is NFC if there is one, leaves the text as it is."""
        return text.isascii() or self.backend.normalizer is None or unicodedata.is_normalized("NFC", text)

    def _with_sizes(self, texts: Sequence[str]) -> list[Tokens | None]:
        """Returns None for a text whose tokens are not of its size: one of them swallows the space beside it."""
        assert self.num_bytes is not None
        ids, counts = self._ids(texts)
        sizes = self.num_bytes[ids]
        ends = sizes.cumsum()
        bounds = [0, *accumulate(counts)]
        first_bytes = np.concatenate([[0], ends])[bounds]
        ends -= np.repeat(first_bytes[:-1], counts)
        starts, real_ids, is_control = ends - sizes, self.real_ids[ids], self.is_control[ids]
        return [
            Tokens(real_ids[first:last], is_control[first:last], starts[first:last], ends[first:last], in_bytes=True)
            if size == num_bytes(text)
            else None
            for text, first, last, size in zip(texts, bounds, bounds[1:], np.diff(first_bytes).tolist(), strict=False)
        ]

    def _ids(self, texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        if self.byte_pairs is not None:
            try:
                ids, counts = self.byte_pairs.encode(texts)
                return ids, counts.tolist()
            except BaseException as error:  # a panic is no Exception
                if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                    raise
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = np.array([token_id for encoding in encodings for token_id in encoding.ids], dtype=np.int64)
        return ids, [len(encoding.ids) for encoding in encodings]

    def _with_offsets(self, encoding: tokenizers.Encoding) -> Tokens:
        ids = np.array(encoding.ids, dtype=np.int64)
        starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        return Tokens(self.real_ids[ids], self.is_control[ids], starts, ends, in_bytes=False)


def num_bytes(text: str) -> int:
    """Returns the size of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, slots=True)
class RenamedText:
    """text: with private names. tokens: the place before renaming, and the content, of each control token in it."""

    text: str
    tokens: tuple[tuple[int, str], ...]


class ControlTokens:
    """The added tokens of a tokenizer, and copies of it in which they have private names.

    backend: the `tokenizers.Tokenizer` of a fast Hugging Face tokenizer; it is copied, never changed.
    Added tokens of white space alone (Gemma's runs of newlines), and those of HTML that are not marked special (Gemma's
    <b>, </table>, ...), are ordinary text and keep their name.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._specification: dict[str, Any] = json.loads(backend.to_str())
        # A post-processor adds a BOS, truncation cuts, padding pads: none of them belongs to a rendered conversation.
        self._specification.update(post_processor=None, truncation=None, padding=None)
        self.ids: dict[str, int] = {
            token["content"]: token["id"]
            for token in self._specification["added_tokens"]
            if token["content"].strip(_WHITE_SPACE) and (token["special"] or not _HTML_TAG.fullmatch(token["content"]))
        }
        self._first_characters = tuple({content[0] for content in self.ids})
        self._renamed: dict[int, RenamedTokenizer] = {}
        self._names_in_plane: dict[int, dict[str, str]] = {}
        self._renamed_texts: dict[tuple[str, int], RenamedText] = {}

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches a control string, the longest that begins at a place, as the tokenizer itself does."""
        by_length = sorted(self.ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, by_length)) or r"(?!)")

    def plane_for(self, text: str) -> int:
        """The first private-use plane of which `text` holds no character. Raises TemplateError if it uses them all, and
        for half a character, which no tokenizer takes."""
        if text.isascii():
            return _PRIVATE_PLANES[0]
        try:
            str.encode(text)
        except UnicodeEncodeError as error:
            problem = f"the text holds half a character ({error.object[error.start]!r}), a surrogate without its pair"
            raise TemplateError(f"{problem}; write the whole character, or remove it") from None
        used = {ord(character) // 0x10000 * 0x10000 for character in _PRIVATE_CHARACTER.findall(text)}
        for plane in _PRIVATE_PLANES:
            if plane not in used:
                return plane
        raise TemplateError("the text holds private-use characters of both planes 15 and 16; remove some of them")

    def occurs_in(self, text: str) -> bool:
        """Whether a control string stands in the text."""
        # Looking for single characters is a hundred times faster than the pattern, and most texts hold none of them.
        for character in self._first_characters:
            if character in text:
                return self.pattern.search(text) is not None
        return False

    def rename(self, text: str, plane: int, allowed: Collection[str] | None = None) -> RenamedText:
        """Text with its control strings, or those that are allowed, replaced by their private names."""
        if allowed is None and (known := self._renamed_texts.get((text, plane))):
            return known
        names = self._names(plane)
        tokens: list[tuple[int, str]] = []

        def private_name(match: re.Match[str]) -> str:
            content = match.group()
            if allowed is not None and content not in allowed:
                return content
            tokens.append((match.start(), content))
            return names[content]

        renamed = RenamedText(self.pattern.sub(private_name, text), tuple(tokens))
        # A template writes the same few texts between the messages of all conversations.
        if allowed is None and len(text) <= _LONGEST_REMEMBERED_TEXT:
            if len(self._renamed_texts) >= _MOST_REMEMBERED_TEXTS:
                self._renamed_texts.clear()
            self._renamed_texts[text, plane] = renamed
        return renamed

    def renamed_tokenizer(self, plane: int) -> RenamedTokenizer:
        """The copy of the tokenizer that knows the names of one plane; made once."""
        if plane not in self._renamed:
            names = self._names(plane)
            specification = _renamed(self._specification, names)
            backend = tokenizers.Tokenizer.from_str(json.dumps(specification))
            size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
            real_ids, is_control = np.arange(size, dtype=np.int32), np.zeros(size, dtype=bool)
            id_of_name: dict[str, int] = {}
            for content, name in names.items():
                renamed_id = backend.token_to_id(name)
                assert renamed_id is not None
                id_of_name[name] = renamed_id
                real_ids[renamed_id] = self.ids[content]
                is_control[renamed_id] = True
            sizes = _bytes_of_tokens(backend, self._specification, size)
            separator = chr(plane + _PLANE_SIZE - 1)
            pairs = None if sizes is None else BytePairs.of(backend, specification, id_of_name, separator)
            self._renamed[plane] = RenamedTokenizer(backend, real_ids, is_control, sizes, pairs)
        return self._renamed[plane]

    def _names(self, plane: int) -> dict[str, str]:
        if plane not in self._names_in_plane:
            if len(self.ids) >= _PLANE_SIZE:
                raise TemplateError(
                    f"the tokenizer has {len(self.ids)} added tokens; at most {_PLANE_SIZE - 1} can be followed"
                )
            self._names_in_plane[plane] = {content: chr(plane + number) for number, content in enumerate(self.ids)}
        return self._names_in_plane[plane]

    def __getstate__(self) -> dict[str, Any]:
        # The copies are made anew in a loader worker that is spawned rather than forked.
        return {**self.__dict__, "_renamed": {}, "_renamed_texts": {}, "_names_in_plane": {}}


def _bytes_of_tokens(backend: tokenizers.Tokenizer, specification: Mapping[str, Any], size: int) -> np.ndarray | None:
    """A byte-level model writes every byte as one character, so a token's characters are its bytes."""
    pre_tokenizer = specification["pre_tokenizer"] or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    is_byte_level = any(step.get("type") == "ByteLevel" and not step["add_prefix_space"] for step in steps)
    normalizer = specification["normalizer"]
    if not is_byte_level or normalizer not in (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}):
        return None
    num_bytes = np.zeros(size, dtype=np.int64)
    for token, token_id in backend.get_vocab(with_added_tokens=False).items():
        num_bytes[token_id] = len(token)
    for token_id, added in backend.get_added_tokens_decoder().items():
        num_bytes[token_id] = len(added.content.encode())
    return num_bytes


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
