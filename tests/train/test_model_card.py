"""The README of an exported model states what the run's own files state; no name in it can write markup or YAML."""

import json
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from huggingface_hub import ModelCard as HubCard
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from sftron.checkpoint.source import BaseModel, hub_id, license_id, read_base_model
from sftron.commands import convert as convert_checkpoint
from sftron.config import Config
from sftron.local_paths import path_names
from sftron.train.model_card import code, fill_template, shareable
from sftron.train.progress import DataSetCount, Progress
from sftron.visible_text import visible_text
from tests.train.conftest import FinishedRun

# --- The card of a run ---


def card(finished: FinishedRun, step: int = 6) -> str:
    return (finished.trainer.directory.hf(step) / "README.md").read_text(encoding="utf-8")


def tables(text: str) -> dict[str, list[str]]:
    """Each row by its first cell."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line[:1] == "|"]
    return {row[0].strip(" `"): [cell.strip(" `") for cell in row[1:]] for row in rows}


def test_the_numbers_are_the_runs(finished: FinishedRun) -> None:
    rows, lines = tables(card(finished)), finished.steps
    last = lines[-1]
    assert rows["Steps"] == ["6"]
    assert rows["Tokens seen"] == [f"{last['total_tokens']:,}"]
    assert rows["Tokens trained"] == [f"{last['total_trained_tokens']:,}"]
    assert rows["Training loss of the last step"] == [f"{last['loss']:.4f}"]
    assert rows["Tokens a pack"] == ["96"]
    data = rows["rows.jsonl"]
    assert (data[0], data[1], data[4]) == ("41", f"{last['epoch']:.2f}", f"{last['total_tokens']:,}")
    assert data[6] == finished.trainer.setup.data.preparation.datasets[0].source.fingerprint[:12]
    assert rows["Hardware"][0].startswith("1 x ")
    assert rows["torch"]
    assert "0.01 in steps 1 to 4, 0.005 from step 5 on" in rows["Optimizer"][0]
    assert rows["optimizer.learning_rate"] == ["5 to 6", "0.005"]


def test_the_policies_and_what_the_hub_reads_are_stated(finished: FinishedRun) -> None:
    text = card(finished)
    assert "divided once by the sum of their weights" in text
    assert "the text of these roles (assistant), in every such turn" in text
    assert "the tokens that end its turns: `<|im_end|>`" in text
    assert "Conversations in a pack do not see each other" in text
    assert "`tiny-model`, fine-tuned" in text
    facts = HubCard(text).data.to_dict()
    assert facts["license"] == "apache-2.0"
    assert facts["pipeline_tag"] == "text-generation"
    assert not {"base_model", "datasets"} & facts.keys()  # a folder is no id


def test_evaluations_up_to_the_exported_step_are_there(finished: FinishedRun) -> None:
    lines = (finished.folder / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    measured = {each["step"]: each["sets"]["held-out"] for each in map(json.loads, lines)}
    for last in (6, 2):
        rows = [line for line in card(finished, last).splitlines() if line.startswith("| `held-out`")]
        assert rows == [
            f"| `held-out` | {at} | {one['loss']:.4f} | {one['token_accuracy']:.4f} | {one['tokens']:,} |"
            for at, one in ((at, measured[at]) for at in (0, last))
        ]


def test_nothing_of_this_machine_and_no_secret_is_in_it(finished: FinishedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    text, config = card(finished), finished.trainer.config
    assert str(config.run_dir.parents[1]) not in text
    assert "private-" not in text
    assert "run_name: run" in text
    assert "rows.jsonl" in shareable(config)
    monkeypatch.setenv("STORAGE_KEY", "rows.jsonl")
    assert "rows.jsonl" not in shareable(config)


def test_a_value_that_is_a_local_path_keeps_its_last_component_alone() -> None:
    paths: dict[Any, Any] = {"/x/y z": "y z", "~/m": "m", "../up/n": "n", "file:///x/o": "o", "a/../../p": "p"}
    paths |= {value: value for value in ("owner/name", "data/rows.jsonl", "https://host/x", "loss / tokens", 3)}
    assert path_names({"a": [*paths]}) == {"a": [*paths.values()]}


def test_its_code_runs_in_the_exported_folder(
    finished: FinishedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", card(finished), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(finished.trainer.directory.hf(6))
    exec(program.replace("max_new_tokens=200", "max_new_tokens=5"), {})
    assert capsys.readouterr().out.strip()


def test_a_converted_checkpoint_without_its_run_has_a_card_of_what_is_known(
    finished: FinishedRun, tmp_path: Path
) -> None:
    checkpoint = finished.trainer.directory.checkpoints / "step-6"
    alone = shutil.copytree(checkpoint, tmp_path / "step-6")
    arguments = [str(alone), str(tmp_path / "other"), "--model", finished.trainer.config.model.path]
    assert convert_checkpoint.main(arguments) == 0
    text = (tmp_path / "other" / "README.md").read_text(encoding="utf-8")
    assert "# tiny-model, step 6" in text
    assert HubCard(text).data.to_dict()["license"] == "apache-2.0"


def test_the_base_model_is_named_by_its_id_where_that_is_known(tmp_path: Path) -> None:
    snapshot, folder = tmp_path / "models--owner--name" / "snapshots" / "abc", tmp_path / "my-model"
    snapshot.mkdir(parents=True)
    folder.mkdir()
    assert read_base_model("owner/name", snapshot).name == "owner/name"
    assert read_base_model(str(snapshot), snapshot).name == "owner/name"
    assert read_base_model(str(folder), folder).name == "my-model"
    for stated, name in (("owner/base", "owner/base"), ("/home/me/base", "my-model")):
        (folder / "config.json").write_text(json.dumps({"_name_or_path": stated}))
        assert read_base_model(str(folder), folder).name == name


def test_a_license_is_read_from_the_base_models_readme(tmp_path: Path) -> None:
    assert read_base_model(str(tmp_path), tmp_path).license is None
    deep, long = "[" * 2000, "x" * 100_000
    for front_matter in ("- mit", "license: [", deep, f"license: {long}"):
        (tmp_path / "README.md").write_text(f"---\n{front_matter}\n---\n", encoding="utf-8")
        assert read_base_model(str(tmp_path), tmp_path).license is None, front_matter[:20]
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n", encoding="utf-8")
    assert read_base_model(str(tmp_path), tmp_path).license == "mit"


# --- Names from outside ---

HOSTILE = [
    "a | b |\n| --- |\n# big",
    "```\n</details><script>alert(1)</script>",
    "`` ` ``",
    "`",
    "x\n---\nlicense: mit\n---\n",
    "[click](https://example.invalid) https://example.invalid <img src=x>",
    "\\| \\` \\",
    "",
    "\u202egnp.exe\x1b[31m",
    "owner/name\nlicense: mit",
]
CONFIG = Config.model_validate(
    {
        "general": {"run_name": "run-1"},
        "model": {"path": "base"},
        "data": {"datasets": [{"path": "rows.jsonl"}]},
        "tokens": {"sequence_length": 96, "train_steps": 20},
        "optimizer": {"learning_rate": 1e-4},
    }
)


@pytest.fixture(scope="module", autouse=True)
def _template_compiled_once() -> Iterator[None]:
    """huggingface_hub compiles the same template for each card."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2, "Template", cache(jinja2.Template))
        yield


@cache
def card_of(name: str, config: str = "") -> str:
    """A card with `name` wherever a name from outside may stand: 8 times as code, and in the YAML."""
    run = {
        "options": CONFIG,
        "progress": Progress([DataSetCount()]),
        "token_budget": 96,
        "data": [[name, *"123456", name]],
        "stop_tokens": [name],
        "last_loss": "1.0",
        "learning_rate": "1e-4",
        "changes": [[name, "1 to 2", name]],
        "evaluations": [[name, "1", "2.0", "0.5", "7"]],
    }
    base, hardware = BaseModel(Path("base"), name, name), [["Hardware", name]]
    return fill_template(base, title="run-1", hub_datasets=[name], made_with=hardware, config_yaml=config, run=run)


def parsed(text: str) -> list[Any]:
    return MarkdownIt("commonmark").enable("table").parse(text.split("\n---\n", 1)[1])


def with_hostile_names(test: Any) -> Any:
    for name in HOSTILE:
        test = example(name)(test)
    return given(st.text(st.characters(), max_size=60))(test)


@with_hostile_names
def test_a_name_is_a_code_span_and_nothing_else(name: str) -> None:
    tokens = parsed(card_of(name))
    assert [token.type for token in tokens] == [token.type for token in parsed(card_of("x"))]
    children = [child for token in tokens for child in token.children or []]
    contents = [child.content for child in children if child.type == "code_inline"]
    assert contents[:8] == [" ".join(visible_text(name).split()) or "?"] * 8
    assert len(contents) == 12, "and the versions of four programs"
    assert not any(child.type in ("html_inline", "link_open", "image") for child in children)
    assert "\n" not in code(name)


@with_hostile_names
def test_the_hub_reads_no_more_than_is_stated(name: str) -> None:
    text = card_of(name)
    facts = HubCard(text).data.to_dict()
    assert facts == yaml.safe_load(text.split("---\n")[1])
    known = {"library_name", "pipeline_tag", "tags", "base_model", "base_model_relation", "license", "datasets"}
    assert facts.keys() <= known
    assert facts.get("base_model", name) == facts.get("license", name) == name
    assert facts.get("datasets", [name]) == [name]


@with_hostile_names
def test_no_value_of_the_configuration_ends_its_block(value: str) -> None:
    config = yaml.safe_dump({"name": value, "other": [value]}, allow_unicode=True)
    tokens = parsed(card_of("x", config))
    last = [token for token in tokens if token.type == "fence"][-1]
    assert (last.info, last.content.strip()) == ("yaml", visible_text(config).strip())
    assert (tokens[-1].type, tokens[-1].content.strip()) == ("html_block", "</details>")


def test_ids_of_the_hub_have_their_form() -> None:
    assert hub_id("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert license_id("apache-2.0")
    for name in ("gpt2", "/data/x", "a/b/c", "../x", "a/..", "models/", "a b/c", "-a/b", "a/b\n", "é/x"):
        assert hub_id(name) is None, name
        assert name == "gpt2" or license_id(name) is None, name
