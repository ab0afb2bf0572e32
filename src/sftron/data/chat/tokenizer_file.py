"""Compares the tokenizer that transformers builds with the one that tokenizer.json describes.

For some classes and model types, transformers takes only the vocabulary from tokenizer.json and replaces the other
pieces by those of a class, so that it gives other ids than every other reader of the file.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

_FILE = "tokenizer.json"
_PIECES = ("normalizer", "pre_tokenizer", "model", "decoder", "post_processor")
_MODEL_SETTINGS = (
    *("unk_token", "fuse_unk", "byte_fallback", "ignore_merges"),
    *("continuing_subword_prefix", "end_of_word_suffix"),
)
_SEED, _NUM_TEXTS, _MOST_WORDS = 0, 300, 12
_LONGEST_TEXT, _LONGEST_PIECE = 60, 240  # characters
_WORDS = r"""Loop, please. for i in x:|print(i) It's WE'LL don'T camelCase HTTPServer snake_case|0|12|345|6789|1234567
3.14|-5 1,000 $9.99 x2|2x|http://a.b/c?d=e#f|{"a": [1, 2]}|<b>c</b>|'''|```|...|---|!!|\alpha|naïve|Straße|Ünïcödé ÀÉÎ
½ ² Ⅷ|русский|Ελλ|עִבְרִית|العَرَبِيَّة|हिन्दी|ไทย|日本語|한국어|中文。|，|🙂|👩‍👩‍👧|ﬁne|ＡＢ|１２|∑ € “q” ‘s’ – —|▁|Ġ"""
_PARTS = (*_WORDS.replace("\n", "|").split("|"), "nai\u0308ve", "e\u0301", "\u0660\u0661", "\u200b", "\ufeff", "\x07")
_SPACES = (
    "",
    "",
    "",
    " ",
    " ",
    " ",
    "  ",
    "    ",
    "\n",
    "\n\n",
    " \n",
    "\n ",
    "\r\n",
    "\t",
    "\xa0",
    "\u3000",
    "\u2028",
)


def difference_from_file(tokenizer: Any, path: str | Path) -> str:
    """Says how a tokenizer of transformers differs from the tokenizer.json that it was loaded from; "" if it does not.

    Args:
        tokenizer: One that is not fast has no pieces to compare.
        path: A folder, or a repository in the Hub's cache. Without tokenizer.json, only transformers reads it.
    """
    from transformers.utils.hub import cached_file

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return ""
    try:
        file = cached_file(str(path), _FILE, local_files_only=True)
    except (OSError, ValueError):
        return ""
    found = "" if file is None else difference(backend, Tokenizer.from_file(file), ("transformers", "the file"))
    if not found:
        return ""
    return (
        f"transformers builds a {type(tokenizer).__name__} from {path}, but its {_FILE} says otherwise: {found}; set "
        '"tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json, or, where model_type in config.json '
        "decides the class, install another version of transformers"
    )


def difference(one: Tokenizer, other: Tokenizer, names: tuple[str, str]) -> str:
    """Names a piece in which two tokenizers differ, with both values and a text that shows it; "" if none differs.

    Pieces that are written in other ways and do the same with all probing texts are equal. The special tokens that a
    post-processor adds at the ends are a setting of tokenizer_config.json, and no conversation has them.
    """
    pieces = {name: (_piece(one, name), _piece(other, name)) for name in _PIECES}
    differing = [name for name, (own, its) in pieces.items() if own != its]
    with _plain(one), _plain(other):
        for text in _probing_texts(one, other):
            if shown := _differs_on(text, one, other, differing):
                break
        else:
            return ""
    piece = differing[0] if differing else "vocabulary"
    values = [_shortened(each, _LONGEST_PIECE) for each in pieces.get(piece, shown)]
    stated = " and ".join(f"{value} in {name}" for name, value in zip(names, values, strict=True))
    counts = " and ".join(f"{value} in {name}" for name, value in zip(names, shown, strict=True))
    return f"the {piece} is {stated}, so that {_shortened(repr(text), _LONGEST_TEXT)} is {counts}"


def _differs_on(text: str, one: Tokenizer, other: Tokenizer, differing: list[str]) -> tuple[str, str] | None:
    """Returns what the two tokenizers make of a text, if that differs."""
    (own, error), (its, its_error) = _encode(one, text), _encode(other, text)
    if error or its_error:  # an unknown token that is not in the vocabulary
        return None if error and its_error else (error or f"{len(own)} ids", its_error or f"{len(its)} ids")
    found = (f"{len(own)} ids", f"{len(its)} ids") if len(own) != len(its) else (f"ids {own}", f"ids {its}")
    is_equal = own == its
    # No merge of a small vocabulary may cross the places where two pre-tokenizers split, and others do.
    if is_equal and not {"normalizer", "pre_tokenizer"}.isdisjoint(differing):
        words, its_words = _split(one, text), _split(other, text)
        found, is_equal = (f"words {words}", f"words {its_words}"), words == its_words
    if is_equal and "decoder" in differing:
        decoded = [each.decode(own, skip_special_tokens=False) for each in (one, other)]
        found, is_equal = (repr(decoded[0]), repr(decoded[1])), decoded[0] == decoded[1]
    return None if is_equal else (_shortened(found[0], _LONGEST_PIECE), _shortened(found[1], _LONGEST_PIECE))


def _encode(backend: Tokenizer, text: str) -> tuple[list[int], str]:
    """Returns the ids of a text, or the error of the tokenizers library."""
    try:
        return backend.encode(text, add_special_tokens=False).ids, ""
    except Exception as error:  # the library has no class of its own
        return [], f"refused ({error})"


def _piece(backend: Tokenizer, name: str) -> str:
    if name == "model":  # without its vocabulary and its merges
        model = backend.model
        settings = {each: getattr(model, each) for each in _MODEL_SETTINGS if hasattr(model, each)}
        return f"{type(model).__name__} with {settings}"
    piece = getattr(backend, name)
    return "null" if piece is None else piece.__getstate__().decode()


def _split(backend: Tokenizer, text: str) -> list[str]:
    text = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    return (
        [text] if backend.pre_tokenizer is None else [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    )


@contextmanager
def _plain(backend: Tokenizer) -> Iterator[None]:
    """Turns off what a tokenizer remembers of its last call, and what tokenizer_config.json sets."""
    truncation, padding, splits = backend.truncation, backend.padding, backend.encode_special_tokens
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    try:
        yield
    finally:
        backend.encode_special_tokens = splits
        if truncation:
            backend.enable_truncation(**truncation)
        if padding:
            backend.enable_padding(**padding)


def _probing_texts(one: Tokenizer, other: Tokenizer) -> Iterator[str]:
    """Yields texts in which words of many scripts, numbers, marks, spaces and a control token meet in many orders."""
    of_one, of_other = one.get_added_tokens_decoder(), other.get_added_tokens_decoder()
    both = [
        str(each)
        for n, each in of_one.items()
        if each.special and n in of_other and _flags(each) == _flags(of_other[n])
    ]
    chosen = random.Random(_SEED)
    yield from (text for part in _PARTS for text in (part, f" {part}", f"{part}\n"))
    for _ in range(_NUM_TEXTS):
        words = [chosen.choice(_SPACES) + chosen.choice(_PARTS) for _ in range(chosen.randint(1, _MOST_WORDS))]
        yield "".join([*words, *both[:1], *words, chosen.choice(_SPACES)])


def _flags(token: AddedToken) -> tuple[str, bool, bool, bool, bool]:
    return token.content, token.lstrip, token.rstrip, token.single_word, token.normalized


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
