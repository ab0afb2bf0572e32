"""The model card of an exported model (README.md): YAML metadata for the Hub, and Markdown from model_card.md.jinja.

Names come from data and are not trusted. The YAML contains only values of a known form. In the Markdown, names are in
code spans, where they cannot act as markup, HTML or links.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData

from sftron import __version__
from sftron.checkpoint.adapter import vllm_limits
from sftron.checkpoint.convert import BASE_WEIGHTS
from sftron.checkpoint.hf_weights import MAX_JSON_BYTES, digest_of, file_digests
from sftron.checkpoint.merge import MergeReport
from sftron.config import Config, dump_config
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.errors import redacted
from sftron.models.adapters import LoraSpec
from sftron.regular_file import read_regular
from sftron.train.progress import DataSetCount, Progress
from sftron.train.ranks import Ranks
from sftron.train.run_data import token_budget
from sftron.train.run_directory import intact_records
from sftron.train.settings import Settings, period_words, shown
from sftron.visible_text import visible_text

VERIFY_CARD, VERIFY_CARD_SCHEMA = "verify.yaml", "sftron-verify-1"
"""The card that `sftron verify --card` writes into a run directory, and the value of its key `schema`."""

_TEMPLATE = Path(__file__).with_suffix(".md.jinja")
_MAX_README_BYTES, _MAX_FRONT_MATTER = 16 * 2**20, 64 * 2**10
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_RATE = "optimizer.learning_rate"
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]{0,39}")


# --- The base model and the hardware ---


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that training started from, as described in a model card."""

    folder: Path
    name: str
    """The Hub id if it is known, else the name of the folder without its parents."""
    license: str | None
    revision: str | None = None
    """The commit of a model in the Hub's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """The adapter of a model card."""

    spec: LoraSpec
    base_sha256: str | None = None
    merge: MergeReport | None = None
    """For a merged model, the report of the merge."""


def read_base_model(path: str, folder: Path) -> BaseModel:
    """Reads the name and the license of the model in `folder`. `path` is the value of model.path."""
    name, license_name = folder.resolve().name, None
    if hub_id(path) and not Path(path).exists():
        name = path
    elif match := re.search(r"models--([^/]+?)--([^/]+)", str(folder)):  # the Hub's cache
        name = f"{match[1]}/{match[2]}"
    else:
        with suppress(OSError, ValueError, AttributeError):
            stated = json.loads(read_regular(folder / "config.json", MAX_JSON_BYTES)).get("_name_or_path")
            if isinstance(stated, str) and hub_id(stated) and not Path(stated).exists():
                name = stated
    with suppress(OSError, ValueError, yaml.YAMLError, RecursionError, AttributeError):
        text = read_regular(folder / "README.md", _MAX_README_BYTES).decode()[:_MAX_FRONT_MATTER]
        if match := re.match(r"---\n(.*?)\n---\n", text, re.DOTALL):
            license_name = yaml.safe_load(match[1]).get("license")
    revision = re.search(r"/snapshots/([0-9a-f]{40})(?:/|$)", folder.as_posix())
    return BaseModel(folder, name, license_name, revision and revision[1])


def hardware(ranks: Ranks) -> str:
    """Returns the number and the name of the devices, such as `8 x NVIDIA H100 80GB HBM3`."""
    is_gpu = ranks.device.type == "cuda"
    name = torch.cuda.get_device_name(ranks.device) if is_gpu else f"CPU ({platform.machine()})"
    return f"{ranks.dp_world_size} x {name}"


# --- The card of a run ---


def model_card(
    config: Config,
    state: Mapping[str, Any],
    *,
    run_folder: Path,
    base: BaseModel,
    chat_tokenizer: ChatTokenizer,
    adapter: AdapterFacts | None = None,
    repository: str | None = None,
) -> str:
    """Returns the model card for a checkpoint of a run.

    Args:
        config: The run's configuration. The settings in `state`, with which the steps were trained, take precedence.
        state: The state of a checkpoint; see `resume.run_facts`.
        run_folder: The folder of metrics.jsonl, evaluations.jsonl and mix_report.json; missing files are skipped.
        base: The model that training started from.
        chat_tokenizer: Decodes the stop tokens.
        adapter: The adapter that was trained, if any.
        repository: The repository on the Hub whose root the model is pushed to, if any.
    """
    progress, settings = Progress.from_state(state["progress"]), Settings.from_state(state)
    config = settings.as_config() or config
    steps, evaluations = (
        [record for record in intact_records(run_folder / name) if record["step"] <= progress.step]
        for name in ("metrics.jsonl", "evaluations.jsonl")
    )
    periods = settings.periods()
    rates = [f"{rate:g} {period_words(first, last)}" for first, last, rate in periods.get(_RATE, [])]
    losses = [step["loss"] for step in steps if step["loss"] is not None]
    made_with = [["Hardware", str(state["hardware"])]] if "hardware" in state else []
    packing = []
    if num_positions := sum(step["tokens"] / step["fill"] for step in steps if step["fill"]):
        num_packs = num_positions / token_budget(config)
        packing = [
            ["Fill", f"{sum(step['tokens'] for step in steps) / num_positions:.2%}"],
            ["Conversations a pack", f"{sum(step['conversations'] for step in steps) / num_packs:.1f}"],
        ]
        made_with.append(["Time in steps", f"{sum(step['step_seconds'] for step in steps) / 3600:.2f} hours"])

    def number(value: float | None) -> str:
        return "?" if value is None else f"{value:.4f}"

    def steps_of(first: int, last: int) -> str:
        return str(first) if first == last else f"{first} to {last}"

    run = {
        "options": config,
        "progress": progress,
        "token_budget": token_budget(config),
        "data": _data_rows(config, state, progress, run_folder),
        "stop_tokens": [chat_tokenizer.decode([token_id]) for token_id in state.get("stop_token_ids", [])],
        "last_loss": number(losses[-1] if losses else None),
        "learning_rate": ", ".join(rates) or f"{config.optimizer.learning_rate:g}",
        "packing": packing,
        "verified": _verified(run_folder, state.get("fingerprint") or {}, base.folder),
        "changes": [
            [key, steps_of(first, last or progress.step), shown(_shortened(value))]
            for key, values in periods.items()
            if not key.startswith("logging.wandb.")
            for first, last, value in values
        ],
        "evaluations": [
            [name, f"{each['step']:,}", *map(number, (found["loss"], found["token_accuracy"])), f"{found['tokens']:,}"]
            for each in (*evaluations[:1], *evaluations[1:][-1:])
            for name, found in each["sets"].items()
        ],
    }
    return fill_template(
        base,
        title=config.general.run_name,
        hub_datasets=[dataset.path for dataset in config.data.datasets if not Path(dataset.path).exists()],
        made_with=made_with,
        config_yaml=shareable(config),
        run=run,
        adapter=adapter,
        repository=repository,
    )


def plain_model_card(base: BaseModel, step: int | None, adapter: AdapterFacts | None = None) -> str:
    """Returns a model card for weights whose run is not known."""
    title = base.folder.name + ("" if step is None else f", step {step}")
    return fill_template(base, title=title, adapter=adapter)


def _data_rows(config: Config, state: Mapping[str, Any], progress: Progress, run_folder: Path) -> list[list[str]]:
    """Returns a table row for each data set, and one for all data before it was changed."""
    num_rows: list[int | None] = [None] * len(progress.datasets)
    with suppress(OSError, ValueError, KeyError):
        report = json.loads((run_folder / "mix_report.json").read_text(encoding="utf-8"))
        num_rows = [each.get("rows") for each in report["datasets"]]

    def counted(count: DataSetCount) -> list[str]:
        return [f"{n:,}" for n in (count.conversations, count.dropped.total(), count.tokens, count.trained_tokens)]

    rows, fingerprint = [], state.get("fingerprint") or {}
    for n, (dataset, count, known) in enumerate(zip(config.data.datasets, progress.datasets, num_rows, strict=False)):
        name = dataset.name or _shortened(dataset.path) + f" ({dataset.split})" * (dataset.split != "train")
        size = ["?" if known is None else f"{known:,}", f"{count.epochs(known):.2f}"]
        rows.append([redacted(name), *size, *counted(count), str(fingerprint.get(f"data.datasets.{n}", "?"))[:12]])
    if progress.before.rows:
        rows.append(["data before it was changed", "", "", *counted(progress.before), "?"])
    return rows


def config_digest(text: str) -> str:
    """Returns the SHA-256 of a config.yaml without its lines of comment, which name what changed during the run."""
    lines = text.splitlines(keepends=True)
    return hashlib.sha256("".join(line for line in lines if not line.startswith("#")).encode()).hexdigest()


def _verified(run_folder: Path, fingerprint: Mapping[str, str], base_folder: Path) -> str:
    """Returns sentences on the card of `sftron verify` in the run directory; empty if there is none that is whole.

    Args:
        fingerprint: The fingerprint of the run's data, and of its base weights if it trains adapters.
        base_folder: The folder of the model that training started from.
    """
    try:
        card = yaml.safe_load(read_regular(run_folder / VERIFY_CARD, _MAX_README_BYTES))
        if card["schema"] != VERIFY_CARD_SCHEMA:
            return ""
        of, hashes = Counter(check["status"] for check in card["checks"]), card["hashes"]
        found = f"{of['PASS']} passed, {of['FAIL']} failed and {of['SKIP']} were not measured"
        sentences = [f"Of {of.total()} checks before the run, {found}"]
        if limits := [name for name in ("--only", "--layers") if name in card.get("partial", [])]:
            sentences.append(f"They were a part of all checks ({', '.join(limits)})")
        if any(value != fingerprint[name] for name, value in hashes["data"].items() if name in fingerprint):
            sentences.append("The data, template or tokenizer was another one than the run's")
        if digest_of(hashes["weights"]) != (fingerprint.get(BASE_WEIGHTS) or _base_digest(base_folder)):
            sentences.append("The weights were not those that the run started from")
        if config_digest((run_folder / "config.yaml").read_text(encoding="utf-8")) != hashes["config"]:
            sentences.append("The configuration was another one than the run's")
    except (OSError, ValueError, yaml.YAMLError, RecursionError, LookupError, TypeError, AttributeError):
        return ""
    return ". ".join(sentences)


@cache
def _base_digest(folder: Path) -> str:
    """Returns the hash of the weights in `folder`, which takes long and does not change between a run's exports."""
    return digest_of(file_digests(folder))


def shareable(config: Config) -> str:
    """Returns the configuration as YAML, without secrets, local paths and the wandb settings."""
    tree = yaml.safe_load(redacted(dump_config(config)))
    tree["logging"].pop("wandb", None)
    return yaml.safe_dump(_shortened(tree), sort_keys=False, width=120)


def _shortened(value: Any) -> Any:
    """Returns the value with each local path replaced by its last component."""
    if isinstance(value, dict):
        return {key: _shortened(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    if not isinstance(value, str):
        return value
    leads_out = Path(value).is_absolute() or value.startswith("~") or ".." in Path(value).parts
    return Path(value).name if leads_out or re.match(r"(?i)[a-z]:[\\/]|file:", value) else value


# --- The card as text ---


def fill_template(
    base: BaseModel,
    *,
    title: str,
    hub_datasets: Sequence[str] = (),
    made_with: Sequence[Sequence[str]] = (),
    config_yaml: str = "",
    run: Mapping[str, Any] | None = None,
    adapter: AdapterFacts | None = None,
    repository: str | None = None,
) -> str:
    """Returns the model card as text. All arguments except the title and `repository` may contain untrusted text.

    Args:
        repository: The repository on the Hub that has the model in its root.
    """
    base_id = hub_id(base.name)
    is_adapter = adapter is not None and adapter.merge is None
    facts = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=base_id,
        base_model_relation=("adapter" if is_adapter else "finetune") if base_id else None,
        license=license_id(base.license),
        datasets=[each for each in dict.fromkeys(hub_datasets) if hub_id(each)] or None,
        tags=["sft", "sftron", "conversational", *(["lora"] if adapter else [])],
    )
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    card = ModelCard.from_template(
        facts,
        str(_TEMPLATE),
        code=code,
        fence=lambda text: _fence(text, 3),
        table=_table,
        title=title,
        base_name=base.name,
        made_with=[*made_with, ["sftron", __version__], *versions.items(), ["Python", platform.python_version()]],
        config_yaml=visible_text(config_yaml).strip(),
        run=run,
        repository=repository,
        is_adapter=is_adapter,
        adapter_rows=[] if adapter is None else _adapter_rows(base, adapter),
        adapter_notes=[] if adapter is None else adapter.merge.lines() if adapter.merge else vllm_limits(adapter.spec),
    )
    return f"{card}\n"


def _adapter_rows(base: BaseModel, adapter: AdapterFacts) -> list[list[str]]:
    """Returns the table of an adapter."""
    spec = adapter.spec
    layers = dict.fromkeys(name.rpartition(".")[2] for name in spec.ranks)
    rows = [
        ["Base model", base.name],
        ["Revision of the base", base.revision or "?"],
        ["SHA-256 of the base's weights", adapter.base_sha256 or "?"],
        ["Rank", ", ".join(map(str, sorted(set(spec.ranks.values()))))],
        ["Alpha", ", ".join(f"{alpha:g}" for alpha in sorted(set(spec.alphas.values())))],
        ["Scaling", "alpha / sqrt(rank)" if spec.rslora else "alpha / rank"],
        ["Layers", f"{', '.join(layers)} ({len(spec.ranks)} matrices)" + (", DoRA" if spec.dora else "")],
        ["Trained in full", ", ".join(spec.modules_to_save)],
    ]
    return [row for row in rows if row[1] not in ("", "?")]


def hub_id(name: str) -> str | None:
    """Returns the name if it has the form `owner/name`, else None; only such names become links."""
    return name if _HUB_ID.fullmatch(name) and ".." not in name and len(name) <= 96 else None


def license_id(name: object) -> str | None:
    """Returns the name if it has the form of a license id of the Hub, else None."""
    return name if isinstance(name, str) and _LICENSE.fullmatch(name) else None


def code(text: str) -> str:
    """Returns untrusted text as a code span on one line; nothing in the text can end the span."""
    text = " ".join(visible_text(text).split()) or "?"
    fence = _fence(text, 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _fence(text: str, least: int) -> str:
    """Returns a fence of at least `least` backticks that is longer than any sequence of backticks in the text."""
    return "`" * max(least, 1 + max((len(ticks) for ticks in re.findall("`+", text)), default=0))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table. In a column whose name ends in "*", cells are untrusted and become code spans."""
    lines = [[column.removesuffix("*") for column in columns], ["---"] * len(columns)]
    lines += [
        [code(cell) if name[-1:] == "*" else cell for name, cell in zip(columns, row, strict=True)] for row in rows
    ]
    # Pipes are escaped in code spans too, because Markdown splits a table into cells before it parses code spans.
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
