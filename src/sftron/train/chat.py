"""Chats with what a run has written: an export, a checkpoint, or the newest of them in a run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sftron.checkpoint.checkpoint import MANIFEST, load_checkpoint, steps_in
from sftron.checkpoint.export import BASE_WEIGHTS, lora_of, open_weights, require_base
from sftron.checkpoint.hf_weights import load_model
from sftron.checkpoint.model_folder import check_files, is_run_directory, read_config, stop_ids_of
from sftron.checkpoint.source import ExportSource
from sftron.config import load_config
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.types import Message, Role
from sftron.kernels.device import default_device, is_gpu
from sftron.models.adapters import AdapterStart
from sftron.models.generation import Choose, Sampler
from sftron.models.generation import generate as generate_ids
from sftron.models.llama import LlamaForSFT
from sftron.train.build_data import load_chat_tokenizer
from sftron.train.places import find_places

# --- The model ---


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A model with its tokenizer, opened from `folder`. Each of the `stop_ids` ends an answer."""

    folder: Path
    model: LlamaForSFT
    chat_tokenizer: ChatTokenizer
    stop_ids: frozenset[int]


def open_chat_model(path: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> ChatModel:
    """Opens an exported folder, a checkpoint of a run, or the newest of these in a run directory.

    Raises ValueError if `path` is none of them, or is damaged.
    """
    is_run = (path / "checkpoints").is_dir() or is_run_directory(path)
    folder = _newest_of_run(path) if is_run else path
    is_checkpoint = (folder / MANIFEST).is_file()
    model, chat_tokenizer, stop_ids = (_open_checkpoint if is_checkpoint else _open_export)(folder, device)
    eos = chat_tokenizer.tokenizer.eos_token_id
    model.to(dtype)  # converts the weights once instead of at every token
    return ChatModel(folder, model, chat_tokenizer, frozenset([*stop_ids, *([eos] if isinstance(eos, int) else [])]))


def _newest_of_run(run: Path) -> Path:
    """Returns the target of the link `latest`, or the newest checkpoint if that has a later step."""
    newest = max(steps_in(run / "checkpoints"), default=-1)
    exported = (run / "latest").resolve()
    step = exported.name.removeprefix("step-")
    if exported.is_dir() and (int(step) if step.isdecimal() else -1) >= newest:
        return exported
    if newest < 0:
        raise ValueError(f"{run}: has saved no checkpoint and no export yet; continue it with `sftron train`")
    return run / "checkpoints" / f"step-{newest}"


def _open_export(folder: Path, device: torch.device | str) -> tuple[LlamaForSFT, ChatTokenizer, Iterable[int]]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give an exported model, a checkpoint, or a run directory")
    check_files(folder)
    read_config(folder)  # first, because the tokenizer's error for a folder without a model is unclear
    chat_tokenizer = ChatTokenizer.from_pretrained(folder)
    model = load_model(folder, compute_dtype=torch.float32, device=device)
    return model, chat_tokenizer, stop_ids_of(folder)


def _open_checkpoint(folder: Path, device: torch.device | str) -> tuple[LlamaForSFT, ChatTokenizer, Iterable[int]]:
    """Opens a checkpoint with the tokenizer, template and architecture of its run, and the base of its adapters."""
    run_config = folder.resolve().parents[1] / "config.yaml"
    if not run_config.is_file():
        raise ValueError(f"{folder} is not in a run directory; export it first (`sftron convert --model DIR`)")
    config = load_config(run_config)
    places = find_places(config)
    base = ExportSource.read(places.model, architecture=places.architecture)
    with open_weights(folder, base) as (state, read, vocab_size):
        if (spec := lora_of(state)) is not None:
            require_base(base.folder, str(state["fingerprint"].get(BASE_WEIGHTS)))
            adapters = AdapterStart(spec=spec, tensors=dict(read()))
            options = {"vocab_size": vocab_size, "device": device, "adapters": adapters}
            model = load_model(base.folder, compute_dtype=torch.float32, **options)
        else:
            with torch.device("meta"):
                model = LlamaForSFT(replace(base.architecture, vocab_size=vocab_size), compute_dtype=torch.float32)
            model.to_empty(device=device)
            load_checkpoint(folder, model=model, optimizer=None)
    return model, load_chat_tokenizer(config, places.tokenizer), state["stop_token_ids"] or base.stop_ids


# --- The conversation ---


class Chat:
    """A conversation with a model. Control tokens in its texts are encoded as plain text (law 3).

    Attributes:
        opened: The model.
        messages: The messages so far, starting with the system message if there is one.
        has_stopped: Whether the last answer ended with a stop token.
    """

    def __init__(self, opened: ChatModel, *, choose: Choose, max_new_tokens: int, system: str | None = None) -> None:
        self.opened, self._choose, self._max_new_tokens = opened, choose, max_new_tokens
        self._first = [] if system is None else [Message(Role.SYSTEM, system)]
        self.reset()

    def reset(self) -> None:
        """Removes all messages except the system message."""
        self.messages = list(self._first)
        self.has_stopped = False

    def ask(self, text: str) -> Iterator[str]:
        """Yields the answer in parts as they are generated, then adds question and answer to `messages`.

        If the iterator is closed early, the parts so far become the answer; if there are none, the question is dropped.
        Raises ValueError and drops the question if the template refuses it, or if the conversation is too long for the
        model.
        """
        if not text.strip():
            raise ValueError("the question is empty")
        asked = [*self.messages, Message(Role.USER, text)]
        prompt_ids = self.opened.chat_tokenizer.encode_prompt(asked)
        answer, self.has_stopped = "", False
        try:
            for part in stream_text(self._decode, self._token_ids(prompt_ids)):
                answer += part
                yield part
        finally:
            if answer:
                self.messages = [*asked, Message(Role.ASSISTANT, answer)]

    def _decode(self, ids: list[int]) -> str:
        tokenizer = self.opened.chat_tokenizer.tokenizer
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _token_ids(self, prompt_ids: list[int]) -> Iterator[int]:
        """Yields the ids of the answer, without its stop token."""
        model, stop_ids = self.opened.model, self.opened.stop_ids
        most = model.rope_tables.num_positions
        if len(prompt_ids) >= most:
            raise ValueError(
                f"the conversation has {len(prompt_ids):,} tokens, and the model has room for {most - 1:,} before an "
                "answer; shorten it (in a chat: /reset)"
            )
        max_new_tokens = min(self._max_new_tokens, most - len(prompt_ids))
        dtype = model.head_weight.dtype
        for token_id in generate_ids(model, prompt_ids, max_new_tokens, stop_ids, choose=self._choose, dtype=dtype):
            self.has_stopped = token_id in stop_ids
            if not self.has_stopped:
                yield token_id


@dataclass(frozen=True, slots=True)
class Generated:
    """What a model answered."""

    folder: Path
    """The export or checkpoint of the model."""
    messages: tuple[Message, ...]
    """The conversation, with the system message, if there is one, the prompts and the answers."""
    texts: tuple[str, ...]
    """The answer to each prompt."""
    have_stopped: tuple[bool, ...]
    """Whether each answer ended with a stop token; if not, it was cut at `max_new_tokens` or the model's positions."""

    @property
    def text(self) -> str:
        """The last answer."""
        return self.texts[-1]


def generate(
    model: str | Path,
    prompts: str | Sequence[str],
    *,
    system: str | None = None,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Generated:
    """Answers prompts, each of which is a turn of one conversation, as `sftron generate` does.

    Args:
        model: An exported folder, a checkpoint, or a run directory, of which the newest of these is taken.
        temperature: 0 is greedy.
        dtype: The type of the computation; by default bfloat16 on a GPU, else float32.
        device: By default the GPU if there is one, else the CPU.

    Raises:
        ValueError: The model cannot be opened, an argument is out of range, or a prompt is empty, refused by the
            template, or too long for the model.
    """
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not prompts:
        raise ValueError("there is no prompt; give one, or several")
    chat = open_chat(
        Path(model),
        system=system,
        max_new_tokens=max_new_tokens,
        sampler=Sampler(temperature, top_p, seed),
        dtype=dtype,
        device=device,
    )
    texts, have_stopped = [], []
    for prompt in prompts:
        texts.append("".join(chat.ask(prompt)))
        have_stopped.append(chat.has_stopped)
    return Generated(chat.opened.folder, tuple(chat.messages), tuple(texts), tuple(have_stopped))


def open_chat(
    model: Path,
    *,
    system: str | None,
    max_new_tokens: int,
    sampler: Sampler,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> Chat:
    """Opens a model for a chat; `generate` describes the arguments."""
    default = default_device()
    dtype = dtype or (torch.bfloat16 if is_gpu(default) else torch.float32)
    opened = open_chat_model(model, dtype=dtype, device=device or default)
    return Chat(opened, choose=sampler, max_new_tokens=max_new_tokens, system=system)


def stream_text(decode: Callable[[list[int]], str], token_ids: Iterable[int]) -> Iterator[str]:
    """Yields text as soon as it is complete: a character whose bytes span several tokens follows the last of them.

    The joined parts equal `decode` of all ids.
    """
    ids: list[int] = []
    text, num_shown = "", 0
    for token_id in token_ids:
        ids.append(token_id)
        text = decode(ids)
        if len(text) > num_shown and not text.endswith("\ufffd"):
            yield text[num_shown:]
            num_shown = len(text)
    if len(text) > num_shown:
        yield text[num_shown:]
