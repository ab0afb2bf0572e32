"""The folder that training starts from: found or downloaded, its untrained tokens, and what an export takes of it."""

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
    """Returns a folder as it is, and a Hub id as the folder in the Hub's cache. Raises ValueError.

    download: Also fetch what is not in the cache.
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
    """Returns those of the tokens whose row of the embeddings, or of the head, is all but zero, with the evidence.

    Base models carry reserved control tokens that no training has ever touched (Llama 3's headers are such); a template
    that writes them would start from nothing. A row counts as untrained below 1 % of the median norm of 256 others.
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
    """Returns the ids of tokenizer.add_tokens whose embeddings begin as the mean of all: new ones, and untrained ones.

    A new token's row may exist: many models have more rows than their tokenizers have tokens.
    """
    vocabulary = chat_tokenizer.tokenizer.get_vocab()
    known = {vocabulary[token] for token in listed_tokens if token not in chat_tokenizer.added_tokens}
    return sorted({vocabulary[token] for token in chat_tokenizer.added_tokens} | untrained_ids(folder, known).keys())


# --- Exports ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportParts:
    """All of an export but its weights and what the run has logged."""

    source: ExportSource
    base: BaseModel
    chat_tokenizer: ChatTokenizer
    chat_template: str | None
    """None for the tokenizer's own."""


def read_export_parts(config: Config, model_folder: Path, chat_tokenizer: ChatTokenizer) -> ExportParts:
    """Raises ValueError where the folders of model and tokenizer lack what an export needs."""
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
