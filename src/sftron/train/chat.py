"""A conversation with a trained model, turn by turn, through the model's own chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sftron.checkpoint.checkpoint import load_checkpoint
from sftron.checkpoint.hf_export import stop_ids_of
from sftron.checkpoint.hf_weights import load_model, read_config
from sftron.checkpoint.manifest import MANIFEST, MODEL, CheckpointError, read_state, steps_in, verify_checkpoint
from sftron.checkpoint.model_files import check_files
from sftron.checkpoint.shards import ShardedTensors
from sftron.config import load_config
from sftron.data.chat import pretrained
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.types import Message, Role
from sftron.models.architecture import architecture_facts
from sftron.models.generation import Choose, generate
from sftron.models.llama import LlamaForSFT
from sftron.train.feed import load_chat_tokenizer
from sftron.train.model_folder import local_folder
from sftron.train.resume import require_same_model


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A model to talk to. `folder` is what was opened; one of `stop_ids` ends an answer."""

    folder: Path
    model: LlamaForSFT
    chat_tokenizer: ChatTokenizer
    stop_ids: frozenset[int]


def open_chat_model(path: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> ChatModel:
    """Opens an exported folder, a checkpoint of a run, or what is newest in a run directory.

    Raises ValueError where `path` is none of them, or broken.
    """
    folder = _newest_of_run(path) if (path / "checkpoints").is_dir() else path
    opened = _open_checkpoint(folder, device) if (folder / MANIFEST).is_file() else _open_export(folder, device)
    # One token at a time, weights of another type would be converted for each.
    opened.model.to(dtype)
    return opened


def _newest_of_run(run: Path) -> Path:
    """Returns the export that `latest` names, unless a checkpoint is newer."""
    newest = max(steps_in(run / "checkpoints"), default=-1)
    exported = (run / "latest").resolve()
    step = exported.name.removeprefix("step-")
    if exported.is_dir() and (int(step) if step.isdecimal() else -1) >= newest:
        return exported
    if newest < 0:
        raise ValueError(f"{run} holds no checkpoint yet, and no export")
    return run / "checkpoints" / f"step-{newest}"


def _open_export(folder: Path, device: torch.device | str) -> ChatModel:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give an exported model, a checkpoint, or a run directory")
    check_files(folder)
    read_config(folder)  # before the tokenizer, whose loader has no clear word for a folder that holds no model
    chat_tokenizer = pretrained.load_chat_tokenizer(folder)
    model = load_model(folder, compute_dtype=torch.float32, device=device)
    return ChatModel(folder, model, chat_tokenizer, _stop_ids(chat_tokenizer, stop_ids_of(folder)))


def _open_checkpoint(folder: Path, device: torch.device | str) -> ChatModel:
    """Opens a checkpoint with the tokenizer, template and architecture of the run that it lies in."""
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


class Chat:
    """A conversation. What looks like a control token in its texts is plain text (law 3).

    `messages` are those so far, of which a system message is the first. `has_stopped` tells whether the last answer
    ended by itself.
    """

    def __init__(self, opened: ChatModel, *, choose: Choose, max_new_tokens: int, system: str | None = None) -> None:
        self._opened, self._choose, self._max_new_tokens = opened, choose, max_new_tokens
        self._first = [] if system is None else [Message(Role.SYSTEM, system)]
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = list(self._first)
        self.has_stopped = False

    def ask(self, text: str) -> Iterator[str]:
        """Yields the answer in parts as they are generated.

        Closed early, it keeps the parts so far as the answer; without any, it forgets the question. Raises ValueError,
        and forgets the question, where the template refuses it or the conversation fills the model.
        """
        asked = [*self.messages, Message(Role.USER, text)]
        prompt_ids = self._opened.chat_tokenizer.encode_prompt(asked)
        answer, self.has_stopped = "", False
        try:
            for part in stream_text(self._decode, self._token_ids(prompt_ids)):
                answer += part
                yield part
        finally:
            if answer:
                self.messages = [*asked, Message(Role.ASSISTANT, answer)]

    def _decode(self, ids: list[int]) -> str:
        tokenizer = self._opened.chat_tokenizer.tokenizer
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _token_ids(self, prompt_ids: list[int]) -> Iterator[int]:
        """Yields the ids of the answer up to its stop token."""
        model, stop_ids = self._opened.model, self._opened.stop_ids
        most = min(model.rope_table.num_positions, model.config.sliding_window or model.rope_table.num_positions)
        if len(prompt_ids) >= most:
            raise ValueError(f"the conversation has {len(prompt_ids):,} tokens, and the model takes {most:,}: /reset")
        max_new_tokens = min(self._max_new_tokens, most - len(prompt_ids))
        dtype = model.head_weight.dtype
        for token_id in generate(model, prompt_ids, max_new_tokens, stop_ids, choose=self._choose, dtype=dtype):
            self.has_stopped = token_id in stop_ids
            if not self.has_stopped:
                yield token_id


def stream_text(decode: Callable[[list[int]], str], token_ids: Iterable[int]) -> Iterator[str]:
    """Yields text as soon as it is whole: a character whose bytes are spread over tokens comes with the last of them.

    The parts, joined, are `decode` of all ids. Only the ids since the last part but one are decoded again: those before
    the new ones are there because a decoder may drop the space of what comes first. (tokenizers' DecodeStream raises
    on bytes that make no character.)
    """
    ids: list[int] = []
    context = num_shown = 0
    new = ""
    for token_id in token_ids:
        ids.append(token_id)
        new = decode(ids[context:])[len(decode(ids[context:num_shown])) :]
        if new and not new.endswith("\ufffd"):
            yield new
            context, num_shown, new = num_shown, len(ids), ""
    if new:
        yield new
