"""The documents of a trainer's batches, and the conversation that each of them should be.

the truth of each    a row of the data set that still holds messages; one of the given conversations; or the
                     conversation that is read from the ids, encoded again, and has the same ids
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

import numpy as np

from sftcheck.batches import SeenBatch, find, ids_of, spans_of_rows
from sftcheck.documents.document import Document, fragment, locate
from sftcheck.documents.truth import Encoder, PlainText, Truth, read_row
from sftcheck.documents.turn_text import Parsed, TurnText
from sftcheck.tolerances import KNOWN_DOCUMENTS
from sftron.checks.report import NotMeasuredError
from sftron.data.types import IGNORE_INDEX

_LEAST_OF_CLAIM = 3
"""The fewest tokens, on average, of documents whose borders positions claim; a conversation has more."""
_MOST_GIVEN, _BEGINNING, _LEAST_SHOWN = 4096, 24, 8
"""Given conversations: the most that are read, the tokens that are searched for, and the fewest that identify one."""


class View:
    """Batches of the training's rows, or of the evaluation's, and the documents in them.

    Args:
        trainer: Declares, if it is TRL's, the column of texts, and whether only the last answer is to be trained.
        rows: The sampled rows of the data set.
        conversations: Rows or lists of messages given by the user.
        trained_roles: If these are "all", ids that hold no conversation are read as texts.
        is_whole: Whether the batches hold all rows of the training.
        training: For an evaluation's batches, those of the training.
    """

    def __init__(
        self,
        trainer: Any,
        encoder: Encoder,
        rows: Sequence[Any],
        batches: Sequence[SeenBatch],
        trained_roles: str,
        *,
        conversations: Sequence[Any] | None = None,
        is_whole: bool = False,
        training: View | None = None,
    ) -> None:
        self.trainer, self.encoder, self.tokenizer = trainer, encoder, encoder.tokenizer
        self.rows, self.batches, self.trained_roles, self.training = rows, batches, trained_roles, training
        self.turn_text = TurnText(encoder)
        self._is_last_alone = bool(getattr(trainer, "completion_only_loss", False))
        self._row_of_ids = {ids.tobytes(): row for row in rows if (ids := ids_of(row)) is not None}
        given = [{"messages": each} if isinstance(each, list) else each for each in conversations or ()]
        truths = [truth for row in given[:_MOST_GIVEN] for truth in self._first_truths(row)]
        self.given: list[Truth] = [each for truth in truths for each in (truth, truth.reference) if each is not None]
        self._used = set[int]()
        self.documents = self.documents_of(batches)
        self.missing = self._missing() if is_whole else []
        """The given conversations that are in no batch, and not in the evaluation."""
        self._refused = Counter(encoder.refused)

    @property
    def truth(self) -> str:
        """The sources of the expected documents, and the reasons why rows cannot be read or rendered."""
        names = {
            "rows": "from the data set's rows",
            "conversations": "from conversations=",
            "ids": "recovered from ids",
            "": "not recovered",
        }
        counts = Counter(each.source for each in self.documents)
        words = [f"{counts[source]:,} {name}" for source, name in names.items() if counts[source]]
        reasons = [f"{reason} ({count:,})" for reason, count in self._refused.most_common(2)]
        return "; ".join([f"{len(self.documents):,} documents: {', '.join(words) or 'none'}", *reasons])

    @property
    def num_trained_documents(self) -> int:
        """How many documents of an evaluation are in the training's batches too."""
        trained = {each.ids.tobytes() for each in self.training.documents} if self.training else set[bytes]()
        return sum(each.ids.tobytes() in trained for each in self.documents)

    def with_roles(self) -> list[Document]:
        """Returns the documents whose tokens have roles. Raises NotMeasuredError if there are none."""
        documents = [each for each in self.documents if each.tokens is not None]
        if not documents:
            raise NotMeasuredError(f"no document of the batches has known roles: {self.truth}")
        return documents

    def known(self) -> list[Document]:
        """Returns the documents that were recovered. Raises NotMeasuredError if more than a few were not."""
        documents = [each for each in self.documents if each.source]
        if not documents or len(documents) < KNOWN_DOCUMENTS * len(self.documents):
            raise NotMeasuredError(f"give the rows as conversations=; of {self.truth}")
        return documents

    @cached_property
    def documents_of_rows(self) -> list[tuple[SeenBatch, int, list[Document]]]:
        """Each row of a batch that holds documents with known bounds."""
        of_rows: dict[tuple[int, int], list[Document]] = {}
        for each in self.documents:
            of_rows.setdefault((each.batch, each.row), []).append(each)
        return [
            (self.batches[number], row, documents)
            for (number, row), documents in of_rows.items()
            if any(each.source for each in documents)
        ]

    # -- how documents are found -------------------------------------------------------------------------------------

    def documents_of(self, batches: Sequence[SeenBatch]) -> list[Document]:
        self._used.clear()
        documents = [each for number, batch in enumerate(batches) for each in self._of_batch(number, batch)]
        documents = [self._without_tools(each) if each.lacks_tools else each for each in documents]
        is_doubled = [self.turn_text.is_doubled(self.encoder.decode(each.ids)) for each in documents]
        if 2 * sum(is_doubled) > len(documents):  # else a few texts spell it, which is forgery
            return [self._doubled(each) if found else each for each, found in zip(documents, is_doubled, strict=True)]
        may_be_texts = self.trained_roles == "all" and not self.given
        if may_be_texts and not any(each.source or self._has_turns(each) for each in documents):
            return self._texts(documents)
        return documents

    def _missing(self) -> list[str]:
        expected = [each for each in self.given if not (each.is_forged or each.lacks_tools)]
        missing = [each for each in expected if id(each.content) not in self._used]
        return [each.excerpt for each in missing if not any(find(ids, each.ids) >= 0 for ids in self.held_out)]

    @cached_property
    def held_out(self) -> list[np.ndarray]:
        """The ids of the evaluation's rows, in which given conversations are not missing."""
        data = self.trainer.eval_dataset
        sets = data.values() if isinstance(data, dict) else [data]
        rows = [row for each in sets if hasattr(each, "__len__") for row in islice(each, _MOST_GIVEN)]
        found = list[np.ndarray]()
        for row in rows:
            ids = ids_of(row)
            found += [truth.ids for truth in self._truths(row)] if ids is None else [ids]
        return found

    def _has_turns(self, document: Document) -> bool:
        """Returns whether ids that are no known conversation hold a control token or a header of turns all the same."""
        tokenizer = self.tokenizer
        ends = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        is_controlled = not self.encoder.special_ids.isdisjoint(set(document.ids.tolist()) - ends)
        return is_controlled or self.turn_text.occurs_in(self.encoder.decode(document.ids))

    def _texts(self, documents: Sequence[Document]) -> list[Document]:
        """Returns texts without turns, each of which ends with the token that ends a text; one that does not is cut."""
        eos, found = self.tokenizer.eos_token_id, list[Document]()
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
        field = getattr(self.trainer.args, "dataset_text_field", "text")
        contents = read_row(row, field) if isinstance(row, Mapping) else ()
        return [truth for content in contents for truth in self.encoder.truths(content)]

    def _first_truths(self, row: Any) -> list[Truth]:
        """Returns what a row is first of all, and the same without its tools."""
        truths = self._truths(row)
        return [truth for n, truth in enumerate(truths) if n == 0 or (n == 1 and truth.lacks_tools)]

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
        is_padding = document.ids == self.tokenizer.pad_token_id
        return bool((is_padding & (document.labels == IGNORE_INDEX)).all())

    def _known_row(self, feature: Any) -> Any:
        """Returns the row of a feature, which may have lost its messages on the way."""
        ids = ids_of(feature)
        return feature if ids is None else {**self._row_of_ids.get(ids.tobytes(), {}), **feature}

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
                    document = self._compared(document)
                yield document
                start += length

    def _doubled(self, document: Document) -> Document:
        difference = "the template is applied twice: the text of a message begins as a rendered conversation does"
        return replace(document, source=document.source or "ids", difference=difference, is_rendered_twice=True)

    def _without_tools(self, document: Document) -> Document:
        return replace(document, difference="the tools of its row are not in it")

    def _compared(self, document: Document) -> Document:
        """Returns the document as one of the given conversations, perhaps without the template's end; or how it differs
        from the nearest.
        """
        for truth in self.given:
            found = locate(document, truth, "conversations", self.encoder)
            if found is not None and not (found.difference or found.num_cut_before or found.is_cut_after):
                self._used.add(id(truth.content))
                return found
        source = document.source or "conversations"
        return replace(document, source=source, difference=self._unlike_given(document))

    def _unlike_given(self, document: Document) -> str:
        """Describes how a document differs from the given conversation that shares most of its beginning."""

        def num_shared(truth: Truth) -> int:
            size = min(len(truth.ids), len(document))
            return int(np.cumprod(truth.ids[:size] == document.ids[:size]).sum())

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
        padding = {self.tokenizer.pad_token_id, self.tokenizer.eos_token_id}
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
            return None, 0
        is_whole, length, truth = max(found, key=lambda each: each[:2])
        if length >= _LEAST_SHOWN:  # it may be of any of these
            self._used.update(id(each.content) for *pair, each in found if pair == [is_whole, length])
        return truth, length
