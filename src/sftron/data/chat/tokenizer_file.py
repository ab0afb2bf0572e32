"""Compares the tokenizer that transformers builds with the one that tokenizer.json describes.

For some classes and model types, transformers takes only the vocabulary from tokenizer.json and replaces the other
pieces with a class's own. It then gives different ids than every other reader of the file.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

_FILE, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_READS_THE_FILE = "PreTrainedTokenizerFast"
"""The class for which transformers takes all pieces from the file."""
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
    """Describes how a tokenizer of transformers differs from its tokenizer.json; "" if it does not.

    Args:
        tokenizer: The tokenizer; a slow one has no pieces to compare.
        path: A folder, or a repository in the Hub's cache. Without tokenizer.json, only transformers reads it.
    """
    backend, file = getattr(tokenizer, "backend_tokenizer", None), _file_of(path, _FILE)
    if not isinstance(backend, Tokenizer) or file is None:
        return ""
    if not (found := _from_file(backend, file)):
        return ""
    remedy = (
        f"install another version of transformers: in {version('transformers')}, model_type in config.json decides the "
        "class, whatever tokenizer_config.json says"
    )
    if _reads_file_as(_READS_THE_FILE, path, file):
        remedy = (
            f'set "tokenizer_class": "{_READS_THE_FILE}" in tokenizer_config.json (or, for a Hub model, in a copy of '
            "its tokenizer's files, and give the copy as tokenizer.path)"
        )
    name = type(tokenizer).__name__
    return f"transformers builds a {name} from {path}, which differs from its {_FILE}: {found}; {remedy}"


def _from_file(built: Tokenizer, file: Path) -> str:
    return difference(built, Tokenizer.from_file(str(file)), ("transformers", "the file"))


def _file_of(path: str | Path, name: str) -> Path | None:
    from transformers.utils.hub import cached_file

    try:
        file = cached_file(str(path), name, local_files_only=True)
    except (OSError, ValueError):
        return None
    return Path(file) if file else None


def _reads_file_as(class_name: str, path: str | Path, file: Path) -> bool:
    """Returns whether transformers would build the tokenizer of the file if tokenizer_config.json named this class."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as name:
        folder, settings = Path(name), _file_of(path, _SETTINGS)
        shutil.copyfile(file, folder / _FILE)
        tree = json.loads(settings.read_text(encoding="utf-8")) if settings else {}
        (folder / _SETTINGS).write_text(json.dumps({**tree, "tokenizer_class": class_name}), encoding="utf-8")
        if config := _file_of(path, "config.json"):
            shutil.copyfile(config, folder / "config.json")
        built = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return not _from_file(built.backend_tokenizer, file)


def difference(one: Tokenizer, other: Tokenizer, names: tuple[str, str]) -> str:
    """Names a piece in which two tokenizers differ, with both values and a text that shows it; "" if they agree.

    Pieces count as equal if they do the same with all probing texts, however they are written. The special tokens that
    a post-processor adds at the ends are a setting of tokenizer_config.json, and no conversation has them.
    """
    pieces = {name: (_piece(one, name), _piece(other, name)) for name in _PIECES}
    differing = [name for name, (own, its) in pieces.items() if own != its]
    with _plain(one), _plain(other):
        shown = _shown(one, other, differing)
    if shown is None:
        return ""
    text, of_one, of_other = shown
    piece = differing[0] if differing else "vocabulary"
    values = [_shortened(each, _LONGEST_PIECE) for each in pieces.get(piece, (of_one, of_other))]
    stated = " and ".join(f"{value} in {name}" for name, value in zip(names, values, strict=True))
    made = [_shortened(each, _LONGEST_PIECE) for each in (of_one, of_other)]
    counts = " and ".join(f"{value} in {name}" for name, value in zip(names, made, strict=True))
    return f"the {piece} is {stated}, so that {_shortened(repr(text), _LONGEST_TEXT)} is {counts}"


def _shown(one: Tokenizer, other: Tokenizer, differing: list[str]) -> tuple[str, str, str] | None:
    """Returns a text that the two treat differently, and what each makes of it."""
    compared: dict[str, Callable[[Tokenizer, str], list[Any] | str]] = {"ids": _ids}  # first, as they prove the most
    if not {"normalizer", "pre_tokenizer"}.isdisjoint(differing):
        # No merge of a small vocabulary may cross the places where two pre-tokenizers split, and others do.
        compared["words"] = _split
    if "decoder" in differing:
        compared["text"] = lambda backend, text: repr(backend.decode([*_ids(backend, text)], skip_special_tokens=False))
    texts = [*_probing_texts(one, other)]
    for (kind, made), text in product(compared.items(), texts):
        of_one, of_other = made(one, text), made(other, text)
        if of_one != of_other:
            are_counted = kind == "ids" and len(of_one) != len(of_other)
            said = [f"{len(each)} ids" if are_counted else f"{kind} {each}" for each in (of_one, of_other)]
            return text, said[0], said[1]
    return None


def _ids(backend: Tokenizer, text: str) -> list[int]:
    """Returns the ids of a text; none if the library refuses it, for an unknown token outside the vocabulary."""
    try:
        return backend.encode(text, add_special_tokens=False).ids
    except Exception:  # the library has no class of its own
        return []


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
    """Resets what a tokenizer remembers of its last call, and what tokenizer_config.json sets."""
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
