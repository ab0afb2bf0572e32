"""Checks of a trainer's labels: the trained tokens and the stop tokens, of the training and of the evaluation.

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
from sftron.verify import trainer_remedies as remedies
from sftron.verify.table import Finding, NotMeasuredError
from sftron.verify.trainer_documents import Document
from sftron.verify.trainer_subject import TrainerSubject, View


def with_evaluation(measure: Callable[[View], Finding]) -> Callable[[TrainerSubject], Finding]:
    """Returns a check of the training's batches that also fails if an evaluation's batches fail it.

    An evaluation whose batches cannot be made is named as not measured.
    """

    @wraps(measure)
    def check(subject: TrainerSubject) -> Finding:
        found = measure(subject.training)
        for name, view in subject.evaluation.items():
            try:
                other = Finding(None, view) if isinstance(view, str) else measure(view)
            except NotMeasuredError as error:
                other = Finding(None, f"not measured, {error}")
            remedy = found.remedy
            if found.passed and other.passed is False:
                remedy = remedies.EVALUATION.format(remedy=other.remedy)
            found = replace(
                found,
                passed=found.passed and other.passed is not False,
                measured=f"{found.measured}; {name}: {other.measured}",
                detail=(*found.detail, *(f"{name}: {line}" for line in other.detail if line)),
                remedy=remedy,
            )
        return found

    return check


class _Expected(NamedTuple):
    """What a document should train, each bool [n]."""

    target: np.ndarray
    behind: np.ndarray
    """The template's text that may be trained."""
    stops: np.ndarray


def _expected(view: View, document: Document) -> _Expected:
    tokens, size = document.tokens, len(document)
    behind, stops = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
    if tokens is None:
        return _Expected(~behind, behind, stops)
    last = max((turn.stop or turn.end for turn in tokens.turns), default=0)
    for turn in document.answers:
        if tokens.num_boundary_tokens and turn.start:
            behind[turn.start - 1] = True  # it begins in the header and ends in the answer
        if turn.stop is not None:
            stops[turn.stop] = True
            behind[turn.stop + 1 : _end_behind(view, tokens, turn.stop, is_last=turn.stop == last)] = True
        elif turn.end >= last:
            behind[turn.end :] = True  # the end of a template that writes no stop token
    if document.num_cut_before and size and tokens.role_ids[0] in DEFAULT_TRAINED_ROLES:
        end = int(np.argmax(tokens.role_ids == Role.TEMPLATE))  # of an answer without its beginning
        behind[end : _end_behind(view, tokens, end - 1, is_last=end > last)] = end > 0
    target = Targets().of(tokens)
    # A last token of a header that is white space may be trained with what follows, as the newline before a tool call.
    ends_header = np.append(target[1:] & ~target[:-1], False) & (tokens.role_ids == Role.TEMPLATE)
    for at in np.flatnonzero(ends_header):
        behind[at] |= not view.tokenizer.decode([int(tokens.input_ids[at])]).strip()
    behind[: document.num_unclear] = True
    return _Expected((target | (view.trained_roles == "all")) & ~behind, behind, stops)


def _end_behind(view: View, tokens: TokenizedConversation, stop: int, *, is_last: bool) -> int:
    """Returns the end of the template's white space behind a stop token, and of its special tokens at the very end."""
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
    num_shifted: int = 0
    """The number of labels that are not their own token but the one after it."""

    def add(self, view: View, document: Document) -> None:
        target, behind, stops = _expected(view, document)
        trained = document.trained
        is_template = np.zeros(len(document), dtype=bool)
        is_other = (document.labels != IGNORE_INDEX) & (document.labels != document.ids)
        self.num_shifted += int((is_other[:-1] & (document.labels[:-1] == document.ids[1:])).sum())
        if document.tokens is not None:
            is_template = document.tokens.role_ids == Role.TEMPLATE
            self.roles.add(document.tokens.role_ids, trained)
        asked = target & ~stops
        asked[:1] = False
        unmeant = trained & ~target & ~behind & ~stops
        self.num_trained, self.num_answer = self.num_trained + int(trained.sum()), self.num_answer + int(asked.sum())
        for kind, found in (
            ("labels", is_other),
            ("prompt", unmeant & ~is_template),
            ("header", unmeant & is_template),
            ("answer", asked & ~trained),
        ):
            if found.any():
                at = int(np.argmax(found))
                self.wrong[kind] += int(found.sum())
                self.first.setdefault(
                    kind, f"{document.where} + {at}: {view.tokenizer.decode(document.ids[at : at + 8])!r}"
                )

    @property
    def remedy(self) -> str:
        """What mends the labels, by what was measured."""
        if self.wrong["labels"]:
            return remedies.SHIFTED_LABELS if 2 * self.num_shifted > self.wrong["labels"] else remedies.MASKED_IDS
        is_none = not self.num_trained or self.wrong["answer"] == self.num_answer > 0
        if self.wrong["prompt"] and (is_none or not self.wrong["answer"]):
            return remedies.PROMPTS_TRAINED
        if is_none:
            return remedies.NOTHING_TRAINED
        return remedies.ANSWERS_LEFT_OUT if self.wrong["answer"] else remedies.HEADERS_TRAINED


@with_evaluation
def trained_tokens(view: View) -> Finding:
    """What is trained is what the model itself has to write; each label is the token at its own place."""
    count = _LabelCount()
    for each in view.found.documents if view.trained_roles == "all" else view.with_roles():
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
    roles = count.roles
    by_role = ", ".join(f"{role_name(n)} {roles.trained[n]:,} of {roles.tokens[n]:,}" for n in sorted(roles.tokens))
    detail = (*(f"{kind}: the first at {where}" for kind, where in count.first.items()), f"trained by role: {by_role}")
    return Finding(not found and count.num_trained > 0, measured, "as meant", detail, count.remedy)


@with_evaluation
def stop_tokens(view: View) -> Finding:
    """Each answer that is whole trains the token that ends it, so the model learns to stop there."""
    if view.trained_roles == "all" and all(each.tokens is None and each.source for each in view.found.documents):
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
    return Finding(turns.num_stop_trained == turns.num_turns, measured, "all", detail, _stop_remedy(view, set(names)))


def _ends_of_texts(view: View) -> Finding:
    """Returns the finding for texts without roles, each of which ends with the token that ends a text."""
    documents, eos = view.known(), view.tokenizer.eos_token_id
    num_ended = sum(bool(each.trained[-1:].any()) and int(each.ids[-1]) == eos for each in documents)
    if not num_ended:
        raise NotMeasuredError("the texts have no roles, and none of them ends with the tokenizer's eos_token")
    measured = f"{num_ended:,} of {len(documents):,} texts train {view.tokenizer.eos_token}"
    return Finding(num_ended == len(documents), measured, "all", (), remedies.NO_STOP)


def _stop_remedy(view: View, names: set[str]) -> str:
    """Returns what mends stop tokens without a label, by what took it: the rows' own mask, or that of padding."""
    count = _LabelCount()
    for each in view.with_roles():
        count.add(view, each)
    if not names:
        return remedies.NO_STOP
    if count.wrong["labels"]:
        return count.remedy
    if count.wrong["answer"] == count.num_answer > 0:
        return remedies.ANSWERS_UNTRAINED
    pad = view.tokenizer.pad_token
    rows = [row for batch in view.batches for row in batch.features if isinstance(row, Mapping)]
    by_rows = {_trains(row, view.tokenizer.pad_token_id) for row in rows} - {None}
    return remedies.STOP_MASKED if by_rows == {False} or pad not in names else remedies.PAD_IS_STOP.format(pad=pad)


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
