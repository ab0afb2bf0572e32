"""Export of a folder for transformers and vLLM: weights, config, stop tokens, tokenizer and chat template."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sftron.checkpoint.atomic import publish
from sftron.checkpoint.hf_weights import EMBEDDINGS, HEAD, SafetensorsFolder
from sftron.checkpoint.model_folder import (
    PROCESSOR_FILES,
    TERMS,
    TOKENIZER_FILES,
    check_files,
    read_config,
    read_files,
    read_json,
)
from sftron.checkpoint.shards import DTYPES, file_name, write_tensors
from sftron.models.architecture import LlamaConfig, family_of
from sftron.models.fusion import NamedTensors, split_state_dict
from sftron.models.mixtures import spelling_of
from sftron.models.quantization import dtype_name
from sftron.models.rope_config import complete_rope_keys
from sftron.models.wrappers import text_config, with_text_config, wrapper_of

_BYTES_PER_SHARD = 5 * 1000**3
"""The maximum size of a weight file, which is transformers' default; loaders read several files in parallel."""


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
        source_folder: The Hugging Face folder that training started from, whose config is copied; or what was read of
            it earlier, so that it need not exist anymore.
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
    read = isinstance(source_folder, ExportSource)
    source = source_folder if read else ExportSource.read(source_folder, tokenizer_folder)
    source = source if chat_template is None else source.with_chat_template(chat_template)

    def write(unfinished: Path) -> None:
        names = _write_weights(_with_carried(_as_stored(weights, source, dtype), source), unfinished, bytes_per_shard)
        if different := names ^ {*source.stored_names.values(), *source.carried}:
            raise ValueError(
                f"The weights to export and those of {source.folder} differ in these keys: "
                f"{', '.join(sorted(different))}. Give every parameter of the model once, by its name."
            )
        write_json(unfinished / "config.json", source.exported_config(dtype, vocab_size))
        write_json(unfinished / "generation_config.json", source.exported_generation_config(stop_token_ids))
        source.write_files(unfinished, model_card)

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
    stop_ids: tuple[int, ...]
    stored_names: Mapping[str, str]
    """The names of the stored weights of the text model, by the names that text models have."""
    wide: Mapping[str, torch.dtype]
    """The types of weights that are stored in a wider type than most, which they keep."""
    carried: Mapping[str, Callable[[], torch.Tensor]]
    """Functions that read the tensors that an export carries along, by their stored names; see models/wrappers.py."""
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
        with SafetensorsFolder(folder) as weights:
            names = weights.names()
            types = {name: DTYPES[kind] for name in names if (kind := weights.dtype(name)) in DTYPES}
            usual = Counter(types.values()).most_common(1)
            wide = {name: each for name, each in types.items() if torch.promote_types(each, usual[0][0]) != usual[0][0]}
            stored_names, carried = {name: weights.stored_names[name] for name in names}, weights.carried()
        return cls(
            folder=folder,
            config=read_json(folder / "config.json"),
            architecture=read_config(folder),
            generation_config=read_json(path) if path.exists() else {},
            stop_ids=tuple(stop_ids_of(folder)),
            stored_names=stored_names,
            wide=wide,
            carried=carried,
            files=read_files(folder, (*TERMS, *PROCESSOR_FILES)) | read_files(tokenizer_folder, TOKENIZER_FILES),
        )

    def with_chat_template(self, template: str) -> ExportSource:
        """Returns the source with another chat template than the tokenizer's own."""
        # This file takes precedence over a template inside tokenizer_config.json.
        return replace(self, files={**self.files, "chat_template.jinja": template.encode()})

    def write_files(self, folder: Path, model_card: str | None) -> None:
        """Writes the copied files, and README.md if there is a model card."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            (folder / name).write_bytes(content)
        if model_card is not None:
            (folder / "README.md").write_text(model_card, encoding="utf-8")

    def exported_config(self, dtype: torch.dtype, vocab_size: int | None = None) -> dict[str, Any]:
        """Returns the source's config.json, completed with the keys of `lacking_for_loaders`."""
        name = dtype_name(dtype)
        text, _ = text_config(self.config)
        llama, family = self.architecture, family_of(text)
        # A size of embeddings that the model does not have may be another one.
        of_same_size = [key for key in family.vocab_keys if text.get(key, family.defaults[key]) == llama.vocab_size]
        sizes = ["vocab_size", *of_same_size]
        of_text = {
            **complete_rope_keys(text, family.rope, llama.max_position_embeddings),
            **dict.fromkeys(sizes, llama.vocab_size if vocab_size is None else vocab_size),
        }
        dtypes = {"dtype": name, "torch_dtype": name}
        if wrapper := wrapper_of(self.config):
            return {
                **with_text_config(self.config, of_text | dtypes),
                "architectures": [wrapper.architecture],
                **dtypes,
            }
        # The export holds no code of its own, and transformers has a class for every supported model_type. Quantized
        # weights are exported as they are computed, as bf16 or fp32.
        rest = {key: value for key, value in self.config.items() if key not in ("auto_map", "quantization_config")}
        return {**rest, **of_text, "architectures": [family.architecture], **dtypes}

    def exported_generation_config(self, stop_token_ids: Collection[int]) -> dict[str, Any]:
        # transformers may replace a file with this key by values from config.json, which would lose the stop tokens.
        content = {key: value for key, value in self.generation_config.items() if key != "_from_model_config"}
        stops = list(dict.fromkeys([*self.stop_ids, *stop_token_ids]))
        return content | ({"eos_token_id": stops if len(stops) > 1 else stops[0]} if stops else {})


def lacking_for_loaders(config: Mapping[str, Any]) -> list[str]:
    """Returns the missing keys of config.json without which some loader would fail or compute another model.

    llama.cpp's converter and vLLM select their class by `architectures`. transformers 4 reads `rope_theta`,
    `rope_scaling` and `torch_dtype`, whose defaults are 10000, no scaling and float32. transformers 5 writes
    `rope_parameters` and `dtype`, and reads both forms.
    """
    text = text_config(config)[0]
    old = () if family_of(text).rope.only_parameters else ("rope_theta", "rope_scaling")
    keys = ("architectures", "model_type", "dtype", "torch_dtype", *old, "rope_parameters")
    present = {**text, **config}
    return [key for key in keys if key not in present or (present[key] is None and key != "rope_scaling")]


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
    """Yields the weights under their stored names, and then what is carried along, bit for bit."""
    for name, tensor in weights:
        yield source.stored_names.get(name, name), tensor
    for name, read in source.carried.items():
        yield name, read()


def _write_weights(weights: NamedTensors, folder: Path, bytes_per_shard: int) -> set[str]:
    """Writes the weight files, and the index if there are several; returns the names of all tensors."""
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


def stop_ids_of(folder: Path) -> dict[int, None]:
    """Returns the ids that end a generation of the model in `folder`, in the order of its files.

    Raises:
        ValueError: eos_token_id is neither an id nor a list of ids; the message has the name of the file.
    """
    stops: dict[int, None] = {}
    for path in (folder / "generation_config.json", folder / "config.json"):
        value = read_json(path).get("eos_token_id") if path.exists() else None
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if wrong := [token_id for token_id in ids if type(token_id) is not int or token_id < 0]:
            raise ValueError(f"{path}: eos_token_id: {wrong[0]!r} is not the id of a token, nor a list of them")
        stops |= dict.fromkeys(ids)
    return stops


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
