"""Exports: a whole model, an adapter, or an adapter merged into its base; and checkpoints of Hugging Face folders.

An export is planned (`plan_export`), written (`write_export`) and read back (`check_export`), by a run and by `sftron
convert` alike. A conversion is bitwise the identity both ways (law 9): master weights are fp32, which represents fp16
and bf16 exactly, so weights that were loaded in one of these types are exported unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sftron.checkpoint.adapter import WEIGHTS, read_adapter, write_adapter
from sftron.checkpoint.atomic import publish
from sftron.checkpoint.checkpoint import MODEL, OPTIMIZER, read_state, state_text, verify_checkpoint, write_checkpoint
from sftron.checkpoint.hf_weights import EMBEDDINGS, HEAD, SafetensorsFolder, digest_of, file_digests, load_model
from sftron.checkpoint.merge import MergeReport, merged_weights
from sftron.checkpoint.model_folder import read_config, stop_ids_of, write_json
from sftron.checkpoint.shards import DTYPES, CheckpointError, ShardedTensors, file_name, own_shards, write_tensors
from sftron.checkpoint.source import ExportSource
from sftron.models.adapters import LoraSpec, peft_name
from sftron.models.architecture import OF_THE_MODEL, LlamaConfig, architecture_facts
from sftron.models.fusion import NamedTensors, split_state_dict
from sftron.models.mixtures import spelling_of
from sftron.models.quantization import NF4, as_computed

BASE_WEIGHTS = f"{OF_THE_MODEL}base weights"
"""The entry of a checkpoint's fingerprint for the hash of the base model, if it holds adapters."""

_BYTES_PER_SHARD = 5 * 1000**3
"""The maximum size of a weight file, which is transformers' default; loaders read several files in parallel."""


# --- Planning ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """A planned export: a whole model or, with `spec`, adapters, by themselves or merged into their base."""

    source: ExportSource
    dtype: torch.dtype
    """The type of the tensors on disk."""
    stop_token_ids: Collection[int]
    vocab_size: int | None
    """The number of rows of the embeddings."""
    spec: LoraSpec | None = None
    is_merged: bool = False
    base_sha256: str | None = None
    """The hash of the weights that the adapters were trained on; a merge refuses any other base."""
    base_model: str = ""
    """The name or path by which others load the base of an adapter."""
    base_dtype: torch.dtype | None = None
    """The type of the base's frozen matrices in training; None for the stored one."""
    card: Callable[[MergeReport | None], str] | None = None
    """Returns the content of README.md, given the report of a finished merge."""

    @property
    def is_adapter(self) -> bool:
        return self.spec is not None and not self.is_merged


def plan_export(
    state: Mapping[str, Any],
    source: ExportSource,
    vocab_size: int,
    *,
    dtype: torch.dtype | None,
    model_dtype: torch.dtype,
    merge: bool = False,
    **options: Any,
) -> ExportPlan:
    """Returns the plan of an export of a checkpoint's weights.

    Args:
        state: The state of the checkpoint.
        dtype: The type on disk; by default, `model_dtype` for a whole model, and float32 for an adapter.
        merge: Whether to merge adapters into their base; a whole model ignores it.
        options: Other fields of the plan.
    """
    spec = lora_of(state)
    if spec is not None:
        options |= {"spec": spec, "is_merged": merge, "base_sha256": str(state["fingerprint"].get(BASE_WEIGHTS))}
    dtype = dtype or (model_dtype if spec is None or merge else torch.float32)
    stops = state["stop_token_ids"]
    return ExportPlan(source=source, dtype=dtype, stop_token_ids=stops, vocab_size=vocab_size, **options)


# --- Writing ---


def write_export(plan: ExportPlan, weights: NamedTensors, folder: Path) -> MergeReport | None:
    """Writes an export atomically.

    Args:
        weights: The parameters of LlamaForSFT or, for adapters, all trained tensors by `peft_name`.

    Returns:
        What rounding lost of the adapters; None without a merge.

    Raises:
        CheckpointError: The folder's weights are not the base that the adapters were trained on.
        ValueError: The weights do not match the source or are not finite, or rounding would undo the whole merge.
        OSError: The folder cannot be written.
    """
    options: dict[str, Any] = {"dtype": plan.dtype, "vocab_size": plan.vocab_size}
    options |= {"stop_token_ids": plan.stop_token_ids, "model_card": plan.card and plan.card(None)}
    if plan.spec is not None and plan.is_adapter:
        options |= {"base_model": plan.base_model, "base_revision": plan.source.model.revision}
        options |= {"in_nf4": plan.base_dtype == NF4}
        write_adapter(folder, dict(weights), plan.spec, source=plan.source, **options)
        return None
    if plan.base_sha256 is not None:
        require_base(plan.source.folder, plan.base_sha256)
    whole, report = _whole(plan, weights)
    export_hf(whole, folder, source_folder=plan.source, **options)
    if report is not None and plan.card is not None:  # the report is complete only now
        (folder / "README.md").write_text(plan.card(report), encoding="utf-8")
    return report


def export_hf(
    weights: NamedTensors,
    folder: Path,
    *,
    source_folder: Path | ExportSource,
    dtype: torch.dtype,
    stop_token_ids: Collection[int],
    tokenizer_folder: Path | None = None,
    chat_template: str | None = None,
    vocab_size: int | None = None,
    model_card: str | None = None,
    bytes_per_shard: int = _BYTES_PER_SHARD,
) -> None:
    """Writes a Hugging Face folder atomically: it is renamed to `folder` after everything is on disk (atomic.py).

    Args:
        weights: The names and tensors of LlamaForSFT's parameters, e.g. `model.named_parameters()`. They are consumed
            one at a time, so a sharded model can be gathered while it is written. At most one weight file is held in
            memory.
        source_folder: The Hugging Face folder that training started from, or what was read of it earlier, in case it is
            gone. Its config is copied.
        tokenizer_folder: The folder of tokenizer and template, by default source_folder.
        chat_template: The Jinja source of the template used in training, if it is not the tokenizer's own.
        vocab_size: The number of embedding rows if tokens were added, by default the source's.
        model_card: The content of README.md.
        dtype: The type of the tensors on disk.
        stop_token_ids: The ids that end a trained turn. They are added to eos_token_id in generation_config.json;
            without them, generation would continue after the end of the turn.

    Raises:
        ValueError: The keys differ from the source's (law 9), or a weight is not finite.
    """
    read = isinstance(source_folder, ExportSource)
    source = source_folder if read else ExportSource.read(source_folder, tokenizer_folder)
    source = source if chat_template is None else source.with_chat_template(chat_template)

    def write(unfinished: Path) -> None:
        names = _write_weights(_with_carried(_as_stored(weights, source, dtype), source), unfinished, bytes_per_shard)
        if different := names ^ {*source.stored_names.values(), *source.carried}:
            raise ValueError(
                f"The weights to export and {source.folder} differ in these keys: "
                f"{', '.join(sorted(different))}. Give every parameter of the model once, by its name."
            )
        write_json(unfinished / "config.json", source.exported_config(dtype, vocab_size))
        write_json(unfinished / "generation_config.json", source.exported_generation_config(stop_token_ids))
        source.write_files(unfinished, model_card)

    publish(folder, write)


def _as_stored(weights: NamedTensors, source: ExportSource, dtype: torch.dtype) -> NamedTensors:
    config = source.architecture
    # Some checkpoints with tied embeddings store the head as well; their exports do the same.
    repeats_head = config.tie_word_embeddings and HEAD in source.stored_names
    for name, tensor in split_state_dict(weights, config, spelling_of(source.stored_names)):
        own_dtype = torch.promote_types(dtype, source.wide.get(name, dtype))
        stored = tensor.detach().to(device="cpu", dtype=own_dtype)
        if not all(bound.isfinite() for bound in stored.aminmax()):  # a NaN makes both bounds NaN
            raise ValueError(
                f"The weights to export are not finite as {dtype}: {name} holds NaN or infinity. Export another "
                "checkpoint."
            )
        yield name, stored
        if name == EMBEDDINGS and repeats_head:
            yield HEAD, stored.clone()


def _with_carried(weights: NamedTensors, source: ExportSource) -> NamedTensors:
    """Yields the weights under their stored names, then the carried tensors, bit for bit."""
    for name, tensor in weights:
        yield source.stored_names.get(name, name), tensor
    for name, read in source.carried.items():
        yield name, read()


def _write_weights(weights: NamedTensors, folder: Path, bytes_per_shard: int) -> set[str]:
    """Writes the weight files, and an index for several files; returns the names of all tensors."""
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    num_pending_bytes = num_bytes = 0

    def write_pending() -> None:
        write_tensors(folder / f"part-{len(shards)}", pending, {"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in weights:
        if pending and num_pending_bytes + tensor.nbytes > bytes_per_shard:
            write_pending()
            num_pending_bytes = 0
        pending[name] = tensor.contiguous()
        num_pending_bytes += tensor.nbytes
        num_bytes += tensor.nbytes
    write_pending()
    weight_map = {}
    for number, names in enumerate(shards):
        # The number of files is part of each name, and is known only now.
        final = file_name("model", number, len(shards))
        (folder / f"part-{number}").rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    if len(shards) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / "model.safetensors.index.json", index)
    return set(weight_map)


# --- Checking ---


def check_export(plan: ExportPlan, weights: NamedTensors, folder: Path) -> tuple[int, list[str]]:
    """Compares an export bit for bit with the weights that it was written from, cast to its type.

    Returns:
        The number of tensors in the folder, and the names of those that differ.
    """
    if not plan.is_adapter:
        return differing_weights(_whole(plan, weights)[0], folder)
    expected, stored = dict(weights), read_adapter(folder, plan.source.architecture).tensors
    with SafetensorsFolder(folder, WEIGHTS) as file:
        dtype = DTYPES[file.dtype(file.names()[0])]
    different = [
        name
        for name in expected.keys() | stored.keys()
        if name not in expected or name not in stored or not same_bits(expected[name].to(dtype), stored[name])
    ]
    return len(stored), sorted(different)


def _whole(plan: ExportPlan, weights: NamedTensors) -> tuple[NamedTensors, MergeReport | None]:
    """Returns the weights of a whole model, merged if they are adapters; the report is filled as they are consumed."""
    if plan.spec is None:
        return weights, None
    report = MergeReport(plan.dtype)
    read_base = None if plan.base_dtype is None else partial(as_computed, dtype=plan.base_dtype)
    return merged_weights(plan.source.folder, dict(weights), plan.spec, report, read_base=read_base), report


def differing_weights(weights: NamedTensors, folder: Path) -> tuple[int, list[str]]:
    """Compares a Hugging Face folder with named weights, as `check_export` does."""
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


# --- Checkpoints ---


@contextmanager
def open_weights(
    checkpoint: Path, source: ExportSource, stop_token_ids: Collection[int] | None = None
) -> Iterator[tuple[dict[str, Any], Callable[[], NamedTensors], int]]:
    """Yields a checkpoint's state, a function that reads its weights for `write_export`, and its number of embedding
    rows.

    Any number of ranks may have written it.

    Args:
        stop_token_ids: The stop tokens of the state; by default, the ones that the run trained.

    Raises:
        CheckpointError: The checkpoint is broken, or its architecture differs from the source's in more than a larger
            vocabulary.
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
        name_of = str if lora_of(state) is None else peft_name

        def read() -> NamedTensors:
            return ((name_of(name), stored.read(name)) for name in shapes)

        yield state | {"stop_token_ids": stops}, read, vocab_size


def lora_of(state: Mapping[str, Any]) -> LoraSpec | None:
    """Returns the adapters of a checkpoint, given its state; None if it holds whole weights."""
    stated = state.get("lora")
    return None if stated is None else LoraSpec.from_dict(stated)


def require_base(folder: Path, trained: str) -> None:
    """Raises CheckpointError if the weights in `folder` are not the base that the adapters were trained on."""
    digest = digest_of(file_digests(folder))
    if trained != digest:
        raise CheckpointError(
            f"the weights in {folder} have SHA-256 {digest[:12]}, but the adapters were trained on a base with "
            f"{trained[:12]}; give that base model"
        )


def hf_to_checkpoint(folder: Path, checkpoint: Path) -> tuple[int, list[str]]:
    """Writes a checkpoint atomically from a Hugging Face folder, for use with `checkpoints.load: weights`.

    The checkpoint has step 0 and no optimizer state. The model is held in memory in fp32.

    Returns:
        The number of tensors, and the names of those that differ when they are read back.

    Raises:
        ValueError: The folder does not contain a supported model.
        OSError: The checkpoint cannot be written.
    """
    model = load_model(folder, compute_dtype=torch.float32)
    shards = {MODEL: dict(own_shards(model.named_parameters(), is_main=True)), OPTIMIZER: {}}
    state = {"fingerprint": architecture_facts(read_config(folder)), "stop_token_ids": list(stop_ids_of(folder))}
    write_checkpoint(checkpoint, 0, shards, state=state_text(0, state))
    return differing(checkpoint, folder)


def differing(checkpoint: Path, folder: Path) -> tuple[int, list[str]]:
    """Compares a Hugging Face folder with a checkpoint of whole weights, as `check_export` does."""
    with ShardedTensors(checkpoint, MODEL) as stored:
        return differing_weights(((name, stored.read(name)) for name in stored.shapes()), folder)


def _require_architecture(checkpoint: Path, fingerprint: Any, config: LlamaConfig) -> None:
    of_checkpoint = fingerprint if isinstance(fingerprint, dict) else {}
    different = [
        f"{name}: {of_checkpoint.get(name, 'absent')} in the checkpoint, {value} in config.json"
        for name, value in architecture_facts(config).items()
        if of_checkpoint.get(name) != value
    ]
    if different:
        raise CheckpointError(f"{checkpoint} does not fit the model in config.json:\n  " + "\n  ".join(different))
