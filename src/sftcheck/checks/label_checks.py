"""Checks of a trainer's labels, of the training and of the evaluation: which tokens are trained, and stop tokens.

verify_trainer.py says what a pass of each proves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sftcheck.documents.document import Document
from sftcheck.documents.view import View
from sftcheck.faults import Fault, values_of_mask
from sftcheck.subject import with_evaluation
from sftron.checks.report import Finding, NotMeasuredError
from sftron.data.labels import DEFAULT_TRAINED_ROLES, Targets
from sftron.data.types import IGNORE_INDEX, Conversation, Role, TokenizedConversation
from sftron.report.tokens import RoleCount, role_name


def are_cut_by_limit(view: View, wrong: Sequence[Document]) -> bool:
    """Returns whether a limit explains all wrong documents: only those of the greatest length are wrong."""
    lengths = Counter(map(len, view.documents))
    longest = max(lengths, default=0)
    return 1 < lengths[longest] < len(view.documents) and {*map(len, wrong)} == {longest}


def _values_of_mask(view: View) -> dict[str, str]:
    declared = view.declared
    return values_of_mask(
        view.rows, is_assistant_only=declared.is_assistant_only, is_completion_only=declared.is_completion_only
    )


def longest_of(view: View) -> dict[str, int]:
    """Returns the value of a fault that names the longest document."""
    return {"longest": max(map(len, view.documents), default=0)}


class _Expected(NamedTuple):
    """The tokens that a document should train, each bool [n]."""

    target: np.ndarray
    after: np.ndarray
    """The template's text that may be trained."""
    stops: np.ndarray
    headers: np.ndarray
    """White space at the ends of headers, which TRL's own training templates mark (for example for Qwen 2.5)."""


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
    target = Targets().mask_of(tokens)
    headers = np.append(target[1:] & ~target[:-1], False) & (tokens.role_ids == Role.TEMPLATE)
    is_marked_by_trl = view.declared.has_training_template
    for at in np.flatnonzero(headers):
        headers[at] = is_marked_by_trl and not view.tokenizer.decode([int(tokens.input_ids[at])]).strip()
    after[: document.num_unclear] = True
    after |= headers
    return _Expected((target | (view.trained_roles == "all")) & ~after, after, stops, headers)


def _end_of_template_text(view: View, tokens: TokenizedConversation, stop: int, *, is_last: bool) -> int:
    """Returns where the template's white space after a stop token ends; at the very end, special tokens count too."""
    at = stop + 1
    while at < len(tokens) and tokens.role_ids[at] == Role.TEMPLATE:
        token = int(tokens.input_ids[at])
        is_special = is_last and token in view.encoder.special_ids
        if view.tokenizer.decode([token]).strip() and not is_special:
            break
        at += 1
    return at


@dataclass(slots=True)
class _LabelCount:
    """Wrong labels by kind, with the first of each."""

    view: View
    wrong: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    roles: RoleCount = field(default_factory=RoleCount)
    num_trained: int = 0
    num_answer: int = 0
    num_headers: int = 0
    num_shifted: int = 0
    """The number of labels that are not their own token but the one after it."""
    num_unshifted: int = 0
    """The number of labels that are the token before their own."""
    documents: list[Document] = field(default_factory=list)
    """The documents with a wrong label."""

    @classmethod
    def of(cls, view: View) -> _LabelCount:
        count = cls(view)
        for document in view.documents if view.trained_roles == "all" else view.with_roles():
            count._add(document)
        return count

    def _add(self, document: Document) -> None:
        expected, trained = _expected(self.view, document), document.trained
        is_template = np.zeros(len(document), dtype=bool)
        if document.tokens is not None:
            is_template = document.tokens.role_ids == Role.TEMPLATE
            self.roles.add(document.tokens.role_ids, trained)
        is_other = (document.labels != IGNORE_INDEX) & (document.labels != document.ids)
        self.num_shifted += int((is_other[:-1] & (document.labels[:-1] == document.ids[1:])).sum())
        self.num_unshifted += int((is_other[1:] & (document.labels[1:] == document.ids[:-1])).sum())
        required = expected.target & ~expected.stops
        required[:1] = False
        unintended = trained & ~(expected.target | expected.after | expected.stops)
        self.num_trained += int(trained.sum())
        self.num_answer += int(required.sum())
        self.num_headers += int((trained & expected.headers).sum())
        is_weightless = unintended & _is_weightless(document)
        for kind, is_wrong in (
            ("labels", is_other),
            ("weightless", is_weightless),
            ("prompt", unintended & ~is_template & ~is_weightless),
            ("header", unintended & is_template),
            ("answer", required & ~trained),
        ):
            if is_wrong.any():
                self.documents.append(document)
                self.wrong[kind] += int(is_wrong.sum())
                at = int(np.argmax(is_wrong))
                text = self.view.tokenizer.decode(document.ids[at : at + 8])
                self.first.setdefault(kind, f"{document.where} + {at}: {text!r}")

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults of the labels; the one that explains most comes first."""
        if self.wrong["labels"]:
            if 2 * self.num_shifted > self.wrong["labels"]:
                return (Fault.SHIFTED_LABELS,)
            is_unshifted = 2 * self.num_unshifted > self.wrong["labels"]
            return (Fault.UNSHIFTED_LABELS,) if is_unshifted else (Fault.MASKED_IDS,)
        if self.view.trained_roles == "all":
            return (Fault.EVERY_TOKEN,)
        is_none = not self.num_trained or self.wrong["answer"] == self.num_answer > 0
        found = {
            Fault.ANSWERS_LEFT_OUT: self.wrong["answer"] and not is_none,
            Fault.PROMPTS_TRAINED: self.wrong["prompt"],
            Fault.NOTHING_TRAINED: is_none,
            Fault.WEIGHTS_IGNORED: self.wrong["weightless"],
            Fault.HEADERS_TRAINED: self.wrong["header"],
        }
        return tuple(fault for fault, is_found in found.items() if is_found)


def _is_weightless(document: Document) -> np.ndarray:
    """Returns whether each token belongs to an answer of weight 0, bool [n]."""
    content = None if document.truth is None else document.truth.content
    messages = content.messages if isinstance(content, Conversation) else ()
    tokens = document.tokens
    if tokens is None or tokens.token_weights is None or all(each.weight for each in messages):
        return np.zeros(len(document), dtype=bool)
    return (tokens.token_weights == 0) & np.isin(tokens.role_ids, list(DEFAULT_TRAINED_ROLES))


@with_evaluation
def trained_tokens(view: View) -> Finding:
    count = _LabelCount.of(view)
    words = {
        "labels": "labels are other tokens",
        "weightless": "answer tokens of weight 0 trained",
        "prompt": "prompt tokens trained",
        "header": "tokens of headers trained",
        "answer": f"of {count.num_answer:,} answer tokens not trained",
    }
    wrong = ", ".join(f"{count.wrong[kind]:,} {text}" for kind, text in words.items() if count.wrong[kind])
    roles = count.roles
    by_role = ", ".join(f"{role_name(n)} {roles.trained[n]:,} of {roles.tokens[n]:,}" for n in sorted(roles.tokens))
    detail = (*(f"{kind}: the first at {where}" for kind, where in count.first.items()), f"trained by role: {by_role}")
    if wrong or not count.num_trained:
        measured = wrong if count.num_trained else "nothing is trained"
        faults = (Fault.ROWS_CUT,) if are_cut_by_limit(view, count.documents) else ()
        values = longest_of(view) | _values_of_mask(view)
        return Finding(False, measured, "as meant", detail, (*faults, *count.faults), values)
    what = "all of each document" if view.trained_roles == "all" else "all of what the model writes"
    measured = f"{count.num_trained:,} trained tokens, {what}"
    if count.num_headers and view.trained_roles != "all":
        measured += f", and {count.num_headers:,} line breaks before it, as TRL's training template marks them"
    return Finding(True, measured, "as meant", detail)


@with_evaluation
def stop_tokens(view: View) -> Finding:
    if view.trained_roles == "all" and all(each.tokens is None and each.source for each in view.documents):
        return _ends_of_texts(view)
    documents, lone = view.with_roles(), with_lone_answers(view.with_roles())  # of the lone ones, forgery reports
    num_answers, names, without, is_text_trained = 0, Counter[str](), list[str](), False
    for each in documents:
        if each in lone or each.tokens is None:
            continue
        weights, is_own = each.tokens.token_weights, each.trained & (each.labels == each.ids)
        answers = [turn for turn in each.answers if weights is None or weights[turn.stop or turn.end - 1] > 0]
        num_answers += len(answers)
        names.update(view.tokenizer.decode([n]) for n in each.tokens.stop_ids)
        untrained = [turn for turn in answers if turn.stop is None or not is_own[turn.stop]]
        without += [each.where] * len(untrained)
        is_text_trained |= any(each.trained[turn.start : turn.end].any() for turn in untrained)
    if not num_answers:
        raise NotMeasuredError("no whole answer is to be trained in the batches")
    stops = ", ".join(name for name, _ in names.most_common(3)) or "no stop token"
    measured = f"{num_answers - len(without):,} of {num_answers:,} answers train {stops}"
    if not without:
        return Finding(True, measured, "all")
    problem = next((each.truth.problem for each in documents if each.truth is not None and each.truth.problem), "")
    detail = (f"the first whose stop token is not trained is in {without[0]}", problem)
    values = _values_of_mask(view)
    faults = _faults_of_stops(view, set(names), is_text_trained=is_text_trained)
    if view.tokenizer.pad_token in names:
        padding = Fault.PAD_IS_STOP.remedy(view.declared.library, {"pad": view.tokenizer.pad_token})
        values |= {"padding": f" {padding}"}
        faults += (Fault.PAD_IS_STOP,) if {Fault.STOP_MASKED, Fault.EVERY_TOKEN} & {*faults} else ()
    return Finding(False, measured, "all", detail, faults, values)


def _ends_of_texts(view: View) -> Finding:
    """Returns the finding for texts without roles: each should end with the end-of-text token."""
    documents, eos = [each for each in view.known() if not each.is_cut_after], view.tokenizer.eos_token_id
    num_ended = sum(bool(each.trained[-1:].any()) and int(each.ids[-1]) == eos for each in documents)
    if not num_ended:
        raise NotMeasuredError("the texts have no roles, and none of them ends with the tokenizer's eos_token")
    measured = f"{num_ended:,} of {len(documents):,} texts train {view.tokenizer.eos_token}"
    return Finding(num_ended == len(documents), measured, "all", (), (Fault.NO_STOP,))


def _faults_of_stops(view: View, names: set[str], *, is_text_trained: bool) -> tuple[Fault, ...]:
    """Returns what is wrong with stop tokens without a label.

    Args:
        names: The stop tokens of the documents.
        is_text_trained: Whether an answer without one has a label.
    """
    if not names:
        return (Fault.NO_STOP,)
    count = _LabelCount.of(view)
    if count.wrong["labels"]:
        return count.faults
    if not is_text_trained:
        return (Fault.ANSWERS_UNTRAINED,)
    return (Fault.EVERY_TOKEN if view.trained_roles == "all" else Fault.STOP_MASKED,)


def with_lone_answers(documents: Sequence[Document]) -> list[Document]:
    """Returns the documents read from ids that have an untrained answer, although most answers before a last one are.

    Labels that a script makes from the messages leave out an answer that only a text spells.
    """
    known = list[tuple[Document, list[bool]]]()
    for each in documents:
        answers = [turn for turn in each.answers if turn.end > turn.start and each.source == "ids"]
        known.append((each, [bool(each.trained[turn.start : turn.end].any()) for turn in answers]))
    before_last = [is_trained for _, flags in known for is_trained in flags[:-1]]
    if 2 * sum(before_last) <= len(before_last):
        return []
    return [document for document, flags in known if any(flags) and not all(flags[:-1])]


def wrong_labels(view: View) -> list[Document]:
    """Returns the documents with a wrong label."""
    return _LabelCount.of(view).documents


def untrained_stops(view: View) -> list[Document]:
    """Returns the documents with an answer whose stop token has no label."""
    return [
        each
        for each in view.documents
        if any(turn.stop is None or not each.trained[turn.stop] for turn in each.answers)
    ]
