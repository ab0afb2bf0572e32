"""No name can write markup, HTML, a table's cell or the Hub's YAML."""

from functools import cache
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard as HubCard
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from sftron.config import Config
from sftron.train.model_card import BaseModel, code, fill_template, hub_id, license_id
from sftron.train.progress import DataSetCount, Progress
from sftron.visible_text import visible_text

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
NAMES = st.text(st.characters(), max_size=60)


CONFIG = Config.model_validate(
    {
        "general": {"run_name": "run-1"},
        "model": {"path": "base"},
        "data": {"datasets": [{"path": "rows.jsonl"}]},
        "tokens": {"sequence_length": 96, "train_steps": 20},
        "optimizer": {"learning_rate": 1e-4},
    }
)


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
        "packing": [],
        "changes": [[name, "1 to 2", name]],
        "evaluations": [[name, "1", "2.0", "0.5", "7"]],
    }
    base, hardware = BaseModel(Path("base"), name, name), [["Hardware", name]]
    return fill_template(base, title="run-1", hub_datasets=[name], made_with=hardware, config_yaml=config, run=run)


def shown(name: str) -> str:
    """What a code span says of a name."""
    return " ".join(visible_text(name).split()) or "?"


def with_hostile_names(test):
    for name in HOSTILE:
        test = example(name)(test)
    return given(NAMES)(test)


@with_hostile_names
def test_a_name_is_a_code_span_and_nothing_else(name: str) -> None:
    text = card_of(name)
    body = text.split("\n---\n", 1)[1]
    tokens = MarkdownIt("commonmark").enable("table").parse(body)
    kinds = [token.type for token in tokens]
    assert kinds == [
        token.type for token in MarkdownIt("commonmark").enable("table").parse(card_of("x").split("\n---\n", 1)[1])
    ]
    inlines = [token for token in tokens if token.type == "inline" and token.children]
    spans = [child for token in inlines for child in token.children or [] if child.type == "code_inline"]
    contents = [span.content for span in spans]
    assert contents[:8] == [shown(name)] * 8
    assert len(contents) == 12, "and the versions of four programs"
    assert not any(
        child.type in ("html_inline", "link_open", "image") for token in inlines for child in token.children or []
    )


@with_hostile_names
def test_the_hub_reads_what_we_say_and_no_more(name: str) -> None:
    text = card_of(name)
    facts = HubCard(text).data.to_dict()
    assert facts == yaml.safe_load(text.split("---\n")[1])
    known = {"library_name", "pipeline_tag", "tags", "base_model", "base_model_relation", "license", "datasets"}
    assert facts.keys() <= known
    assert facts["library_name"] == "transformers"
    assert facts.get("base_model", name) == name
    assert facts.get("datasets", [name]) == [name]
    assert facts.get("license", name) == name


@with_hostile_names
def test_no_value_of_the_configuration_ends_its_block(value: str) -> None:
    config = yaml.safe_dump({"name": value, "other": [value]}, allow_unicode=True)
    tokens = MarkdownIt("commonmark").parse(card_of("x", config).split("\n---\n", 1)[1])
    last = [token for token in tokens if token.type == "fence"][-1]
    assert last.info == "yaml"
    assert last.content.strip() == visible_text(config).strip()
    assert tokens[-1].type == "html_block"
    assert tokens[-1].content.strip() == "</details>"


def test_ids_of_the_hub_have_their_form() -> None:
    assert hub_id("HuggingFaceTB/SmolLM2-135M-Instruct")
    for name in ("gpt2", "/data/x", "a/b/c", "../x", "a/..", "models/", "a b/c", "-a/b", "a/b\n", "é/x"):
        assert hub_id(name) is None, name
    assert license_id("apache-2.0") == "apache-2.0"
    for name in ("Apache 2", "mit\n", None, ["mit"], "x" * 50):
        assert license_id(name) is None


@pytest.mark.parametrize("text", HOSTILE)
def test_a_code_span_is_one_line(text: str) -> None:
    assert "\n" not in code(text)
