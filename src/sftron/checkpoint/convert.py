"""Conversion between checkpoints, adapters and Hugging Face folders; bitwise the identity both ways (law 9).

Master weights are fp32, which represents fp16 and bf16 exactly. Weights that were loaded in one of these types are
therefore exported unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sftron.checkpoint.adapter import WEIGHTS, read_adapter, write_adapter
from sftron.checkpoint.checkpoint import MODEL, OPTIMIZER, read_state, state_text, verify_checkpoint, write_checkpoint
from sftron.checkpoint.hf_export import ExportSource, export_hf, stop_ids_of
from sftron.checkpoint.hf_weights import EMBEDDINGS, HEAD, SafetensorsFolder, digest_of, file_digests, load_model
from sftron.checkpoint.merge import MergeReport, merged_weights
from sftron.checkpoint.model_folder import read_config
from sftron.checkpoint.shards import DTYPES, CheckpointError, ShardedTensors, own_shards
from sftron.models.adapters import LoraSpec, peft_name
from sftron.models.architecture import LlamaConfig, architecture_facts
from sftron.models.fusion import NamedTensors, split_state_dict
from sftron.models.mixtures import spelling_of

BASE_WEIGHTS = "the model's base weights"
"""The entry of a checkpoint's fingerprint for the hash of the base model, if it holds adapters."""


def checkpoint_to_hf(
    checkpoint: Path,
    folder: Path,
    *,
    source: ExportSource,
    dtype: torch.dtype,
    stop_token_ids: Collection[int] | None = None,
    model_card: str | None = None,
    read_base: Callable[[str, Tensor], Tensor] | None = None,
) -> MergeReport | None:
    """Writes a Hugging Face folder atomically from a checkpoint of any number of ranks.

    A checkpoint of adapters is merged into the base, which is read from the source's folder. The other arguments are
    those of `export_hf`.

    Args:
        stop_token_ids: By default, the stop tokens that the run of the checkpoint has trained.
        read_base: For a checkpoint of adapters, see `merged_weights`.

    Returns:
        What rounding lost of the adapters, if there are any.

    Raises:
        CheckpointError: The checkpoint is broken, or its architecture differs from the source's in more than a larger
            vocabulary.
        ValueError: Rounding would make the merged weights those of the base.
        OSError: The folder cannot be written.
    """
    with _opened(checkpoint, source, stop_token_ids) as (state, weights, vocab_size):
        spec, report = lora_of(state), None
        if spec is not None:
            require_base(source.folder, state["fingerprint"])
            weights, report = _merged(source, {peft_name(name): each for name, each in weights}, spec, dtype, read_base)
        export_hf(
            weights,
            folder,
            source_folder=source,
            dtype=dtype,
            stop_token_ids=state["stop_token_ids"],
            vocab_size=vocab_size,
            model_card=model_card,
        )
    return report


def checkpoint_to_adapter(
    checkpoint: Path,
    folder: Path,
    *,
    source: ExportSource,
    base_model: str,
    base_revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    stop_token_ids: Collection[int] | None = None,
    model_card: str | None = None,
) -> None:
    """Writes an adapter folder atomically from a checkpoint of adapters; see `write_adapter` and `checkpoint_to_hf`."""
    with _opened(checkpoint, source, stop_token_ids) as (state, weights, vocab_size):
        spec = lora_of(state)
        if spec is None:
            raise CheckpointError(f"{checkpoint} holds whole weights and no adapter; export it as a model")
        write_adapter(
            folder,
            {peft_name(name): each for name, each in weights},
            spec,
            source=source,
            base_model=base_model,
            base_revision=base_revision,
            stop_token_ids=state["stop_token_ids"],
            dtype=dtype,
            vocab_size=vocab_size,
            model_card=model_card,
        )


def read_trained_adapter(checkpoint: Path, source: ExportSource) -> tuple[dict[str, Any], dict[str, Tensor], int]:
    """Reads a checkpoint of adapters.

    Returns:
        The state, the tensors by `peft_name`, and the number of rows of the embeddings.

    Raises:
        CheckpointError: The checkpoint is broken, or its architecture differs from the source's.
    """
    with _opened(checkpoint, source, None) as (state, weights, vocab_size):
        return state, {peft_name(name): each for name, each in weights}, vocab_size


def adapter_to_hf(
    adapter: Path,
    folder: Path,
    *,
    base: Path,
    dtype: torch.dtype,
    stop_token_ids: Collection[int] | None = None,
    model_card: str | None = None,
) -> MergeReport:
    """Writes a Hugging Face folder atomically from an adapter folder and its base; see `export_hf`.

    The tokenizer and the stop tokens are those of the adapter's folder, where it has them.

    Raises:
        ValueError: A folder is broken, the adapter is not of this base, or rounding would make the merged weights those
            of the base.
    """
    has_tokenizer = any((adapter / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    source = ExportSource.read(base, adapter if has_tokenizer else None)
    found = read_adapter(adapter, source.architecture)
    weights, report = _merged(source, found.tensors, found.spec, dtype)
    export_hf(
        weights,
        folder,
        source_folder=source,
        dtype=dtype,
        stop_token_ids=list(stop_ids_of(adapter)) if stop_token_ids is None else stop_token_ids,
        vocab_size=found.vocab_size,
        model_card=model_card,
    )
    return report


def require_base(folder: Path, fingerprint: Mapping[str, Any]) -> None:
    """Raises CheckpointError if `folder` has other weights than the base that adapters were trained with."""
    trained, found = fingerprint.get(BASE_WEIGHTS), digest_of(file_digests(folder))
    if trained != found:
        raise CheckpointError(
            f"{folder} has weights with the SHA-256 {found[:12]}, and the adapters were trained with a base of "
            f"{str(trained)[:12]}; give that base model"
        )


def lora_of(state: Mapping[str, Any]) -> LoraSpec | None:
    """Returns the adapters of a checkpoint, given its state; None if it holds whole weights."""
    stated = state.get("lora")
    return None if stated is None else LoraSpec.from_dict(stated)


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


def differing(
    checkpoint: Path,
    folder: Path,
    base: Path | None = None,
    read_base: Callable[[str, Tensor], Tensor] | None = None,
) -> tuple[int, list[str]]:
    """Compares a Hugging Face folder bit for bit with a checkpoint, cast to the folder's type.

    Args:
        base: For a checkpoint of adapters, the folder of the base, into which they are merged.
        read_base: See `merged_weights`.

    Returns:
        The number of tensors in the folder, and the names of those that differ.
    """
    spec = lora_of(read_state(checkpoint))
    with ShardedTensors(checkpoint, MODEL) as stored:
        weights: NamedTensors = _tensors(stored)
        if spec is not None and base is not None:
            tensors = {peft_name(name): each for name, each in weights}
            report = MergeReport(torch.float32)
            weights = merged_weights(base, tensors, spec, report, read_base=read_base)
        return differing_weights(weights, folder)


def differing_in_adapter(checkpoint: Path, adapter: Path, base: Path) -> tuple[int, list[str]]:
    """Compares an adapter folder bit for bit with a checkpoint, as `differing` does."""
    found = read_adapter(adapter, read_config(base)).tensors
    with ShardedTensors(checkpoint, MODEL) as stored:
        expected = {peft_name(name): each for name, each in _tensors(stored)}
    with SafetensorsFolder(adapter, WEIGHTS) as file:
        dtype = DTYPES[file.dtype(file.names()[0])]
    different = [
        name
        for name in expected.keys() | found.keys()
        if name not in expected or name not in found or not same_bits(expected[name].to(dtype), found[name])
    ]
    return len(found), sorted(different)


def differing_weights(weights: NamedTensors, folder: Path) -> tuple[int, list[str]]:
    """Compares a Hugging Face folder with named weights, as `differing` does."""
    different = []
    with SafetensorsFolder(folder) as exported:
        names = set(exported.names())
        expected: set[str] = set()
        for name, tensor in split_state_dict(weights, read_config(folder), spelling_of(names)):
            expected.add(name)
            if name not in names or not same_bits(tensor, exported.read(name)):
                different.append(name)
    # A tied head that is stored separately was already compared with the embeddings when it was loaded or written.
    return len(names), sorted({*different, *(names - expected - {HEAD})})


def same_bits(native: Tensor, exported: Tensor) -> bool:
    """Compares the bytes of two tensors in the type of the second, so that NaN equals itself, and 0 differs from -0."""
    if native.shape != exported.shape:
        return False
    native_bytes = native.to(exported.dtype).contiguous().view(-1).view(torch.uint8)
    return torch.equal(native_bytes, exported.contiguous().view(-1).view(torch.uint8))


@contextmanager
def _opened(
    checkpoint: Path, source: ExportSource, stop_token_ids: Collection[int] | None
) -> Iterator[tuple[dict[str, Any], NamedTensors, int]]:
    """Yields the state of a checkpoint, its weights, and the number of rows of its embeddings.

    The state has the given stop tokens, if any. Raises CheckpointError as `checkpoint_to_hf` does.
    """
    if problem := verify_checkpoint(checkpoint):
        raise CheckpointError(f"{checkpoint}: {problem}")
    state = read_state(checkpoint)
    stops = state.get("stop_token_ids") if stop_token_ids is None else list(stop_token_ids)
    if not isinstance(stops, list):
        raise CheckpointError(f"{checkpoint} has no stop_token_ids; give them with --stop-token-ids")
    with ShardedTensors(checkpoint, MODEL) as stored:
        shapes, config = stored.shapes(), source.architecture
        # A checkpoint of adapters may have neither.
        vocab_size = next((shapes[name][0] for name in (EMBEDDINGS, HEAD) if name in shapes), config.vocab_size)
        _require_architecture(checkpoint, state.get("fingerprint"), replace(config, vocab_size=vocab_size))
        yield state | {"stop_token_ids": stops}, _tensors(stored), vocab_size


def _merged(
    source: ExportSource,
    tensors: Mapping[str, Tensor],
    spec: LoraSpec,
    dtype: torch.dtype,
    read_base: Callable[[str, Tensor], Tensor] | None = None,
) -> tuple[NamedTensors, MergeReport]:
    report = MergeReport(dtype)
    return merged_weights(source.folder, tensors, spec, report, read_base=read_base), report


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
