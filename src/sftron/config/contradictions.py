"""Values of the configuration that are fine alone and contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

DECAY_SHARE, POOL_SIZE = 0.2, 256
"""Defaults of keys that only some settings read; with the others, any other value is a mistake."""

_MOST_TOKENS_IN_A_PACK = 2**26

Check = Callable[..., str | None]
_CHECKS: list[tuple[tuple[str, ...], Check]] = []


class UnusableError(Exception):
    """A value that already has a problem of its own, so nothing can be concluded from it."""


def contradictions(value_of: Callable[[str], Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the keys of values that contradict each other, the one to report first, and the problem."""
    for keys, check in _CHECKS:
        try:
            problem = check(*(value_of(key) for key in keys))
        except UnusableError:
            continue
        if problem is not None:
            yield keys, problem


def _check(*keys: str) -> Callable[[Check], Check]:
    """Registers a check of the values of `keys`, which it takes in this order; problems are reported at the first."""

    def register(check: Check) -> Check:
        _CHECKS.append((keys, check))
        return check

    return register


def _value_in(dataset: Any, key: str) -> Any:
    """Returns a value of a data set as it is read or as it is written, where nothing else may be right about it."""
    return dataset.get(key) if isinstance(dataset, dict) else getattr(dataset, key, None)


# --- How long, and on what ---


@_check("tokens.train_steps", "tokens.train_epochs")
def _length_of_training(train_steps: int | None, train_epochs: int | None) -> str | None:
    if train_steps is None and train_epochs is None:
        return "neither train_steps nor train_epochs is given; set one of them"
    if train_steps is not None and train_epochs is not None:
        return f"train_steps is {train_steps} and train_epochs is {train_epochs}; keep one of them"
    return None


@_check("data.datasets")
def _weights(datasets: Any) -> str | None:
    streamed = [number for number, dataset in enumerate(datasets) if _value_in(dataset, "streaming")]
    keys: dict[bool, list[str]] = {True: [], False: []}
    for number, dataset in enumerate(datasets):
        keys[_value_in(dataset, "weight") is not None].append(f"data.datasets.{number}.weight")
    if keys[True] and keys[False]:
        return f"{', '.join(keys[True])} given, but not {', '.join(keys[False])}; give all data sets a weight, or none"
    if len(keys[False]) > 1 and streamed:
        return f"item {streamed[0]} is streamed, so it cannot be joined with the others; give all data sets a weight"
    return None


@_check("tokens.train_epochs", "data.datasets")
def _train_epochs(train_epochs: int | None, datasets: Any) -> str | None:
    if train_epochs is None:
        return None
    if any(_value_in(dataset, "weight") is not None for dataset in datasets):
        return f"is {train_epochs}, but data sets with weights end at different times; set train_steps"
    if any(_value_in(dataset, "streaming") for dataset in datasets):
        return f"is {train_epochs}, but where a streamed data set ends is not known; set train_steps"
    return None


@_check("tokens.micro_batch_size", "tokens.sequence_length")
def _pack_size(micro_batch_size: int, sequence_length: int) -> str | None:
    if (size := micro_batch_size * sequence_length) > _MOST_TOKENS_IN_A_PACK:
        pack = f"a pack of {micro_batch_size} x {sequence_length} = {size} tokens"
        return f"{pack} is more than any device holds; lower it"
    return None


@_check("data.packing.pool_size", "data.packing.strategy")
def _pool_size(pool_size: int, strategy: str) -> str | None:
    if strategy != "pool" and pool_size != POOL_SIZE:
        return f"is read by strategy pool only, and strategy is {strategy}: remove the key"
    return None


# --- The learning rate ---


@_check("optimizer.warmup_steps", "tokens.train_steps")
def _warmup(warmup_steps: int, train_steps: int | None) -> str | None:
    if train_steps is not None and 0 < warmup_steps >= train_steps:
        return f"{warmup_steps} is not below tokens.train_steps {train_steps}; the peak is never reached: lower it"
    return None


@_check("optimizer.decay_share", "optimizer.schedule")
def _decay_share(decay_share: float, schedule: str) -> str | None:
    if schedule != "wsd" and decay_share != DECAY_SHARE:
        return f"is read by schedule wsd only, and schedule is {schedule}: remove the key"
    return None


@_check("optimizer.min_learning_rate_ratio", "optimizer.schedule")
def _min_learning_rate_ratio(ratio: float, schedule: str) -> str | None:
    if schedule == "constant" and ratio != 0:
        return f"is {ratio}, but schedule constant never falls: remove the key"
    return None


# --- Evaluation ---


@_check("evaluation.share", "data.datasets")
def _evaluation_share(share: float, datasets: Any) -> str | None:
    if share and any(_value_in(dataset, "streaming") for dataset in datasets):
        return f"is {share}, but no rows can be held out of a streamed data set; remove the key"
    return None


@_check("evaluation.interval", "evaluation.share", "evaluation.datasets", "evaluation.prompts")
def _evaluation_interval(interval: int | None, share: float, datasets: Any, prompts: str | None) -> str | None:
    if interval is not None and not (share or datasets or prompts):
        return f"is {interval}, but there is nothing to evaluate: give share, datasets or prompts, or remove the key"
    return None


@_check("checkpoints.keep_best", "evaluation.share", "evaluation.datasets", "evaluation.prompts")
def _keep_best(keep_best: str | None, share: float, datasets: Any, prompts: str | None) -> str | None:
    if keep_best is not None and not (share or datasets or prompts):
        return f"is {keep_best}, but nothing is evaluated: give evaluation.share, datasets or prompts"
    return None


@_check("evaluation.tokens_per_batch", "tokens.sequence_length")
def _tokens_per_batch(tokens_per_batch: int | None, sequence_length: int) -> str | None:
    if tokens_per_batch is not None and tokens_per_batch < sequence_length:
        return f"{tokens_per_batch} is below tokens.sequence_length {sequence_length}, and no conversation is split"
    return None


# --- Files and trackers ---


@_check("checkpoints.load", "checkpoints.resume")
def _load(load: str, resume: str) -> str | None:
    if load == "weights" and resume in ("auto", "never"):
        return f"is weights, but resume is {resume}: give the path of the checkpoint that has them, as resume"
    return None


@_check("checkpoints.export_interval", "checkpoints.export_hf")
def _export_interval(interval: int | None, export_hf: bool) -> str | None:
    if interval is not None and not export_hf:
        return f"is {interval}, but export_hf is false: remove one of them"
    return None


@_check("logging.wandb.project", "logging.wandb.mode")
def _wandb_project(project: str | None, mode: str) -> str | None:
    if mode == "online" and project is None:
        return "mode online needs it: set the project's name, or mode: offline"
    return None
