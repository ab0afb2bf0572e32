"""The ids of words, remembered: plain ASCII text to ids several times faster than the tokenizer gives them.

A byte-level BPE model first splits text into words by regular expressions, and merges bytes within a word only. So a
text's ids are those of its words, one after another, and a word's ids never change. The words of a data set repeat: of
GSM8K's 1.15 million, 14 thousand differ. What is new is asked of the tokenizer's own model, so it decides every id.

The expressions are written for another engine (Oniguruma) than Python's. On ASCII both say the same, so other texts are
left to the tokenizer; and the splits of a thousand odd texts are held against the tokenizer's own at the start.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers

_MOST_WORDS, _LONGEST_WORD = 2**17, 64
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

_ODD_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
"""Characters that engines may or may not take for white space."""

_Splitter = Callable[[str], list[str]]


class WordCache:
    """`encode(text)` gives the backend's ids of a text without added tokens, or None where that has to be asked."""

    def __init__(self, backend: tokenizers.Tokenizer, splitters: Sequence[_Splitter]) -> None:
        self._backend, self._splitters = backend, splitters
        self._ids: dict[str, tuple[int, ...]] = {}

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
            cache = cls(backend, _splitters(specification["pre_tokenizer"] or {}))
        except (KeyError, ValueError, re.error):
            return None
        return cache if all(cache._split(text) == _their_split(backend, text) for text in _odd_texts()) else None

    def encode(self, text: str) -> list[int] | None:
        if not text.isascii() or _ODD_CONTROL.search(text):
            return None
        known, ids = self._ids, list[int]()
        for word in self._split(text):
            ids.extend(known.get(word) or self._ask(word))
        return ids

    def _split(self, text: str) -> list[str]:
        words = [text] if text else []
        for split in self._splitters:
            words = split(words[0]) if len(words) == 1 else [part for word in words for part in split(word)]
        return words

    def _ask(self, word: str) -> tuple[int, ...]:
        # Of the model, not of the whole tokenizer, which might split a word that stands alone once more.
        ids = tuple(token.id for token in self._backend.model.tokenize(word.translate(_BYTE_NAMES)))
        if len(word) <= _LONGEST_WORD:
            if len(self._ids) >= _MOST_WORDS:
                self._ids.clear()
            self._ids[word] = ids
        return ids


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


_PRINTABLE = range(ord("!"), ord("~") + 1)
_BYTE_NAMES = {byte: chr(256 + number) for number, byte in enumerate(n for n in range(128) if n not in _PRINTABLE)}
"""How GPT-2's alphabet writes the bytes of ASCII that are not printable; the others are written as they are."""


def _their_split(backend: tokenizers.Tokenizer, text: str) -> list[str]:
    assert backend.pre_tokenizer is not None
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


def _odd_texts() -> list[str]:
    """A thousand ASCII texts of what patterns tell apart."""
    source = random.Random(0)
    words = ["  ", "\n\n", " \n", "\t ", "'s", "'LL", "'re", "I'm", "don't", "123", "4567", "...", "Ab", "ABc", "aB"]
    atoms = [*(character for character in string.printable if character not in "\v\f\r"), *words * 3]
    return ["".join(source.choices(atoms, k=source.randint(1, 12))) for _ in range(1000)]
