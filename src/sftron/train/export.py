"""The trained model as a Hugging Face folder, put together of all ranks' parts, or of a checkpoint's files."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path

import torch

from sftron.checkpoint.agreement import on_all, on_main
from sftron.checkpoint.convert import checkpoint_to_hf
from sftron.checkpoint.hf_export import export_hf
from sftron.checkpoint.manifest import read_state
from sftron.config import Config
from sftron.data.chat_tokenizer import ChatTokenizer
from sftron.models.llama import LlamaForSFT
from sftron.models.sharding import whole
from sftron.train import console
from sftron.train.best import Best
from sftron.train.feed import load_chat_tokenizer
from sftron.train.model_card import model_card
from sftron.train.model_folder import local_folder
from sftron.train.plan import RunPlan
from sftron.train.progress import Progress
from sftron.train.run_directory import RunDirectory
from sftron.train.run_state import run_facts
from sftron.train.settings import Settings


def export_model(
    plan: RunPlan, model: LlamaForSFT, folder: Path, *, progress: Progress, settings: Settings, run_folder: Path
) -> None:
    """Write `folder`; every rank has to call this, as each holds a part of the weights.

    run_folder: what it has logged goes into the model's README; a tokenizer with added tokens is written there first.
    Raises OSError on all ranks where the main one cannot write.
    """
    weights = ((name, whole(parameter.detach())) for name, parameter in model.named_parameters())

    def write() -> None:
        try:
            export_hf(
                weights,
                folder,
                source_folder=plan.model_folder,
                dtype=plan.compute_dtype,
                stop_token_ids=plan.sample.stop_ids,
                tokenizer_folder=_tokenizer_folder(plan.config, plan.chat_tokenizer, run_folder, download=False),
                vocab_size=plan.llama_config.vocab_size,
                chat_template=_chat_template(plan.config, plan.chat_tokenizer),
                model_card=model_card(
                    plan.config,
                    run_facts(plan, progress, settings),
                    run_folder=run_folder,
                    model_folder=plan.model_folder,
                    chat_tokenizer=plan.chat_tokenizer,
                ),
            )
        finally:
            take_part()

    def take_part() -> None:
        """The ranks put each weight together in turn: whoever stopped early would be waited for."""
        for _ in weights:
            pass

    on_all(plan.ranks, write if plan.ranks.is_main else take_part)


def export_checkpoint(
    config: Config,
    checkpoint: Path,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    stop_token_ids: Collection[int] | None = None,
) -> None:
    """Write `folder` from a checkpoint of the run with this configuration, as the run would have, by default in its
    compute type. Raises ValueError and OSError."""
    chat_tokenizer = load_chat_tokenizer(config)
    model_folder = local_folder(config.model.path)
    card = model_card(
        config,
        read_state(checkpoint),
        run_folder=checkpoint.resolve().parents[1],
        model_folder=model_folder,
        chat_tokenizer=chat_tokenizer,
    )
    with tempfile.TemporaryDirectory() as aside:
        checkpoint_to_hf(
            checkpoint,
            folder,
            source_folder=model_folder,
            dtype=dtype or getattr(torch, config.model.compute_dtype),
            stop_token_ids=stop_token_ids,
            tokenizer_folder=_tokenizer_folder(config, chat_tokenizer, Path(aside)),
            chat_template=_chat_template(config, chat_tokenizer),
            model_card=card,
        )


def export_best(plan: RunPlan, directory: RunDirectory, best: Best) -> None:
    """As hf/step-N, which the link `best` then names; from the checkpoint's files, unless it is there already.

    A run has all that it was to have without it: where it cannot be read or written, that is said.
    """
    folder = directory.hf(best.step)

    def write() -> None:
        if not folder.exists():
            try:
                export_checkpoint(plan.config, directory.checkpoints / f"step-{best.step}", folder)
            except ValueError as error:  # the checkpoint was damaged since
                raise OSError(str(error)) from error
        directory.point("best", folder)

    try:
        on_main(plan.ranks, write)
        console.say(
            f"best       step {best.step}, {best.metric} {best.value:.4f}: {folder} (also {directory.folder / 'best'})"
        )
    except OSError as error:
        console.say(f"WARNING    the best, step {best.step}, could not be exported: {error}")


def _tokenizer_folder(config: Config, chat_tokenizer: ChatTokenizer, aside: Path, *, download: bool = True) -> Path:
    if not config.tokenizer.add_tokens:
        return local_folder(config.tokenizer_path, download=download)
    chat_tokenizer.tokenizer.save_pretrained(aside / "tokenizer")
    return aside / "tokenizer"


def _chat_template(config: Config, chat_tokenizer: ChatTokenizer) -> str | None:
    """Where it is not the tokenizer's own."""
    return chat_tokenizer.template.source if config.tokenizer.chat_template else None
