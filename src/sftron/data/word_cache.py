"""The ids of words, remembered: European text to ids several times faster than the tokenizer gives them.

A byte-level BPE model first splits text into words by regular expressions, and merges bytes within a word only. So a
text's ids are those of its words, one after another, and a word's ids never change. The words of a data set repeat: of
GSM8K's 1.15 million, 14 thousand differ. What is new is asked of the tokenizer's own model, so it decides every id.

The expressions are written for another engine (Oniguruma) than Python's. On ASCII both say the same. Other characters
of European text are split as an ASCII character of their class would be; texts with any others are left to the
tokenizer. The splits of some thousand odd texts are held against the tokenizer's own at the start.
"""

from __future__ import annotations

import random
import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import tokenizers

_MOST_WORDS, _LONGEST_WORD, _LONGEST_PART = 2**17, 64, 24
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What a ByteLevel step splits by, where it does; fixed in the tokenizers library."""

_IN_ASCII = {
    "L": "A-Za-z",
    "Lu": "A-Z",
    "Ll": "a-z",
    "Lt": "",
    "Lm": "",
    "Lo": "",
    "M": "",
    "Mn": "",
    "N": "0-9",
    "Nd": "0-9",
    "P": r"!-#%-*,-/:;?@\[-\]_{}",
    "S": r"$+<->\^`|~",
}
"""The ASCII characters of Unicode's classes, as written between brackets."""

_OF_KIND = (("Lu", "A"), ("Ll", "a"), ("N", "0"), ("P", "!"), ("S", "+"), ("Zs", "\t"))
_ODD_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
"""Characters that engines may or may not take for white space."""

_STAND_INS = {
    code: next((ascii for kind, ascii in _OF_KIND if unicodedata.category(chr(code)).startswith(kind)), None)
    for code in (*range(0xA0, 0x17F), *range(0x2010, 0x2028), *range(0x2030, 0x205F), 0x20AC, 0x2122)
}
"""An ASCII character of the same class for others that Unicode has had, and has not moved, since its beginnings. (Not
for U+017F, the long s, which a pattern that ignores case takes for an s.)"""

_Splitter = Callable[[str], list[str]]


class _KnownWords(dict[str, tuple[int, ...]]):
    """Ids by word. A missing one is asked of the model: not of the whole tokenizer, which might split a word that
    stands alone once more."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def __missing__(self, word: str) -> tuple[int, ...]:
        as_bytes = word.encode().decode("latin-1").translate(_BYTE_NAMES)
        ids = tuple(token.id for token in self._model.tokenize(as_bytes))
        if len(word) <= _LONGEST_WORD:
            if len(self) >= _MOST_WORDS:
                self.clear()
            self[word] = ids
        return ids


class WordCache:
    """`encode(text)` gives the backend's ids of a text without added tokens, or None where that has to be asked."""

    def __init__(
        self, backend: tokenizers.Tokenizer, splitters: Sequence[_Splitter], stand_ins: Mapping[int, str | None]
    ) -> None:
        self._splitters, self._stand_ins = splitters, stand_ins
        self._ids_of = _KnownWords(backend.model).__getitem__
        self._short_parts: dict[str, list[int]] = {}

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, specification: Mapping[str, Any]) -> WordCache | None:
        """None for a tokenizer of another kind, or one that splits a text otherwise than we would.

        specification: the backend as JSON.
        """
        model, added = specification["model"], specification["added_tokens"]
        if model["type"] != "BPE" or model.get("dropout") or model.get("byte_fallback"):
            return None
        # Added tokens of ASCII, or that take white space with them, would have to be found before words are.
        if any(t["content"].isascii() or t["single_word"] or t["lstrip"] or t["rstrip"] for t in added):
            return None
        try:
            splitters = _splitters(specification["pre_tokenizer"] or {})
        except (KeyError, ValueError, re.error):
            return None
        # DeepSeek's patterns name the letters of ASCII apart from others.
        for stand_ins in (_STAND_INS, {}):
            cache = cls(backend, splitters, stand_ins)
            ours = [(text, cache._split(text)) for text in _odd_texts(stand_ins)]
            if all(words is None or words == _their_split(backend, text) for text, words in ours):
                return cache
        return None

    def encode(self, text: str) -> list[int] | None:
        # What stands between the template's control tokens is mostly short, and always the same.
        if (known := self._short_parts.get(text)) is not None:
            return known
        words = self._split(text)
        if words is None:
            return None
        ids = list(chain.from_iterable(map(self._ids_of, words)))
        if len(text) <= _LONGEST_PART and len(self._short_parts) < _MOST_WORDS:
            self._short_parts[text] = ids
        return ids

    def _split(self, text: str) -> list[str] | None:
        """None for a text with characters that are left to the tokenizer."""
        as_ascii = text if text.isascii() else text.translate(self._stand_ins)
        if not as_ascii.isascii() or len(as_ascii) != len(text) or _ODD_CONTROL.search(as_ascii):
            return None
        words = [as_ascii] if as_ascii else []
        for split in self._splitters:
            words = split(words[0]) if len(words) == 1 else [part for word in words for part in split(word)]
        if as_ascii is text:
            return words
        ends = list(accumulate(map(len, words)))
        return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _splitters(pre_tokenizer: Mapping[str, Any]) -> list[_Splitter]:
    """Raises ValueError or KeyError for a step that is not followed here."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    patterns: list[str] = []
    for step in steps:
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            patterns.append(step["pattern"]["Regex"])
        elif step["type"] == "Digits":
            patterns.append(r"\p{N}" if step["individual_digits"] else r"\p{N}+")
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"] and step is steps[-1]:
            patterns += [_GPT2_WORDS] if step["use_regex"] else []
        else:
            raise ValueError(step["type"])
    if steps[-1]["type"] != "ByteLevel":
        raise ValueError(steps[-1]["type"])
    compiled = [re.compile(_in_ascii(pattern), re.ASCII) for pattern in patterns]
    if any(pattern.groups for pattern in compiled):
        raise ValueError("a pattern has groups of its own")
    # A pattern that stands alone leaves nothing between its matches, or `_odd_texts` shows it.
    return [compiled[0].findall] if len(compiled) == 1 else [_isolating(pattern) for pattern in compiled]


def _isolating(pattern: re.Pattern[str]) -> _Splitter:
    """Text to the matches of a pattern and what lies between them."""
    with_group = re.compile(f"({pattern.pattern})", pattern.flags)
    return lambda text: [part for part in with_group.split(text) if part]


def _in_ascii(pattern: str) -> str:
    r"""A pattern with \p{...} spelled out. Raises KeyError for a class that is not known here."""
    pieces, in_brackets = [], False
    for piece in re.findall(r"\\p\{\w+\}|\\.|.", pattern, re.DOTALL):
        if piece.startswith(r"\p{"):
            characters = _IN_ASCII[piece[3:-1]]
            pieces.append(characters if in_brackets else f"[{characters}]" if characters else "(?!)")
        else:
            in_brackets = piece == "[" or (in_brackets and piece != "]")
            pieces.append(piece)
    return "".join(pieces)


_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_NAMES = {byte: chr(256 + number) for number, byte in enumerate(n for n in range(256) if n not in _PRINTABLE)}
"""How GPT-2's alphabet writes the bytes that are not printable; the others are written as Latin-1 has them."""


def _their_split(backend: tokenizers.Tokenizer, text: str) -> list[str]:
    assert backend.pre_tokenizer is not None
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


def _odd_texts(stand_ins: Mapping[int, str | None]) -> list[str]:
    """Texts of what patterns tell apart."""
    source = random.Random(0)
    words = ["  ", "\n\n", " \n", "\t ", "'s", "'LL", "'re", "I'm", "don't", "123", "4567", "...", "Ab", "ABc", "aB"]
    atoms = [*(character for character in string.printable if character not in "\v\f\r"), *words * 3]
    atoms += [chr(code) for code, stand_in in stand_ins.items() if stand_in is not None]
    return ["".join(source.choices(atoms, k=source.randint(1, 12))) for _ in range(3000)]
