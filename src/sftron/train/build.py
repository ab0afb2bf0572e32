"""The model, its optimizer and its loader, from a plan, and control tokens that the model does not know yet."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sftron.checkpoint.hf_weights import EMBEDDINGS, HEAD, SafetensorsFolder, load_model
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.loader import PackLoader
from sftron.models.llama import LlamaForSFT
from sftron.models.sharding import shard_model
from sftron.train import feed
from sftron.train.optimizer import make_adamw
from sftron.train.plan import RunPlan


def build_model(plan: RunPlan) -> LlamaForSFT:
    """On the rank's device. Raises ValueError where the weights are not those of config.json, or not trained."""
    config = plan.config
    initialize_ids = rows_to_initialize(plan.model_folder, plan.chat_tokenizer, config.tokenizer.add_tokens)
    tokenizer = plan.chat_tokenizer.tokenizer
    require_trained_embeddings(plan.model_folder, tokenizer, plan.sample.control_ids, initialize_ids)
    mesh = plan.ranks.mesh
    model = load_model(
        plan.model_folder,
        plan.attention,
        plan.compute_dtype,
        plan.num_positions,
        config.model.activation_checkpointing,
        feed.longest_document(config),
        vocab_size=plan.llama_config.vocab_size,
        initialize_ids=initialize_ids,
        device=plan.ranks.device,
        shard=None if mesh is None else lambda model: shard_model(model, mesh),
    )
    # `auto` is off until it has been measured on a GPU; on a CPU compiling takes longer than it saves.
    if config.model.compile == "on":
        for block in model.model.layers:
            block.compile()
    return model


def build_optimizer(plan: RunPlan, model: LlamaForSFT) -> torch.optim.AdamW:
    options = plan.config.optimizer
    return make_adamw(
        model.named_parameters(),
        learning_rate=options.learning_rate,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
    )


def build_loader(plan: RunPlan) -> PackLoader:
    on_gpu = plan.ranks.device.type == "cuda"
    # Compilers and GPU allocators want one shape; a CPU would only compute the tail for nothing.
    return feed.make_loader(plan.config, plan.dataset, keep_tail=on_gpu, pin_memory=on_gpu)


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
