"""ChatTokenizer: a conversation to ids and one role per token, with the model's own chat template.

Rendered once, tokenized once (DESIGN: provenance rendering), so the work is linear in the number of turns and a role is
known when its token is made. For a conversation whose texts spell no control string the ids are exactly those of
`tokenizer.apply_chat_template` (law 1).
"""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from sftron.data.chat.control_tokens import ControlTokens, RenamedTokenizer, Tokens
from sftron.data.chat.frames import Frames
from sftron.data.chat.generation_prompt import GenerationPrompts
from sftron.data.chat.named_templates import NAMES
from sftron.data.chat.spans import RenderedTurns, read_turns
from sftron.data.chat.template import ChatTemplate, TemplateError
from sftron.data.chat.template_input import REASONING_FIELDS, TOOL_CALL_FIELDS, tracked_messages, tracked_tools
from sftron.data.chat.text_pieces import LeftOut, StopStrings
from sftron.data.chat.token_roles import Layout, Outline, assign_roles
from sftron.data.chat.tracked_text import TrackedStr
from sftron.data.formats.detect import parse_conversation
from sftron.data.formats.row_formats import RowFormat
from sftron.data.types import Conversation, ConversationKey, DataError, Message, Role, TokenizedConversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLAIN_ROUND = (Message(Role.USER, "Hi"), Message(Role.ASSISTANT, "Yo"))
_KNOWN_KEYS = {*REASONING_FIELDS, *TOOL_CALL_FIELDS, "tool_call_id", "name", "id"}
"""Of messages: looked for where they are written, or of no consequence."""

_MARKED_TEXT = "\U0010f7a3 a text that nobody else writes \U0010f7a3"


class ChatTokenizer:
    """tokenizer: a fast Hugging Face tokenizer. template: Jinja source; None takes the tokenizer's own. date: what the
    template is told as today's. allow_control_tokens: control strings that the text of a role may write, by role
    ("assistant", "reasoning", ...). added_tokens: those of the tokenizer that its model has never had."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        date: datetime.date | None = None,
        allow_control_tokens: Mapping[str, Collection[str]] | None = None,
        added_tokens: Collection[str] = (),
    ) -> None:
        # The loader's workers are what runs in parallel; threads of the tokenizer's own would not survive their fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise TemplateError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so it gives no character offsets; convert it to "
                "tokenizer.json"
            )
        self.tokenizer = tokenizer
        self.added_tokens = tuple(added_tokens)
        self._backend = backend
        self._control = ControlTokens(backend)
        self._allowed = _allowed_by_role(allow_control_tokens or {}, self._control.ids)
        sources = _template_sources(tokenizer.chat_template if template is None else template)
        self._templates = {
            name: ChatTemplate(source, tokenizer.special_tokens_map, date) for name, source in sources.items()
        }
        self._frames = Frames(self._control)
        self._prompts = {template: GenerationPrompts(template, self._control) for template in self._templates.values()}

    @classmethod
    def from_pretrained(cls, path: str | Path, chat_template: str | None = None) -> ChatTokenizer:
        """Of a folder or a Hub id; see `load_chat_tokenizer`, which takes more options and raises ValueError."""
        from sftron.data.chat.pretrained import load_chat_tokenizer  # which makes what is declared here

        return load_chat_tokenizer(path, chat_template=chat_template)

    @property
    def template(self) -> ChatTemplate:
        """The template of conversations without tools."""
        return self._templates["default"]

    def template_for(self, conversation: Conversation) -> ChatTemplate:
        """A tokenizer may have a template of its own for conversations with tools, as apply_chat_template knows."""
        return self._templates["tool_use" if conversation.tools and "tool_use" in self._templates else "default"]

    @property
    def fingerprint(self) -> dict[str, str]:
        """Hashes of all that the ids depend on, by name."""
        constants = repr(sorted(self.tokenizer.special_tokens_map.items()))
        allowed = {role.name.lower(): sorted(strings) for role, strings in sorted(self._allowed.items())}
        return {
            "tokenizer": _digest(self._backend.to_str()),
            "chat_template": _digest("".join(each.source for each in self._templates.values()) + constants),
            "tokenizer.date": str(self.template.date or "not asked for"),
            "data.allow_control_tokens": str(allowed),
        }

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of the control tokens: all added tokens that are not white space."""
        return frozenset(self._control.ids.values())

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
        (encoded,) = self.encode_batch([conversation])
        if isinstance(encoded, DataError):
            raise encoded
        return encoded

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> TokenizedConversation:
        """As `encode`, of messages as a row of the format `messages` holds them."""
        row, key = {"messages": list(messages)}, ConversationKey(0, 0)
        parsed = parse_conversation(row, RowFormat("messages"), key, "messages")
        assert isinstance(parsed, Conversation)
        return self.encode(parsed)

    def encode_batch(self, conversations: Sequence[Conversation]) -> list[TokenizedConversation | DataError]:
        """Each conversation's tokens, or why it has none; the same as one by one, in less time."""
        laid_out = [self._lay_out_or_error(conversation) for conversation in conversations]
        tokens: dict[int, Tokens | DataError] = {}
        for plane in {layout.plane for layout in laid_out if isinstance(layout, Layout)}:
            numbers = [n for n, layout in enumerate(laid_out) if isinstance(layout, Layout) and layout.plane == plane]
            texts = ["".join(laid_out[n].pieces) for n in numbers]  # pyright: ignore[reportAttributeAccessIssue]
            locations = [conversations[n].location for n in numbers]
            tokens.update(zip(numbers, _tokens(self._control.renamed_tokenizer(plane), texts, locations), strict=True))
        encoded: list[TokenizedConversation | DataError] = []
        for number, (layout, conversation) in enumerate(zip(laid_out, conversations, strict=True)):
            if isinstance(layout, DataError):
                encoded.append(layout)
            elif isinstance(found := tokens[number], DataError):
                encoded.append(found)
            else:
                try:
                    encoded.append(assign_roles(found, layout, conversation))
                except TemplateError as error:
                    encoded.append(_refusal(conversation, error))
        return encoded

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of messages followed by the header of the assistant's turn, for generation. Raises TemplateError."""
        conversation = Conversation(tuple(messages), ConversationKey(0, 0), "a prompt")
        text = self._render(conversation, add_generation_prompt=True)
        plane = self._control.plane_for(text)
        pieces, start = [], 0
        for length, origin in text.runs:
            piece = str.__getitem__(text, slice(start, start + length))
            pieces.append(piece if origin and origin.field else self._control.rename(piece, plane).text)
            start += length
        (tokens,) = self._control.renamed_tokenizer(plane).encode(["".join(pieces)])
        return tokens.ids.tolist()

    @property
    def stop_ids(self) -> list[int]:
        """Ids that end a plain answer. Raises DataError where the template takes no conversation as plain."""
        return self.encode(Conversation(_PLAIN_ROUND, ConversationKey(0, 0), "a probe")).stop_ids

    def without_control_text(self, text: str) -> str:
        """Text with a space for each string in it that spells a control token."""
        while (cleaned := self._control.pattern.sub(" ", text)) != text:
            text = cleaned
        return text

    def _render(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> TrackedStr:
        template = self.template_for(conversation)
        return template.render(
            tracked_messages(conversation.messages, template),
            tracked_tools(conversation.tools),
            add_generation_prompt=add_generation_prompt,
        )

    @cached_property
    def _stops(self) -> StopStrings:
        """How this template ends a plain answer, and a tool call."""
        eos = self.tokenizer.eos_token
        known = {eos} if isinstance(eos, str) and eos in self._control.ids else set[str]()
        # Some templates close an answer with two tokens, of which the eos_token is the second; others write it at a
        # conversation's very end alone, behind the answer's own stop token.
        first_of_two = self._probed_stop(_PLAIN_ROUND * 2, known)
        if first_of_two not in known and (stop := self._probed_stop(_PLAIN_ROUND, ())):
            known.add(stop)
        templates = self._templates.values()
        closings = [self._control.pattern.findall(template.after_call) for template in templates]
        return StopStrings(frozenset(known), frozenset(tokens[-1] for tokens in closings if tokens))

    def _probed_stop(self, messages: tuple[Message, ...], known: Collection[str]) -> str | None:
        """The stop token of the first answer."""
        probe = Conversation(messages, ConversationKey(0, 0), "a probe")
        try:
            place = self._read_turns(self._render(probe), probe, StopStrings(frozenset(known))).places[1]
        except TemplateError:
            return None
        return place.stop if place else None

    def _read_turns(self, text: TrackedStr, conversation: Conversation, stops: StopStrings) -> RenderedTurns:
        template = self.template_for(conversation)
        return read_turns(
            text,
            conversation,
            self._control,
            plane=self._control.plane_for(text),
            prompts=self._prompts[template],
            has_marks=template.has_marks,
            stops=stops,
        )

    def _lay_out_or_error(self, conversation: Conversation) -> Layout | DataError:
        try:
            return self._lay_out(conversation)
        except TemplateError as error:
            return _refusal(conversation, error)

    def _lay_out(self, conversation: Conversation) -> Layout:
        """The rendered text in pieces, the template's control strings renamed, and whose each piece is."""
        text = self._render(conversation)
        plane = self._control.plane_for(text)
        return self._frames.layout(
            text,
            conversation,
            plane,
            read=lambda: self._read_layout(text, plane, conversation),
            prompts=lambda: self._prompts[self.template].of(conversation),
        )

    def _read_layout(self, text: TrackedStr, plane: int, conversation: Conversation) -> Layout:
        turns = self._read_turns(text, conversation, self._stops)
        for message, what in turns.left_out:
            if message is not None and what.endswith(" content"):
                self._require_left_out(conversation, message, what)
        turns.left_out.extend(self._unread_keys(conversation))
        pieces, num_control, holds_control_text = [], 0, False
        for start, end, role, message, is_text in turns.segments:
            piece = str.__getitem__(text, slice(start, end))
            if not is_text:
                renamed = self._control.rename(piece, plane)
                num_control += len(renamed.tokens)
                piece = renamed.text
            elif self._control.occurs_in(piece):
                allowed = self._allowed_in(role, message, conversation)
                renamed = self._control.rename(piece, plane, allowed)
                num_control += len(renamed.tokens)
                piece = renamed.text
                holds_control_text = holds_control_text or self._control.occurs_in(piece)
            pieces.append(piece)
        return Layout(pieces, Outline.of(turns), plane, num_control, holds_control_text)

    def _unread_keys(self, conversation: Conversation) -> Iterator[LeftOut]:
        """Keys of messages that the template cannot read, since it does not name them."""
        source = self.template_for(conversation).source
        for index, message in enumerate(conversation.messages):
            for name in message.fields.keys() - _KNOWN_KEYS:
                if name not in source:
                    yield LeftOut(index, f"{message.role.name.lower()} key {name}")

    def _require_left_out(self, conversation: Conversation, message: int, what: str) -> None:
        """That nobody can find a text in what a template writes may also mean that the template has lost its origin."""
        messages = list(conversation.messages)
        messages[message] = replace(messages[message], content=_MARKED_TEXT, parts=())
        try:
            is_written = _MARKED_TEXT in self._render(replace(conversation, messages=tuple(messages)))
        except TemplateError:
            is_written = True
        if is_written:
            raise TemplateError(
                f"the template writes the {what} of message {message + 1} in a way that cannot be followed"
            )

    def _allowed_in(self, role: Role, message: int, conversation: Conversation) -> Collection[str]:
        speaker = conversation.messages[message].role if message >= 0 else role
        return self._allowed.get(role, frozenset()) | self._allowed.get(speaker, frozenset())


def _allowed_by_role(allowed: Mapping[str, Collection[str]], known: Collection[str]) -> dict[Role, frozenset[str]]:
    """Raises TemplateError for a role or a control token that there is not."""
    by_name = {role.name.lower(): role for role in Role if role not in (Role.TEMPLATE, Role.PADDING)}
    for name, strings in allowed.items():
        if name not in by_name:
            raise TemplateError(f"data.allow_control_tokens: no role {name!r}; the roles are {', '.join(by_name)}")
        if unknown := sorted(set(strings) - set(known)):
            raise TemplateError(
                f"data.allow_control_tokens.{name}: {', '.join(unknown)} is no control token of the tokenizer, which "
                "would read it as plain text: remove it, or add the token (tokenizer.add_tokens)"
            )
    return {by_name[name]: frozenset(strings) for name, strings in allowed.items()}


def _template_sources(template: str | Mapping[str, str] | None) -> dict[str, str]:
    """The templates by apply_chat_template's names: "default", and "tool_use" where there is one."""
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, Mapping) and "default" in template:
        return {name: template[name] for name in ("default", "tool_use") if name in template}
    found = "none" if not template else "several by name, and none is the default"
    raise TemplateError(
        f"the tokenizer has to have one chat template, found {found}; set tokenizer.chat_template: one of "
        f"{', '.join([*(template or ()), *NAMES])}, or a .jinja file"
    )


def _tokens(
    tokenizer: RenamedTokenizer, texts: Sequence[str], locations: Sequence[str]
) -> Sequence[Tokens | DataError]:
    """The tokens of each text. A text at which the tokenizers library panics is an error of its own row: the panic of
    a batch does not name it, and is no Exception, so that it would end a loader worker or the run."""
    try:
        return tokenizer.encode(texts)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        if len(texts) == 1:
            problem = f"the tokenizers library failed on this text ({error}); change or remove the row"
            return [DataError(f"{locations[0]}: {problem}", reason="tokenizer_failed")]
    return [_tokens(tokenizer, [text], [place])[0] for text, place in zip(texts, locations, strict=True)]


def _refusal(conversation: Conversation, error: TemplateError) -> DataError:
    refusal = DataError(f"{conversation.location}: {error}", reason="template_refused")
    refusal.__cause__ = error
    return refusal


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
