"""The source of an export: what it takes from the model and tokenizer folders that training started from.

A run reads and checks it before anything is trained.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from sftron.checkpoint.hf_weights import SafetensorsFolder
from sftron.checkpoint.model_folder import (
    MAX_JSON_BYTES,
    PROCESSOR_FILES,
    TERMS,
    TOKENIZER_FILES,
    check_files,
    read_config,
    read_files,
    read_json,
    stop_ids_of,
)
from sftron.checkpoint.shards import DTYPES
from sftron.errors import redacted
from sftron.models.architecture import LlamaConfig, family_of
from sftron.models.quantization import dtype_name
from sftron.models.rope_config import complete_rope_keys
from sftron.models.wrappers import text_config, with_text_config, wrapper_of
from sftron.regular_file import read_regular

if TYPE_CHECKING:
    from sftron.data.chat.tokenizer import ChatTokenizer

_MAX_README_BYTES, _MAX_FRONT_MATTER = 16 * 2**20, 64 * 2**10
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]{0,39}")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that training started from, as described in a model card."""

    folder: Path
    name: str
    """The Hub id if it is known, else the name of the folder without its parents."""
    license: str | None
    revision: str | None = None
    """The commit of a model in the Hub's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """The contents of the model's and tokenizer's folders that an export needs. A run reads and checks them before
    training, so that problems are reported early and deleting a folder later does no harm."""

    folder: Path
    model: BaseModel
    config: Mapping[str, Any]
    architecture: LlamaConfig
    generation_config: Mapping[str, Any]
    """The content of generation_config.json; empty if the file does not exist."""
    stop_ids: tuple[int, ...]
    stored_names: Mapping[str, str]
    """The stored names of the text model's weights, by the names that text models use."""
    wide: Mapping[str, torch.dtype]
    """The types of weights that are stored wider than most; an export keeps these types."""
    carried: Mapping[str, Callable[[], torch.Tensor]]
    """Functions that read the tensors that an export carries along, by their stored names; see models/wrappers.py."""
    files: Mapping[str, bytes]
    """The contents of the files that are copied unchanged, by their path in the folder."""

    @classmethod
    def read(
        cls,
        folder: Path,
        tokenizer_folder: Path | None = None,
        *,
        path: str | None = None,
        architecture: LlamaConfig | None = None,
    ) -> ExportSource:
        """Reads and checks both folders.

        Args:
            path: The Hub id or path by which the model was chosen; by default, the folder.
            architecture: The architecture in config.json, if that was read and the files of both folders checked.

        Raises:
            ValueError: A file is broken, too large, not a regular file, or a link out of its folder; or the index of
                the weights is invalid. The message has the name of the file.
        """
        tokenizer_folder = tokenizer_folder or folder
        if architecture is None:
            for each in {folder, tokenizer_folder}:
                check_files(each)
            architecture = read_config(folder)
        generation = folder / "generation_config.json"
        with SafetensorsFolder(folder) as weights:
            names = weights.names()
            types = {name: DTYPES[kind] for name in names if (kind := weights.dtype(name)) in DTYPES}
            usual = Counter(types.values()).most_common(1)
            wide = {name: each for name, each in types.items() if torch.promote_types(each, usual[0][0]) != usual[0][0]}
            stored_names, carried = {name: weights.stored_names[name] for name in names}, weights.carried()
        return cls(
            folder=folder,
            model=read_base_model(path or str(folder), folder),
            config=read_json(folder / "config.json"),
            architecture=architecture,
            generation_config=read_json(generation) if generation.exists() else {},
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

    def require_tokenizer(self, chat_tokenizer: ChatTokenizer, *, has_model: bool) -> None:
        """Raises ValueError if AutoTokenizer would build a tokenizer from the export that differs from training's.

        The class also depends on config.json. The tokenizer's own folder may lack that file, and an adapter's folder
        always does (`has_model` is false).
        """
        from sftron.data.chat.pretrained import load_tokenizer  # slow to import
        from sftron.data.chat.tokenizer_file import difference

        with tempfile.TemporaryDirectory() as name:
            self.write_files(Path(name), None)
            if has_model:
                (Path(name) / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
            try:
                exported, _ = load_tokenizer(name)
            except ValueError as error:
                raise ValueError(f"AutoTokenizer would read this run's export differently: {error}") from error
        own: Any = chat_tokenizer.tokenizer.backend_tokenizer
        read: Any = exported.backend_tokenizer
        if found := difference(own, read, ("training", "the export")):
            raise ValueError(
                f"AutoTokenizer would build a {type(exported).__name__} from this run's export, but training uses "
                f'{type(chat_tokenizer.tokenizer).__name__}: {found}; set "tokenizer_class": '
                '"PreTrainedTokenizerFast" in tokenizer_config.json'
            )

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
        # Such a key may mean the size of other embeddings.
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


def read_base_model(path: str, folder: Path) -> BaseModel:
    """Reads the name and the license of the model in `folder`. `path` is the value of model.path."""
    name, license_name = folder.resolve().name, None
    if hub_id(path) and not Path(path).exists():
        name = path
    elif match := re.search(r"models--([^/]+?)--([^/]+)", str(folder)):  # the Hub's cache
        name = f"{match[1]}/{match[2]}"
    else:
        with suppress(OSError, ValueError, AttributeError):
            original = json.loads(read_regular(folder / "config.json", MAX_JSON_BYTES)).get("_name_or_path")
            if isinstance(original, str) and hub_id(original) and not Path(original).exists():
                name = original
    with suppress(OSError, ValueError, yaml.YAMLError, RecursionError, AttributeError):
        text = read_regular(folder / "README.md", _MAX_README_BYTES).decode()[:_MAX_FRONT_MATTER]
        if match := re.match(r"---\n(.*?)\n---\n", text, re.DOTALL):
            license_name = yaml.safe_load(match[1]).get("license")
    revision = re.search(r"/snapshots/([0-9a-f]{40})(?:/|$)", folder.as_posix())
    return BaseModel(folder, redacted(name), license_name, revision and revision[1])


def hub_id(name: str) -> str | None:
    """Returns the name if it has the form `owner/name`, else None; only such names become links."""
    return name if _HUB_ID.fullmatch(name) and ".." not in name and len(name) <= 96 else None


def license_id(name: object) -> str | None:
    """Returns the name if it has the form of a license id of the Hub, else None."""
    return name if isinstance(name, str) and _LICENSE.fullmatch(name) else None
