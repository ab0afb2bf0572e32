"""Why a server makes another prompt of a conversation than training did, decided by rendering it again.

Each cause has changes of the rendering: the conversation without thoughts, other spaces in JSON, no generation prompt.
The cause whose change gives exactly the server's ids is the one. If no change does, the conversation is rendered on
both sides without its tools, its thoughts or the template's system prompt, and the part whose absence makes them equal
is the cause.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from sftron.data.chat.template import TemplateError
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.formats.messages import REASONING_FIELDS, DataError, apply_reasoning_policy
from sftron.data.types import Conversation, Message, Role

Ids = list[int]
Json = dict[str, Any]
Render = Callable[[Conversation], Ids | None]
"""Returns the ids of a prompt, or None if the conversation is refused."""


class Cause(Enum):
    """Why a served prompt, its stop or its sampling is not the trained one. The value is the remedy."""

    HISTORY_WITHOUT_THOUGHTS = (
        "Earlier thoughts are in one of them only. Send reasoning_content back with the history where training had it, "
        "or train without it (data.reasoning: last)."
    )
    TOOL_SCHEMA = (
        "The tools are written otherwise. Serve the folder's own template, pass tools in OpenAI's form, and give each "
        "a description, as llama.cpp adds an empty one."
    )
    ARGUMENTS = "A call's arguments are text in one of them and an object in the other. Store them as objects."
    JSON_SPACING = "JSON is written with other spaces. Serve with a template engine whose tojson is transformers'."
    KEY_ORDER = "JSON is written with its keys in another order. Serve with an engine that keeps the order of keys."
    UNICODE_ESCAPES = "JSON is written with escapes. Serve with an engine whose tojson writes characters as they are."
    BOS = (
        "The BOS token is there once more or once less. Set add_bos_token to false where it is served (GGUF: "
        "tokenizer.ggml.add_bos_token) if the template writes it, and to true if it does not."
    )
    GENERATION_PROMPT = (
        "The prompt ends otherwise. Set add_generation_prompt, and enable_thinking as training rendered it; a template "
        "whose prompt opens a thought needs answers with thoughts."
    )
    DATE = "The template writes today's date. Set tokenizer.date in training, and the same date where it is served."
    SYSTEM_PROMPT = "System messages, or the template's own, are written otherwise. Put one system message in each row."
    SPECIAL_TOKENS = (
        "The text is the same in other ids: control tokens are read as text, or text as control tokens. Parse special "
        "tokens where it is served, and serve the folder's own tokenizer with its added tokens."
    )
    CONTROL_TEXT = (
        "A message spells a control token, which training reads as text and the server as the token. Remove it from "
        "the rows and from what is sent to the server, or train it as the token (data.allow_control_tokens)."
    )
    TOKENIZATION = (
        "The server divides the same text into other tokens. Convert the folder's own tokenizer again (GGUF: "
        "tokenizer.ggml.pre names how text is divided), or serve that tokenizer."
    )
    BOUNDARY = (
        "The last characters of the prompt are in other tokens once the answer follows, so no server can give this "
        "prompt. Begin answers without white space."
    )
    REWRITTEN = (
        "The template writes earlier messages otherwise once more follow, so that no server can give this prompt. "
        "Divide the row into one row for each answer, or train the last answer only (data.train_on_turns: last)."
    )
    REFUSED = "The server refuses the conversation. Serve a template that takes it, or leave the row out."
    TEMPLATE = (
        "No single change explains it: it is another template, or an engine that renders it otherwise, as llama.cpp's "
        "does with some. Serve the folder's own."
    )
    STOP_LIST = (
        "Generation ends elsewhere than in training. List every stop token, and no other, in eos_token_id of "
        "generation_config.json, and serve or convert the folder again."
    )
    SAMPLING = "generation_config.json changes what greedy decoding gives. Remove these keys."

    @property
    def remedy(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class _Change:
    """One change of a rendering; by default none."""

    edit: Callable[[Conversation], Conversation] = lambda conversation: conversation
    tools: Callable[[Sequence[Any]], Sequence[Any]] = list
    tojson: Callable[..., str] | None = None
    variables: Mapping[str, bool | str] | None = None
    ids: Callable[[Ids], Ids] = list
    is_text: bool = False
    """Whether control tokens are read as plain text."""


def render_prompt(
    chat: ChatTokenizer, conversation: Conversation, change: _Change = _Change(), date: datetime.date | None = None
) -> Ids | None:
    """Returns the ids of the conversation and the generation prompt as transformers gives them, but for the change."""
    template, conversation = chat.template_for(conversation), change.edit(conversation)
    try:
        text = template.render_changed(
            template.plain_messages(conversation.messages),
            change.tools([dict(tool) for tool in conversation.tools]),
            tojson=change.tojson,
            date=date,
            variables=change.variables,
        )
    except TemplateError:
        return None
    return change.ids(encode(chat, text, is_text=change.is_text))


def encode(chat: ChatTokenizer, text: str, *, is_text: bool = False) -> Ids:
    backend: Any = chat.tokenizer.backend_tokenizer
    before = backend.encode_special_tokens
    backend.encode_special_tokens = is_text
    try:
        return backend.encode(text, add_special_tokens=False).ids
    finally:
        backend.encode_special_tokens = before


def cause_of(chat: ChatTokenizer, conversation: Conversation, trained: Ids, served: Ids | None, ask: Render) -> Cause:
    """Returns why the server's ids of a prompt are not the trained ones.

    Args:
        conversation: The messages before the trained turn.
        served: The server's ids; None if it refuses the conversation.
        ask: Returns the server's ids of another conversation.
    """
    if served is None:
        return Cause.REFUSED
    own = render_prompt(chat, conversation)
    if served == own:  # the server renders as the folder's template does: what is to explain is the training
        if _differs_at_boundary(chat, trained, served):
            return Cause.BOUNDARY
        if chat.decode(served) == chat.decode(trained):
            return Cause.CONTROL_TEXT
        if served[: len(trained)] == trained:
            return Cause.GENERATION_PROMPT
        changes = (change for cause, change in _changes(chat) if cause is Cause.GENERATION_PROMPT)
        is_at_end = any(render_prompt(chat, conversation, change) == trained for change in changes)
        return Cause.GENERATION_PROMPT if is_at_end else Cause.REWRITTEN
    for cause, change in _changes(chat):
        if render_prompt(chat, conversation, change) == served:
            return cause
    if chat.decode(served) == chat.decode(own or trained):
        return (
            Cause.TOKENIZATION if _controls(chat, served) == _controls(chat, own or trained) else Cause.SPECIAL_TOKENS
        )
    closed = render_prompt(chat, conversation, _Change(variables={"add_generation_prompt": False}))
    if closed and closed == served[: len(closed)] == (own or [])[: len(closed)]:
        return Cause.GENERATION_PROMPT
    if chat.template_for(conversation).date and _differs_in_date(chat, conversation, chat.decode(served)):
        return Cause.DATE
    for cause, without in _REMOVALS:
        if (less := without(conversation)) != conversation and ask(less) == render_prompt(chat, less):
            return cause
    return Cause.TEMPLATE


_MOST_BOUNDARY_TOKENS = 4


def _differs_at_boundary(chat: ChatTokenizer, trained: Ids, served: Ids) -> bool:
    """Returns whether only the last tokens differ, whose text in training is that of the prompt's end, or begins so."""
    shared = _num_common(trained, served)
    ends = trained[shared:], served[shared:]
    if not all(0 < len(end) <= _MOST_BOUNDARY_TOKENS and not _controls(chat, end) for end in ends):
        return False
    return chat.decode(ends[0]).startswith(chat.decode(ends[1]))


def _controls(chat: ChatTokenizer, ids: Ids) -> Ids:
    added = chat.tokenizer.added_tokens_decoder
    return [each for each in ids if each in added]


def _changes(chat: ChatTokenizer) -> Iterator[tuple[Cause, _Change]]:
    """Yields the changes, the likeliest cause first where two give the same."""
    for edit in (_without_thoughts, _with_inline_thoughts):
        yield Cause.HISTORY_WITHOUT_THOUGHTS, _Change(edit)
    for tools in (_no_tools, _bare_tools, _wrapped_tools):
        yield Cause.TOOL_SCHEMA, _Change(tools=tools)
    for cause, tojson in _JSON:
        yield cause, _Change(tojson=tojson)
    for convert in (_as_text, _as_object):
        yield Cause.ARGUMENTS, _Change(partial(_with_arguments, convert))
    bos = chat.tokenizer.bos_token_id
    if isinstance(bos, int):
        yield Cause.BOS, _Change(ids=lambda ids: [bos, *ids])
        yield Cause.BOS, _Change(ids=lambda ids: ids[1:] if ids[:1] == [bos] else ids)
    for name, value in (("add_generation_prompt", False), ("enable_thinking", False), ("enable_thinking", True)):
        yield Cause.GENERATION_PROMPT, _Change(variables={name: value})
    # llama.cpp gives every template this variable, for which Llama 3.1's has a default.
    yield Cause.DATE, _Change(variables={"date_string": datetime.datetime.now().strftime("%d %b %Y")})
    for edit in (_without_system, _with_empty_system, _joined_systems("\n"), _joined_systems("\n\n"), _in_next):
        yield Cause.SYSTEM_PROMPT, _Change(edit)
    yield Cause.SPECIAL_TOKENS, _Change(is_text=True)


def _differs_in_date(chat: ChatTokenizer, conversation: Conversation, served: str) -> bool:
    """Returns whether a text is that of the template but for the date, which two renderings show the place of."""
    dates = (datetime.date(1999, 12, 31), datetime.date(2008, 6, 15))
    one, other = (chat.decode(render_prompt(chat, conversation, date=date) or []) for date in dates)
    start, end = _num_common(one, other), _num_common(one[::-1], other[::-1])
    return bool(one != other and served.startswith(one[:start]) and served.endswith(one[len(one) - end :]))


def _num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# -- the changes ------------------------------------------------------------------------------------------------------


def _without_thoughts(conversation: Conversation) -> Conversation:
    try:
        return apply_reasoning_policy(conversation, "strip")
    except DataError:  # a message that is nothing but reasoning
        return conversation


def _with_inline_thoughts(conversation: Conversation) -> Conversation:
    def inline(message: Message) -> Message:
        thought = next((message.fields[key] for key in REASONING_FIELDS if message.fields.get(key)), None)
        fields = {key: value for key, value in message.fields.items() if key not in REASONING_FIELDS}
        content = f"<think>\n{thought}\n</think>\n\n{message.content or ''}"
        return message if thought is None else replace(message, content=content, fields=fields, parts=())

    return replace(conversation, messages=tuple(map(inline, conversation.messages)))


def _with_arguments(convert: Callable[[Any], Any], conversation: Conversation) -> Conversation:
    def converted(message: Message) -> Message:
        if not (calls := message.fields.get("tool_calls")):
            return message
        functions = [dict(each.get("function") or {}) for each in calls]
        functions = [{**each, "arguments": convert(each.get("arguments"))} for each in functions]
        calls = [{**each, "function": function} for each, function in zip(calls, functions, strict=True)]
        return replace(message, fields={**message.fields, "tool_calls": calls})

    return replace(conversation, messages=tuple(map(converted, conversation.messages)))


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_object(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _no_tools(_: Sequence[Any]) -> Sequence[Any]:
    return []


def _bare_tools(tools: Sequence[Any]) -> Sequence[Any]:
    return [tool.get("function", tool) for tool in tools]


def _wrapped_tools(tools: Sequence[Any]) -> Sequence[Any]:
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _without_system(conversation: Conversation) -> Conversation:
    kept = tuple(each for each in conversation.messages if each.role is not Role.SYSTEM)
    return replace(conversation, messages=kept or conversation.messages)


def _with_system(text: str, conversation: Conversation) -> Conversation:
    rest = _without_system(conversation).messages
    return replace(conversation, messages=(Message(Role.SYSTEM, text), *rest))


_with_empty_system = partial(_with_system, "")


def _in_next(conversation: Conversation) -> Conversation:
    """Puts a first system message before the next one, as llama.cpp does if it thinks that the template has none."""
    first, *rest = conversation.messages
    if first.role is not Role.SYSTEM or not rest:
        return conversation
    joined = replace(rest[0], content=f"{first.content or ''}\n{rest[0].content or ''}", parts=())
    return replace(conversation, messages=(joined, *rest[1:]))


def _joined_systems(separator: str) -> Callable[[Conversation], Conversation]:
    def joined(conversation: Conversation) -> Conversation:
        texts = [each.content or "" for each in conversation.messages if each.role is Role.SYSTEM]
        return _with_system(separator.join(texts), conversation) if len(texts) > 1 else conversation

    return joined


def _json_of(text_of: Callable[[str], str] = str, **options: Any) -> Callable[..., str]:
    def tojson(value: Any, indent: int | None = None, **own: Any) -> str:
        return text_of(json.dumps(value, **{"ensure_ascii": False, "indent": indent, **own, **options}))

    return tojson


def _html(text: str) -> str:
    for character in "<>&'":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


_JSON = (
    (Cause.JSON_SPACING, _json_of(separators=(",", ":"))),
    (Cause.JSON_SPACING, _json_of(separators=(",", ": "))),
    (Cause.JSON_SPACING, _json_of(indent=None)),
    (Cause.JSON_SPACING, _json_of(indent=2)),
    (Cause.JSON_SPACING, _json_of(indent=4)),
    (Cause.KEY_ORDER, _json_of(sort_keys=True)),
    (Cause.UNICODE_ESCAPES, _json_of(ensure_ascii=True)),
    (Cause.UNICODE_ESCAPES, _json_of(_html)),
)

_REMOVALS: tuple[tuple[Cause, Callable[[Conversation], Conversation]], ...] = (
    (Cause.TOOL_SCHEMA, lambda conversation: replace(conversation, tools=())),
    (Cause.HISTORY_WITHOUT_THOUGHTS, _without_thoughts),
    (Cause.SYSTEM_PROMPT, partial(_with_system, "Answer.")),
)
