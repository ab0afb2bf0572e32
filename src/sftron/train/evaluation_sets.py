"""Evaluation sets: rows that are not trained on, read and tokenized as those that are, before any weight is loaded."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from sftron.config import Config
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.formats.detect import resolve_format
from sftron.data.prepare import DataSet, Preparation
from sftron.data.sources import open_source
from sftron.data.types import DataError, Dropped, LabeledConversation
from sftron.train.feed import make_preparation
from sftron.train.progress import too_many_dropped
from sftron.train.sample import check_sample

HELD_OUT = "held_out"
"""The set that evaluation.share makes."""

RESERVED_NAMES = ("seconds", "stop_rate")
"""In wandb they stand beside the sets: eval/stop_rate."""

_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationSet:
    """Conversations that are evaluated together; they are kept in memory, 13 bytes a token.

    conversations: labelled by completions, whatever data.train_on_completions_only says: so the runs of an ablation are
    compared on the same tokens. dropped: its other rows, by reason.
    """

    name: str
    preparation: Preparation
    conversations: tuple[LabeledConversation, ...]
    dropped: Counter[str]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.name} {sorted(self.preparation.fingerprint.items())}".encode()).hexdigest()


def open_evaluation_sets(
    config: Config, chat_tokenizer: ChatTokenizer, training: Preparation
) -> tuple[EvaluationSet, ...]:
    """The share that is held out of `training`, and evaluation.datasets. Raises DataError, as training would."""
    sets = [(name, datasets) for name, datasets in _named_datasets(config, training) if datasets]
    for name, count in Counter(name for name, _ in sets).items():
        if count > 1 or name in RESERVED_NAMES:
            problem = f"{count} sets are" if count > 1 else "a set is"
            raise DataError(f"evaluation.datasets: {problem} named {name}; give it another `name`")
    return tuple(_open_set(config, name, datasets, chat_tokenizer) for name, datasets in sets)


def _named_datasets(config: Config, training: Preparation) -> Iterator[tuple[str, list[DataSet]]]:
    held_out = [(dataset, dataset.held_out) for dataset in training.datasets]
    yield HELD_OUT, [replace(each, source=rows, held_out=None, weight=None) for each, rows in held_out if rows]
    for options in config.evaluation.datasets:
        source = open_source(options.path, options.split, config.data.max_row_bytes, max_samples=options.max_samples)
        row_format = resolve_format(
            source,
            options.format,
            options.columns,
            options.prompt_template,
            skip_bad_rows=config.data.on_bad_row == "skip",
        )
        name = options.name or Path(options.path).name.partition(".")[0] or options.path
        yield name, [DataSet(name, source, row_format)]


def _open_set(config: Config, name: str, datasets: list[DataSet], chat_tokenizer: ChatTokenizer) -> EvaluationSet:
    preparation = make_preparation(config, datasets, chat_tokenizer, train_on_completions_only=True)
    max_dropped_share = config.data.max_dropped_share
    try:
        check_sample(preparation, max_dropped_share)
        conversations: list[LabeledConversation] = []
        dropped: Counter[str] = Counter()
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
