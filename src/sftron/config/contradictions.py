"""Configuration values that are valid alone but contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

DECAY_SHARE, POOL_SIZE = 0.2, 256
"""Defaults of keys that only some settings use. With other settings, any value but the default is reported."""

_MOST_TOKENS_IN_A_PACK = 2**26


def contradictions(value_of: Callable[[str], Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the contradictions, each as its keys and the problem; the problem is reported at the first key.

    Args:
        value_of: Returns the value of a dotted key; None if it is invalid by itself. The caller ignores problems that
            involve an invalid value.
    """
    for keys, problem in _contradictions(value_of):
        yield tuple(keys.split()), problem


def _contradictions(at: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    steps, epochs = at("tokens.train_steps"), at("tokens.train_epochs")
    if steps is None and epochs is None:
        yield "tokens.train_steps tokens.train_epochs", "neither train_steps nor train_epochs is given; set one of them"
    if steps is not None and epochs is not None:
        problem = f"train_steps is {steps} and train_epochs is {epochs}; keep one of them"
        yield "tokens.train_steps tokens.train_epochs", problem

    lora, frozen_dtype = at("lora"), at("model.frozen_dtype")
    if lora is None and frozen_dtype not in ("auto", None):
        problem = f"is {frozen_dtype}, but without lora no weight is frozen, and trained weights are float32"
        yield "model.frozen_dtype lora", f"{problem}: write lora: {{}}, or remove the key"
    if at("lora.adapter") is not None and (init := at("lora.init")) != "default":
        yield "lora.init lora.adapter", f"is {init}, but adapter gives the initial values: remove one of them"
    added, saved = at("tokenizer.add_tokens"), at("lora.modules_to_save")
    # An adapter to go on from brings its own modules_to_save; they are checked when it is read.
    if lora is not None and at("lora.adapter") is None and added and "embed_tokens" not in (saved or ()):
        problem = f"adds {', '.join(map(str, added))}, but with lora their embeddings would not be trained"
        problem += ": set lora.modules_to_save to [embed_tokens]"
        yield "tokenizer.add_tokens lora.modules_to_save lora.adapter", problem

    datasets, share = at("data.datasets") or (), at("evaluation.share")
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

    evaluated = "evaluation.share", "evaluation.datasets", "evaluation.prompts"
    interval, keep_best = at("evaluation.interval"), at("checkpoints.keep_best")
    remedy = "give evaluation.share, datasets or prompts, or remove the key"
    if not any(map(at, evaluated)):
        if interval is not None:
            yield " ".join(("evaluation.interval", *evaluated)), f"is {interval}, but nothing is evaluated: {remedy}"
        if keep_best is not None:
            yield " ".join(("checkpoints.keep_best", *evaluated)), f"is {keep_best}, but nothing is evaluated: {remedy}"
    patience, metric = at("evaluation.patience"), at("evaluation.metric")
    if patience is not None and not any(map(at, evaluated)):
        yield " ".join(("evaluation.patience", *evaluated)), f"is {patience}, but nothing is evaluated: {remedy}"
    elif patience is not None and interval is None:
        problem = f"is {patience}, but interval is null, so there is no evaluation on the way: set evaluation.interval"
        yield "evaluation.patience evaluation.interval", problem
    if metric is not None and patience is None:
        yield "evaluation.metric evaluation.patience", f"is {metric}, but patience is null: set it, or remove the key"
    tokens_per_batch, length = at("evaluation.tokens_per_batch"), at("tokens.sequence_length")
    if tokens_per_batch and length and tokens_per_batch < length:
        problem = f"{tokens_per_batch} is below tokens.sequence_length {length}, and no conversation is split"
        yield "evaluation.tokens_per_batch tokens.sequence_length", problem

    size = at("tokens.micro_batch_size")
    if size and length and size * length > _MOST_TOKENS_IN_A_PACK:
        problem = f"a pack of {size} x {length} tokens is more than any device holds; lower it"
        yield "tokens.micro_batch_size tokens.sequence_length", problem

    warmup_steps, schedule = at("optimizer.warmup_steps"), at("optimizer.schedule")
    if warmup_steps and steps is not None and warmup_steps >= steps:
        problem = f"{warmup_steps} is not below tokens.train_steps {steps}"
        problem += ", so the learning rate would never reach its peak: lower warmup_steps"
        yield "optimizer.warmup_steps tokens.train_steps", problem
    if schedule != "wsd" and at("optimizer.decay_share") != DECAY_SHARE:
        problem = f"is read by schedule wsd only, and schedule is {schedule}: remove the key"
        yield "optimizer.decay_share optimizer.schedule", problem
    if schedule == "constant" and (ratio := at("optimizer.min_learning_rate_ratio")):
        problem = f"is {ratio}, but schedule constant never falls: remove the key"
        yield "optimizer.min_learning_rate_ratio optimizer.schedule", problem

    load, resume = at("checkpoints.load"), at("checkpoints.resume")
    if load == "weights" and resume in ("auto", "never"):
        problem = f"is weights, but resume is {resume}: set resume to the path of the checkpoint that has the weights"
        yield "checkpoints.load checkpoints.resume", problem
    export_interval = at("checkpoints.export_interval")
    if export_interval is not None and not at("checkpoints.export_hf"):
        problem = f"is {export_interval}, but export_hf is false: remove one of them"
        yield "checkpoints.export_interval checkpoints.export_hf", problem
    push_to, every = at("hub.push_to"), at("hub.every")
    if push_to is not None and not at("checkpoints.export_hf"):
        problem = f"is {push_to}, but checkpoints.export_hf is false, so there is no export to push: remove one of them"
        yield "hub.push_to checkpoints.export_hf", problem
    if push_to is None:
        for key, default in (("hub.private", True), ("hub.every", "end")):
            if at(key) not in (None, default):
                problem = (
                    f"is {str(at(key)).lower()}, but push_to is null, and nothing is pushed: set it, or remove the key"
                )
                yield f"{key} hub.push_to", problem
    if isinstance(every, int) and (export_interval is None or every % export_interval):
        exports = "null" if export_interval is None else export_interval
        problem = f"is {every}, but checkpoints.export_interval is {exports}, and only exports are pushed"
        yield "hub.every checkpoints.export_interval", f"{problem}: give a multiple of it, exports or end"
    strategy = at("data.packing.strategy")
    if strategy != "pool" and at("data.packing.pool_size") != POOL_SIZE:
        problem = f"is read by strategy pool only, and strategy is {strategy}: remove the key"
        yield "data.packing.pool_size data.packing.strategy", problem
    loggers = at("logging.to") or ()
    if twice := sorted({name for name in loggers if loggers.count(name) > 1}):
        yield "logging.to", f"has {', '.join(twice)} twice; name each logger once"
    mode, is_logged_to_wandb = at("logging.wandb.mode"), "wandb" in loggers
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
