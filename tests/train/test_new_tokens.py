"""Base models: templates by name, added tokens, and control tokens that no training has touched."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from sftron.checkpoint.hf_weights import EMBEDDINGS, load_model
from sftron.data.chat.pretrained import TEMPLATE_NAMES, load_tokenizer, named_template
from sftron.data.types import Role
from sftron.train.build_data import load_chat_tokenizer
from sftron.train.build_model import untrained_ids
from tests.conftest import ASSETS
from tests.train.runs import make_config, make_model_folder, opened, run


def with_rows(folder, rows, value):
    """The folder's embeddings with some rows changed."""
    weights = load_file(folder / "model.safetensors")
    weights[EMBEDDINGS][rows] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_every_named_template_trains_the_answers_and_their_stop_tokens(tmp_path, model_folder, conversation, name):
    chat_tokenizer = load_chat_tokenizer(make_config(tmp_path, model_folder, tokenizer__chat_template=name))
    encoded = chat_tokenizer.encode(conversation("user: Hi", "assistant: Yo", "user: And?", "assistant: Fine."))
    stop = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
    space = " " if name in ("vicuna", "plain") else ""

    said = chat_tokenizer.decode(encoded.input_ids[encoded.role_ids == Role.ASSISTANT])
    assert said == f"{space}Yo{stop}{space}Fine.{stop}"
    prompt = chat_tokenizer.encode_prompt(conversation("user: Hi").messages)
    assert encoded.input_ids[: len(prompt)].tolist() == prompt


def test_an_added_token_is_found_as_it_is_written_whatever_the_normalizer_makes_of_it(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tokenizer")
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save_pretrained(tmp_path)
    loaded, added = load_tokenizer(tmp_path, ["<|END|>"])
    (token_id,) = loaded.convert_tokens_to_ids(["<|END|>"])
    assert added == ["<|END|>"]
    assert [loaded(text)["input_ids"].count(token_id) for text in ("a<|END|>b", "a<|end|>b")] == [1, 0]


def test_a_template_whose_tokens_are_missing_is_refused_with_the_key_to_set():
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tokenizer_sentencepiece")
    with pytest.raises(ValueError, match=r'chatml writes "<\|im_start\|>", .* set tokenizer\.add_tokens: \['):
        named_template("chatml", tokenizer)


def test_added_tokens_begin_as_the_mean_are_trained_and_exported(tmp_path, model_folder):
    template = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|done|>{% endfor %}"
    (tmp_path / "own.jinja").write_text(template)
    new = ["<|turn|>", "<|done|>"]
    config = make_config(
        tmp_path,
        model_folder,
        tokenizer__chat_template=str(tmp_path / "own.jinja"),
        tokenizer__add_tokens=new,
        tokens__train_steps=2,
    )
    trainer = opened(config)
    embeddings = trainer.model.model.embed_tokens.weight.detach()
    new_ids = trainer.setup.data.chat_tokenizer.tokenizer.convert_tokens_to_ids(new)
    theirs = load_model(model_folder).model.embed_tokens.weight.detach()
    known = [row for row in range(len(theirs)) if row not in new_ids]
    assert len(embeddings) == max(len(theirs), new_ids[-1] + 1)
    torch.testing.assert_close(embeddings[new_ids], theirs[known].mean(0).expand(2, -1))
    assert torch.equal(embeddings[known], theirs[known])

    assert trainer.train() == 0
    exported = AutoModelForCausalLM.from_pretrained(trainer.directory.folder / "latest")
    tokenizer = AutoTokenizer.from_pretrained(trainer.directory.folder / "latest")
    stops = exported.generation_config.eos_token_id
    assert exported.config.vocab_size == len(embeddings)
    assert tokenizer.convert_tokens_to_ids(new) == new_ids
    assert new_ids[1] in (stops if isinstance(stops, list) else [stops])
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|turn|>user\nHi<|done|>"


def test_a_template_that_writes_a_token_no_training_has_touched_is_refused_with_the_remedy(tmp_path):
    folder = make_model_folder(tmp_path / "base")
    stop = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    stop_id = next(token["id"] for token in stop if token["content"] == "<|im_end|>")
    with_rows(folder, [stop_id], 1e-9)

    assert list(untrained_ids(folder, {stop_id, 5})) == [stop_id]
    with pytest.raises(ValueError, match=rf"<\|im_end\|> \(id {stop_id}\): norm .* list them in tokenizer\.add_tokens"):
        run(make_config(tmp_path, folder, tokens__train_steps=1))
    run(make_config(tmp_path, folder, tokens__train_steps=1, tokenizer__add_tokens=["<|im_end|>"]))
