"""The model, its optimizer and its loader, from a plan."""

from __future__ import annotations

import torch

from sftron.checkpoint.hf import load_model
from sftron.data.dataloader import PackLoader
from sftron.models.llama import LlamaForSFT
from sftron.models.sharding import shard_model
from sftron.train import feed
from sftron.train.new_tokens import require_trained_embeddings, rows_to_initialize
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
