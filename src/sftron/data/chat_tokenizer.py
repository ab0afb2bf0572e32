"""ChatTokenizer: a conversation to ids and one role per token, with the model's own chat template.

Rendered once, tokenized once (DESIGN: provenance rendering), so the work is linear in the number of turns and a role is
known when its token is made. For a conversation whose texts spell no control string the ids are exactly those of
`tokenizer.apply_chat_template` (law 1).
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import tokenizers

from sftron.data.chat_template import ChatTemplate, TemplateError
from sftron.data.control_tokens import ControlTokens
from sftron.data.tracked_text import Origin, TrackedStr
from sftron.data.types import Conversation, DataError, Message, Role, TokenizedConversation, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_ROLE_NAMES = {Role.SYSTEM: "system", Role.USER: "user", Role.ASSISTANT: "assistant", Role.TOOL: "tool"}
"""How templates spell a role; from this table alone, so that no text of the data gets into a header."""


class ChatTokenizer:
    """tokenizer: a fast Hugging Face tokenizer. template: Jinja source; None takes the tokenizer's own. date: what the
    template is told as today's."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None = None, date: datetime.date | None = None
    ) -> None:
        source = tokenizer.chat_template if template is None else template
        if not isinstance(source, str):
            found = "none" if source is None else f"several by name ({', '.join(source)})"
            raise TemplateError(
                f"the tokenizer has to have one chat template, found {found}; set tokenizer.chat_template"
            )
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise TemplateError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so it gives no character offsets; convert it to "
                "tokenizer.json"
            )
        self.tokenizer = tokenizer
        self._backend = backend
        self.template = ChatTemplate(source, tokenizer.special_tokens_map, date)
        self._control = ControlTokens(backend)

    @property
    def fingerprint(self) -> dict[str, str]:
        """Hashes of all that the ids depend on, by name."""
        constants = repr(sorted(self.tokenizer.special_tokens_map.items()))
        return {
            "tokenizer": _digest(self._backend.to_str()),
            "chat_template": _digest(self.template.source + constants),
            "tokenizer.date": str(self.template.date or "not asked for"),
        }

    @property
    def pad_id(self) -> int:
        """The id that fills a pack's tail. No label or role is ever derived from it."""
        for token_id in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if isinstance(token_id, int):
                return token_id
        return 0

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, control tokens spelled out and nothing tidied up."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode(self, conversation: Conversation) -> TokenizedConversation:
        """Raises DataError where the template refuses the conversation, or where roles cannot be told."""
        try:
            return self._tokenize(self.template.render(_tracked(conversation.messages)), conversation)
        except TemplateError as error:
            raise DataError(f"{conversation.location}: {error}", reason="template_refused") from error

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of messages followed by the header of the assistant's turn, for generation. Raises TemplateError."""
        text = self.template.render(_tracked(messages), add_generation_prompt=True)
        renamed = self._control.renamed_tokenizer(self._control.plane_for(text))
        ids = renamed.backend.encode(self._rename(text)[0].text, add_special_tokens=False).ids
        return renamed.real_ids[ids].tolist()

    def without_control_text(self, text: str) -> str:
        """Text with a space for each string in it that spells a control token."""
        while (cleaned := self._control.pattern.sub(" ", text)) != text:
            text = cleaned
        return text

    def _tokenize(self, text: TrackedStr, conversation: Conversation) -> TokenizedConversation:
        layout, holds_control_text = self._rename(text)
        extents = [layout.extent(index, conversation) for index in range(len(conversation.messages))]
        renamed = self._control.renamed_tokenizer(self._control.plane_for(text))
        encoding = renamed.backend.encode(layout.text, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int64)
        starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        is_control = renamed.is_control[ids]
        if (found := int(is_control.sum())) != layout.num_control:
            raise TemplateError(
                f"the template writes {layout.num_control} control tokens here, and the tokenizer finds {found} of them"
            )

        # The run in which a token begins owns it. A token of the template that ends in content is a seam.
        message_ids = np.where(is_control, -1, layout.message_at(starts))
        seams = ~is_control & (message_ids < 0) & (ends > starts) & (layout.message_at(ends - 1) >= 0)
        roles = np.array([message.role for message in conversation.messages], dtype=np.uint8)
        role_ids = np.where(message_ids >= 0, roles[message_ids], np.uint8(Role.TEMPLATE))
        turns = []
        for index, (message, extent) in enumerate(zip(conversation.messages, extents, strict=True)):
            start, end = _token_span(message_ids, starts, index, extent)
            stop = _stop_token(layout.text, extent[1], is_control, starts, end)
            if message.role is Role.ASSISTANT and (stop is None or seams[max(0, start - 1) : end].any()):
                raise TemplateError(_unproved(index, seam=stop is not None))
            if stop is not None:
                # With the white space before it, if the template writes some: the model itself has to say it.
                role_ids[end : stop + 1] = message.role
            turns.append(Turn(message.role, start, end, stop))
        return TokenizedConversation(
            renamed.real_ids[ids], role_ids, tuple(turns), conversation.key, int(seams.sum()), holds_control_text
        )

    def _rename(self, text: TrackedStr) -> tuple[_Layout, bool]:
        """The text with the template's control strings renamed; and whether a message spells one."""
        plane, pattern = self._control.plane_for(text), self._control.pattern
        pieces, messages, start, num_control, holds_control_text = [], [], 0, 0, False
        for length, origin in text.runs:
            piece = str.__getitem__(text, slice(start, start + length))
            start += length
            if origin is None:
                piece, num_renamed = self._control.rename(piece, plane)
                num_control += num_renamed
            else:
                holds_control_text = holds_control_text or pattern.search(piece) is not None
            pieces.append(piece)
            messages.append(-1 if origin is None else origin.message)
        run_ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        return _Layout("".join(pieces), run_ends, np.array(messages, dtype=np.int64), num_control), holds_control_text


def _tracked(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as templates read them, their contents remembering where they come from."""
    return [
        {
            "role": TEMPLATE_ROLE_NAMES[message.role],
            "content": TrackedStr.of(message.content, Origin(index, "content")),
        }
        for index, message in enumerate(messages)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Rendered text and who owns its characters: run r ends before character run_ends[r] and belongs to message
    run_messages[r], or to the template (-1). num_control: control tokens that the template wrote in it."""

    text: str
    run_ends: np.ndarray
    run_messages: np.ndarray
    num_control: int

    def message_at(self, characters: np.ndarray) -> np.ndarray:
        runs = np.searchsorted(self.run_ends, characters, side="right")
        return self.run_messages[runs.clip(max=len(self.run_messages) - 1)]

    def extent(self, message: int, conversation: Conversation) -> tuple[int, int]:
        """First and last (excluded) character of a message's content; raises if that is not one stretch of text."""
        runs = np.flatnonzero(self.run_messages == message)
        role = conversation.messages[message].role.name.lower()
        if not len(runs):
            content = conversation.messages[message].content.strip()
            lost = content and content in self.text
            raise TemplateError(
                f"the template {'writes' if lost else 'leaves out'} the content of message {message} ({role})"
                + (" in a way that cannot be followed" if lost else ", so it could not be trained on or be read")
            )
        first, last = runs[0], runs[-1]
        between = self.run_messages[first : last + 1]
        if ((between != message) & (between >= 0)).any():
            raise TemplateError(f"the template mixes message {message} ({role}) with other messages")
        return int(self.run_ends[first - 1]) if first else 0, int(self.run_ends[last])


def _token_span(message_ids: np.ndarray, starts: np.ndarray, message: int, extent: tuple[int, int]) -> tuple[int, int]:
    """Tokens [start, end) of a message's content; empty content lies before the first token after its place."""
    tokens = np.flatnonzero(message_ids == message)
    if len(tokens):
        return int(tokens[0]), int(tokens[-1]) + 1
    place = int(np.searchsorted(starts, extent[0]))
    return place, place


def _stop_token(text: str, content_end: int, is_control: np.ndarray, starts: np.ndarray, end: int) -> int | None:
    """The control token that ends a turn: the first after its content, with nothing but white space between."""
    following = np.flatnonzero(is_control[end:])
    if not len(following):
        return None
    stop = end + int(following[0])
    return stop if not text[content_end : starts[stop]].strip() else None


def _unproved(message: int, *, seam: bool) -> str:
    if seam:
        return (
            f"the content of message {message} (assistant) shares a token with the header before it; "
            "templates without a control token or newline there are not supported yet"
        )
    return (
        f"no stop token follows the content of message {message} (assistant), so the model would never learn to stop; "
        "end assistant turns with a control token in the template (tokenizer.chat_template: FILE)"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
