"""The model card of an exported model (README.md): YAML metadata for the Hub, and Markdown from model_card.md.jinja.

Names come from data and are not trusted. The YAML contains only values of a known form. In the Markdown, names are in
code spans, where they cannot act as markup, HTML or links.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from sftron import __version__
from sftron.checkpoint.adapter import vllm_limits
from sftron.checkpoint.export import BASE_WEIGHTS
from sftron.checkpoint.hf_weights import digest_of, file_digests
from sftron.checkpoint.merge import MergeReport
from sftron.checkpoint.source import BaseModel, hub_id, license_id
from sftron.config import Config, dump_config
from sftron.config.data_schema import KeptDataset
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.errors import redacted
from sftron.local_paths import path_names
from sftron.models.adapters import LoraSpec
from sftron.regular_file import read_json_value, read_regular
from sftron.train.build_data import token_budget
from sftron.train.divergence import divergence
from sftron.train.progress import DataSetCount, Progress
from sftron.train.run import Settings, period_words, shown
from sftron.train.run_directory import intact_records
from sftron.visible_text import counted, visible_text

VERIFY_CARD, VERIFY_CARD_SCHEMA = "verify.yaml", "sftron-verify-1"
"""The file that `sftron verify --card` writes into a run directory, and the value of its key `schema`."""

_TEMPLATE = Path(__file__).with_suffix(".md.jinja")
MAX_CARD_BYTES = 16 * 2**20
_RATE = "optimizer.learning_rate"


# --- The adapter ---


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """The adapter of a model card."""

    spec: LoraSpec
    base_sha256: str | None = None
    merge: MergeReport | None = None
    """For a merged model, the report of the merge."""
    in_nf4: bool = False
    """Whether the base's matrices were in NF4 in training."""


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
        config: The run's configuration. The settings in `state` take precedence, because the steps were trained with
            them, except for the limits of evaluation.keep.
        state: The state of a checkpoint; see `resume.run_facts`.
        run_folder: The folder of metrics.jsonl, evaluations.jsonl and mix_report.json; files and records that are
            missing or damaged are skipped.
        base: The model that training started from.
        chat_tokenizer: Decodes the stop tokens.
        adapter: The trained adapter, if any.
        repository: The Hub repository whose root holds the model, if any.
    """
    progress, settings = Progress.from_state(state["progress"]), Settings.from_state(state["settings"])
    limits = {each.set_name: each for each in config.evaluation.keep}
    config, periods = settings.as_config() or config, settings.periods()
    records, evaluations = (
        [record for record in intact_records(run_folder / name) if record["step"] <= progress.step]
        for name in ("metrics.jsonl", "evaluations.jsonl")
    )
    rates = [f"{rate:g} {period_words(first, last)}" for first, last, rate in periods.get(_RATE, [])]
    losses = [loss for record in records if type(loss := record.get("loss")) in (int, float)]
    made_with = [["Revision of the base", base.revision if adapter is None else None]]
    made_with += [["Hardware", state.get("hardware")]]
    run = {
        "options": config,
        "progress": progress,
        "token_budget": token_budget(config),
        "data": _data_rows(config, state, progress, run_folder),
        "stop_tokens": [chat_tokenizer.decode([token_id]) for token_id in state.get("stop_token_ids", [])],
        "divergence": divergence(records, len(chat_tokenizer.tokenizer)),
        "last_loss": _number(losses[-1] if losses else None),
        "learning_rate": ", ".join(rates) or f"{config.optimizer.learning_rate:g}",
        "verified": _verified(run_folder, state.get("fingerprint") or {}, base.folder),
        "changes": _change_rows(periods, progress.step),
        "evaluations": _evaluation_rows(evaluations),
        "kept": _kept_rows(evaluations, limits),
    }
    return fill_template(
        base,
        title=config.general.run_name,
        hub_datasets=[dataset.path for dataset in config.data.datasets if dataset.revision is not None],
        made_with=made_with,
        config_yaml=shareable(config),
        run=run,
        adapter=adapter,
        repository=repository,
    )


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4f}"


def _change_rows(periods: Mapping[str, Sequence[tuple[int, int | None, Any]]], last_step: int) -> list[list[str]]:
    """Returns a row for each value of each setting that changed during the run: key, steps and value."""
    return [
        [key, str(first) if first == (end := last or last_step) else f"{first} to {end}", shown(path_names(value))]
        for key, values in periods.items()
        if not key.startswith("logging.wandb.")
        for first, last, value in values
    ]


def _evaluation_rows(evaluations: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns a row for each evaluation set, with the first and the last evaluation."""
    rows = []
    for record in (*evaluations[:1], *evaluations[1:][-1:]):
        with suppress(AttributeError, KeyError, TypeError, ValueError):  # not a record that a run writes
            for name, measured in record["sets"].items():
                numbers = map(_number, (measured["loss"], measured["token_accuracy"]))
                rows.append([name, f"{record['step']:,}", *numbers, f"{measured['tokens']:,}"])
    return rows


def _kept_rows(evaluations: Sequence[Mapping[str, Any]], limits: Mapping[str, KeptDataset]) -> list[list[str]]:
    """Returns a row for each set of evaluation.keep in the last evaluation, judged by the limits that are in force
    now."""
    rows = []
    for record in evaluations[-1:]:
        with suppress(AttributeError, KeyError, TypeError, ValueError):  # a record that is not what a run writes
            for name, measured in record["sets"].items():
                if (kept := measured["kept"]) and name in limits:
                    rise, most = kept["rise"], limits[name].allowed_rise(kept["before"])
                    verdict = "kept" if rise is not None and rise <= most else "**forgot more than allowed**"
                    since = f" after step {kept['since']:,}" if kept["since"] else ""
                    before = _number(kept["before"]) + since
                    rows.append([name, f"{record['step']:,}", before, _number(rise), _number(most), verdict])
    return rows


def plain_model_card(base: BaseModel, step: int | None, adapter: AdapterFacts | None = None) -> str:
    """Returns a model card for weights from an unknown run."""
    title = base.folder.name + ("" if step is None else f", step {step}")
    return fill_template(base, title=title, adapter=adapter)


def _data_rows(config: Config, state: Mapping[str, Any], progress: Progress, run_folder: Path) -> list[list[str]]:
    """Returns a table row for each data set, and one for all data before it was changed."""
    num_rows: list[int | None] = [None] * len(progress.datasets)
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # it is missing or damaged
        report = read_json_value(run_folder / "mix_report.json")
        num_rows = [rows if type(rows := each.get("rows")) is int else None for each in report["datasets"]]

    def counted(count: DataSetCount) -> list[str]:
        return [f"{n:,}" for n in (count.conversations, count.num_dropped, count.tokens, count.trained_tokens)]

    rows, fingerprint = [], state.get("fingerprint") or {}
    for n, (dataset, count, known) in enumerate(zip(config.data.datasets, progress.datasets, num_rows, strict=False)):
        parts = [each for each in (dataset.config, dataset.split) if each not in (None, "train")]
        name = dataset.name or path_names(dataset.path) + f" ({', '.join(parts)})" * bool(parts)
        name += f" @ {dataset.revision}" if dataset.revision else ""
        size = ["?" if known is None else f"{known:,}", f"{count.epochs(known):.2f}"]
        rows.append([redacted(name), *size, *counted(count), str(fingerprint.get(f"data.datasets.{n}", "?"))[:12]])
    if progress.before.rows:
        rows.append(["data before it was changed", "", "", *counted(progress.before), "?"])
    return rows


def config_digest(text: str) -> str:
    """Returns the SHA-256 of a config.yaml without its comments, which name changes during the run."""
    lines = text.splitlines(keepends=True)
    return hashlib.sha256("".join(line for line in lines if not line.startswith("#")).encode()).hexdigest()


def _verified(run_folder: Path, fingerprint: Mapping[str, str], base_folder: Path) -> str:
    """Returns sentences about the card of `sftron verify` in the run directory; empty without an intact card.

    Args:
        fingerprint: The fingerprint of the run's data, and of its base weights if it trains adapters.
        base_folder: The folder of the model that training started from.
    """
    try:
        card = yaml.safe_load(read_regular(run_folder / VERIFY_CARD, MAX_CARD_BYTES))
        if card["schema"] != VERIFY_CARD_SCHEMA:
            return ""
        of, hashes = Counter(check["status"] for check in card["checks"]), card["hashes"]
        missing = f"{of['SKIP']} {'was' if of['SKIP'] == 1 else 'were'} not measured"
        counts = f"{of['PASS']} passed, {of['FAIL']} failed and {missing}"
        sentences = [f"Of {counted(of.total(), 'checks')} before the run, {counts}"]
        if limits := [name for name in ("--only", "--layers") if name in card.get("partial", [])]:
            sentences.append(f"They were only some of the checks ({', '.join(limits)})")
        if any(value != fingerprint[name] for name, value in hashes["data"].items() if name in fingerprint):
            sentences.append("The data, template or tokenizer differed from the run's")
        if digest_of(hashes["weights"]) != (fingerprint.get(BASE_WEIGHTS) or _base_digest(base_folder)):
            sentences.append("The weights differed from the run's initial weights")
        if config_digest(read_regular(run_folder / "config.yaml", MAX_CARD_BYTES).decode()) != hashes["config"]:
            sentences.append("The configuration differed from the run's")
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
    return yaml.safe_dump(path_names(tree), sort_keys=False, width=120, allow_unicode=True)


# --- The card as text ---


def fill_template(
    base: BaseModel,
    *,
    title: str,
    hub_datasets: Sequence[str] = (),
    made_with: Sequence[Sequence[str | None]] = (),
    config_yaml: str = "",
    run: Mapping[str, Any] | None = None,
    adapter: AdapterFacts | None = None,
    repository: str | None = None,
) -> str:
    """Returns the model card as text. All arguments except the title and `repository` may contain untrusted text.

    Args:
        repository: The Hub repository whose root holds the model.
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
        in_nf4=is_adapter and adapter is not None and adapter.in_nf4,
        adapter_rows=[] if adapter is None else _adapter_rows(base, adapter),
        adapter_notes=[] if adapter is None else adapter.merge.lines() if adapter.merge else vllm_limits(adapter.spec),
    )
    return f"{card}\n"


def _adapter_rows(base: BaseModel, adapter: AdapterFacts) -> list[list[str | None]]:
    """Returns the table of an adapter."""
    spec = adapter.spec
    layers = dict.fromkeys(name.rpartition(".")[2] for name in spec.ranks)
    return [
        ["Base model", base.name],
        ["Revision of the base", base.revision],
        ["SHA-256 of the base's weights", adapter.base_sha256],
        ["Its matrices in training", "NF4, 4 bits a weight" if adapter.in_nf4 else None],
        ["Rank", ", ".join(map(str, sorted(set(spec.ranks.values()))))],
        ["Alpha", ", ".join(f"{alpha:g}" for alpha in sorted(set(spec.alphas.values())))],
        ["Scaling", "alpha / sqrt(rank)" if spec.rslora else "alpha / rank"],
        ["Layers", f"{', '.join(layers)} ({len(spec.ranks)} matrices)" + (", DoRA" if spec.dora else "")],
        ["Trained in full", ", ".join(spec.modules_to_save) or None],
    ]


def code(text: str) -> str:
    """Returns untrusted text as a code span on one line; nothing in the text can end the span."""
    text = " ".join(visible_text(text).split()) or "?"
    fence = _fence(text, 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _fence(text: str, least: int) -> str:
    """Returns a fence of at least `least` backticks that is longer than any sequence of backticks in the text."""
    return "`" * max(least, 1 + max((len(ticks) for ticks in re.findall("`+", text)), default=0))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str | None]]) -> str:
    """Returns a Markdown table of the complete rows. In a column whose name ends in "*", cells are untrusted
    and become code spans."""
    lines = [[column.removesuffix("*") for column in columns], ["---"] * len(columns)]
    for row in rows:
        if None not in row:
            cells = zip(columns, map(str, row), strict=True)
            lines.append([code(cell) if name.endswith("*") else cell for name, cell in cells])
    # Pipes are escaped in code spans too, because Markdown splits a table into cells before it parses code spans.
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
