"""Setup of a run: configuration -> data -> model -> preflight checks.

`set_up` reads no weights, so bad input is refused within seconds. `load_model` reads the weights afterwards.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from sftron import __version__
from sftron.checkpoint import hf_weights
from sftron.checkpoint.atomic import main_or_raise
from sftron.checkpoint.hf_weights import check_files, read_config
from sftron.config import Config
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.lanes.row_lengths import measure_rows
from sftron.data.loader import PackLoader
from sftron.data.prepare import Preparation
from sftron.data.sources import find_files, open_source
from sftron.models.architecture import LlamaConfig, architecture_facts
from sftron.models.attention import resolve_attention
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import resolve_loss
from sftron.models.sharding import shard_model
from sftron.train import console, run_data
from sftron.train.evaluation import Question, read_questions
from sftron.train.flops import Peak, find_peak
from sftron.train.model_folder import ExportParts, local_folder, read_export_parts, rows_to_initialize
from sftron.train.optimizer import make_adamw
from sftron.train.preflight import preflight, require_alike
from sftron.train.projection import Projection, project
from sftron.train.ranks import Ranks
from sftron.train.run_data import EvaluationSet
from sftron.train.sample import Sample, check_sample

_LONG_ENOUGH_TO_REPORT = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The opened data of a run, and a sample of rows that has been checked in full."""

    chat_tokenizer: ChatTokenizer
    dataset: PackedDataset
    sample: Sample
    projection: Projection
    evaluation_sets: tuple[EvaluationSet, ...]
    questions: list[Question]

    @property
    def preparation(self) -> Preparation:
        return self.dataset.preparation

    @property
    def is_evaluated(self) -> bool:
        return bool(self.evaluation_sets or self.questions)

    @property
    def fingerprints(self) -> dict[str, Any]:
        """The hashes of rows, tokenizer and template: {"training": hash, "evaluation": {set name: hash}}.

        They are equal for two runs whose losses are computed over the same tokens, regardless of seed, lanes and model.
        """
        training = sha256(json.dumps(self.preparation.fingerprint, sort_keys=True).encode()).hexdigest()
        return {"training": training, "evaluation": {each.name: each.fingerprint for each in self.evaluation_sets}}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    """The model of a run without its weights: its architecture and the implementations that compute it."""

    folder: Path
    architecture: LlamaConfig
    compute_dtype: torch.dtype
    attention: str
    loss: str
    peak: Peak
    initialize_ids: list[int]
    """The ids of tokens whose embeddings are initialized to the mean of all embeddings."""
    export_parts: ExportParts | None
    """None if the run exports nothing."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that a run needs except weights and training state."""

    config: Config
    ranks: Ranks
    data: RunData
    model: RunModel

    @property
    def fingerprint(self) -> dict[str, str]:
        """The architecture and everything that pack n depends on (law 5), by name.

        A resume with another fingerprint is refused, unless checkpoints.allow_data_change permits it.
        """
        return architecture_facts(self.model.architecture) | run_data.data_fingerprint(self.config, self.data.dataset)

    @property
    def resolved_config(self) -> Config:
        """The configuration with `tokenizer.date` filled in if the template writes a date.

        The same run can then be started again on any later day.
        """
        if (date := self.data.chat_tokenizer.template.date) is None:
            return self.config
        tokenizer = self.config.tokenizer.model_copy(update={"date": date.isoformat()})
        return self.config.model_copy(update={"tokenizer": tokenizer})


def set_up(config: Config, ranks: Ranks) -> Setup:
    """Opens and checks everything in a run except its weights. Every rank calls this.

    Raises:
        ValueError: On all ranks, with a message for the user; DataError is a subclass.
    """
    ranks.all_or_raise(lambda: download(config, ranks))
    setup = ranks.all_or_raise(lambda: open_run(config, ranks))
    require_alike(setup)
    return setup


def open_run(config: Config, ranks: Ranks) -> Setup:
    """Does the work of `set_up` on one rank, after `download`."""
    data = build_data(config, ranks)
    model = build_model(config, ranks, data)
    preflight(config, data, model)
    return Setup(config, ranks, data, model)


def download(config: Config, ranks: Ranks) -> None:
    """Downloads missing models, tokenizers and data sets on the first rank of each node. Raises ValueError."""
    if ranks.local_rank != 0:
        return
    local_folder(config.model.path)
    local_folder(config.tokenizer_path, with_weights=config.tokenizer_path == config.model.path)
    in_files = [options for options in config.data.datasets if not options.streaming]
    for options in (*in_files, *config.evaluation.datasets):
        if find_files(options.path, options.split) is None:
            open_source(options.path, options.split, config.data.max_row_bytes)


def build_data(config: Config, ranks: Ranks) -> RunData:
    """Opens and checks the data of a run; the dataset yields this rank's packs. Raises ValueError."""
    model_folder = local_folder(config.model.path, download=False)
    check_files(model_folder)
    read_config(model_folder)  # first, because the tokenizer's error for a folder without a model is unclear
    tokenizer_folder = local_folder(config.tokenizer_path, with_weights=False, download=False)
    chat_tokenizer = run_data.load_chat_tokenizer(config, tokenizer_folder)
    questions = read_questions(config.evaluation.prompts)
    preparation = run_data.open_data(config, chat_tokenizer)
    sample = check_sample(preparation, config.data.max_dropped_share)
    dp_rank, dp_world_size = ranks.dp_rank, ranks.dp_world_size
    return RunData(
        chat_tokenizer=chat_tokenizer,
        sample=sample,
        evaluation_sets=run_data.open_evaluation_sets(config, preparation),
        questions=questions,
        dataset=run_data.make_dataset(config, preparation, dp_rank=dp_rank, dp_world_size=dp_world_size),
        projection=project(config, preparation, sample, dp_world_size=dp_world_size),
    )


def build_model(config: Config, ranks: Ranks, data: RunData) -> RunModel:
    """Reads the architecture and chooses the implementations, without reading weights. Raises ValueError."""
    folder = local_folder(config.model.path, download=False)
    compute_dtype = getattr(torch, config.model.compute_dtype)
    architecture = read_config(folder)
    if config.tokenizer.add_tokens:
        highest_id = max(data.chat_tokenizer.tokenizer.get_vocab().values())
        architecture = replace(architecture, vocab_size=max(architecture.vocab_size, highest_id + 1))
    return RunModel(
        folder=folder,
        architecture=architecture,
        compute_dtype=compute_dtype,
        attention=resolve_attention(config.model.attention, ranks.device, compute_dtype, architecture.head_dim),
        loss=resolve_loss(config.model.loss, ranks.device, compute_dtype),
        peak=find_peak(ranks.device, config.logging.peak_tflops),
        initialize_ids=rows_to_initialize(folder, data.chat_tokenizer, config.tokenizer.add_tokens),
        export_parts=read_export_parts(config, folder, data.chat_tokenizer) if config.checkpoints.export_hf else None,
    )


def measure_rows_once(setup: Setup, file: Path) -> dict[str, Any] | None:
    """Sets the row lengths of a dataset with planned packing.

    The lengths are read from `file` if it belongs to the same data and settings. Otherwise they are measured, and each
    rank measures its share of the rows. Every rank calls this, after `require_alike`.

    Returns:
        The content to write to `file` for the next start; None if `file` is up to date or packing is not planned.

    Raises:
        ValueError: On all ranks, if any rank has a bad row.
    """
    ranks, dataset, preparation = setup.ranks, setup.data.dataset, setup.data.preparation
    num_rows = preparation.num_rows
    if not dataset.is_planned or num_rows is None:
        return None
    facts = {**run_data.data_fingerprint(setup.config, dataset), "sftron": __version__}
    fingerprint = sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    rows = main_or_raise(ranks, lambda: _read_row_lengths(file, fingerprint, num_rows))
    is_known = rows is not None
    if not is_known:
        if num_rows >= _LONG_ENOUGH_TO_REPORT:
            console.say(f"measuring  {num_rows:,} rows, once, so that packs are full to the end of an epoch")
        own = range(ranks.dp_rank, num_rows, ranks.dp_world_size)
        measured = ranks.all_or_raise(lambda: measure_rows(preparation, own))
        rows = [0] * num_rows
        for rank, each in enumerate(ranks.gather({"rows": measured})):
            rows[rank :: ranks.dp_world_size] = each["rows"]
    dataset.row_lengths = rows
    return None if is_known else {"fingerprint": fingerprint, "rows": rows}


def _read_row_lengths(file: Path, fingerprint: str, num_rows: int) -> list[int | str] | None:
    """Returns the rows of `file`, or None if it is incomplete or belongs to other data.

    A wrong length is detected later, when its row is read.
    """
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        rows = kept["rows"] if kept["fingerprint"] == fingerprint else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(rows, list) or len(rows) != num_rows:
        return None
    return rows if all(isinstance(row, str) or (type(row) is int and 0 < row < 2**31) for row in rows) else None


# --- Weights, optimizer and loader ---


def load_model(setup: Setup) -> LlamaForSFT:
    """Loads the weights onto the rank's device. Raises ValueError if they do not match config.json."""
    config, model, mesh = setup.config, setup.model, setup.ranks.mesh
    loaded = hf_weights.load_model(
        model.folder,
        model.attention,
        model.compute_dtype,
        # The padding is a document too, and may be as long as the whole pack.
        max(setup.data.dataset.token_budget, model.architecture.max_position_embeddings),
        config.model.activation_checkpointing,
        run_data.longest_document(config),
        vocab_size=model.architecture.vocab_size,
        initialize_ids=model.initialize_ids,
        device=setup.ranks.device,
        shard=None if mesh is None else lambda made: shard_model(made, mesh),
    )
    # `auto` means off until it has been measured on a GPU. On a CPU, compilation takes longer than it saves.
    if config.model.compile == "on":
        for block in loaded.model.layers:
            block.compile()
    return loaded


def make_optimizer(config: Config, model: LlamaForSFT) -> torch.optim.AdamW:
    options = config.optimizer
    return make_adamw(
        model.named_parameters(),
        learning_rate=options.learning_rate,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
    )


def make_loader(setup: Setup) -> PackLoader:
    on_gpu = setup.ranks.device.type == "cuda"
    # On a GPU, the padding is kept, because compilers and allocators work best with one shape.
    # On a CPU, it would only waste computation.
    return run_data.make_loader(setup.config, setup.data.dataset, keep_tail=on_gpu, pin_memory=on_gpu)
