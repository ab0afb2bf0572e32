"""Finds the documents of a trainer's batches, and the conversation that each of them should be.

the truth of each    a row of the data set that still holds messages; one of the given conversations; or the
                     conversation that is read from the ids, encoded again, and has the same ids
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

import numpy as np

from sftron.data.types import IGNORE_INDEX
from sftron.verify.trainer.batches import SeenBatch
from sftron.verify.trainer.documents import Document, find, fragment, locate
from sftron.verify.trainer.truth import Encoder, PlainText, Truth, read_row
from sftron.verify.trainer.turn_text import Parsed, TurnText

_MOST_GIVEN, _BEGINNING, _LEAST_SHOWN = 4096, 24, 8
"""Given conversations: the most that are read, the tokens that are searched for, and the fewest that identify one."""


class Finder:
    """Finds the documents of batches.

    Args:
        rows: The sampled rows of the data set.
        conversations: Rows or lists of messages given by the user.
        trainer: Declares, if it is TRL's, the column of texts, and whether only the last answer is to be trained.
        trained_roles: If these are "all", ids that hold no conversation are read as texts.
    """

    def __init__(
        self,
        rows: Sequence[Any],
        conversations: Sequence[Any] | None,
        encoder: Encoder,
        trainer: Any,
        trained_roles: str,
    ) -> None:
        self.rows, self.encoder, self._is_last_alone = (
            rows,
            encoder,
            bool(getattr(trainer, "completion_only_loss", False)),
        )
        self._text_field = getattr(trainer.args, "dataset_text_field", "text")
        self.turn_text = TurnText(encoder)
        self._row_of_ids = {own.tobytes(): row for row in rows if (own := _ids_of(row)) is not None}
        self._reads_texts, self._evaluated = trained_roles == "all", trainer.eval_dataset
        given = [{"messages": each} if isinstance(each, list) else each for each in conversations or ()]
        found = [truth for row in given[:_MOST_GIVEN] for truth in self._truths(row)[:1]]
        self.given: list[Truth] = [each for truth in found for each in (truth, truth.reference) if each is not None]
        self._used = set[int]()

    def documents(self, batches: Sequence[SeenBatch]) -> list[Document]:
        self._used.clear()
        documents = [each for number, batch in enumerate(batches) for each in self._of_batch(number, batch)]
        is_doubled = [self.turn_text.is_doubled(self.encoder.decode(each.ids)) for each in documents]
        if 2 * sum(is_doubled) > len(documents):  # else a few texts spell it, which is forgery
            return [self._doubled(each) if found else each for each, found in zip(documents, is_doubled, strict=True)]
        if self._reads_texts and not self.given and not any(each.source or self._has_turns(each) for each in documents):
            return self._texts(documents)
        return documents

    def missing(self) -> list[str]:
        """Returns the given conversations that are in none of the last documents, and not in the evaluation."""
        missing = [each for each in self.given if id(each.content) not in self._used and not each.is_forged]
        return [each.excerpt for each in missing if not any(find(own, each.ids) >= 0 for own in self.held_out)]

    @cached_property
    def held_out(self) -> list[np.ndarray]:
        """The ids of the evaluation's rows, in which given conversations are not missing."""
        sets = self._evaluated.values() if isinstance(self._evaluated, dict) else [self._evaluated]
        found = list[np.ndarray]()
        for row in (row for each in sets if hasattr(each, "__len__") for row in islice(each, _MOST_GIVEN)):
            own = _ids_of(row)
            found += [truth.ids for truth in self._truths(row)] if own is None else [own]
        return found

    def _has_turns(self, document: Document) -> bool:
        """Returns whether ids that are no known conversation hold a control token or a header of turns all the same."""
        tokenizer = self.encoder.tokenizer
        ends = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        is_controlled = not self.encoder.special_ids.isdisjoint(set(document.ids.tolist()) - ends)
        return is_controlled or self.turn_text.occurs_in(self.encoder.decode(document.ids))

    def _texts(self, documents: Sequence[Document]) -> list[Document]:
        """Returns texts without turns, each of which ends with the token that ends a text; one that does not is cut."""
        eos, found = self.encoder.tokenizer.eos_token_id, list[Document]()
        has_ends = any(eos in each.ids for each in documents)
        for each in documents:
            is_end = each.ids == eos
            ends = np.flatnonzero(is_end & ~np.append(is_end[1:], False)) + 1  # the last of several
            for begin, end in pairwise(sorted({0, *ends.tolist(), len(each)})):
                part = each.part(begin, end)
                text = self.encoder.decode(n for n in part.ids if n not in self.encoder.special_ids)
                truth = self.encoder.truth(PlainText(text))
                known = locate(part, truth, "ids", self.encoder) if truth is not None else None
                found.append(part if known is None else replace(known, is_cut_after=has_ends and part.ids[-1] != eos))
        return found

    def may_be_several(self, document: Document) -> bool:
        """Returns whether a document that was read from its ids could also be several conversations."""
        return self.turn_text.may_be_several(self.encoder.decode(document.ids))

    def _truths(self, row: Any) -> list[Truth]:
        contents = read_row(row, self._text_field) if isinstance(row, Mapping) else ()
        return [truth for content in contents if (truth := self.encoder.truth(content)) is not None]

    def _of_batch(self, number: int, batch: SeenBatch) -> Iterator[Document]:
        for row, start, end, feature in _spans_of_rows(batch):
            ids = np.ascontiguousarray(batch.ids[row, start:end], dtype=np.int32)
            whole = Document(number, row, start, ids, batch.labels[row, start:end].astype(np.int32))
            inner = {at - start for at in _claims(batch, row, feature) if start < at < end}
            claims = [0, *sorted(inner), len(ids)]
            while len(claims) > 2 and self._is_padding(whole.part(*claims[-2:])):  # it has positions of its own
                claims.pop()
                whole = whole.part(0, claims[-1])
            truths = self._truths(self._known_row(feature))
            if self.given:  # what the user gives outranks what the rows have become
                own = {truth.ids.tobytes() for truth in truths}
                same = [id(truth.content) for truth in self.given if truth.ids.tobytes() in own]
                self._used.update(same)
                truths = truths if same else []
            if truths:
                yield self._of_row(whole, truths)
            elif self.given and (parts := self._given_parts(whole)):
                yield from parts
            else:
                yield from self._recovered(whole, claims)

    def _is_padding(self, document: Document) -> bool:
        is_padding = document.ids == self.encoder.tokenizer.pad_token_id
        return bool((is_padding & (document.labels == IGNORE_INDEX)).all())

    def _known_row(self, feature: Any) -> Any:
        """Returns the row of a feature, which may have lost its messages on the way."""
        ids = _ids_of(feature)
        return feature if ids is None else {**self._row_of_ids.get(ids.tobytes(), {}), **feature}

    def _of_row(self, whole: Document, truths: Sequence[Truth]) -> Document:
        """Returns the document of one row: the first truth that it is, or else the difference from the first one."""
        found = [each for truth in truths if (each := locate(whole, truth, "rows", self.encoder)) is not None]
        fitting = [each for each in found if not each.difference]
        if fitting and fitting[0].tokens is not None:
            return fitting[0]
        if not all(truth.is_declared for truth in truths):  # a text may have the form of the template
            parsed = self.turn_text.parse(whole.ids)
            known = self._parsed(whole, parsed[0][1]) if len(parsed) == 1 else whole
            if known.source:
                return known
        if found:
            return (fitting or found)[0]
        first = truths[0]
        if first.reference is not None and (forged := locate(whole, first.reference, "rows", self.encoder)) is not None:
            return forged
        difference = first.difference(whole.ids, self.encoder.decode)
        return replace(whole, source="rows", truth=first, difference=difference)

    def _recovered(self, whole: Document, claims: Sequence[int]) -> Iterator[Document]:
        """Yields the documents that are read from ids; no conversation goes on across a claimed border."""
        for start, end in pairwise(claims):
            for length, parsed in self.turn_text.parse(whole.ids[start:end]):
                document = self._parsed(whole.part(start, start + length), parsed)
                if self.given and not (document.num_cut_before or document.is_cut_after):
                    source = document.source or "conversations"
                    document = replace(document, source=source, difference=self._unlike_given(document))
                yield document
                start += length

    def _doubled(self, document: Document) -> Document:
        difference = "the template is applied twice: the text of a message begins as a rendered conversation does"
        return replace(document, source=document.source or "ids", difference=difference, is_rendered_twice=True)

    def _unlike_given(self, document: Document) -> str:
        """Describes how a document differs from the given conversation that shares most of its beginning and end."""

        def num_shared(truth: Truth) -> int:
            size = min(len(truth.ids), len(document))
            same = truth.ids[:size] == document.ids[:size], truth.ids[-size:][::-1] == document.ids[-size:][::-1]
            return sum(size if each.all() else int(np.argmin(each)) for each in same)

        nearest = max(self.given, key=num_shared)
        difference = nearest.difference(document.ids, self.encoder.decode)
        return f"it is none of the given conversations; of the nearest, {difference}"

    def _parsed(self, document: Document, parsed: Parsed | None) -> Document:
        """Returns the document with the truth that encoding its messages again gives, if its ids are the same."""
        if parsed is None or (truth := self.encoder.truth(parsed.conversation)) is None:
            return document
        if parsed.is_cut_before or parsed.is_cut_after:
            return fragment(document, truth, parsed) or document
        truth = truth.last_alone() if self._is_last_alone else truth
        return locate(document, truth, "ids", self.encoder) or document

    def _given_parts(self, whole: Document) -> list[Document]:
        """Returns the parts that are given conversations one after another; empty if they are not."""
        found, at, size = list[tuple[int, int, Truth]](), 0, len(whole)
        padding = {self.encoder.tokenizer.pad_token_id, self.encoder.tokenizer.eos_token_id}
        while at < size:
            truth, length = self._given_at(whole.ids[at:], is_first=at == 0)
            if truth is not None:
                found.append((at, at + length, truth))
            elif found and set(whole.ids[at:].tolist()) <= padding:
                (start, _, truth), length = found[-1], size - at
                found[-1] = (start, size, truth)
            else:
                return []
            at += length
        parts = [locate(whole.part(start, end), truth, "conversations", self.encoder) for start, end, truth in found]
        return [each for each in parts if each is not None] if None not in parts else []

    def _given_at(self, ids: np.ndarray, *, is_first: bool) -> tuple[Truth | None, int]:
        """Returns the given conversation with which the ids begin, and how many tokens are of it."""
        found = list[tuple[bool, int, Truth]]()
        for truth in self.given:
            at = find(truth.ids, ids[:_BEGINNING])
            length = min(len(truth.ids) - at, len(ids))
            # Within a conversation begins only what was cut there.
            can_begin = at == 0 or (at > 0 and (is_first or len(ids) < _BEGINNING))
            if can_begin and np.array_equal(truth.ids[at : at + length], ids[:length]):
                found.append((at == 0, length, truth))
        if not found:
            if len(ids) > 1 and ids[0] == self.encoder.tokenizer.bos_token_id:
                truth, length = self._given_at(ids[1:], is_first=False)
                return truth, length + 1
            return None, 0
        is_whole, length, truth = max(found, key=lambda each: each[:2])
        if length >= _LEAST_SHOWN:  # it may be of any of these
            self._used.update(id(each.content) for *pair, each in found if pair == [is_whole, length])
        return truth, length


# -- where rows of the data are in a batch ---------------------------------------------------------------------------


def _spans_of_rows(batch: SeenBatch) -> Iterator[tuple[int, int, int, Any]]:
    """Yields (row, start, end, feature): the tokens of a row that are no padding, or those of each of its features."""
    num_rows, features, ids = len(batch.ids), list(batch.features), batch.ids.astype(np.int32)
    lists = [_ids_of(feature) for feature in features]
    if len(features) == num_rows:
        for row, (feature, own) in enumerate(zip(features, lists, strict=True)):
            at = -1 if own is None else find(ids[row], own)
            start, end = _real(batch, row) if at < 0 or own is None else (at, at + len(own))
            yield row, start, end, feature
        return
    found, at = list[tuple[int, int, int, Any]](), 0
    for feature, own in zip(features, lists, strict=True) if num_rows == 1 else ():
        start = -1 if own is None else find(ids[0, at:], own)
        if start < 0 or own is None:
            break
        found.append((0, at + start, at + start + len(own), feature))
        at += start + len(own)
    is_flat = num_rows == 1 and len(found) == len(features) > 0
    yield from found if is_flat else ((row, *_real(batch, row), None) for row in range(num_rows))


def _ids_of(feature: Any) -> np.ndarray | None:
    ids = feature.get("input_ids") if isinstance(feature, Mapping) else None
    return None if ids is None else np.asarray(ids, dtype=np.int32).reshape(-1)


def _real(batch: SeenBatch, row: int) -> tuple[int, int]:
    """Returns the range of a row without its padding, as the attention mask shows it."""
    if batch.attended is None:
        return 0, batch.ids.shape[1]
    real = np.flatnonzero(batch.attended[row] != 0)
    return (int(real[0]), int(real[-1]) + 1) if len(real) else (0, 0)


def _claims(batch: SeenBatch, row: int, feature: Any) -> Iterable[Any]:
    """Yields where documents of a row begin by what the trainer passes: positions, numbers or lengths of documents."""
    if batch.positions is not None:
        yield from np.flatnonzero(np.diff(batch.positions[row]) <= 0) + 1
    numbered = batch.seen.get("seq_idx")
    if numbered is not None and len(numbered) == len(batch.ids):
        yield from np.flatnonzero(np.diff(numbered[row].cpu().numpy())) + 1
    if batch.attended is not None and batch.attended[row].max(initial=0) > 1:
        yield from np.flatnonzero(np.diff(batch.attended[row])) + 1
    if len(batch.ids) == 1 and (bounds := batch.seen.get("cu_seq_lens_q")) is not None:
        yield from bounds.reshape(-1).tolist()
    lengths = feature.get("seq_lengths") if isinstance(feature, Mapping) else None
    if lengths is not None and len(batch.features) == len(batch.ids):
        yield from np.cumsum(lengths)
