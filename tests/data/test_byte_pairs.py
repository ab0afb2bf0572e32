"""tiktoken in place of a tokenizer: exactly its ids, or not used."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from sftron.data.chat import byte_pairs
from sftron.data.chat.byte_pairs import BytePairs
from sftron.data.chat.control_tokens import ControlTokens

_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3_WORDS = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
GPT4O_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_SHORT}?|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_SHORT}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35_WORDS = (
    _SHORT + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4_WORDS = LLAMA3_WORDS.replace(_SHORT, "'(?i:[sdmt]|ll|ve|re)")
TEKKEN_WORDS = GPT4O_WORDS.replace(_SHORT + "?", "").replace("{1,3}", "")


def split_by(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
PRE_TOKENIZERS = {
    "GPT-2": GPT2,
    "Llama 3": split_by(LLAMA3_WORDS),
    "GPT-4o": split_by(GPT4O_WORDS),
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
}

texts = st.lists(
    st.sampled_from(
        ["the ", " the", "'s", "'LL", "don't", "12", "345", "\n", "\n\n", "  ", "\t", "...", "é", "“", "²", "ſ", "\x85"]
    )
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Co"]), max_size=4)
    | st.text(st.characters(max_codepoint=0x17F), max_size=8)
).map("".join)


def backend_of(bpe: models.BPE, pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    backend = Tokenizer(bpe)
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoders.ByteLevel()
    return backend


def backend_like(tokenizer: PreTrainedTokenizerBase, pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """The tests' vocabulary and merges under another way to split."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]]
    return backend_of(models.BPE(vocab=model["vocab"], merges=merges), pre_tokenizer)


def small_backend(merges: list[tuple[str, str]], *, ignore_merges: bool = False, extra: str = "") -> Tokenizer:
    tokens = dict.fromkeys([*byte_pairs._BYTE_OF, *(left + right for left, right in merges), *extra.split()])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return backend_of(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges), GPT2)


def pairs_of(backend: Tokenizer) -> BytePairs | None:
    return BytePairs.of(backend, json.loads(backend.to_str()), {}, "\U000ffffd")


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_ids_are_the_tokenizers_own(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    backend = backend_like(tokenizer, PRE_TOKENIZERS[name])
    pairs = pairs_of(backend)
    assert pairs is not None

    @given(batch=st.lists(texts, min_size=1, max_size=3))
    def check(batch: list[str]) -> None:
        ids, sizes, counts = pairs.encode(batch)
        wanted = [backend.encode(text, add_special_tokens=False).ids for text in batch]
        assert counts.tolist() == [len(each) for each in wanted]
        assert ids.tolist() == [token_id for each in wanted for token_id in each]
        assert sizes.sum() == sum(len(text.encode()) for text in batch)

    check()


ABC = [("b", "c"), ("a", "b"), ("ab", "c")]
"""The tokenizer makes `a` and `bc` of "abc", and never `abc`; tiktoken would join these two."""


def test_a_vocabulary_that_tiktoken_would_merge_in_another_way_is_left_to_the_tokenizer() -> None:
    every_split = [("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c")]
    assert small_backend(ABC).encode("abc").tokens == ["a", "bc"]
    assert pairs_of(small_backend(ABC)) is None
    assert pairs_of(small_backend(every_split)) is not None
    assert pairs_of(small_backend([("a", "b"), ("ab", "c")])) is not None
    # The merges of one token stand apart, so that there is no one place in the order for it.
    assert pairs_of(small_backend([("a", "b"), ("b", "c"), ("ab", "c"), ("x", "y"), ("a", "bc")])) is None
    # Whole words first: tokens that no merge makes would be merged.
    assert pairs_of(small_backend(every_split, ignore_merges=True)) is not None
    assert pairs_of(small_backend(ABC, ignore_merges=True)) is None
    assert pairs_of(small_backend(every_split, ignore_merges=True, extra="xyz")) is None
    assert pairs_of(small_backend(every_split, extra="xyz")) is not None


def test_a_tokenizer_of_another_kind_is_left_to_itself(tokenizer: PreTrainedTokenizerBase) -> None:
    added, lstrip = backend_like(tokenizer, GPT2), backend_like(tokenizer, GPT2)
    added.add_tokens([AddedToken("stop", normalized=False)])
    lstrip.add_special_tokens([AddedToken("\U000f0000", lstrip=True)])
    others = [
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        split_by(r"\p{Han}+|."),
        split_by(r"\p{N}{1,3}+|" + LLAMA3_WORDS),
        split_by(r"\p{N}", LLAMA3_WORDS),
    ]
    assert not any(map(pairs_of, [added, lstrip, *(backend_like(tokenizer, other) for other in others)]))


def test_a_split_that_the_two_libraries_do_not_read_alike_is_noticed(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pairs_of(backend_like(tokenizer, GPT2)) is not None
    monkeypatch.setattr(byte_pairs, "_GPT2_WORDS", LLAMA3_WORDS)
    assert pairs_of(backend_like(tokenizer, GPT2)) is None


REST_OF_SPACES = r"|\s+(?!\S)|\s+"
WORDS = LLAMA3_WORDS.removesuffix(REST_OF_SPACES)
NAME_OF = {byte: name for name, byte in byte_pairs._BYTE_OF.items()}
ALPHABET = " \n\taAs'12!"
PAIRS = [(NAME_OF[ord(a)], NAME_OF[ord(b)]) for a in ALPHABET for b in ALPHABET]
"""Merges of any two characters of the alphabet, so that every other split gives other ids."""

parts = st.sampled_from(
    [
        r"\p{L}",
        r"\p{N}",
        r"\p{Lu}",
        r"\p{M}",
        r"\s",
        r"\S",
        r"\n",
        " ",
        "'",
        "a",
        r"[\r\n]",
        r"[^\s\p{L}]",
        r"[^\r\n\p{N}]",
    ]
)
quantified = st.tuples(parts, st.sampled_from(["", "?", "*", "+", "{2}", "{1,3}"])).map("".join)
whole_words = st.lists(quantified | st.sampled_from(["(?i:'s|'t|'ll)", "'(?i:[sdmt]|re)?"]), min_size=1, max_size=4)
patterns = st.lists(whole_words.map("".join), min_size=1, max_size=4).map("|".join)


def test_a_pattern_that_is_taken_over_splits_every_text_as_the_tokenizer_does() -> None:
    """Before Llama 3's, so that all text is in some word. Those that may match no character are left."""
    is_taken = Counter[bool]()

    @given(words=patterns, text=st.text(st.sampled_from(ALPHABET + "é\u0301²中S\r\x85"), max_size=40))
    def check(words: str, text: str) -> None:
        backend = small_backend(PAIRS)
        backend.pre_tokenizer = split_by(f"{words}|{LLAMA3_WORDS}")
        renamed = ControlTokens(backend).renamed_tokenizer
        assert renamed.encode([text])[0].ids.tolist() == backend.encode(text).ids
        is_taken[renamed.byte_pairs is not None] += 1

    check()
    assert is_taken[True] >= 5


@pytest.mark.parametrize("words", [LLAMA3_WORDS, GPT4O_WORDS, QWEN35_WORDS, GPT4_WORDS, TEKKEN_WORDS])
def test_the_patterns_of_published_tokenizers_are_taken_over(tokenizer: PreTrainedTokenizerBase, words: str) -> None:
    assert pairs_of(backend_like(tokenizer, split_by(words))) is not None


@pytest.mark.parametrize(
    "words",
    [
        *(
            r"\s+$",
            r"^\s+",
            r"\p{L}*",
            r"\p{L}+?",
            r"\p{L}++",
            r"\p{N}{1,3}+",
            r"\p{N}{1,}+",
            r"\p{N}{0,3}",
            r"[ -~]",
            r"[!--]",
            r"(?i:ss)",
        ),
        *(
            r"\b\p{L}",
            r"\p{Han}+",
            r".",
            r"(?<=a)b",
            r"(?!a)b",
            r"a|",
            r"(?m:a)",
            r"[[a]]",
            r"\d+",
            r"\w+",
            r"\h",
            r"a\z",
        ),
    ],
)
def test_a_pattern_that_may_mean_two_things_is_left_to_the_tokenizer(words: str) -> None:
    backend = small_backend(PAIRS)
    backend.pre_tokenizer = split_by(f"{WORDS}|{words}{REST_OF_SPACES}")
    assert pairs_of(backend) is None


def test_what_tiktoken_cannot_encode_is_encoded_by_the_tokenizer(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = tokenizer.backend_tokenizer
    renamed = ControlTokens(backend).renamed_tokenizer
    assert renamed.byte_pairs is not None
    batch = ["Hi there", "", "naïve e\u0301 中"]
    of_each = [backend.encode(text, add_special_tokens=False).ids for text in batch]
    assert [tokens.ids.tolist() for tokens in renamed.encode(batch)] == of_each

    def fail(*_: object) -> None:
        raise ValueError("backtrack limit exceeded")

    monkeypatch.setattr(BytePairs, "encode", fail)
    assert [tokens.ids.tolist() for tokens in renamed.encode(batch)] == of_each


def test_a_text_that_the_normalizer_changes_is_encoded_by_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.normalizer = normalizers.NFC()
    renamed = ControlTokens(backend).renamed_tokenizer
    assert renamed.byte_pairs is not None
    for text in ("naïve", "nai\u0308ve", "\u1100\u1161", "\u212b"):
        assert renamed.encode([text])[0].ids.tolist() == backend.encode(text, add_special_tokens=False).ids


def test_a_byte_that_the_vocabulary_lacks_is_left_to_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    specification = json.loads(tokenizer.backend_tokenizer.to_str())
    missing = next(name for name, byte in byte_pairs._BYTE_OF.items() if byte == 0xF3)  # of U+E0041 alone, here
    specification["model"]["vocab"].pop(missing)
    specification["model"]["merges"] = [m for m in specification["model"]["merges"] if missing not in "".join(m)]
    backend = Tokenizer.from_str(json.dumps(specification))
    renamed = ControlTokens(backend).renamed_tokenizer
    assert renamed.byte_pairs is not None
    (tokens,) = renamed.encode(["a\U000e0041b"])
    assert tokens.ids.tolist() == backend.encode("a\U000e0041b", add_special_tokens=False).ids


def test_the_tokens_of_a_text_do_not_depend_on_the_texts_next_to_it(tokenizer: PreTrainedTokenizerBase) -> None:
    """The second text needs the tokenizer's offsets, in which the bytes of one character have one position."""
    backend = backend_like(tokenizer, GPT2)
    backend.normalizer = normalizers.NFC()
    renamed = ControlTokens(backend).renamed_tokenizer
    assert renamed.byte_pairs is not None
    texts = ["中 \U0001f600", "e\u0301te\u0301", "Hi"]
    together, alone = renamed.encode(texts), [renamed.encode([text])[0] for text in texts]
    assert 3 in alone[1].starts  # "t" begins after the two bytes of the first accent
    for text, tokens, of_text in zip(texts, together, alone, strict=True):
        assert tokens.ids.tolist() == backend.encode(text).ids
        assert all(np.array_equal(one, other) for one, other in zip(tokens, of_text, strict=True))
