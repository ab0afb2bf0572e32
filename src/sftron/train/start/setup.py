"""Setup of a run: configuration -> data -> model -> preflight checks.

`set_up` reads no weights, so bad input is refused within seconds. `load_model` reads the weights afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from sftron.checkpoint import hf_weights
from sftron.checkpoint.convert import BASE_WEIGHTS
from sftron.checkpoint.model_folder import check_files, read_config, read_json
from sftron.config import Config
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.loader import PackLoader
from sftron.data.prepare import Preparation
from sftron.data.sources import find_files
from sftron.models.adapters import AdapterStart
from sftron.models.architecture import LlamaConfig, architecture_facts, family_of
from sftron.models.attention import resolve_attention
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import resolve_loss
from sftron.models.mixtures import stated_aux_coefficient
from sftron.models.routing import freeze_routers
from sftron.models.sharding import shard_model
from sftron.train.evaluation import Question, read_questions
from sftron.train.exports.exporter import ExportParts, read_export_parts
from sftron.train.flops import Peak, TrainedMatrices, find_peak
from sftron.train.optimizer import make_adamw
from sftron.train.ranks import Ranks
from sftron.train.start import run_data
from sftron.train.start.lora import RunAdapters, base_digest, frozen_dtype, resolve_adapters
from sftron.train.start.new_tokens import ids_to_initialize
from sftron.train.start.preflight import preflight, require_alike
from sftron.train.start.revisions import model_folder, tokenizer_folder
from sftron.train.start.run_data import EvaluationSet
from sftron.train.start.sample import Projection, Sample, check_sample, project


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
    adapters: RunAdapters | None = None
    """None for full fine-tuning."""
    base_digest: str | None = None
    """The hash of the weight files, which a checkpoint of adapters refers to; None for full fine-tuning."""
    router_aux_loss_coef: float = 0.0
    """The factor of the auxiliary loss of routers; 0 for a model without experts."""

    @property
    def trained(self) -> TrainedMatrices:
        return TrainedMatrices() if self.adapters is None else self.adapters.trained

    @property
    def fingerprint(self) -> dict[str, str]:
        """The part of a checkpoint's fingerprint that describes the model."""
        facts = architecture_facts(self.architecture)
        if self.adapters is not None:
            facts |= self.adapters.facts | {BASE_WEIGHTS: str(self.base_digest)}
        return facts


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
        return self.model.fingerprint | run_data.data_fingerprint(self.config, self.data.dataset)

    @property
    def resolved_config(self) -> Config:
        """The configuration with what the run took from elsewhere: the date, if its template writes one, so that a
        later day changes nothing; and the factor of the auxiliary loss, if the model has experts."""
        resolved: dict[str, Any] = {}
        if (date := self.data.chat_tokenizer.template.date) is not None:
            resolved["tokenizer"] = self.config.tokenizer.model_copy(update={"date": date.isoformat()})
        if self.model.architecture.mixture is not None:
            update = {"router_aux_loss_coef": self.model.router_aux_loss_coef}
            resolved["model"] = self.config.model.model_copy(update=update)
        return self.config.model_copy(update=resolved)


def set_up(config: Config, ranks: Ranks) -> Setup:
    """Opens and checks everything in a run except its weights. Every rank calls this.

    Raises:
        ValueError: On all ranks, with a message for the user; DataError is a subclass.
    """
    ranks.all_or_raise(lambda: download(config, ranks))
    setup = ranks.all_or_raise(lambda: open_run(config, ranks))
    if setup.model.adapters is not None:
        digest = base_digest(setup.model.folder, ranks)
        setup = replace(setup, model=replace(setup.model, base_digest=digest))
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
    model_folder(config)
    tokenizer_folder(config)
    in_files = [options for options in config.data.datasets if not options.streaming]
    for each in (*in_files, *config.evaluation.datasets):
        if find_files(each.path, each.split, each.config) is None:
            run_data.open_rows(config, each)


def build_data(config: Config, ranks: Ranks) -> RunData:
    """Opens and checks the data of a run; the dataset yields this rank's packs. Raises ValueError."""
    folder = model_folder(config, download=False)
    check_files(folder)
    read_config(folder)  # first, because the tokenizer's error for a folder without a model is unclear
    chat_tokenizer = run_data.load_chat_tokenizer(config, tokenizer_folder(config, download=False))
    questions = read_questions(config.evaluation.prompts)
    preparation = run_data.open_data(config, chat_tokenizer)
    sample = check_sample(preparation, config.data.max_dropped_share)
    evaluation_sets = run_data.open_evaluation_sets(config, preparation)
    dp_rank, dp_world_size = ranks.dp_rank, ranks.dp_world_size
    dataset = run_data.make_dataset(config, preparation, dp_rank=dp_rank, dp_world_size=dp_world_size)
    return RunData(
        chat_tokenizer=chat_tokenizer,
        dataset=dataset,
        sample=sample,
        projection=project(config, dataset, sample, dp_world_size=dp_world_size),
        evaluation_sets=evaluation_sets,
        questions=questions,
    )


def build_model(config: Config, ranks: Ranks, data: RunData) -> RunModel:
    """Reads the architecture and chooses the implementations, without reading weights. Raises ValueError."""
    folder = model_folder(config, download=False)
    compute_dtype = getattr(torch, config.model.compute_dtype)
    architecture = read_config(folder)
    if config.tokenizer.add_tokens:
        highest_id = max(data.chat_tokenizer.tokenizer.get_vocab().values())
        architecture = replace(architecture, vocab_size=max(architecture.vocab_size, highest_id + 1))
    return RunModel(
        folder=folder,
        architecture=architecture,
        compute_dtype=compute_dtype,
        attention=resolve_attention(
            config.model.attention, ranks.device, compute_dtype, architecture.head_dim, architecture.layers
        ),
        loss=resolve_loss(config.model.loss, ranks.device, compute_dtype, head_has=architecture.head_has),
        peak=find_peak(ranks.device, config.logging.peak_tflops),
        initialize_ids=ids_to_initialize(config, folder, data.chat_tokenizer, data.sample.control_ids),
        export_parts=read_export_parts(config, folder, data.chat_tokenizer) if config.checkpoints.export_hf else None,
        adapters=resolve_adapters(config, architecture),
        router_aux_loss_coef=_router_aux_loss_coef(config, architecture, folder),
    )


def _router_aux_loss_coef(config: Config, architecture: LlamaConfig, folder: Path) -> float:
    """Returns the factor of the auxiliary loss. Raises ValueError if the model cannot have what is configured."""
    options, stated = config.model, config.model.router_aux_loss_coef
    if architecture.mixture is None:
        if stated or options.freeze_router:
            key = "router_aux_loss_coef" if stated else "freeze_router"
            raise ValueError(f"model.{key} is set, but {folder} has no experts and no router; remove the key")
        return 0.0
    if options.compile == "on":
        raise ValueError(
            f"model.compile: on is not implemented for mixtures of experts, and {folder} has "
            f"{architecture.mixture.num_experts} experts; set it to off"
        )
    if stated is not None:
        return stated
    source = read_json(folder / "config.json")
    return stated_aux_coefficient(source, family_of(source).defaults)


# --- Weights, optimizer and loader ---


def load_model(setup: Setup) -> LlamaForSFT:
    """Loads the weights onto the rank's device. Raises ValueError if they do not match config.json."""
    config, mesh = setup.config, setup.ranks.mesh

    def prepare(made: LlamaForSFT) -> None:
        if config.model.freeze_router:
            freeze_routers(made)
        if mesh is not None:
            shard_model(made, mesh)

    adapters = setup.model.adapters
    loaded = load_whole_model(setup, None if adapters is None else adapters.start, prepare)
    # `auto` means off until it has been measured on a GPU. On a CPU, compilation takes longer than it saves.
    if config.model.compile == "on":
        for block in loaded.model.layers:
            block.compile()
    return loaded


def load_whole_model(
    setup: Setup, adapters: AdapterStart | None, shard: Callable[[LlamaForSFT], None] | None = None
) -> LlamaForSFT:
    """Loads the run's model with these adapters, whole unless `shard` shards it. Raises ValueError as `load_model`."""
    config, model = setup.config, setup.model
    return hf_weights.load_model(
        model.folder,
        model.attention,
        model.compute_dtype,
        # The padding is a document too, and may be as long as the whole pack.
        max(setup.data.dataset.token_budget, model.architecture.max_position_embeddings),
        config.model.activation_checkpointing,
        vocab_size=model.architecture.vocab_size,
        initialize_ids=model.initialize_ids,
        device=setup.ranks.device,
        shard=shard,
        adapters=adapters,
        frozen_dtype=frozen_dtype(config),
    )


def make_optimizer(config: Config, model: LlamaForSFT) -> torch.optim.Optimizer:
    options = config.optimizer
    return make_adamw(
        model.named_parameters(),
        learning_rate=options.learning_rate,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        state=options.state,
    )


def make_loader(setup: Setup) -> PackLoader:
    # On a GPU, the padding is kept, because compilers and allocators work best with one shape.
    # On a CPU, it would only waste computation.
    on_gpu = setup.ranks.device.type == "cuda"
    return run_data.make_loader(setup.config, setup.data.dataset, keep_tail=on_gpu, pin_memory=on_gpu)
