"""Builds a run's model from its configuration: first architecture and adapters, later weights and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from sftron.checkpoint import hf_weights
from sftron.checkpoint.adapter import read_adapter
from sftron.checkpoint.checkpoint import trained_parameters
from sftron.checkpoint.frozen_files import Stamp
from sftron.checkpoint.hf_weights import EMBEDDINGS, HEAD, SafetensorsFolder, digest_of, file_digests, file_stamps
from sftron.checkpoint.model_folder import read_json
from sftron.config import Config
from sftron.config.schema import Lora
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.models.adapters import (
    AdapterStart,
    LoraSpec,
    add_adapters,
    is_adapter,
    match_targets,
    peft_name,
    projections_of,
)
from sftron.models.architecture import LlamaConfig, family_of
from sftron.models.llama import LlamaForSFT, attention_of_layers, blocks_without_weights
from sftron.models.loss import resolve_loss
from sftron.models.mixtures import stated_aux_coefficient
from sftron.models.quantization import NF4, store_frozen_in
from sftron.models.routing import ROUTERS, freeze_routers
from sftron.models.sharding import shard_model, whole
from sftron.models.wrappers import text_config
from sftron.regular_file import where_missing
from sftron.train.extension import NO_EXTENSION, Extension
from sftron.train.flops import TrainedMatrices, find_peak
from sftron.train.optimizer import ANY_LAYOUT, make_by_name, own_optimizer
from sftron.train.places import Places, export_source
from sftron.train.ranks import Ranks
from sftron.train.run import RunAdapters, RunData, RunModel, Setup, frozen_dtype
from sftron.visible_text import counted

DEFAULT_RANK, ALPHA_OF_RANK = 16, 2
"""The defaults of lora.rank and of lora.alpha, the latter as a multiple of the rank."""
_MOST_SHOWN = 8
_NUM_COMPARED_ROWS = 256
_LEAST_SHARE_OF_NORM = 1e-2


def build_model(config: Config, ranks: Ranks, places: Places, data: RunData) -> RunModel:
    """Chooses the implementations that compute the model, without reading weights. Raises ValueError."""
    folder, architecture = places.model, places.architecture
    compute_dtype = getattr(torch, config.model.compute_dtype)
    num_heads = min(block.num_heads for block in blocks_without_weights(architecture))
    if num_heads < (context := config.parallelism.context):
        raise ValueError(
            f"parallelism.context is {context}, but {folder} has layers with {num_heads} heads, and each rank needs "
            f"at least one head; set it to {num_heads} or less"
        )
    if config.tokenizer.add_tokens:
        highest_id = max(data.chat_tokenizer.tokenizer.get_vocab().values())
        architecture = replace(architecture, vocab_size=max(architecture.vocab_size, highest_id + 1))
    failures: list[str] = []
    return RunModel(
        folder=folder,
        stored_architecture=places.architecture,
        architecture=architecture,
        compute_dtype=compute_dtype,
        attention=attention_of_layers(
            config.model.attention, architecture, ranks.device, compute_dtype, failures.append
        ),
        attention_failures=failures,
        loss=resolve_loss(config.model.loss, ranks.device, head_has=architecture.head_has),
        peak=find_peak(ranks.device, config.logging.peak_tflops),
        initialize_ids=ids_to_initialize(config, folder, data.chat_tokenizer, data.sample.control_ids),
        export_source=export_source(config, places, data.chat_tokenizer) if config.checkpoints.export_hf else None,
        adapters=resolve_adapters(config, architecture),
        router_aux_loss_coef=_router_aux_loss_coef(config, architecture, folder),
    )


def _router_aux_loss_coef(config: Config, architecture: LlamaConfig, folder: Path) -> float:
    """Returns the factor of the auxiliary loss. Raises ValueError if the model does not support the configuration."""
    options, stated = config.model, config.model.router_aux_loss_coef
    if architecture.mixture is None:
        if stated or options.freeze_router:
            key = "router_aux_loss_coef" if stated else "freeze_router"
            raise ValueError(f"model.{key} is set, but {folder} has no experts or router; remove the key")
        return 0.0
    if options.compile == "on":
        raise ValueError(
            f"model.compile: on is not implemented for mixtures of experts, and {folder} has "
            f"{counted(architecture.mixture.num_experts, 'experts')}; set it to off"
        )
    if stated and not ROUTERS[architecture.mixture.router].has_aux_loss:
        raise ValueError(
            f"model.router_aux_loss_coef is {stated}, but the routers of {folder} have no auxiliary loss (a fixed "
            "correction balances them); remove the key"
        )
    if stated is not None:
        return stated
    source, _ = text_config(read_json(folder / "config.json"))
    return stated_aux_coefficient(source, family_of(source).defaults)


# --- Control tokens that the model was never trained on ---


def ids_to_initialize(config: Config, folder: Path, chat_tokenizer: ChatTokenizer, control_ids: Set[int]) -> list[int]:
    """Returns the ids of tokenizer.add_tokens that are new to the tokenizer, or that the model was never trained on.

    Raises ValueError if the model was never trained on another token in `control_ids`, the data's control tokens.
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
                    found[token_id] = f"norm {norm:.2g} in {name}, but usually {usual:.2g}"
    return found


# --- Adapters ---


def resolve_adapters(config: Config, architecture: LlamaConfig) -> RunAdapters | None:
    """Returns the adapters that `lora` of the configuration describes; None for full fine-tuning.

    Raises:
        ValueError: The model lacks a target layer, its matrices cannot be stored in model.frozen_dtype, or the section
            contradicts the adapter that it continues.
    """
    if config.lora is None:
        return None
    with torch.device("meta"):
        model = LlamaForSFT(architecture)
    try:
        start, origin = _start(config, model)
        add_adapters(model, architecture, start.spec)
    except ValueError as error:
        raise ValueError(f"lora.{error}") from error
    store_frozen_in(model, frozen_dtype(config), model.compute_dtype)
    _require_trained_new_tokens(config, architecture, start.spec)
    trained = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    saved = start.spec.modules_to_save
    in_adapters = sum(size for name, size in trained.items() if is_adapter(name))
    head = "lm_head" in saved or ("embed_tokens" in saved and architecture.tie_word_embeddings)
    matrices = TrainedMatrices(blocks=False, head=head, adapter_parameters=in_adapters)
    return RunAdapters(start, matrices, sum(trained.values()), frozen_dtype(config) == NF4, origin)


def _start(config: Config, model: LlamaForSFT) -> tuple[AdapterStart, str]:
    options = config.lora
    assert options is not None
    projections, has_experts = list(projections_of(model, model.config)), model.config.mixture is not None
    if options.adapter is not None:
        if not Path(options.adapter).is_dir():
            problem = f"is not a directory{where_missing(options.adapter)}; give a folder in peft's format"
            raise ValueError(f"adapter: {options.adapter} {problem}")
        try:
            found = read_adapter(Path(options.adapter), model.config)
        except ValueError as error:
            raise ValueError(f"adapter: {error}") from error
        _require_same(options, found.spec, projections)
        if lost := _lost_by_peft(list(found.spec.ranks), model.config.model_type):
            raise ValueError(
                f"adapter: {options.adapter} has {lost}; merge it into the base (sftron convert ADAPTER TARGET --model "
                "BASE), and train a new adapter on the result without them"
            )
        start = AdapterStart(spec=found.spec, tensors=found.tensors, seed=config.general.seed)
        origin = f"{options.adapter}, which names the base {found.base_model or '(none)'}"
        if found.in_nf4 and frozen_dtype(config) != NF4:
            origin += " and was trained on it in NF4; set model.frozen_dtype: nf4 to begin with the same model"
        return start, origin
    names = match_targets(options.targets, projections, has_experts=has_experts)
    if lost := _lost_by_peft(names, model.config.model_type):
        others = sorted({name.rpartition(".")[2] for name in names} - {*_OF_MLPS})
        raise ValueError(f"targets: these select {lost}; set lora.targets: [{', '.join(others)}]")
    rank = options.rank or DEFAULT_RANK
    spec = LoraSpec(
        ranks=dict.fromkeys(names, rank),
        alphas=dict.fromkeys(names, float(options.alpha or ALPHA_OF_RANK * rank)),
        rslora=options.rslora,
        dora=options.dora,
        modules_to_save=options.modules_to_save,
    )
    return AdapterStart(spec=spec, seed=config.general.seed, init=options.init), ""


_TAKEN_FOR_EXPERTS = frozenset(
    {
        *("qwen3_moe", "qwen3_next", "olmoe", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "dots1", "solar_open"),
    }
)
"""The model types in which peft (0.21) mistakes any adapter of gate_proj, up_proj or down_proj for an expert's."""
_OF_MLPS = ("gate_proj", "up_proj", "down_proj")


def _lost_by_peft(names: Sequence[str], model_type: str) -> str:
    """Returns a description of the adapted projections whose adapters peft would drop with only a warning; "" if it
    loads all."""
    lost = [name for name in names if name.endswith(_OF_MLPS)] if model_type in _TAKEN_FOR_EXPERTS else []
    if not lost:
        return ""
    return (
        f"adapters of dense layers or shared experts ({lost[0]} and {len(lost) - 1} more), which peft silently drops "
        f"in {model_type}, mistaking them for experts"
    )


def _require_same(options: Lora, spec: LoraSpec, projections: Sequence[str]) -> None:
    """Raises ValueError if a key of `lora` is not at its default and differs from the adapter's value."""
    found = {
        "rank": set(spec.ranks.values()),
        "alpha": set(spec.alphas.values()),
        "targets": set(spec.ranks),
        "rslora": {spec.rslora},
        "dora": {spec.dora},
        "modules_to_save": set(spec.modules_to_save),
    }
    for key, values in found.items():
        value = getattr(options, key)
        if value == Lora.model_fields[key].default:
            continue
        wanted = {value}
        if key == "targets":
            wanted = set(match_targets(value, projections))
        elif key == "modules_to_save":
            wanted = set(value)
        if wanted != values:
            there = ", ".join(map(str, sorted(values)[:_MOST_SHOWN])) or "none"
            raise ValueError(f"{key}: {value}, but {options.adapter} has {there}; remove the key")


def _require_trained_new_tokens(config: Config, architecture: LlamaConfig, spec: LoraSpec) -> None:
    needed = ["embed_tokens"] if architecture.tie_word_embeddings else ["embed_tokens", "lm_head"]
    missing = [name for name in needed if name not in spec.modules_to_save]
    if config.tokenizer.add_tokens and architecture.per_layer_input_size:
        raise ValueError(
            f"tokenizer.add_tokens: {', '.join(config.tokenizer.add_tokens)}, but this model needs embeddings of "
            "new tokens for each layer, which adapters do not have; train without lora, or without new tokens"
        )
    if config.tokenizer.add_tokens and missing:
        raise ValueError(
            f"tokenizer.add_tokens: {', '.join(config.tokenizer.add_tokens)}, but with lora their embeddings would not "
            f"be trained; add {' and '.join(missing)} to lora.modules_to_save"
        )


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the trained parameters, whole and on the CPU, by `peft_name`. Every rank calls this."""
    return {peft_name(name): whole(each.detach()).cpu() for name, each in trained_parameters(model).items()}


def base_digest(folder: Path, ranks: Ranks) -> tuple[str, dict[Path, Stamp]]:
    """Returns the SHA-256 over the weight files of the base model, and the stamps that they had before.

    Every rank calls this and reads a share of the files.
    """
    stamps = file_stamps(folder)
    ranks.gather({})  # no rank reads before each has its stamps
    own = file_digests(folder, ranks.rank, ranks.world_size)
    return digest_of({name: digest for each in ranks.gather(own) for name, digest in each.items()}), stamps


# --- Weights and optimizer ---


def load_run_model(setup: Setup, folder: Path | None = None) -> LlamaForSFT:
    """Loads the weights onto the rank's device. Raises ValueError if they do not match config.json.

    Args:
        folder: The run directory, for what a frozen base that is streamed stores once; None keeps the base in memory.
    """
    config, mesh = setup.config, setup.ranks.mesh

    def prepare(made: LlamaForSFT) -> None:
        if config.model.freeze_router:
            freeze_routers(made)
        if mesh is not None:
            shard_model(made, mesh, setup.ranks.context_group)

    adapters = setup.model.adapters
    loaded = load_whole_model(setup, None if adapters is None else adapters.start, prepare, folder=folder)
    # `auto` means off until it has been measured on a GPU. On a CPU, compilation takes longer than it saves.
    if config.model.compile == "on":
        for block in loaded.model.layers:
            block.compile()
    return loaded


def load_whole_model(
    setup: Setup,
    adapters: AdapterStart | None,
    shard: Callable[[LlamaForSFT], None] | None = None,
    *,
    folder: Path | None = None,
) -> LlamaForSFT:
    """Loads the run's model with these adapters, whole unless `shard` shards it; see `load_run_model`."""
    config, model, stream = setup.config, setup.model, None
    if folder is not None and config.model.frozen_base == "stream":
        # Without `shard`, one rank loads it by itself.
        ranks = setup.ranks
        stream = hf_weights.StreamedBase(folder, str(model.base_digest), model.base_stamps)
        if shard is not None:
            stream = stream._replace(is_main=ranks.is_main, together=ranks.all_or_raise)
    return hf_weights.load_model(
        model.folder,
        model.attention,
        model.compute_dtype,
        # The padding is a document too, and may be as long as the whole pack.
        max(setup.data.dataset.token_budget, model.architecture.max_position_embeddings),
        config.model.activation_checkpointing,
        architecture=model.stored_architecture,
        vocab_size=model.architecture.vocab_size,
        initialize_ids=model.initialize_ids,
        device=setup.ranks.device,
        shard=shard,
        adapters=adapters,
        frozen_dtype=frozen_dtype(config),
        stream=stream,
    )


def make_optimizer(config: Config, model: LlamaForSFT, extension: Extension = NO_EXTENSION) -> torch.optim.Optimizer:
    """Returns the optimizer of the configuration, or a user's own. Raises ValueError if that is not one."""
    options = config.optimizer
    if extension.optimizer is not None:
        if config.general.deterministic == "layout":
            raise ValueError(
                "general.deterministic: layout holds for sftron's own AdamW alone, and open_trainer was given an "
                "optimizer; set it to true, or leave the optimizer out"
            )
        return own_optimizer(extension.optimizer, model)
    return make_by_name(
        model.named_parameters(),
        learning_rate=options.learning_rate,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        name=ANY_LAYOUT if config.general.deterministic == "layout" else options.name,
    )
