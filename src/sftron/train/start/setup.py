"""Setup of a run: configuration -> data -> model -> preflight checks.

`set_up` reads no weights, so bad input is refused within seconds. `load_model` reads the weights afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from dataclasses import replace
from pathlib import Path

import torch

from sftron.checkpoint import hf_weights
from sftron.checkpoint.hf_weights import EMBEDDINGS, HEAD, SafetensorsFolder
from sftron.checkpoint.model_folder import check_files, read_config, read_json
from sftron.config import Config
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.loader import PackLoader
from sftron.data.sources import find_files
from sftron.models.adapters import AdapterStart
from sftron.models.architecture import LlamaConfig, family_of
from sftron.models.attention import resolve_attention
from sftron.models.llama import LlamaForSFT, blocks_without_weights
from sftron.models.loss import resolve_loss
from sftron.models.mixtures import stated_aux_coefficient
from sftron.models.routing import freeze_routers
from sftron.models.sharding import shard_model
from sftron.train.evaluation import read_questions
from sftron.train.exports.exporter import read_export_parts
from sftron.train.flops import find_peak
from sftron.train.optimizer import make_adamw
from sftron.train.ranks import Ranks
from sftron.train.run import RunData, RunModel, Setup
from sftron.train.start import run_data
from sftron.train.start.lora import base_digest, frozen_dtype, resolve_adapters
from sftron.train.start.preflight import preflight, require_alike
from sftron.train.start.revisions import model_folder, tokenizer_folder
from sftron.train.start.sample import check_sample, project

_NUM_COMPARED_ROWS = 256
_LEAST_SHARE_OF_NORM = 1e-2


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
    file_stamps = run_data.file_stamps(config)
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
        file_stamps=file_stamps,
    )


def build_model(config: Config, ranks: Ranks, data: RunData) -> RunModel:
    """Reads the architecture and chooses the implementations, without reading weights. Raises ValueError."""
    folder = model_folder(config, download=False)
    compute_dtype = getattr(torch, config.model.compute_dtype)
    architecture = read_config(folder)
    num_heads = min(block.num_heads for block in blocks_without_weights(architecture))
    if num_heads < (context := config.parallelism.context):
        raise ValueError(
            f"parallelism.context is {context}, but {folder} has layers of {num_heads} heads, and each rank needs one "
            f"head at least; give {num_heads} at most"
        )
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
        loss=resolve_loss(config.model.loss, ranks.device, head_has=architecture.head_has),
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


# --- Control tokens that the model was never trained on ---


def ids_to_initialize(config: Config, folder: Path, chat_tokenizer: ChatTokenizer, control_ids: Set[int]) -> list[int]:
    """Returns the ids of tokenizer.add_tokens that are new to the tokenizer, or that the model was never trained on.

    Raises ValueError if the model was never trained on another one of `control_ids`, the control tokens of the data.
    """
    tokenizer, new_tokens = chat_tokenizer.tokenizer, chat_tokenizer.added_tokens
    vocabulary = tokenizer.get_vocab()
    # The row of a new token may exist already, because many models have more rows than their tokenizers have tokens.
    new_ids = {vocabulary[token] for token in new_tokens}
    known_ids = {vocabulary[token] for token in config.tokenizer.add_tokens if token not in new_tokens}
    untrained = untrained_ids(folder, known_ids | control_ids - new_ids)
    if refused := untrained.keys() - known_ids:
        named = "; ".join(f"{tokenizer.convert_ids_to_tokens(n)} (id {n}): {untrained[n]}" for n in sorted(refused))
        raise ValueError(
            f"the chat template writes control tokens that {folder} was never trained on: {named}. Choose a template "
            "without them (tokenizer.chat_template: plain needs none), or list them in tokenizer.add_tokens, so that "
            "they are initialized as the mean of all embeddings"
        )
    return sorted(new_ids | untrained.keys())


def untrained_ids(folder: Path, token_ids: Collection[int]) -> dict[int, str]:
    """Returns the tokens whose row in the embeddings or the head is nearly zero, with the measured norms.

    Base models have reserved control tokens that were never trained (such as the header tokens of Llama 3), so a
    template that writes them would start from nothing. A row counts as untrained if its norm is below 1 % of the median
    norm of 256 rows.
    """
    found: dict[int, str] = {}
    with SafetensorsFolder(folder) as source:
        for name in {EMBEDDINGS, HEAD} & set(source.names()):
            num_rows = source.shape(name)[0]
            compared = torch.linspace(0, num_rows - 1, min(_NUM_COMPARED_ROWS, num_rows)).long().tolist()
            rows = sorted(token_id for token_id in token_ids if token_id < num_rows)
            norms = source.read_rows(name, [*compared, *rows]).float().norm(dim=1)
            usual = float(norms[: len(compared)].median())
            for token_id, norm in zip(rows, norms[len(compared) :].tolist(), strict=True):
                if norm < _LEAST_SHARE_OF_NORM * usual:
                    found[token_id] = f"norm {norm:.2g} in {name}, where others have {usual:.2g}"
    return found


# --- Weights, optimizer and loader ---


def load_model(setup: Setup) -> LlamaForSFT:
    """Loads the weights onto the rank's device. Raises ValueError if they do not match config.json."""
    config, mesh = setup.config, setup.ranks.mesh

    def prepare(made: LlamaForSFT) -> None:
        if config.model.freeze_router:
            freeze_routers(made)
        if mesh is not None:
            shard_model(made, mesh, setup.ranks.context_group)

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
    options = {"keep_tail": on_gpu, "pin_memory": on_gpu, "context": setup.ranks.context}
    return run_data.make_loader(setup.config, setup.data.dataset, **options)
