"""The ids and roles that a row should have: the tokenizer's own template, or a prompt and its completion as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from sftron.data.chat.reference import reference_ids
from sftron.data.chat.template import TemplateError
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.formats.messages import with_system
from sftron.data.formats.table import FORMATS, Format, RowFormat
from sftron.data.formats.tools import parse_tools
from sftron.data.formats.values import NamedRow
from sftron.data.types import Conversation, ConversationKey, DataError, Message, Role, TokenizedConversation, Turn


@dataclass(frozen=True, slots=True)
class PlainText:
    """A row of text without messages: all of it, or a prompt and its completion."""

    text: str
    num_prompt: int = 0
    """The number of characters of the prompt."""
    has_roles: bool = False


Content = Conversation | PlainText


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """The expected ids and roles of a row."""

    content: Content
    ids: np.ndarray
    """int32 [n]."""
    tokens: TokenizedConversation | None
    """The roles of the ids; None for text without roles, and where forged control tokens make them unknown."""
    is_declared: bool = True
    """Whether the row holds messages, or a prompt and a completion, and no other text that could have been trained."""
    is_forged: bool = False
    """Whether these are the ids of apply_chat_template although a text spells a control token."""
    problem: str = ""
    """Why the template cannot be followed; the roles are then found by searching for the texts."""
    reference: Truth | None = None
    """The truth of apply_chat_template, where it differs as a text spells a control token."""
    lacks_tools: bool = False
    """Whether these are the ids of a row without its tools."""

    @property
    def excerpt(self) -> str:
        text = self.content.text if isinstance(self.content, PlainText) else (self.content.messages[0].content or "")
        return " ".join(text.split())[:60]

    def last_alone(self) -> Truth:
        """Returns the truth in which only the last answer is to be trained."""
        if self.tokens is None or self.tokens.token_weights is not None:
            return self
        weights = np.ones(len(self.ids), dtype=np.float32)
        turns = [turn for turn in self.tokens.turns if turn.role is Role.ASSISTANT]
        if len(turns) > 1:
            before = turns[-2].end if turns[-2].stop is None else turns[-2].stop + 1
            weights[:before] = 0
        return replace(self, tokens=replace(self.tokens, token_weights=weights))

    def difference(self, ids: np.ndarray, decode: Callable[[Iterable[int]], str]) -> str:
        """Describes where `ids` first differ from these."""
        length = min(len(ids), len(self.ids))
        different = np.flatnonzero(ids[:length] != self.ids[:length])
        at = int(different[0]) if len(different) else length
        found, expected = (decode(each[at : at + 6]) for each in (ids, self.ids))
        return f"token {at} begins {found!r}, and the template writes {expected!r}"


class Encoder:
    """Encodes rows as the trainer's tokenizer and template should.

    Marks of generated text (`{% generation %}`) are removed from the template, so that the roles are those that its
    generation prompt shows, wherever the marks are.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.refused = tokenizer, Counter[str]()
        self.problem = ""
        """Why no conversation can be encoded; "" if some can."""
        self.chat: ChatTokenizer | None = None
        if not tokenizer.chat_template:
            self.problem = "the tokenizer has no chat template"
            return
        try:
            template = _without_marks(tokenizer.chat_template)
            self.chat = ChatTokenizer(tokenizer, template)
            with suppress(Exception):  # a template that refuses the probe; each row is tried, and its refusal counted
                # An answer may hold control tokens that the template does not write itself, such as those of tools.
                free = self.chat.control_ids - set(reference_ids(self.chat, _PROBE))
                allowed = {name: {self.decode([n]) for n in free} for name in _MODEL_NAMES}
                self.chat = ChatTokenizer(tokenizer, template, allow_control_tokens=allowed)
        except TemplateError as error:
            self.problem = str(error)

    @cached_property
    def blank_ids(self) -> set[int]:
        """The ids of line breaks and spaces, with which a template may end."""
        found = (self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("\n", "\n\n", " "))
        return {ids[0] for ids in found if len(ids) == 1}

    @cached_property
    def special_ids(self) -> set[int]:
        return set(self.tokenizer.all_special_ids)

    def decode(self, ids: Iterable[int]) -> str:
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(map(int, ids)), **options))

    def truth(self, content: Content) -> Truth | None:
        """Returns the ids and roles of a row; None, counted with its reason, if it cannot be rendered."""
        if isinstance(content, PlainText):
            return self._of_text(content)
        if self.chat is None:
            self.refused[self.problem] += 1
            return None
        try:
            tokens, problem = self.chat.encode(content), ""
        except (DataError, TemplateError) as error:
            problem = str(error).removeprefix(f"{content.location}: ")
            try:
                tokens = self._searched(content)
            except Exception as refusal:  # templates raise exceptions of any kind
                self.refused[str(refusal).splitlines()[0][:120] if str(refusal) else problem] += 1
                return None
        truth = Truth(content, tokens.input_ids, tokens, problem=problem)
        if not tokens.holds_control_text:
            return truth
        ids = np.array(reference_ids(self.chat, content), dtype=np.int32)
        return replace(truth, reference=Truth(content, ids, None, is_forged=True))

    def truths(self, content: Content) -> list[Truth]:
        """Returns the truth of a row, and the truth without its tools if the template writes them; none if it cannot
        be rendered.
        """
        if (truth := self.truth(content)) is None:
            return []
        if not isinstance(content, Conversation) or not content.tools:
            return [truth]
        refused = Counter(self.refused)
        bare = self.truth(replace(content, tools=()))
        self.refused = refused  # it is no row of the data
        if bare is None or np.array_equal(bare.ids, truth.ids):
            return [truth]
        return [truth, replace(bare, lacks_tools=True)]

    def _of_text(self, content: PlainText) -> Truth:
        """Returns the truth of a text; the answer begins with the first token that has no character of the prompt."""
        bos, eos = self.tokenizer.bos_token, self.tokenizer.eos_token
        text = content.text
        if content.has_roles and eos and not text.endswith(eos):
            text += eos  # an answer ends with it, whoever adds it
        # A tokenizer's own beginning-of-text token is right, unless the text has one already.
        ids, spans = self._encoded(text, special=not (bos and text.startswith(bos)))
        if not content.has_roles:
            return Truth(content, ids, None, is_declared=False)
        roles = np.full(len(ids), Role.USER, dtype=np.uint8)
        answer = np.array([start >= content.num_prompt and end > start for start, end in spans], dtype=bool)
        roles[answer] = Role.ASSISTANT
        first = int(np.argmax(answer)) if answer.any() else len(ids)
        has_stop = bool(len(ids)) and ids[-1] == self.tokenizer.eos_token_id
        turn = Turn(Role.ASSISTANT, first, len(ids) - has_stop, len(ids) - 1 if has_stop else None)
        return Truth(content, ids, TokenizedConversation(ids, roles, (turn,), ConversationKey(0, 0)))

    def _searched(self, content: Conversation) -> TokenizedConversation:
        """Returns the roles by searching for the texts in the rendering, for a template that cannot be followed."""
        assert self.chat is not None
        messages = self.chat.template_for(content).plain_messages(content.messages)
        tools = [dict(tool) for tool in content.tools] or None
        text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        ids, spans = self._encoded(text)
        roles, turns, at, num_boundary = np.full(len(ids), Role.TEMPLATE, dtype=np.uint8), [], 0, 0
        for message in content.messages:
            wanted = (message.content or "").strip()
            start = text.find(wanted, at)
            if start < 0:
                raise TemplateError("the template does not write a message as it is")
            at = start + len(wanted)
            own = [n for n, (first, end) in enumerate(spans) if first >= start and end <= at and end > first]
            roles[own] = message.role
            first, last = (own[0], own[-1] + 1) if own else (0, 0)
            stop = last if last < len(ids) and int(ids[last]) in self.chat.control_ids else None
            if stop is not None:
                roles[stop] = message.role
            turns.append(Turn(message.role, first, last, stop))
            num_boundary += bool(own) and first > 0 and spans[first][0] > start
        return TokenizedConversation(ids, roles, tuple(turns), content.key, num_boundary)

    def _encoded(self, text: str, *, special: bool = False) -> tuple[np.ndarray, list[tuple[int, int]]]:
        encoded = self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        return np.array(encoded["input_ids"], dtype=np.int32), encoded["offset_mapping"]


_PROBE = Conversation(
    (Message(Role.USER, "Hi"), Message(Role.ASSISTANT, "Yo"), Message(Role.USER, "Hi"), Message(Role.ASSISTANT, "Yo")),
    ConversationKey(0, 0),
    "a probe",
)
_MODEL_NAMES = ("assistant", "reasoning", "tool_call")
_MARK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


def _without_marks(template: Any) -> Any:
    """Returns the template with a statement that does nothing in place of each mark of generated text."""
    if isinstance(template, Mapping):
        return {name: _without_marks(each) for name, each in template.items()}
    return _MARK.sub(lambda found: f"{{%{found[1]} {'endif' if found[2] else 'if true'} {found[3]}%}}", template)


def read_row(row: Mapping[str, Any], text_field: str = "text") -> Iterator[Content]:
    """Yields what a row of a data set may stand for, what it declares first; nothing for a row of ids alone.

    Rows are read as they are: roles in any order.
    """
    row = {name: value for name, value in row.items() if value is not None}
    for name in _FORMATS:
        parse = FORMATS[name].parse
        if parse is not None and RowFormat(name).fits(row):
            named = NamedRow(row, name, {}, "a row")
            with suppress(DataError):
                messages = tuple(message for _, message in with_system(parse(named, "{query}"), named))
                tools = parse_tools(row.get("tools"), "tools", "a row")
                yield Conversation(messages, ConversationKey(0, 0), "a row", tools)
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        yield PlainText(row["prompt"] + row["completion"], len(row["prompt"]), has_roles=True)
    if isinstance(row.get(text_field), str):
        yield PlainText(row[text_field])


_FORMATS: tuple[Format, ...] = (
    "messages",
    "sharegpt",
    "prompt_completion",
    "query_response",
    "question_answer",
    "alpaca",
)
