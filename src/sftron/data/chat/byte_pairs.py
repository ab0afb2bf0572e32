"""Encodes with a byte-level BPE tokenizer in tiktoken, in a fraction of the time, if the ids are the same.

tiktoken merges two neighbors whenever their bytes together are a token. The tokenizers library merges the pairs in its
list of merges, in the order of the list. Both give the same ids if each token can be reached in only one way, or if the
list contains every pair that makes it:

- BPE never looks outside a word, and its merges within the bytes of a token depend only on these bytes until a merge
  crosses their boundary. So if the tokenizer makes one token of the bytes `abc` by merging `ab` and `c`, then `a` and
  `bc` are never neighbors, wherever `abc` occurs.
- The order is the same if all merges that make a token are adjacent in the list.

Both conditions are checked for every token. The regular expression that splits a text into words must be one that means
the same in both libraries. In addition, a sample of texts that are hard to split is encoded with both libraries before
tiktoken is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

if TYPE_CHECKING:
    import tiktoken

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The regular expression of the ByteLevel pre-tokenizer, as fixed in the tokenizers library."""
_GPT2_WORDS_AND_DIGITS = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
"""The equivalent of a Digits pre-tokenizer, which makes every digit a word, followed by ByteLevel. Since Digits splits
the text before each digit, white space before a digit counts as white space at the end of a text."""

_CHARACTER = r"(?:\\p\{[A-Z][a-z]?\}|\\[rnsS/]|[A-Za-z' ])"
_ONE_OF = rf"(?:{_CHARACTER}|\[\^?(?:{_CHARACTER}|/)+\])"
_ENGLISH_END = r"'?(?:[sdmt]|\[[sdmt]+\]|ll|ve|re)"
_ENGLISH_ENDS = rf"\(\?i:{_ENGLISH_END}(?:\|{_ENGLISH_END})*\)"
_PART = rf"(?:{_ONE_OF}(?:\+|\{{[1-9](?:,[1-9])?\}})?|{_ENGLISH_ENDS})"
_OPTIONAL_PART = rf"(?:{_ONE_OF}[?*]|{_ENGLISH_ENDS}\?)"
_WORD = rf"{_OPTIONAL_PART}*{_PART}(?:{_OPTIONAL_PART}|{_PART})*"
_MEANS_ONE_THING = re.compile(rf"{_WORD}(?:\|{_WORD})*\|\\s\+\(\?!\\S\)\|\\s\+")
"""Matches the regular expressions that mean the same in both libraries. Others may not: `$` is the end of a line in
Oniguruma, which tokenizers uses, but the end of the text in tiktoken's engine; `{1,3}+` is possessive only in the
latter; `--`, `&&`, escapes, flags, names of scripts and ignored case differ as well; and tiktoken fails on an empty
word."""

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + number): byte for number, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
"""The byte that each character of a vocabulary stands for, in GPT-2's alphabet."""

_NO_ID = -1
"""The id of a byte that a vocabulary lacks; many lack bytes that UTF-8 uses rarely or never."""

_RECENT = "\u1c89\ua7da\U00010d4a\U0001e5d5\U00016d70\U0001e5f1\u1df5\u2427\U0001ccf3\U0001fae9\u0897\u088f\u20c1"
"""Letters, digits and signs of recent versions of Unicode, which one of the libraries may not know yet."""
_HARD_TEXTS = (
    "",
    "I'm sure we'LL say it's DON'T, they'Re; the 'ſ is long, K is Kelvin\u2019s",
    " \n  a \t\tb\r\n\r\n c  \n\n   ",
    "x  12 345 6789   0.5 \n 7\n8 ½²Ⅳ٣४  \t9",
    "\x00\x07\x0b\x0c\x1c\x1f\x7f\x85\xa0\xad\u1680\u180e\u2003\u2028\u202f\u3000\ufeff\u200b\u200d",
    "a\x85\x85b\xa0\xa0c",
    'if (x!=y){return[x++,--y];}//...???\n\t\t@#$%^&*_+~`|\\"<>',
    "Né à Łódź, naïve, e\u0301te\u0301, ΑΣ, Привет, שלום, مرحبا, 你好世界, 日本語テスト, 한국어, हिन्दी",
    "👩‍👩‍👧‍👦🏳️‍🌈 1️⃣ \U000e0041\U000f0041\ue000 ﬁ ﬀ Ｆｕｌｌ１２３ 𝒜𝟙",
    *(f"a{character}b 1{character}2 .{character}! \n{character} {character}" for character in _RECENT),
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 9 + "=" * 400 + " " * 300 + "\n" * 300,
)


class BytePairs:
    """A byte-level BPE tokenizer in tiktoken, including its control tokens."""

    def __init__(self, encoding: tiktoken.Encoding, ids: np.ndarray, sizes: np.ndarray, separator: str) -> None:
        self._encoding, self._ids, self._sizes, self._separator = encoding, ids, sizes, separator
        self._lacks_bytes = bool((ids == _NO_ID).any())

    @classmethod
    def of(
        cls,
        backend: tokenizers.Tokenizer,
        specification: Mapping[str, Any],
        id_of_name: Mapping[str, int],
        separator: str,
    ) -> BytePairs | None:
        """Returns the tokenizer in tiktoken, or None if it is of another kind, if tiktoken's ids may differ, or if
        tiktoken is not installed, as it need not be for checks of other trainers.

        `specification` is the backend as JSON, `id_of_name` has the ids of the control tokens, and `separator` is a
        character that is in none of the texts to encode. A tokenizer with other added tokens gives None.
        """
        try:
            import tiktoken
        except ImportError:
            return None
        pattern = _pattern(specification["pre_tokenizer"] or {})
        model, added = specification["model"], specification["added_tokens"]
        is_normalized = specification["normalizer"] in (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []})
        affixes = ("continuing_subword_prefix", "end_of_word_suffix", "dropout", "byte_fallback")
        is_plain_bpe = model["type"] == "BPE" and not any(model.get(name) for name in affixes)
        if pattern is None or not is_normalized or not is_plain_bpe:
            return None
        if any(t["content"] not in id_of_name or t["single_word"] or t["lstrip"] or t["rstrip"] for t in added):
            return None
        tokens = _tokens_in_order(model, set(id_of_name))
        if tokens is None:
            return None
        ranks = {bytes(map(_BYTE_OF.__getitem__, token)): rank for rank, token in enumerate(tokens)}
        special = {name: len(ranks) + number for number, name in enumerate([*id_of_name, separator])}
        try:
            encoding = tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        except ValueError:  # from the regular expression
            return None
        vocabulary = model["vocab"]
        ids = np.array([*(vocabulary.get(token, _NO_ID) for token in tokens), *id_of_name.values()], dtype=np.int64)
        sizes = np.array([*map(len, tokens), *(len(name.encode()) for name in id_of_name)], dtype=np.int64)
        pairs = cls(encoding, ids, sizes, separator)
        return pairs if all(pairs._agrees(backend, text) for text in (*_HARD_TEXTS, "".join(id_of_name))) else None

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the backend's ids of all texts, int64 [n], the number of bytes of each, int64 [n], and the number of
        ids of each text, int64 [texts].

        The backend's normalizer may not change the texts. Raises ValueError if a text has a byte that the vocabulary
        lacks, or a word that is too long for the regular expression engine.
        """
        joined = self._separator.join(texts)
        ranks = self._encoding.encode_to_numpy(joined, allowed_special="all", disallowed_special=())
        is_separator = ranks == len(self._ids)
        ends = np.append(np.flatnonzero(is_separator), len(ranks))
        ranks = ranks[~is_separator]
        ids = self._ids[ranks]
        if self._lacks_bytes and (ids == _NO_ID).any():
            raise ValueError("the text holds a byte that the vocabulary lacks")
        return ids, self._sizes[ranks], np.diff(ends, prepend=-1) - 1

    def _agrees(self, backend: tokenizers.Tokenizer, text: str) -> bool:
        if backend.normalizer is not None and backend.normalizer.normalize_str(text) != text:
            return True
        try:
            return self.encode([text])[0].tolist() == backend.encode(text, add_special_tokens=False).ids
        except ValueError:
            return True


def _pattern(pre_tokenizer: Mapping[str, Any]) -> str | None:
    """Returns the regular expression of words, or None if no single one has the same meaning in both libraries."""
    match pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return _GPT2_WORDS
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        ]:
            return _GPT2_WORDS_AND_DIGITS
        case [
            {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ] if _MEANS_ONE_THING.fullmatch(pattern):
            return pattern
    return None


def _tokens_in_order(model: Mapping[str, Any], names: set[str]) -> list[str] | None:
    """Returns all bytes, then the tokens in the order of their merges; None if tiktoken could merge differently."""
    vocabulary: Mapping[str, int] = model["vocab"]
    pairs = [(left, right) for left, right in model["merges"]]
    tokens = list(_BYTE_OF)
    for left, right in pairs:
        if left + right != tokens[-1]:
            tokens.append(left + right)
    known = set(tokens)
    if len(known) != len(tokens) or not known <= vocabulary.keys() | _BYTE_OF.keys():
        return None
    if model.get("ignore_merges"):
        # A word that is a token is not split, so all tokens of the vocabulary must be among these.
        is_followed = vocabulary.keys() - names <= known
        unmerged = _ambiguous(tokens, set(pairs)) if is_followed else tokens
        return None if unmerged else tokens
    bpe = tokenizers.models.BPE(vocab=dict(vocabulary), merges=pairs)  # pyright: ignore[reportArgumentType]
    unreached = [token for token in tokens if len(bpe.tokenize(token)) != 1]
    return None if _ambiguous(unreached, set(pairs)) else tokens


def _ambiguous(tokens: Sequence[str], pairs: set[tuple[str, ...]]) -> list[str]:
    """Returns the tokens that are the concatenation of two others whose pair is not in the list of merges."""
    made = {left + right for left, right in pairs} | set(_BYTE_OF)
    return [
        token
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in made and token[cut:] in made and (token[:cut], token[cut:]) not in pairs
    ]
