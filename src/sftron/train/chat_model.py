"""A model to talk to: an exported folder, a checkpoint of a run, or whatever is newest in a run directory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sftron.checkpoint.architecture import architecture_facts
from sftron.checkpoint.hf import load_model, read_config
from sftron.checkpoint.hf_export import stop_ids_of
from sftron.checkpoint.manifest import MANIFEST, MODEL, CheckpointError, read_state, steps_in, verify_checkpoint
from sftron.checkpoint.model_files import check_files
from sftron.checkpoint.native import load_checkpoint
from sftron.checkpoint.shards import ShardedTensors
from sftron.config import load_config
from sftron.data import pretrained
from sftron.data.chat_tokenizer import ChatTokenizer
from sftron.models.llama import LlamaForSFT
from sftron.train.feed import load_chat_tokenizer
from sftron.train.model_folder import local_folder
from sftron.train.resume import require_same_model


@dataclass(frozen=True, slots=True)
class ChatModel:
    """folder: what was opened. stop_ids: what ends an answer."""

    folder: Path
    model: LlamaForSFT
    chat_tokenizer: ChatTokenizer
    stop_ids: frozenset[int]


def open_chat_model(path: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> ChatModel:
    """Raises ValueError where `path` is nothing of the kind, or broken."""
    folder = _newest_of_run(path) if (path / "checkpoints").is_dir() else path
    opened = _open_checkpoint(folder, device) if (folder / MANIFEST).is_file() else _open_export(folder, device)
    # One token at a time, weights of another type would be converted for each.
    opened.model.to(dtype)
    return opened


def _newest_of_run(run: Path) -> Path:
    """The export that `latest` names, unless a checkpoint is newer."""
    newest = max(steps_in(run / "checkpoints"), default=-1)
    exported = (run / "latest").resolve()
    if exported.is_dir() and _step_of(exported) >= newest:
        return exported
    if newest < 0:
        raise ValueError(f"{run} holds no checkpoint yet, and no export")
    return run / "checkpoints" / f"step-{newest}"


def _step_of(folder: Path) -> int:
    step = folder.name.removeprefix("step-")
    return int(step) if step.isdecimal() else -1


def _open_export(folder: Path, device: torch.device | str) -> ChatModel:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give an exported model, a checkpoint, or a run directory")
    check_files(folder)
    read_config(folder)  # before the tokenizer, whose loader has no clear word for a folder that holds no model
    chat_tokenizer = pretrained.load_chat_tokenizer(folder)
    model = load_model(folder, compute_dtype=torch.float32, device=device)
    return ChatModel(folder, model, chat_tokenizer, _stop_ids(chat_tokenizer, stop_ids_of(folder)))


def _open_checkpoint(folder: Path, device: torch.device | str) -> ChatModel:
    """Tokenizer, template and architecture are those of the run that it lies in."""
    if problem := verify_checkpoint(folder):
        raise CheckpointError(f"{folder}: {problem}")
    run_config = folder.resolve().parents[1] / "config.yaml"
    if not run_config.is_file():
        raise ValueError(f"{folder} is in no run directory; export it first (tools/convert_checkpoint.py --model DIR)")
    config = load_config(run_config)
    model_folder = local_folder(config.model.path)
    check_files(model_folder)
    chat_tokenizer = load_chat_tokenizer(config)
    with ShardedTensors(folder, MODEL) as stored:
        vocab_size = stored.shapes()["model.embed_tokens.weight"][0]
    llama_config = replace(read_config(model_folder), vocab_size=vocab_size)
    state = read_state(folder)
    require_same_model(folder, ours=architecture_facts(llama_config), theirs=state.get("fingerprint", {}))
    with torch.device("meta"):
        model = LlamaForSFT(llama_config, compute_dtype=torch.float32)
    model.to_empty(device=device)
    load_checkpoint(folder, model=model, optimizer=None)
    trained = state.get("stop_token_ids") or stop_ids_of(model_folder)
    return ChatModel(folder, model, chat_tokenizer, _stop_ids(chat_tokenizer, trained))


def _stop_ids(chat_tokenizer: ChatTokenizer, trained: Iterable[int]) -> frozenset[int]:
    eos = chat_tokenizer.tokenizer.eos_token_id
    return frozenset([*trained, *([eos] if isinstance(eos, int) else [])])
