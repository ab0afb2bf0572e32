"""The README of an exported model: YAML that the Hub reads, then Markdown for people.

Names come from data, so none is trusted: the YAML holds only values of a known form, and in the Markdown a name stands
in a code span, where it is neither markup nor HTML nor a link.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import yaml

from sftron.visible_text import visible_text

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]{0,39}")

CHAT = """from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or the name of the model on the Hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
messages = [{"role": "user", "content": "Hello!"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
output = model.generate(**prompt, max_new_tokens=200)
print(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
"""
"""Stops by itself: the ids that end a turn are in generation_config.json."""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells of a column whose name ends in "*" are names from outside, and shown as code."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What is known of a model. All of it but the title may have been written by others.

    base_model: a Hub id, or a name. license: as the Hub spells it. sections: a heading, and what stands below it, text
    of ours or tables. config: the run's, as YAML.
    """

    title: str
    base_model: str
    license: str | None = None
    hub_datasets: Sequence[str] = ()
    sections: Sequence[tuple[str, Sequence[str | Table]]] = ()
    config: str | None = None

    def as_markdown(self) -> str:
        parts = [
            _front_matter(self),
            f"# {self.title}",
            f"{code(self.base_model)}, fine-tuned on conversations with sftron.",
            f"## Chat with it\n\n```python\n{CHAT}```",
        ]
        for heading, contents in self.sections:
            parts.append(f"## {heading}")
            parts += [_table(each) if isinstance(each, Table) else each for each in contents]
        if self.config is not None:
            fence = _fence(self.config, 3)
            summary = "<summary>The run's configuration</summary>"
            parts.append(
                f"<details>{summary}\n\n{fence}yaml\n{visible_text(self.config).strip()}\n{fence}\n\n</details>"
            )
        return "\n\n".join(parts) + "\n"


def hub_id(name: str) -> str | None:
    """The name where it has the form `owner/name`; a link is made of nothing else."""
    return name if _HUB_ID.fullmatch(name) and ".." not in name and len(name) <= 96 else None


def license_id(name: object) -> str | None:
    return name if isinstance(name, str) and _LICENSE.fullmatch(name) else None


def code(text: str) -> str:
    """Text of others on one line, as a code span that nothing in it can end."""
    text = " ".join(visible_text(text).split()) or "?"
    fence = _fence(text, 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _fence(text: str, least: int) -> str:
    """More backticks than stand together in the text."""
    return "`" * max(least, 1 + max((len(run) for run in re.findall("`+", text)), default=0))


def _front_matter(card: ModelCard) -> str:
    facts: dict[str, object] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if base := hub_id(card.base_model):
        facts |= {"base_model": base, "base_model_relation": "finetune"}
    if license := license_id(card.license):
        facts["license"] = license
    if datasets := [each for each in dict.fromkeys(card.hub_datasets) if hub_id(each)]:
        facts["datasets"] = datasets
    facts["tags"] = ["sft", "sftron", "conversational"]
    return f"---\n{yaml.safe_dump(facts, sort_keys=False)}---"


def _table(table: Table) -> str:
    is_name = [column.endswith("*") for column in table.columns]
    lines = [
        _row(column.removesuffix("*") for column in table.columns),
        _row("---" for _ in table.columns),
        *(_row(code(cell) if named else cell for cell, named in zip(row, is_name, strict=True)) for row in table.rows),
    ]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    # Of code spans too: a table is cut into cells before these are read.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
