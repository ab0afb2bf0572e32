"""The first configuration for a user's own data: sizes that fit the rows and the model, with comments."""

from __future__ import annotations

import json
import re
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from sftron.checkpoint.adapter import model_projections
from sftron.checkpoint.model_folder import read_json
from sftron.checkpoint.source import hub_id
from sftron.config import Config, load_config
from sftron.config.data_schema import Data
from sftron.config.load import with_overrides
from sftron.data.formats.detect import suggested_readings
from sftron.data.overlap import repetitions
from sftron.data.types import DataError
from sftron.errors import show
from sftron.kernels.device import computes_bfloat16, is_gpu
from sftron.models.adapters import LoraSpec
from sftron.models.architecture import LlamaConfig
from sftron.models.quantization import NF4
from sftron.report.counts import LengthCount
from sftron.train import build_data
from sftron.train.build_model import ALPHA_OF_RANK, DEFAULT_RANK
from sftron.train.build_run import download_rows, open_run
from sftron.train.logs import console
from sftron.train.measured_memory import total_memory
from sftron.train.memory import StepMemory, predict_run, with_reserve
from sftron.train.places import Places, find_places
from sftron.train.ranks import Ranks, start_ranks
from sftron.train.run import Setup
from sftron.train.sample import Sample, check_sample
from sftron.train.text.description import describe_memory, describe_setup
from sftron.visible_text import counted, visible_text

_TEMPLATE = Path(__file__).with_name("sft.yaml.jinja")
_EPOCHS = 3
_STEPS_PER_EPOCH = 50
"""The number of steps that an epoch of a small data set has; with more tokens, steps become longer first."""
_TOKENS_PER_STEP = 2**17
"""The longest step."""
_TOKENS_PER_PACK = 2**13
"""The size of a pack on a GPU, whose kernels need a few thousand tokens; on a CPU, a pack is one row."""
_HELD_OUT_SHARE, _MOST_HELD_OUT = 0.05, 500
_LEARNING_RATES = ((0.5e9, 1e-4), (2e9, 3e-5), (15e9, 1e-5), (float("inf"), 5e-6))
"""Learning rates of full fine-tuning, each for models with fewer parameters than the number, if no recipe has one."""
_LORA_FACTOR = 10
"""The ratio of the adapters' learning rate to full fine-tuning's, as in docs/lora.md."""
_EVALUATIONS = 10
"""The number of evaluations during the run, so that loss.png shows where the loss on the held-out rows rises again."""
_WARM_UP = 0.05
"""The warm-up as a share of the steps, so that it also suits a run of a few steps."""
_UNMEASURED = 2**20
"""A sequence length for which no row is overlong, so that all are measured."""


def write_first_config(data: str, model: str, out: Path, overrides: Sequence[str] = ()) -> None:
    """Looks at the data and the model, and writes the configuration. Raises ValueError or OSError.

    Args:
        overrides: `--section.key=value`, for keys that are given; the others are chosen.
    """
    if out.is_dir():
        raise ValueError(f"--out: {out} is a folder; give a file in it: --out {shlex.quote(str(out / 'sft.yaml'))}")
    if out.exists():
        raise ValueError(f"{out} exists; remove it, or choose another file with --out FILE")
    if not out.parent.is_dir():
        raise ValueError(f"--out: {out.parent} is not a directory; create it, or choose another file")
    console.start(True)
    ranks = start_ranks()
    tree: dict[str, Any] = {
        "general": {"run_name": _run_name(data)},
        "model": {"path": model},
        "tokenizer": {},
        "data": {"datasets": [_dataset(data)]},
        "tokens": {"sequence_length": _UNMEASURED, "train_epochs": _EPOCHS},
        "optimizer": {"learning_rate": 1e-5},
    }
    if not computes_bfloat16(ranks.device):
        tree["model"]["compute_dtype"] = "float32"
    tree = with_overrides(tree, overrides)
    tree["tokens"]["sequence_length"] = _UNMEASURED
    places = _look_at_model(tree, ranks)
    sample, num_rows, meaning = _look_at_rows(tree, places)
    lengths, positions = sample.audit.lengths, places.architecture.max_position_embeddings
    most_dropped = tree["data"].get("max_dropped_share", Data.model_fields["max_dropped_share"].default)
    tree["tokens"] |= _sizes(lengths, num_rows, positions, model, most_dropped, on_gpu=is_gpu(ranks.device))
    evaluation = tree.setdefault("evaluation", {})
    if not evaluation.get("datasets"):
        evaluation.setdefault("share", float(f"{min(_HELD_OUT_SHARE, _MOST_HELD_OUT / num_rows):.2g}"))
    tree = with_overrides(tree, overrides)
    setup = open_run(Config.model_validate(tree), ranks, places)
    describe_setup(setup)
    describe_memory(setup)
    found = _memory_of_ways(setup)
    rates = _rates(setup, found)
    tree["optimizer"] |= {"learning_rate": rates[setup.config.lora is not None], "warmup_steps": _WARM_UP}
    if setup.data.evaluation_sets:
        evaluation = tree["evaluation"]
        evaluation.setdefault("interval", max(1, round(_steps(setup) / _EVALUATIONS)))
    tree = with_overrides(tree, overrides)
    out.write_text(_render(setup, sample, found, tree, rates, meaning, out), encoding="utf-8")
    load_config(out)
    length = setup.config.tokens.sequence_length
    quantiles = f"half have up to {lengths.quantile(0.5):,} tokens, the longest {max(lengths):,}"
    show(f"lengths    {_share_that_fits(lengths, length)} of the sampled rows fit {length:,} tokens; {quantiles}")
    if repeated := repetitions(setup.data.preparation)[0]:
        row, earlier = repeated[0]
        rows = f"{counted(len(repeated), 'rows')} equal to an earlier one; the first: {row} is {earlier}"
        show(f"WARNING    {rows}. Remove unintended ones")
    if meaning:
        show(f"columns    read as if {meaning}: see data.datasets, and change it if that is wrong")
    show(f"written    {out}; next: sftron train --config {shlex.quote(str(out))} --dry-run")


# --- What is there ---


def _dataset(data: str) -> dict[str, str]:
    """Returns the keys of a path; openai/gsm8k:main is the configuration main of a data set of the Hub."""
    path, _, config = data.partition(":")
    is_on_hub = config and hub_id(path) and not Path(data).exists()
    return {"path": path, "config": config} if is_on_hub else {"path": data}


def _look_at_model(tree: dict[str, Any], ranks: Ranks) -> Places:
    """Downloads what is on the Hub, and chooses a template if the tokenizer has none."""
    config = Config.model_validate(tree)
    places = find_places(config, ranks)
    download_rows(config, ranks)
    folder = places.model
    file = folder / "tokenizer_config.json"
    has_template = file.is_file() and read_json(file).get("chat_template")
    if not has_template and not [*folder.glob("*chat_template*")]:
        tree["tokenizer"]["chat_template"] = "plain"  # needs no control token that the model does not know
    return places


def _look_at_rows(tree: dict[str, Any], places: Places) -> tuple[Sample, int, str]:
    """Checks a sample of the rows. If they can be read in one way only, adds the keys for it to the data set.

    Returns:
        The sample, the number of rows, and what must be true of the columns; "" if the format was detected.
    """
    config, meaning = Config.model_validate(tree), ""
    chat_tokenizer = build_data.load_chat_tokenizer(config, places.tokenizer)
    try:
        preparation = build_data.open_data(config, chat_tokenizer)
    except DataError as error:
        if error.reason != "no_format":
            raise
        (dataset,) = tree["data"]["datasets"]
        readings = suggested_readings(build_data.open_rows(config, config.data.datasets[0])[0])
        if len(readings) != 1:
            raise
        meaning, keys = readings[0]
        dataset |= keys
        preparation = build_data.open_data(Config.model_validate(tree), chat_tokenizer)
    return check_sample(preparation, config.data.max_dropped_share), preparation.num_rows or 0, meaning


# --- What is chosen ---


def _run_name(data: str) -> str:
    """Returns the name of the data's file or folder, limited to the characters of a run's name."""
    stem = Path(data.rstrip("/*")).name.partition(".")[0]
    stem = "".join(each for each in unicodedata.normalize("NFKD", stem) if not unicodedata.combining(each))
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")[:60] or "my-run"


def _share_that_fits(lengths: LengthCount, limit: int) -> str:
    share = sum(count for length, count in lengths.items() if length <= limit) / lengths.total()
    return f"{100 * share:.4g} %"


def _sizes(
    lengths: LengthCount, num_rows: int, positions: int, model: str, most_dropped: float, *, on_gpu: bool
) -> dict[str, int]:
    """Returns the sizes of `tokens`. Raises ValueError if too many rows are longer than the positions of the model.

    The sequence length is a power of two up to 1,024, or a multiple of 256, into which the longest row fits; if a few
    rows are more than twice as long as 99 % of all, it fits those 99 %.
    """
    longest, usual = max(lengths), lengths.quantile(0.99)
    wanted = longest if longest <= max(2 * usual, 1024) else usual
    rounded = -(-wanted // 256) * 256 if wanted > 1024 else max(512, 1 << (wanted - 1).bit_length())
    length = min(rounded, positions)
    too_long = sum(count for each, count in lengths.items() if each > length)
    if too_long > most_dropped * lengths.total():
        raise ValueError(
            f"{too_long} of {lengths.total()} sampled rows are longer than the {positions:,} positions of {model}; "
            "shorten them, allow a larger share (--data.max_dropped_share=SHARE), or use a model with more positions"
        )
    mean = sum(each * count for each, count in lengths.items()) / lengths.total()
    # A pool of 256 conversations should hold two packs.
    size = max(1, int(min(_TOKENS_PER_PACK, 128 * mean)) // length) if on_gpu else 1
    accumulation = min(round(mean * num_rows / _STEPS_PER_EPOCH / (length * size)), _TOKENS_PER_STEP // (length * size))
    return {
        "sequence_length": length,
        "micro_batch_size": size,
        "batch_accumulation_per_replica": max(1, accumulation),
    }


# --- The file ---


def _render(
    setup: Setup,
    sample: Sample,
    found: Mapping[str, StepMemory],
    tree: Mapping[str, Any],
    rates: tuple[float, float],
    meaning: str,
    out: Path,
) -> str:
    """Returns the text of the configuration: the template, with what was found and chosen."""
    config, device, lengths = setup.config, setup.ranks.device, sample.audit.lengths
    preparation = setup.data.preparation
    peaks = {name: with_reserve(each.peak, on_gpu=is_gpu(device)) for name, each in found.items()}
    fitting = [name for name, peak in peaks.items() if peak <= total_memory(device)]
    num_parameters = _num_parameters(found)
    steps_per_epoch = setup.data.projection.steps_per_epoch or 0.0
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        config=config,
        tree=tree,
        dataset=tree["data"]["datasets"][0],
        row_format=str(preparation.datasets[0].row_format),
        num_rows=f"{(preparation.num_rows or 0) + sum(len(each.held_out or ()) for each in preparation.datasets):,}",
        meaning=meaning,
        out=shlex.quote(str(out)),
        scalar=_scalar,
        others=_other_lines,
        comment=lambda text: " ".join(visible_text(text).split()),
        projection=setup.data.projection,
        steps=_steps(setup),
        steps_per_epoch=steps_per_epoch,
        lengths=lengths,
        longest=max(lengths),
        fit=_share_that_fits(lengths, config.tokens.sequence_length),
        peaks={name: f"{peak / 1e9:.1f}" for name, peak in peaks.items()},
        memory=f"{total_memory(device) / 1e9:.1f}",
        device=device.type,
        fitting=fitting,
        suggested=fitting[0] if fitting and "full" not in fitting and config.lora is None else None,
        num_parameters=f"{num_parameters / 1e9:.2f} billion" if num_parameters >= 1e8 else f"{num_parameters:,.0f}",
        lora_rate=_shown(rates[1]),
    )


def _memory_of_ways(setup: Setup) -> dict[str, StepMemory]:
    """Returns the memory of a step of the run, which trains all weights, and of a step with the file's optional
    adapters; also on NF4 matrices if the model supports them."""
    dtype, names = setup.model.compute_dtype, model_projections(setup.model.architecture)
    spec = LoraSpec(
        ranks=dict.fromkeys(names, DEFAULT_RANK), alphas=dict.fromkeys(names, float(ALPHA_OF_RANK * DEFAULT_RANK))
    )
    found = {"full": predict_run(setup, None, dtype), "LoRA": predict_run(setup, spec, dtype)}
    with suppress(ValueError):
        found["QLoRA (nf4)"] = predict_run(setup, spec, NF4)
    streamed = {f"{name}, streamed": each.with_base(streams=True) for name, each in found.items()}
    return found | {name: each for name, each in streamed.items() if each.streaming_saves > 0}


def _steps(setup: Setup) -> float:
    """Returns the projected number of steps of the run."""
    tokens, steps_per_epoch = setup.config.tokens, setup.data.projection.steps_per_epoch or 0.0
    return tokens.train_steps or (tokens.train_epochs or 0) * steps_per_epoch


def _rates(setup: Setup, found: Mapping[str, StepMemory]) -> tuple[float, float]:
    """Returns the learning rates for full fine-tuning and for adapters, for a model of this size."""
    if recipe := recipe_of(setup.model.architecture):
        return recipe.learning_rate, recipe.lora_rate
    num_parameters = _num_parameters(found)
    by_size = next(rate for size, rate in _LEARNING_RATES if num_parameters < size)
    return by_size, _LORA_FACTOR * by_size


def _num_parameters(found: Mapping[str, StepMemory]) -> float:
    return found["full"].weights / 4  # float32


def _other_lines(section: Mapping[str, Any], known: Sequence[str]) -> str:
    """Returns a line, after a line break, for each key of a section that the template lacks."""
    return "".join(f"\n  {key}: {_scalar(value)}" for key, value in section.items() if key not in known)


def _shown(rate: float) -> str:
    return f"{rate:.1e}".replace("e-0", "e-")


def _scalar(value: Any) -> str:
    """Returns a value in YAML's flow style; a text is quoted if it could be anything but a name or a path."""
    if not isinstance(value, str):
        return _shown(value) if isinstance(value, float) and 0 < value < 1e-3 else json.dumps(value, ensure_ascii=False)
    text = value
    is_name = re.fullmatch(r"[A-Za-z_][\w.-]*|[\w.-]*(/[\w.-]+)+", text, re.ASCII)
    is_plain = is_name and text.lower() not in ("null", "true", "false")
    return text if is_plain else json.dumps(text, ensure_ascii=False)


# --- The learning rates of models that people fine-tune ---


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model, recognized by its sizes, and its peak learning rates; configs/recipes names their sources."""

    name: str
    """The start of the names of its files in configs/recipes, NAME-full.yaml and NAME-lora.yaml."""
    model: str
    """The id on the Hub."""
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    learning_rate: float
    """Of full fine-tuning."""
    lora_rate: float


RECIPES = (
    Recipe("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "llama", 4096, 32, 2e-5, 3e-4),
    Recipe("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3", "mistral", 4096, 32, 1e-5, 6e-5),
    Recipe("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", "smollm3", 2048, 36, 2e-5, 2e-4),
    Recipe("phi-4-mini", "microsoft/Phi-4-mini-instruct", "phi3", 3072, 32, 5e-6, 5e-6),
    Recipe("olmo-3-7b", "allenai/Olmo-3-7B-Instruct", "olmo3", 4096, 32, 8e-5, 2e-4),
    Recipe("granite-3.3-2b", "ibm-granite/granite-3.3-2b-instruct", "granite", 2048, 40, 2e-5, 2e-4),
    Recipe("gpt-oss-20b", "openai/gpt-oss-20b", "gpt_oss", 2880, 24, 2e-5, 2e-4),
    Recipe("qwen-3.5-4b", "Qwen/Qwen3.5-4B", "qwen3_5_text", 2560, 32, 1e-5, 1e-4),
    Recipe("qwen-3.5-35b-a3b", "Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe_text", 2048, 40, 1e-5, 1e-4),
    Recipe("gemma-4-e4b", "google/gemma-4-E4B-it", "gemma4_text", 2560, 42, 1e-5, 5e-5),
    Recipe("gemma-4-26b-a4b", "google/gemma-4-26B-A4B-it", "gemma4_text", 2816, 30, 1e-5, 2e-4),
    Recipe("gemma-4-31b", "google/gemma-4-31B-it", "gemma4_text", 5376, 60, 5e-6, 5e-5),
)


def recipe_of(architecture: LlamaConfig) -> Recipe | None:
    """Returns the recipe of a model with these sizes, whatever its name; None if there is none."""
    stated = (architecture.model_type, architecture.hidden_size, architecture.num_hidden_layers)
    sizes = {(each.model_type, each.hidden_size, each.num_hidden_layers): each for each in RECIPES}
    return sizes.get(stated)
