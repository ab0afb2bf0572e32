"""The run's data, from its configuration: everything up to the loader, checked before any weight is read."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sftron.checkpoint.architecture import architecture_facts
from sftron.checkpoint.model_files import check_files
from sftron.config import Config
from sftron.data.chat import pretrained
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.formats.detect import FORMAT_SAMPLE, resolve_format
from sftron.data.labels import Targets
from sftron.data.lanes.lane import AUTO_NUM_LANES
from sftron.data.lanes.row_lengths import RowLengths, is_plannable
from sftron.data.loader import PackLoader, collate
from sftron.data.packing import lay_out, make_packing
from sftron.data.prepare import DataSet, Preparation
from sftron.data.sources import hold_out, open_source, open_stream
from sftron.data.types import (
    IGNORE_INDEX,
    Batch,
    ConversationKey,
    LabeledConversation,
    Role,
)
from sftron.models.architecture import LlamaConfig


def load_chat_tokenizer(config: Config, folder: Path | None = None) -> ChatTokenizer:
    """folder: that of the configuration's path, where it is known.

    Raises ValueError where the folder, the tokenizer or the template cannot be used.
    """
    path = str(folder or config.tokenizer_path)
    if Path(path).is_dir():
        check_files(Path(path))
    options = config.tokenizer
    return pretrained.load_chat_tokenizer(
        path,
        chat_template=options.chat_template,
        add_tokens=options.add_tokens,
        date=datetime.date.fromisoformat(options.date) if options.date else None,
        allow_control_tokens=config.data.allow_control_tokens,
    )


def with_date(config: Config, chat_tokenizer: ChatTokenizer) -> Config:
    """The configuration with the date that the template writes, where it does: an audit on another day needs it."""
    if (date := chat_tokenizer.template.date) is None:
        return config
    dated = config.tokenizer.model_copy(update={"date": date.isoformat()})
    return config.model_copy(update={"tokenizer": dated})


def prepare(config: Config, chat_tokenizer: ChatTokenizer) -> Preparation:
    """Open the data sets and settle their formats. Raises DataError."""
    datasets = []
    for options in config.data.datasets:
        if options.streaming:
            source = stream = open_stream(
                options.path, options.split, config.data.max_row_bytes, max_samples=options.max_samples
            )
            first_rows, held_out = stream.head(FORMAT_SAMPLE), None
        else:
            source = first_rows = open_source(
                options.path, options.split, config.data.max_row_bytes, max_samples=options.max_samples
            )
            source, held_out = hold_out(source, config.evaluation.share)
        row_format = resolve_format(
            first_rows,
            options.format,
            options.columns,
            options.prompt_template,
            skip_bad_rows=config.data.on_bad_row == "skip",
        )
        name = options.name or source.name
        datasets.append(DataSet(name, source, row_format, held_out=held_out, weight=options.weight))
    return make_preparation(config, _with_names_apart(datasets), chat_tokenizer)


def make_preparation(
    config: Config,
    datasets: Sequence[DataSet],
    chat_tokenizer: ChatTokenizer,
    *,
    train_on_completions_only: bool | None = None,
) -> Preparation:
    """train_on_completions_only: by default the configuration's. Raises DataError where there are no rows."""
    if train_on_completions_only is None:
        train_on_completions_only = config.data.train_on_completions_only
    return Preparation(
        datasets,
        chat_tokenizer,
        sequence_length=config.tokens.sequence_length,
        overlong=config.data.overlong,
        on_bad_row=config.data.on_bad_row,
        reasoning=config.data.reasoning,
        train_on_completions_only=train_on_completions_only,
        targets=Targets.named(config.data.train_on_roles, config.data.train_on_turns),
    )


def _with_names_apart(datasets: list[DataSet]) -> list[DataSet]:
    """Counts are kept by name: a name that was taken before becomes "name (2)"."""
    taken: Counter[str] = Counter()
    apart = []
    for dataset in datasets:
        taken[dataset.name] += 1
        number = taken[dataset.name]
        apart.append(dataset if number == 1 else replace(dataset, name=f"{dataset.name} ({number})"))
    return apart


def token_budget(config: Config) -> int:
    """Tokens of a pack, the row of one micro-batch."""
    return config.tokens.sequence_length * config.tokens.micro_batch_size


def longest_document(config: Config) -> int:
    """Tokens that attend to each other at most; the unused tail may be longer, but nobody reads it."""
    return config.tokens.sequence_length if config.data.remove_cross_attention else token_budget(config)


def make_dataset(
    config: Config,
    preparation: Preparation,
    *,
    dp_rank: int = 0,
    dp_world_size: int = 1,
    row_lengths: RowLengths | None = None,
) -> PackedDataset:
    """row_lengths: of these rows, where they are known. Raises DataError for ranks that do not divide the lanes."""
    num_lanes = config.data.num_lanes
    is_planned = num_lanes == "auto" and is_plannable(preparation, token_budget(config))
    if num_lanes == "auto":
        num_lanes = 1 if is_planned else AUTO_NUM_LANES
    return PackedDataset(
        preparation,
        make_packing(
            config.data.packing.strategy,
            pool_size=config.data.packing.pool_size,
            micro_batch_size=config.tokens.micro_batch_size,
        ),
        token_budget=token_budget(config),
        num_lanes=num_lanes,
        seed=config.general.seed,
        num_epochs=config.tokens.train_epochs,
        remove_cross_attention=config.data.remove_cross_attention,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        is_planned=is_planned,
        row_lengths=row_lengths,
    )


def make_loader(config: Config, dataset: PackedDataset, *, keep_tail: bool, pin_memory: bool) -> PackLoader:
    """Takes fewer workers, and the caller says so, where the wanted number does not divide the lanes."""
    return PackLoader(
        dataset,
        num_workers=num_workers(config, dataset),
        keep_tail=keep_tail,
        measured_roles=measured_roles(config, dataset.preparation),
        pin_memory=pin_memory,
        timeout_s=config.parallelism.timeout_seconds,
    )


def measured_roles(config: Config, preparation: Preparation) -> frozenset[Role]:
    """Roles that are not trained, and whose losses are wanted all the same."""
    if config.logging.untrained_roles_interval is None or not config.data.train_on_completions_only:
        return frozenset()
    return frozenset(Role) - preparation.targets.roles - {Role.PADDING}


def num_workers(config: Config, dataset: PackedDataset) -> int:
    """The configured number, or the next lower one that divides the rank's lanes."""
    return next(number for number in range(config.data.num_workers, -1, -1) if dataset.takes_workers(number))


def fingerprint(config: Config, dataset: PackedDataset, architecture: LlamaConfig) -> dict[str, str]:
    """All that pack n depends on (law 5) and the model's architecture, by name; a resume with another is refused."""
    return architecture_facts(architecture) | data_fingerprint(config, dataset)


def data_fingerprint(config: Config, dataset: PackedDataset) -> dict[str, str]:
    """All that pack n depends on (law 5), by name."""
    return {
        **dataset.preparation.fingerprint,
        "tokens.sequence_length x micro_batch_size": str(dataset.token_budget),
        "data.packing.strategy": config.data.packing.strategy,
        "data.packing.pool_size": str(dataset.packing.pool_size),
        "data.num_lanes": str(dataset.num_lanes),
        "data.max_row_bytes": str(config.data.max_row_bytes),
        "general.seed": str(dataset.seed),
    }


def maximal_batch(config: Config) -> Batch:
    """The most that a micro-batch can ask of memory: no unused tail, and a label at every token but the last ones."""
    length = config.tokens.sequence_length
    conversation = LabeledConversation(
        input_ids=np.zeros(length, dtype=np.int32),
        labels=np.append(np.zeros(length - 1), IGNORE_INDEX).astype(np.int32),
        loss_weights=np.append(np.ones(length - 1), 0).astype(np.float32),
        role_ids=np.full(length, Role.ASSISTANT, dtype=np.uint8),
        key=ConversationKey(0, 0),
    )
    pack = lay_out(
        [conversation] * config.tokens.micro_batch_size,
        token_budget=token_budget(config),
        remove_cross_attention=config.data.remove_cross_attention,
        pad_id=0,
    )
    return collate(pack, keep_tail=True)
