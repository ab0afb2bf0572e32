"""The README of an exported model says what the run's own files say, and its code runs."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard as HubCard

from sftron.train.model_card import base_model_name, plain_model_card, read_base_model, shareable, stated_license
from sftron.train.trainer import Trainer
from tests.train.runs import make_config, make_model_folder, metrics, run
from tools import convert_checkpoint


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = tmp_path_factory.mktemp("private-place")
    model_folder = make_model_folder(folder / "tiny-model")
    (model_folder / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en]\n---\n# Tiny\n", encoding="utf-8")
    config = make_config(
        folder,
        model_folder,
        tokens__train_steps=4,
        checkpoints__interval=2,
        checkpoints__export_interval=2,
        evaluation__datasets=[{"path": str(folder / "rows.jsonl"), "name": "held-out", "max_samples": 3}],
        evaluation__interval=2,
        logging__wandb={"mode": "disabled", "entity": "private-team", "tags": ["private-tag"]},
    )
    return run(config)


def card(trainer: Trainer, step: int = 4) -> str:
    return (trainer.directory.hf(step) / "README.md").read_text(encoding="utf-8")


def tables(text: str) -> dict[str, list[str]]:
    """Each row by its first cell."""
    rows = [
        [cell.strip(" `") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    return {row[0]: row[1:] for row in rows}


def test_the_numbers_are_the_runs(trained: Trainer) -> None:
    rows, lines = tables(card(trained)), metrics(trained.directory.folder)
    last, budget = lines[-1], 96
    assert rows["Steps"] == ["4"]
    assert rows["Tokens seen"] == [f"{last['total_tokens']:,}"]
    assert rows["Tokens trained"] == [f"{last['total_trained_tokens']:,}"]
    assert rows["Training loss of the last step"] == [f"{last['loss']:.4f}"]
    assert rows["Fill"] == [f"{last['total_tokens'] / (4 * 2 * budget):.2%}"]
    assert rows["Conversations a pack"] == [f"{sum(line['conversations'] for line in lines) / 8:.1f}"]
    assert rows["Tokens a pack"] == ["96"]
    data = rows["rows.jsonl"]
    assert data[0] == "30"
    assert data[1] == f"{last['epoch']:.2f}"
    assert data[4] == f"{last['total_tokens']:,}"
    assert data[6] == trained.setup.data.preparation.datasets[0].source.fingerprint[:12]
    assert rows["Hardware"][0].startswith("1 x ")
    assert rows["torch"]


def test_the_policies_are_said_in_words(trained: Trainer) -> None:
    text = card(trained)
    assert "divided once by the sum of their weights" in text
    assert "these roles say (assistant), in every such turn, and the tokens that end its turns: `<|im_end|>`" in text
    assert "Conversations in a pack do not see each other" in text


def test_evaluations_up_to_the_exported_step_are_there(trained: Trainer) -> None:
    lines = (trained.directory.folder / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    measured = {each["step"]: each["sets"]["held-out"] for each in map(json.loads, lines)}
    for step, last in ((4, 4), (2, 2)):
        rows = [line for line in card(trained, step).splitlines() if line.startswith("| `held-out`")]
        assert rows == [
            f"| `held-out` | {at} | {one['loss']:.4f} | {one['token_accuracy']:.4f} | {one['tokens']:,} |"
            for at, one in ((at, measured[at]) for at in (0, last))
        ]


def test_it_tells_the_hub_what_is_known(trained: Trainer) -> None:
    facts = HubCard(card(trained)).data.to_dict()
    assert facts["license"] == "apache-2.0"
    assert facts["pipeline_tag"] == "text-generation"
    assert "base_model" not in facts  # a folder is no id
    assert "datasets" not in facts
    assert "`tiny-model`, fine-tuned" in card(trained)


def test_nothing_of_this_machine_and_no_secret_is_in_it(trained: Trainer) -> None:
    text = card(trained)
    assert str(trained.config.run_dir.parents[1]) not in text
    assert "private-" not in text
    assert "run_name: run" in text


def test_a_secret_of_the_environment_is_not_shared(trained: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "rows.jsonl" in shareable(trained.config)
    monkeypatch.setenv("STORAGE_KEY", "rows.jsonl")
    assert "rows.jsonl" not in shareable(trained.config)


def test_its_code_runs_in_the_exported_folder(trained: Trainer, tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", card(trained), re.DOTALL | re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code.replace("max_new_tokens=200", "max_new_tokens=5")],
        cwd=trained.directory.hf(4),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_converted_checkpoint_has_the_runs_card(trained: Trainer, tmp_path: Path) -> None:
    checkpoint = trained.directory.checkpoints / "step-4"
    assert convert_checkpoint.main([str(checkpoint), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "README.md").read_text(encoding="utf-8") == card(trained)


def test_a_checkpoint_without_its_run_has_a_card_of_what_is_known(trained: Trainer, tmp_path: Path) -> None:
    alone = shutil.copytree(trained.directory.checkpoints / "step-4", tmp_path / "step-4")
    arguments = [str(alone), str(tmp_path / "out"), "--model", trained.config.model.path]
    assert convert_checkpoint.main(arguments) == 0
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "# tiny-model, step 4" in text
    assert HubCard(text).data.to_dict()["license"] == "apache-2.0"


def test_the_base_model_is_named_by_its_id_where_that_is_known(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    assert base_model_name("owner/name", snapshot) == "owner/name"
    assert base_model_name(str(snapshot), snapshot) == "owner/name"
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert base_model_name(str(folder), folder) == "my-model"
    (folder / "config.json").write_text(json.dumps({"_name_or_path": "owner/base"}))
    assert base_model_name(str(folder), folder) == "owner/base"
    (folder / "config.json").write_text(json.dumps({"_name_or_path": "/home/me/base"}))
    assert base_model_name(str(folder), folder) == "my-model"
    assert "base_model" not in HubCard(plain_model_card(read_base_model(str(folder), folder), 1)).data.to_dict()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\nlicense: mit\n---\n", "mit"),
        ("no front matter", None),
        ("---\n- mit\n---\n", None),
        ("---\nlicense: [\n---\n", None),
        ("---\n" + "[" * 2000 + "\n---\n", None),
        ("---\nlicense: " + "x" * 100_000 + "\n---\n", None),
    ],
)
def test_a_licence_is_read_of_the_base_models_readme(text: str, expected: Any, tmp_path: Path) -> None:
    assert stated_license(tmp_path) is None
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    assert stated_license(tmp_path) == expected
