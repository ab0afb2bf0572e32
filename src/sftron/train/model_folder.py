"""The model folder that training starts from: its location, its untrained tokens, and its files for an export."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from sftron.checkpoint.hf_export import ExportSource
from sftron.checkpoint.hf_weights import EMBEDDINGS, HEAD, SafetensorsFolder
from sftron.config import Config
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.train.model_card import BaseModel, read_base_model

_SMALL_FILES = ["*.json", "*.jinja", "tokenizer*", "LICENSE*", "README.md"]
_NUM_COMPARED_ROWS = 256
_LEAST_SHARE_OF_NORM = 1e-2


def local_folder(path: str, *, with_weights: bool = True, download: bool = True) -> Path:
    """Returns the local folder of a path or a Hub id; for a Hub id, it is the folder in the Hub's cache.

    Args:
        with_weights: Whether the weights are needed, or only the tokenizer and the small files.
        download: Whether to download files that are not in the cache.

    Raises:
        ValueError: If there is no such folder and no such model on the Hub.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        patterns = [*_SMALL_FILES, "*.safetensors"] if with_weights else _SMALL_FILES
        return Path(snapshot_download(path, allow_patterns=patterns, local_files_only=not download))
    except (OSError, HFValidationError) as error:
        what = f"model.path: {path}" if with_weights else f"no tokenizer can be loaded from {path}: it"
        raise ValueError(
            f"{what} is not a folder here, and nothing of that name can be had from the Hub: {error}"
        ) from error


# --- Control tokens that the model was never trained on ---


def untrained_ids(folder: Path, token_ids: Collection[int]) -> dict[int, str]:
    """Returns the tokens whose row in the embeddings or the head is nearly zero, with the measured norms.

    Base models have reserved control tokens that were never trained (such as the header tokens of Llama 3), so a
    template that writes them would start from nothing. A row counts as untrained if its norm is below 1 % of the median
    norm of 256 rows.
    """
    found: dict[int, str] = {}
    with SafetensorsFolder(folder) as source:

        def norms(name: str, rows: Collection[int]) -> torch.Tensor:
            return source.read_rows(name, rows).float().norm(dim=1)

        for name in {EMBEDDINGS, HEAD} & set(source.names()):
            num_rows = source.shape(name)[0]
            others = torch.linspace(0, num_rows - 1, min(_NUM_COMPARED_ROWS, num_rows)).long().tolist()
            usual = float(norms(name, others).median())
            rows = sorted(token_id for token_id in token_ids if token_id < num_rows)
            for token_id, norm in zip(rows, norms(name, rows).tolist() if rows else [], strict=True):
                if norm < _LEAST_SHARE_OF_NORM * usual:
                    found[token_id] = f"norm {norm:.2g} in {name}, where others have {usual:.2g}"
    return found


def rows_to_initialize(folder: Path, chat_tokenizer: ChatTokenizer, listed_tokens: Collection[str]) -> list[int]:
    """Returns the ids of tokenizer.add_tokens that are new or untrained; their embeddings are set to the mean of all.

    The row of a new token may already exist, because many models have more rows than their tokenizers have tokens.
    """
    vocabulary = chat_tokenizer.tokenizer.get_vocab()
    known = {vocabulary[token] for token in listed_tokens if token not in chat_tokenizer.added_tokens}
    return sorted({vocabulary[token] for token in chat_tokenizer.added_tokens} | untrained_ids(folder, known).keys())


# --- Exports ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportParts:
    """The parts of an export other than the weights and the logs of the run."""

    source: ExportSource
    base: BaseModel
    chat_tokenizer: ChatTokenizer
    chat_template: str | None
    """The source of the configured template; None for the tokenizer's own."""


def read_export_parts(config: Config, model_folder: Path, chat_tokenizer: ChatTokenizer) -> ExportParts:
    """Reads the parts of an export. Raises ValueError if the model or tokenizer folder lacks a file that it needs."""
    with tempfile.TemporaryDirectory() as aside:
        if config.tokenizer.add_tokens:
            chat_tokenizer.tokenizer.save_pretrained(aside)
            tokenizer_folder = Path(aside)
        else:
            tokenizer_folder = local_folder(config.tokenizer_path, with_weights=False, download=False)
        source = ExportSource.read(model_folder, tokenizer_folder)
    return ExportParts(
        source=source,
        base=read_base_model(config.model.path, model_folder),
        chat_tokenizer=chat_tokenizer,
        chat_template=chat_tokenizer.template.source if config.tokenizer.chat_template else None,
    )
