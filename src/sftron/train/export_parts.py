"""What an export needs beside the weights, read and checked before a run trains."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from sftron.checkpoint.hf_export import ExportSource
from sftron.config import Config
from sftron.data.chat_tokenizer import ChatTokenizer
from sftron.train.model_card import BaseModel, read_base_model
from sftron.train.model_folder import local_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportParts:
    """All of an export but its weights and what the run has logged.

    chat_template: where it is not the tokenizer's own.
    """

    source: ExportSource
    base: BaseModel
    chat_tokenizer: ChatTokenizer
    chat_template: str | None


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
