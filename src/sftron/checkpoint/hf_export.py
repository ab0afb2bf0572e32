"""Writing a folder that transformers and vLLM load as it is: weights, config, stop tokens, tokenizer, chat template."""

import json
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch

from sftron.checkpoint.fusion import NamedTensors, split_state_dict
from sftron.checkpoint.hf import EMBEDDINGS, HEAD, SafetensorsFolder, read_config, read_json
from sftron.checkpoint.model_files import TERMS, TOKENIZER_FILES, require_inside
from sftron.checkpoint.publish import publish
from sftron.checkpoint.tensor_file import write_tensors

_BYTES_PER_SHARD = 5 * 1000**3
"""transformers' own limit; loaders read shards in parallel."""


def export_hf(
    weights: NamedTensors,
    folder: Path,
    *,
    source_folder: Path,
    dtype: torch.dtype,
    stop_token_ids: Collection[int],
    tokenizer_folder: Path | None = None,
    chat_template: str | None = None,
    vocab_size: int | None = None,
    model_card: str | None = None,
    bytes_per_shard: int = _BYTES_PER_SHARD,
) -> None:
    """Writes `folder`, whole or not at all: it appears by rename once all of it is on the disk (publish.py).

    weights: names and tensors of LlamaForSFT's parameters, e.g. `model.named_parameters()`; consumed one at a time, so
        that a sharded model can be gathered as it is written. At most one shard is held in memory.
    source_folder: the Hugging Face folder that training started from; its config is copied.
    tokenizer_folder: where tokenizer and template are copied from, by default source_folder.
    chat_template: Jinja source of the template that was trained with, where it is not the tokenizer's own.
    vocab_size: rows of the embeddings, where tokens were added; by default the source's.
    model_card: the README.md.
    dtype: of the tensors on disk.
    stop_token_ids: the ids that end a trained turn; added to generation_config.json's eos_token_id, without which
        generation runs past the end of the turn.

    Raises: ValueError if the keys are not exactly those of the source (law 9).
    """

    def write(unfinished: Path) -> None:
        names = _write_weights(_as_stored(weights, source_folder, dtype), unfinished, bytes_per_shard)
        _check_names(names, source_folder)
        _write_configs(unfinished, source_folder, dtype, stop_token_ids, vocab_size)
        _copy(TERMS, source_folder, unfinished)
        _copy(TOKENIZER_FILES, tokenizer_folder or source_folder, unfinished)
        if chat_template is not None:
            # This file has precedence over a template inside tokenizer_config.json.
            (unfinished / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
        if model_card is not None:
            (unfinished / "README.md").write_text(model_card, encoding="utf-8")

    publish(folder, write)


def _copy(patterns: Iterable[str], source: Path, target: Path) -> None:
    for pattern in patterns:
        for path in sorted(source.glob(pattern)):
            require_inside(source, path)
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, target / path.name)


def _as_stored(weights: NamedTensors, source_folder: Path, dtype: torch.dtype) -> NamedTensors:
    config = read_config(source_folder)
    # Some tied checkpoints store the head as well; then so do we.
    repeats_head = config.tie_word_embeddings and HEAD in _stored_names(source_folder)
    for name, tensor in split_state_dict(weights, config):
        stored = tensor.detach().to(device="cpu", dtype=dtype)
        if not all(bound.isfinite() for bound in stored.aminmax()):  # a NaN is both bounds
            problem = f"{name} holds NaN or infinity"
            raise ValueError(f"The weights to export are not finite as {dtype}: {problem}. Export another checkpoint.")
        yield name, stored
        if name == EMBEDDINGS and repeats_head:
            yield HEAD, stored.clone()


def _stored_names(folder: Path) -> set[str]:
    with SafetensorsFolder(folder) as source:
        return set(source.names())


def _check_names(names: set[str], source_folder: Path) -> None:
    different = names ^ _stored_names(source_folder)
    if different:
        raise ValueError(
            f"The weights to export and those of {source_folder} differ in these keys: {', '.join(sorted(different))}. "
            "Give every parameter of the model once, by its name."
        )


def _write_weights(weights: NamedTensors, folder: Path, bytes_per_shard: int) -> set[str]:
    """Writes the shards, and the index if there are several; returns the names of all tensors."""
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    num_pending_bytes = num_bytes = 0

    def write_pending() -> None:
        write_tensors(folder / _part_name(len(shards)), pending, {"format": "pt"})
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
    if len(shards) == 1:
        (folder / _part_name(0)).rename(folder / "model.safetensors")
        return set(shards[0])
    weight_map = {}
    for number, names in enumerate(shards):
        # The total is part of each name, and known only now.
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / _part_name(number)).rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)
    return set(weight_map)


def _part_name(number: int) -> str:
    return f"part-{number}.safetensors"


def _write_configs(
    folder: Path, source_folder: Path, dtype: torch.dtype, stop_token_ids: Collection[int], vocab_size: int | None
) -> None:
    config = read_json(source_folder / "config.json")
    if vocab_size is not None:
        config["vocab_size"] = vocab_size
    # transformers 4 and vLLM read torch_dtype, transformers 5 writes dtype and reads both.
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    _write_json(folder / "config.json", config)
    path = source_folder / "generation_config.json"
    generation_config = read_json(path) if path.is_file() else {}
    # transformers may replace a file that carries this mark by what config.json says, and so forget the stop tokens.
    generation_config.pop("_from_model_config", None)
    stops = stop_ids_of(source_folder) | dict.fromkeys(stop_token_ids)
    if stops:
        generation_config["eos_token_id"] = list(stops) if len(stops) > 1 else next(iter(stops))
    _write_json(folder / "generation_config.json", generation_config)


def stop_ids_of(folder: Path) -> dict[int, None]:
    """The ids that end a generation of the model in `folder`, in the order of its files."""
    stops: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        stated = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if stated is not None:
            stops |= dict.fromkeys(stated if isinstance(stated, list) else [stated])
    return stops


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
