"""Control tokens that the model was never trained on: added to the tokenizer, or reserved by a base model."""

from __future__ import annotations

from collections.abc import Collection, Set
from pathlib import Path

import torch

from sftron.checkpoint.hf_weights import EMBEDDINGS, HEAD, SafetensorsFolder
from sftron.config import Config
from sftron.data.chat.tokenizer import ChatTokenizer

_NUM_COMPARED_ROWS = 256
_LEAST_SHARE_OF_NORM = 1e-2


def ids_to_initialize(config: Config, folder: Path, chat_tokenizer: ChatTokenizer, control_ids: Set[int]) -> list[int]:
    """Returns the ids of tokenizer.add_tokens that are new to the tokenizer, or that the model was never trained on.

    Raises ValueError if the model was never trained on another one of `control_ids`, the control tokens of the data.
    """
    tokenizer, new_tokens = chat_tokenizer.tokenizer, chat_tokenizer.added_tokens
    vocabulary = tokenizer.get_vocab()
    # The row of a new token may exist already, because many models have more rows than their tokenizers have tokens.
    new_ids = {vocabulary[token] for token in new_tokens}
    known_ids = {vocabulary[token] for token in config.tokenizer.add_tokens if token not in new_tokens}
    untrained = untrained_ids(folder, known_ids | control_ids - new_ids)
    if refused := untrained.keys() - known_ids:
        named = "; ".join(f"{tokenizer.convert_ids_to_tokens(n)} (id {n}): {untrained[n]}" for n in sorted(refused))
        raise ValueError(
            f"the chat template writes control tokens that {folder} was never trained on: {named}. Choose a template "
            "without them (tokenizer.chat_template: plain needs none), or list them in tokenizer.add_tokens, so that "
            "they are initialized as the mean of all embeddings"
        )
    return sorted(new_ids | untrained.keys())


def untrained_ids(folder: Path, token_ids: Collection[int]) -> dict[int, str]:
    """Returns the tokens whose row in the embeddings or the head is nearly zero, with the measured norms.

    Base models have reserved control tokens that were never trained (such as the header tokens of Llama 3), so a
    template that writes them would start from nothing. A row counts as untrained if its norm is below 1 % of the median
    norm of 256 rows.
    """
    found: dict[int, str] = {}
    with SafetensorsFolder(folder) as source:
        for name in {EMBEDDINGS, HEAD} & set(source.names()):
            num_rows = source.shape(name)[0]
            compared = torch.linspace(0, num_rows - 1, min(_NUM_COMPARED_ROWS, num_rows)).long().tolist()
            rows = sorted(token_id for token_id in token_ids if token_id < num_rows)
            norms = source.read_rows(name, [*compared, *rows]).float().norm(dim=1)
            usual = float(norms[: len(compared)].median())
            for token_id, norm in zip(rows, norms[len(compared) :].tolist(), strict=True):
                if norm < _LEAST_SHARE_OF_NORM * usual:
                    found[token_id] = f"norm {norm:.2g} in {name}, where others have {usual:.2g}"
    return found
