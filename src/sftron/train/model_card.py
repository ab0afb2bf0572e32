"""What a run knows of the model that it exports, as the model's README: from its configuration, state and files."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from sftron import __version__
from sftron.checkpoint.model_files import MAX_JSON_BYTES
from sftron.config import Config, dump_config
from sftron.config.secrets import redacted
from sftron.data.chat_tokenizer import ChatTokenizer
from sftron.regular_file import read_regular
from sftron.report.model_card import ModelCard, Table, code, hub_id
from sftron.train.feed import token_budget
from sftron.train.progress import DataSetCount, Progress
from sftron.train.ranks import Ranks
from sftron.train.settings import Settings, period_words, shown

_LARGEST_FRONT_MATTER, _LARGEST_README = 64 * 2**10, 16 * 2**20
_NORMALISATION = (
    "The loss of a step is one ratio: the sum of weighted token losses over all micro-batches and ranks, divided once "
    "by the sum of their weights. It is no mean of means."
)


@dataclass(frozen=True, slots=True)
class BaseModel:
    """What a card states of the model that training started from."""

    folder: Path
    name: str
    license: str | None


def read_base_model(path: str, folder: Path) -> BaseModel:
    """path: as the configuration names it."""
    return BaseModel(folder, base_model_name(path, folder), stated_license(folder))


def model_card(
    config: Config, state: Mapping[str, Any], *, run_folder: Path, base: BaseModel, chat_tokenizer: ChatTokenizer
) -> str:
    """The README as text.

    state: a checkpoint's; see run_state.run_facts. Its settings, which its steps were made with, count before `config`,
    which may be of later ones. run_folder: where metrics.jsonl, evaluations.jsonl and
    mix_report.json are looked for; what is not there is left out.
    """
    if "progress" not in state:
        return plain_model_card(base, state["step"])
    progress, settings = Progress.from_state(state["progress"]), Settings.from_state(state)
    config = settings.as_config() or config
    steps = [each for each in _lines(run_folder / "metrics.jsonl") if each["step"] <= progress.step]
    evaluations = [each for each in _lines(run_folder / "evaluations.jsonl") if each["step"] <= progress.step]
    sections: list[tuple[str, list[str | Table]]] = [
        ("Data", [_data(config, state, progress, run_folder)]),
        (
            "What was trained",
            [_mask(config, state, chat_tokenizer), _NORMALISATION, _training(config, settings, progress, steps)],
        ),
        ("Packing", [_packing(config, steps)]),
    ]
    if settings.changes:
        sections.append(("Changed on the way", [_changed(settings, progress.step)]))
    if any(each["sets"] for each in evaluations):
        sections.append(("Evaluation", [_evaluation(evaluations)]))
    sections.append(("Made with", [_made_with(state, steps)]))
    return ModelCard(
        title=config.general.run_name,
        base_model=base.name,
        license=base.license,
        hub_datasets=[each.path for each in config.data.datasets if not Path(each.path).exists()],
        sections=sections,
        config=shareable(config),
    ).as_markdown()


def plain_model_card(base: BaseModel, step: int) -> str:
    """Of weights whose run is not known."""
    return ModelCard(
        title=f"{base.folder.name}, step {step}",
        base_model=base.name,
        license=base.license,
        sections=[("Made with", [Table(["", "*"], _versions())])],
    ).as_markdown()


def hardware(ranks: Ranks) -> str:
    """For people: how many of which devices."""
    is_gpu = ranks.device.type == "cuda"
    name = torch.cuda.get_device_name(ranks.device) if is_gpu else f"CPU ({platform.machine()})"
    return f"{ranks.dp_world_size} x {name}"


def base_model_name(path: str, folder: Path) -> str:
    """Its Hub id where that is known, else the folder's name, without where it lies."""
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
    """Of the base model, where its README says one."""
    with suppress(OSError, ValueError, yaml.YAMLError, RecursionError, AttributeError):
        data = read_regular(folder / "README.md", _LARGEST_README)
        text = data.decode("utf-8")[:_LARGEST_FRONT_MATTER]
        if match := re.match(r"---\n(.*?)\n---\n", text, re.DOTALL):
            return yaml.safe_load(match[1]).get("license")
    return None


def shareable(config: Config) -> str:
    """The configuration as YAML, without secrets, without where on this machine things lie, and who logs where."""
    tree = yaml.safe_load(redacted(dump_config(config)))
    tree["logging"].pop("wandb", None)
    return yaml.safe_dump(_shortened(tree), sort_keys=False, width=120)


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    return _short_name(value) if isinstance(value, str) else value


def _short_name(path: str) -> str:
    """A path that tells of this machine, by its last part."""
    leads_out = Path(path).is_absolute() or path.startswith("~") or ".." in Path(path).parts
    return Path(path).name if leads_out or re.match(r"(?i)[a-z]:[\\/]|file:", path) else path


def _data(config: Config, state: Mapping[str, Any], progress: Progress, run_folder: Path) -> Table:
    known = [each.get("rows") for each in _mix_report(run_folder)]
    fingerprint = state.get("fingerprint") or {}
    rows = []
    for place, (dataset, count) in enumerate(zip(config.data.datasets, progress.datasets, strict=True)):
        num_rows = known[place] if place < len(known) else None
        name = dataset.name or (_short_name(dataset.path) + f" ({dataset.split})" * (dataset.split != "train"))
        rows.append(
            [
                redacted(name),
                "?" if num_rows is None else f"{num_rows:,}",
                f"{count.epochs(num_rows):.2f}",
                *_counted(count),
                str(fingerprint.get(f"data.datasets.{place}", "?"))[:12],
            ]
        )
    if progress.before.rows:
        rows.append(["data before it was changed on the way", "", "", *_counted(progress.before), "?"])
    return Table(
        ["Data set*", "Rows", "Epochs", "Conversations", "Rows dropped", "Tokens", "Trained tokens", "Fingerprint*"],
        rows,
    )


def _counted(count: DataSetCount) -> list[str]:
    return [f"{n:,}" for n in (count.conversations, count.dropped.total(), count.tokens, count.trained_tokens)]


def _mask(config: Config, state: Mapping[str, Any], chat_tokenizer: ChatTokenizer) -> str:
    stops = [chat_tokenizer.decode([each]) for each in state.get("stop_token_ids", [])]
    ends = f", and the tokens that end its turns: {', '.join(map(code, stops))}" if stops else ""
    roles = ", ".join(role.replace("_", " ") for role in config.data.train_on_roles)
    which = "the last such turn" if config.data.train_on_turns == "last" else "every such turn"
    trained = (
        f"Trained is what these roles say ({roles}), in {which}{ends}; no header, no padding."
        if config.data.train_on_completions_only
        else "Every token is trained but the first of each conversation."
    )
    seen = (
        "Conversations in a pack do not see each other, and positions begin anew in each."
        if config.data.remove_cross_attention
        else "Conversations in a pack see those before them."
    )
    return f"{trained} {seen}"


def _training(config: Config, settings: Settings, progress: Progress, steps: list[dict[str, Any]]) -> Table:
    losses = [each["loss"] for each in steps if each.get("loss") is not None]
    options = config.optimizer
    rates = settings.periods().get("optimizer.learning_rate", [])
    rate = ", ".join(f"{value:g} {period_words(first, last)}" for first, last, value in rates)
    rows = [
        ["Steps", f"{progress.step:,}"],
        ["Tokens seen", f"{progress.tokens:,}"],
        ["Tokens trained", f"{progress.trained_tokens:,}"],
        ["Rows dealt", f"{progress.rows:,}"],
        ["Training loss of the last step", f"{losses[-1]:.4f}" if losses else "?"],
        [
            "Optimizer",
            f"AdamW, peak learning rate {rate or format(options.learning_rate, 'g')}, schedule {options.schedule}",
        ],
    ]
    return Table(["", ""], rows)


def _changed(settings: Settings, step: int) -> Table:
    """Each value of the settings that have changed, with the steps up to `step` that were made with it."""
    rows = [
        [key, str(first) if first == (end := last or step) else f"{first} to {end}", shown(_shortened(value))]
        for key, periods in settings.periods().items()
        if not key.startswith("logging.wandb.")
        for first, last, value in periods
    ]
    return Table(["Setting*", "Steps", "Value*"], rows)


def _packing(config: Config, steps: list[dict[str, Any]]) -> Table:
    budget = token_budget(config)
    rows = [["Strategy", config.data.packing.strategy], ["Tokens a pack", f"{budget:,}"]]
    rows.append(["Longest conversation", f"{config.tokens.sequence_length:,} tokens"])
    positions = sum(each["tokens"] / each["fill"] for each in steps if each["fill"])
    if positions:
        rows.append(["Fill", f"{sum(each['tokens'] for each in steps) / positions:.2%}"])
        conversations = sum(each["conversations"] for each in steps)
        rows.append(["Conversations a pack", f"{conversations * budget / positions:.1f}"])
    return Table(["", ""], rows)


def _evaluation(evaluations: list[dict[str, Any]]) -> Table:
    """The first of them and the last, of every set."""
    chosen = evaluations[:1] + evaluations[1:][-1:]
    rows = [
        [name, f"{each['step']:,}", _number(found["loss"]), _number(found["token_accuracy"]), f"{found['tokens']:,}"]
        for each in chosen
        for name, found in each["sets"].items()
    ]
    return Table(["Set*", "Step", "Loss", "Token accuracy", "Tokens"], rows)


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4f}"


def _made_with(state: Mapping[str, Any], steps: list[dict[str, Any]]) -> Table:
    rows = [["Hardware", str(state["hardware"])]] if "hardware" in state else []
    if steps:
        rows.append(["Time in steps", f"{sum(each['step_seconds'] for each in steps) / 3600:.2f} hours"])
    return Table(["", "*"], [*rows, *_versions()])


def _versions() -> list[list[str]]:
    packages = [["torch", str(torch.__version__)], ["transformers", importlib.metadata.version("transformers")]]
    return [["sftron", __version__], *packages, ["Python", platform.python_version()]]


def _mix_report(run_folder: Path) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError, KeyError):
        return json.loads((run_folder / "mix_report.json").read_text(encoding="utf-8"))["datasets"]
    return []


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a log; a line that a full disk or a kill has cut off is none."""
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):
            yield json.loads(line)
