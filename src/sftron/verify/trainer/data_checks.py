"""Checks of a trainer's batches, of the training and of the evaluation: ids, labels, bounds and forged tokens.

The docstring of a check is the law that a pass proves, and is printed in reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, NamedTuple

import numpy as np

from sftron.data.labels import DEFAULT_TRAINED_ROLES, Targets
from sftron.data.types import IGNORE_INDEX, Role, TokenizedConversation
from sftron.report.audit import Audit
from sftron.report.counts import RoleCount
from sftron.report.tokens import role_name
from sftron.verify.report import Finding, NotMeasuredError
from sftron.verify.trainer import remedies
from sftron.verify.trainer.batches import SeenBatch
from sftron.verify.trainer.documents import Document
from sftron.verify.trainer.subject import TrainerSubject, View

_MOST_SHOWN = 5
_APART, _ROUNDED_APART = 5e-4, 2**-4
"""Relative differences of last hidden states that are rounding, in float32 and in other types."""


def with_evaluation(measure: Callable[[View], Finding]) -> Callable[[TrainerSubject], Finding]:
    """Returns a check of the training's batches that also fails if an evaluation's batches fail it.

    An evaluation whose batches cannot be made is named as not measured.
    """

    @wraps(measure)
    def check(subject: TrainerSubject) -> Finding:
        found = measure(subject.training)
        for name, view in subject.evaluation.items():
            try:
                other = view if isinstance(view, Finding) else measure(view)
            except NotMeasuredError as error:
                other = Finding(None, f"not measured, {error}")
            remedy = found.remedy
            if found.passed and other.passed is False:
                remedy = remedies.EVALUATION.format(remedy=other.remedy)
            raised = found.raised or other.raised
            is_open = raised and found.passed is not False and other.passed is not False
            found = replace(
                found,
                passed=None if is_open else found.passed and other.passed is not False,
                raised=raised,
                measured=f"{found.measured}; {name}: {other.measured}",
                detail=(*found.detail, *(f"{name}: {line}" for line in other.detail if line)),
                remedy=remedy,
            )
        return found

    return check


def _counted(counts: Mapping[str, Sequence[Any]]) -> str:
    """Returns the numbers of what was found, by name; "" if there is nothing."""
    return ", ".join(f"{len(each):,} {name}" for name, each in counts.items() if each)


@with_evaluation
def ids(view: View) -> Finding:
    """Each document has the ids that the tokenizer's own template gives for its row, with one beginning."""
    encoder, documents = view.finder.encoder, view.documents
    num_known = sum(bool(each.source) for each in documents)
    if not num_known and encoder.problem and encoder.refused:
        measured = f"the rows are messages, and {encoder.problem}"
        return Finding(False, measured, "the template's ids", (), remedies.TEMPLATE_UNSET.of(view.trainer))
    if not num_known and view.training is not None and view.training.known() and view.finder.turn_text.is_known:
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
    if wrong[0].difference.startswith("a doubled"):
        return remedies.DOUBLED_BOS.of(view.trainer)
    if remedy := view.remedy_of_limit(wrong):
        return remedy
    if getattr(view.trainer, "chat_template", None):
        return remedies.TRAINING_TEMPLATE
    is_begun_late = wrong[0].difference.startswith("no ")
    return (remedies.NO_BEGINNING if is_begun_late else remedies.OTHER_FORMAT).of(view.trainer)


# -- labels ------------------------------------------------------------------------------------------------------------


class _Expected(NamedTuple):
    """The tokens that a document should train, each bool [n]."""

    target: np.ndarray
    after: np.ndarray
    """The template's text that may be trained."""
    stops: np.ndarray
    headers: np.ndarray
    """White space at the ends of headers, which TRL's own training templates mark (that of Qwen 2.5, for example)."""


def _expected(view: View, document: Document) -> _Expected:
    tokens, size = document.tokens, len(document)
    after, stops = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
    if tokens is None:
        return _Expected(~after, after, stops, stops)
    last = max((turn.stop or turn.end for turn in tokens.turns), default=0)
    for turn in document.answers:
        if tokens.num_boundary_tokens and turn.start:
            after[turn.start - 1] = True  # it begins in the header and ends in the answer
        if turn.stop is not None:
            stops[turn.stop] = True
            after[turn.stop + 1 : _end_of_template_text(view, tokens, turn.stop, is_last=turn.stop == last)] = True
        elif turn.end >= last:
            after[turn.end :] = True  # the end of a template that writes no stop token
    if document.num_cut_before and size and tokens.role_ids[0] in DEFAULT_TRAINED_ROLES:
        end = int(np.argmax(tokens.role_ids == Role.TEMPLATE))  # of an answer without its beginning
        after[end : _end_of_template_text(view, tokens, end - 1, is_last=end > last)] = end > 0
    target = Targets().of(tokens)
    headers = np.append(target[1:] & ~target[:-1], False) & (tokens.role_ids == Role.TEMPLATE)
    is_marked_by_trl = bool(getattr(view.trainer, "chat_template", None))
    for at in np.flatnonzero(headers):
        headers[at] = is_marked_by_trl and not view.tokenizer.decode([int(tokens.input_ids[at])]).strip()
    after[: document.num_unclear] = True
    after |= headers
    return _Expected((target | (view.trained_roles == "all")) & ~after, after, stops, headers)


def _end_of_template_text(view: View, tokens: TokenizedConversation, stop: int, *, is_last: bool) -> int:
    """Returns the end of the template's white space after a stop token, and of its special tokens at the very end."""
    at = stop + 1
    while at < len(tokens) and tokens.role_ids[at] == Role.TEMPLATE:
        token = int(tokens.input_ids[at])
        is_special = is_last and token in view.finder.encoder.special_ids
        if view.tokenizer.decode([token]).strip() and not is_special:
            break
        at += 1
    return at


@dataclass(slots=True)
class _LabelCount:
    """Labels that are not as meant, by kind, with the first of each."""

    wrong: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    roles: RoleCount = field(default_factory=RoleCount)
    num_trained: int = 0
    num_answer: int = 0
    num_headers: int = 0
    num_shifted: int = 0
    """The number of labels that are not their own token but the one after it."""
    documents: list[Document] = field(default_factory=list)
    """The documents with a wrong label."""

    def add(self, view: View, document: Document) -> None:
        target, after, stops, headers = _expected(view, document)
        trained = document.trained
        self.num_headers += int((trained & headers).sum())
        is_template = np.zeros(len(document), dtype=bool)
        is_other = (document.labels != IGNORE_INDEX) & (document.labels != document.ids)
        self.num_shifted += int((is_other[:-1] & (document.labels[:-1] == document.ids[1:])).sum())
        if document.tokens is not None:
            is_template = document.tokens.role_ids == Role.TEMPLATE
            self.roles.add(document.tokens.role_ids, trained)
        required = target & ~stops
        required[:1] = False
        unintended = trained & ~target & ~after & ~stops
        self.num_trained, self.num_answer = self.num_trained + int(trained.sum()), self.num_answer + int(required.sum())
        for kind, found in (
            ("labels", is_other),
            ("prompt", unintended & ~is_template),
            ("header", unintended & is_template),
            ("answer", required & ~trained),
        ):
            if found.any():
                self.documents.append(document)
                at = int(np.argmax(found))
                self.wrong[kind] += int(found.sum())
                self.first.setdefault(
                    kind, f"{document.where} + {at}: {view.tokenizer.decode(document.ids[at : at + 8])!r}"
                )

    def remedy(self, view: View) -> str:
        """Returns the remedy for the labels, by what was measured."""
        if self.wrong["labels"]:
            is_shifted = 2 * self.num_shifted > self.wrong["labels"]
            return (remedies.SHIFTED_LABELS if is_shifted else remedies.MASKED_IDS).of(view.trainer)
        is_none = not self.num_trained or self.wrong["answer"] == self.num_answer > 0
        if self.wrong["prompt"] and (is_none or not self.wrong["answer"]):
            return view.remedy_of_mask(remedies.PROMPTS_TRAINED)
        if is_none:
            return view.remedy_of_mask(remedies.NOTHING_TRAINED)
        is_left_out = self.wrong["answer"]
        return view.remedy_of_mask(remedies.ANSWERS_LEFT_OUT if is_left_out else remedies.HEADERS_TRAINED)


@with_evaluation
def trained_tokens(view: View) -> Finding:
    """What is trained is what the model itself has to write; each label is the token at the same index."""
    count = _LabelCount()
    for each in view.documents if view.trained_roles == "all" else view.with_roles():
        count.add(view, each)
    words = {
        "labels": "labels are other tokens",
        "prompt": "prompt tokens trained",
        "header": "tokens of headers trained",
        "answer": f"of {count.num_answer:,} answer tokens not trained",
    }
    found = ", ".join(f"{count.wrong[kind]:,} {text}" for kind, text in words.items() if count.wrong[kind])
    measured = found if count.num_trained else "nothing is trained"
    if not measured:
        whole = "all of each document" if view.trained_roles == "all" else "all of what the model writes"
        measured = f"{count.num_trained:,} trained tokens, {whole}"
        if count.num_headers and view.trained_roles != "all":
            measured += f", and {count.num_headers:,} line breaks before it, as TRL's training template marks them"
    roles = count.roles
    by_role = ", ".join(f"{role_name(n)} {roles.trained[n]:,} of {roles.tokens[n]:,}" for n in sorted(roles.tokens))
    detail = (*(f"{kind}: the first at {where}" for kind, where in count.first.items()), f"trained by role: {by_role}")
    passed = not found and count.num_trained > 0
    remedy = "" if passed else view.remedy_of_limit(count.documents) or count.remedy(view)
    return Finding(passed, measured, "as meant", detail, remedy)


@with_evaluation
def stop_tokens(view: View) -> Finding:
    """Each answer that is whole trains the token that ends it, so the model learns to stop there."""
    if view.trained_roles == "all" and all(each.tokens is None and each.source for each in view.documents):
        return _ends_of_texts(view)
    targets = Targets(frozenset(Role)) if view.trained_roles == "all" else Targets()
    audit, names, problem = Audit(("the batches",), targets), Counter[str](), ""
    lone = {id(each) for each in with_lone_answers(view.with_roles())}  # of which forgery reports
    for each in view.with_roles():
        if id(each) not in lone and each.tokens is not None and each.truth is not None:
            audit.add_row((each.tokens, each.labeled))
            names.update(view.tokenizer.decode([n]) for n in each.tokens.stop_ids)
            problem = problem or each.truth.problem
    turns = audit.turns
    if not turns.num_turns:
        raise NotMeasuredError("no whole answer is to be trained in the batches")
    stops = ", ".join(name for name, _ in names.most_common(3)) or "no stop token"
    measured = f"{turns.num_stop_trained:,} of {turns.num_turns:,} answers train {stops}"
    detail = (*(each for each in audit.problems if "stop token" in each), problem)
    passed = turns.num_stop_trained == turns.num_turns
    return Finding(passed, measured, "all", detail, "" if passed else _stop_remedy(view, set(names)))


def _ends_of_texts(view: View) -> Finding:
    """Returns the finding for texts without roles, each of which ends with the token that ends a text."""
    documents, eos = [each for each in view.known() if not each.is_cut_after], view.tokenizer.eos_token_id
    num_ended = sum(bool(each.trained[-1:].any()) and int(each.ids[-1]) == eos for each in documents)
    if not num_ended:
        raise NotMeasuredError("the texts have no roles, and none of them ends with the tokenizer's eos_token")
    measured = f"{num_ended:,} of {len(documents):,} texts train {view.tokenizer.eos_token}"
    return Finding(num_ended == len(documents), measured, "all", (), remedies.NO_STOP.of(view.trainer))


def _stop_remedy(view: View, names: set[str]) -> str:
    """Returns the remedy for stop tokens without a label, which the rows' own mask hides, or that of padding."""
    count = _LabelCount()
    for each in view.with_roles():
        count.add(view, each)
    if not names:
        return remedies.NO_STOP.of(view.trainer)
    if count.wrong["labels"]:
        return count.remedy(view)
    if not any(_has_trained_answer_without_stop(each) for each in view.with_roles()):
        return remedies.ANSWERS_UNTRAINED.of(view.trainer)
    pad = view.tokenizer.pad_token
    rows = [row for batch in view.batches for row in batch.features if isinstance(row, Mapping)]
    by_rows = {_trains(row, view.tokenizer.pad_token_id) for row in rows} - {None}
    if by_rows == {False} or pad not in names:
        return view.remedy_of_mask(remedies.STOP_MASKED)
    return remedies.PAD_IS_STOP.of(view.trainer, pad=pad)


def _has_trained_answer_without_stop(document: Document) -> bool:
    trained, turns = document.trained, document.answers
    return any(
        turn.stop is not None and not trained[turn.stop] and trained[turn.start : turn.end].any() for turn in turns
    )


def _trains(row: Mapping[str, Any], token_id: int) -> bool | None:
    """Returns whether the row's own labels or masks train the token; None if it has none."""
    if (labels := row.get("labels")) is not None:
        return token_id in list(labels)
    masks = [row[name] for name in ("completion_mask", "assistant_masks") if row.get(name) is not None]
    if not masks:
        return None
    return any(each == token_id and all(flags) for each, *flags in zip(row["input_ids"], *masks, strict=False))


def with_lone_answers(documents: Sequence[Document]) -> list[Document]:
    """Returns the documents read from ids that have an untrained answer, although most answers before a last one are.

    Labels that a script makes from the messages leave out an answer that only a text spells.
    """
    known = [(each, _trained_answers(each)) for each in documents if each.source == "ids"]
    if 2 * sum(sum(each[:-1]) for _, each in known) <= sum(len(each[:-1]) for _, each in known):
        return []
    return [document for document, each in known if any(each) and not all(each[:-1])]


def _trained_answers(document: Document) -> list[bool]:
    """Returns for each answer whether it is trained."""
    trained, answers = document.trained, [turn for turn in document.answers if turn.end > turn.start]
    return [bool(trained[turn.start : turn.end].any()) for turn in answers]


# -- bounds ----------------------------------------------------------------------------------------------------------


def positions(subject: TrainerSubject) -> Finding:
    """Positions restart with each document, and no document's first token is predicted from its neighbor."""
    rows = subject.training.rows
    if not rows:
        raise NotMeasuredError("no document has known bounds")
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
        remedy = remedies.NOT_AS_ALONE.of(subject.trainer)
        return Finding(False, measured, f"<= {allowed:.0e}", (f"arguments: {subject.arguments}",), remedy)
    measured, remedy = found or measured, remedies.POSITIONS_RUN_ON if wrong else remedies.LABELS_CROSS
    detail = (*wrong[:_MOST_SHOWN], *crossing[:_MOST_SHOWN])
    return Finding(not found, measured, "none", detail, remedy.of(subject.trainer))


def _wrong_positions(batch: SeenBatch, row: int, documents: Sequence[Document], document: Document) -> str:
    """Describes what is wrong with the positions of a document; "" if nothing is."""
    if batch.positions is None:
        return "no position_ids are passed, so positions run on" if document is not documents[0] else ""
    own = batch.positions[document.index]
    is_left_padded = len(documents) == 1 and batch.attended is not None and batch.attended[row, 0] == 0
    if (np.diff(own) != 1).any():
        return f"positions {' '.join(map(str, own[:4]))} ... are not one after another"
    return f"positions begin at {int(own[0])}" if len(own) and own[0] != 0 and not is_left_padded else ""


@with_evaluation
def truncation(view: View) -> Finding:
    """No answer is cut off, no conversation loses its beginning, and no row is dropped or has nothing to train."""
    documents = [each for each in view.documents if each.source]
    cut, begins = [each for each in documents if each.is_cut_after], [each for each in documents if each.num_cut_before]
    empty = [each[0] for batch, row, each in view.rows if (batch.labels[row, 1:] == IGNORE_INDEX).all()]
    missing = view.missing
    num_others = sum(each.source in ("", "ids") or bool(each.difference) for each in view.documents)
    if missing and num_others and len(missing) <= num_others + len(view.finder.held_out):
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
    args, remedy = view.trainer.args, remedies.PARTS
    is_wrapped = getattr(args, "packing", False) and getattr(args, "packing_strategy", "") == "wrapped"
    if is_wrapped or (begins and cut and any(len(each) > 1 for *_, each in view.rows)):
        remedy = remedies.CUT_BY_PACKING
    elif not (cut or begins):
        remedy = remedies.ROWS_DROPPED if missing else remedies.ROWS_EMPTY
    longest = max(map(len, documents), default=0)
    return Finding(False, found, "none", tuple(detail), remedy.of(view.trainer, longest=longest))


# -- forgery ---------------------------------------------------------------------------------------------------------


def forgery(subject: TrainerSubject) -> Finding:
    """Text that spells a control token stays plain text."""
    documents, tokenizer = subject.training.documents, subject.training.tokenizer
    if lone := with_lone_answers(documents):
        measured = f"{len(lone):,} documents have an answer without a label, as those that a text spells"
        detail = [f"{each.where}: {tokenizer.decode(each.ids[:40])!r}" for each in lone[:_MOST_SHOWN]]
        return Finding(False, measured, "none", (*detail, "conversations= shows whether a text spells them"))
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
    return Finding(not forged, measured, "none", tuple(detail))
