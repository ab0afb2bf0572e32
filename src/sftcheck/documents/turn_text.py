"""Reads conversations back from ids: the texts that a template writes between messages, and where they occur.

    template     <|im_start|>user\\n Q <|im_end|>\\n<|im_start|>assistant\\n A <|im_end|>\\n
    beginning    <|im_start|>user\\n
    gaps         user to assistant: <|im_end|>\\n<|im_start|>assistant\\n
    end                                                                        <|im_end|>\\n

What is read is only believed if its messages, encoded again, have the same ids.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from sftcheck.documents.truth import Encoder
from sftron.data.types import Conversation, ConversationKey, Message, Role
from sftron.report.tokens import token_texts


@dataclass(frozen=True, slots=True)
class Parsed:
    """A conversation, or what is left of one, as read from ids."""

    conversation: Conversation
    is_cut_before: bool
    is_cut_after: bool
    first_header: int
    """The index of the token with which the first text of the template begins."""
    first_role: Role
    """The role of the text before that, if the beginning is missing."""
    last_role: Role
    """The role of the text after which the end is missing; TEMPLATE if that is the header of another message."""


_TEXTS = {name: f"ZQ{name}QZ" for name in ("s", "u", "a", "v", "b")}


class TurnText:
    """The texts between messages, learned from renderings of a conversation whose messages are known."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._begins: dict[str, Role] = {}
        self._gaps: dict[Role, list[tuple[str, Role]]] = {Role.SYSTEM: [], Role.USER: [], Role.ASSISTANT: []}
        self._ends: list[str] = []
        self._stop = ""
        names = {"s": Role.SYSTEM, "u": Role.USER, "a": Role.ASSISTANT, "v": Role.USER, "b": Role.ASSISTANT}
        for order in ("suavb", "uavb"):
            messages = tuple(Message(names[name], _TEXTS[name]) for name in order)
            truth = encoder.truth(Conversation(messages, ConversationKey(0, 0), "a probe")) if encoder.chat else None
            text = "" if truth is None else encoder.decode(truth.ids.tolist())
            spans = re.split("|".join(_TEXTS[name] for name in order), text)
            if truth is None or truth.tokens is None or len(spans) != len(order) + 1:
                continue
            roles = [names[name] for name in order]
            self._begins.setdefault(spans[0], roles[0])
            for gap, (before, after) in zip(spans[1:-1], pairwise(roles), strict=True):
                if (gap, after) not in self._gaps[before]:
                    self._gaps[before].append((gap, after))
            self._ends.append(spans[-1])
            stop = truth.tokens.turns[-1].stop
            self._stop = encoder.decode([int(truth.ids[stop])]) if stop is not None else ""
        encoder.refused.clear()
        self._openings, self._starts = self._possible_openings(), self._certain_starts()
        tokens = self._encoder.tokenizer.get_added_vocab()  # a user may well write "user: " without any of them
        begins = "|".join(re.escape(begin) for begin, _ in self._openings if any(each in begin for each in tokens))
        self._doubled = re.compile(f"(?P<outer>{begins})(?={begins})" if begins else r"(?P<outer>(?!))")

    def _possible_openings(self) -> list[tuple[str, Role]]:
        """Returns the texts with which a conversation may begin, and the role of the message after each."""
        bos, special = self._encoder.tokenizer.bos_token or "", self._encoder.tokenizer.all_special_tokens
        # A row may lack the text before the last control token of a beginning, such as a default system prompt.
        short = [
            (begin[max([0, *(begin.rfind(each) for each in special)]) :], role) for begin, role in self._begins.items()
        ]
        longest_first = sorted(self._begins.items(), key=lambda each: -len(each[0]))
        without_bos = [(begin.removeprefix(bos), role) for begin, role in longest_first]
        return [each for each in (*longest_first, *without_bos, *short) if each[0]]

    def _certain_starts(self) -> list[str]:
        """Returns the texts that show where a conversation begins, longest first; none of them also ends a gap."""
        bos = self._encoder.tokenizer.bos_token or ""
        inner = [gap for gaps in self._gaps.values() for gap, _ in gaps]
        begins = {*self._begins, *(begin.removeprefix(bos) for begin in self._begins)}
        found = {each for each in begins if each and not any(gap.endswith(each) for gap in inner)}
        return sorted(found, key=len, reverse=True)

    @property
    def is_known(self) -> bool:
        return bool(self._begins)

    def may_be_several(self, text: str) -> bool:
        """Returns whether a turn in the text begins as a conversation does."""
        gaps = [gap for gap, after in self._gaps[Role.ASSISTANT] if after is Role.USER]
        begins = {begin for begin, role in self._begins.items() if role is Role.USER}
        return any(gap in text and any(gap.endswith(begin) for begin in begins) for gap in gaps)

    def occurs_in(self, text: str) -> bool:
        """Returns whether a text holds what the template writes before or between messages."""
        texts = [*self._starts, *(gap for gaps in self._gaps.values() for gap, _ in gaps)]
        return any(each.strip() and each in text for each in texts)

    def is_doubled(self, text: str) -> bool:
        """Returns whether a message in the text begins as a conversation does: its template was applied twice."""
        return self._doubled.search(text) is not None

    def parse(self, ids: np.ndarray) -> list[tuple[int, Parsed | None]]:
        """Returns (number of tokens, conversation) for each conversation in ids, one after another.

        Where a conversation begins only the ids can show: a beginning that could also be another turn of the same
        conversation is not taken for one.
        """
        if not self.is_known or not len(ids):
            return [(len(ids), None)]
        text, offsets = self._offsets(ids.tolist())
        found = {match.start() for match in re.finditer("|".join(map(re.escape, self._starts)) or r"(?!)", text)}
        bos = self._encoder.tokenizer.bos_token or ""
        # A beginning behind another one is text of the first message: the template was applied twice.
        inner = {match.end("outer") for match in self._doubled.finditer(text)}
        starts = sorted((found - inner) | {0})
        # A second beginning-of-text token, or one at the end of the text before, belongs to the conversation after it.
        starts = [
            n for n, after in pairwise([*starts, len(text)]) if not bos or text[n:after].replace(bos, "") or n == 0
        ]
        if len(starts) > 1 and bos and not text[: starts[1]].replace(bos, ""):
            starts.pop(1)
        tokens = sorted({bisect_left(offsets, start) for start in starts} | {len(ids)})
        return [(end - start, self._parsed(ids[start:end])) for start, end in pairwise(tokens)]

    def _parsed(self, ids: np.ndarray) -> Parsed | None:
        text, offsets = self._offsets(ids.tolist())
        at, role = self._beginning(text)
        is_cut_before, first_header, messages = role is None, 0, list[Message]()
        if role is None:
            gaps = [(text.find(gap), -len(gap), -before) for before, gaps in self._gaps.items() for gap, _ in gaps]
            start, _, number = min((each for each in gaps if each[0] >= 0), default=(-1, 0, 0))
            if start < 0:
                return None
            # An answer, rather than a system message that ends alike.
            first_header, role = bisect_left(offsets, start), Role(-number)
            messages += [Message(Role.USER, "Hi")] if role is Role.ASSISTANT else []
        first_role = role
        while following := [
            (n, -len(gap), gap, after) for gap, after in self._gaps[role] if (n := text.find(gap, at)) >= 0
        ]:
            where, _, gap, after = min(following)
            messages.append(Message(role, text[at:where]))
            at, role = where + len(gap), after
        last, is_cut_after = self._last(text[at:], role)
        if last or role is Role.ASSISTANT:  # an answer that only its header announces gets an invented text
            messages.append(Message(role, last or "Yo" * is_cut_after))
        if not messages:
            return None
        conversation = Conversation(tuple(messages), ConversationKey(0, 0), "a document")
        in_header = self._is_header_begun(text[at + len(last) :], role)
        last_role = Role.TEMPLATE if in_header else role
        return Parsed(conversation, is_cut_before, is_cut_after or in_header, first_header, first_role, last_role)

    def _is_header_begun(self, rest: str, role: Role) -> bool:
        """Returns whether what follows a message is the beginning of the text before another one, and no end."""
        return rest not in ("", self._stop, *self._ends) and any(gap.startswith(rest) for gap, _ in self._gaps[role])

    def _beginning(self, text: str) -> tuple[int, Role | None]:
        """Returns where the first message begins, and its role; None if the beginning is missing."""
        at, bos = 0, self._encoder.tokenizer.bos_token or ""
        while True:
            for begin, role in self._openings:
                if text.startswith(begin, at):
                    return at + len(begin), role
            if not bos or not text.startswith(bos, at):
                return 0, None
            at += len(bos)

    def _last(self, rest: str, role: Role) -> tuple[str, bool]:
        """Returns the text of the last message, and whether it is cut off."""
        end = next((each for each in self._ends if rest.endswith(each)), None)
        if end is not None:
            return rest[: len(rest) - len(end)], False
        if self._stop and self._stop in rest:
            text = rest.partition(self._stop)[0]
            return text, role is not Role.ASSISTANT and not text
        return rest, True

    def _offsets(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Returns the text of ids, and the index of the first character of each token."""
        text = self._encoder.decode(ids)
        encoded = self._encoder.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if encoded["input_ids"] == list(ids):
            return text, [start for start, _ in encoded["offset_mapping"]]
        spans = token_texts(self._encoder.decode, ids)
        starts = accumulate((len(span) for span, _ in spans), initial=0)
        return text, [start for (_, number), start in zip(spans, starts, strict=False) for _ in range(number)]
