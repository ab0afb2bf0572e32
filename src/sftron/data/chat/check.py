"""Checks laws 1 and 2 on the user's own rows: compares ids and loss masks with transformers' renderings.

The ids must be those of `apply_chat_template`. The trained tokens must be those that the model generates: the prompt of
each answer is rendered with `apply_chat_template`, and the generated tokens are those of the conversation after it. The
comparison does not use the recorded roles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from sftron.data.chat.reference import apply_chat_template, reference_ids
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.labels import DEFAULT_TRAINED_ROLES, Targets, label_conversations
from sftron.data.types import (
    IGNORE_INDEX,
    Conversation,
    DataError,
    Document,
    LabeledConversation,
    Message,
    Role,
    TokenizedConversation,
)

MOST_NOT_COMPARED = 0.05
"""The largest share of the conversations that may be excluded from the comparison; a larger one is a failure."""


# --- Ids ---


def require_reference_ids(
    chat_tokenizer: ChatTokenizer, conversation: Conversation | Document, tokenized: TokenizedConversation
) -> None:
    """Raises DataError, with the first difference, unless the ids are those of apply_chat_template, or of
    `tokenizer(text)` for a document.

    The ids of a text that spells a control token differ by design (law 3). Such a conversation is compared with spaces
    in place of these strings.
    """
    judge = "apply_chat_template"
    if isinstance(conversation, Document):
        judge = "tokenizer(text)"
        document, tokenized = _document_without_control_text(chat_tokenizer, conversation, tokenized)
        reference = chat_tokenizer.documents.reference_ids(document)
    else:
        conversation, tokenized = _without_control_text(chat_tokenizer, conversation, tokenized)
        reference = reference_ids(chat_tokenizer, conversation)
    native = tokenized.input_ids.tolist()
    if native == reference:
        return
    at, decode = _num_shared(native, reference), chat_tokenizer.decode
    raise DataError(
        f"{conversation.location}: the ids differ from {judge} at token {at}: "
        f"native {native[at : at + 4]} {decode(native[at : at + 4])!r}, "
        f"the tokenizer's {reference[at : at + 4]} {decode(reference[at : at + 4])!r}, "
        f"after {decode(native[max(0, at - 8) : at])!r}. This tokenizer cannot be followed exactly; please report it "
        "with this message",
        reason="ids_differ",
    )


def _without_control_text(
    chat_tokenizer: ChatTokenizer, conversation: Conversation, tokenized: TokenizedConversation
) -> tuple[Conversation, TokenizedConversation]:
    """Returns the conversation with a space in place of each string that spells a control token."""
    if not tokenized.holds_control_text:
        return conversation, tokenized

    def cleaned(value: Any) -> Any:
        if isinstance(value, str):
            return chat_tokenizer.without_control_text(value)
        if isinstance(value, Mapping):
            return {cleaned(key): cleaned(item) for key, item in value.items()}
        return [cleaned(item) for item in value] if isinstance(value, (list, tuple)) else value

    messages = []
    for message in conversation.messages:
        parts = tuple(cleaned(part) for part in message.parts)
        content = "\n".join(parts) if parts else cleaned(message.content)
        messages.append(replace(message, content=content, parts=parts, fields=cleaned(message.fields)))
    tools, kwargs = tuple(cleaned(conversation.tools)), cleaned(conversation.template_kwargs)
    conversation = replace(conversation, messages=tuple(messages), tools=tools, template_kwargs=kwargs)
    return conversation, chat_tokenizer.encode(conversation)


def _document_without_control_text(
    chat_tokenizer: ChatTokenizer, document: Document, tokenized: TokenizedConversation
) -> tuple[Document, TokenizedConversation]:
    if not tokenized.holds_control_text:
        return document, tokenized
    document = replace(document, text=chat_tokenizer.without_control_text(document.text))
    (encoded,) = chat_tokenizer.documents.encode([document])
    if isinstance(encoded, DataError):
        raise encoded
    return document, encoded


# --- Masks ---


class CannotCompareError(ValueError):
    """transformers' renderings do not show which tokens of a conversation the model generates.

    The message is the reason, without details of the row, so that rows can be counted by reason.
    """


@dataclass(slots=True)
class MaskCount:
    """The results of comparing masks: equal, different, or not compared."""

    num_equal: int = 0
    wrong: list[str] = field(default_factory=list)
    """The first difference of each mask that differs."""
    not_compared: Counter[str] = field(default_factory=Counter)
    """The number of masks that could not be compared, by reason."""

    def add(
        self,
        chat_tokenizer: ChatTokenizer,
        targets: Targets | None,
        conversation: Conversation | Document,
        tokenized: TokenizedConversation,
        labeled: LabeledConversation,
        stop_ids: Collection[int],
    ) -> None:
        """Compares one conversation, or a document, all of which is to be trained but its first token.

        Args:
            targets: The trained tokens; None if every token is trained.
            stop_ids: The ids that end an answer.
        """
        if tokenized.holds_control_text and isinstance(conversation, Conversation):
            conversation, tokenized = _without_control_text(chat_tokenizer, conversation, tokenized)
            is_narrowed = targets is not None
            (labeled,) = label_conversations([tokenized], targets or Targets(), train_on_completions_only=is_narrowed)
        trained = np.append(False, labeled.labels[:-1] != IGNORE_INDEX)
        try:
            if targets is None or isinstance(conversation, Document):
                expected = _has_weight(tokenized)
                expected[0] = False
            elif targets.roles == DEFAULT_TRAINED_ROLES:
                expected = generated_tokens(chat_tokenizer, conversation, tokenized, stop_ids, targets.last_turn_only)
            else:  # renderings do not show the roles within an answer, so whole answers are compared
                trained = np.isin(tokenized.role_ids, list(DEFAULT_TRAINED_ROLES))
                plain = replace(conversation, messages=tuple(replace(m, weight=1.0) for m in conversation.messages))
                expected = generated_tokens(chat_tokenizer, plain, tokenized, stop_ids)
        except CannotCompareError as error:
            self.not_compared[str(error)] += 1
            return
        if np.array_equal(trained, expected):
            self.num_equal += 1
        else:
            ids = tokenized.input_ids.tolist()
            self.wrong.append(f"{conversation.location}: {_difference(chat_tokenizer, ids, trained, expected)}")

    @property
    def num_compared(self) -> int:
        return self.num_equal + len(self.wrong)

    @property
    def num_rows(self) -> int:
        return self.num_compared + self.not_compared.total()

    def as_dict(self) -> dict[str, Any]:
        return {"num_equal": self.num_equal, "wrong": self.wrong, "not_compared": dict(self.not_compared)}

    @property
    def mistakes(self) -> list[str]:
        """A sentence about the masks that differ, if there are any."""
        if not self.wrong:
            return []
        return [
            f"{len(self.wrong):,} of {self.num_compared:,} masks differ; the first: {self.wrong[0]}. Give a template "
            "that marks what the model generates with {% generation %}, or another one (tokenizer.chat_template: "
            "FILE), and please report this one with this message."
        ]

    @property
    def problems(self) -> list[str]:
        """One sentence for each reason why the data cannot be trained on, or could not be checked well enough."""
        problems = self.mistakes
        if self.not_compared.total() > MOST_NOT_COMPARED * self.num_rows:
            problems.append(
                f"{self.not_compared.total():,} of {self.num_rows:,} masks could not be compared with transformers' "
                f"renderings, and at most {MOST_NOT_COMPARED:.0%} may be left out: {self.reasons}."
            )
        return problems

    @property
    def reasons(self) -> str:
        return "; ".join(f"{count:,} as {reason}" for reason, count in self.not_compared.most_common())


_NUM_SHOWN = 16
"""The number of tokens before and after a difference that are shown."""


def _difference(chat_tokenizer: ChatTokenizer, ids: list[int], trained: np.ndarray, expected: np.ndarray) -> str:
    """Returns a description of the first token whose label is wrong, and of the tokens around it."""
    at = int(np.flatnonzero(trained != expected)[0])
    what = "is trained, but is part of the prompt" if trained[at] else "is not trained, but the model must generate it"
    shown = slice(max(0, at - _NUM_SHOWN), at + _NUM_SHOWN)
    ours, theirs = (_with_marks(chat_tokenizer, ids[shown], mask[shown].tolist()) for mask in (trained, expected))
    return f"token {at}, {chat_tokenizer.decode(ids[at : at + 6])!r}, {what}: trained {ours!r}, generated {theirs!r}"


def _with_marks(chat_tokenizer: ChatTokenizer, ids: Sequence[int], is_marked: Sequence[bool]) -> str:
    """Returns the text of ids, with the marked ones between ⟦ and ⟧."""
    runs = groupby(zip(ids, is_marked, strict=True), key=itemgetter(1))
    texts = ((mark, chat_tokenizer.decode([token_id for token_id, _ in run])) for mark, run in runs)
    return "".join(f"⟦{text}⟧" if mark else text for mark, text in texts)


def generated_tokens(
    chat_tokenizer: ChatTokenizer,
    conversation: Conversation,
    tokenized: TokenizedConversation,
    stop_ids: Collection[int],
    last_turn_only: bool = False,
) -> np.ndarray:
    """Returns, as bool [n], whether the model generates each token; messages of weight 0 are excluded.

    Raises CannotCompareError if transformers' renderings do not show it.
    """
    if chat_tokenizer.template_for(conversation).has_marks:
        if last_turn_only:
            raise CannotCompareError("the template's marks do not show which turn is the last")
        return _marked_tokens(chat_tokenizer, conversation) & _has_weight(tokenized)
    messages, ids, is_generated = conversation.messages, tokenized.input_ids.tolist(), np.zeros(len(tokenized), bool)
    numbers = [n for n, message in enumerate(messages) if message.role is Role.ASSISTANT]
    if last_turn_only:
        numbers = [n for n in numbers if messages[n].weight > 0][-1:]

    def rendered(num_messages: int, **options: bool) -> list[int]:
        try:
            return reference_ids(chat_tokenizer, replace(conversation, messages=messages[:num_messages]), **options)
        except Exception:  # templates raise exceptions of any kind
            raise CannotCompareError("the template refuses the conversation before an answer") from None

    end, has_prompts = 0, "add_generation_prompt" in chat_tokenizer.template_for(conversation).source
    for number in numbers:
        prompt = rendered(number, add_generation_prompt=True)
        until = ids if number + 1 == len(messages) else rendered(number + 1)
        start = _end_of_prompt(chat_tokenizer, prompt, partial(rendered, number), ids, end)
        is_plain = not messages[number].fields  # beside a call, some templates leave out the content
        first_word = "".join((messages[number].content or "").split()[:1]) if is_plain else ""
        has_header = has_prompts or chat_tokenizer.decode(ids[start:]).lstrip().startswith(first_word)
        if not has_header and not _questions_end_in_header(chat_tokenizer, conversation):
            raise CannotCompareError("the template writes headers, but no generation prompts")
        stops = [position + 1 for position in range(start, len(ids)) if ids[position] in stop_ids]
        ends = [stop for stop in stops if stop <= len(until)] if ids[: len(until)] == until else stops[:1]
        if not ends:
            raise CannotCompareError("none of the model's own stop tokens follows an answer")
        end = ends.pop()
        # A stop token right after another one ends the whole text, as in Phi 3: the model has stopped before it.
        while ends and not chat_tokenizer.decode(ids[ends[-1] : end - 1]).strip():
            end = ends.pop()
        is_generated[start:end] = messages[number].weight > 0
    return is_generated


def _questions_end_in_header(chat_tokenizer: ChatTokenizer, conversation: Conversation) -> bool:
    """Returns whether a template without generation prompts writes more after a question than after an answer."""
    question, answer = Message(Role.USER, "Hi"), Message(Role.ASSISTANT, "Yo")

    def text_after(*messages: Message) -> str:
        ids = reference_ids(chat_tokenizer, replace(conversation, messages=messages))
        return chat_tokenizer.decode(ids).rpartition(messages[-1].content or "")[2]

    try:
        after_question, after_answer = text_after(question), text_after(question, answer)
    except Exception:  # templates raise exceptions of any kind
        return False
    return bool(after_question[_num_shared([*after_question], [*after_answer]) :].strip())


def _marked_tokens(chat_tokenizer: ChatTokenizer, conversation: Conversation) -> np.ndarray:
    """Returns, as bool [n], whether each token is between the template's marks.

    Of several tokens of one character at the end of a marked text, transformers marks only the first.
    """
    with_offsets = {"return_offsets_mapping": True}
    marked = apply_chat_template(
        chat_tokenizer, conversation, return_assistant_tokens_mask=True, tokenizer_kwargs=with_offsets
    )
    is_marked = np.array(marked["assistant_masks"], dtype=bool)
    starts = [start for start, _ in marked["offset_mapping"]]
    for number, (before, start) in enumerate(pairwise(starts), start=1):
        is_marked[number] |= is_marked[number - 1] and start == before
    return is_marked


def _has_weight(tokenized: TokenizedConversation) -> np.ndarray:
    weights = tokenized.token_weights
    return np.ones(len(tokenized), dtype=bool) if weights is None else weights > 0


def _end_of_prompt(
    chat_tokenizer: ChatTokenizer, prompt: list[int], render_closed: Callable[[], list[int]], ids: list[int], after: int
) -> int:
    """Returns the index in `ids` of the first token of an answer.

    `render_closed` returns the prompt without an answer's header.

    `after` is the end of the last answer. Raises CannotCompareError.
    """
    decode, start = chat_tokenizer.decode, _num_shared(prompt, ids)
    if start == len(prompt):
        return start
    text = decode(prompt)
    if decode(ids).startswith(text):  # a token that begins in the prompt is not generated
        start = next(n for n in range(start, len(ids) + 1) if len(decode(ids[:n])) >= len(text))
    else:  # not within a word or a tag: "<" begins both "<think>" and "<tool_call>"
        while start and _is_within_word(text, len(decode(prompt[:start]))):
            start -= 1
    if start <= (num_closed := _num_shared(prompt, render_closed())):
        return _end_of_longest_suffix(prompt, ids, after, len(prompt) - num_closed)
    return start


def _is_within_word(text: str, at: int) -> bool:
    """Returns whether a position is within a word, a tag or the line breaks between two of them."""
    return text[at - 1 : at + 1] == "\n\n" or (text[at - 1] not in "\n >]" and text[at] not in "\n <[")


def _end_of_longest_suffix(prompt: list[int], ids: list[int], after: int, num_header: int) -> int:
    """Returns the end in `ids` of a prompt whose beginning the template writes differently once an answer follows.

    Some templates then move the tools or omit earlier reasoning. The end is that of the longest suffix of the prompt
    that occurs in the conversation.

    Raises CannotCompareError if that suffix is not longer than the header, or occurs more than once.
    """
    best, ends = num_header, list[int]()
    for end in (n + 1 for n in range(after, len(ids)) if ids[n] == prompt[-1]):
        length = _num_shared(prompt[::-1], ids[end - 1 :: -1])
        if length > best:
            best, ends = length, [end]
        elif length == best:
            ends.append(end)
    if len(ends) != 1 or best == num_header:
        raise CannotCompareError("the template writes earlier messages differently once an answer follows")
    return ends[0]


def _num_shared(one: list[Any], other: list[Any]) -> int:
    """Returns the length of the common prefix."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
