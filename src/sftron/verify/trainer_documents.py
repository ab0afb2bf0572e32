"""The documents in a trainer's batches: one conversation each, with the ids and roles that its template gives.

    a row of a batch      <s> user Hi </s> assistant Yo </s> | <s> user Why? </s> assistant So. </s> | pad pad
    documents             0                                    1
    the truth of each     a row of the data set that still holds messages; one of the given conversations; or the
                          conversation that is read from the ids, encoded again, and has the same ids

A document has the true bounds of its conversation, whatever positions the trainer passes. It may be a fragment whose
beginning or end is missing, and may have tokens around it that the template does not write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from sftron.data.types import (
    IGNORE_INDEX,
    ConversationKey,
    LabeledConversation,
    Role,
    TokenizedConversation,
    Turn,
)
from sftron.verify.trainer_truth import Encoder, PlainText, Truth, read_row
from sftron.verify.turn_text import Parsed, TurnText

if TYPE_CHECKING:
    from sftron.verify.trainer_subject import SeenBatch


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Tokens [start, end) of one row of one batch."""

    batch: int
    row: int
    start: int
    end: int
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
    num_cut_before: int = 0
    """The number of tokens of the conversation that are missing before it."""
    is_cut_after: bool = False
    """Whether text of the conversation is missing after it."""
    cuts_answer: bool = False
    num_unclear: int = 0
    """The number of its first tokens whose role is not known, as the header before them is missing."""
    is_forged: bool = False
    """Whether a text of its conversation became control tokens."""

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def key(self) -> ConversationKey:
        return ConversationKey(self.batch, self.row)

    @property
    def trained(self) -> np.ndarray:
        """Whether each token has a label, bool [n]; the first token of a row never is, as nothing precedes it."""
        trained = self.labels != IGNORE_INDEX
        if self.start == 0 and len(trained):
            trained[0] = False
        return trained

    @property
    def labeled(self) -> LabeledConversation:
        """Its labels, shifted, as those of one conversation; a label of the first token is left out."""
        labels = np.append(self.labels[1:], np.int32(IGNORE_INDEX))
        assert self.tokens is not None
        weights = (labels != IGNORE_INDEX).astype(np.float32)
        return LabeledConversation(self.ids, labels, weights, self.tokens.role_ids, self.key)


@dataclass(frozen=True, slots=True)
class Documents:
    """All documents of the sampled rows."""

    documents: list[Document]
    missing: list[str]
    """The conversations that are in no document, if those of the whole data set are known; else empty."""
    refused: Counter[str] = field(default_factory=Counter)
    """Rows whose messages cannot be read or rendered, by reason."""

    @property
    def summary(self) -> str:
        names = {
            "rows": "from the data set's rows",
            "conversations": "from conversations=",
            "ids": "recovered from ids",
            "": "not recovered",
        }
        counts = Counter(each.source for each in self.documents)
        words = [f"{counts[source]:,} {name}" for source, name in names.items() if counts[source]]
        reasons = "; ".join(f"{reason} ({count:,})" for reason, count in self.refused.most_common(2))
        return f"{len(self.documents):,} documents: {', '.join(words) or 'none'}" + (f"; {reasons}" if reasons else "")


class Finder:
    """Finds the documents of batches.

    Args:
        rows: The sampled rows of the data set.
        conversations: Rows or lists of messages given by the user.
        is_last_alone: Whether only the last answer is meant to be trained where a document is read from its ids.
    """

    def __init__(
        self, rows: Sequence[Any], conversations: Sequence[Any] | None, tokenizer: Any, is_last_alone: bool
    ) -> None:
        self.encoder = Encoder(tokenizer)
        self.turn_text = TurnText(self.encoder)
        self._is_last_alone = is_last_alone
        self._row_of_ids = {
            own.tobytes(): row for row in rows if isinstance(row, Mapping) and (own := _ids_of(row)) is not None
        }
        given = [{"messages": each} if isinstance(each, list) else each for each in conversations or ()]
        found = [truth for row in given[:_MOST_GIVEN] for truth in self._truths(row)[:1]]
        self.given: list[Truth] = [each for truth in found for each in (truth, truth.reference) if each is not None]
        self._given_ids = {truth.ids.tobytes(): number for number, truth in enumerate(self.given)}
        self._used = set[int]()
        self._by_beginning: dict[bytes, list[int]] = {}
        for number, truth in enumerate(self.given):
            self._by_beginning.setdefault(truth.ids[:_BEGINNING].tobytes(), []).append(number)

    def documents(self, batches: Sequence[SeenBatch]) -> Documents:
        self._used.clear()
        documents = [each for number, batch in enumerate(batches) for each in self._of_batch(number, batch)]
        return Documents(documents, self._missing(), Counter(self.encoder.refused))

    def may_be_several(self, document: Document) -> bool:
        """Returns whether a document that was read from its ids could also be several conversations."""
        return self.turn_text.may_be_several(self.encoder.decode(document.ids.tolist()))

    def _missing(self) -> list[str]:
        used = {id(self.given[number].content) for number in self._used}
        return [truth.excerpt for truth in self.given if id(truth.content) not in used and not truth.is_forged]

    def _truths(self, row: Mapping[str, Any]) -> list[Truth]:
        return [truth for content in read_row(row) if (truth := self.encoder.truth(content)) is not None]

    # -- segments of a batch -----------------------------------------------------------------------------------------

    def _of_batch(self, number: int, batch: SeenBatch) -> Iterator[Document]:
        for row, start, end, feature in _segments(batch):
            ids = np.ascontiguousarray(batch.ids[row, start:end], dtype=np.int32)
            known = self._known_row(feature)
            truths = self._truths(known) if known is not None else []
            if self.given:  # what the user gives outranks what the rows have become
                same = {self._given_ids[key] for truth in truths if (key := truth.ids.tobytes()) in self._given_ids}
                self._used.update(same)
                truths = truths if same else []
            found = [self._of_truths(ids, truths)] if truths else None
            if found is None:
                claims = sorted({0, len(ids), *(at - start for at in _claims(batch, row, feature) if start < at < end)})
                found = list(self._parts(ids, claims))
            at = start
            for part in found:
                labels = batch.labels[row, at : at + part.num_tokens].astype(np.int32)
                yield part.document(number, row, at, ids[at - start : at - start + part.num_tokens], labels)
                at += part.num_tokens

    def _known_row(self, feature: Any) -> Mapping[str, Any] | None:
        """Returns the row of a feature, which may have lost its messages on the way."""
        if not isinstance(feature, Mapping):
            return None
        ids = _ids_of(feature)
        row = None if ids is None else self._row_of_ids.get(ids.tobytes())
        return {**(row or {}), **feature}

    def _of_truths(self, ids: np.ndarray, truths: Sequence[Truth]) -> _Part:
        """Returns the document of one row: the first truth that it is, or else the difference from the first one."""
        parts = [part for truth in truths if (part := self._placed(ids, truth, "rows")) is not None]
        fitting = [part for part in parts if not part.difference]
        if fitting and fitting[0].tokens is not None:
            return fitting[0]
        is_declared = all(truth.is_declared for truth in truths)
        if not is_declared and (known := self._of_text(ids)) is not None:
            return known
        if parts:
            return (fitting or parts)[0]
        reference = truths[0].reference
        if reference is not None and (part := self._placed(ids, reference, "rows")) is not None:
            return part
        return _Part(len(ids), "rows", truths[0], difference=truths[0].difference(ids, self.encoder.decode))

    def _of_text(self, ids: np.ndarray) -> _Part | None:
        """Returns the document of a row of text if it has the form of the template, and so has roles."""
        parsed = self.turn_text.parse(ids)
        part = self._parsed(ids, parsed[0][1]) if len(parsed) == 1 else None
        return part if part is not None and part.source else None

    # -- parts of a segment whose rows are not known -----------------------------------------------------------------

    def _parts(self, ids: np.ndarray, claims: Sequence[int]) -> Iterator[_Part]:
        if self.given and (parts := self._given_parts(ids)):
            yield from parts
            return
        for start, end in pairwise(claims):
            for length, parsed in self.turn_text.parse(ids[start:end]):
                part = self._parsed(ids[start : start + length], parsed)
                if self.given and not (part.num_cut_before or part.is_cut_after):
                    source = part.source or "conversations"
                    part = replace(part, source=source, difference="it is none of the given conversations")
                yield part
                start += length

    def _parsed(self, ids: np.ndarray, parsed: Parsed | None) -> _Part:
        """Returns the document with the truth that encoding its messages again gives, if its ids are the same."""
        if parsed is None or (truth := self.encoder.truth(parsed.conversation)) is None:
            return _Part(len(ids))
        if self._is_last_alone:
            truth = truth.last_alone()
        if not parsed.is_cut_before and not parsed.is_cut_after:
            return self._placed(ids, truth, "ids") or _Part(len(ids))
        return _fragment(ids, truth, parsed) or _Part(len(ids))

    def _given_parts(self, ids: np.ndarray) -> list[_Part]:
        """Returns the parts of ids that are given conversations one after another; empty if they are not."""
        parts, at, pad = list[_Part](), 0, self.encoder.tokenizer.pad_token_id
        while at < len(ids):
            rest = ids[at:]
            number, length = self._given_at(rest, is_first=at == 0)
            if number is None:
                if at and len(set(rest.tolist()) - {pad, self.encoder.tokenizer.eos_token_id}) == 0:
                    parts[-1] = parts[-1].longer(len(rest))
                    return parts
                return []
            part = self._placed(rest[:length], self.given[number], "conversations")
            if part is None:
                return []
            if length >= _LEAST_SHOWN:
                self._used.add(number)
            parts.append(part)
            at += length
        return parts

    def _given_at(self, ids: np.ndarray, *, is_first: bool) -> tuple[int | None, int]:
        """Returns the number of the given conversation with which the ids begin, and how many tokens are of it."""
        for number in self._by_beginning.get(ids[:_BEGINNING].tobytes(), ()):
            truth = self.given[number].ids
            length = min(len(truth), len(ids))
            if np.array_equal(truth[:length], ids[:length]):
                return number, length
        if len(ids) < _BEGINNING or is_first:  # the beginning or the end of one that was cut
            found = dict[int, int]()
            for number, each in enumerate(self.given):
                at = _find(each.ids, ids[: min(len(ids), _BEGINNING)])
                length = min(len(each.ids) - at, len(ids))
                if at >= 0 and np.array_equal(each.ids[at : at + length], ids[:length]):
                    found[number] = length
            if found:
                longest = max(found.values())
                if longest >= _LEAST_SHOWN:
                    self._used.update(found)  # it may be of any of these
                return next((number, length) for number, length in found.items() if length == longest)
        lead = int(len(ids) > 1 and ids[0] == self.encoder.tokenizer.bos_token_id)
        if lead:
            number, length = self._given_at(ids[1:], is_first=False)
            return number, length + 1
        return None, 0

    # -- a document and its truth ------------------------------------------------------------------------------------

    def _placed(self, ids: np.ndarray, truth: Truth, source: str) -> _Part | None:
        """Returns the document if its ids are those of the truth, without an end of it, or with tokens around it."""
        special = set(self.encoder.tokenizer.all_special_ids)
        placed = _place(ids, truth.ids, special | self.encoder.blank_ids)
        if placed is None:
            return None
        offset, lead, tail = placed
        difference, bos = "", self.encoder.tokenizer.bos_token_id
        if lead:
            text = self.encoder.decode(ids[:lead].tolist())
            difference = f"{text!r} before the conversation, which the template does not write there"
            if ids[0] == bos and len(truth.ids) and truth.ids[0] == bos:
                difference = f"a doubled beginning: {self.encoder.decode(ids[: lead + 1].tolist())!r}"
        elif offset == 1 and truth.ids[0] == bos and (truth.ids == bos).sum() == 1:
            difference = f"no {self.encoder.decode([bos])!r} at the beginning, which the template writes"
        return _part_of(ids, truth, source, offset, lead, tail, difference)


_MOST_GIVEN, _BEGINNING, _LEAST_SHOWN = 4096, 24, 8


@dataclass(frozen=True, slots=True)
class _Part:
    """A document before its place in the batch is known."""

    num_tokens: int
    source: str = ""
    truth: Truth | None = None
    tokens: TokenizedConversation | None = None
    difference: str = ""
    num_cut_before: int = 0
    is_cut_after: bool = False
    cuts_answer: bool = False
    num_unclear: int = 0

    def longer(self, number: int) -> _Part:
        """Returns the part with more tokens after it, which are of the template."""
        assert self.truth is not None
        assert self.tokens is not None
        ids = np.append(self.tokens.input_ids, np.zeros(number, dtype=np.int32))
        return _part_of(ids, self.truth, self.source, self.num_cut_before, 0, number, self.difference)

    def document(self, batch: int, row: int, start: int, ids: np.ndarray, labels: np.ndarray) -> Document:
        return Document(
            batch=batch,
            row=row,
            start=start,
            end=start + len(ids),
            ids=ids,
            labels=labels,
            source=self.source,
            truth=self.truth,
            tokens=self.tokens,
            difference=self.difference,
            num_cut_before=self.num_cut_before,
            is_cut_after=self.is_cut_after,
            cuts_answer=self.cuts_answer,
            num_unclear=self.num_unclear,
            is_forged=self.truth is not None and self.truth.is_forged,
        )


def _part_of(
    ids: np.ndarray, truth: Truth, source: str, offset: int, lead: int, tail: int, difference: str = ""
) -> _Part:
    """Returns the part whose ids, but for `lead` and `tail` tokens around, are those of the truth from `offset` on."""
    num_own = len(ids) - lead - tail
    if truth.tokens is None:
        return _Part(len(ids), source, truth, None, difference, offset, offset + num_own < len(truth.ids))
    own, around = slice(offset, offset + num_own), (lead, tail)
    role_ids = np.pad(truth.tokens.role_ids[own], around, constant_values=Role.TEMPLATE)
    weights = truth.tokens.token_weights
    shift, turns, cuts_answer = lead - offset, [], False
    for turn in truth.tokens.turns:
        moved = Turn(turn.role, turn.start + shift, turn.end + shift, None if turn.stop is None else turn.stop + shift)
        if isinstance(truth.content, PlainText) and moved.stop == lead + num_own and not tail:
            moved = moved._replace(stop=None)  # text that nobody has ended
        last = moved.end - 1 if moved.stop is None else moved.stop
        if moved.start >= lead and last < lead + num_own:
            turns.append(moved)
        elif turn.role is Role.ASSISTANT and turn.end > turn.start:
            cuts_answer = cuts_answer or last >= lead
    is_missing_bos = difference.startswith("no ")
    missing = truth.tokens.role_ids[offset + num_own :]
    is_unended = isinstance(truth.content, PlainText) and len(missing) == 1
    is_cut_after = bool((missing != Role.TEMPLATE).any()) and not is_unended
    tokens = TokenizedConversation(
        input_ids=ids,
        role_ids=role_ids,
        turns=tuple(turns),
        key=truth.tokens.key,
        num_boundary_tokens=truth.tokens.num_boundary_tokens,
        holds_control_text=truth.tokens.holds_control_text,
        token_weights=None if weights is None else np.pad(weights[own], around, constant_values=1),
    )
    cut_before = 0 if is_missing_bos else offset
    return _Part(len(ids), source, truth, tokens, difference, cut_before, is_cut_after, cuts_answer and is_cut_after)


_MOST_REMERGED = 8
"""The number of tokens at a cut that may be others if the text is encoded again."""


def _fragment(ids: np.ndarray, truth: Truth, parsed: Parsed) -> _Part | None:
    """Returns the part of a conversation of which the beginning or the end is missing.

    The truth is that of the text which is left, with an invented question before an answer without its beginning, so
    the ids at a cut may differ. Returns None if others do.
    """
    if truth.tokens is None:
        return None
    whole, roles, start = truth.ids, np.full(len(ids), Role.TEMPLATE, dtype=np.uint8), 0
    offset = 0
    if parsed.is_cut_before:
        start = parsed.first_header
        at = _find(whole, ids[start : start + _BEGINNING]) if start < len(ids) else -1
        if at < 0:
            return None
        offset = at - start
        roles[:start] = parsed.first_role
    num_equal = _num_equal(ids[start:], whole[start + offset :])
    end = start + num_equal
    if end < len(ids) - _MOST_REMERGED or (end < len(ids) and not parsed.is_cut_after):
        return None
    roles[start:end] = truth.tokens.role_ids[start + offset : end + offset]
    roles[end:] = parsed.last_role
    turns = []
    for turn in truth.tokens.turns:
        last = turn.end - 1 if turn.stop is None else turn.stop
        if turn.start - offset >= start and last - offset < end:
            stop = None if turn.stop is None else turn.stop - offset
            turns.append(Turn(turn.role, turn.start - offset, turn.end - offset, stop))
    tokens = TokenizedConversation(ids, roles, tuple(turns), truth.tokens.key)
    is_answer = parsed.is_cut_after and parsed.last_role is Role.ASSISTANT
    is_answer = is_answer or (parsed.is_cut_before and parsed.first_role is Role.ASSISTANT)
    cut_before = int(parsed.is_cut_before)
    return _Part(len(ids), "ids", truth, tokens, "", cut_before, parsed.is_cut_after, is_answer, start)


def _place(ids: np.ndarray, truth: np.ndarray, around: set[int]) -> tuple[int, int, int] | None:
    """Returns (offset, lead, tail): ids without `lead` tokens before and `tail` after are truth from `offset` on.

    The tokens around are special tokens or white space. Returns None if there is no such place.
    """
    if (at := _find(truth, ids)) >= 0:
        return at, 0, 0
    if (at := _find(ids, truth)) >= 0:
        tail = len(ids) - at - len(truth)
        outside = {*ids[:at].tolist(), *ids[len(ids) - tail :].tolist()}
        return (0, at, tail) if outside <= around else None
    for lead, tail in ((1, 0), (0, 1), (1, 1)):
        inner, outside = ids[lead : len(ids) - tail], {*ids[:lead].tolist(), *ids[len(ids) - tail :].tolist()}
        if len(inner) > 1 and outside <= around and (at := _find(truth, inner)) >= 0:
            return at, lead, tail
    return None


def _find(inside: np.ndarray, wanted: np.ndarray) -> int:
    """Returns the first index at which `wanted` occurs in `inside`, both int32; -1 if it does not."""
    if not len(wanted):
        return -1
    data, sought, at = inside.tobytes(), wanted.tobytes(), -1
    while (at := data.find(sought, at + 1)) >= 0:
        if at % inside.itemsize == 0:
            return at // inside.itemsize
    return -1


def _num_equal(one: np.ndarray, other: np.ndarray) -> int:
    """Returns the length of the common beginning."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


# -- where rows of the data are in a batch ---------------------------------------------------------------------------


def _segments(batch: SeenBatch) -> Iterator[tuple[int, int, int, Any]]:
    """Yields (row, start, end, feature): the tokens of a row that are no padding, or those of each of its features."""
    num_rows, features = len(batch.ids), list(batch.features)
    ids = batch.ids.astype(np.int32)
    lists = [_ids_of(feature) for feature in features]
    if len(features) == num_rows and not (num_rows == 1 and lists[0] is None and batch.attended is None):
        for row, (feature, own) in enumerate(zip(features, lists, strict=True)):
            at = -1 if own is None else _find(ids[row], own)
            yield (row, *(_real(batch, row) if at < 0 or own is None else (at, at + len(own))), feature)
        return
    if num_rows == 1 and features and all(own is not None for own in lists):
        at, found = 0, []
        for feature, own in zip(features, lists, strict=True):
            assert own is not None
            start = _find(ids[0, at:], own)
            if start < 0:
                break
            found.append((0, at + start, at + start + len(own), feature))
            at += start + len(own)
        else:
            yield from found
            return
    for row in range(num_rows):
        yield (row, *_real(batch, row), None)


def _ids_of(feature: Any) -> np.ndarray | None:
    ids = feature.get("input_ids") if isinstance(feature, Mapping) else None
    return None if ids is None else np.asarray(ids, dtype=np.int32).reshape(-1)


def _real(batch: SeenBatch, row: int) -> tuple[int, int]:
    """Returns the range of a row without its padding, as the attention mask shows it."""
    if batch.attended is None:
        return 0, batch.ids.shape[1]
    real = np.flatnonzero(batch.attended[row] != 0)
    return (int(real[0]), int(real[-1]) + 1) if len(real) else (0, 0)


def _claims(batch: SeenBatch, row: int, feature: Any) -> Iterable[int]:
    """Yields where documents of a row begin by what the trainer passes: positions, numbers or lengths of documents."""
    if batch.positions is not None:
        positions = batch.positions[row]
        yield from (np.flatnonzero(np.diff(positions) <= 0) + 1).tolist()
    numbered = batch.seen.get("seq_idx")
    if numbered is not None and len(numbered) == len(batch.ids):
        yield from (np.flatnonzero(np.diff(numbered[row].cpu().numpy())) + 1).tolist()
    if batch.attended is not None and batch.attended[row].max(initial=0) > 1:
        yield from (np.flatnonzero(np.diff(batch.attended[row])) + 1).tolist()
    if len(batch.ids) == 1 and (bounds := batch.seen.get("cu_seq_lens_q")) is not None:
        yield from bounds.reshape(-1).tolist()
    if (
        isinstance(feature, Mapping)
        and feature.get("seq_lengths") is not None
        and len(batch.features) == len(batch.ids)
    ):
        yield from np.cumsum(feature["seq_lengths"]).tolist()
