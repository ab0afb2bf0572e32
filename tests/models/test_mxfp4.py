"""Weights in MXFP4, read as bf16, against transformers' conversion and the definition of the format."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sftron.checkpoint.export import export_hf
from sftron.checkpoint.hf_weights import SafetensorsFolder, load_model
from sftron.checkpoint.model_folder import read_config
from sftron.models.mxfp4 import dequantize
from tests.models.packed_experts import pack_experts
from tests.models.reference import FAMILIES, make_native, make_reference


def random_weight(scales: Tensor) -> Tensor:
    return torch.randint(0, 256, (*scales.shape, 16), generator=torch.Generator().manual_seed(1)).to(torch.uint8)


def test_every_code_and_scale_is_that_of_transformers_to_the_bit() -> None:
    scales = torch.arange(255, dtype=torch.uint8).repeat(8, 1)[None]  # of 1 expert, 8 outputs, 255 blocks
    blocks = random_weight(scales)
    blocks[..., 0] = 0x98  # minus zero, then minus 0.5
    expected = convert_moe_packed_tensors(blocks, scales)
    found = torch.stack([dequantize(*each) for each in zip(blocks, scales, strict=True)])
    assert found.dtype == expected.dtype == torch.bfloat16
    assert found.shape == expected.shape == (1, 255 * 32, 8)
    assert found.view(torch.int16).equal(expected.view(torch.int16))
    assert found[0, 0].signbit().all()
    assert not found.isnan().any()
    # transformers gives infinity, NaN or 2^127, whatever the code.
    assert dequantize(blocks[0, :, :1], torch.full((8, 1), 255, dtype=torch.uint8)).isnan().all()


def test_every_finite_weight_is_exactly_that_of_the_format() -> None:
    scales = torch.randint(0, 253, (3, 5), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    blocks = random_weight(scales)
    found = dequantize(blocks, scales)
    for row in range(3):
        for column in range(5 * 32):
            block, place = divmod(column, 32)
            byte = int(blocks[row, block, place // 2])
            code = byte >> 4 if place % 2 else byte & 15
            sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
            # E2M1 has an exponent bias of 1, and subnormal numbers with the exponent 0.
            size = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
            wanted = math.ldexp(-size if sign else size, int(scales[row, block]) - 127)
            assert float(found[column, row]) == wanted


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model whose experts are in MXFP4, and the same one in bf16."""
    root = tmp_path_factory.mktemp("models")
    return pack_experts(make_reference(**FAMILIES["gpt-oss"] | {"hidden_size": 64, "intermediate_size": 32}), root)


def test_a_folder_in_mxfp4_is_the_model_in_bf16_and_is_exported_as_such(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    packed, dense = (load_model(folders[kind], compute_dtype=torch.float32) for kind in ("mxfp4", "bf16"))
    expected = dict(dense.named_parameters())
    assert all(parameter.equal(expected[name]) for name, parameter in packed.named_parameters())
    again: Any = transformers.AutoModelForCausalLM.from_pretrained(folders["mxfp4"], dtype=torch.float32)
    assert again.model.layers[1].mlp.experts.down_proj.equal(expected["model.layers.1.mlp.experts.down_proj"])

    options: dict[str, Any] = {"dtype": torch.bfloat16, "stop_token_ids": [3], "source_folder": folders["mxfp4"]}
    export_hf(packed.named_parameters(), tmp_path / "out", **options)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["torch_dtype"] == "bfloat16"
    exported, source = (load_file(each / "model.safetensors") for each in (tmp_path / "out", folders["bf16"]))
    assert exported.keys() == source.keys()
    assert all(exported[name].dtype == torch.bfloat16 for name in exported)
    assert all(exported[name].equal(tensor) for name, tensor in source.items())
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loaded[1].values()), loaded[1]
    assert loaded[0].dtype == torch.bfloat16


def test_experts_are_read_one_range_at_a_time(folders: dict[str, Path]) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with SafetensorsFolder(folders["mxfp4"]) as packed, SafetensorsFolder(folders["bf16"]) as dense:
        assert packed.names() == dense.names()
        assert packed.shape(name) == dense.shape(name)
        assert packed.dtype(name) == dense.dtype(name) == "BF16"
        assert packed.read(name).equal(dense.read(name))
        assert packed.read_range(name, 2, 5).equal(dense.read(name)[2:5])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("scales", lambda tensor: None, "gate_up_proj_blocks: unexpected"),
        ("scales", lambda tensor: tensor[:, 1:], "stored in MXFP4 as .*U8.*, expected U8"),
        ("blocks", lambda tensor: tensor.float(), "stored in MXFP4 as .*F32.*, expected U8"),
        ("blocks", lambda tensor: tensor.flatten(2), "stored in MXFP4 as .*U8.*, expected U8"),
    ],
    ids=["no scales", "too few scales", "another type", "another shape"],
)
def test_broken_parts_are_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, name: str, change: Any, message: str
) -> None:
    tensors = load_file(folders["mxfp4"] / "model.safetensors")
    key = f"model.layers.0.mlp.experts.gate_up_proj_{name}"
    changed = change(tensors.pop(key))
    save_file(tensors | ({} if changed is None else {key: changed.contiguous()}), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders["mxfp4"] / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_without_its_statement_in_the_config_or_with_another_one_a_quantized_folder_is_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((folders["mxfp4"] / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(folders["mxfp4"] / "model.safetensors")
    for stated, message in (
        ({"quant_method": "gptq"}, "quantization_config.quant_method: 'gptq'; sftron supports only 'mxfp4'"),
        ({"bits": 4}, "quantization_config.quant_method: None; sftron supports only 'mxfp4'"),
        ("mxfp4 ", "quantization_config.quant_method: 'mxfp4 '; sftron supports only 'mxfp4'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
        with pytest.raises(ValueError, match=message):
            read_config(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes((folders["mxfp4"] / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    with pytest.raises(ValueError, match="gate_up_proj_scales: unexpected"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match=r"quantization_config: .*, but sftron does not support this key"):
        make_native(make_reference(), read_llama_with(tmp_path, config["quantization_config"]))


def read_llama_with(folder: Path, quantization: Any) -> Any:
    config = make_reference().config.to_dict() | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder)
