"""How the documents of a batch are found: each row's conversation is known, is one of the given ones, or is read.

a row of a batch  ->  the row of the data set that it is, if that still holds messages      (_of_row)
                  ->  given conversations, one after another                                (given.py)
                  ->  conversations that are read from its ids, and encoded again           (_recovered)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import numpy as np

from sftcheck.batches import SeenBatch, ids_of, spans_of_rows
from sftcheck.documents.declared import Declared
from sftcheck.documents.document import Document, fragment, locate
from sftcheck.documents.given import GivenConversations
from sftcheck.documents.truth import Encoder, PlainText, Truth, read_row
from sftcheck.documents.turn_text import Parsed, TurnText
from sftron.data.types import IGNORE_INDEX

_MOST_GIVEN = 4096
"""The most given conversations, and rows of an evaluation, that are read."""
_LEAST_OF_CLAIM = 3
"""The fewest tokens, on average, of documents whose borders positions claim; a conversation has more."""


class Finder:
    """Finds the documents of batches, and the conversation that each of them should be.

    Args:
        rows: The sampled rows of the data set.
        conversations: Rows or lists of messages given by the user.
        trained_roles: If these are "all", ids that hold no conversation are read as texts.
    """

    def __init__(
        self,
        declared: Declared,
        encoder: Encoder,
        rows: Sequence[Any],
        trained_roles: str,
        conversations: Sequence[Any] | None = None,
    ) -> None:
        self.declared, self.encoder, self.turn_text = declared, encoder, TurnText(encoder)
        self.row_of_ids = {ids.tobytes(): row for row in rows if (ids := ids_of(row)) is not None}
        given = [{"messages": each} if isinstance(each, list) else each for each in conversations or ()]
        truths = [truth for row in given[:_MOST_GIVEN] for truth in self._first_truths(row)]
        self.given = GivenConversations(encoder, truths)
        self._may_be_texts = trained_roles == "all" and not self.given

    def documents_of(self, batches: Sequence[SeenBatch]) -> list[Document]:
        """Returns the documents of batches, in order."""
        self.given.begin()
        documents = [each for number, batch in enumerate(batches) for each in self._of_batch(number, batch)]
        documents = [self._without_tools(each) if each.lacks_tools else each for each in documents]
        is_doubled = [self.turn_text.is_doubled(self.encoder.decode(each.ids)) for each in documents]
        if 2 * sum(is_doubled) > len(documents):  # else a few texts spell it, which is forgery
            return [self._doubled(each) if found else each for each, found in zip(documents, is_doubled, strict=True)]
        if self._may_be_texts and not any(each.source or self._has_turns(each) for each in documents):
            return self._texts(documents)
        return documents

    def held_out(self) -> list[np.ndarray]:
        """Returns the ids of the evaluation's rows, in which given conversations are not missing."""
        found = list[np.ndarray]()
        for data in self.declared.evaluation:
            for row in islice(data, _MOST_GIVEN) if hasattr(data, "__len__") else ():
                ids = ids_of(row)
                found += [truth.ids for truth in self._truths(row)] if ids is None else [ids]
        return found

    def _of_batch(self, number: int, batch: SeenBatch) -> Iterator[Document]:
        for row, start, end, feature in spans_of_rows(batch):
            ids = np.ascontiguousarray(batch.ids[row, start:end], dtype=np.int32)
            whole = Document(number, row, start, ids, batch.labels[row, start:end].astype(np.int32))
            inner = {at - start for at in batch.claimed_starts(row) if start < at < end}
            claims = [0, *sorted(inner), len(ids)]
            while len(claims) > 2 and self._is_padding(whole.part(*claims[-2:])):  # it has positions of its own
                claims.pop()
                whole = whole.part(0, claims[-1])
            if _LEAST_OF_CLAIM * (len(claims) - 1) > len(whole):  # such as positions that run backward or stand still
                claims = [0, len(whole)]
            truths = self._truths(self._known_row(feature))
            if self.given:  # what the user gives outranks what the rows have become
                truths = truths if self.given.holds(truths) else []
            if truths:
                yield self._of_row(whole, truths)
            elif self.given and (parts := self.given.parts(whole)):
                yield from parts
            else:
                yield from self._recovered(whole, claims)

    def _is_padding(self, document: Document) -> bool:
        is_padding = document.ids == self.encoder.tokenizer.pad_token_id
        return bool((is_padding & (document.labels == IGNORE_INDEX)).all())

    def _known_row(self, feature: Any) -> Any:
        """Returns the row of a feature, which may have lost its messages on the way."""
        ids = ids_of(feature)
        return feature if ids is None else {**self.row_of_ids.get(ids.tobytes(), {}), **feature}

    def _truths(self, row: Any) -> list[Truth]:
        contents = read_row(row, self.declared.text_column) if isinstance(row, Mapping) else ()
        return [truth for content in contents for truth in self.encoder.truths(content)]

    def _first_truths(self, row: Any) -> list[Truth]:
        """Returns what a row is first of all, and the same without its tools."""
        truths = self._truths(row)
        return [truth for n, truth in enumerate(truths) if n == 0 or (n == 1 and truth.lacks_tools)]

    def _of_row(self, whole: Document, truths: Sequence[Truth]) -> Document:
        """Returns the document of one row: the first truth that it is, or else the difference from the first one."""
        found = [each for truth in truths if (each := locate(whole, truth, "rows", self.encoder)) is not None]
        # A row without its tools is also the end of the row with them.
        fitting = [each for each in found if not each.difference and not (each.num_cut_before or each.is_cut_after)]
        fitting = fitting or [each for each in found if not each.difference]
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
                    document = self.given.match(document)
                yield document
                start += length

    def _parsed(self, document: Document, parsed: Parsed | None) -> Document:
        """Returns the document with the truth that encoding its messages again gives, if its ids are the same."""
        if parsed is None or (truth := self.encoder.truth(parsed.conversation)) is None:
            return document
        if parsed.is_cut_before or parsed.is_cut_after:
            return fragment(document, truth, parsed) or document
        truth = truth.last_alone() if self.declared.is_completion_only else truth
        return locate(document, truth, "ids", self.encoder) or document

    def _doubled(self, document: Document) -> Document:
        difference = "the template is applied twice: the text of a message begins as a rendered conversation does"
        return replace(document, source=document.source or "ids", difference=difference, is_rendered_twice=True)

    def _without_tools(self, document: Document) -> Document:
        return replace(document, difference="the tools of its row are not in it")

    def _has_turns(self, document: Document) -> bool:
        """Returns whether ids that are no known conversation hold a control token or a header of turns all the same."""
        tokenizer = self.encoder.tokenizer
        ends = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        is_controlled = not self.encoder.special_ids.isdisjoint(set(document.ids.tolist()) - ends)
        return is_controlled or self.turn_text.occurs_in(self.encoder.decode(document.ids))

    def _texts(self, documents: Sequence[Document]) -> list[Document]:
        """Returns texts without turns. A text ends with the end-of-text token; one without it is cut."""
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
