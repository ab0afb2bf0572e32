"""Law 2 on the user's own rows: what is trained, against what transformers' renderings leave to the model.

Each answer's prompt is rendered by `apply_chat_template`, and its tokens are compared with the conversation's; no role
that was recorded here is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sftron.data.chat.template_check import own_ids, own_marks, without_control_text
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.labels import DEFAULT_TRAINED_ROLES
from sftron.data.prepare import Preparation
from sftron.data.types import IGNORE_INDEX, Conversation, LabeledConversation, Role, TokenizedConversation

MOST_NOT_COMPARED = 0.05
"""The largest share of the conversations that may be left out of the comparison before that is a failure."""


class CannotCompareError(ValueError):
    """transformers' renderings do not show what of a conversation the model has to write. The message is the reason, in
    words that are the same for all rows."""


@dataclass(slots=True)
class MaskCount:
    """Masks by how they compare. wrong: the first difference of each that is not equal. not_compared: by reason."""

    num_equal: int = 0
    wrong: list[str] = field(default_factory=list)
    not_compared: Counter[str] = field(default_factory=Counter)

    def add(
        self,
        preparation: Preparation,
        conversation: Conversation,
        tokenized: TokenizedConversation,
        labeled: LabeledConversation,
        stop_ids: Collection[int],
    ) -> None:
        """Compares one conversation. stop_ids: the ids that end an answer."""
        try:
            difference = _difference(preparation, conversation, tokenized, labeled, stop_ids)
        except CannotCompareError as error:
            self.not_compared[str(error)] += 1
            return
        if difference:
            self.wrong.append(difference)
        else:
            self.num_equal += 1

    @property
    def num_compared(self) -> int:
        return self.num_equal + len(self.wrong)

    @property
    def num_rows(self) -> int:
        return self.num_compared + self.not_compared.total()

    def as_dict(self) -> dict[str, Any]:
        return {"num_equal": self.num_equal, "wrong": self.wrong, "not_compared": dict(self.not_compared)}

    @property
    def problems(self) -> list[str]:
        """What makes this data unfit to train on, or leaves that open, one sentence each."""
        problems = []
        if self.wrong:
            problems.append(f"{len(self.wrong):,} of {self.num_compared:,} masks differ; the first: {self.wrong[0]}.")
        if self.not_compared.total() > MOST_NOT_COMPARED * self.num_rows:
            problems.append(
                f"{self.not_compared.total():,} of {self.num_rows:,} masks could not be compared with transformers' "
                f"renderings, and at most {MOST_NOT_COMPARED:.0%} may be left out: {self.reasons}."
            )
        return problems

    @property
    def reasons(self) -> str:
        return "; ".join(f"{count:,} as {reason}" for reason, count in self.not_compared.most_common())


def _difference(
    preparation: Preparation,
    conversation: Conversation,
    tokenized: TokenizedConversation,
    labeled: LabeledConversation,
    stop_ids: Collection[int],
) -> str:
    """The first token whose label is not as it should be; "" if none is."""
    chat_tokenizer, targets = preparation.chat_tokenizer, preparation.targets
    if tokenized.holds_control_text:  # its ids differ from transformers', on purpose
        conversation = without_control_text(chat_tokenizer, conversation)
        tokenized = chat_tokenizer.encode(conversation)
        labeled = preparation.label(tokenized)
    trained = np.append(False, labeled.labels[:-1] != IGNORE_INDEX)
    if not preparation.train_on_completions_only:
        weights = tokenized.token_weights
        expected = np.ones(len(tokenized), dtype=bool) if weights is None else weights > 0
        expected[0] = False
    elif targets.roles == DEFAULT_TRAINED_ROLES:
        expected = generated_tokens(chat_tokenizer, conversation, tokenized, stop_ids, targets.last_turn_only)
    else:  # which parts of an answer are wanted is the roles' to say; all parts together are compared
        trained = np.isin(tokenized.role_ids, list(DEFAULT_TRAINED_ROLES))
        plain = replace(conversation, messages=tuple(replace(each, weight=1.0) for each in conversation.messages))
        expected = generated_tokens(chat_tokenizer, plain, tokenized, stop_ids)
    differing = np.flatnonzero(trained != expected)
    if not len(differing):
        return ""
    at = int(differing[0])
    text = chat_tokenizer.decode(tokenized.input_ids[at : at + 6].tolist())
    what = "trained, and the prompt would hold it" if trained[at] else "not trained, and the model has to say it"
    return f"{conversation.location}: token {at}, {text!r}, is {what}"


def generated_tokens(
    chat_tokenizer: ChatTokenizer,
    conversation: Conversation,
    tokenized: TokenizedConversation,
    stop_ids: Collection[int],
    last_turn_only: bool = False,
) -> np.ndarray:
    """bool [n]: which tokens the model has to write, but for messages of weight 0. Raises CannotCompareError."""
    ids, is_generated = tokenized.input_ids.tolist(), np.zeros(len(tokenized), dtype=bool)
    if chat_tokenizer.template_for(conversation).has_marks:
        if last_turn_only:
            raise CannotCompareError("the template's marks do not say which turn is the last")
        weights = tokenized.token_weights
        return np.array(own_marks(chat_tokenizer, conversation), dtype=bool) & (
            True if weights is None else weights > 0
        )
    numbers = [n for n, message in enumerate(conversation.messages) if message.role is Role.ASSISTANT]
    if last_turn_only:
        numbers = [n for n in numbers if conversation.messages[n].weight > 0][-1:]
    end = 0
    for number in numbers:
        start, end = _span(chat_tokenizer, conversation, number, ids, stop_ids, end)
        is_generated[start:end] = conversation.messages[number].weight > 0
    return is_generated


def _span(
    chat_tokenizer: ChatTokenizer,
    conversation: Conversation,
    number: int,
    ids: list[int],
    stop_ids: Collection[int],
    after: int,
) -> tuple[int, int]:
    """Tokens [start, end) of an answer: behind its prompt, up to and with its stop token. after: of the last answer."""

    def rendered(num_messages: int, *, prompt: bool = False) -> list[int]:
        part = replace(conversation, messages=conversation.messages[:num_messages])
        try:
            return own_ids(chat_tokenizer, part, add_generation_prompt=prompt)
        except Exception:  # templates raise whatever they like
            raise CannotCompareError("the template refuses the conversation before an answer") from None

    prompt, closed, until = rendered(number, prompt=True), rendered(number), rendered(number + 1)
    start = _num_shared(prompt, ids)
    if start < len(prompt):
        start = _start_behind(chat_tokenizer, prompt, ids, start)
        if start <= (num_closed := _num_shared(prompt, closed)):
            start = _end_of_longest_suffix(prompt, ids, after, len(prompt) - num_closed)
    stops = [place + 1 for place in range(start, len(ids)) if ids[place] in stop_ids]
    within = [end for end in stops if end <= len(until)] if ids[: len(until)] == until else stops[:1]
    if not within:
        raise CannotCompareError("none of the model's own stop tokens follows an answer")
    return start, within[-1]


def _start_behind(chat_tokenizer: ChatTokenizer, prompt: list[int], ids: list[int], num_shared: int) -> int:
    """Where the model begins that is asked with a prompt whose tokens are not all in the conversation."""
    decode = chat_tokenizer.decode
    text = decode(prompt)
    if decode(ids).startswith(text):  # a token that ends behind the prompt was never the model's to write
        return next(n for n in range(num_shared, len(ids) + 1) if len(decode(ids[:n])) >= len(text))
    start = num_shared
    while start:
        place = len(decode(prompt[:start]))
        if text[place - 1] in "\n >]" or text[place] in "\n <[":
            break
        start -= 1  # half a word, or of a tag: "<" begins "<think>" as well as "<tool_call>"
    return start


def _end_of_longest_suffix(prompt: list[int], ids: list[int], after: int, num_header: int) -> int:
    """Where a prompt ends whose beginning the template writes otherwise once more follows, as it moves the tools or
    leaves thoughts out: behind the most of its last tokens that stand in the conversation, if these are more than the
    header, and stand in one place."""
    best, places = num_header, list[int]()
    for end in (n + 1 for n in range(after, len(ids)) if ids[n] == prompt[-1]):
        pairs = zip(reversed(prompt), reversed(ids[:end]), strict=False)
        length = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(prompt), end))
        if length > best:
            best, places = length, [end]
        elif length == best:
            places.append(end)
    if len(places) != 1 or best == num_header:
        raise CannotCompareError("the template writes what comes before an answer otherwise once more follows")
    return places[0]


def _num_shared(one: list[int], other: list[int]) -> int:
    """The number of tokens that both begin with."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
