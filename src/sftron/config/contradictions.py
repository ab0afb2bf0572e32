"""Rules for configuration values that are valid alone but contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

DECAY_SHARE, POOL_SIZE = 0.2, 256
"""Defaults of keys that only some settings use. With other settings, any value but the default is reported."""

_MOST_TOKENS_IN_A_PACK = 2**26


class UnusableError(Exception):
    """A value is already invalid by itself, so rules that involve it are skipped."""


def contradictions(value_of: Callable[[str], Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the contradictions, each as its keys and the problem; the problem is reported at the first key.

    Args:
        value_of: Returns the value of a dotted key. Raises UnusableError if the value is invalid by itself.
    """
    for keys, is_wrong, problem in _RULES:
        names = tuple(keys.split())
        try:
            values = [value_of(name) for name in names]
        except UnusableError:
            continue
        if is_wrong(*values):
            yield names, problem(*values) if callable(problem) else problem.format(*values)


def _some(datasets: Any, key: str) -> list[int]:
    """Returns the indices of the data sets that set this key; each is a validated section or a raw mapping."""
    values = (each.get(key) if isinstance(each, dict) else getattr(each, key, None) for each in datasets)
    return [index for index, value in enumerate(values) if value is not None and value is not False]


def _weights_problem(datasets: Any) -> str | None:
    weighted, streamed = _some(datasets, "weight"), _some(datasets, "streaming")
    others = [index for index in range(len(datasets)) if index not in weighted]
    given, missing = (", ".join(f"data.datasets.{index}.weight" for index in each) for each in (weighted, others))
    if given and missing:
        return f"{given} given, but not {missing}; give all data sets a weight, or none"
    if len(others) > 1 and streamed:
        return f"item {streamed[0]} is streamed, so it cannot be joined with the others; give all data sets a weight"
    return None


_RULES: list[tuple[str, Callable[..., Any], str | Callable[..., Any]]] = [
    (
        "tokens.train_steps tokens.train_epochs",
        lambda steps, epochs: steps is None and epochs is None,
        "neither train_steps nor train_epochs is given; set one of them",
    ),
    (
        "tokens.train_steps tokens.train_epochs",
        lambda steps, epochs: steps is not None and epochs is not None,
        "train_steps is {} and train_epochs is {}; keep one of them",
    ),
    ("data.datasets", _weights_problem, _weights_problem),
    (
        "tokens.train_epochs data.datasets",
        lambda epochs, datasets: epochs is not None and _some(datasets, "weight"),
        "is {}, but data sets with weights end at different times; set train_steps",
    ),
    (
        "tokens.train_epochs data.datasets",
        lambda epochs, datasets: epochs is not None and _some(datasets, "streaming"),
        "is {}, but where a streamed data set ends is not known; set train_steps",
    ),
    (
        "evaluation.share data.datasets",
        lambda share, datasets: share and _some(datasets, "streaming"),
        "is {}, but no rows can be held out of a streamed data set; remove the key",
    ),
    (
        "evaluation.interval evaluation.share evaluation.datasets evaluation.prompts",
        lambda interval, *rows: interval is not None and not any(rows),
        "is {}, but there is nothing to evaluate: give share, datasets or prompts, or remove the key",
    ),
    (
        "checkpoints.keep_best evaluation.share evaluation.datasets evaluation.prompts",
        lambda metric, *rows: metric is not None and not any(rows),
        "is {}, but nothing is evaluated: give evaluation.share, datasets or prompts",
    ),
    (
        "evaluation.tokens_per_batch tokens.sequence_length",
        lambda num_tokens, length: num_tokens is not None and num_tokens < length,
        "{} is below tokens.sequence_length {}, and no conversation is split",
    ),
    (
        "tokens.micro_batch_size tokens.sequence_length",
        lambda size, length: size * length > _MOST_TOKENS_IN_A_PACK,
        "a pack of {} x {} tokens is more than any device holds; lower it",
    ),
    (
        "optimizer.warmup_steps tokens.train_steps",
        lambda warmup_steps, steps: steps is not None and 0 < warmup_steps >= steps,
        "{} is not below tokens.train_steps {}; the peak is never reached: lower it",
    ),
    (
        "optimizer.decay_share optimizer.schedule",
        lambda share, schedule: schedule != "wsd" and share != DECAY_SHARE,
        "is read by schedule wsd only, and schedule is {1}: remove the key",
    ),
    (
        "optimizer.min_learning_rate_ratio optimizer.schedule",
        lambda ratio, schedule: schedule == "constant" and ratio != 0,
        "is {}, but schedule constant never falls: remove the key",
    ),
    (
        "checkpoints.load checkpoints.resume",
        lambda load, resume: load == "weights" and resume in ("auto", "never"),
        "is {}, but resume is {}: give the path of the checkpoint that has them, as resume",
    ),
    (
        "checkpoints.export_interval checkpoints.export_hf",
        lambda interval, export_hf: interval is not None and not export_hf,
        "is {}, but export_hf is false: remove one of them",
    ),
    (
        "data.packing.pool_size data.packing.strategy",
        lambda size, strategy: strategy != "pool" and size != POOL_SIZE,
        "is read by strategy pool only, and strategy is {1}: remove the key",
    ),
    (
        "logging.wandb.project logging.wandb.mode",
        lambda project, mode: mode == "online" and project is None,
        "mode online needs it: set the project's name, or mode: offline",
    ),
]
"""The rules: the dotted keys, a predicate of their values, and the problem if it holds. The problem is reported at the
first key; each `{}` in it is replaced by a value."""
