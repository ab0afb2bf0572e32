"""Conversion between checkpoints and Hugging Face folders; bitwise the identity in both directions (law 9).

Master weights are fp32, which represents fp16 and bf16 exactly. Weights that were loaded in one of these types are
therefore exported unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sftron.checkpoint.checkpoint import MODEL, OPTIMIZER, read_state, state_text, verify_checkpoint, write_checkpoint
from sftron.checkpoint.hf_export import ExportSource, export_hf, stop_ids_of
from sftron.checkpoint.hf_weights import EMBEDDINGS, HEAD, SafetensorsFolder, load_model, read_config
from sftron.checkpoint.shards import CheckpointError, ShardedTensors, own_shards
from sftron.models.architecture import LlamaConfig, architecture_facts
from sftron.models.fusion import split_state_dict


def checkpoint_to_hf(
    checkpoint: Path,
    folder: Path,
    *,
    source: ExportSource,
    dtype: torch.dtype,
    chat_template: str | None = None,
    stop_token_ids: Collection[int] | None = None,
    model_card: str | None = None,
) -> None:
    """Writes a Hugging Face folder atomically from a checkpoint of any number of ranks.

    The other arguments are those of `export_hf`.

    Args:
        stop_token_ids: By default, the stop tokens that the run of the checkpoint has trained.

    Raises:
        CheckpointError: The checkpoint is broken, or its architecture differs from the source's in more than a larger
            vocabulary.
        OSError: The folder cannot be written.
    """
    if problem := verify_checkpoint(checkpoint):
        raise CheckpointError(f"{checkpoint}: {problem}")
    state = read_state(checkpoint)
    if stop_token_ids is None:
        stop_token_ids = state.get("stop_token_ids")
        if not isinstance(stop_token_ids, list):
            raise CheckpointError(f"{checkpoint} has no stop_token_ids; give them with --stop-token-ids")
    with ShardedTensors(checkpoint, MODEL) as stored:
        vocab_size = stored.shapes()[EMBEDDINGS][0]
        _require_architecture(checkpoint, state.get("fingerprint"), replace(source.architecture, vocab_size=vocab_size))
        export_hf(
            _tensors(stored),
            folder,
            source_folder=source,
            dtype=dtype,
            stop_token_ids=stop_token_ids,
            chat_template=chat_template,
            vocab_size=vocab_size,
            model_card=model_card,
        )


def hf_to_checkpoint(folder: Path, checkpoint: Path) -> None:
    """Writes a checkpoint atomically from a Hugging Face folder, for use with `checkpoints.load: weights`.

    The checkpoint has step 0 and no optimizer state. The model is held in memory in fp32.

    Raises:
        ValueError: The folder does not contain a supported model.
        OSError: The checkpoint cannot be written.
    """
    model = load_model(folder, compute_dtype=torch.float32)
    shards = {MODEL: dict(own_shards(model.named_parameters(), is_main=True)), OPTIMIZER: {}}
    state = {"fingerprint": architecture_facts(read_config(folder)), "stop_token_ids": list(stop_ids_of(folder))}
    write_checkpoint(checkpoint, 0, shards, state=state_text(0, state))


def differing(checkpoint: Path, folder: Path) -> tuple[int, list[str]]:
    """Compares a Hugging Face folder bit for bit with a checkpoint, cast to the folder's type.

    Returns:
        The number of tensors in the folder, and the names of those that differ.
    """
    different = []
    with ShardedTensors(checkpoint, MODEL) as stored, SafetensorsFolder(folder) as exported:
        names = set(exported.names())
        expected: set[str] = set()
        for name, tensor in split_state_dict(_tensors(stored), read_config(folder)):
            expected.add(name)
            if name not in names or not _same_bits(tensor, exported.read(name)):
                different.append(name)
    # A tied head that is stored separately was already compared with the embeddings when it was loaded or written.
    return len(names), sorted({*different, *(names - expected - {HEAD})})


def _same_bits(native: Tensor, exported: Tensor) -> bool:
    """Compares bytes, so that NaN equals itself, and 0 differs from -0."""
    if native.shape != exported.shape:
        return False
    native_bytes = native.to(exported.dtype).contiguous().view(-1).view(torch.uint8)
    return torch.equal(native_bytes, exported.contiguous().view(-1).view(torch.uint8))


def _tensors(stored: ShardedTensors) -> Iterator[tuple[str, Tensor]]:
    return ((name, stored.read(name)) for name in stored.shapes())


def _require_architecture(checkpoint: Path, fingerprint: Any, config: LlamaConfig) -> None:
    found = fingerprint if isinstance(fingerprint, dict) else {}
    different = [
        f"{name}: {found.get(name, 'absent')} in the checkpoint, {value} in config.json"
        for name, value in architecture_facts(config).items()
        if found.get(name) != value
    ]
    if different:
        raise CheckpointError(f"{checkpoint} is of another model than config.json:\n  " + "\n  ".join(different))
