"""Lists of messages, OpenAI's {role, content} and ShareGPT's {from, value}, read strictly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sftron.data.chat.template_input import REASONING_FIELDS
from sftron.data.formats.row_reader import check_json, checked_text, describe, names_of, refusal
from sftron.data.formats.tool_calls import calls_from_text, check_tool_calls
from sftron.data.sources.json_text import excerpt
from sftron.data.types import Message, Role

Numbered = tuple[int, Message]
"""A message, and where it begins in the row's list, from 1; 0 for one that the list does not hold."""

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}
_SHAREGPT_ROLES = {
    "system": Role.SYSTEM,
    "human": Role.USER,
    "user": Role.USER,
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bing", "bard"), Role.ASSISTANT),
    **dict.fromkeys(("function_call", "tool_call"), Role.TOOL_CALL),
    **dict.fromkeys(("observation", "tool", "function_response", "tool_response"), Role.TOOL),
}
_PLAIN_KEYS = {"role", "content"}
_LARGEST_WEIGHT = 1_000_000
_FORMAT_OF = {"role": "messages", "from": "sharegpt"}
_TRAINING_KEYS = {
    *("train", "trained", "trainable", "training", "train_on", "train_detail", "training_detail", "is_trained"),
    *("loss", "loss_mask", "loss_weight", "loss_scale", "mask", "masked", "is_masked"),
}
"""How other trainers mark what is trained; each means something else, so none is passed over."""
_FACTOR_KEYS = {"loss_weight", "loss_scale"}
"""Those that hold a number as `weight` does."""


def parse_messages(turns: Sequence[Any], location: str, first_number: int = 1) -> list[Numbered]:
    """Messages of {role, content, ...}. Their order is for `check_order`. Raises DataError."""
    messages = []
    for number, turn in enumerate(turns, start=first_number):
        place = f"{location}: message {number}"
        role = _ROLES[_role_name(turn, "role", "content", _ROLES, place)]
        messages.append((number, _parse_message(turn, role, place)))
    return messages


def parse_sharegpt(turns: Sequence[Any], location: str) -> list[Numbered]:
    """Turns of {from, value, ...}. A call of a function is part of the assistant's message that it follows, or begins
    one: what an assistant says and calls without a break is one message, as OpenAI has it. Raises DataError."""
    messages: list[Numbered] = []
    may_join = False
    for number, turn in enumerate(turns, start=1):
        place = f"{location}: message {number}"
        role = _SHAREGPT_ROLES[_role_name(turn, "from", "value", _SHAREGPT_ROLES, place)]
        for key in ("role", "content", "tool_calls")[: 3 if role is Role.TOOL_CALL else 2]:
            if turn.get(key) is not None:
                raise refusal(place, "two_names", f"has `{key}` beside from and value; keep one of the two forms")
        renamed = {key: value for key, value in turn.items() if key not in ("from", "value")}
        if role is Role.TOOL_CALL:
            calls = calls_from_text(_value(turn, place), f"{place}: `value`")
            message = _parse_message(renamed | {"tool_calls": calls}, Role.ASSISTANT, place)
            if may_join:
                number, before = messages.pop()
                message = _join(before, message, place)
        else:
            message = _parse_message(renamed | {"content": _value(turn, place)}, role, place)
        messages.append((number, message))
        may_join = message.role is Role.ASSISTANT
    return messages


def with_system(messages: list[Numbered], system: str, column: str, location: str) -> list[Numbered]:
    """Messages that begin with the text of the row's column of that name, where it holds one."""
    if not system:
        return messages
    first = messages[0][1]
    if first.role is not Role.SYSTEM:
        return [(0, Message(Role.SYSTEM, system)), *messages]
    if first.content != system:
        problem = (
            f"the column `{column}` and message 1 (system) differ: {excerpt(system)}, {excerpt(first.content or '')}"
        )
        raise refusal(location, "two_system_texts", f"{problem}; keep one")
    return messages


def check_order(messages: Sequence[Numbered], location: str) -> None:
    """A system message or none; then user and assistant by turns, but that tool messages, and then an assistant's,
    follow an assistant's tool_calls. Raises DataError with reason wrong_role_order."""
    before: Numbered | None = None
    for number, message in messages:
        role = message.role
        if role is Role.SYSTEM:
            problem = None if before is None else "is not the first; move it there, or into a user message"
        elif before is None or before[1].role is Role.SYSTEM:
            problem = None if role is Role.USER else "comes before any user message; add the question, or remove it"
        else:
            problem = _clash(before[1], role, f"message {before[0]} ({_name(before[1])})")
        if problem is not None:
            raise refusal(location, "wrong_role_order", f"message {number} ({_name(message)}) {problem}")
        before = number, message


def _clash(before: Message, role: Role, name: str) -> str | None:
    """What is wrong with a message of this role after the one before, whose name in messages is `name`."""
    if before.role is Role.ASSISTANT and before.fields.get("tool_calls"):
        expected = (Role.TOOL,)
        problem = f"follows {name}, whose tool_calls it does not answer: the tool result is missing; add a tool message"
    elif role is Role.TOOL:
        expected = (Role.TOOL,) if before.role is Role.TOOL else ()
        problem = f"follows {name}, which has no tool_calls; write the call as tool_calls, or remove the message"
    elif before.role is Role.TOOL:
        expected = (Role.ASSISTANT,)
        problem = f"follows {name}; add what the assistant says to the result"
    else:
        expected = (Role.ASSISTANT,) if before.role is Role.USER else (Role.USER,)
        problem = f"follows {name}; join the two, or remove one"
    return None if role in expected else problem


def _name(message: Message) -> str:
    return message.role_name or message.role.name.lower()


def _role_name(turn: Any, role_key: str, content_key: str, accepted: Mapping[str, Role], location: str) -> str:
    wanted = f"{{{role_key}, {content_key}}}"
    if not isinstance(turn, Mapping):
        raise refusal(location, "not_a_message", f"found {describe(turn)}; wanted an object {wanted}")
    if role_key not in turn:
        other = next(
            (f"; for turns of {{{key}, ...}} set `format: {name}`" for key, name in _FORMAT_OF.items() if key in turn),
            "",
        )
        raise refusal(location, "missing_key", f"has no `{role_key}`, only {names_of(turn)}; wanted {wanted}{other}")
    name = turn[role_key]
    if isinstance(name, str) and name in accepted:
        return name
    remedy = "; rename it to tool" if name in ("function", "ipython") else ""
    problem = f"`{role_key}` is {describe(name)}; wanted one of {', '.join(accepted)}{remedy}"
    raise refusal(location, "unknown_role", problem)


def _value(turn: Mapping[str, Any], location: str) -> str:
    if turn.get("value") is None:
        found = "`value` is null" if "value" in turn else f"has no `value`, only {names_of(turn)}"
        raise refusal(location, "null_content", f"{found}; write the text, or remove the row")
    return checked_text(turn["value"], "value", location)


def _parse_message(turn: Mapping[str, Any], role: Role, location: str) -> Message:
    """The turn's keys but `role`, as Message has them. A null is an absent key, as it is to transformers."""
    if turn.keys() == _PLAIN_KEYS and isinstance(turn["content"], str) and turn["role"] != "developer":
        return Message(role, checked_text(turn["content"], "content", location))
    others = turn.keys() - {"role", "content", "weight"}
    fields = {key: _plain(value) for key, value in turn.items() if key in others and value is not None}
    for key, value in fields.items():
        check_json(value, checked_text(key, "a key", location), location)
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
            raise refusal(
                location, "bad_tool_calls", f"has tool_calls, and its role is {role.name.lower()}; wanted assistant"
            )
    reasoning = [checked_text(fields[key], key, location) for key in REASONING_FIELDS if key in fields]
    parts = _parts(turn.get("content"), location)
    content = "\n".join(parts) if parts else _content(turn.get("content"), location)
    may_lack_content = role is Role.ASSISTANT and (fields.get("tool_calls") or any(reasoning))
    if content is None and not may_lack_content:
        found = "`content` is null" if "content" in turn else f"has no `content`, only {names_of(turn)}"
        raise refusal(location, "null_content", f"{found}; write the text, or remove the row")
    role_name = "developer" if turn.get("role") == "developer" else ""
    return Message(role, content, fields, _weight(turn.get("weight"), location), parts, role_name)


def _plain(value: Any) -> Any:
    """What JSON has no word for, such as a date of Parquet, is to templates what transformers makes of it."""
    return value if isinstance(value, str | int | float | list | Mapping) else f"<{type(value).__name__}>"


def _content(content: Any, location: str) -> str | None:
    return None if content is None or content == [] else checked_text(content, "content", location)


def _parts(content: Any, location: str) -> tuple[str, ...]:
    """The texts of a content that is a list of parts; anything but text is refused by the name of its type."""
    texts = []
    parts: list[Any] = content if isinstance(content, list) else []
    for number, part in enumerate(parts, start=1):
        place = f"{location}: part {number} of `content`"
        if not isinstance(part, Mapping):
            raise refusal(place, "bad_part", f"is {describe(part)}; wanted {{type, text}}")
        if (kind := part.get("type")) != "text":
            found = f"of type {excerpt(kind) if isinstance(kind, str) else describe(kind)}"
            raise refusal(place, "unsupported_part", f"is {found}; only parts of type text are read: remove the row")
        others = {key: value for key, value in part.items() if key not in ("type", "text") and value is not None}
        if others and part.get("text") is None:
            texts_of_others = [key for key, value in others.items() if isinstance(value, str)]
            remedy = f"rename `{names_of(others)}` to text" if len(texts_of_others) == len(others) == 1 else "write it"
            raise refusal(place, "bad_part", f"has no `text`, only {names_of(part)}; {remedy}")
        if others:
            raise refusal(place, "bad_part", f"has {names_of(others)} in addition to its text; remove that")
        texts.append(checked_text(part.get("text"), "text", place))
    return tuple(texts)


def _weight(weight: Any, location: str) -> float:
    if weight is None:
        return 1.0
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 <= weight <= _LARGEST_WEIGHT:
        problem = f"`weight` is {describe(weight)}; wanted a number from 0 to {_LARGEST_WEIGHT}"
        raise refusal(location, "bad_weight", f"{problem}: 0 leaves the message out of the loss, 1 trains it")
    return float(weight)


def _join(before: Message, call: Message, location: str) -> Message:
    """One message of what was said and of the call after it."""
    ours, theirs = {"weight": before.weight, **before.fields}, {"weight": call.weight, **call.fields}
    for key in (ours.keys() & theirs.keys()) - {"tool_calls"}:
        if ours[key] != theirs[key]:
            problem = f"`{key}` is {describe(theirs[key])} here and {describe(ours[key])} before; they are one message"
            raise refusal(location, "turns_differ", f"{problem}: give both the same")
    calls = [*before.fields.get("tool_calls", ()), *call.fields["tool_calls"]]
    return replace(before, fields={**before.fields, **call.fields, "tool_calls": calls})
