"""Builds a run's data from its configuration: tokenizer, data sets, evaluation sets, packs and loader."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sftron.checkpoint.model_folder import check_files
from sftron.config import Config
from sftron.config.data_schema import KeptDataset, Rows
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.formats.detect import FORMAT_SAMPLE, resolve_format
from sftron.data.formats.table import RowFormat, parse_conversation
from sftron.data.labels import Targets
from sftron.data.lanes.row_lengths import measure_rows
from sftron.data.loader import PackLoader
from sftron.data.prepare import DataOptions, DataSet, Preparation
from sftron.data.sources import RowList, open_source, open_stream, split_source
from sftron.data.sources.files import is_text_file
from sftron.data.sources.views import RowSource
from sftron.data.types import (
    WHOLE_ROW,
    ContextRank,
    Conversation,
    ConversationKey,
    DataError,
    Documents,
    Dropped,
    Role,
)
from sftron.regular_file import where_missing
from sftron.train.logs import console
from sftron.train.places import Places, file_stamps, local_files, tokenizer_folder
from sftron.train.progress import too_many_dropped
from sftron.train.ranks import Ranks
from sftron.train.run import EvaluationSet, Question, RunData, Setup
from sftron.train.sample import check_sample, project
from sftron.visible_text import counted

HELD_OUT = "held_out"
"""The name of the evaluation set from evaluation.share."""
RESERVED_NAMES = ("measures", "seconds", "stop_rate")
"""Names that an evaluation set cannot have, because wandb has metrics such as eval/stop_rate."""
_ROWS_AT_ONCE = 256
_LONG_ENOUGH_TO_REPORT = 20_000


def build_data(config: Config, ranks: Ranks, places: Places, rows: Any = None) -> RunData:
    """Opens and checks the data of a run; the dataset yields this rank's packs. Raises ValueError.

    Args:
        rows: The rows of the first data set, if a user's own code gives them.
    """
    chat_tokenizer = load_chat_tokenizer(config, places.tokenizer)
    questions = read_questions(config.evaluation.prompts)
    for question in questions:  # before the run, whose first evaluation may be hours away
        question.ids(chat_tokenizer)
    preparation = open_data(config, chat_tokenizer, rows)
    sample = check_sample(preparation, config.data.max_dropped_share)
    evaluation_sets = open_evaluation_sets(config, preparation)
    dp_rank, dp_world_size = ranks.dp_rank, ranks.dp_world_size
    dataset = make_dataset(config, preparation, dp_rank=dp_rank, dp_world_size=dp_world_size)
    return RunData(
        chat_tokenizer=chat_tokenizer,
        dataset=dataset,
        sample=sample,
        projection=project(config, dataset, sample, dp_world_size=dp_world_size),
        evaluation_sets=evaluation_sets,
        questions=questions,
        file_stamps=places.data_files,
    )


# --- The tokenizer and the data sets ---


def load_chat_tokenizer(config: Config, folder: Path | None = None) -> ChatTokenizer:
    """Loads the tokenizer with the configured chat template.

    Args:
        folder: The tokenizer's folder, if its files were already checked; by default, this finds and checks it.

    Raises:
        ValueError: The folder, the tokenizer or the template cannot be used.
    """
    if folder is None:
        folder = tokenizer_folder(config)
        check_files(folder)
    options = config.tokenizer
    return ChatTokenizer.from_pretrained(
        str(folder),
        chat_template=options.chat_template,
        add_tokens=options.add_tokens,
        date=datetime.date.fromisoformat(options.date) if options.date else None,
        allow_control_tokens=config.data.allow_control_tokens,
        document_end=options.document_end,
        template_kwargs=options.template_kwargs,
    )


def open_data(config: Config, chat_tokenizer: ChatTokenizer, given: Any = None) -> Preparation:
    """Opens the data sets and detects their formats; `given` are rows in place of the first one. Raises DataError."""
    datasets, names = [], Counter[str]()
    for number, options in enumerate(config.data.datasets):
        held_out = None
        if options.streaming and (given is None or number):
            limit = config.data.max_row_bytes
            source = open_stream(options.path, options.split, limit, **_part_of(options))
            row_format = _row_format(config, options, source.head(FORMAT_SAMPLE))
        else:
            is_given = given is not None and number == 0
            rows = RowList(given, options.path) if is_given else open_rows(config, options)  # pyright: ignore
            row_format = _row_format(config, options, rows)
            source, held_out = split_source(rows, config.evaluation.share)
        name = options.name or source.name
        names[name] += 1  # counts are kept by name, so a duplicate becomes "name (2)"
        name = name if names[name] == 1 else f"{name} ({names[name]})"
        datasets.append(DataSet(name, source, row_format, held_out=held_out, weight=options.weight))
    return Preparation(datasets, chat_tokenizer, data_options(config))


def open_rows(config: Config, options: Rows) -> RowSource:
    """Opens the rows of a data set or an evaluation set by random access. Raises DataError."""
    return open_source(options.path, options.split, config.data.max_row_bytes, **_part_of(options))


def _part_of(options: Rows) -> dict[str, Any]:
    part = {"max_samples": options.max_samples, "config": options.config, "revision": options.revision}
    return {**part, "documents": options.txt_documents}


def _documents(options: Rows) -> Documents | None:
    """Returns what is a document, or None if the rows are not those of .txt files. Raises DataError."""
    if options.format == "text" and is_text_file((local_files(options) or [Path()])[0]):
        return options.txt_documents
    if options.documents:
        problem = f"documents: {options.documents} is for .txt files of format text"
        raise DataError(f"{options.path}: {problem}; remove the key")
    return None


def _row_format(config: Config, options: Rows, rows: RowSource) -> RowFormat:
    skip_bad_rows, documents = config.data.on_bad_row == "skip", _documents(options)
    found = resolve_format(rows, options.format, options.columns, options.prompt_template, skip_bad_rows=skip_bad_rows)
    return replace(found, documents=documents)


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


def open_evaluation_sets(config: Config, training: Preparation) -> tuple[EvaluationSet, ...]:
    """Opens the rows held out of `training`, evaluation.datasets and evaluation.keep.

    Raises DataError as for training data.
    """
    held_out = [(dataset, dataset.held_out) for dataset in training.datasets]
    held_out = [replace(each, source=rows, held_out=None, weight=None) for each, rows in held_out if rows]
    sets: list[tuple[str, list[DataSet], KeptDataset | None]] = [(HELD_OUT, held_out, None)] if held_out else []
    for options in (*config.evaluation.datasets, *config.evaluation.keep):
        source, name = open_rows(config, options), options.set_name
        dataset = DataSet(name, source, _row_format(config, options, source))
        sets.append((name, [dataset], options if isinstance(options, KeptDataset) else None))
    for name, count in Counter(name for name, _, _ in sets).items():
        if count > 1 or name in RESERVED_NAMES:
            is_kept = any(limit for each, _, limit in sets if each == name)
            problem = f"{count} sets are" if count > 1 else "a set is"
            key = "evaluation.keep" if is_kept else "evaluation.datasets"
            raise DataError(f"{key}: {problem} named {name}; give it another `name`")
    return tuple(
        replace(_open_set(config, name, datasets, training.chat_tokenizer), limit=limit)
        for name, datasets, limit in sets
    )


def _open_set(config: Config, name: str, datasets: list[DataSet], chat_tokenizer: ChatTokenizer) -> EvaluationSet:
    preparation = Preparation(datasets, chat_tokenizer, replace(data_options(config), train_on_completions_only=True))
    max_share = config.data.max_dropped_share
    try:
        check_sample(preparation, max_share)
        keys = list(preparation.all_keys())
        chunks = (keys[start : start + _ROWS_AT_ONCE] for start in range(0, len(keys), _ROWS_AT_ONCE))
        rows = [row for chunk in chunks for row in preparation.read_many(chunk)]
        kept = tuple(row for row in rows if not isinstance(row, Dropped))
        dropped = Counter(row.reason for row in rows if isinstance(row, Dropped))
        if not kept or dropped.total() > max_share * len(rows):
            raise DataError(too_many_dropped(dropped.total(), len(rows), max_share, dropped))
    except DataError as error:
        raise DataError(f"evaluation set {name}: {error}", reason=error.reason) from error
    return EvaluationSet(name, preparation, kept, dropped)


# --- Prompts ---


def read_questions(path: str | None) -> list[Question]:
    """Reads prompts from a JSONL file with a `messages` column. Raises DataError with file:line."""
    if path is None:
        return []
    if not Path(path).is_file():
        raise DataError(f"evaluation.prompts: {path} is not a file{where_missing(path)}")
    source = open_source(path, "train")
    questions = []
    for index in range(len(source)):
        location, row = source.locate(index), source[index]
        conversation = parse_conversation(row, RowFormat("messages"), key=ConversationKey(0, index), location=location)
        assert isinstance(conversation, Conversation), "format messages holds no ids"
        if conversation.tools:
            raise DataError(f"{location}: prompts with tools are not supported yet; remove the column")
        role = conversation.messages[-1].role
        if role is not Role.USER:
            raise DataError(f"{location}: a prompt must end in a user turn, but this one ends in {role.name.lower()}")
        questions.append(Question(conversation.messages, row, conversation.template_kwargs, location))
    return questions


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
        num_sharing=config.parallelism.context,
        row_lengths=row_lengths,
    )


def make_loader(
    config: Config, dataset: PackedDataset, *, keep_tail: bool, pin_memory: bool, context: ContextRank = WHOLE_ROW
) -> PackLoader:
    """Returns the loader, which also measures the losses of untrained roles if that is configured."""
    measured: frozenset[Role] = frozenset()
    if config.logging.untrained_roles_interval is not None and config.data.train_on_completions_only:
        measured = frozenset(Role) - dataset.preparation.targets.roles - {Role.PADDING}
    return PackLoader(
        dataset,
        num_workers=num_workers(config, dataset),
        keep_tail=keep_tail,
        measured_roles=measured,
        context=context,
        pin_memory=pin_memory,
        timeout_s=config.parallelism.timeout_seconds,
    )


def num_workers(config: Config, dataset: PackedDataset) -> int:
    """Returns the configured number of workers, or the next lower one that divides the rank's lanes."""
    return next(number for number in range(config.data.num_workers, -1, -1) if dataset.takes_workers(number))


# --- Row lengths, for planned packing ---


def plan_packs(setup: Setup) -> None:
    """Measures the rows of a dataset with planned packing; each rank measures its share. Every rank calls this.

    Raises ValueError on all ranks if any rank has a bad row.
    """
    ranks, dataset, preparation = setup.ranks, setup.data.dataset, setup.data.preparation
    num_rows = preparation.num_rows
    if not dataset.is_planned or num_rows is None:
        return
    if num_rows >= _LONG_ENOUGH_TO_REPORT:
        console.write(f"measuring  {counted(num_rows, 'rows')}, to fill packs up to the end of an epoch")
    own = range(ranks.rank, num_rows, ranks.world_size)
    measured = ranks.all_or_raise(lambda: measure_rows(preparation, own))
    rows: list[int | str] = [0] * num_rows
    for rank, each in enumerate(ranks.gather({"rows": measured})):
        rows[rank :: ranks.world_size] = each["rows"]
    dataset.plan(rows)


# --- Data files that change while a run reads them ---


def require_unchanged(setup: Setup) -> None:
    """Raises DataError on all ranks if the content of a data set has changed since the run was set up.

    Every rank calls this. The content is read only if the metadata of a file has changed.
    """
    changed = ""
    if setup.ranks.local_rank == 0 and file_stamps(setup.config) != setup.data.file_stamps:
        changed = _changed_datasets(setup)
    if first := next(filter(None, (facts["changed"] for facts in setup.ranks.gather({"changed": changed}))), None):
        raise DataError(
            f"{first} changed while the run was reading it, so the run cannot tell what the steps since the last "
            "checkpoint read, and saves nothing. Restore the file, and repeat the command to resume from that "
            "checkpoint; or set checkpoints.allow_data_change: true to resume with the changed data"
        )


def _changed_datasets(setup: Setup) -> str:
    preparation = setup.data.preparation
    try:
        now = open_data(setup.config, setup.data.chat_tokenizer, setup.extension.data).fingerprint
    except DataError as error:
        return f"data.datasets ({error})"
    keys = [f"data.datasets.{index}" for index in range(len(preparation.datasets))]
    names = zip(keys, preparation.source_names, strict=True)
    return ", ".join(name for key, name in names if now.get(key) != preparation.fingerprint.get(key))
