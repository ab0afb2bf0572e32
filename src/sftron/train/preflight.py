"""Preflight checks, made before weights are read: configuration, data and model fit together, and all nodes agree.

Each check raises ValueError with both values and the remedy.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sftron.checkpoint.atomic import main_or_raise
from sftron.config import Config, dump_config
from sftron.train import run_data
from sftron.train.evaluation import require_metric
from sftron.train.model_folder import untrained_ids
from sftron.train.ranks import Ranks

if TYPE_CHECKING:
    from sftron.train.setup import RunData, RunModel, Setup

_PATIENCE_S = 60
"""The longest time that NFS clients may cache an old directory listing by default (acdirmax)."""


def preflight(config: Config, data: RunData, model: RunModel) -> None:
    """Runs all checks that one rank can make without weights."""
    if config.checkpoints.keep_best is not None:
        require_metric(config.checkpoints.keep_best, data.evaluation_sets, has_prompts=bool(data.questions))
    require_positions(config, model)
    require_vocabulary(data, model)
    require_trained_embeddings(data, model)
    require_peak(config, data)


def require_positions(config: Config, model: RunModel) -> None:
    """Requires that the longest possible document fits the positions and the sliding window of the model."""
    length, architecture = run_data.longest_document(config), model.architecture
    # Without isolation, positions continue through the whole pack.
    advice = "" if config.data.remove_cross_attention else ", or set data.remove_cross_attention: true"
    if length > architecture.max_position_embeddings:
        raise ValueError(
            f"documents may have {length} tokens, but {model.folder} has {architecture.max_position_embeddings} "
            "positions (max_position_embeddings); lower tokens.sequence_length" + advice
        )
    window = architecture.sliding_window
    if window is not None and length > window:
        size = "tokens.sequence_length" + ("" if config.data.remove_cross_attention else " x tokens.micro_batch_size")
        raise ValueError(
            f"documents may have {length} tokens, but a token of {model.folder} attends to the last {window} only "
            f"(sliding_window), which is implemented where no document is longer; lower {size} to {window}" + advice
        )


def require_vocabulary(data: RunData, model: RunModel) -> None:
    """Requires that the model has an embedding for every token of the tokenizer."""
    highest_id = max(data.chat_tokenizer.tokenizer.get_vocab().values())
    if highest_id >= model.architecture.vocab_size:
        raise ValueError(
            f"the tokenizer has ids up to {highest_id}, but {model.folder} embeds {model.architecture.vocab_size} "
            "(vocab_size); they do not belong together"
        )


def require_trained_embeddings(data: RunData, model: RunModel) -> None:
    """Requires that the model was trained on the control tokens that occur in the data."""
    if untrained := untrained_ids(model.folder, data.sample.control_ids - set(model.initialize_ids)):
        tokenizer = data.chat_tokenizer.tokenizer
        named = "; ".join(f"{tokenizer.convert_ids_to_tokens(n)} (id {n}): {why}" for n, why in untrained.items())
        raise ValueError(
            f"the chat template writes control tokens that {model.folder} was never trained on: {named}. Take a "
            "template without them (tokenizer.chat_template: plain needs none), or list them in tokenizer.add_tokens, "
            "so that they begin as the mean of all embeddings"
        )


def require_peak(config: Config, data: RunData) -> None:
    """Requires that the run is longer than its warm-up, if its length is given in epochs."""
    epochs, warmup_steps = config.tokens.train_epochs, config.optimizer.warmup_steps
    if epochs and warmup_steps >= (steps := epochs * (data.projection.steps_per_epoch or 0)):
        raise ValueError(
            f"optimizer.warmup_steps: {warmup_steps} is not below the {steps:,.0f} steps or so of {epochs} epochs, so "
            "the learning rate would never reach its peak; lower it"
        )


# --- Ranks and nodes ---


def require_alike(setup: Setup) -> None:
    """Requires that all ranks have the configuration, data and weights of the main one. Every rank calls this.

    A node with an older copy of a file would otherwise train on different packs or weights without an error.
    """
    weights = [f"{path.name} {path.stat().st_size}" for path in sorted(setup.model.folder.glob("*.safetensors"))]
    facts = {
        "the configuration": hashlib.sha256(dump_config(setup.config).encode()).hexdigest()[:12],
        "the model's files": ", ".join(weights),
        **{f"evaluation set {each.name}": each.fingerprint for each in setup.data.evaluation_sets},
        **setup.fingerprint,
    }
    first, *others = setup.ranks.gather(facts)
    for rank, other in enumerate(others, start=1):
        different = [
            f"{name}: {first[name]}, there {other.get(name)}" for name in first if first[name] != other.get(name)
        ]
        if different:
            raise ValueError(
                f"rank {rank} would not train on what rank 0 does; give every node the same files and arguments:\n  "
                + "\n  ".join(different)
            )


def require_one_folder(folder: Path, ranks: Ranks, patience_s: float = _PATIENCE_S) -> None:
    """Requires that all nodes share `folder`, to which each rank writes its shard of a checkpoint.

    Every rank calls this. The main rank writes a file, and each node waits up to `patience_s` seconds to see it.
    """
    if ranks.world_size == 1:
        return

    def write() -> list[str]:
        token = folder / f"seen-by-all-{secrets.token_hex(8)}"
        token.touch()
        return [token.name, socket.gethostname()]

    name, host = main_or_raise(ranks, write)

    def look() -> None:
        end = time.monotonic() + patience_s
        while ranks.local_rank == 0 and not (folder / name).exists():
            if time.monotonic() > end:
                raise ValueError(
                    f"{socket.gethostname()} does not see what rank 0 on {host} writes to {folder}. "
                    "general.output_dir has to lie on a file system that all nodes share"
                )
            time.sleep(0.1)

    try:
        ranks.all_or_raise(look)
    finally:
        if ranks.is_main:
            (folder / name).unlink()
