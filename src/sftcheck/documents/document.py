"""The documents in a trainer's batches: one conversation each, with the ids and roles that its template gives.

    a row of a batch      <s> user Hi </s> assistant Yo </s> | <s> user Why? </s> assistant So. </s> | pad pad
    documents             0                                    1

A document has the true bounds of its conversation, whatever positions the trainer passes. It may be a fragment whose
beginning or end is missing, and may have tokens around it that the template does not write.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sftcheck.batches import find
from sftcheck.documents.truth import Encoder, PlainText, Truth
from sftcheck.documents.turn_text import Parsed
from sftcheck.faults import Fault
from sftron.data.types import IGNORE_INDEX, Role, TokenizedConversation, Turn


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Some tokens of one row of one batch, from `start` on."""

    batch: int
    row: int
    start: int
    ids: np.ndarray
    """int32 [n]."""
    labels: np.ndarray
    """int32 [n], the trainer's label of the token at the same index (not shifted), or IGNORE_INDEX."""
    source: str = ""
    """Where its conversation is from: "rows", "conversations", "ids"; "" if it was not recovered."""
    truth: Truth | None = None
    tokens: TokenizedConversation | None = None
    """The roles of its own tokens, and the turns that it holds whole; None if it was not recovered."""
    difference: str = ""
    """How its ids differ from the template's; "" if they do not, or if it was not recovered."""
    fault: Fault | None = None
    """What the difference is, where it is known: a beginning that is doubled or missing."""
    num_cut_before: int = 0
    """The number of tokens of the conversation that are missing before it."""
    is_cut_after: bool = False
    """Whether text of the conversation is missing after it."""
    cuts_answer: bool = False
    num_unclear: int = 0
    """The number of its first tokens whose role is not known, as the header before them is missing."""
    is_rendered_twice: bool = False
    """Whether the template is applied to a text that it has written already."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def index(self) -> tuple[int, slice]:
        """Its row and range, which index a tensor of the batch."""
        return self.row, slice(self.start, self.start + len(self))

    @property
    def where(self) -> str:
        return f"batch {self.batch}, row {self.row}, token {self.start}"

    @property
    def is_forged(self) -> bool:
        """Whether a text of its conversation became control tokens."""
        return self.truth is not None and self.truth.is_forged and not self.is_rendered_twice

    @property
    def lacks_tools(self) -> bool:
        """Whether the tools of its row were not passed to the template."""
        return self.truth is not None and self.truth.lacks_tools

    @property
    def is_text(self) -> bool:
        """Whether it was read from its ids as a text without turns."""
        return self.source == "ids" and self.truth is not None and isinstance(self.truth.content, PlainText)

    @property
    def answers(self) -> list[Turn]:
        """The whole answers that the template writes."""
        turns = self.tokens.turns if self.tokens is not None else ()
        return [
            turn for turn in turns if turn.role is Role.ASSISTANT and (turn.end > turn.start or turn.stop is not None)
        ]

    @property
    def trained(self) -> np.ndarray:
        """Whether each token has a label, bool [n]; the first token of a row never is, as nothing precedes it."""
        trained = self.labels != IGNORE_INDEX
        if self.start == 0:
            trained[:1] = False
        return trained

    def part(self, begin: int, end: int) -> Document:
        """Returns tokens [begin, end) of a document whose conversation is not known yet."""
        own = slice(begin, end)
        return replace(self, start=self.start + begin, ids=self.ids[own], labels=self.labels[own])

    def with_roles_of(self, truth: Truth, source: str, begin: int, end: int, at: int) -> Document:
        """Returns the document with the roles of a truth.

        Its tokens [begin, end) are those of the truth from `at` on; the tokens around them are the template's.
        """
        if truth.tokens is None:
            is_cut = at + end - begin < len(truth.ids)
            return replace(self, source=source, truth=truth, num_cut_before=at, is_cut_after=is_cut)
        own, around = slice(at, at + end - begin), (begin, len(self) - end)
        is_text = isinstance(truth.content, PlainText)
        turns, cuts_answer = list[Turn](), False
        for turn in truth.tokens.turns:
            first, last, stop = (None if n is None else n + begin - at for n in (turn.start, turn.end, turn.stop))
            assert first is not None
            assert last is not None
            if is_text and stop == end == len(self):
                stop = None  # text that nobody has ended
            last_token = last - 1 if stop is None else stop
            if first >= begin and last_token < end:
                turns.append(Turn(turn.role, first, last, stop))
            elif turn.role is Role.ASSISTANT and turn.end > turn.start:
                cuts_answer |= last_token >= begin
        missing, weights = truth.tokens.role_ids[own.stop :], truth.tokens.token_weights
        is_cut_after = bool((missing != Role.TEMPLATE).any()) and not (is_text and len(missing) == 1)
        tokens = replace(
            truth.tokens,
            input_ids=self.ids,
            role_ids=np.pad(truth.tokens.role_ids[own], around, constant_values=Role.TEMPLATE),
            turns=tuple(turns),
            token_weights=None if weights is None else np.pad(weights[own], around, constant_values=1),
        )
        return replace(
            self,
            source=source,
            truth=truth,
            tokens=tokens,
            num_cut_before=at,
            is_cut_after=is_cut_after,
            cuts_answer=cuts_answer and is_cut_after,
        )


def locate(document: Document, truth: Truth, source: str, encoder: Encoder) -> Document | None:
    """Returns the document if its ids are those of the truth, without an end of it, or with tokens around it.

    The tokens around are special tokens or white space. Returns None if the truth is not there.
    """
    around = encoder.special_ids | encoder.blank_ids
    if (found := _locate(document.ids, truth.ids, around)) is None:
        return None
    begin, end, at = found
    fitted = document.with_roles_of(truth, source, begin, end, at)
    decode, bos = encoder.decode, encoder.tokenizer.bos_token_id
    begins_with_bos = len(truth.ids) > 0 and truth.ids[0] == bos
    is_template = truth.tokens is not None and (truth.tokens.role_ids[:at] == Role.TEMPLATE).all()
    fault = None
    if not set(document.ids[end:].tolist()) <= around:
        difference = f"{decode(document.ids[end:])!r} after the conversation, where the template ends"
    elif begin and begins_with_bos and document.ids[0] == bos:
        difference, fault = f"a doubled beginning: {decode(document.ids[: begin + 1])!r}", Fault.DOUBLED_BOS
    elif begin:
        difference = (
            f"{decode(document.ids[:begin])!r} before the conversation, which the template does not write there"
        )
    elif (at == 1 and begins_with_bos and (truth.ids == bos).sum() == 1) or (
        at and is_template and int(document.ids[0]) in encoder.special_ids
    ):
        difference = f"no {decode(truth.ids[:at])!r} at the beginning, which the template writes"
        return replace(fitted, difference=difference, fault=Fault.NO_BEGINNING, num_cut_before=0)
    else:
        return fitted
    return replace(fitted, difference=difference, fault=fault)


def _locate(ids: np.ndarray, truth: np.ndarray, around: set[int]) -> tuple[int, int, int] | None:
    """Returns (begin, end, at): ids [begin, end) are the truth from `at` on, and `around` holds the others."""
    if (at := find(truth, ids)) >= 0:
        return 0, len(ids), at
    if (begin := find(ids, truth)) >= 0:
        end = begin + len(truth)
        is_around = {*ids[:begin].tolist(), *ids[end:].tolist()} <= around
        return (begin, end, 0) if is_around or (begin == 0 and len(ids) - end <= _MOST_REMERGED) else None
    for begin, end in ((1, len(ids)), (0, len(ids) - 1), (1, len(ids) - 1)):
        is_around = {*ids[:begin].tolist(), *ids[end:].tolist()} <= around
        if end - begin > 1 and is_around and (at := find(truth, ids[begin:end])) >= 0:
            return begin, end, at
    return None


_BEGINNING, _MOST_REMERGED = 24, 8
"""How many tokens identify a position, and how many at a cut may differ when the text is encoded again."""


def fragment(document: Document, truth: Truth, parsed: Parsed) -> Document | None:
    """Returns the part of a conversation of which the beginning or the end is missing.

    The truth is that of the text which is left, with an invented question before an answer without its beginning, so
    the ids at a cut may differ. Returns None if others do.
    """
    ids, start, at = document.ids, 0, 0
    if truth.tokens is None:
        return None
    if parsed.is_cut_before:
        start = parsed.first_header
        at = find(truth.ids, ids[start : start + _BEGINNING]) if start < len(ids) else -1
        if at < 0:
            return None
    length = min(len(ids) - start, len(truth.ids) - at)
    different = np.flatnonzero(ids[start : start + length] != truth.ids[at : at + length])
    end = start + (int(different[0]) if len(different) else length)
    if end < len(ids) - _MOST_REMERGED or (end < len(ids) and not parsed.is_cut_after):
        return None
    found = document.with_roles_of(truth, "ids", start, end, at)
    assert found.tokens is not None
    found.tokens.role_ids[:start], found.tokens.role_ids[end:] = parsed.first_role, parsed.last_role
    cut_roles = [parsed.first_role] * parsed.is_cut_before + [parsed.last_role] * parsed.is_cut_after
    return replace(
        found,
        num_cut_before=int(parsed.is_cut_before),
        is_cut_after=parsed.is_cut_after,
        cuts_answer=Role.ASSISTANT in cut_roles,
        num_unclear=start,
    )
