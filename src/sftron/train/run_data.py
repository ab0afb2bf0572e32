"""Builds the data of a run from its configuration: tokenizer, data sets, evaluation sets, packs and loader."""

from __future__ import annotations

import datetime
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sftron.checkpoint.hf_weights import check_files
from sftron.config import Config
from sftron.config.schema import Rows
from sftron.data.chat import pretrained
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.formats.detect import FORMAT_SAMPLE, RowFormat, resolve_format
from sftron.data.labels import Targets
from sftron.data.loader import PackLoader, collate
from sftron.data.packing import lay_out
from sftron.data.prepare import DataOptions, DataSet, Preparation
from sftron.data.sources import open_source, open_stream, split_source
from sftron.data.sources.views import RowSource
from sftron.data.types import IGNORE_INDEX, Batch, ConversationKey, DataError, Dropped, LabeledConversation, Role
from sftron.train.progress import too_many_dropped
from sftron.train.sample import check_sample

HELD_OUT = "held_out"
"""The name of the evaluation set that evaluation.share makes."""
RESERVED_NAMES = ("seconds", "stop_rate")
"""Names that an evaluation set cannot have, because wandb has metrics such as eval/stop_rate."""
_ROWS_AT_ONCE = 256


# --- The tokenizer and the data sets ---


def load_chat_tokenizer(config: Config, folder: Path | None = None) -> ChatTokenizer:
    """Loads the tokenizer with the configured chat template.

    Args:
        folder: The local folder of the tokenizer, if it is known; by default, the path in the configuration.

    Raises:
        ValueError: If the folder, the tokenizer or the template cannot be used.
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


def open_data(config: Config, chat_tokenizer: ChatTokenizer) -> Preparation:
    """Opens the data sets and detects their formats. Raises DataError."""
    datasets, names = [], Counter[str]()
    for options in config.data.datasets:
        held_out = None
        if options.streaming:
            source = open_stream(
                options.path, options.split, config.data.max_row_bytes, max_samples=options.max_samples
            )
            row_format = _row_format(config, options, source.head(FORMAT_SAMPLE))
        else:
            rows = _open_rows(config, options)
            row_format = _row_format(config, options, rows)
            source, held_out = split_source(rows, config.evaluation.share)
        name = options.name or source.name
        names[name] += 1  # counts are kept by name, so a duplicate becomes "name (2)"
        name = name if names[name] == 1 else f"{name} ({names[name]})"
        datasets.append(DataSet(name, source, row_format, held_out=held_out, weight=options.weight))
    return prepare(config, datasets, chat_tokenizer)


def _open_rows(config: Config, options: Rows) -> RowSource:
    return open_source(options.path, options.split, config.data.max_row_bytes, max_samples=options.max_samples)


def _row_format(config: Config, options: Rows, rows: RowSource) -> RowFormat:
    skip_bad_rows = config.data.on_bad_row == "skip"
    return resolve_format(rows, options.format, options.columns, options.prompt_template, skip_bad_rows=skip_bad_rows)


def prepare(
    config: Config,
    datasets: Sequence[DataSet],
    chat_tokenizer: ChatTokenizer,
    *,
    train_on_completions_only: bool | None = None,
) -> Preparation:
    """Returns the preparation of the data sets with the configured options. Raises DataError if there are no rows.

    Args:
        train_on_completions_only: Overrides data.train_on_completions_only.
    """
    options = data_options(config)
    if train_on_completions_only is not None:
        options = replace(options, train_on_completions_only=train_on_completions_only)
    return Preparation(datasets, chat_tokenizer, options)


def data_options(config: Config) -> DataOptions:
    """Returns the configured options for turning rows into packs."""
    data = config.data
    return DataOptions(
        sequence_length=config.tokens.sequence_length,
        overlong=data.overlong,
        on_bad_row=data.on_bad_row,
        reasoning=data.reasoning,
        train_on_completions_only=data.train_on_completions_only,
        targets=Targets.named(data.train_on_roles, data.train_on_turns),
        remove_cross_attention=data.remove_cross_attention,
        packing=data.packing.strategy,
        pool_size=data.packing.pool_size,
        micro_batch_size=config.tokens.micro_batch_size,
        num_lanes=data.num_lanes,
        num_epochs=config.tokens.train_epochs,
        seed=config.general.seed,
    )


# --- Evaluation sets ---


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationSet:
    """A named set of conversations for evaluation, kept in memory at 13 bytes per token."""

    name: str
    preparation: Preparation
    conversations: tuple[LabeledConversation, ...]
    """The conversations, of which only completions have labels, even if data.train_on_completions_only is false. So the
    runs of an ablation are compared on the same tokens."""
    dropped: Counter[str]
    """The number of dropped rows, by reason."""

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.name} {sorted(self.preparation.fingerprint.items())}".encode()).hexdigest()


def open_evaluation_sets(config: Config, training: Preparation) -> tuple[EvaluationSet, ...]:
    """Opens the rows held out of `training`, and evaluation.datasets. Raises DataError under the rules of training."""
    sets = [(name, datasets) for name, datasets in _named_datasets(config, training) if datasets]
    for name, count in Counter(name for name, _ in sets).items():
        if count > 1 or name in RESERVED_NAMES:
            problem = f"{count} sets are" if count > 1 else "a set is"
            raise DataError(f"evaluation.datasets: {problem} named {name}; give it another `name`")
    return tuple(_open_set(config, name, datasets, training.chat_tokenizer) for name, datasets in sets)


def _named_datasets(config: Config, training: Preparation) -> Iterator[tuple[str, list[DataSet]]]:
    held_out = [(dataset, dataset.held_out) for dataset in training.datasets]
    yield HELD_OUT, [replace(each, source=rows, held_out=None, weight=None) for each, rows in held_out if rows]
    for options in config.evaluation.datasets:
        source = _open_rows(config, options)
        name = options.name or Path(options.path).name.partition(".")[0] or options.path
        yield name, [DataSet(name, source, _row_format(config, options, source))]


def _open_set(config: Config, name: str, datasets: list[DataSet], chat_tokenizer: ChatTokenizer) -> EvaluationSet:
    preparation = prepare(config, datasets, chat_tokenizer, train_on_completions_only=True)
    max_dropped_share = config.data.max_dropped_share
    conversations: list[LabeledConversation] = []
    dropped: Counter[str] = Counter()
    try:
        check_sample(preparation, max_dropped_share)
        keys = list(preparation.all_keys())
        for start in range(0, len(keys), _ROWS_AT_ONCE):
            for each in preparation.read_many(keys[start : start + _ROWS_AT_ONCE]):
                if isinstance(each, Dropped):
                    dropped[each.reason] += 1
                else:
                    conversations.append(each)
        num_rows = len(conversations) + dropped.total()
        if not conversations or dropped.total() > max_dropped_share * num_rows:
            raise DataError(too_many_dropped(dropped.total(), num_rows, max_dropped_share))
    except DataError as error:
        raise DataError(f"evaluation set {name}: {error}", reason=error.reason) from error
    return EvaluationSet(name, preparation, tuple(conversations), dropped)


# --- Packs and batches ---


def token_budget(config: Config) -> int:
    """Returns the number of tokens in a pack, which is the single row of a micro-batch."""
    return config.tokens.sequence_length * config.tokens.micro_batch_size


def longest_document(config: Config) -> int:
    """Returns the maximum length of a document. The padding may be longer, but no other token attends to it."""
    return config.tokens.sequence_length if config.data.remove_cross_attention else token_budget(config)


def make_dataset(
    config: Config,
    preparation: Preparation,
    *,
    dp_rank: int = 0,
    dp_world_size: int = 1,
    row_lengths: Sequence[int | str] | None = None,
) -> PackedDataset:
    """Returns the stream of a rank's packs. Raises DataError if the number of ranks does not divide the lanes.

    Args:
        row_lengths: The lengths of all rows, if they are known.
    """
    return PackedDataset(
        preparation,
        data_options(config),
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        row_lengths=row_lengths,
    )


def make_loader(config: Config, dataset: PackedDataset, *, keep_tail: bool, pin_memory: bool) -> PackLoader:
    """Returns the loader; it has fewer workers if the configured number does not divide the rank's lanes."""
    return PackLoader(
        dataset,
        num_workers=num_workers(config, dataset),
        keep_tail=keep_tail,
        measured_roles=measured_roles(config, dataset.preparation),
        pin_memory=pin_memory,
        timeout_s=config.parallelism.timeout_seconds,
    )


def measured_roles(config: Config, preparation: Preparation) -> frozenset[Role]:
    """Returns the untrained roles whose losses are measured."""
    if config.logging.untrained_roles_interval is None or not config.data.train_on_completions_only:
        return frozenset()
    return frozenset(Role) - preparation.targets.roles - {Role.PADDING}


def num_workers(config: Config, dataset: PackedDataset) -> int:
    """Returns the configured number of workers, or the next lower one that divides the rank's lanes."""
    return next(number for number in range(config.data.num_workers, -1, -1) if dataset.takes_workers(number))


def data_fingerprint(config: Config, dataset: PackedDataset) -> dict[str, str]:
    """Returns everything that pack n depends on (law 5), by name."""
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
    """Returns the micro-batch that needs the most memory.

    It has no padding, and a label at every position except the last one of each conversation.
    """
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
