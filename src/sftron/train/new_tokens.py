"""Control tokens that the model does not know yet: added ones, and reserved ones that no training has touched."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sftron.checkpoint.hf import EMBEDDINGS, HEAD, SafetensorsFolder
from sftron.data.chat_tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NUM_COMPARED_ROWS = 256
_LEAST_SHARE_OF_NORM = 1e-2


def untrained_ids(folder: Path, token_ids: Collection[int]) -> dict[int, str]:
    """Those of the tokens whose row of the embeddings, or of the head, is all but zero, with the words that say so.

    Base models carry reserved control tokens that no training has ever touched (Llama 3's headers are such); a template
    that writes them would start from nothing. A row counts as untrained below 1 % of the median norm of 256 others.
    """
    found: dict[int, str] = {}
    with SafetensorsFolder(folder) as source:
        for name in {EMBEDDINGS, HEAD} & set(source.names()):
            num_rows = source.shape(name)[0]
            known = sorted(token_id for token_id in token_ids if token_id < num_rows)
            others = torch.linspace(0, num_rows - 1, min(_NUM_COMPARED_ROWS, num_rows)).long().tolist()
            usual = float(source.read_rows(name, others).float().norm(dim=1).median())
            for token_id, norm in zip(known, _norms(source, name, known), strict=True):
                if norm < _LEAST_SHARE_OF_NORM * usual:
                    found[token_id] = f"norm {norm:.2g} in {name}, where others have {usual:.2g}"
    return found


def _norms(source: SafetensorsFolder, name: str, rows: Collection[int]) -> list[float]:
    return source.read_rows(name, rows).float().norm(dim=1).tolist() if rows else []


def rows_to_initialize(folder: Path, chat_tokenizer: ChatTokenizer, listed_tokens: Collection[str]) -> list[int]:
    """Ids of tokenizer.add_tokens whose embeddings begin as the mean of all: new ones, and those never trained.

    A new token's row may exist: many models have more rows than their tokenizers have tokens.
    """
    vocabulary = chat_tokenizer.tokenizer.get_vocab()
    known = {vocabulary[token] for token in listed_tokens if token not in chat_tokenizer.added_tokens}
    return sorted({vocabulary[token] for token in chat_tokenizer.added_tokens} | untrained_ids(folder, known).keys())


def require_trained_embeddings(
    folder: Path, tokenizer: PreTrainedTokenizerBase, token_ids: Collection[int], initialize_ids: Collection[int]
) -> None:
    """Raises ValueError for control tokens that the data writes and the model has never seen."""
    untrained = untrained_ids(folder, set(token_ids) - set(initialize_ids))
    if untrained:
        named = "; ".join(f"{tokenizer.convert_ids_to_tokens(n)} (id {n}): {why}" for n, why in untrained.items())
        raise ValueError(
            f"the chat template writes control tokens that {folder} was never trained on: {named}. Take a template "
            "without them (tokenizer.chat_template: plain needs none), or list them in tokenizer.add_tokens, so that "
            "they begin as the mean of all embeddings"
        )
