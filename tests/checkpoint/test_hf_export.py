"""Exported folders: bitwise the source, loadable by transformers, whole or absent."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sftron.checkpoint.export import export_hf
from sftron.checkpoint.hf_weights import file_digests, load_model
from sftron.checkpoint.model_folder import read_config
from sftron.checkpoint.source import ExportSource, lacking_for_loaders
from tests.models.reference import FAMILIES, make_reference


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return _save(tmp_path / "source")


def _save(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    reference = make_reference(eos_token_id=2, **options).to(dtype)
    reference.generation_config.eos_token_id = [2, 5]
    reference.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "unrelated.py").write_text("")
    return folder


def _export(source: Path, folder: Path, **options: Any) -> Path:
    options = {"dtype": torch.float32, "stop_token_ids": [7, 2]} | options
    export_hf(load_model(source).named_parameters(), folder, source_folder=source, **options)
    return folder


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("dtype", "bytes_per_shard", "is_tied"),
    [(torch.float32, 10**9, True), (torch.bfloat16, 10_000, True), (torch.float16, 10_000, False)],
)
def test_load_and_export_are_bitwise_the_identity(
    tmp_path: Path, dtype: torch.dtype, bytes_per_shard: int, is_tied: bool
) -> None:
    source = _save(tmp_path / "source", dtype, tie_word_embeddings=is_tied)
    exported = _export(source, tmp_path / "out", dtype=dtype, bytes_per_shard=bytes_per_shard)
    before, after = _tensors(source), _tensors(exported)
    assert after.keys() == before.keys()
    assert ("lm_head.weight" in after) != is_tied
    for name, tensor in before.items():
        assert after[name].dtype == dtype
        assert after[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name
    files = list(exported.glob("*.safetensors"))
    assert (len(files) > 1) == (bytes_per_shard == 10_000)
    assert file_digests(exported) == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    for file in files:
        nbytes = [tensor.nbytes for tensor in load_file(file).values()]
        assert len(nbytes) == 1 or sum(nbytes) <= bytes_per_shard
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    loaded = [transformers.LlamaForCausalLM.from_pretrained(folder).state_dict() for folder in (source, exported)]
    assert all(tensor.equal(loaded[1][name]) for name, tensor in loaded[0].items())


def test_a_stored_tied_head_is_stored_again(tmp_path: Path) -> None:
    source = _save(tmp_path / "source", tie_word_embeddings=True)
    # Cloned, because safetensors before 0.8 maps the file that is written again.
    tensors = {name: tensor.clone() for name, tensor in _tensors(source).items()}
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, source / "model.safetensors")
    after = _tensors(_export(source, tmp_path / "out"))
    assert after["lm_head.weight"].equal(tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("family", "spelling"),
    [("Llama 3.1", 4), ("DeepSeek-coder", 4), ("Mistral 0.1", 5), ("Qwen 2.5", 4), ("Qwen 3", 5)],
)
def test_loaders_find_all_that_they_need_in_an_exports_config_whatever_the_source_lacks(
    tmp_path: Path, family: str, spelling: int
) -> None:
    """In the spelling of transformers 4 and of 5; the installed one reads the values of the source in either."""
    source = tmp_path / "source"
    reference = make_reference(**FAMILIES[family])
    reference.save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    for key in ("architectures", "dtype"):
        config.pop(key)
    if spelling == 4:
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    (source / "config.json").write_text(json.dumps(config))

    exported = _export(source, tmp_path / "out", dtype=torch.bfloat16)
    content = json.loads((exported / "config.json").read_text())
    assert lacking_for_loaders(config)
    assert lacking_for_loaders(content) == []
    assert content["architectures"] == [type(reference).__name__]
    assert content["dtype"] == content["torch_dtype"] == "bfloat16"
    assert config.items() <= content.items()
    again, before = transformers.AutoConfig.from_pretrained(exported), reference.config
    assert again.rope_parameters == before.rope_parameters
    assert content["rope_theta"] == before.rope_parameters["rope_theta"]
    scaling = {key: value for key, value in before.rope_parameters.items() if key != "rope_theta"}
    assert (content["rope_scaling"] or {"rope_type": "default"}) == scaling
    assert again.dtype == torch.bfloat16
    assert read_config(exported) == read_config(source)


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        ("generation_config.json", "[1]", "generation_config.json: holds a JSON list"),
        (
            "generation_config.json",
            '{"eos_token_id": {}}',
            "generation_config.json: eos_token_id: {} is neither a token id",
        ),
        ("LICENSE", os.mkfifo, "LICENSE: is not a regular file"),
        (
            "tokenizer.model",
            lambda path: path.symlink_to("/etc/hostname"),
            "tokenizer.model: is a link to /etc/hostname, outside the folder",
        ),
        (
            "NOTICE",
            lambda path: (path.touch(), os.truncate(path, 2**26 + 1)),
            "NOTICE: has 67,108,865 bytes, but such a file has at most",
        ),
    ],
)
def test_what_an_export_needs_is_refused_by_name_where_it_cannot_be_had(
    source: Path, name: str, fault: str | Callable[[Path], None], message: str
) -> None:
    ExportSource.read(source)
    path = source / name
    path.unlink(missing_ok=True)
    if isinstance(fault, str):
        path.write_text(fault)
    else:
        fault(path)
    with pytest.raises(ValueError, match=message):
        ExportSource.read(source)


def test_every_trained_stop_id_joins_those_of_the_source(source: Path, tmp_path: Path) -> None:
    exported = _export(source, tmp_path / "out", stop_token_ids=[7, 2])
    stops = transformers.GenerationConfig.from_pretrained(exported).eos_token_id
    assert stops == [2, 5, 7]
    assert "_from_model_config" not in json.loads((exported / "generation_config.json").read_text())
    (source / "generation_config.json").unlink()
    exported = _export(source, tmp_path / "alone", stop_token_ids=[])
    assert transformers.GenerationConfig.from_pretrained(exported).eos_token_id == 2


def test_an_export_replaces_an_old_one_with_the_weights_the_tokenizer_and_nothing_else(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stale.json").write_text("{}")
    exported = _export(source, tmp_path / "out")
    assert sorted(path.name for path in exported.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert len({path.stat().st_mode for path in exported.iterdir()}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_the_tokenizer_and_template_that_were_trained_with_are_exported(source: Path, tmp_path: Path) -> None:
    other, more = tmp_path / "other", "additional_chat_templates/tool_use.jinja"
    (other / more).parent.mkdir(parents=True)
    (other / more).write_text("{{ tools }}")
    (other / "tokenizer.json").write_text('{"other": 1}')
    exported = _export(source, tmp_path / "out", tokenizer_folder=other, chat_template="{{ mine }}")
    assert (exported / "tokenizer.json").read_text() == '{"other": 1}'
    assert (exported / "chat_template.jinja").read_text() == "{{ mine }}"
    assert (exported / more).read_text() == "{{ tools }}"


def test_an_export_that_fails_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    model, out = load_model(source), tmp_path / "out"
    weights = dict(model.named_parameters())

    def failing() -> Any:
        yield from list(weights.items())[:3]
        raise RuntimeError("the disk is gone")

    options: dict[str, Any] = {"source_folder": source, "stop_token_ids": []}
    with pytest.raises(RuntimeError, match="the disk is gone"):
        export_hf(failing(), out, dtype=torch.float32, bytes_per_shard=10_000, **options)
    norm = weights.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"differ in these keys: model\.norm\.weight"):
        export_hf(weights.items(), out, dtype=torch.float32, **options)
    for value, dtype in ((float("nan"), torch.bfloat16), (1e6, torch.float16)):
        with torch.no_grad():
            norm[3] = value
        with pytest.raises(ValueError, match=rf"not finite as {dtype}: model\.norm\.weight holds NaN or infinity"):
            export_hf(model.named_parameters(), out, dtype=dtype, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
