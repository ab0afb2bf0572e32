"""Export of a folder for transformers and vLLM: weights, config, stop tokens, tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sftron.checkpoint.atomic import publish
from sftron.checkpoint.fusion import NamedTensors, split_state_dict
from sftron.checkpoint.hf_weights import EMBEDDINGS, HEAD, SafetensorsFolder, read_config, read_json
from sftron.checkpoint.model_files import MAX_FILE_BYTES, TERMS, TOKENIZER_FILES, check_files, read_inside
from sftron.checkpoint.shards import write_tensors
from sftron.kernels.table import LinearScaling
from sftron.models.architecture import LlamaConfig, family_of

_BYTES_PER_SHARD = 5 * 1000**3
"""The maximum size of a weight file, which is transformers' default; loaders read several files in parallel."""


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
    """Writes a Hugging Face folder atomically: it is renamed to `folder` after everything is on disk (atomic.py).

    Args:
        weights: The names and tensors of LlamaForSFT's parameters, e.g. `model.named_parameters()`. They are consumed
            one at a time, so a sharded model can be gathered while it is written. At most one weight file is held in
            memory.
        source_folder: The Hugging Face folder that training started from; its config is copied.
        tokenizer_folder: The folder of tokenizer and template, by default source_folder.
        chat_template: The Jinja source of the template used in training, if it is not the tokenizer's own.
        vocab_size: The number of embedding rows if tokens were added, by default the source's.
        model_card: The content of README.md.
        dtype: The type of the tensors on disk.
        stop_token_ids: The ids that end a trained turn. They are added to eos_token_id in generation_config.json;
            without them, generation would continue after the end of the turn.

    Raises:
        ValueError: The keys are not exactly those of the source (law 9), or a weight is not finite.
    """
    write_export(
        weights,
        folder,
        source=ExportSource.read(source_folder, tokenizer_folder),
        dtype=dtype,
        stop_token_ids=stop_token_ids,
        chat_template=chat_template,
        vocab_size=vocab_size,
        model_card=model_card,
        bytes_per_shard=bytes_per_shard,
    )


def write_export(
    weights: NamedTensors,
    folder: Path,
    *,
    source: ExportSource,
    dtype: torch.dtype,
    stop_token_ids: Collection[int],
    chat_template: str | None = None,
    vocab_size: int | None = None,
    model_card: str | None = None,
    bytes_per_shard: int = _BYTES_PER_SHARD,
) -> None:
    """Writes the same files as `export_hf`, from a source that was read earlier and need not exist anymore."""

    def write(unfinished: Path) -> None:
        names = _write_weights(_as_stored(weights, source, dtype), unfinished, bytes_per_shard)
        _check_names(names, source)
        _write_json(unfinished / "config.json", source.exported_config(dtype, vocab_size))
        _write_json(unfinished / "generation_config.json", _generation_config(source, stop_token_ids))
        for name, content in source.files.items():
            (unfinished / name).parent.mkdir(exist_ok=True, parents=True)
            (unfinished / name).write_bytes(content)
        if chat_template is not None:
            # This file takes precedence over a template inside tokenizer_config.json.
            (unfinished / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
        if model_card is not None:
            (unfinished / "README.md").write_text(model_card, encoding="utf-8")

    publish(folder, write)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """The contents of the model's and tokenizer's folders that an export needs. A run reads and checks them before
    training, so that problems are reported early and deleting a folder later does no harm."""

    folder: Path
    config: Mapping[str, Any]
    architecture: LlamaConfig
    generation_config: Mapping[str, Any]
    """The content of generation_config.json; empty if the file does not exist."""
    tensor_names: frozenset[str]
    """The names of the stored weights."""
    files: Mapping[str, bytes]
    """The contents of the files that are copied unchanged, by their path in the folder."""

    @classmethod
    def read(cls, folder: Path, tokenizer_folder: Path | None = None) -> ExportSource:
        """Reads and checks both folders.

        Raises:
            ValueError: A file is broken, too large, not a regular file, or a link out of its folder; or the index of
                the weights is invalid. The message has the name of the file.
        """
        tokenizer_folder = tokenizer_folder or folder
        for each in {folder, tokenizer_folder}:
            check_files(each)
        path = folder / "generation_config.json"
        generation_config = read_json(path) if path.exists() else {}
        stop_ids_of(folder)
        with SafetensorsFolder(folder) as weights:
            tensor_names = frozenset(weights.names())
        return cls(
            folder=folder,
            config=read_json(folder / "config.json"),
            architecture=read_config(folder),
            generation_config=generation_config,
            tensor_names=tensor_names,
            files=_contents(folder, TERMS) | _contents(tokenizer_folder, TOKENIZER_FILES),
        )

    @property
    def stop_ids(self) -> dict[int, None]:
        return _stop_ids(self.generation_config) | _stop_ids(self.config)

    def exported_config(self, dtype: torch.dtype, vocab_size: int | None = None) -> dict[str, Any]:
        """Returns the source's config.json, completed with the keys of `lacking_for_loaders`."""
        name = str(dtype).removeprefix("torch.")
        llama, scaling = self.architecture, {}
        if llama.rope_scaling is not None:
            rope_type = "linear" if isinstance(llama.rope_scaling, LinearScaling) else "llama3"
            scaling = {"rope_type": rope_type, **asdict(llama.rope_scaling)}
        return {
            **self.config,
            "vocab_size": llama.vocab_size if vocab_size is None else vocab_size,
            "architectures": [family_of(self.config).architecture],
            "dtype": name,
            "torch_dtype": name,
            "rope_theta": llama.rope_theta,
            "rope_scaling": scaling or None,
            "rope_parameters": {"rope_theta": llama.rope_theta, "rope_type": "default", **scaling},
        }


def lacking_for_loaders(config: Mapping[str, Any]) -> list[str]:
    """Returns the missing keys of config.json without which some loader would fail or compute another model.

    llama.cpp's converter and vLLM select their class by `architectures`. transformers 4 reads `rope_theta`,
    `rope_scaling` and `torch_dtype`, whose defaults are 10000, no scaling and float32. transformers 5 writes
    `rope_parameters` and `dtype`, and reads both forms.
    """
    return [key for key in _LOADER_KEYS if key not in config or (config[key] is None and key != "rope_scaling")]


_LOADER_KEYS = (
    *("architectures", "model_type", "dtype", "torch_dtype"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
)


def _contents(folder: Path, patterns: Iterable[str]) -> dict[str, bytes]:
    """Returns the contents of the files that match, by their path in the folder."""
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    found |= {path for each in found if each.is_dir() for path in each.rglob("*")}
    return {
        path.relative_to(folder).as_posix(): read_inside(folder, path, MAX_FILE_BYTES)
        for path in sorted(found)
        if not path.is_dir()
    }


def _as_stored(weights: NamedTensors, source: ExportSource, dtype: torch.dtype) -> NamedTensors:
    config = source.architecture
    # Some checkpoints with tied embeddings store the head as well; their exports do the same.
    repeats_head = config.tie_word_embeddings and HEAD in source.tensor_names
    for name, tensor in split_state_dict(weights, config):
        stored = tensor.detach().to(device="cpu", dtype=dtype)
        if not all(bound.isfinite() for bound in stored.aminmax()):  # a NaN makes both bounds NaN
            problem = f"{name} holds NaN or infinity"
            raise ValueError(f"The weights to export are not finite as {dtype}: {problem}. Export another checkpoint.")
        yield name, stored
        if name == EMBEDDINGS and repeats_head:
            yield HEAD, stored.clone()


def _check_names(names: set[str], source: ExportSource) -> None:
    different = names ^ source.tensor_names
    if different:
        raise ValueError(
            f"The weights to export and those of {source.folder} differ in these keys: {', '.join(sorted(different))}. "
            "Give every parameter of the model once, by its name."
        )


def _write_weights(weights: NamedTensors, folder: Path, bytes_per_shard: int) -> set[str]:
    """Writes the weight files, and the index if there are several; returns the names of all tensors."""
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
        # The number of files is part of each name, and is known only now.
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / _part_name(number)).rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)
    return set(weight_map)


def _part_name(number: int) -> str:
    return f"part-{number}.safetensors"


def _generation_config(source: ExportSource, stop_token_ids: Collection[int]) -> dict[str, Any]:
    # transformers may replace a file with this key by values from config.json, which would lose the stop tokens.
    content = {key: value for key, value in source.generation_config.items() if key != "_from_model_config"}
    stops = source.stop_ids | dict.fromkeys(stop_token_ids)
    if stops:
        content["eos_token_id"] = list(stops) if len(stops) > 1 else next(iter(stops))
    return content


def stop_ids_of(folder: Path) -> dict[int, None]:
    """Returns the ids that end a generation of the model in `folder`, in the order of its files.

    Raises:
        ValueError: eos_token_id is neither an id nor a list of ids; the message has the name of the file.
    """
    stops: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            try:
                stops |= _stop_ids(read_json(folder / name))
            except TypeError as error:
                raise ValueError(f"{folder / name}: {error}") from None
    return stops


def _stop_ids(config: Mapping[str, Any]) -> dict[int, None]:
    stated = config.get("eos_token_id")
    ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
    if wrong := [each for each in ids if type(each) is not int or each < 0]:
        raise TypeError(f"eos_token_id: {wrong[0]!r}, an id of a token, or a list of them, is needed")
    return dict.fromkeys(ids)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
