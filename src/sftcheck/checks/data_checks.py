"""Checks of a trainer's batches, of the training and of the evaluation: ids, labels, bounds and forged tokens.

verify_trainer.py says what a pass of each proves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sftcheck.batches import SeenBatch
from sftcheck.checks.label_checks import are_cut_by_limit, longest_of, with_lone_answers
from sftcheck.documents.document import Document
from sftcheck.documents.view import View
from sftcheck.faults import Fault
from sftcheck.subject import Subject, with_evaluation
from sftcheck.tolerances import ALONE
from sftron.checks.report import EVALUATION, Finding, NotMeasuredError
from sftron.data.types import IGNORE_INDEX

_MOST_SHOWN = 5


def _counted(counts: Mapping[str, Sequence[Any]]) -> str:
    """Returns the numbers of what was found, by name; "" if there is nothing."""
    return ", ".join(f"{len(each):,} {name}" for name, each in counts.items() if each)


@with_evaluation
def ids(view: View) -> Finding:
    encoder, documents = view.encoder, view.documents
    num_known = sum(bool(each.source) for each in documents)
    if not num_known and encoder.problem and encoder.refused:
        measured = f"the rows are messages, and {encoder.problem}"
        return Finding(False, measured, "the template's ids", (), (Fault.TEMPLATE_UNSET,))
    if not num_known and view.training is not None and view.training.known() and view.finder.turn_text.is_known:
        measured = f"none of {len(documents):,} documents has the form of the template"
        detail = (view.tokenizer.decode(documents[0].ids[:40]),)
        return Finding(False, measured, "all", detail, (Fault.OTHER_TURNS,))
    wrong = [each for each in documents if each.difference]
    known = [each for each in documents if each.source] if wrong else view.known()
    what = "texts have the tokenizer's" if all(each.is_text for each in known) else "documents have the template's"
    measured = f"{len(known) - len(wrong):,} of {len(known):,} {what} ids"
    if num_longer := sum(
        each.truth is not None and len(each) > len(each.truth.ids) for each in known if not each.difference
    ):
        measured += f", {num_longer:,} and a token after them"
    detail = (*(f"{each.where}: {each.difference}" for each in wrong[:_MOST_SHOWN]), view.truth)
    if not wrong:
        return Finding(True, measured, "all", detail)
    return Finding(False, measured, "all", detail, (_fault_of_ids(view, wrong),), longest_of(view))


def _fault_of_ids(view: View, wrong: Sequence[Document]) -> Fault:
    if wrong[0].is_rendered_twice:
        return Fault.APPLIED_TWICE
    if wrong[0].lacks_tools:
        return Fault.TOOLS_LEFT_OUT
    if wrong[0].fault is Fault.DOUBLED_BOS:
        return Fault.DOUBLED_BOS
    if are_cut_by_limit(view, wrong):
        return Fault.ROWS_CUT
    if view.declared.has_training_template:
        return Fault.TRAINING_TEMPLATE
    return wrong[0].fault or Fault.OTHER_FORMAT


# -- bounds ----------------------------------------------------------------------------------------------------------


def positions(subject: Subject) -> Finding:
    rows = subject.training.documents_of_rows
    if not rows:
        raise NotMeasuredError("no document has known bounds")
    wrong, crossing = list[_WrongPositions](), list[str]()
    for batch, row, documents in rows:
        for each in documents:
            if why := _wrong_positions(batch, row, documents, each):
                wrong.append(why._replace(text=f"{each.where}: {why.text}"))
            if each.start and each is not documents[0] and each.labels[0] != IGNORE_INDEX:
                crossing.append(f"{each.where} is trained from the document before it")
    num_packed = sum(len(documents) > 1 for *_, documents in rows)
    measured = f"{len(rows):,} rows, {num_packed:,} of them packed: positions restart"
    apart, allowed = subject.apart_from_alone, ALONE.limit_of(subject.model)
    if apart is not None and all(each.measured.isolated for each in subject.isolations[0]):
        if wrong and apart <= allowed:
            measured, wrong = f"{len(wrong):,} positions run on; as they are relative, the model computes the same", []
        elif not wrong and not crossing and apart > allowed:
            measured = f"the model computes a conversation differently alone: {apart:.1g} apart, relative"
            detail = (f"arguments: {subject.arguments}",)
            return Finding(False, measured, f"<= {allowed:.0e}", detail, (Fault.NOT_AS_ALONE,))
    if wrong and apart is None and subject.library == "loop":  # the model may make its own positions
        raise NotMeasuredError(f"{wrong[0].text}, and the model cannot compute one conversation alone")
    evaluated = [
        f"{name}: {why.text}" for name, why in _of_evaluation(subject) if why.fault is Fault.POSITIONS_OUT_OF_ORDER
    ]
    if evaluated and not (wrong or crossing):
        faults = (Fault.POSITIONS_OUT_OF_ORDER,)
        return Finding(False, evaluated[0], "none", tuple(evaluated[:_MOST_SHOWN]), faults, part=EVALUATION)
    found = {
        fault: [each.text for each in wrong if each.fault is fault]
        for fault in (Fault.POSITIONS_OUT_OF_ORDER, Fault.POSITIONS_RUN_ON)
    } | {Fault.LABELS_CROSS: crossing}
    names = zip(("documents out of order", "wrong starts", "labels cross"), found.values(), strict=True)
    faults = tuple(fault for fault, each in found.items() if each)
    detail = (*(each.text for each in wrong[:_MOST_SHOWN]), *crossing[:_MOST_SHOWN])
    return Finding(not faults, _counted(dict(names)) or measured, "none", detail, faults)


class _WrongPositions(NamedTuple):
    """What is wrong with the positions of a document."""

    fault: Fault
    text: str


def _of_evaluation(subject: Subject) -> Iterator[tuple[str, _WrongPositions]]:
    """Yields the name of an evaluation, and what is wrong with the positions of a document."""
    for name, view in subject.evaluation.items():
        for batch, row, documents in view.documents_of_rows if isinstance(view, View) else ():
            found = (_wrong_positions(batch, row, documents, each) for each in documents)
            yield from ((name, why) for why in found if why is not None)


def _wrong_positions(
    batch: SeenBatch, row: int, documents: Sequence[Document], document: Document
) -> _WrongPositions | None:
    """Returns what is wrong with the positions of a document; None if nothing is."""
    fault, problem = Fault.POSITIONS_RUN_ON, ""
    if batch.positions is None:
        problem = "no position_ids are passed, so positions run on" if document is not documents[0] else ""
    else:
        own = batch.positions[document.index]
        is_left_padded = len(documents) == 1 and batch.attended is not None and batch.attended[row, 0] == 0
        if (np.diff(own) != 1).any():
            fault = Fault.POSITIONS_OUT_OF_ORDER
            problem = f"positions {' '.join(map(str, own[:4]))} ... are not one after another"
        elif len(own) and own[0] != 0 and not is_left_padded:
            problem = f"positions begin at {int(own[0])}"
    return _WrongPositions(fault, problem) if problem else None


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
    has_packs = any(len(each) > 1 for *_, each in view.documents_of_rows)
    by_packing = view.declared.is_wrapped or (begins and cut and has_packs)
    faults = {
        Fault.CUT_BY_PACKING if by_packing else Fault.ROWS_CUT: cut or begins,
        Fault.ROWS_DROPPED: missing,
        Fault.ROWS_SKIPPED: skipped,
        Fault.ROWS_EMPTY: empty,
    }
    longest = max(map(len, documents), default=0)
    found_faults = tuple(fault for fault, is_found in faults.items() if is_found)
    return Finding(False, found, "none", tuple(detail), found_faults, {"longest": longest})


def _skipped(view: View) -> list[Document]:
    """Returns the documents of micro-batches with labels for which the step does not call the model, as for others."""
    if not any(batch.is_called for batch in view.batches):
        return []  # or it calls the model in another way
    return [each for each in view.documents if not (batch := view.batches[each.batch]).is_called and batch.num_trained]


# -- forgery ---------------------------------------------------------------------------------------------------------


def forgery(subject: Subject) -> Finding:
    documents, tokenizer = subject.training.documents, subject.training.tokenizer
    if lone := with_lone_answers(documents):
        measured = f"{len(lone):,} documents have an answer without a label, which a text may have spelled"
        detail = [f"{each.where}: {tokenizer.decode(each.ids[:40])!r}" for each in lone[:_MOST_SHOWN]]
        detail.append("pass conversations= to see whether a text spells them")
        return Finding(False, measured, "none", tuple(detail), (Fault.FORGED,))
    known = [each for each in documents if each.truth is not None and each.source in ("rows", "conversations")]
    if all(each.is_rendered_twice for each in documents):
        raise NotMeasuredError("the template is applied twice, which hides the texts of the messages; see ids")
    if not known:
        raise NotMeasuredError("the messages of the rows are gone, and ids do not show who wrote a control token")
    forged = [each for each in known if each.is_forged]
    num_plain = sum(each.tokens is not None and each.tokens.holds_control_text for each in known)
    measured = f"{len(forged):,} of {len(known):,} documents have control tokens that a text spells"
    if not forged:
        measured = f"no text became a control token; {num_plain:,} of {len(known):,} documents spell one"
    detail = [f"{each.where}: {each.truth.excerpt!r}" for each in forged[:_MOST_SHOWN] if each.truth is not None]
    return Finding(not forged, measured, "none", tuple(detail), (Fault.FORGED,))
