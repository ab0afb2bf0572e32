"""Export of a trained model to a Hugging Face folder: from the shards of all ranks, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from sftron.checkpoint.atomic import all_or_raise, main_or_raise
from sftron.checkpoint.checkpoint import read_state
from sftron.checkpoint.convert import checkpoint_to_hf
from sftron.checkpoint.hf_export import export_hf
from sftron.config import Config
from sftron.models.llama import LlamaForSFT
from sftron.models.sharding import whole
from sftron.train import console
from sftron.train.evaluation import Best
from sftron.train.model_card import model_card
from sftron.train.progress import Progress
from sftron.train.resume import run_facts
from sftron.train.run_data import load_chat_tokenizer
from sftron.train.run_directory import RunDirectory
from sftron.train.settings import Settings
from sftron.train.setup import ExportParts, Setup, local_folder, read_export_parts


def export_model(
    plan: Setup, model: LlamaForSFT, folder: Path, *, progress: Progress, settings: Settings, run_folder: Path
) -> None:
    """Writes the model to `folder`. Every rank has to call this, because each holds a shard of the weights.

    The model card is made from the logs in `run_folder`. Raises OSError on all ranks if the main one cannot write.
    """
    weights = ((name, whole(parameter.detach())) for name, parameter in model.named_parameters())
    parts = plan.model.export_parts
    assert parts is not None

    def gather_the_rest() -> None:
        """Takes part in gathering the remaining weights, because the other ranks wait for this one."""
        for _ in weights:
            pass

    def write() -> None:
        try:
            export_hf(
                weights,
                folder,
                source_folder=parts.source,
                dtype=plan.model.compute_dtype,
                stop_token_ids=plan.data.sample.stop_ids,
                vocab_size=plan.model.architecture.vocab_size,
                chat_template=parts.chat_template,
                model_card=model_card(
                    plan.config,
                    run_facts(plan, progress, settings),
                    run_folder=run_folder,
                    base=parts.base,
                    chat_tokenizer=plan.data.chat_tokenizer,
                ),
            )
        finally:
            gather_the_rest()

    all_or_raise(plan.ranks, write if plan.ranks.is_main else gather_the_rest)


def export_checkpoint(
    config: Config,
    checkpoint: Path,
    folder: Path,
    *,
    parts: ExportParts | None = None,
    dtype: torch.dtype | None = None,
    stop_token_ids: Collection[int] | None = None,
) -> None:
    """Exports a checkpoint of the run with this configuration to `folder`, exactly as the run would.

    Args:
        parts: The files besides the weights; by default, they are read from the folders that the configuration names.
        dtype: The dtype of the exported weights; by default, the run's compute dtype.
        stop_token_ids: The stop tokens; by default, those in the checkpoint.

    Raises:
        ValueError: If the checkpoint or a source folder cannot be used.
        OSError: If the export cannot be written.
    """
    if parts is None:
        model_folder = local_folder(config.model.path)
        local_folder(config.tokenizer_path, with_weights=False)
        parts = read_export_parts(config, model_folder, load_chat_tokenizer(config))
    checkpoint_to_hf(
        checkpoint,
        folder,
        source=parts.source,
        dtype=dtype or getattr(torch, config.model.compute_dtype),
        stop_token_ids=stop_token_ids,
        chat_template=parts.chat_template,
        model_card=model_card(
            config,
            read_state(checkpoint),
            run_folder=checkpoint.resolve().parents[1],
            base=parts.base,
            chat_tokenizer=parts.chat_tokenizer,
        ),
    )


def export_best(plan: Setup, directory: RunDirectory, best: Best) -> None:
    """Exports the best checkpoint to hf/step-N, unless that exists already, and points the link `best` at it.

    If it cannot be exported, a warning is printed; the run is complete without it.
    """
    folder = directory.hf(best.step)

    def write() -> None:
        if not folder.exists():
            try:
                checkpoint = directory.checkpoints / f"step-{best.step}"
                export_checkpoint(plan.config, checkpoint, folder, parts=plan.model.export_parts)
            except ValueError as error:  # the checkpoint has been damaged since it was saved
                raise OSError(str(error)) from error
        directory.point("best", folder)

    try:
        main_or_raise(plan.ranks, write)
        console.say(
            f"best       step {best.step}, {best.metric} {best.value:.4f}: {folder} (also {directory.folder / 'best'})"
        )
    except OSError as error:
        console.say(f"WARNING    the best, step {best.step}, could not be exported: {error}")
