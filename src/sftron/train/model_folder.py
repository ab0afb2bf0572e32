"""The folder that training starts from, checked before weights are read, and what an export takes from it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sftron.checkpoint.hf_export import ExportSource
from sftron.checkpoint.hf_weights import read_config
from sftron.config import Config
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.models.architecture import LlamaConfig
from sftron.train.model_card import BaseModel, read_base_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_SMALL_FILES = ["*.json", "*.jinja", "tokenizer*", "LICENSE*", "README.md"]


def local_folder(path: str, *, with_weights: bool = True, download: bool = True) -> Path:
    """A folder as it is; a Hub id is downloaded, or found in the Hub's cache, where alone it is looked for without
    `download`. Raises ValueError."""
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


def check_model_folder(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    num_positions: int,
    *,
    documents_are_conversations: bool,
    may_grow: bool = False,
) -> LlamaConfig:
    """Read config.json and hold it against what the data will ask of it. Raises ValueError with both values.

    num_positions: tokens of the longest document that there may be; the unused tail, which nobody reads, is none.
    may_grow: tokens were added to the tokenizer, and the vocabulary becomes as large as they need.
    """
    config = read_config(folder)
    # Where conversations see each other, positions run on through the whole pack.
    advice = "" if documents_are_conversations else ", or set data.remove_cross_attention: true"
    if num_positions > config.max_position_embeddings:
        raise ValueError(
            f"documents may have {num_positions} tokens, but {folder} knows {config.max_position_embeddings} positions "
            "(max_position_embeddings); lower tokens.sequence_length" + advice
        )
    window = config.sliding_window
    if window is not None and num_positions > window:
        length = "tokens.sequence_length" + ("" if documents_are_conversations else " x tokens.micro_batch_size")
        raise ValueError(
            f"documents may have {num_positions} tokens, but a token of {folder} attends to the last {window} only "
            f"(sliding_window), which is implemented where no document is longer; lower {length} to {window}" + advice
        )
    highest_id = max(tokenizer.get_vocab().values())
    if highest_id >= config.vocab_size:
        if may_grow:
            return replace(config, vocab_size=highest_id + 1)
        raise ValueError(
            f"the tokenizer has ids up to {highest_id}, but {folder} embeds {config.vocab_size} (vocab_size); "
            "they do not belong together"
        )
    return config


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
