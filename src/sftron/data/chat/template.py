"""A Hugging Face chat template, rendered once on strings that remember where they came from.

The input it wants is learnt by rendering some plain conversations.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from jinja2.nodes import ExtensionAttribute
from transformers.utils.chat_template_utils import _compile_jinja_template

from sftron.data.chat.jinja_tracking import TrackingEnvironment, tracked_str_join
from sftron.data.chat.tracked_text import (
    CONVERSATION,
    Origin,
    ProvenanceLostError,
    TrackedStr,
    track,
)
from sftron.data.types import Role

_ASKS_FOR_THE_DATE = "strftime_now"


class TemplateError(ValueError):
    """The chat template cannot be used for training: it refused the conversation, or cannot be followed."""


PROBED_ID = "abcdefghi"  # some templates insist on nine characters
_PROBED_ARGUMENTS = {"x": "y"}
PROBED_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "e"}},
            "required": ["x"],
        },
    },
}


class ChatTemplate:
    """`render(messages)` gives the text that `apply_chat_template` gives, as a TrackedStr.

    source: the Jinja text. constants: what the tokenizer adds to every call (bos_token, eos_token, ...).
    date: what a template that asks for today's date is told (Llama 3.2's writes it into every system turn), by default
        today's. A run has one date from its first step to its last, or the same row would become other tokens tomorrow
        (law 5). None in a template that does not ask.
    """

    def __init__(self, source: str, constants: Mapping[str, str], date: datetime.date | None = None) -> None:
        self.source = source
        self.date = (date or datetime.date.today()) if _ASKS_FOR_THE_DATE in source else None
        self._constants = dict(constants)
        try:
            theirs = _compile_jinja_template(source)
            if self.date is not None:
                # Compiled once a process: apply_chat_template, which ours is compared with, has it from here on.
                theirs.environment.globals[_ASKS_FOR_THE_DATE] = self.date.strftime
            self._template = TrackingEnvironment.like(theirs.environment).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is not valid Jinja, line {error.lineno}: {error.message}"
            ) from error
        except Exception as error:  # of constants, or of Python's own compiler: too many nested loops
            raise TemplateError(f"the chat template cannot be compiled: {type(error).__name__}: {error}") from error
        # Jinja has them as a chain of mappings, and copies it for every rendering: a third of the time.
        self._template.globals = dict(self._template.globals)
        # `a ~ b` compiles to a call of this name in the template's own module.
        self._template.root_render_func.__globals__["str_join"] = tracked_str_join

    @cached_property
    def has_marks(self) -> bool:
        """Whether the template marks what is the model's, with `{% generation %}`, wherever it does so."""
        calls = self._template.environment.parse(self.source).find_all(ExtensionAttribute)
        return any(call.name == "_generation_support" for call in calls)

    @cached_property
    def after_call(self) -> str:
        """What the template writes after the last text of a tool call that ends the conversation; "" if it cannot."""
        call = self._probed_call("" if self.needs_content else None)
        try:
            return _template_after(self._probed([_probe(Role.USER, 0), call]), message=1)
        except TemplateError:
            return ""

    def _probed(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> TrackedStr:
        """Rendered without tools, or with one where the template insists on some."""
        try:
            return self.render(messages, add_generation_prompt=add_generation_prompt)
        except TemplateError:
            tools = track([PROBED_TOOL], Origin(CONVERSATION, "tools", Role.SYSTEM))
            return self.render(messages, tools, add_generation_prompt=add_generation_prompt)

    def _probed_call(self, content: str | None = None, arguments: Any = _PROBED_ARGUMENTS) -> dict[str, Any]:
        call = {"type": "function", "id": PROBED_ID, "function": {"name": "f", "arguments": arguments}}
        calls = {"role": "assistant", "tool_calls": track([call], Origin(1, "tool_calls", Role.TOOL_CALL))}
        return calls if content is None else {**calls, "content": content}

    @cached_property
    def needs_content(self) -> bool:
        """Whether the template fails on a message of tool calls alone, and takes it with an empty content."""
        user, result = _probe(Role.USER, 0), _probe(Role.TOOL, 2, tool_call_id=PROBED_ID, name="f")
        return any(
            not self._takes([user, self._probed_call(), *rest]) and self._takes([user, self._probed_call(""), *rest])
            for rest in ([], [result])
        )

    @cached_property
    def needs_arguments_as_object(self) -> bool:
        """Whether the template fails on tool calls whose arguments are JSON in a text, and takes them as an object."""
        user, content = _probe(Role.USER, 0), "" if self.needs_content else None
        text = json.dumps(_PROBED_ARGUMENTS)
        return not self._takes([user, self._probed_call(content, text)]) and self._takes(
            [user, self._probed_call(content)]
        )

    def _takes(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        try:
            self._probed(messages)
        except TemplateError:
            return False
        return True

    @cached_property
    def reads_parts(self) -> bool:
        """Whether the template takes a content that is a list of OpenAI's parts, and writes their texts."""
        probe = "a text that no template writes"
        parts = [{"type": "text", "text": TrackedStr.of(probe, Origin(0, "content", Role.USER))}]
        try:
            text = self.render([{"role": "user", "content": parts}])
        except TemplateError:
            return False
        return any(origin is not None and length == len(probe) for length, origin in text.runs)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> TrackedStr:
        """Raises TemplateError, with the template's line, if the template refuses these messages or loses track."""
        try:
            text = self._template.render(
                messages=list(messages),
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._constants,
            )
        except ProvenanceLostError as error:
            line = _template_line(error)
            raise TemplateError(
                f"the chat template, line {line}, cannot be followed: {error}. Give a template whose message contents "
                "are written by plain expressions (tokenizer.chat_template: FILE)"
            ) from error
        except jinja2.TemplateError as error:
            raise TemplateError(
                f"the chat template, line {_template_line(error)}, refuses this conversation: {error}"
            ) from error
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise TemplateError(
                f"the chat template, line {_template_line(error)}, fails on this conversation: "
                f"{type(error).__name__}: {error}"
            ) from error
        assert isinstance(text, TrackedStr)
        return text


def _probe(role: Role, message: int, **fields: str) -> dict[str, Any]:
    texts = {"content": "Hi", **fields}
    tracked = {name: TrackedStr.of(text, Origin(message, name, role)) for name, text in texts.items()}
    return {"role": role.name.lower(), **tracked}


def _template_after(text: TrackedStr, *, message: int) -> str:
    """What the template writes between the last text of a message and the next one's, or the end."""
    runs = list(text.runs)
    last = max(
        (n for n, (_, origin) in enumerate(runs) if origin is not None and origin.message == message), default=-1
    )
    if last < 0 or last + 1 == len(runs) or runs[last + 1][1] is not None:
        return ""
    start = sum(length for length, _ in runs[: last + 1])
    return str.__getitem__(text, slice(start, start + runs[last + 1][0]))


def _template_line(error: BaseException) -> int:
    """The template's line at which it raised: Jinja rewrites the traceback so that it holds the template's lines."""
    line, traceback = 0, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename in ("<template>", "<unknown>"):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
