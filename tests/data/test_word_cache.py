"""The ids of words, remembered: exactly the tokenizer's own, or none."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from sftron.data.word_cache import WordCache

_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST
DEEPSEEK_WORDS = r"[!-/][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split_by(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS = {
    "GPT-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "Llama 3": split_by(LLAMA3_WORDS),
    "DeepSeek": split_by(r"\p{N}{1,3}", DEEPSEEK_WORDS),
    "digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}

texts = st.lists(
    st.sampled_from(
        ["the ", " the", "'s", "'LL", "don't", "12", "345", "\n", "\n\n", "  ", "\t", "...", "é", "“", "²", "É"]
    )
    | st.text(st.characters(codec="utf-8"), max_size=4)
    | st.text(st.characters(max_codepoint=0x17F), max_size=8)
).map("".join)


def backend_like(tokenizer: PreTrainedTokenizerBase, pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """The tests' vocabulary and merges under another way to split."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]]
    backend = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoders.ByteLevel()
    return backend


def cache_of(backend: Tokenizer) -> WordCache | None:
    return WordCache.of(backend, json.loads(backend.to_str()))


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_ids_are_the_tokenizers_own_wherever_they_are_given(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    backend = backend_like(tokenizer, PRE_TOKENIZERS[name])
    cache = cache_of(backend)
    assert cache is not None

    @given(text=texts)
    def check(text: str) -> None:
        ids = cache.encode(text)
        assert ids is None or ids == backend.encode(text, add_special_tokens=False).ids
        assert ids is not None or not text.isascii() or any(ord(character) < 32 for character in text) or "\x7f" in text

    check()


def test_european_text_is_followed_and_other_scripts_are_left_to_the_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    cache = cache_of(backend_like(tokenizer, PRE_TOKENIZERS["Llama 3"]))
    assert cache is not None

    assert cache.encode("“Né à Łódź”, she said — 3½ € …") is not None
    assert cache.encode("你好") is None
    assert cache.encode("bell\x07") is None


def test_a_tokenizer_that_cannot_be_followed_has_no_cache(tokenizer: PreTrainedTokenizerBase) -> None:
    added = backend_like(tokenizer, PRE_TOKENIZERS["GPT-2"])
    added.add_tokens([AddedToken("stop", normalized=False)])
    lstrip = backend_like(tokenizer, PRE_TOKENIZERS["GPT-2"])
    lstrip.add_special_tokens([AddedToken("\U000f0000", lstrip=True)])
    unknown_class = backend_like(tokenizer, split_by(r"\p{Han}+|."))
    prefix = backend_like(tokenizer, pre_tokenizers.ByteLevel(add_prefix_space=True))

    assert [cache_of(backend) for backend in (added, lstrip, unknown_class, prefix)] == [None] * 4
