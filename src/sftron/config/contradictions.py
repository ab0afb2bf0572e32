"""Values of the configuration that are fine alone and contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

DECAY_SHARE, POOL_SIZE = 0.2, 256
"""Defaults of keys that not every setting reads: another value there is a mistake, this one says nothing."""

_MOST_TOKENS_IN_A_PACK = 2**26


def _check_length_of_training(train_steps: int | None, train_epochs: int | None) -> str | None:
    if train_steps is None and train_epochs is None:
        return "neither train_steps nor train_epochs is given; set one of them"
    if train_steps is not None and train_epochs is not None:
        return f"train_steps is {train_steps} and train_epochs is {train_epochs}; keep one of them"
    return None


def _check_weights(datasets: Any) -> str | None:
    streamed = [number for number, dataset in enumerate(datasets) if _value_in(dataset, "streaming")]
    keys: dict[bool, list[str]] = {True: [], False: []}
    for number, dataset in enumerate(datasets):
        keys[_value_in(dataset, "weight") is not None].append(f"data.datasets.{number}.weight")
    if keys[True] and keys[False]:
        return f"{', '.join(keys[True])} given, but not {', '.join(keys[False])}; give all data sets a weight, or none"
    if len(keys[False]) > 1 and streamed:
        return f"item {streamed[0]} is streamed, so it cannot be joined with the others; give all data sets a weight"
    return None


def _check_train_epochs(train_epochs: int | None, datasets: Any) -> str | None:
    if train_epochs is None:
        return None
    if any(_value_in(dataset, "weight") is not None for dataset in datasets):
        return f"is {train_epochs}, but data sets with weights end at different times; set train_steps"
    if any(_value_in(dataset, "streaming") for dataset in datasets):
        return f"is {train_epochs}, but where a streamed data set ends is not known; set train_steps"
    return None


def _check_evaluation_share(share: float, datasets: Any) -> str | None:
    if share and any(_value_in(dataset, "streaming") for dataset in datasets):
        return f"is {share}, but no rows can be held out of a streamed data set; remove the key"
    return None


def _check_evaluation_interval(interval: int | None, share: float, datasets: Any, prompts: str | None) -> str | None:
    if interval is not None and not (share or datasets or prompts):
        return f"is {interval}, but there is nothing to evaluate: give share, datasets or prompts, or remove the key"
    return None


def _check_tokens_per_batch(tokens_per_batch: int | None, sequence_length: int) -> str | None:
    if tokens_per_batch is not None and tokens_per_batch < sequence_length:
        return f"{tokens_per_batch} is below tokens.sequence_length {sequence_length}, and no conversation is split"
    return None


def _check_keep_best(keep_best: str | None, share: float, datasets: Any, prompts: str | None) -> str | None:
    if keep_best is not None and not (share or datasets or prompts):
        return f"is {keep_best}, but nothing is evaluated: give evaluation.share, datasets or prompts"
    return None


def _value_in(dataset: Any, key: str) -> Any:
    """Of a data set as it is read or as it is written, where nothing else may be right about it."""
    return dataset.get(key) if isinstance(dataset, dict) else getattr(dataset, key, None)


def _check_pack_size(micro_batch_size: int, sequence_length: int) -> str | None:
    if (size := micro_batch_size * sequence_length) > _MOST_TOKENS_IN_A_PACK:
        return (
            f"a pack of {micro_batch_size} x {sequence_length} = {size} tokens is more than any device holds; lower it"
        )
    return None


def _check_warmup(warmup_steps: int, train_steps: int | None) -> str | None:
    if train_steps is None or warmup_steps == 0:
        return None
    if warmup_steps >= train_steps:
        return f"{warmup_steps} is not below tokens.train_steps {train_steps}; the peak is never reached: lower it"
    return None


def _check_decay_share(decay_share: float, schedule: str) -> str | None:
    if schedule != "wsd" and decay_share != DECAY_SHARE:
        return f"is read by schedule wsd only, and schedule is {schedule}: remove the key"
    return None


def _check_min_learning_rate_ratio(ratio: float, schedule: str) -> str | None:
    if schedule == "constant" and ratio != 0:
        return f"is {ratio}, but schedule constant never falls: remove the key"
    return None


def _check_load(load: str, resume: str) -> str | None:
    if load == "weights" and resume in ("auto", "never"):
        return f"is weights, but resume is {resume}: give the path of the checkpoint that has them, as resume"
    return None


def _check_export_interval(interval: int | None, export_hf: bool) -> str | None:
    if interval is not None and not export_hf:
        return f"is {interval}, but export_hf is false: remove one of them"
    return None


def _check_pool_size(pool_size: int, strategy: str) -> str | None:
    if strategy != "pool" and pool_size != POOL_SIZE:
        return f"is read by strategy pool only, and strategy is {strategy}: remove the key"
    return None


def _check_wandb_project(project: str | None, mode: str) -> str | None:
    if mode == "online" and project is None:
        return "mode online needs it: set the project's name, or mode: offline"
    return None


_CHECKS: dict[tuple[str, ...], Callable[..., str | None]] = {
    ("tokens.train_steps", "tokens.train_epochs"): _check_length_of_training,
    ("data.datasets",): _check_weights,
    ("tokens.train_epochs", "data.datasets"): _check_train_epochs,
    ("evaluation.share", "data.datasets"): _check_evaluation_share,
    ("evaluation.interval", "evaluation.share", "evaluation.datasets", "evaluation.prompts"): (
        _check_evaluation_interval
    ),
    ("evaluation.tokens_per_batch", "tokens.sequence_length"): _check_tokens_per_batch,
    ("checkpoints.keep_best", "evaluation.share", "evaluation.datasets", "evaluation.prompts"): _check_keep_best,
    ("tokens.micro_batch_size", "tokens.sequence_length"): _check_pack_size,
    ("optimizer.warmup_steps", "tokens.train_steps"): _check_warmup,
    ("optimizer.decay_share", "optimizer.schedule"): _check_decay_share,
    ("optimizer.min_learning_rate_ratio", "optimizer.schedule"): _check_min_learning_rate_ratio,
    ("checkpoints.load", "checkpoints.resume"): _check_load,
    ("checkpoints.export_interval", "checkpoints.export_hf"): _check_export_interval,
    ("data.packing.pool_size", "data.packing.strategy"): _check_pool_size,
    ("logging.wandb.project", "logging.wandb.mode"): _check_wandb_project,
}
"""The keys whose values a check takes, in its order; the first is the one a problem is reported at."""


class UnusableError(Exception):
    """A value that already has a problem of its own, so nothing can be concluded from it."""


def contradictions(value_of: Callable[[str], Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the keys of values that contradict each other, the one to report first, and the problem."""
    for keys, check in _CHECKS.items():
        try:
            problem = check(*(value_of(key) for key in keys))
        except UnusableError:
            continue
        if problem is not None:
            yield keys, problem
