"""Conversations that tell the families of chat templates apart, as transformers takes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Given:
    """A conversation as transformers takes it. needs: what a template has to take for it (see Family)."""

    name: str
    messages: tuple[JsonObject, ...]
    needs: frozenset[str] = frozenset()
    tools: tuple[JsonObject, ...] = ()


def given(name: str, *messages: JsonObject, needs: str = "") -> Given:
    """A conversation that needs tools has TOOLS."""
    return Given(name, messages, frozenset(needs.split()), tuple(TOOLS if "tools" in needs else ()))


def user(content: str) -> JsonObject:
    return {"role": "user", "content": content}


def answer(content: str, **fields: Any) -> JsonObject:
    return {"role": "assistant", "content": content, **fields}


def call(name: str = "weather", identifier: str = "a1b2c3d4e", **arguments: Any) -> JsonObject:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: JsonObject, **fields: Any) -> JsonObject:
    return answer("", **fields, tool_calls=list(calls))


def result(content: str, identifier: str = "a1b2c3d4e") -> JsonObject:
    return {"role": "tool", "content": content, "tool_call_id": identifier, "name": "weather"}


SYSTEM = {"role": "system", "content": "Be kind."}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Tells.", "parameters": CITY}}
    for name in ("weather", "time")
]
CODE = "```python\ndef f(x):\n\treturn {'a': \"<b>\"}  # 12345\n```\n"
SECOND = "b1b2c3d4e"
ROME = call(city="Rome")
ROUNDS = [user("Who?"), answer("Pip."), user("Why?"), answer("It grows.")]
THOUGHTS = [
    *(user("Who?"), answer("Pip.", reasoning_content="They ask.")),
    *(user("Why?"), answer("It grows.", reasoning_content="\nSo.\n")),
]
LATER_CALLS = [
    *(user("Hi"), answer("Hello."), user("Weather?"), calling(ROME), result("25")),
    *(calling(call("time", city="Rome")), result("noon"), answer("25 at noon."), user("Thanks"), answer("Welcome.")),
]
THOUGHTS_AND_CALLS = [
    *(user("Weather?"), calling(ROME, reasoning_content="I need it."), result("25")),
    answer("25.", reasoning_content="Now I know."),
]
CHAIN = [
    *(user("Weather?"), calling(ROME), result("25"), calling(call("time", city="Rome")), result("noon")),
    *(calling(call(city="Oslo"), call("time", SECOND, city="Oslo")), result("8"), result("noon", SECOND)),
    calling(call(city="Pisa")),
]
CONVERSATIONS = [
    given("one round", user("Who?"), answer("Pip.")),
    given("three rounds", user("Who?"), answer("Pip."), user("Why?"), answer("It grows."), user("Ah"), answer("Yes.")),
    given("system", SYSTEM, user("Who?"), answer("Pip."), user("Why?"), answer("It grows."), needs="system"),
    given("the same words again", user("Pip."), answer("Pip."), user("Pip."), answer("Pip.")),
    given("white space", user("  Who? "), answer("  Pip. \n"), user("\n\nWhy?\n"), answer("\n\nIt grows.\n\n")),
    given("an empty answer", user("Who?"), answer(""), user("Well?"), answer("Pip.")),
    given("unicode", user("e\u0301 你好 🌱👩‍💻 \u00a0\u200d"), answer("naïve 世界 ﬁ 🌱"), user("🌱"), answer("🌱")),
    given("code", user(CODE), answer(CODE + CODE)),
    given("two questions", user("Who?"), user("Who is it?"), answer("Pip.")),
    given("thought", user("Who?"), answer("Pip.", reasoning_content="They ask.\nI tell."), needs="reasoning"),
    given("thoughts", *THOUGHTS, needs="reasoning"),
    given("tools unused", user("Who?"), answer("Pip."), needs="tools"),
    given(
        "a call",
        *(user("Weather?"), calling(call(city='Saint-Étienne "x" <b>&\'\n')), result('{"t": 18}'), answer("It is 18.")),
        needs="tools",
    ),
    given("a last call", user("Weather?"), calling(ROME), needs="tools"),
    given("a call without arguments", user("Go"), calling(call()), result("ok"), answer("Done."), needs="tools"),
    given(
        "calls at once",
        *(user("Weather?"), calling(ROME, call(identifier=SECOND, city="Oslo"))),
        *(result("25"), result("8", SECOND), answer("25 and 8.")),
        needs="tools",
    ),
    given("calls one after another", *LATER_CALLS, needs="tools"),
    given("thoughts and calls", *THOUGHTS_AND_CALLS, needs="tools reasoning"),
    given("a chain of calls", *CHAIN, needs="tools"),
]
PROMPTED = [
    given("a system that decides", {"role": "system", "content": "/no_think Be kind."}, *ROUNDS, needs="system"),
    given("a system that only decides", {"role": "system", "content": "/no_think"}, *ROUNDS, needs="system"),
    given(
        "results without text",
        *(user("Weather?"), calling(ROME), result("25"), result(""), result(""), answer("25.")),
        needs="tools",
    ),
]
"""Those whose generation prompt depends on more than the roles and the fields of messages, under some templates."""


def _spelled(each: Given) -> Iterator[Given]:
    """A conversation with calls, whose messages with calls have an empty content, none, or one that is a text."""
    yield each
    if any("tool_calls" in message for message in each.messages):
        absent = ({k: v for k, v in m.items() if k != "content" or "tool_calls" not in m} for m in each.messages)
        yield replace(each, name=f"{each.name}, content absent", messages=tuple(absent))
        present = ({**m, "content": "I look."} if "tool_calls" in m else m for m in each.messages)
        yield replace(each, name=f"{each.name}, content present", messages=tuple(present))


SPELLED_CONVERSATIONS = [spelled for each in [*CONVERSATIONS, *PROMPTED] for spelled in _spelled(each)]
