"""Strict parsers of lists of messages: OpenAI's {role, content} and ShareGPT's {from, value}."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from sftron.data.formats.tools import calls_from_text, check_tool_calls
from sftron.data.formats.values import NamedRow, check_json, checked_text, describe, is_none, names_of, refusal
from sftron.data.json_text import excerpt
from sftron.data.types import Conversation, DataError, Message, Role

Numbered = tuple[int, Message]
"""A message and its number in the row's list, from 1; the number is 0 if the message is not in the list."""

ReasoningPolicy = Literal["keep", "last", "strip"]
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
OPENS_REASONING, CLOSES_REASONING = "<think>", "</think>"
_REASONING_TAG = re.compile(f"{OPENS_REASONING}|{CLOSES_REASONING}")
_AFTER_REASONING = re.compile(rf"(?:\s|{CLOSES_REASONING})*")
_BEFORE_QUOTED, _AFTER_QUOTED = " \t`'\"(\u201c\u2018", " \t`'\")\u201d\u2019.,;:!?"
"""The characters between which a tag is only named, as in "Write `</think>` here"."""

_ROLES = {
    **dict.fromkeys(("system", "developer"), Role.SYSTEM),
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    **dict.fromkeys(("tool", "environment"), Role.TOOL),
}
_OWN_NAMES = ("developer", "environment")
"""The roles under whose own names templates get a message; OLMo 3's rows have results of the role environment."""
CALL_FIELDS = ("tool_calls", "function_calls")
"""The keys of an assistant's calls: a list of objects, or a text, as in OLMo 3's rows."""
_SHAREGPT_ROLES = {
    "system": Role.SYSTEM,
    **dict.fromkeys(("human", "user"), Role.USER),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bing", "bard"), Role.ASSISTANT),
    **dict.fromkeys(("function_call", "tool_call"), Role.TOOL_CALL),
    **dict.fromkeys(("observation", "tool", "function_response", "tool_response"), Role.TOOL),
}
ROLE_NAMES = _ROLES.keys() | _SHAREGPT_ROLES.keys()
"""All names of roles, in either format."""
_FORMAT_OF_KEY = {"role": "messages", "from": "sharegpt"}
_LARGEST_WEIGHT = 1_000_000
_FACTOR_KEYS = {"loss_weight", "loss_scale"}
_TRAINING_KEYS = _FACTOR_KEYS | {
    *("train", "trained", "trainable", "training", "train_on", "train_detail", "training_detail", "is_trained"),
    *("loss", "loss_mask", "mask", "masked", "is_masked"),
}
"""Keys with which other trainers mark trained messages. Their meanings differ, so such a key is an error rather than
ignored. Those in _FACTOR_KEYS hold a number, as `weight` does."""


def parse_messages(turns: Sequence[Any], location: str, first_number: int = 1) -> list[Numbered]:
    """Parses messages of {role, content, ...}, without a check of their order (`check_order`). Raises DataError."""
    messages = []
    for number, turn in enumerate(turns, start=first_number):
        where = f"{location}: message {number}"
        role = _role(turn, "role", "content", _ROLES, where)
        messages.append((number, _parse_message(turn, role, where)))
    return messages


def parse_sharegpt(turns: Sequence[Any], location: str) -> list[Numbered]:
    """Parses turns of {from, value, ...}. Raises DataError.

    A function call directly after an assistant's text becomes part of the same message, as in OpenAI's format. Any
    other function call becomes an assistant's message of its own.
    """
    messages: list[Numbered] = []
    for number, turn in enumerate(turns, start=1):
        where = f"{location}: message {number}"
        role = _role(turn, "from", "value", _SHAREGPT_ROLES, where)
        is_call = role is Role.TOOL_CALL
        for key in ("role", "content", "tool_calls") if is_call else ("role", "content"):
            if not is_none(turn.get(key)):
                raise refusal(where, "two_names", f"has `{key}` in addition to from and value; keep one of the two")
        if turn.get("value") is None:
            raise _no_text(turn, "value", where)
        value = checked_text(turn["value"], "value", where)
        renamed = {key: value for key, value in turn.items() if key not in ("from", "value")}
        if is_call:
            renamed["tool_calls"] = calls_from_text(value, f"{where}: `value`")
            message = _parse_message(renamed, Role.ASSISTANT, where)
            if messages and messages[-1][1].role is Role.ASSISTANT:
                number, before = messages.pop()
                message = _joined(before, message, where)
        else:
            message = _parse_message(renamed | {"content": value}, role, where)
        messages.append((number, message))
    return messages


def with_system(messages: list[Numbered], row: NamedRow) -> list[Numbered]:
    """Returns the messages with the text of the row's column `system` as the first one, if it is not empty.

    Raises DataError if the list begins with another system message.
    """
    system, first = row.optional_text("system"), messages[0][1]
    if not system or (first.role is Role.SYSTEM and first.content == system):
        return messages
    if first.role is Role.SYSTEM:
        problem = f"the column `{row.column('system')}` and message 1 (system) differ"
        found = f"{excerpt(system)}, {excerpt(first.content or '')}"
        raise refusal(row.location, "two_system_texts", f"{problem}: {found}; keep one")
    return [(0, Message(Role.SYSTEM, system)), *messages]


# --- Order ---


_NEXT = {
    Role.SYSTEM: ((Role.USER,), "add the question"),
    Role.USER: ((Role.ASSISTANT,), "add the answer, join the two, or remove one"),
    Role.ASSISTANT: ((Role.USER,), "join the two, or remove one"),
    Role.TOOL: ((Role.TOOL, Role.ASSISTANT), "add the answer to the result"),
}
"""The roles that may follow a message without tool_calls, and the remedy if another one does."""


def check_order(messages: Sequence[Numbered], location: str) -> None:
    """Raises DataError (wrong_role_order) unless the messages alternate.

    After an optional system message, user and assistant messages alternate, beginning with the user's. An assistant's
    message with tool_calls is followed by tool messages and then by another message of the assistant.
    """
    (wanted, remedy), position = ((Role.SYSTEM, Role.USER), "add the question"), "is the first"
    for number, message in messages:
        name = f"message {number} ({message.role_name or message.role.name.lower()})"
        if message.role not in wanted:
            if message.role is Role.TOOL:
                remedy = (
                    "a call in a text is not read as one: give the assistant's message before it `tool_calls` (in "
                    "{from, value}: make it a turn of function_call, with {name, arguments} as its JSON text), and "
                    "remove the marks around calls and results, such as <tool_call>, which the template writes itself"
                )
            roles = " or ".join(role.name.lower() for role in wanted)
            raise refusal(location, "wrong_role_order", f"{name} {position}; wanted {roles} there: {remedy}")
        (wanted, remedy), position = _NEXT[message.role], f"follows {name}"
        if any(message.fields.get(field) for field in CALL_FIELDS):
            (wanted, remedy), position = ((Role.TOOL,), "add the tool's result"), f"{position}, which has tool_calls"


# --- Reasoning ---


def apply_reasoning_policy(conversation: Conversation, policy: ReasoningPolicy) -> Conversation:
    """Returns the conversation with only the reasoning that the policy keeps.

    "keep" keeps all reasoning, "last" that of the last assistant message, and "strip" none. Reasoning is in fields or
    in the content (`reasoning_spans`).

    Raises:
        DataError: A message would be empty without its reasoning.
    """
    if policy == "keep":
        return conversation
    numbers = [number for number, message in enumerate(conversation.messages) if message.role is Role.ASSISTANT]
    if policy == "last":
        numbers = numbers[:-1]
    messages = list(conversation.messages)
    for number in numbers:
        messages[number] = stripped = _without_reasoning(message := messages[number])
        has_calls = any(stripped.fields.get(field) for field in CALL_FIELDS)
        if stripped is not message and not stripped.content and not has_calls:
            problem = f"the assistant's message {number + 1} is nothing but reasoning, and data.reasoning is {policy}"
            raise refusal(conversation.location, "nothing_but_reasoning", f"{problem}; keep it, or remove the row")
    return replace(conversation, messages=tuple(messages))


def _without_reasoning(message: Message) -> Message:
    fields = {key: value for key, value in message.fields.items() if key not in REASONING_FIELDS}
    content = message.content or ""
    spans = reasoning_spans(content)
    if not spans:
        return message if len(fields) == len(message.fields) else replace(message, fields=fields)
    # The reasoning is removed from the parts as well, whose texts, joined by newlines, are the content.
    parts, start = list[str](), 0
    for part in message.parts:
        left = _without(part, [(first - start, end - start) for first, end in spans])
        if parts and any(first <= start - 1 < end for first, end in spans):  # the newline before the part is removed
            left = parts.pop() + left
        parts.append(left)
        start += len(part) + 1
    return replace(message, fields=fields, content=_without(content, spans), parts=tuple(parts))


def reasoning_spans(content: str) -> list[tuple[int, int]]:
    """Returns the bounds of the reasoning in an assistant's content, each with the white space after it.

    A content reasons if it begins with <think>, or if its first tag is </think>, as in the completion of a model whose
    prompt opens the thought. A thought may name either tag, so it ends at the last </think> before the next thought.
    An answer may name them as well: a tag between spaces or quotation marks is read only where no other closes.

        <think>Or </think>?\\n</think>\\n\\nYes.<think>Hm.</think> No.
        [           reasoning           ]    [    reasoning   ]
    """
    is_open = content.lstrip().startswith(OPENS_REASONING)
    spans, start, closed, closed_by_name = list[tuple[int, int]](), 0, 0, 0
    for tag in _REASONING_TAG.finditer(content):
        is_named = _is_named(content, *tag.span())
        end = closed or (closed_by_name if is_open else 0)
        if tag[0] == CLOSES_REASONING:
            closed_by_name = tag.end()
            closed = closed if is_named else tag.end()
        elif end and not (is_named and content[end : tag.start()].strip()):
            spans.append((start, end))
            start, is_open, closed, closed_by_name = tag.start(), True, 0, 0
        elif not (end or is_open or is_named):
            return []
    if end := closed or (closed_by_name if is_open else 0):
        spans.append((start, end))
    return [(first, _AFTER_REASONING.match(content, last).end()) for first, last in spans]  # pyright: ignore[reportOptionalMemberAccess]


def _is_named(content: str, start: int, end: int) -> bool:
    before, after = content[max(0, start - 1) : start], content[end : end + 1]
    return bool(before and after) and before in _BEFORE_QUOTED and after in _AFTER_QUOTED


def _without(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """Returns the text without the characters in the spans, which are in order and may reach beyond it."""
    left, start = list[str](), 0
    for first, end in spans:
        left.append(text[start : max(start, first)])
        start = max(start, end)
    return "".join([*left, text[start:]])


# --- One message ---


def _role(turn: Any, role_key: str, content_key: str, roles: Mapping[str, Role], location: str) -> Role:
    wanted = f"{{{role_key}, {content_key}}}"
    if not isinstance(turn, Mapping):
        raise refusal(location, "not_a_message", f"found {describe(turn)}; wanted an object {wanted}")
    if role_key not in turn:
        other = next((f", or `format: {name}`" for key, name in _FORMAT_OF_KEY.items() if key in turn), "")
        raise refusal(location, "missing_key", f"has no `{role_key}`, only {names_of(turn)}; wanted {wanted}{other}")
    name = turn[role_key]
    if isinstance(name, str) and name in roles:
        return roles[name]
    raise refusal(location, "unknown_role", f"`{role_key}` is {describe(name)}; wanted one of {', '.join(roles)}")


def _no_text(turn: Mapping[str, Any], key: str, location: str) -> DataError:
    found = f"`{key}` is null or empty" if key in turn else f"has no `{key}`, only {names_of(turn)}"
    return refusal(location, "null_content", f"{found}; write the text, or remove the row")


def _parse_message(turn: Mapping[str, Any], role: Role, location: str) -> Message:
    """Parses the turn's keys except its role.

    A key other than the content counts as absent if its value is null or empty: templates differ in whether an empty
    list of calls, or an empty thought, is written as one.
    """
    if turn.keys() == {"role", "content"} and isinstance(turn["content"], str) and turn["role"] not in _OWN_NAMES:
        return Message(role, checked_text(turn["content"], "content", location))
    fields = _fields(turn, role, location)
    content, parts, thinking = turn.get("content"), (), frozenset[int]()
    if isinstance(content, list):
        parts = tuple(
            _part(part, role, f"{location}: part {n} of `content`") for n, part in enumerate(content, start=1)
        )
        thinking = frozenset(n for n, part in enumerate(content) if part["type"] == "thinking")
        if role is Role.ASSISTANT and thinking:
            fields["reasoning_content"] = _thought_before(parts, thinking, fields, location)
            parts, thinking = parts[1:], frozenset()
        content = "\n".join(parts) if parts else None
    may_lack_content = any(fields.get(name) for name in (*CALL_FIELDS, *REASONING_FIELDS))
    if content is None and not (role is Role.ASSISTANT and may_lack_content):
        raise _no_text(turn, "content", location)
    if content is not None:
        checked_text(content, "content", location)
    role_name = turn["role"] if turn.get("role") in _OWN_NAMES else ""
    return Message(role, content, fields, _weight(turn.get("weight"), location), parts, thinking, role_name)


def _fields(turn: Mapping[str, Any], role: Role, location: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in turn.items():
        if key in ("role", "content", "weight") or is_none(value):
            continue
        # A value that JSON lacks, such as a date of Parquet, becomes the text that transformers passes to templates.
        is_json = isinstance(value, str | int | float | list | Mapping)
        fields[key] = value if is_json else f"<{type(value).__name__}>"
        check_json(fields[key], checked_text(key, "a key", location), location)
        if key.lower() in _TRAINING_KEYS:
            remedy = "write `weight: 0` to leave a message out of the loss, `weight: 1` to train it"
            if key.lower() in _FACTOR_KEYS:
                remedy = "rename it to `weight`, the factor of the message's share of the loss"
            raise refusal(location, "training_key", f"has the key {excerpt(key)}, which is not read; {remedy}")
    if "function_call" in fields:
        raise refusal(location, "function_call", "has the key `function_call`; write it as tool_calls, a list of calls")
    if fields.get("tool_calls"):
        check_tool_calls(fields["tool_calls"], location)
        if role is not Role.ASSISTANT:
            problem = f"has tool_calls, and its role is {role.name.lower()}; wanted assistant"
            raise refusal(location, "bad_tool_calls", problem)
    for name in (*REASONING_FIELDS, "function_calls"):
        if name in fields:
            checked_text(fields[name], name, location)
    return fields


def _thought_before(parts: Sequence[str], thinking: frozenset[int], fields: Mapping[str, Any], location: str) -> str:
    """Returns the text of an assistant's part of type thinking. Raises DataError unless it is one, and the first."""
    if thinking != {0}:
        problem = "has a part of type thinking after another part; join thoughts into one, before the text"
        raise refusal(location, "bad_part", problem)
    if given := [name for name in REASONING_FIELDS if fields.get(name)]:
        raise refusal(location, "two_names", f"has `{given[0]}` and a part of type thinking; keep one of the two")
    return parts[0]


def _part(part: Any, role: Role, location: str) -> str:
    """Returns the text of a part of a content. Raises DataError for a part that is not text or a thought alone."""
    name = "text"
    if isinstance(part, Mapping) and part.get("type") == "thinking" and role in (Role.ASSISTANT, Role.SYSTEM):
        name, thought = "thinking", part.get("thinking")
        if isinstance(thought, list):  # of parts of type text, as Mistral's API has them
            thought = "".join(_part(each, Role.USER, f"{location}, `thinking`") for each in thought)
        if part.get("closed", True) not in (True, None):
            raise refusal(location, "bad_part", "is a thought that is not closed; close it, or remove the row")
        part = {key: value for key, value in part.items() if key != "closed"} | {"thinking": thought}
    elif not isinstance(part, Mapping) or part.get("type") != "text":
        found = f"of type {excerpt(str(part.get('type')))}" if isinstance(part, Mapping) else describe(part)
        problem = f"is {found}; only parts {{type: text, text: ...}} are read: remove the row"
        raise refusal(location, "unsupported_part", problem)
    if others := {key: value for key, value in part.items() if key not in ("type", name) and not is_none(value)}:
        has_text = part.get(name) is not None
        problem = "in addition to its text; remove that" if has_text else f"but no {name}; rename it to {name}"
        raise refusal(location, "bad_part", f"has {names_of(others)} {problem}")
    return checked_text(part.get(name), name, location)


def _weight(weight: Any, location: str) -> float:
    if weight is None:
        return 1.0
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 <= weight <= _LARGEST_WEIGHT:
        problem = f"`weight` is {describe(weight)}; wanted a number from 0 to {_LARGEST_WEIGHT}"
        raise refusal(location, "bad_weight", f"{problem}: 0 leaves the message out of the loss, 1 trains it")
    return float(weight)


def _joined(before: Message, call: Message, location: str) -> Message:
    """Returns one message that consists of an assistant's text and the tool call after it."""
    left, right = {"weight": before.weight, **before.fields}, {"weight": call.weight, **call.fields}
    for key in (left.keys() & right.keys()) - {"tool_calls"}:
        if left[key] != right[key]:
            problem = f"`{key}` is {describe(right[key])} here and {describe(left[key])} before, in one message"
            raise refusal(location, "turns_differ", f"{problem}: give both the same")
    calls = [*before.fields.get("tool_calls", ()), *call.fields["tool_calls"]]
    return replace(before, fields={**before.fields, **call.fields, "tool_calls": calls})
