"""What a run needs of its source folder to export a model is read before it trains, and once."""

import json
import shutil
from pathlib import Path

import pytest
import transformers

from sftron.commands.train import run as main
from tests.train.runs import make_config, opened


def test_a_dry_run_reports_what_would_fail_in_the_export(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text("{")
    make_config(tmp_path, folder)
    assert main(["--config", str(tmp_path / "config.yaml"), "--dry-run"]) == 2
    assert "generation_config.json: not valid JSON" in capsys.readouterr().err


@pytest.mark.parametrize("added", [[], ["<|note|>"]])
def test_a_run_whose_source_folder_vanishes_exports_as_if_it_were_there(
    tmp_path: Path, model_folder: Path, added: list[str]
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "LICENSE").write_text("terms")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    options = {"tokens__train_steps": 1, "checkpoints__interval": 1, "tokenizer__add_tokens": added}
    trainer = opened(make_config(tmp_path, folder, **options))
    shutil.rmtree(folder)
    assert trainer.train() == 0

    exported, again = trainer.directory.hf(1).rename(tmp_path / "exported"), trainer.directory.hf(1)
    trainer._exports._write_best(1)  # as the best checkpoint is exported when a run ends
    assert (again / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    assert sorted(path.name for path in again.iterdir()) == sorted(path.name for path in exported.iterdir())
    assert (exported / "LICENSE").read_text() == "terms"
    assert "license: mit" in (exported / "README.md").read_text()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert {*added} <= tokenizer.get_vocab().keys()
    assert tokenizer.chat_template == trainer.setup.data.chat_tokenizer.template.source
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
