"""The tokenizer that AutoTokenizer builds from an export is the one that was trained with."""

import json
import shutil

import pytest

from sftron.train.build_data import load_chat_tokenizer
from sftron.train.places import export_source, find_places
from tests.conftest import ASSETS
from tests.train.runs import make_config


def _chat_tokenizer_of_export(config):
    chat_tokenizer = load_chat_tokenizer(config)
    export_source(config, find_places(config), chat_tokenizer)
    return chat_tokenizer


@pytest.mark.parametrize(
    ("model_type", "add_tokens"),
    # With added tokens, the export is saved by transformers, with a class that keeps the pieces, which qwen2 ignores.
    [("qwen2", []), ("qwen2", ["<|new|>"]), ("qwen3", [])],
)
def test_an_export_whose_model_type_replaces_pieces_of_the_tokenizer_is_refused_before_training(
    tmp_path, model_folder, model_type, add_tokens
):
    """The tokenizer's own folder has no config.json, so only the export shows the class that model_type chooses."""
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(ASSETS / "tokenizer", tokenizer)
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    del settings["tokenizer_class"]
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    config = make_config(tmp_path, model_folder, tokenizer__path=str(tokenizer), tokenizer__add_tokens=add_tokens)
    assert _chat_tokenizer_of_export(config).added_tokens == tuple(add_tokens)  # a llama's export has the same pieces
    copy = tmp_path / "model"
    shutil.copytree(model_folder, copy)
    settings = json.loads((copy / "config.json").read_text())
    del settings["attention_bias"]
    (copy / "config.json").write_text(json.dumps({**settings, "model_type": model_type, "use_sliding_window": False}))
    config = make_config(tmp_path, copy, tokenizer__path=str(tokenizer), tokenizer__add_tokens=add_tokens)
    with pytest.raises(ValueError, match=r"this run's export.*(pre_tokenizer|normalizer) is"):
        _chat_tokenizer_of_export(config)
