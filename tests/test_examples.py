"""The examples run, and the plain loop is the trainer's."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from examples import custom_dataset, plain_loop
from examples.keep import forgetting

from sftron import ChatTokenizer, PackedDataset
from tests.conftest import ROOT
from tests.train.runs import make_config, make_model_folder, metrics, run, write_rows

NUM_STEPS = 6


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def test_the_plain_loop_has_the_trainers_losses_and_weights(model_folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    options = {
        "--model": model_folder,
        "--data": rows,
        "--out": tmp_path / "plain",
        "--steps": NUM_STEPS,
        "--packs-per-step": 2,
        "--sequence-length": 96,
        "--learning-rate": 1e-2,
        "--dtype": "float32",
        "--seed": 7,
    }
    losses = plain_loop.main([str(word) for pair in options.items() for word in pair])
    config = make_config(
        tmp_path,
        model_folder,
        tokens__train_steps=NUM_STEPS,
        optimizer__weight_decay=0.0,
        optimizer__schedule="constant",
        data__num_lanes="auto",
    )
    trainer = run(config)

    assert losses == pytest.approx([each["loss"] for each in metrics(config.run_dir)], abs=1e-6)
    assert losses[-1] < losses[0] - 0.1
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trainer.directory.folder / "latest")
    for name, weight in exported.state_dict().items():
        torch.testing.assert_close(weight.float(), theirs.state_dict()[name], rtol=1e-2, atol=1e-4)
    assert exported.generation_config.eos_token_id == theirs.generation_config.eos_token_id


def test_the_forgetting_of_a_convention_is_measured_with_and_without_replay(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "MOST_TOKENS", 1)
    options = ["--model", str(model_folder), "--out", str(tmp_path), "--steps", "2"]
    options += ["--seeds", "0", "--shares", "20", "--replay", "chats"]
    forgetting.main(options)
    lines = capsys.readouterr().out.splitlines()
    table = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")]
    assert [row[0] for row in table[2:]] == ["taught", "none", "20 % chats"]
    assert all(float(row[-1]) for row in table[2:]), "the rises"
    assert (tmp_path / "keep.png").is_file()
    forgetting.main(options)
    assert capsys.readouterr().out.splitlines() == [line for line in lines if line.startswith("|")]


def test_rows_of_ones_own_are_trained_on(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "tickets.jsonl"
    custom_dataset.main(["--tokenizer", str(model_folder), "--jsonl", str(written)])
    shown = capsys.readouterr().out
    assert "Gladly. Happy growing!<|im_end|>⟧" in shown
    assert "Which battery does it take?" in shown
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    assert [len(row["messages"]) for row in rows] == [4, 2]

    # The file holds what the program had: the same packs.
    tokenizer = ChatTokenizer.from_pretrained(model_folder)
    of_rows = next(iter(PackedDataset.from_rows(rows, tokenizer, sequence_length=256)))
    of_file = next(iter(PackedDataset.from_path(written, tokenizer, sequence_length=256)))
    assert of_rows.input_ids.tolist() == of_file.input_ids.tolist()
    assert of_rows.labels.tolist() == of_file.labels.tolist()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_every_example_is_told_of(path: Path) -> None:
    assert f"`{path.name}`" in (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
