"""Renders Hugging Face chat templates on strings that record the origin of every character.

Templates accept different forms of input. Rendering short conversations shows which form a template needs.
"""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.meta import find_undeclared_variables
from transformers.utils import chat_template_utils

from sftron.data.chat.jinja_tracking import TrackingEnvironment, tracked_str_join
from sftron.data.chat.tracked_text import CONVERSATION, Origin, OriginSpan, ProvenanceLostError, TrackedStr, track
from sftron.data.formats.messages import CALL_FIELDS, CLOSES_REASONING, REASONING_FIELDS, reasoning_spans
from sftron.data.formats.values import is_none
from sftron.data.types import Conversation, ConversationKey, Message, Role

TEMPLATE_ROLE_NAMES = {Role.SYSTEM: "system", Role.USER: "user", Role.ASSISTANT: "assistant", Role.TOOL: "tool"}
"""The names of roles in templates. No other name is used, so that no text of the data gets into a header."""

_DATE_FUNCTION, _FLAG = "strftime_now", "add_generation_prompt"

_PROBE_ID = "abcdefghi"  # some templates require exactly nine characters
_PROBE_ARGUMENTS = {"x": "y"}
_PROBE_SCHEMA = {"type": "object", "properties": {"x": {"type": "string", "description": "e"}}, "required": ["x"]}
PROBE_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": _PROBE_SCHEMA}}

_PROBED_THOUGHT, _PROBED_TEXT = "a thought that no template writes", {"type": "text", "text": "Yo"}

_alias_reasoning: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = getattr(
    chat_template_utils, "_alias_reasoning_fields", lambda messages: messages
)
"""Adds a message's reasoning under every field name that templates read, as newer versions of transformers do."""

_FIELD_ROLES = {**dict.fromkeys(REASONING_FIELDS, Role.REASONING), **dict.fromkeys(CALL_FIELDS, Role.TOOL_CALL)}
"""The roles of the fields of an assistant's message; all others are part of the template's text."""


class TemplateError(ValueError):
    """The chat template cannot be used for training: it rejects the conversation, or loses the origin of texts."""


def probe(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Conversation:
    """Returns a conversation to render, which shows how a template writes it."""
    return Conversation(tuple(messages), ConversationKey(0, 0), "a probe", tuple(tools))


class ChatTemplate:
    """A chat template. It renders a TrackedStr with the same text as `apply_chat_template`.

    Args:
        source: The Jinja source. Raises TemplateError if it cannot be compiled.
        constants: The variables that the tokenizer adds to every rendering (bos_token, eos_token, ...).
        file: The path of the source, for error messages.
        kwargs: Values of variables that the template reads, such as `enable_thinking`.
        date: The date for a template that writes today's date, as Llama 3.2's does in every system turn; by default,
            today. A run has one date throughout; otherwise a row would have other tokens on another day (law 5).
    """

    def __init__(
        self,
        source: str,
        constants: Mapping[str, str],
        date: datetime.date | None = None,
        file: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.source, self._name = source, f"the chat template{f' {file}' if file else ''}"
        self.date = (date or datetime.date.today()) if _DATE_FUNCTION in source else None
        """The date that the template writes, or None if it writes none."""
        self._constants = dict(constants)
        self._changed: dict[tuple[Callable[..., str] | None, datetime.date | None], jinja2.Template] = {}
        try:
            self._reference = chat_template_utils._compile_jinja_template(source)
            if self.date is not None:
                # transformers compiles a template once per process, so apply_chat_template writes this date as well.
                self._reference.environment.globals[_DATE_FUNCTION] = self.date.strftime
            self._environment = TrackingEnvironment.like(self._reference.environment)
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"{self._name} is not valid Jinja, line {error.lineno}: {error.message}") from error
        except Exception as error:  # from constant folding, or Python's own limit on nested loops
            raise TemplateError(f"{self._name} cannot be compiled: {type(error).__name__}: {error}") from error
        # Jinja keeps globals as a chain of mappings, and copying it takes a third of the time of every rendering.
        self._template.globals = dict(self._template.globals)
        # `a ~ b` compiles to a call of the function with this name in the template's module.
        self._template.root_render_func.__globals__["str_join"] = tracked_str_join
        self.kwargs: Mapping[str, Any] = {}
        """The values of the template's variables, as apply_chat_template gets them."""
        if kwargs:
            self._set_kwargs(kwargs, "tokenizer.template_kwargs: ")

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> ChatTemplate:
        """Returns the template with these values of its variables instead of those that it has.

        Raises TemplateError for a name that the template does not read, unless its value spells that there is none.
        """
        variant = copy.copy(self)
        for name in [name for name in self.__dict__ if isinstance(getattr(type(self), name, None), cached_property)]:
            if name not in ("_syntax", "variables"):  # what probing has found may depend on the values
                del variant.__dict__[name]
        kwargs = {name: value for name, value in kwargs.items() if name in self.variables or not is_none(value)}
        variant._set_kwargs({**self.kwargs, **kwargs})
        return variant

    def _set_kwargs(self, kwargs: Mapping[str, Any], key: str = "") -> None:
        self.kwargs = dict(kwargs)
        if unknown := [name for name in self.kwargs if name not in self.variables]:
            known = ", ".join(sorted(self.variables)) or "none but messages and tools"
            problem = f"{key}{self._name} does not read {', '.join(unknown)}"
            raise TemplateError(f"{problem}; the variables that it reads: {known}")

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of the variables that the template reads, but for those that every rendering gets."""
        given = {"messages", "tools", "documents", _FLAG, *self._constants}
        return frozenset(find_undeclared_variables(self._syntax) - given - self._environment.globals.keys())

    @property
    def source_with_defaults(self) -> str:
        """The source in which the variables have these values unless a rendering gives others; it writes the same.

        The newline after a block is part of it for servers, which have transformers' trim_blocks. `-%}` also removes it
        elsewhere, but would remove white space with which the source begins.
        """
        end = "%}\n" if self.source[:1].isspace() else "-%}\n"
        sets = [f"{{%- set {n} = {n} | default({_literal(value)}) {end}" for n, value in sorted(self.kwargs.items())]
        return "".join(sets) + self.source

    def render_conversation(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> TrackedStr:
        messages = self.tracked_messages(conversation.messages)
        tools = conversation.tools and track(list(conversation.tools), Origin(CONVERSATION, "tools", Role.SYSTEM))
        return self.render(messages, tools or None, add_generation_prompt=add_generation_prompt)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> TrackedStr:
        """Renders messages.

        Raises TemplateError, with the line of the template, if it rejects them or loses the origin of a text.
        """
        origin = Origin(CONVERSATION, "chat_template_kwargs", Role.SYSTEM)
        kwargs = {name: track(value, origin) for name, value in self.kwargs.items()}
        text = self._run(self._template, messages, tools, add_generation_prompt, kwargs)
        assert isinstance(text, TrackedStr)
        return text

    def prompt_renderer(self, conversation: Conversation) -> Callable[[int], str]:
        """Returns a function that renders the first messages of the conversation and the generation prompt.

        It renders in transformers' own environment, in a third of the time, and raises TemplateError.
        """
        messages, tools = _alias_reasoning(self.plain_messages(conversation.messages)), list(conversation.tools) or None
        template = self._compiled(None, self.date) if self.date else self._reference
        return lambda number: self._run(template, messages[:number], tools, True, self.kwargs)

    def render_changed(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        tojson: Callable[..., str] | None = None,
        date: datetime.date | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Renders plain messages and the generation prompt as another program may: with its own JSON, date or
        variables, those that the template does not read included. Raises TemplateError.
        """
        given = _alias_reasoning([dict(each) for each in messages])
        kwargs = {_FLAG: True, **self.kwargs, **(variables or {})}
        changed, add_generation_prompt = self._compiled(tojson, date or self.date), bool(kwargs.pop(_FLAG))
        return self._run(changed, given, list(tools) or None, add_generation_prompt, kwargs)

    def _compiled(self, tojson: Callable[..., str] | None, date: datetime.date | None) -> jinja2.Template:
        """Returns the template in an environment of its own: a later template of this source may have another date."""
        if (tojson, date) not in self._changed:
            environment = self._reference.environment.overlay()
            environment.filters = {**environment.filters, **({"tojson": tojson} if tojson else {})}
            environment.globals = {**environment.globals, **({_DATE_FUNCTION: date.strftime} if date else {})}
            self._changed[tojson, date] = environment.from_string(self.source)
        return self._changed[tojson, date]

    def _run(
        self,
        template: jinja2.Template,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        try:
            return template.render(
                messages=list(messages),
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._constants, **kwargs},
            )
        except (
            *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
            jinja2.TemplateError,
        ) as error:
            if isinstance(error, ProvenanceLostError):
                problem = (
                    f"loses the origin of text: {error}. Give a template that writes message contents with plain "
                    "expressions (tokenizer.chat_template: FILE)"
                )
            elif isinstance(error, jinja2.TemplateError):
                problem = f"refuses this conversation: {error}"
            else:
                problem = f"fails on this conversation: {type(error).__name__}: {error}"
            raise TemplateError(f"{self._name}, line {_template_line(error)}, {problem}") from error

    # --- The input of a rendering ---

    def plain_messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Returns the messages in the form in which apply_chat_template takes them for this template."""
        return [
            {**self._role_and_content(each, each.content, _thought(each)), **self._fields(each)} for each in messages
        ]

    def tracked_messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Returns the same as `plain_messages`, but with every text as a TrackedStr."""
        given = []
        for index, message in enumerate(messages):
            if thought := _thought(message):
                thought = TrackedStr.of(thought, Origin(index, "reasoning_content", Role.REASONING))
            given.append(self._role_and_content(message, _tracked_content(message, index), thought))
            for name, value in self._fields(message).items():
                role = _FIELD_ROLES.get(name, Role.TEMPLATE) if message.role is Role.ASSISTANT else message.role
                given[-1][name] = track(value, Origin(index, name, role))
        return _alias_reasoning(given) if any(message.fields for message in messages) else given

    def _role_and_content(self, message: Message, content: str | None, thought: str | None) -> dict[str, Any]:
        given: dict[str, Any] = {"role": message.role_name or TEMPLATE_ROLE_NAMES[message.role]}
        if message.thinking_parts and not self.reads_thinking_parts:
            role = message.role.name.lower()
            raise TemplateError(f"{self._name} reads no part of type thinking in a {role} message; write it as text")
        thoughts = [{"type": "thinking", "thinking": thought}] if thought and self.takes_thoughts_as_parts else []
        if content is None:  # absent, as in apply_chat_template
            rest = {"content": ""} if self.needs_content else {}
            return {**given, "content": thoughts} if thoughts else {**given, **rest}
        parts, start = [], 0
        for number, part in enumerate(message.parts if self.reads_parts else ()):
            kind = "thinking" if number in message.thinking_parts else "text"
            parts.append({"type": kind, kind: content[start : start + len(part)]})
            start += len(part) + 1  # the newline that joins the parts
        if thoughts:
            return {**given, "content": [*thoughts, *(parts or [{"type": "text", "text": content}])]}
        return {**given, "content": parts or content}

    def _fields(self, message: Message) -> Mapping[str, Any]:
        calls, fields = message.fields.get("tool_calls"), message.fields
        if _thought(message) is not None and self.takes_thoughts_as_parts:
            fields = {name: value for name, value in fields.items() if name not in REASONING_FIELDS}
        if not calls or not self.needs_arguments_as_object:
            return fields
        return {**fields, "tool_calls": [_with_parsed_arguments(call) for call in calls]}

    # --- Properties of the template, found by probing ---

    @cached_property
    def _syntax(self) -> nodes.Template:
        return self._environment.parse(self.source)

    @cached_property
    def has_marks(self) -> bool:
        """Whether the template marks generated text with `{% generation %}`."""
        calls = self._syntax.find_all(nodes.ExtensionAttribute)
        return any(call.name == "_generation_support" for call in calls)

    @cached_property
    def has_constant_header(self) -> bool:
        """Whether every generation prompt ends in the same text, which the template appends for it.

        This is so if the template ends in `{% if add_generation_prompt %}`, and what it writes there reads nothing that
        may depend on the conversation: no variable that the template sets, and no function.
        """
        last = self._syntax.body[-1] if self._syntax.body else None
        if not isinstance(last, nodes.If) or last.test != nodes.Name(_FLAG, "load") or last.elif_:
            return False
        names = self._syntax.find_all(nodes.Name)
        varying = {"messages", "tools", *(name.name for name in names if name.ctx != "load")}
        read = [node for each in last.body for node in each.find_all((nodes.Call, nodes.Name))]
        return _FLAG not in varying and not any(isinstance(each, nodes.Call) or each.name in varying for each in read)

    @cached_property
    def reads_parts(self) -> bool:
        """Whether the template accepts a content that is a list of parts in OpenAI's form, and writes their texts."""
        probe = "a text that no template writes"
        parts = [{"type": "text", "text": TrackedStr.of(probe, Origin(0, "content", Role.USER))}]
        try:
            text = self.render([{"role": "user", "content": parts}])
        except TemplateError:
            return False
        return any(origin and origin.message == 0 and length == len(probe) for length, origin in text.spans)

    @cached_property
    def reads_thinking_parts(self) -> bool:
        """Whether the template writes a part of type thinking, as Mistral's do."""
        return self._writes_thought({"content": [{"type": "thinking", "thinking": _PROBED_THOUGHT}, _PROBED_TEXT]})

    @cached_property
    def takes_thoughts_as_parts(self) -> bool:
        """Whether the template writes an answer's thought from a part of type thinking, and not from a field."""
        in_field = {"content": _PROBED_TEXT["text"], "reasoning_content": _PROBED_THOUGHT}
        return self.reads_thinking_parts and not self._writes_thought(in_field)

    def _writes_thought(self, answer: Mapping[str, Any]) -> bool:
        answer = {"role": "assistant", **track(answer, Origin(1, "", Role.REASONING))}
        with suppress(TemplateError):
            text = self.render(_alias_reasoning([{"role": "user", "content": "Hi"}, answer]))
            # The template's own text between {% generation %} marks may be as long.
            return any(
                origin and origin.message == 1 and length == len(_PROBED_THOUGHT) for length, origin in text.spans
            )
        return False

    @cached_property
    def needs_content(self) -> bool:
        """Whether the template fails on a message of tool calls alone, but accepts it with an empty content."""
        result = {"role": "tool", "content": "Hi", "tool_call_id": _PROBE_ID, "name": "f"}
        return any(
            self._probed_call(None, rest=rest) is None and self._probed_call("", rest=rest) is not None
            for rest in ([], [result])
        )

    @cached_property
    def needs_arguments_as_object(self) -> bool:
        """Whether the template fails on tool calls whose arguments are JSON text, but accepts them as an object."""
        content = "" if self.needs_content else None
        as_text = self._probed_call(content, json.dumps(_PROBE_ARGUMENTS))
        return as_text is None and self._probed_call(content) is not None

    @cached_property
    def after_call(self) -> str:
        """The text that the template writes after a tool call that ends the conversation; "" if it rejects one."""
        text = self._probed_call("" if self.needs_content else None)
        if text is None:
            return ""
        numbers = [n for n, (_, origin) in enumerate(text.spans) if origin is not None and origin.message == 1]
        following = text.spans[numbers[-1] + 1 :] if numbers else ()
        if not following or following[0][1] is not None:
            return ""
        start = len(text) - sum(length for length, _ in following)
        return str.__getitem__(text, slice(start, start + following[0][0]))

    def own_texts(self) -> Iterator[str]:
        """Yields the template's own text around the messages of short conversations, and in generation prompts.

        Leaves out the text before a first question, which may be prose: a default system message, or tools.
        """
        rounds = [Message(Role.USER, "Hi"), Message(Role.ASSISTANT, "Yo"), Message(Role.USER, "Hi")]
        texts = [self._probed_call(content) for content in (None, "")]
        for messages in (rounds, rounds[:2], [Message(Role.SYSTEM, "Hi"), *rounds]):
            with suppress(TemplateError):
                texts.append(self.render_conversation(probe(messages), add_generation_prompt=True))
        for text in filter(None, texts):
            is_around, end = any(each and each.message == 0 and each.role is Role.SYSTEM for _, each in text.spans), 0
            for length, origin in text.spans:
                start, end = end, end + length
                if origin is not None and origin.field:
                    is_around = is_around or origin.message >= 0
                elif is_around:
                    yield str.__getitem__(text, slice(start, end))

    def _probed_call(
        self, content: str | None, arguments: Any = _PROBE_ARGUMENTS, rest: Sequence[Mapping[str, Any]] = ()
    ) -> TrackedStr | None:
        """Returns the rendering of a question, a call and the rest, or None if the template rejects them."""
        call = {"type": "function", "id": _PROBE_ID, "function": {"name": "f", "arguments": arguments}}
        calls = {"role": "assistant", "tool_calls": track([call], Origin(1, "tool_calls", Role.TOOL_CALL))}
        user = {"role": "user", "content": TrackedStr.of("Hi", Origin(0, "content", Role.USER))}
        messages = [user, calls if content is None else {**calls, "content": content}, *rest]
        for tools in (None, track([PROBE_TOOL], Origin(CONVERSATION, "tools", Role.SYSTEM))):  # some require tools
            try:
                return self.render(messages, tools)
            except TemplateError:
                continue
        return None


def _thought(message: Message) -> str | None:
    """Returns an assistant's reasoning, if it has a field with some."""
    if message.role is not Role.ASSISTANT or not message.fields:
        return None
    return next((message.fields[name] for name in REASONING_FIELDS if message.fields.get(name)), None)


def _literal(value: Any) -> str:
    """Returns a JSON value as an expression of Jinja, which has JSON's literals but null."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(name)}: {_literal(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _with_parsed_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if call.get("function") is not None:
        return {**call, "function": _with_parsed_arguments(call["function"])}
    return {**call, "arguments": json.loads(call["arguments"])} if isinstance(call["arguments"], str) else call


def _tracked_content(message: Message, index: int) -> TrackedStr | None:
    if (content := message.content) is None:
        return None
    origin = Origin(index, "content", message.role)
    if message.role is not Role.ASSISTANT or CLOSES_REASONING not in content:
        return TrackedStr.of(content, origin)
    spans, start = list[OriginSpan](), 0
    for first, end in reasoning_spans(content):
        if first > start:
            spans.append((first - start, origin))
        spans.append((end - first, origin._replace(role=Role.REASONING)))
        start = end
    return TrackedStr.with_spans(content, (*spans, (len(content) - start, origin)))


def _template_line(error: BaseException) -> int:
    """Returns the line of the template that raised; Jinja rewrites the traceback to hold the template's lines."""
    line, traceback = 0, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename in ("<template>", "<unknown>"):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
