"""What the exports of a run take from the folders of its model and tokenizer, read before anything is trained."""

from __future__ import annotations

import json
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sftron.checkpoint.hf_export import ExportSource
from sftron.checkpoint.model_folder import MAX_JSON_BYTES
from sftron.config import Config
from sftron.data.chat.pretrained import load_tokenizer
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.chat.tokenizer_file import difference
from sftron.errors import redacted
from sftron.regular_file import read_regular
from sftron.train.revisions import tokenizer_folder

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


@dataclass(frozen=True, slots=True)
class ExportParts:
    """The parts of an export other than the weights and the logs of the run."""

    source: ExportSource
    base: BaseModel
    chat_tokenizer: ChatTokenizer


def read_export_parts(config: Config, base_folder: Path, chat_tokenizer: ChatTokenizer) -> ExportParts:
    """Reads the parts of an export. Raises ValueError if the model or tokenizer folder lacks a file that it needs."""
    with tempfile.TemporaryDirectory() as saved:
        if config.tokenizer.add_tokens:
            chat_tokenizer.tokenizer.save_pretrained(saved)
            tokenizer_files = Path(saved)
        else:
            tokenizer_files = tokenizer_folder(config, download=False)
        source = ExportSource.read(base_folder, tokenizer_files)
    if config.tokenizer.chat_template:
        source = source.with_chat_template(chat_tokenizer.template.source)
    _require_same_tokenizer(source, chat_tokenizer, has_model=config.lora is None or config.lora.merge)
    return ExportParts(source, read_base_model(config.model.path, base_folder), chat_tokenizer)


def _require_same_tokenizer(source: ExportSource, chat_tokenizer: ChatTokenizer, *, has_model: bool) -> None:
    """Raises ValueError if AutoTokenizer builds another tokenizer from the export than the one that is trained with.

    The class depends on config.json too, which the tokenizer's own folder may lack, and the folder of an adapter does.
    """
    with tempfile.TemporaryDirectory() as name:
        source.write_files(Path(name), None)
        if has_model:
            (Path(name) / "config.json").write_text(json.dumps(source.config), encoding="utf-8")
        try:
            exported, _ = load_tokenizer(name)
        except ValueError as error:
            raise ValueError(f"the export of this run would be read otherwise: {error}") from error
    own: Any = chat_tokenizer.tokenizer.backend_tokenizer
    read: Any = exported.backend_tokenizer
    if found := difference(own, read, ("training", "the export")):
        raise ValueError(
            f"AutoTokenizer would build a {type(exported).__name__} from the export of this run, but "
            f'{type(chat_tokenizer.tokenizer).__name__} is trained with: {found}; set "tokenizer_class": '
            '"PreTrainedTokenizerFast" in tokenizer_config.json'
        )


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
