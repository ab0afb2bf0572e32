"""Checks of a trainer's batches: ids, positions, truncation and forged tokens.

The docstring of a check is the law that a pass proves, and is printed in reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sftron.data.types import IGNORE_INDEX
from sftron.verify import trainer_remedies as remedies
from sftron.verify.table import Finding, NotMeasuredError
from sftron.verify.trainer_batches import SeenBatch
from sftron.verify.trainer_documents import Document
from sftron.verify.trainer_label_checks import with_evaluation, with_lone_answers
from sftron.verify.trainer_subject import TrainerSubject, View

_MOST_SHOWN = 5
_APART, _ROUNDED_APART = 5e-4, 2**-4
"""Relative differences of last hidden states that are rounding, in float32 and in other types."""


def _counted(counts: Mapping[str, Sequence[Any]]) -> str:
    """Returns the numbers of what was found, by name; "" if there is nothing."""
    return ", ".join(f"{len(each):,} {name}" for name, each in counts.items() if each)


@with_evaluation
def ids(view: View) -> Finding:
    """Each document has the ids that the tokenizer's own template gives for its row, with one beginning."""
    encoder, found = view.finder.encoder, view.found
    num_known = sum(bool(each.source) for each in found.documents)
    if not num_known and encoder.problem and encoder.refused:
        measured = f"the rows are messages, and {encoder.problem}"
        return Finding(False, measured, "the template's ids", (), remedies.TEMPLATE_UNSET)
    if not num_known and view.training is not None and view.training.known() and view.finder.turn_text.is_known:
        measured = f"none of {len(found.documents):,} documents has the form of the template"
        return Finding(False, measured, "all", (view.tokenizer.decode(found.documents[0].ids[:40]),))
    wrong = [each for each in found.documents if each.difference]
    known = [each for each in found.documents if each.source] if wrong else view.known()
    measured = f"{len(known) - len(wrong):,} of {len(known):,} documents have the template's ids"
    if num_longer := sum(
        each.truth is not None and len(each) > len(each.truth.ids) for each in known if not each.difference
    ):
        measured += f", {num_longer:,} and a token after them"
    detail = (*(f"{each.where}: {each.difference}" for each in wrong[:_MOST_SHOWN]), found.summary)
    first = wrong[0].difference if wrong else ""
    remedy = remedies.NO_BEGINNING if first.startswith("no ") else ""
    return Finding(
        not wrong, measured, "all", detail, remedies.DOUBLED_BOS if first.startswith("a doubled") else remedy
    )


# -- bounds ----------------------------------------------------------------------------------------------------------


def positions(subject: TrainerSubject) -> Finding:
    """Positions restart with each document, and no document's first token is predicted from its neighbor."""
    rows = subject.training.rows
    if not rows:
        raise NotMeasuredError("no document could be told apart")
    pairs = [(row, each) for row in rows for each in row[2]]
    wrong = [f"{each.where}: {why}" for row, each in pairs if (why := _wrong_positions(*row, each))]
    crossing = [
        f"{each.where} is trained from the document before it"
        for (*_, documents), each in pairs
        if each.start and documents[0] is not each and each.labels[0] != IGNORE_INDEX
    ]
    num_packed = sum(len(documents) > 1 for *_, documents in rows)
    measured = f"{len(rows):,} rows, {num_packed:,} of them packed: positions restart"
    allowed = _ROUNDED_APART if subject.model.is_rounded else _APART
    apart, is_isolated = subject.apart_from_alone, all(each.isolated for _, each in subject.isolations[0])
    if wrong and is_isolated and apart is not None and apart <= allowed:
        measured, wrong = f"{len(wrong):,} positions run on; as they are relative, the model computes the same", []
    found = _counted({"wrong starts": wrong, "labels cross": crossing})
    if not found and is_isolated and apart is not None and apart > allowed:
        measured = f"a conversation alone is computed otherwise: {apart:.1g} apart, relative"
        return Finding(
            False, measured, f"<= {allowed:.0e}", (f"arguments: {subject.arguments}",), remedies.NOT_AS_ALONE
        )
    measured, remedy = found or measured, remedies.POSITIONS_RUN_ON if wrong else remedies.LABELS_CROSS
    return Finding(not found, measured, "none", (*wrong[:_MOST_SHOWN], *crossing[:_MOST_SHOWN]), remedy)


def _wrong_positions(batch: SeenBatch, row: int, documents: Sequence[Document], document: Document) -> str:
    """Describes what is wrong with the positions of a document; "" if nothing is."""
    if batch.positions is None:
        return "no position_ids are passed, so positions run on" if document is not documents[0] else ""
    own = batch.positions[document.place]
    is_left_padded = len(documents) == 1 and batch.attended is not None and batch.attended[row, 0] == 0
    if (np.diff(own) != 1).any():
        return f"positions {' '.join(map(str, own[:4]))} ... are not one after another"
    return f"positions begin at {int(own[0])}" if len(own) and own[0] != 0 and not is_left_padded else ""


@with_evaluation
def truncation(view: View) -> Finding:
    """No answer is cut off, no conversation loses its beginning, and no row is dropped or has nothing to train."""
    documents = [each for each in view.found.documents if each.source]
    cut, begins = [each for each in documents if each.is_cut_after], [each for each in documents if each.num_cut_before]
    empty = [each[0] for batch, row, each in view.rows if (batch.labels[row, 1:] == IGNORE_INDEX).all()]
    missing = view.found.missing if view.is_whole else []
    if len(missing) <= sum(bool(each.difference or each.num_cut_before) for each in documents):
        missing = []  # they are there, as other ids or as fragments
    counts = {
        "answers cut off": [each for each in documents if each.cuts_answer],
        "conversations end early": cut,
        "conversations lack their beginning": begins,
        "rows have nothing to train": empty,
    }
    detail = [f"{name}: the first is {each[0].where}" for name, each in counts.items() if each]
    detail += [f"in no batch: {text!r}" for text in missing[:_MOST_SHOWN]]
    found = _counted({**counts, "conversations are in no batch": missing})
    if not found:
        return Finding(True, f"{len(view.known()):,} documents are whole", "none")
    args, remedy = view.trainer.args, remedies.TOO_LONG.format(longest=max(map(len, documents), default=0))
    is_wrapped = getattr(args, "packing", False) and getattr(args, "packing_strategy", "") == "wrapped"
    if is_wrapped or (begins and cut and any(len(each) > 1 for *_, each in view.rows)):
        remedy = remedies.CUT_BY_PACKING
    elif not (cut or begins):
        remedy = remedies.ROWS_DROPPED if missing else remedies.ROWS_EMPTY
    return Finding(False, found, "none", tuple(detail), remedy)


# -- forgery ---------------------------------------------------------------------------------------------------------


def forgery(subject: TrainerSubject) -> Finding:
    """Text that spells a control token stays plain text."""
    documents, tokenizer = subject.training.found.documents, subject.training.tokenizer
    if lone := with_lone_answers(documents):
        measured = f"{len(lone):,} documents have an answer without a label, as those that a text spells"
        detail = [f"{each.where}: {tokenizer.decode(each.ids[:40])!r}" for each in lone[:_MOST_SHOWN]]
        return Finding(False, measured, "none", (*detail, "conversations= shows whether a text spells them"))
    known = [each for each in documents if each.truth is not None and each.source in ("rows", "conversations")]
    if not known:
        raise NotMeasuredError("the messages of the rows are gone, and ids do not show who wrote a control token")
    forged = [each for each in known if each.is_forged]
    num_plain = sum(each.tokens is not None and each.tokens.holds_control_text for each in known)
    measured = f"{len(forged):,} of {len(known):,} documents have control tokens that a text spells"
    if not forged:
        measured = f"no text became a control token; {num_plain:,} of {len(known):,} documents spell one"
    detail = [f"{each.where}: {each.truth.excerpt!r}" for each in forged[:_MOST_SHOWN] if each.truth is not None]
    return Finding(not forged, measured, "none", tuple(detail))
