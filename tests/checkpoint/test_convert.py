"""A Hugging Face folder and a checkpoint are the same weights, to the bit, in both directions (law 9)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sftron.checkpoint.checkpoint import CheckpointError, read_state, verify_checkpoint, write_checkpoint
from sftron.checkpoint.export import check_export, differing, hf_to_checkpoint, open_weights, plan_export, write_export
from sftron.checkpoint.source import ExportSource
from sftron.commands.convert import main
from tests.models.reference import make_reference
from tests.train.conftest import model_folder as model_folder
from tests.train.runs import make_config, make_model_folder, run


def to_folder(checkpoint: Path, folder: Path, source: Path, dtype: torch.dtype, stops: list[int] | None = None) -> None:
    files = ExportSource.read(source)
    with open_weights(checkpoint, files, stops) as (state, read, vocab_size):
        plan = plan_export(state, files, vocab_size, dtype=dtype, model_dtype=dtype)
        write_export(plan, read(), folder)
        assert check_export(plan, read(), folder)[1] == []


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, False), (torch.bfloat16, True)])
def test_a_folder_comes_back_from_a_checkpoint_as_it_was_and_a_single_bit_is_a_difference(
    tmp_path: Path, dtype: torch.dtype, tied: bool
) -> None:
    source = tmp_path / "source"
    make_reference(tie_word_embeddings=tied).to(dtype).save_pretrained(source)
    hf_to_checkpoint(source, tmp_path / "checkpoint")
    assert verify_checkpoint(tmp_path / "checkpoint") is None
    to_folder(tmp_path / "checkpoint", tmp_path / "again", source, dtype)

    before, after = tensors(source), tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == dtype
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert differing(tmp_path / "checkpoint", source) == (len(before), [])
    assert len(before) > 10

    changed = ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"]
    for name in changed:
        before[name].view(torch.uint8).view(-1)[7] ^= 1
    save_file(before, source / "model.safetensors", metadata={"format": "pt"})
    assert differing(tmp_path / "checkpoint", source)[1] == changed


def test_a_runs_checkpoint_becomes_the_folder_that_the_run_exports(tmp_path: Path, model_folder: Path) -> None:
    """File by file, with a template of its own and an added token; and of any number of ranks' files."""
    options: dict[str, Any] = {"tokenizer__chat_template": "chatml", "tokenizer__add_tokens": ["<|note|>"]}
    options["model__compute_dtype"] = "bfloat16"
    ended = run(make_config(tmp_path, model_folder, tokens__train_steps=2, **options))
    checkpoint, found = ended.directory.checkpoints / "step-2", tmp_path / "found.json"
    assert main([str(checkpoint), str(tmp_path / "converted"), "--json", str(found)]) == 0

    exported = ended.directory.hf(2)
    names = sorted(path.name for path in exported.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "converted").iterdir())
    for name in names:
        assert (tmp_path / "converted" / name).read_bytes() == (exported / name).read_bytes(), name
    assert "chat_template.jinja" in names
    assert {tensor.dtype for tensor in tensors(exported).values()} == {torch.bfloat16}
    assert json.loads(found.read_text())["different"] == []
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    assert main([str(checkpoint), str(tmp_path / "exact"), "--dtype", "float32"]) == 0
    assert main([str(tmp_path / "exact"), str(tmp_path / "native")]) == 0
    assert (tmp_path / "native" / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert read_state(tmp_path / "native")["step"] == 0


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, target = tmp_path / "checkpoint", tmp_path / "target"
    hf_to_checkpoint(model_folder, checkpoint)

    def refused(*arguments: object) -> str:
        assert main([str(each) for each in arguments]) == 2
        return capsys.readouterr().err

    assert "is not in a run directory; give the model's folder (--model)" in refused(checkpoint, target)
    assert f"{checkpoint} already exists" in refused(model_folder, checkpoint)
    other = make_model_folder(tmp_path / "other", rms_norm_eps=0.5)
    error = refused(checkpoint, target, "--model", other)
    assert "does not fit the model in config.json" in error
    assert "norm_eps: 1e-06 in the checkpoint, 0.5 in config.json" in error
    (checkpoint / "model.safetensors").write_bytes(b"")
    assert "model.safetensors has 0 bytes" in refused(checkpoint, target, "--model", model_folder)
    broken = shutil.copytree(model_folder, tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    assert "sftron convert: " in refused(broken, target)
    below = model_folder / "config.json" / "x"
    assert f"{below} cannot be written: Not a directory; choose another TARGET" in refused(model_folder, below)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "checkpoint", "other"]


def test_stop_tokens_come_from_the_run_or_from_the_arguments(tmp_path: Path, model_folder: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    hf_to_checkpoint(model_folder, checkpoint)
    to_folder(checkpoint, tmp_path / "target", model_folder, torch.float32, [7])
    assert 7 in json.loads((tmp_path / "target" / "generation_config.json").read_text())["eos_token_id"]
    write_checkpoint(checkpoint, 0, {"model": {}, "optimizer": {}}, state=b'{"step": 0}')
    with pytest.raises(CheckpointError, match="has no stop_token_ids; give them with --stop-token-ids"):
        to_folder(checkpoint, tmp_path / "other", model_folder, torch.float32)
