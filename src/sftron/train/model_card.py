"""The README of an exported model: YAML that the Hub reads, and Markdown for people, filled into model_card.md.jinja.

Names come from data, so none is trusted. The YAML holds only values of a known form. In the Markdown a name stands in a
code span, where it is neither markup nor HTML nor a link.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData

from sftron import __version__
from sftron.checkpoint.model_files import MAX_JSON_BYTES
from sftron.config import Config, dump_config
from sftron.config.errors import redacted
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.regular_file import read_regular
from sftron.train.progress import DataSetCount, Progress
from sftron.train.ranks import Ranks
from sftron.train.run_data import token_budget
from sftron.train.settings import Settings, period_words, shown
from sftron.visible_text import visible_text

_TEMPLATE = Path(__file__).with_suffix(".md.jinja")
_LARGEST_FRONT_MATTER, _LARGEST_README = 64 * 2**10, 16 * 2**20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]{0,39}")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that training started from, as a card names it."""

    folder: Path
    name: str
    license: str | None


def read_base_model(path: str, folder: Path) -> BaseModel:
    """Reads name and license of the model in `folder`, which the configuration names `path`."""
    return BaseModel(folder, base_model_name(path, folder), stated_license(folder))


def model_card(
    config: Config, state: Mapping[str, Any], *, run_folder: Path, base: BaseModel, chat_tokenizer: ChatTokenizer
) -> str:
    """Returns the README of a run's model.

    Args:
        config: The run's configuration. The settings in `state`, with which its steps were made, take precedence.
        state: The state of a checkpoint; see run_state.run_facts.
        run_folder: Where metrics.jsonl, evaluations.jsonl and mix_report.json are; what is missing is left out.
        base: The model that training started from.
        chat_tokenizer: Decodes the stop tokens.
    """
    if "progress" not in state:
        return plain_model_card(base, state["step"])
    progress, settings = Progress.from_state(state["progress"]), Settings.from_state(state)
    config = settings.as_config() or config
    steps, evaluations = (
        [each for each in _lines(run_folder / name) if each["step"] <= progress.step]
        for name in ("metrics.jsonl", "evaluations.jsonl")
    )
    rates = settings.periods().get("optimizer.learning_rate", [])
    rate = ", ".join(f"{value:g} {period_words(first, last)}" for first, last, value in rates)
    losses = [each["loss"] for each in steps if each.get("loss") is not None]
    made_with = [["Hardware", str(state["hardware"])]] if "hardware" in state else []
    if steps:
        made_with.append(["Time in steps", f"{sum(each['step_seconds'] for each in steps) / 3600:.2f} hours"])
    return fill_template(
        base,
        title=config.general.run_name,
        hub_datasets=[each.path for each in config.data.datasets if not Path(each.path).exists()],
        made_with=made_with,
        config_yaml=shareable(config),
        run={
            "options": config,
            "progress": progress,
            "token_budget": token_budget(config),
            "data": _data(config, state, progress, run_folder),
            "stop_tokens": [chat_tokenizer.decode([each]) for each in state.get("stop_token_ids", [])],
            "last_loss": f"{losses[-1]:.4f}" if losses else "?",
            "learning_rate": rate or format(config.optimizer.learning_rate, "g"),
            "packing": _packing(config, steps),
            "changes": _changes(settings, progress.step),
            "evaluations": _evaluations(evaluations),
        },
    )


def plain_model_card(base: BaseModel, step: int) -> str:
    """Returns the README of weights whose run is not known."""
    return fill_template(base, title=f"{base.folder.name}, step {step}")


def fill_template(
    base: BaseModel,
    *,
    title: str,
    hub_datasets: Sequence[str] = (),
    made_with: Sequence[Sequence[str]] = (),
    config_yaml: str = "",
    run: Mapping[str, Any] | None = None,
) -> str:
    """Returns the card as text. Everything but the title may have been written by others."""
    base_id = hub_id(base.name)
    facts = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base_id,
        base_model_relation="finetune" if base_id else None,
        license=license_id(base.license),
        datasets=[each for each in dict.fromkeys(hub_datasets) if hub_id(each)] or None,
        tags=["sft", "sftron", "conversational"],
    )
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    versions = {"sftron": __version__, **versions, "Python": platform.python_version()}
    card = ModelCard.from_template(
        facts,
        str(_TEMPLATE),
        code=code,
        fence=lambda text: _fence(text, 3),
        table=_table,
        title=title,
        base_name=base.name,
        made_with=[*made_with, *versions.items()],
        config_yaml=visible_text(config_yaml).strip(),
        run=run,
    )
    return f"{card}\n"


def hub_id(name: str) -> str | None:
    """Returns the name if it has the form `owner/name`; nothing else becomes a link."""
    return name if _HUB_ID.fullmatch(name) and ".." not in name and len(name) <= 96 else None


def license_id(name: object) -> str | None:
    """Returns the name if the Hub could have a license of that name."""
    return name if isinstance(name, str) and _LICENSE.fullmatch(name) else None


def code(text: str) -> str:
    """Returns foreign text as a code span on one line, which nothing in the text can end."""
    text = " ".join(visible_text(text).split()) or "?"
    fence = _fence(text, 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _fence(text: str, least: int) -> str:
    """Returns more backticks than stand together in the text."""
    return "`" * max(least, 1 + max((len(run) for run in re.findall("`+", text)), default=0))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table. In a column whose name ends in "*", cells are foreign text and become code spans."""
    lines = [[column.removesuffix("*") for column in columns], ["---"] * len(columns)]
    lines += [
        [code(cell) if name[-1:] == "*" else cell for name, cell in zip(columns, row, strict=True)] for row in rows
    ]
    # Pipes are escaped in code spans too: a table is cut into cells before its spans are read.
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def hardware(ranks: Ranks) -> str:
    """Returns how many of which devices a run has."""
    is_gpu = ranks.device.type == "cuda"
    name = torch.cuda.get_device_name(ranks.device) if is_gpu else f"CPU ({platform.machine()})"
    return f"{ranks.dp_world_size} x {name}"


def base_model_name(path: str, folder: Path) -> str:
    """Returns the Hub id of a model if it is known, else the name of its folder, without the folder's location."""
    if hub_id(path) and not Path(path).exists():
        return path
    if match := re.search(r"models--([^/]+?)--([^/]+)", str(folder)):
        return f"{match[1]}/{match[2]}"
    with suppress(OSError, ValueError, AttributeError):
        stated = json.loads(read_regular(folder / "config.json", MAX_JSON_BYTES)).get("_name_or_path")
        if isinstance(stated, str) and hub_id(stated) and not Path(stated).exists():
            return stated
    return folder.resolve().name


def stated_license(folder: Path) -> str | None:
    """Returns the license that the README of a model states, if it does."""
    with suppress(OSError, ValueError, yaml.YAMLError, RecursionError, AttributeError):
        data = read_regular(folder / "README.md", _LARGEST_README)
        text = data.decode("utf-8")[:_LARGEST_FRONT_MATTER]
        if match := re.match(r"---\n(.*?)\n---\n", text, re.DOTALL):
            return yaml.safe_load(match[1]).get("license")
    return None


def shareable(config: Config) -> str:
    """Returns the configuration as YAML, without secrets, locations on this machine, and the account that logs."""
    tree = yaml.safe_load(redacted(dump_config(config)))
    tree["logging"].pop("wandb", None)
    return yaml.safe_dump(_shortened(tree), sort_keys=False, width=120)


def _shortened(value: Any) -> Any:
    """Returns the value with each path of this machine replaced by its last part."""
    if isinstance(value, dict):
        return {key: _shortened(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    if not isinstance(value, str):
        return value
    leads_out = Path(value).is_absolute() or value.startswith("~") or ".." in Path(value).parts
    return Path(value).name if leads_out or re.match(r"(?i)[a-z]:[\\/]|file:", value) else value


def _data(config: Config, state: Mapping[str, Any], progress: Progress, run_folder: Path) -> list[list[str]]:
    """Returns a row for each data set, and one for the data before a change."""
    try:
        report = json.loads((run_folder / "mix_report.json").read_text(encoding="utf-8"))
        num_rows = [each.get("rows") for each in report["datasets"]]
    except (OSError, ValueError, KeyError):
        num_rows = []
    num_rows = [*num_rows, *[None] * len(progress.datasets)][: len(progress.datasets)]
    fingerprint = state.get("fingerprint") or {}
    rows = [
        [
            redacted(dataset.name or _shortened(dataset.path) + f" ({dataset.split})" * (dataset.split != "train")),
            "?" if known is None else f"{known:,}",
            f"{count.epochs(known):.2f}",
            *_counted(count),
            str(fingerprint.get(f"data.datasets.{index}", "?"))[:12],
        ]
        for index, (dataset, count, known) in enumerate(
            zip(config.data.datasets, progress.datasets, num_rows, strict=True)
        )
    ]
    if progress.before.rows:
        rows.append(["data before it was changed", "", "", *_counted(progress.before), "?"])
    return rows


def _counted(count: DataSetCount) -> list[str]:
    return [f"{n:,}" for n in (count.conversations, count.dropped.total(), count.tokens, count.trained_tokens)]


def _changes(settings: Settings, step: int) -> list[list[str]]:
    """Returns each value of the settings that changed, with the steps up to `step` that were made with it."""
    return [
        [key, str(first) if first == (end := last or step) else f"{first} to {end}", shown(_shortened(value))]
        for key, periods in settings.periods().items()
        if not key.startswith("logging.wandb.")
        for first, last, value in periods
    ]


def _packing(config: Config, steps: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns how full the packs of the steps were."""
    positions = sum(each["tokens"] / each["fill"] for each in steps if each["fill"])
    if not positions:
        return []
    num_packs = positions / token_budget(config)
    return [
        ["Fill", f"{sum(each['tokens'] for each in steps) / positions:.2%}"],
        ["Conversations a pack", f"{sum(each['conversations'] for each in steps) / num_packs:.1f}"],
    ]


def _evaluations(evaluations: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns the first evaluation of every set, and the last."""
    return [
        [name, f"{each['step']:,}", *map(_number, (found["loss"], found["token_accuracy"])), f"{found['tokens']:,}"]
        for each in (*evaluations[:1], *evaluations[1:][-1:])
        for name, found in each["sets"].items()
    ]


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4f}"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Reads the objects of a log, but for a line that a full disk or a kill has cut off."""
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):
            yield json.loads(line)
