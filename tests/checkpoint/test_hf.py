"""Hugging Face folders read: every key accounted for, and no other file touched."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sftron.checkpoint.hf_weights import load_model
from tests.models.reference import make_native, make_reference, pack


def _save(folder: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB", **options: Any) -> Path:
    make_reference(**options).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def _change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Sets tensors of model.safetensors, or removes them (None)."""
    path = folder / "model.safetensors"
    changed = {name: tensor for name, tensor in (load_file(path) | tensors).items() if tensor is not None}
    save_file(changed, path)


@pytest.mark.parametrize(("dtype", "shard"), [(torch.float32, "5GB"), (torch.bfloat16, "10KB"), (torch.float16, "5GB")])
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
    with pytest.raises(ValueError, match=r"the weights do not match config\.json") as caught:
        load_model(tmp_path)
    assert [line.strip() for line in str(caught.value).splitlines()[1:-1]] == [
        "model.layers.0.mlp.up_proj.weight: stored as I8; sftron supports only F32, BF16, F16",
        "model.layers.0.self_attn.q_norm.weight: unexpected, has [8]",
        "model.layers.1.mlp.up_proj.weight: has [47, 32], expected [48, 32]",
        "model.norm.weight: missing, expected [32]",
    ]


NORM = "model.norm.weight"
FAULTS: dict[str, tuple[str, Callable[[dict[str, str], Path, Path], Any]]] = {
    "twice": (
        NORM + ": in {other} and {holder}, the index says {holder}",
        lambda index, holder, other: save_file(load_file(other) | {NORM: torch.ones(32)}, other),
    ),
    "elsewhere": (
        NORM + ": in {holder}, the index says {other}",
        lambda index, holder, other: index.update({NORM: other.name}),
    ),
    "nowhere": (
        "model.norm.scale: in no file, the index says {holder}",
        lambda index, holder, other: index.update({"model.norm.scale": holder.name}),
    ),
    "unstated": (NORM + ": in {holder}, the index says none", lambda index, holder, other: index.pop(NORM)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_shards_hold_exactly_the_tensors_that_their_index_states_each_in_its_file(tmp_path: Path, fault: str) -> None:
    """A tensor in two files is ambiguous: transformers and vLLM may take either."""
    folder = _save(tmp_path, shard="10KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    holder = folder / index["weight_map"][NORM]
    other = next(folder / name for name in sorted(set(index["weight_map"].values())) if name != holder.name)
    index["weight_map"] |= {"model.layers.0.self_attn.rotary_emb.inv_freq": holder.name}  # in no file, and not needed
    load_model(folder)
    problem, make = FAULTS[fault]
    make(index["weight_map"], holder, other)
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="does not match the files that it lists") as caught:
        load_model(folder)
    assert problem.format(holder=holder.name, other=other.name) in str(caught.value)
    assert "from one revision" in str(caught.value)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "a\\b"])
def test_an_index_cannot_name_a_file_outside_its_folder(tmp_path: Path, name: str) -> None:
    folder = _save(tmp_path / "model", shard="10KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names files outside its folder|index\.json are missing"):
        load_model(folder)


def test_weights_or_a_config_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    def refused(reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            load_model(tmp_path)

    refused(r"config.json: cannot be read \(No such file")
    _save(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(r"model.safetensors: not a readable safetensors file: .*; download or convert it again")
    weights.rename(tmp_path / "pytorch_model.bin")
    refused("pytorch_model.bin, a pickle.*save_pretrained")
    (tmp_path / "pytorch_model.bin").unlink()
    refused("neither model.safetensors nor")
    _save(tmp_path, shard="10KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[0]
    shard.unlink()
    refused(f"are missing: {shard.name}")
    (tmp_path / "config.json").write_text("{")
    refused("not valid JSON")
