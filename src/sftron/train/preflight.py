"""The checks of a run before its weights are read. Each raises ValueError with both values and the remedy."""

from __future__ import annotations

import secrets
import socket
import time
from pathlib import Path

from sftron.config import Config
from sftron.models.quantization import import_bitsandbytes
from sftron.train.build_data import longest_document
from sftron.train.evaluation import require_metric, watched_metric
from sftron.train.ranks import Ranks
from sftron.train.run import RunData, RunModel

_PATIENCE_S = 60
"""The longest time that NFS clients may cache an old directory listing by default (acdirmax)."""


def preflight(config: Config, data: RunData, model: RunModel) -> None:
    """Runs all checks that one rank can make without weights."""
    if config.optimizer.state == "8bit":
        import_bitsandbytes("optimizer.state: 8bit")
    if config.model.frozen_dtype == "nf4":
        import_bitsandbytes("model.frozen_dtype: nf4")
    watched = None if config.evaluation.patience is None else watched_metric(config, data.evaluation_sets)
    for key, metric in (("checkpoints.keep_best", config.checkpoints.keep_best), ("evaluation.metric", watched)):
        if metric is not None:
            require_metric(key, metric, data.evaluation_sets, has_prompts=bool(data.questions))
    _require_positions(config, model)
    highest_id, token = max((number, token) for token, number in data.chat_tokenizer.tokenizer.get_vocab().items())
    if highest_id >= (num_ids := model.architecture.vocab_size):
        raise ValueError(
            f"the tokenizer has ids up to {highest_id} ({token!r}), but {model.folder} embeds ids up to {num_ids - 1} "
            f"(vocab_size {num_ids}); they do not belong together: use this model's tokenizer, without added tokens"
        )
    epochs, warmup_steps = config.tokens.train_epochs, config.optimizer.warmup_steps
    if (
        epochs
        and isinstance(warmup_steps, int)
        and warmup_steps >= (steps := epochs * (data.projection.steps_per_epoch or 0))
    ):
        raise ValueError(
            f"optimizer.warmup_steps: {warmup_steps} is not below about {steps:,.0f} steps, which {epochs} epochs take,"
            " so the learning rate would never reach its peak; lower it"
        )


def _require_positions(config: Config, model: RunModel) -> None:
    """Requires that the longest possible document fits the positions of the model."""
    length, architecture = longest_document(config), model.architecture
    if length > architecture.max_position_embeddings:
        raise ValueError(
            f"documents may have {length} tokens, but {model.folder} has {architecture.max_position_embeddings} "
            "positions (max_position_embeddings); lower tokens.sequence_length"
            # Without isolation, positions continue through the whole pack.
            + ("" if config.data.remove_cross_attention else ", or set data.remove_cross_attention: true")
        )


def require_one_folder(folder: Path, ranks: Ranks, patience_s: float = _PATIENCE_S) -> None:
    """Requires that all nodes share `folder`, to which each rank writes its shard of a checkpoint.

    Every rank calls this. The main rank writes a file, and each node waits up to `patience_s` seconds to see it.
    """
    if ranks.world_size == 1:
        return
    seen = folder / ranks.gather({"name": f"seen-by-all-{secrets.token_hex(8)}"})[0]["name"]

    def look() -> None:
        if ranks.is_main:
            seen.touch()
        end = time.monotonic() + patience_s
        while ranks.local_rank == 0 and not seen.exists():
            if time.monotonic() > end:
                raise ValueError(
                    f"{socket.gethostname()} does not see what rank 0 writes to {folder}. general.output_dir has to be "
                    "on a file system that all nodes share"
                )
            time.sleep(0.1)

    try:
        ranks.all_or_raise(look)
    finally:
        if ranks.is_main:
            seen.unlink()
