"""What was seen of a trainer: facts on which measurements depend, and the rows that a failed check is about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from operator import eq
from typing import Any

from sftcheck.batches import find, ids_of
from sftcheck.checks.label_checks import untrained_stops, wrong_labels
from sftcheck.documents.document import Document
from sftcheck.documents.truth import PlainText
from sftcheck.documents.view import View
from sftcheck.program.evidence import Facts
from sftcheck.program.rows import Rows
from sftcheck.trainer.trainer_subject import TrainerSubject
from sftron.data.types import IGNORE_INDEX, Conversation

MADE_BY_TRL = {"input_ids", "labels", "attention_mask", "completion_mask", "assistant_masks", "seq_lengths"}
_MOST_ROWS = 32
"""The most rows of a program before it is made smaller."""


@dataclass(frozen=True)
class Suspect:
    """A row of the data set that a failed check is about, or another one."""

    row: Any
    """Its columns; None if the row is not known."""
    ids: Sequence[Mapping[str, Sequence[int]]]
    """The columns of numbers of each document in it."""
    contents: Sequence[Mapping[str, Any] | str | None]
    """The conversation of each document as a row of messages, its text, or None."""
    is_given: bool = False


def facts_of(subject: TrainerSubject) -> Facts:
    view, trainer, tokenizer = subject.training, subject.trainer, subject.training.tokenizer
    batch = max(subject.step.batches, key=lambda each: each.ids.size)
    header, stop, beginning, twice = _template_texts(tokenizer)
    stops = Counter(n for each in view.documents if each.tokens is not None for n in each.tokens.stop_ids)
    if stops:
        stop = tokenizer.decode([stops.most_common(1)[0][0]])
    contents = [each.truth.content for each in view.documents if each.truth is not None]
    return Facts(
        header=header,
        stop=stop or tokenizer.eos_token or "",
        has_stop=bool(stop),
        beginning=beginning,
        twice=twice,
        is_everything=subject.trained_roles == "all",
        is_text=bool(contents) and all(isinstance(each, PlainText) for each in contents),
        is_marked_by_trl=bool(getattr(trainer, "chat_template", None)),
        has_positions="position_ids" in batch.inputs,
        has_mask=getattr(batch.inputs.get("attention_mask"), "ndim", 0) == 2,
        is_packed=any(len(documents) > 1 for *_, documents in view.documents_of_rows),
        is_adapter=hasattr(trainer.model, "peft_config"),
        pads_with_stop=tokenizer.pad_token == stop,
    )


def _template_texts(tokenizer: Any) -> tuple[str, str, str, str]:
    """Returns four texts of the template: before an answer, the stop token, the beginning, and the doubled beginning.

    They are as ids of them are decoded: SentencePiece writes a space behind a control token.
    """
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}

    def rendered(*messages: Any, **options: Any) -> str:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))

    def read(text: str) -> str:
        return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))).strip(" ")

    try:
        both, prompt = rendered(user, answer), rendered(user, add_generation_prompt=True)
        header = prompt.removeprefix(rendered(user)) if both.startswith(prompt) else ""
    except Exception:  # no template, or one that refuses such messages
        return "", tokenizer.eos_token or "", "", ""
    before, _, rest = both.partition("Hi")
    header, rest = header or rest.partition("Yo")[0], rest.partition("Yo")[2].strip()
    tokens = [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()]
    stop = next((token for token in tokens if rest.startswith(token)), "")
    try:
        other = rendered({"role": "system", "content": "Be kind."}, user)
    except Exception:  # no system prompts
        return read(header), stop, "", ""
    beginning = both[: (*map(eq, other, both), False).index(False)]
    last = max(before.rfind(token) for token in tokens)
    return read(header), stop, read(beginning), read(before[last:] + beginning) if last >= 0 and beginning else ""


def _numbers(value: Any) -> list[int]:
    """Returns the numbers of a column that holds nothing else; of others, nothing."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return [*map(int, value)] if isinstance(value, list) and all(isinstance(each, int) for each in value) else []


def suspects(subject: TrainerSubject, name: str) -> Iterator[tuple[tuple[str, bool], list[Suspect]]]:
    """Yields the rows of the training, and of the evaluation, that a check is about, the likeliest first."""
    views = [(False, subject.training)]
    views += [(True, view) for view in subject.evaluation.values() if isinstance(view, View)][:1]
    for is_evaluation, view in views:
        wrong = {id(each) for each in _wrong(view, name)}
        ordered = sorted(view.documents, key=lambda each: (id(each) not in wrong, len(each)))
        # Of other rows of the table, the rows that are there are the ones to look at.
        given = view.finder.given.truths if name == "truncation" else []
        missing = [_row_of(view, truth.content) for truth in given if truth.excerpt in view.missing]
        lost = [Suspect(each if isinstance(each, Mapping) else None, (), [each], is_given=True) for each in missing]
        yield (name, is_evaluation), [*lost, *_rows_of(view, ordered)]


def all_rows(view: View) -> list[Suspect]:
    return _rows_of(view, sorted(view.documents, key=len))


def _wrong(view: View, name: str) -> list[Document]:
    documents = view.documents
    if name == "trained tokens":
        with suppress(ValueError):
            return wrong_labels(view)
    if name == "stop tokens":
        return untrained_stops(view)
    if name == "truncation":
        rows = ((batch.labels[row, 1:], each) for batch, row, each in view.documents_of_rows)
        empty = [each[0] for labels, each in rows if (labels == IGNORE_INDEX).all()]
        return [each for each in documents if each.is_cut_after or each.num_cut_before] or empty
    if name == "forgery":
        return [each for each in documents if each.is_forged] or untrained_stops(view)
    return [each for each in documents if each.difference]


def _rows_of(view: View, documents: Sequence[Document]) -> list[Suspect]:
    """Returns the first rows of these documents, each with all documents of its batch's row."""
    neighbors: dict[tuple[int, int], list[Document]] = {}
    for each in view.documents:
        neighbors.setdefault((each.batch, each.row), []).append(each)
    found = dict[int, Suspect]()
    for each in documents:
        row = _row_with(view, each)
        if row is None or id(row) in found:
            continue
        if len(found) == _MOST_ROWS:
            break
        ids = ids_of(row)
        own = [other for other in neighbors[each.batch, each.row] if ids is None or find(ids, other.ids) >= 0] or [each]
        contents = [None if other.truth is None else _row_of(view, other.truth.content) for other in own]
        is_given = any(other.source == "conversations" for other in own)
        found[id(row)] = Suspect(row, _segments(row, own), contents, is_given)
    return list(found.values())


def _row_with(view: View, document: Document) -> Any:
    """Returns the row of the data set in which the document's ids are; None if it is not found."""
    features = view.batches[document.batch].features
    if len(features) == len(view.batches[document.batch].ids) and (ids := ids_of(features[document.row])) is not None:
        return view.finder.row_of_ids.get(ids.tobytes(), features[document.row])
    for row in view.rows:
        if (ids := ids_of(row)) is not None and find(ids, document.ids) >= 0:
            return row
    return None


def _segments(row: Mapping[str, Any], documents: Sequence[Document]) -> list[dict[str, list[int]]]:
    """Returns the columns of numbers of a row, cut where its documents begin."""
    numbers = {name: _numbers(value) for name, value in row.items() if name != "seq_lengths"}
    columns = {name: each for name, each in numbers.items() if each and len(each) == len(row["input_ids"])}
    if not columns:
        return []
    ids, starts = ids_of(row), [0]
    assert ids is not None
    for each in documents:
        if (at := find(ids, each.ids)) > starts[-1]:
            starts.append(at)
    bounds = pairwise([*starts, len(ids)])
    return [{name: values[begin:end] for name, values in columns.items()} for begin, end in bounds]


def _row_of(view: View, content: Any) -> Mapping[str, Any] | str:
    if isinstance(content, Conversation):
        chat = view.encoder.chat
        assert chat is not None
        return {"messages": [dict(each) for each in chat.template_for(content).plain_messages(content.messages)]}
    return content.text


def rows_for(chosen: Sequence[Suspect], way: str, prefix: str, *, completion_only: bool) -> Rows | None:
    """Returns the rows of a program from the "columns", "conversations" or "ids" of these; None if they have none."""
    rows = list[Any]()
    for each in chosen:
        if way == "columns":  # those of texts, from which TRL makes the others
            own = each.row.items() if isinstance(each.row, Mapping) else ()
            rows.append({name: value for name, value in own if name not in MADE_BY_TRL and value is not None})
        elif way == "conversations":
            rows += [_as_row(content, completion_only) for content in each.contents]
        else:
            rows.append(tuple(each.ids))
    return Rows(tuple(rows), is_ids=way == "ids", prefix=prefix) if rows and all(rows) else None


def _as_row(content: Mapping[str, Any] | str | None, completion_only: bool) -> dict[str, Any]:
    if content is None:
        return {}
    if isinstance(content, str):
        return {"text": content}
    if completion_only:
        return {"prompt": content["messages"][:-1], "completion": content["messages"][-1:]}
    return dict(content)
