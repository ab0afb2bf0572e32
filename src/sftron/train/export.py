"""The trained model as a Hugging Face folder, put together of all ranks' parts."""

from __future__ import annotations

from pathlib import Path

from sftron.checkpoint.agreement import on_all
from sftron.checkpoint.hf_export import export_hf
from sftron.models.llama import LlamaForSFT
from sftron.models.sharding import whole
from sftron.train.model_folder import local_folder
from sftron.train.plan import RunPlan


def export_model(plan: RunPlan, model: LlamaForSFT, folder: Path, *, aside: Path) -> None:
    """Write `folder`; every rank has to call this, as each holds a part of the weights.

    aside: a folder for what has to be written first, the tokenizer with added tokens.
    Raises OSError on all ranks where the main one cannot write.
    """
    weights = ((name, whole(parameter.detach())) for name, parameter in model.named_parameters())

    def write() -> None:
        try:
            tokenizer_folder = local_folder(plan.config.tokenizer_path, download=False)
            if plan.config.tokenizer.add_tokens:
                tokenizer_folder = aside / "tokenizer"
                plan.chat_tokenizer.tokenizer.save_pretrained(tokenizer_folder)
            export_hf(
                weights,
                folder,
                source_folder=plan.model_folder,
                dtype=plan.compute_dtype,
                stop_token_ids=plan.sample.stop_ids,
                tokenizer_folder=tokenizer_folder,
                vocab_size=plan.llama_config.vocab_size,
                chat_template=plan.chat_tokenizer.template.source if plan.config.tokenizer.chat_template else None,
            )
        finally:
            take_part()

    def take_part() -> None:
        """The ranks put each weight together in turn: whoever stopped early would be waited for."""
        for _ in weights:
            pass

    on_all(plan.ranks, write if plan.ranks.is_main else take_part)
