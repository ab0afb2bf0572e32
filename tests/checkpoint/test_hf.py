"""Hugging Face folders read: every key accounted for, and no other file touched."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sftron.checkpoint.fusion import fuse_state_dict, split_state_dict
from sftron.checkpoint.hf_weights import load_model, read_config
from tests.models.reference import make_native, make_reference, pack


def _save(folder: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB", **options: Any) -> Path:
    make_reference(**options).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def _change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Sets tensors of model.safetensors, or removes them (None)."""
    path = folder / "model.safetensors"
    changed = {name: tensor for name, tensor in (load_file(path) | tensors).items() if tensor is not None}
    save_file(changed, path)


@pytest.mark.parametrize("options", [{}, {"attention_bias": True, "mlp_bias": True, "head_dim": 12}])
def test_split_is_bitwise_the_inverse_of_fuse(options: dict[str, Any]) -> None:
    reference = make_reference(**options)
    native = make_native(reference)
    source = reference.state_dict()
    fused = dict(fuse_state_dict(dict(native.named_parameters()), source.__getitem__))
    back = dict(split_state_dict(fused.items(), native.config))
    assert back.keys() == source.keys()
    assert all(back[name].equal(tensor) for name, tensor in source.items())
    assert fused.keys() != source.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard", ["5GB", "10KB"])
def test_a_folder_of_transformers_loads_into_fp32_exactly(tmp_path: Path, dtype: torch.dtype, shard: str) -> None:
    _save(tmp_path, dtype, shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "10KB")
    native = load_model(tmp_path, compute_dtype=torch.float32)
    expected = make_native(make_reference().to(dtype).float())
    assert {p.dtype for p in native.parameters()} == {torch.float32}
    for (name, found), wanted in zip(native.named_parameters(), expected.parameters(), strict=True):
        assert found.equal(wanted), name
    assert all(parameter.requires_grad for parameter in native.parameters())
    native(*pack([9])).sum().backward()


def test_a_tied_head_may_be_stored_if_it_equals_the_embeddings(tmp_path: Path) -> None:
    _save(tmp_path, tie_word_embeddings=True)
    embeddings = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    plain = load_model(tmp_path)
    _change(tmp_path, **{"lm_head.weight": embeddings.clone()})
    assert load_model(tmp_path).head_weight.equal(plain.head_weight)
    _change(tmp_path, **{"lm_head.weight": embeddings + 1})
    with pytest.raises(ValueError, match=r"tie_word_embeddings: true.*lm_head.weight and .*embed_tokens.weight differ"):
        load_model(tmp_path)


def test_inverse_frequencies_of_old_files_are_skipped(tmp_path: Path) -> None:
    _save(tmp_path)
    _change(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    load_model(tmp_path)


def test_every_key_that_differs_from_the_config_is_named_with_its_shape(tmp_path: Path) -> None:
    _save(tmp_path)
    _change(
        tmp_path,
        **{
            "model.norm.weight": None,
            "model.layers.0.self_attn.q_norm.weight": torch.ones(8),
            "model.layers.1.mlp.up_proj.weight": torch.ones(47, 32),
            "model.layers.0.mlp.up_proj.weight": torch.ones(48, 32, dtype=torch.int8),
        },
    )
    with pytest.raises(ValueError, match=r"not those that config\.json describes") as caught:
        load_model(tmp_path)
    assert [line.strip() for line in str(caught.value).splitlines()[1:-1]] == [
        "model.layers.0.mlp.up_proj.weight: stored as I8, implemented are F32, BF16, F16",
        "model.layers.0.self_attn.q_norm.weight: unexpected, has [8]",
        "model.layers.1.mlp.up_proj.weight: has [47, 32], expected [48, 32]",
        "model.norm.weight: missing, expected [32]",
    ]


def _twice(weight_map: dict[str, str], first: Path, last: Path) -> str:
    save_file(load_file(last) | {"model.norm.weight": torch.ones(32)}, last)
    both = " and ".join(sorted([first.name, last.name]))
    return f"model.norm.weight: in {both}, the index states {first.name}"


def _elsewhere(weight_map: dict[str, str], first: Path, last: Path) -> str:
    weight_map["model.norm.weight"] = last.name
    return f"model.norm.weight: in {first.name}, the index states {last.name}"


def _nowhere(weight_map: dict[str, str], first: Path, last: Path) -> str:
    weight_map["model.norm.scale"] = first.name
    return f"model.norm.scale: in no file, the index states {first.name}"


def _unstated(weight_map: dict[str, str], first: Path, last: Path) -> str:
    del weight_map["model.norm.weight"]
    return f"model.norm.weight: in {first.name}, the index states none"


@pytest.mark.parametrize("fault", [_twice, _elsewhere, _nowhere, _unstated])
def test_shards_hold_exactly_the_tensors_that_their_index_states_each_in_its_file(
    tmp_path: Path, fault: Callable[..., str]
) -> None:
    """A tensor in two files is ambiguous: transformers and vLLM may take either."""
    folder = _save(tmp_path, shard="10KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = folder / index["weight_map"]["model.norm.weight"]
    last = next(folder / name for name in sorted(set(index["weight_map"].values())) if name != first.name)
    index["weight_map"] |= {"model.layers.0.self_attn.rotary_emb.inv_freq": first.name}  # in no file, and not needed
    load_model(folder)
    problem = fault(index["weight_map"], first, last)
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="do not belong together") as caught:
        load_model(folder)
    assert problem in str(caught.value)
    assert "Download the model again" in str(caught.value)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "a\\b"])
def test_an_index_cannot_name_a_file_outside_its_folder(tmp_path: Path, name: str) -> None:
    folder = _save(tmp_path / "model", shard="10KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names files outside its folder"):
        load_model(folder)


def test_a_pickle_is_refused_with_the_remedy(tmp_path: Path) -> None:
    _save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin, a pickle.*save_pretrained"):
        load_model(tmp_path)


def test_a_folder_without_weights_a_torn_file_or_a_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    folder = _save(tmp_path / "torn")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors: not a readable safetensors file"):
        load_model(folder)
    weights.unlink()
    with pytest.raises(ValueError, match=r"neither model.safetensors nor"):
        load_model(folder)
    folder = _save(tmp_path / "sharded", shard="10KB")
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ValueError, match=f"are missing: {shard.name}"):
        load_model(folder)


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json: cannot be read \(No such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_config(tmp_path)
