"""ChatTokenizer encodes conversations into ids and one role per token, with the model's own chat template.

A conversation is rendered once and tokenized once, so the work is linear in the number of turns, and the role of each
token is recorded during the rendering (law 2). If no text spells a control token, the ids are exactly those of
`tokenizer.apply_chat_template` (law 1).
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from sftron.data.chat.control_tokens import ControlTokens, Tokens, allowed_by_role
from sftron.data.chat.documents import DocumentTokenizer
from sftron.data.chat.generation_prompt import GenerationPrompts
from sftron.data.chat.layout import Layout, StopStrings, assign_roles, frame_of
from sftron.data.chat.left_out import find_left_out, has_second_thought
from sftron.data.chat.pretrained import load_tokenizer, template_source, template_sources
from sftron.data.chat.template import ChatTemplate, TemplateError, probe
from sftron.data.chat.tracked_text import TrackedStr
from sftron.data.chat.turns import TurnReader
from sftron.data.formats.table import RowFormat, parse_conversation
from sftron.data.types import Conversation, ConversationKey, DataError, Message, Role, TokenizedConversation

_QUESTION_AND_ANSWER = (Message(Role.USER, "Hi"), Message(Role.ASSISTANT, "Yo"))
_MOST_LAYOUTS, _MOST_VARIANTS = 1024, 256


class ChatTokenizer:
    """Encodes conversations with a chat template.

    Args:
        tokenizer: A fast Hugging Face tokenizer.
        template: The Jinja source; None stands for the tokenizer's own template.
        date: The date that the template writes as today (see ChatTemplate).
        allow_control_tokens: The control tokens that the texts of a role may contain, by role ("assistant",
            "reasoning", ...).
        added_tokens: The tokens that were added to the tokenizer after the model was trained.
        document_end: The control token that ends each document of plain text; None stands for what the tokenizer adds.
        template_kwargs: Values of variables that the template reads, such as `enable_thinking`.
        template_file: The name or the path of `template`, for error messages.

    Raises:
        TemplateError: The tokenizer is slow, or the template or a control token cannot be used.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        date: datetime.date | None = None,
        allow_control_tokens: Mapping[str, Collection[str]] | None = None,
        added_tokens: Collection[str] = (),
        template_file: str | None = None,
        document_end: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        # The loader workers provide the parallelism; the tokenizer's own threads would not survive their fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise TemplateError(
                f"{type(tokenizer).__name__} is a slow tokenizer, which returns no character offsets; convert it to "
                "tokenizer.json"
            )
        self.tokenizer = tokenizer
        self.added_tokens = tuple(added_tokens)
        self._backend = backend
        self._templates = {
            name: ChatTemplate(source, tokenizer.special_tokens_map, date, template_file, template_kwargs)
            for name, source in template_sources(tokenizer.chat_template if template is None else template).items()
        }
        if template_kwargs and len(self._templates) > 1:
            problem = "tokenizer.template_kwargs: the tokenizer has several templates, one of them for tools"
            raise TemplateError(f"{problem}, but an export has defaults in one only; set tokenizer.chat_template")
        self._control = ControlTokens(backend, (text for each in self._templates.values() for text in each.own_texts()))
        self._allowed = allowed_by_role(allow_control_tokens or {}, self._control.ids)
        self._require_servable(template_kwargs or {})
        in_text = self._allowed.get(Role.TEXT, frozenset[str]())
        self.documents = DocumentTokenizer(tokenizer, self._control, self._tokenize, in_text, document_end)
        self._layouts: dict[tuple[str, ...], Layout] = {}
        """The layouts of plain conversations, by the roles of the messages and the frame around them."""
        self._prompts = {(name, ""): GenerationPrompts(t, self._control) for name, t in self._templates.items()}
        """By the template's name, and the row's own values of its variables, as JSON."""

    def _require_servable(self, template_kwargs: Mapping[str, Any]) -> None:
        """Raises TemplateError for a value that the exported template would not have, or would write as tokens."""
        for name, value in template_kwargs.items():
            key, text = f"tokenizer.template_kwargs: {name}", "null"
            with suppress(ValueError, TypeError):
                text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            if json.loads(text) != value:
                raise TemplateError(f"{key} is {value!r}, which JSON cannot hold; give another value")
            allowed = self._allowed.get(Role.SYSTEM, frozenset[str]())
            for token in (content for _, content in self._control.find(text) if content not in allowed):
                remedy = f'remove it, or write data.allow_control_tokens: {{system: ["{token}"]}}'
                raise TemplateError(f"{key} spells the control token {token}, which would be plain text; {remedy}")

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        chat_template: str | None = None,
        *,
        add_tokens: Collection[str] = (),
        date: datetime.date | None = None,
        allow_control_tokens: Mapping[str, Collection[str]] | None = None,
        document_end: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatTokenizer:
        """Loads the tokenizer of a folder or a Hub id; the other arguments are the configuration's keys of these names.

        Raises ValueError if the folder, the tokenizer or the template cannot be used.
        """
        tokenizer, added = load_tokenizer(path, add_tokens)
        template = None if chat_template is None else template_source(chat_template, tokenizer)
        control = allow_control_tokens
        return cls(tokenizer, template, date, control, added, chat_template, document_end, template_kwargs)

    @property
    def template(self) -> ChatTemplate:
        """The template for conversations without tools."""
        return self._templates["default"]

    def template_for(self, conversation: Conversation) -> ChatTemplate:
        """Returns the template that apply_chat_template uses; a tokenizer may have a separate one for tools.

        It has the conversation's own values of its variables. Raises TemplateError if it does not read them.
        """
        return self._prompts_for(conversation).template

    def _prompts_for(self, conversation: Conversation) -> GenerationPrompts:
        name = "tool_use" if conversation.tools and "tool_use" in self._templates else "default"
        kwargs = conversation.template_kwargs
        key = name, json.dumps(kwargs, sort_keys=True) if kwargs else ""
        if key not in self._prompts:
            if len(self._prompts) >= _MOST_VARIANTS:
                self._prompts = {each: prompts for each, prompts in self._prompts.items() if not each[1]}
            self._prompts[key] = GenerationPrompts(self._templates[name].with_kwargs(kwargs), self._control)
        return self._prompts[key]

    @property
    def fingerprint(self) -> dict[str, str]:
        """Hashes or texts of everything that determines the ids, by name."""
        constants = repr(sorted(self.tokenizer.special_tokens_map.items()))
        kwargs = self.template.kwargs
        allowed = {role.name.lower(): sorted(strings) for role, strings in sorted(self._allowed.items())}
        return {
            "tokenizer": _digest(self._backend.to_str()),
            "chat_template": _digest("".join(each.source for each in self._templates.values()) + constants),
            "tokenizer.date": str(self.template.date or "none"),
            "data.allow_control_tokens": str(allowed),
            **({"tokenizer.template_kwargs": json.dumps(kwargs, sort_keys=True)} if kwargs else {}),
            **({} if self.documents.end is None else {"tokenizer.document_end": self.documents.end}),
        }

    @property
    def control_ids(self) -> frozenset[int]:
        """The ids of the control tokens: added tokens other than ordinary text (see ControlTokens)."""
        return frozenset(self._control.ids.values())

    @property
    def pad_id(self) -> int:
        """The id that fills a pack's padding. No label or role is ever derived from it."""
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(token_id for token_id in ids if isinstance(token_id, int))

    @property
    def stop_ids(self) -> list[int]:
        """The ids that end a plain answer. Raises DataError if the template rejects a plain conversation."""
        return self.encode(probe(_QUESTION_AND_ANSWER)).stop_ids

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids, including control tokens, without any clean-up of spaces."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode(self, conversation: Conversation) -> TokenizedConversation:
        """Encodes a conversation. Raises DataError if the template rejects it, or if roles cannot be determined."""
        (encoded,) = self.encode_batch([conversation])
        if isinstance(encoded, DataError):
            raise encoded
        return encoded

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> TokenizedConversation:
        """Encodes messages in the form that rows of the format `messages` hold. Raises DataError."""
        row = {"messages": list(messages)}
        parsed = parse_conversation(row, RowFormat("messages"), ConversationKey(0, 0), "messages")
        assert isinstance(parsed, Conversation)
        return self.encode(parsed)

    def encode_batch(self, conversations: Sequence[Conversation]) -> list[TokenizedConversation | DataError]:
        """Returns, for each conversation, what `encode` returns or raises; it is faster than separate calls."""
        outcomes: list[Layout | DataError] = []
        for conversation in conversations:
            try:
                outcomes.append(self._lay_out(conversation))
            except TemplateError as error:
                outcomes.append(_refusal(conversation, error))
        tokenized = iter(self._tokenize(["".join(each.texts) for each in outcomes if isinstance(each, Layout)]))
        encoded: list[TokenizedConversation | DataError] = []
        for outcome, conversation in zip(outcomes, conversations, strict=True):
            if isinstance(outcome, DataError):
                encoded.append(outcome)
            elif isinstance(tokens := next(tokenized), Tokens):
                try:
                    if kwargs := conversation.template_kwargs:  # Arrow fills rows up with empty values of other names
                        read = self.template_for(conversation).variables
                        kwargs = {name: value for name, value in kwargs.items() if name in read}
                        conversation = replace(conversation, template_kwargs=kwargs)
                    encoded.append(assign_roles(tokens, outcome, conversation))
                except TemplateError as error:
                    encoded.append(_refusal(conversation, error))
            else:
                problem = f"the tokenizers library failed on this text ({tokens}); change or remove the row"
                encoded.append(DataError(f"{conversation.location}: {problem}", reason="tokenizer_failed"))
        return encoded

    def _tokenize(self, texts: Sequence[str]) -> list[Tokens | BaseException]:
        """Returns the tokens of each text, or the panic of the tokenizers library.

        A panic is not an Exception, so it would end a loader worker or the run. On a batch it does not name the text,
        so the texts are then tokenized one by one.
        """
        try:
            return [*self._control.renamed_tokenizer.encode(texts)]
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            if len(texts) == 1:
                return [error]
        return [tokens for text in texts for tokens in self._tokenize([text])]

    def encode_prompt(self, messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Returns the ids of messages followed by the generation prompt. Raises TemplateError.

        Args:
            template_kwargs: Values of the template's variables, which go before the tokenizer's own.
        """
        conversation = replace(probe(messages), template_kwargs=template_kwargs or {})
        text = self.template_for(conversation).render_conversation(conversation, add_generation_prompt=True)
        self._control.require_usable(text)
        renamed, start = "", 0
        for length, origin in text.spans:
            span = str.__getitem__(text, slice(start, start + length))
            is_text = origin is not None and origin.field
            renamed += span if is_text else self._control.rename(span, self._control.find(span))
            start += length
        return self._control.renamed_tokenizer.encode([renamed])[0].ids.tolist()

    def without_control_text(self, text: str) -> str:
        """Returns the text with a space in place of each string that spells a control token."""
        while (cleaned := self._control.pattern.sub(" ", text)) != text:
            text = cleaned
        return text

    @cached_property
    def _stops(self) -> StopStrings:
        """The stop tokens with which the template ends a plain answer and a tool call."""
        eos = self.tokenizer.eos_token
        known = {eos} if isinstance(eos, str) and eos in self._control.ids else set[str]()
        # Some templates end every answer with two tokens, the second of which is the eos_token. Others write the
        # eos_token only at the end of the conversation, after the answer's own stop token.
        first_of_two = self._probed_stop(_QUESTION_AND_ANSWER * 2, known)
        if first_of_two not in known and (stop := self._probed_stop(_QUESTION_AND_ANSWER, ())):
            known.add(self._last_of_run(stop))
        of_calls = [self._control.find(template.after_call) for template in self._templates.values()]
        return StopStrings(frozenset(known), frozenset(found[-1][1] for found in of_calls if found))

    def _last_of_run(self, stop: str) -> str:
        """Returns the last of the consecutive control tokens with which the template ends every answer.

        Sampling may end with any of them, so all are trained.
        """
        written, last, end = self._prompts["default", ""].end_of_rounds(), stop, -1
        for position, content in self._control.find(written):
            if end < 0 and content != stop:
                continue
            if end >= 0 and written[end:position].strip():
                break
            last, end = content, position + len(content)
        return last

    def _probed_stop(self, messages: tuple[Message, ...], known: Collection[str]) -> str | None:
        """Returns the stop token of the first answer, or None if there is none or the template rejects the messages."""
        conversation = probe(messages)
        try:
            text = self.template.render_conversation(conversation)
            reader = TurnReader(text, conversation, self._prompts["default", ""], StopStrings(frozenset(known)))
            turn = reader.read()[1][1]
        except TemplateError:
            return None
        return turn.stop if turn else None

    def _lay_out(self, conversation: Conversation) -> Layout:
        """Returns the spans of a rendered conversation with renamed control tokens, and the role of each span.

        The roles are determined only if the conversation has no frame (layout.py), or a new one. Raises TemplateError.
        """
        template = self.template_for(conversation)
        rendered = template.render_conversation(conversation)
        contents = self._plain_contents(conversation) if template.has_constant_header else None
        framed = None if contents is None else frame_of(rendered, contents)
        if framed is None:
            return self._read_layout(rendered, conversation)
        gaps, texts = framed
        own = json.dumps(conversation.template_kwargs, sort_keys=True) if conversation.template_kwargs else ""
        frame = (own, *(message.role_name or message.role.name for message in conversation.messages), *gaps)
        if frame in self._layouts:
            return self._layouts[frame].with_texts(texts)
        layout = self._read_layout(rendered, conversation)
        # The gaps decide the roles if every text is one span, and the gap before each answer has its header once.
        header = self._prompts_for(conversation).header(False)
        answers = [n for n, message in enumerate(conversation.messages) if message.role is Role.ASSISTANT]
        if [layout.texts[span] for span in layout.text_spans] == texts and all(
            header.strip() and gaps[number].count(header) == 1 for number in answers
        ):
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[frame] = layout
        return layout

    def _plain_contents(self, conversation: Conversation) -> list[str] | None:
        """Returns the contents of the messages, or None if the roles may depend on them."""
        if conversation.tools:
            return None
        contents, is_plain = list[str](), self._control.is_plain
        for message in conversation.messages:
            content = message.content or ""
            if message.fields or message.parts or "</think>" in content or content.isspace() or not is_plain(content):
                return None
            contents.append(content)
        return contents if all(contents) else None

    def _read_layout(self, text: TrackedStr, conversation: Conversation) -> Layout:
        self._control.require_usable(text)
        template = self.template_for(conversation)
        left_out = find_left_out(text, conversation, template)
        spans, turns = TurnReader(text, conversation, self._prompts_for(conversation), self._stops).read()
        texts, num_control, holds_control_text = [], 0, False
        for span in spans:
            content = str.__getitem__(text, slice(span.start, span.end))
            if not span.is_text or self._control.occurs_in(content):
                controls = self._control.find(content)
                if span.is_text:
                    speaker = conversation.messages[span.message].role if span.message >= 0 else span.role
                    allowed = self._allowed.get(span.role, frozenset()) | self._allowed.get(speaker, frozenset())
                    spelled, controls = controls, tuple(found for found in controls if found[1] in allowed)
                    holds_control_text = holds_control_text or len(controls) < len(spelled)
                num_control += len(controls)
                content = self._control.rename(content, controls)
            texts.append(content)
        is_doubled = has_second_thought(text, conversation)
        return Layout.of(spans, turns, texts, left_out, is_doubled, num_control, holds_control_text)


def _refusal(conversation: Conversation, error: TemplateError) -> DataError:
    refusal = DataError(f"{conversation.location}: {error}", reason="template_refused")
    refusal.__cause__ = error
    return refusal


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
