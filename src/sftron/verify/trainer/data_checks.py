"""Checks of a trainer's batches, of the training and of the evaluation: ids, labels, bounds and forged tokens.

verify_trainer.py says what a pass of each proves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sftron.data.types import IGNORE_INDEX
from sftron.verify.report import Finding, NotMeasuredError
from sftron.verify.trainer import remedies
from sftron.verify.trainer.batches import SeenBatch
from sftron.verify.trainer.documents import Document
from sftron.verify.trainer.label_checks import remedy_of_limit, with_lone_answers
from sftron.verify.trainer.measurements import Subject, with_evaluation
from sftron.verify.trainer.view import View

_MOST_SHOWN = 5
_APART, _ROUNDED_APART = 5e-4, 2**-4
"""Relative differences of last hidden states that are rounding, in float32 and in other types."""


def _counted(counts: Mapping[str, Sequence[Any]]) -> str:
    """Returns the numbers of what was found, by name; "" if there is nothing."""
    return ", ".join(f"{len(each):,} {name}" for name, each in counts.items() if each)


@with_evaluation
def ids(view: View) -> Finding:
    encoder, documents = view.encoder, view.documents
    num_known = sum(bool(each.source) for each in documents)
    if not num_known and encoder.problem and encoder.refused:
        measured = f"the rows are messages, and {encoder.problem}"
        return Finding(False, measured, "the template's ids", (), remedies.TEMPLATE_UNSET.of(view.trainer))
    if not num_known and view.training is not None and view.training.known() and view.turn_text.is_known:
        measured = f"none of {len(documents):,} documents has the form of the template"
        detail = (view.tokenizer.decode(documents[0].ids[:40]),)
        return Finding(False, measured, "all", detail, remedies.OTHER_FORMAT.of(view.trainer))
    wrong = [each for each in documents if each.difference]
    known = [each for each in documents if each.source] if wrong else view.known()
    what = "texts have the tokenizer's" if all(each.is_text for each in known) else "documents have the template's"
    measured = f"{len(known) - len(wrong):,} of {len(known):,} {what} ids"
    if num_longer := sum(
        each.truth is not None and len(each) > len(each.truth.ids) for each in known if not each.difference
    ):
        measured += f", {num_longer:,} and a token after them"
    detail = (*(f"{each.where}: {each.difference}" for each in wrong[:_MOST_SHOWN]), view.truth)
    return Finding(not wrong, measured, "all", detail, _ids_remedy(view, wrong) if wrong else "")


def _ids_remedy(view: View, wrong: Sequence[Document]) -> str:
    if wrong[0].is_rendered_twice:
        return remedies.APPLIED_TWICE.of(view.trainer)
    if wrong[0].lacks_tools:
        return remedies.TOOLS_LEFT_OUT.of(view.trainer)
    if wrong[0].difference.startswith("a doubled"):
        return remedies.DOUBLED_BOS.of(view.trainer)
    if remedy := remedy_of_limit(view, wrong):
        return remedy
    if getattr(view.trainer, "chat_template", None):
        return remedies.TRAINING_TEMPLATE.of(view.trainer)
    is_begun_late = wrong[0].difference.startswith("no ")
    return (remedies.NO_BEGINNING if is_begun_late else remedies.OTHER_FORMAT).of(view.trainer)


# -- bounds ----------------------------------------------------------------------------------------------------------


def positions(subject: Subject) -> Finding:
    rows, trainer = subject.training.documents_of_rows, subject.trainer
    if not rows:
        raise NotMeasuredError("no document has known bounds")
    wrong, crossing = list[str](), list[str]()
    for batch, row, documents in rows:
        for each in documents:
            if why := _wrong_positions(batch, row, documents, each):
                wrong.append(f"{each.where}: {why}")
            if each.start and each is not documents[0] and each.labels[0] != IGNORE_INDEX:
                crossing.append(f"{each.where} is trained from the document before it")
    num_packed = sum(len(documents) > 1 for *_, documents in rows)
    measured = f"{len(rows):,} rows, {num_packed:,} of them packed: positions restart"
    apart, allowed = subject.apart_from_alone, _ROUNDED_APART if subject.model.is_rounded else _APART
    if apart is not None and all(each.isolated for _, each in subject.isolations[0]):
        if wrong and apart <= allowed:
            measured, wrong = f"{len(wrong):,} positions run on; as they are relative, the model computes the same", []
        elif not wrong and not crossing and apart > allowed:
            measured = f"a conversation alone is computed otherwise: {apart:.1g} apart, relative"
            detail = (f"arguments: {subject.arguments}",)
            return Finding(False, measured, f"<= {allowed:.0e}", detail, remedies.NOT_AS_ALONE.of(trainer))
    if wrong and apart is None and remedies.library_of(trainer) == "loop":  # the model may make its own positions
        raise NotMeasuredError(f"{wrong[0]}, and the model cannot be called with one conversation alone")
    evaluated = [f"{name}: {why}" for name, why in _of_evaluation(subject) if _UNORDERED in why]
    if evaluated and not (wrong or crossing):
        remedy = f"In the evaluation's batches: {remedies.POSITIONS_OUT_OF_ORDER.of(trainer)}"
        return Finding(False, evaluated[0], "none", tuple(evaluated[:_MOST_SHOWN]), remedy)
    unordered = [each for each in wrong if _UNORDERED in each]
    starts = [each for each in wrong if _UNORDERED not in each]
    found = _counted({"documents out of order": unordered, "wrong starts": starts, "labels cross": crossing})
    remedy = remedies.POSITIONS_RUN_ON if starts else remedies.LABELS_CROSS
    remedy = remedies.POSITIONS_OUT_OF_ORDER if unordered else remedy
    detail = (*wrong[:_MOST_SHOWN], *crossing[:_MOST_SHOWN])
    return Finding(not found, found or measured, "none", detail, remedy.of(trainer))


_UNORDERED = "are not one after another"


def _of_evaluation(subject: Subject) -> Iterator[tuple[str, str]]:
    """Yields the name of an evaluation, and what is wrong with the positions of a document."""
    for name, view in subject.evaluation.items():
        for batch, row, documents in view.documents_of_rows if isinstance(view, View) else ():
            yield from ((name, _wrong_positions(batch, row, documents, each)) for each in documents)


def _wrong_positions(batch: SeenBatch, row: int, documents: Sequence[Document], document: Document) -> str:
    """Describes what is wrong with the positions of a document; "" if nothing is."""
    if batch.positions is None:
        return "no position_ids are passed, so positions run on" if document is not documents[0] else ""
    own = batch.positions[document.index]
    is_left_padded = len(documents) == 1 and batch.attended is not None and batch.attended[row, 0] == 0
    if (np.diff(own) != 1).any():
        return f"positions {' '.join(map(str, own[:4]))} ... {_UNORDERED}"
    return f"positions begin at {int(own[0])}" if len(own) and own[0] != 0 and not is_left_padded else ""


@with_evaluation
def truncation(view: View) -> Finding:
    documents = [each for each in view.documents if each.source]
    cut, begins = [each for each in documents if each.is_cut_after], [each for each in documents if each.num_cut_before]
    empty = [each[0] for batch, row, each in view.documents_of_rows if (batch.labels[row, 1:] == IGNORE_INDEX).all()]
    skipped = _skipped(view)
    missing = view.missing
    num_others = sum(each.source in ("", "ids") or bool(each.difference) for each in view.documents)
    if missing and num_others and len(missing) <= num_others + len(view.held_out):
        missing = []  # they are there, as other ids or as fragments
    counts = {
        "answers cut off": [each for each in documents if each.cuts_answer],
        "conversations end early": cut,
        "conversations lack their beginning": begins,
        "rows have nothing to train": empty,
        "conversations are in micro-batches that training_step skips": skipped,
    }
    detail = [f"{name}: the first is {each[0].where}" for name, each in counts.items() if each]
    detail += [f"in no batch: {text!r}" for text in missing[:_MOST_SHOWN]]
    found = _counted({**counts, "conversations are in no batch": missing})
    if not found:
        return Finding(True, f"{len(view.known()):,} documents are whole", "none")
    args, remedy = view.trainer.args, remedies.PARTS
    is_wrapped = getattr(args, "packing", False) and getattr(args, "packing_strategy", "") == "wrapped"
    if is_wrapped or (begins and cut and any(len(each) > 1 for *_, each in view.documents_of_rows)):
        remedy = remedies.CUT_BY_PACKING
    elif not (cut or begins):
        remedy = remedies.ROWS_DROPPED if missing else remedies.ROWS_SKIPPED if skipped else remedies.ROWS_EMPTY
    longest = max(map(len, documents), default=0)
    return Finding(False, found, "none", tuple(detail), remedy.of(view.trainer, longest=longest))


def _skipped(view: View) -> list[Document]:
    """Returns the documents of micro-batches with labels for which the step does not call the model, as for others."""
    if not any(batch.is_called for batch in view.batches):
        return []  # or it calls the model in another way
    return [each for each in view.documents if not (batch := view.batches[each.batch]).is_called and batch.num_trained]


# -- forgery ---------------------------------------------------------------------------------------------------------


def forgery(subject: Subject) -> Finding:
    documents, tokenizer = subject.training.documents, subject.training.tokenizer
    if lone := with_lone_answers(documents):
        measured = f"{len(lone):,} documents have an answer without a label, as those that a text spells"
        detail = [f"{each.where}: {tokenizer.decode(each.ids[:40])!r}" for each in lone[:_MOST_SHOWN]]
        detail.append("conversations= shows whether a text spells them")
        return Finding(False, measured, "none", tuple(detail), remedies.FORGED.of(subject.trainer))
    known = [each for each in documents if each.truth is not None and each.source in ("rows", "conversations")]
    if all(each.is_rendered_twice for each in documents):
        raise NotMeasuredError("the template is applied twice, so the texts of the messages are not known; see ids")
    if not known:
        raise NotMeasuredError("the messages of the rows are gone, and ids do not show who wrote a control token")
    forged = [each for each in known if each.is_forged]
    num_plain = sum(each.tokens is not None and each.tokens.holds_control_text for each in known)
    measured = f"{len(forged):,} of {len(known):,} documents have control tokens that a text spells"
    if not forged:
        measured = f"no text became a control token; {num_plain:,} of {len(known):,} documents spell one"
    detail = [f"{each.where}: {each.truth.excerpt!r}" for each in forged[:_MOST_SHOWN] if each.truth is not None]
    return Finding(not forged, measured, "none", tuple(detail), remedies.FORGED.of(subject.trainer))
