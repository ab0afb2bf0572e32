"""The tokenizer that transformers builds is the one of tokenizer.json, or is refused."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from sftron.data.chat.pretrained import load_tokenizer
from sftron.data.chat.tokenizer_file import difference, difference_from_file

ASSETS = Path(__file__).parents[1] / "assets"
_OLMO = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _copy(folder: Path, name: str, class_name: str, model_type: str | None, regex: str | None) -> Path:
    """Writes a tokenizer of the assets with another class, model type and pre-tokenizer."""
    shutil.copytree(ASSETS / name, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": class_name}))
    if regex:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        words = pre_tokenizers.Split(Regex(regex), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        backend.save(str(folder / "tokenizer.json"))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.parametrize("model_type", [None, "llama", "qwen3", "gemma"])
@pytest.mark.parametrize(
    ("name", "class_name", "regex", "piece"),
    [
        ("tokenizer", "GPT2Tokenizer", _OLMO, "pre_tokenizer"),
        ("tokenizer", "Qwen2Tokenizer", _OLMO.replace(r"{1,3}", ""), "normalizer"),
        ("tokenizer", "GPTNeoXTokenizerFast", None, "normalizer"),
        ("tokenizer_sentencepiece", "LlamaTokenizer", None, "normalizer"),
        ("tokenizer_sentencepiece", "GPT2TokenizerFast", None, "normalizer"),
    ],
)
def test_replaced_pieces_are_refused_and_the_remedy_helps(
    tmp_path: Path, name: str, class_name: str, regex: str | None, piece: str, model_type: str | None
) -> None:
    folder = _copy(tmp_path / "replaced", name, class_name, model_type, regex)
    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    built = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    if built.to_str() == file.to_str():
        pytest.fail("this version of transformers replaces nothing: take another case")
    with pytest.raises(ValueError, match=f"(?s)transformers builds a .*the {piece} is .* in the file; set"):
        load_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    loaded, _ = load_tokenizer(folder, ["<new>"])
    text = "Loop, please.\n\nShort. 12345  x"
    assert loaded.backend_tokenizer.encode(text).ids == file.encode(text).ids


@pytest.mark.parametrize("model_type", [None, "llama", "qwen3", "olmo2", "granite"])
@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_sentencepiece"])
@pytest.mark.parametrize("regex", [None, _OLMO])
def test_sound_tokenizers_load(tmp_path: Path, name: str, regex: str | None, model_type: str | None) -> None:
    folder = _copy(tmp_path / "sound", name, "PreTrainedTokenizerFast", model_type, regex)
    loaded, _ = load_tokenizer(folder)
    loaded("Truncated and padded texts", truncation=True, padding="max_length", max_length=4)
    assert difference_from_file(loaded, folder) == ""
    assert loaded.backend_tokenizer.truncation["max_length"] == 4, "the comparison leaves the tokenizer as it was"


def test_pieces_that_are_written_otherwise_and_do_the_same_are_equal() -> None:
    one, other = (Tokenizer.from_file(str(ASSETS / "tokenizer" / "tokenizer.json")) for _ in range(2))
    one.decoder = decoders.ByteLevel(add_prefix_space=False)
    one.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    one.normalizer = normalizers.Sequence([])
    assert difference(one, other, ("one", "other")) == ""
    one.decoder, one.normalizer, one.pre_tokenizer = decoders.Fuse(), other.normalizer, other.pre_tokenizer
    assert difference(one, other, ("one", "other")).startswith("the decoder is")
    one.decoder, one.normalizer = other.decoder, normalizers.NFD()
    assert difference(one, other, ("one", "other")).startswith("the normalizer is")


_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
_DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTES])
_SPLIT = [pre_tokenizers.Split(Regex(_QWEN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
_TO_MARKS = normalizers.Replace(" ", "▁")
_LLAMA_2 = normalizers.Sequence([normalizers.Prepend("▁"), _TO_MARKS])
_FROM_MARKS = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
_LLAMA_DECODER = decoders.Sequence([*_FROM_MARKS, decoders.Strip(" ", 1, 0)])
PUBLISHED = {  # name: normalizer, pre-tokenizer, decoder, settings, model type
    "Mistral 7B": (_LLAMA_2, None, _LLAMA_DECODER, {"tokenizer_class": "LlamaTokenizer", "legacy": True}, "mistral"),
    "Phi-3": (_LLAMA_2, None, _LLAMA_DECODER, {"tokenizer_class": "LlamaTokenizer", "legacy": False}, "phi3"),
    "Llama 2, saved without legacy": (
        None,
        pre_tokenizers.Metaspace("▁", "first", split=False),
        _LLAMA_DECODER,
        {"tokenizer_class": "LlamaTokenizer", "legacy": False},
        "llama",
    ),
    "Gemma": (
        _TO_MARKS,
        pre_tokenizers.Split(" ", "merged_with_previous"),
        decoders.Sequence(_FROM_MARKS),
        {"tokenizer_class": "GemmaTokenizer"},
        "gemma2",
    ),
    **{
        f"{model_type} of {name}": (
            normalizers.NFC(),
            pre_tokenizers.Sequence(_SPLIT),
            decoders.ByteLevel(),
            {"tokenizer_class": name},
            model_type,
        )
        for model_type in ("qwen2", "qwen3")
        for name in ("Qwen2Tokenizer", "Qwen2TokenizerFast")
    },
    "GPT-2": (None, _BYTES, decoders.ByteLevel(), {"tokenizer_class": "GPT2Tokenizer"}, "gpt2"),
    "Granite 3": (None, _DIGITS, decoders.ByteLevel(), {"tokenizer_class": "GPT2Tokenizer"}, "granite"),
    "Pythia": (normalizers.NFC(), _BYTES, decoders.ByteLevel(), {"tokenizer_class": "GPTNeoXTokenizer"}, "gpt_neox"),
    "TinyLlama": (_LLAMA_2, None, _LLAMA_DECODER, {"tokenizer_class": "LlamaTokenizer", "legacy": False}, "llama"),
    "Vicuna": (_LLAMA_2, None, _LLAMA_DECODER, {"tokenizer_class": "LlamaTokenizer", "legacy": True}, "llama"),
    "SmolLM2": (None, _DIGITS, decoders.ByteLevel(), {"tokenizer_class": "GPT2Tokenizer"}, "llama"),
    "another one's tokenizer in a Qwen 2": (
        *(None, _DIGITS, decoders.ByteLevel()),
        *({"tokenizer_class": "PreTrainedTokenizerFast"}, "qwen2"),
    ),
}
"""The pieces of tokenizer.json and the settings of popular models on the Hub."""
REFUSED = {
    "TinyLlama": 'ids in the file; set "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json',
    "Vicuna": 'ids in the file; set "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json',
    "SmolLM2": 'in the file; set "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json',
    "another one's tokenizer in a Qwen 2": "in the file; install another version of transformers",
}
"""Those of which transformers gives other ids than the file for real text: after a control token, or before a digit."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tokenizers_load_or_are_refused_with_a_remedy_that_helps(tmp_path: Path, name: str) -> None:
    normalizer, pre_tokenizer, decoder, settings, model_type = PUBLISHED[name]
    is_bytes = "ByteLevel" in str(decoder)
    folder = tmp_path / "published"
    shutil.copytree(ASSETS / ("tokenizer" if is_bytes else "tokenizer_sentencepiece"), folder)
    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    file.normalizer, file.pre_tokenizer, file.decoder = normalizer, pre_tokenizer, decoder
    file.save(str(folder / "tokenizer.json"))
    found = json.loads((folder / "tokenizer_config.json").read_text()) | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(found))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if name not in REFUSED:
        loaded, _ = load_tokenizer(folder)
    else:
        with pytest.raises(
            ValueError, match=r"(?s)transformers builds a .* differs from its tokenizer\.json: "
        ) as refused:
            load_tokenizer(folder)
        assert REFUSED[name] in str(refused.value)
        if "install" in REFUSED[name]:
            return
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / "tokenizer_config.json").write_text(json.dumps(found))
        loaded, _ = load_tokenizer(folder)
    for text in ("Loop, please.\n\n12345  x", "</s>\n<|assistant|>  2", " \n\n1. It's"):
        ids, wanted = (each.encode(text, add_special_tokens=False).ids for each in (loaded.backend_tokenizer, file))
        assert ids == wanted
