"""The documents of a trainer's batches, and the conversation that each of them should be.

the truth of each    a row of the data set that still holds messages; one of the given conversations; or the
                     conversation that is read from the ids, encoded again, and has the same ids
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from sftcheck.batches import SeenBatch, find
from sftcheck.documents.declared import Declared
from sftcheck.documents.document import Document
from sftcheck.documents.finder import Finder
from sftcheck.documents.truth import Encoder
from sftcheck.tolerances import KNOWN_DOCUMENTS
from sftron.checks.report import NotMeasuredError


class View:
    """Batches of the training's rows, or of the evaluation's, and the documents in them.

    Args:
        rows: The sampled rows of the data set.
        conversations: Rows or lists of messages given by the user.
        trained_roles: If these are "all", ids that hold no conversation are read as texts.
        is_whole: Whether the batches hold all rows of the training.
        training: For an evaluation's batches, those of the training.
    """

    def __init__(
        self,
        declared: Declared,
        encoder: Encoder,
        rows: Sequence[Any],
        batches: Sequence[SeenBatch],
        trained_roles: str,
        *,
        conversations: Sequence[Any] | None = None,
        is_whole: bool = False,
        training: View | None = None,
    ) -> None:
        self.declared, self.encoder, self.tokenizer = declared, encoder, encoder.tokenizer
        self.rows, self.batches, self.trained_roles, self.training = rows, batches, trained_roles, training
        self.finder = Finder(declared, encoder, rows, trained_roles, conversations)
        self.documents = self.finder.documents_of(batches)
        missing = self.finder.given.missing() if is_whole else []
        self.missing = [each.excerpt for each in missing if not any(find(ids, each.ids) >= 0 for ids in self.held_out)]
        """The given conversations that are in no batch, and not in the evaluation."""
        self._refused = Counter(encoder.refused)

    def documents_of(self, batches: Sequence[SeenBatch]) -> list[Document]:
        return self.finder.documents_of(batches)

    @cached_property
    def held_out(self) -> list[np.ndarray]:
        """The ids of the evaluation's rows, in which given conversations are not missing."""
        return self.finder.held_out()

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

    def may_be_several(self, document: Document) -> bool:
        """Returns whether a document that was read from its ids could also be several conversations."""
        return self.finder.turn_text.may_be_several(self.encoder.decode(document.ids))
