"""Configuration values that are valid alone but contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

DECAY_SHARE, POOL_SIZE = 0.2, 256
"""Defaults of keys that only some settings use. With other settings, any value but the default is reported."""

_MOST_TOKENS_IN_A_PACK = 2**26

_At = Callable[[str], Any]
_Found = Iterator[tuple[str, str]]
"""Pairs of keys, separated by spaces, and the problem."""


def _is_set(value: Any) -> bool:
    return value is not None


_NOT_PUSHED = "is {value}, but push_to is null, and nothing is pushed: set it, or remove the key"
_UNREAD: tuple[tuple[str, Any, str, Callable[[Any], bool], str], ...] = (
    (
        *("model.frozen_dtype", "auto", "lora", _is_set),
        "is {value}, but without lora no weight is frozen, and trained weights are float32: write lora: {{}}, or "
        "remove the key",
    ),
    (
        *("lora.init", "default", "lora.adapter", lambda adapter: adapter is None),
        "is {value}, but adapter gives the initial values: remove one of them",
    ),
    (
        *("evaluation.metric", None, "evaluation.patience", _is_set),
        "is {value}, but patience is null: set it, or remove the key",
    ),
    (
        *("optimizer.decay_share", DECAY_SHARE, "optimizer.schedule", lambda schedule: schedule == "wsd"),
        "is read by schedule wsd only, and schedule is {other}: remove the key",
    ),
    (
        *("optimizer.min_learning_rate_ratio", 0.0, "optimizer.schedule", lambda schedule: schedule != "constant"),
        "is {value}, but schedule constant never falls: remove the key",
    ),
    (
        *("data.packing.pool_size", POOL_SIZE, "data.packing.strategy", lambda strategy: strategy == "pool"),
        "is read by strategy pool only, and strategy is {other}: remove the key",
    ),
    (
        *("checkpoints.export_interval", None, "checkpoints.export_hf", bool),
        "is {value}, but export_hf is false: remove one of them",
    ),
    (
        *("hub.push_to", None, "checkpoints.export_hf", bool),
        "is {value}, but checkpoints.export_hf is false, so there is no export to push: remove one of them",
    ),
    ("hub.private", True, "hub.push_to", _is_set, _NOT_PUSHED),
    ("hub.every", "end", "hub.push_to", _is_set, _NOT_PUSHED),
)
"""Keys that have an effect only with some values of another key: the key, its default, the other key, whether a value
of that one is such a value, and the problem with any value but the default."""


def contradictions(value_of: _At) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the contradictions, each as its keys and the problem; the problem is reported at the first key.

    Args:
        value_of: Returns the value of a dotted key; None if it is invalid by itself. The caller ignores problems that
            involve an invalid value.
    """
    for find in (_unread, _of_steps, _of_tokens, _of_data, _of_evaluation, _of_checkpoints, _of_loggers):
        for keys, problem in find(value_of):
            yield tuple(keys.split()), problem


def _unread(at: _At) -> _Found:
    for key, default, other, is_enough, problem in _UNREAD:
        value = at(key)
        if value not in (None, default) and not is_enough(at(other)):
            shown = str(value).lower() if isinstance(value, bool) else value
            yield f"{key} {other}", problem.format(value=shown, other=at(other))


def _of_steps(at: _At) -> _Found:
    steps, epochs, warmup_steps = at("tokens.train_steps"), at("tokens.train_epochs"), at("optimizer.warmup_steps")
    if steps is None and epochs is None:
        yield "tokens.train_steps tokens.train_epochs", "neither train_steps nor train_epochs is given; set one of them"
    if steps is not None and epochs is not None:
        problem = f"train_steps is {steps} and train_epochs is {epochs}; keep one of them"
        yield "tokens.train_steps tokens.train_epochs", problem
    if warmup_steps and steps is not None and warmup_steps >= steps:
        problem = f"{warmup_steps} is not below tokens.train_steps {steps}"
        problem += ", so the learning rate would never reach its peak: lower warmup_steps"
        yield "optimizer.warmup_steps tokens.train_steps", problem


def _of_tokens(at: _At) -> _Found:
    size, length = at("tokens.micro_batch_size"), at("tokens.sequence_length")
    if size and length and size * length > _MOST_TOKENS_IN_A_PACK:
        problem = f"a pack of {size} x {length} tokens is more than any device holds; lower it"
        yield "tokens.micro_batch_size tokens.sequence_length", problem
    tokens_per_batch = at("evaluation.tokens_per_batch")
    if tokens_per_batch and length and tokens_per_batch < length:
        problem = f"{tokens_per_batch} is below tokens.sequence_length {length}, and no conversation is split"
        yield "evaluation.tokens_per_batch tokens.sequence_length", problem
    added, saved = at("tokenizer.add_tokens"), at("lora.modules_to_save")
    # An adapter to go on from brings its own modules_to_save; they are checked when it is read.
    if at("lora") is not None and at("lora.adapter") is None and added and "embed_tokens" not in (saved or ()):
        problem = f"adds {', '.join(map(str, added))}, but with lora their embeddings would not be trained"
        problem += ": set lora.modules_to_save to [embed_tokens]"
        yield "tokenizer.add_tokens lora.modules_to_save lora.adapter", problem


def _of_data(at: _At) -> _Found:
    datasets, epochs, share = at("data.datasets") or (), at("tokens.train_epochs"), at("evaluation.share")
    weighted, streamed = _those_with("weight", datasets), _those_with("streaming", datasets)
    others = [index for index in range(len(datasets)) if index not in weighted]
    if weighted and others:
        given, missing = (", ".join(f"data.datasets.{index}.weight" for index in each) for each in (weighted, others))
        yield "data.datasets", f"{given} given, but not {missing}; give all data sets a weight, or none"
    elif len(others) > 1 and streamed:
        problem = f"item {streamed[0]} is streamed, so it cannot be joined with the others"
        yield "data.datasets", f"{problem}; give all data sets a weight"
    if epochs is not None and weighted:
        problem = f"is {epochs}, but data sets with weights end at different times; set train_steps"
        yield "tokens.train_epochs data.datasets", problem
    if epochs is not None and streamed:
        problem = f"is {epochs}, but where a streamed data set ends is not known; set train_steps"
        yield "tokens.train_epochs data.datasets", problem
    if share and streamed:
        problem = f"is {share}, but no rows can be held out of a streamed data set; remove the key"
        yield "evaluation.share data.datasets", problem


def _of_evaluation(at: _At) -> _Found:
    evaluated = "evaluation.share", "evaluation.datasets", "evaluation.prompts"
    if not any(map(at, evaluated)):
        for key in ("evaluation.interval", "checkpoints.keep_best", "evaluation.patience"):
            if at(key) is not None:
                problem = f"is {at(key)}, but nothing is evaluated: give evaluation.share, datasets or prompts, or "
                yield " ".join((key, *evaluated)), f"{problem}remove the key"
    elif (patience := at("evaluation.patience")) is not None and at("evaluation.interval") is None:
        problem = f"is {patience}, but interval is null, so there is no evaluation on the way: set evaluation.interval"
        yield "evaluation.patience evaluation.interval", problem


def _of_checkpoints(at: _At) -> _Found:
    if at("checkpoints.load") == "weights" and (resume := at("checkpoints.resume")) in ("auto", "never"):
        problem = f"is weights, but resume is {resume}: set resume to the path of the checkpoint that has the weights"
        yield "checkpoints.load checkpoints.resume", problem
    every, interval = at("hub.every"), at("checkpoints.export_interval")
    if isinstance(every, int) and (interval is None or every % interval):
        exports = "null" if interval is None else interval
        problem = f"is {every}, but checkpoints.export_interval is {exports}, and only exports are pushed"
        yield "hub.every checkpoints.export_interval", f"{problem}: give a multiple of it, exports or end"


def _of_loggers(at: _At) -> _Found:
    loggers, mode = at("logging.to") or (), at("logging.wandb.mode")
    if twice := sorted({name for name in loggers if loggers.count(name) > 1}):
        yield "logging.to", f"has {', '.join(twice)} twice; name each logger once"
    is_logged_to_wandb = "wandb" in loggers
    if mode == "disabled" and is_logged_to_wandb:
        problem = "is disabled, but logging.to has wandb: remove one of them"
        yield "logging.wandb.mode logging.to", problem
    if (mode == "online" or (mode is None and is_logged_to_wandb)) and at("logging.wandb.project") is None:
        how = "mode is online" if mode else "logging.to has wandb"
        problem = f"is missing, but {how}; set it, or mode: offline"
        yield "logging.wandb.project logging.wandb.mode logging.to", problem


def _those_with(key: str, datasets: Any) -> list[int]:
    """Returns the indices of the data sets that set this key; each is a validated section or a raw mapping."""
    values = (each.get(key) if isinstance(each, dict) else getattr(each, key, None) for each in datasets)
    return [index for index, value in enumerate(values) if value is not None and value is not False]
