"""Checks of a trainer's batches: ids, labels, stop tokens, positions, truncation and forged tokens.

The docstring of a check is the law that a pass proves, and is printed in reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from sftron.data.labels import Targets
from sftron.data.types import IGNORE_INDEX, Role
from sftron.report.audit import Audit
from sftron.report.tokens import role_name
from sftron.verify.table import Finding, NotMeasuredError
from sftron.verify.trainer_documents import Document
from sftron.verify.trainer_subject import SeenBatch, TrainerSubject

_MOST_SHOWN = 5
_LEAST_KNOWN = 0.5
"""The smallest share of documents that must have been recovered for a conclusion about all."""


def ids(subject: TrainerSubject) -> Finding:
    """Each document has the ids that the tokenizer's own template gives for its row, with one beginning."""
    documents = subject.found.documents
    known = [each for each in documents if each.source]
    encoder = subject.finder.encoder
    if not known and encoder.problem and encoder.refused:
        remedy = "Set tokenizer.chat_template to the template with which the rows were rendered, so that it is saved."
        return Finding(False, f"the rows are messages, and {encoder.problem}", "the template's ids", (), remedy)
    if len(known) < _LEAST_KNOWN * len(documents) or not known:
        raise NotMeasuredError(f"too few documents could be compared: {subject.found.summary}")
    wrong = [each for each in known if each.difference]
    detail = [f"{_where(each)}: {each.difference}" for each in wrong[:_MOST_SHOWN]]
    remedy = ""
    if wrong and wrong[0].difference.startswith("a doubled"):
        remedy = (
            "The text of the template has its beginning-of-text token already, and the tokenizer adds another. Give "
            "the trainer the `messages` column (TRL renders and tokenizes them in one step), or tokenize with "
            "add_special_tokens=False."
        )
    elif wrong and wrong[0].difference.startswith("no "):
        remedy = (
            "The template writes a beginning-of-text token that the batch lacks. Tokenize with "
            "apply_chat_template(tokenize=True), or give TRL the `messages` column."
        )
    measured = f"{len(known) - len(wrong):,} of {len(known):,} documents have the template's ids"
    if num_longer := sum(
        each.truth is not None and len(each) > len(each.truth.ids) for each in known if not each.difference
    ):
        measured += f", {num_longer:,} and a token after them"
    return Finding(not wrong, measured, "all", (*detail, subject.found.summary), remedy)


def _where(document: Document) -> str:
    return f"batch {document.batch}, row {document.row}, token {document.start}"


def trained_tokens(subject: TrainerSubject) -> Finding:
    """What is trained is what the model itself has to write; each label is the token at its own place."""
    documents = [each for each in subject.documents(subject.trained_roles != "all") if len(each)]
    wrong, prompt, headers, answer, num_answer, num_trained = Counter[str](), 0, 0, 0, 0, 0
    first, by_role = dict[str, str](), Counter[tuple[str, bool]]()
    for each in documents:
        target, behind, stops = _expected(subject, each)
        trained, roles = each.trained, each.tokens.role_ids if each.tokens is not None else None
        has_wrong_label = (each.labels != IGNORE_INDEX) & (each.labels != each.ids)
        asked = target & ~stops
        asked[:1] = False
        is_prompt = trained & ~target & ~behind & ~stops
        is_header = is_prompt & (roles == Role.TEMPLATE) if roles is not None else np.zeros(len(each), bool)
        missed = asked & ~trained
        for name, found in (
            ("labels that are not the token", has_wrong_label),
            ("prompt", is_prompt & ~is_header),
            ("header", is_header),
            ("answer", missed),
        ):
            if found.any():
                wrong[name] += int(found.sum())
                at = int(np.argmax(found))
                text = subject.tokenizer.decode(each.ids[at : at + 8].tolist())
                first.setdefault(name, f"{_where(each)} + {at}: {text!r}")
        prompt, headers = prompt + int((is_prompt & ~is_header).sum()), headers + int(is_header.sum())
        answer, num_answer = answer + int(missed.sum()), num_answer + int(asked.sum())
        num_trained += int(trained.sum())
        for role in np.unique(roles) if roles is not None else ():
            by_role[role_name(Role(role)), True] += int(trained[roles == role].sum())
            by_role[role_name(Role(role)), False] += int((roles == role).sum())
    counts = ", ".join(
        f"{name} {by_role[name, True]:,} of {by_role[name, False]:,}" for name in dict.fromkeys(n for n, _ in by_role)
    )
    words = {
        "labels that are not the token": f"{wrong['labels that are not the token']:,} labels are other tokens",
        "prompt": f"{prompt:,} prompt tokens trained",
        "header": f"{headers:,} tokens of headers trained",
        "answer": f"{answer:,} of {num_answer:,} answer tokens not trained",
    }
    found = [words[name] for name in words if wrong[name]]
    if not num_trained:
        found = ["nothing is trained"]
    detail = (*(f"{name}: the first at {where}" for name, where in first.items()), f"trained by role: {counts}")
    is_right = not found
    measured = f"{num_trained:,} trained tokens, all of what the model writes" if is_right else ", ".join(found)
    if is_right and subject.trained_roles == "all":
        measured = f"{num_trained:,} trained tokens, all of each document"
    return Finding(is_right, measured, "as meant", detail, _label_remedy(wrong, num_trained, answer, num_answer))


def _label_remedy(wrong: Counter[str], num_trained: int, num_missed: int, num_answer: int) -> str:
    """Returns what mends the labels, by what was measured."""
    if wrong["labels that are not the token"]:
        return (
            "The labels are shifted before the model shifts them again. Give labels that equal input_ids at their own "
            "place (transformers' models shift by one), or pass them as shift_labels."
        )
    if not num_trained or num_missed == num_answer > 0:
        return (
            "No answer is trained. A template without {% generation %} marks gives an empty assistant mask, and a "
            "response_template or instruction_template that does not occur in the ids masks everything: in TRL give "
            "messages with assistant_only_loss=True and a template with marks (chat_template_path=), or "
            "prompt-completion rows; elsewhere check the response template's ids in context."
        )
    if wrong["prompt"] and not wrong["answer"]:
        return (
            "The prompts are trained. TRL: SFTConfig(assistant_only_loss=True) for messages, or prompt-completion rows "
            "with completion_only_loss=True; axolotl: train_on_inputs: false with roles_to_train: [assistant]; "
            "LLaMA-Factory: train_on_prompt: false. If a loss over everything is meant, pass trained_roles='all'."
        )
    if wrong["header"] and not wrong["answer"]:
        return (
            "The mask begins before what the model writes. Move {% generation %} behind the header, or end the prompt "
            "with add_generation_prompt=True; TRL's prompt-completion rows do so."
        )
    if wrong["answer"]:
        return (
            "Answers are left out of the loss. Multi-turn rows need a mask of every answer: TRL: "
            "assistant_only_loss=True; axolotl: train_on_inputs: false with roles_to_train; LLaMA-Factory: "
            "mask_history: false; a response_template has to be found in each turn."
        )
    return ""


def _expected(subject: TrainerSubject, document: Document) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns, each as bool [n]: what is to be trained, the template's text that may be, and the stop tokens."""
    tokens, size = document.tokens, len(document)
    behind, stops = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
    if tokens is None:
        return np.ones(size, dtype=bool), behind, stops
    special = set(subject.tokenizer.all_special_ids)
    last = max((turn.stop or turn.end for turn in tokens.turns), default=0)
    for turn in tokens.turns:
        if turn.role is Role.ASSISTANT and tokens.num_boundary_tokens and turn.start:
            behind[turn.start - 1] = True  # it begins in the header and ends in the answer
        if turn.role is Role.ASSISTANT and turn.stop is not None:
            stops[turn.stop] = True
            at = turn.stop + 1
            while at < size and tokens.role_ids[at] == Role.TEMPLATE:
                text = subject.tokenizer.decode([int(tokens.input_ids[at])])
                if text.strip() and not (turn.stop == last and int(tokens.input_ids[at]) in special):
                    break
                behind[at] = True
                at += 1
        elif turn.role is Role.ASSISTANT and turn.end >= last:
            behind[turn.end :] = True  # the end of a template that writes no stop token
    target = Targets().of(tokens)
    # A last token of a header that is white space may be trained with what follows, as the newline before a tool call.
    ends_header = np.append(target[1:] & ~target[:-1], False) & (tokens.role_ids == Role.TEMPLATE)
    for at in np.flatnonzero(ends_header):
        behind[at] |= not subject.tokenizer.decode([int(tokens.input_ids[at])]).strip()
    behind[: document.num_unclear] = True
    if subject.trained_roles == "all":
        return ~behind, behind, stops
    return target & ~behind, behind, stops


def stop_tokens(subject: TrainerSubject) -> Finding:
    """Each answer that is whole trains the token that ends it, so the model learns to stop there."""
    documents = subject.documents()
    targets = Targets(frozenset(Role)) if subject.trained_roles == "all" else Targets()
    audit, names = Audit(("the batches",), targets), Counter[str]()
    lone = {id(each) for each in _with_lone_answers(documents)}  # of which forgery reports
    for each in (each for each in documents if id(each) not in lone):
        assert each.tokens is not None
        audit.add_row((each.tokens, each.labeled))
        names.update(subject.tokenizer.decode([n]) for n in each.tokens.stop_ids)
    turns = audit.turns
    if not turns.num_turns:
        raise NotMeasuredError("no whole answer is to be trained in the batches")
    problem = next((each.truth.problem for each in documents if each.truth is not None and each.truth.problem), "")
    stops = ", ".join(name for name, _ in names.most_common(3)) or "no stop token"
    measured = f"{turns.num_stop_trained:,} of {turns.num_turns:,} answers train {stops}"
    detail = [each for each in audit.problems if "stop token" in each]
    pad = subject.tokenizer.pad_token
    remedy = (
        "The stop token is masked away. Put it inside the template's {% generation %} marks, or train it with the "
        "answer (axolotl: train_on_eos: turn; LLaMA-Factory: efficient_eos: false); TRL's own training templates do so."
    )
    if pad is not None and pad in names:
        remedy = (
            f"The padding token is the stop token, {pad}, and the collator masks every padding token. Give the "
            "tokenizer another one (SFTConfig(pad_token=...), tokenizer.pad_token = ...), or one that pads labels "
            "by position, such as TRL's or DataCollatorForSeq2Seq."
        )
        detail.append(f"the padding token is the stop token, {pad}")
    if not names:
        remedy = (
            "No stop token follows the answers. Give a template that ends them with one (TRL: chat_template_path=, "
            "axolotl: chat_template:), or add the eos_token to the text of each answer."
        )
        detail.append(problem)
    return Finding(turns.num_stop_trained == turns.num_turns, measured, "all", tuple(detail), remedy)


def positions(subject: TrainerSubject) -> Finding:
    """Positions restart with each document, and no document's first token is predicted from its neighbor."""
    wrong, crossing, num_packed, num_rows = list[str](), list[str](), 0, 0
    for batch, row, documents in rows_of(subject):
        num_rows += 1
        num_packed += len(documents) > 1
        for each in documents:
            if each.start and documents[0] is not each and each.labels[0] != IGNORE_INDEX:
                crossing.append(f"{_where(each)} is trained from the document before it")
            own = None if batch.positions is None else batch.positions[row, each.start : each.end]
            if own is None and (len(documents) == 1):
                continue
            if own is None:
                if each is not documents[0]:
                    wrong.append(f"{_where(each)}: no position_ids are passed, so positions run on")
            elif len(own) and (np.diff(own) != 1).any():
                wrong.append(f"{_where(each)}: positions {_few(own)} are not one after another")
            elif len(own) and own[0] != 0 and not (len(documents) == 1 and _is_left_padded(batch, row)):
                wrong.append(f"{_where(each)}: positions begin at {int(own[0])}")
    if not num_rows:
        raise NotMeasuredError("no document could be told apart")
    remedy = (
        "Positions run on through a packed row, so every conversation is at another distance from its beginning than "
        "when the model is used. TRL: packing_strategy='bfd' (padding-free, with position_ids); transformers: "
        "DataCollatorWithFlattening; axolotl: sample_packing: true with flash attention."
    )
    if crossing and not wrong:
        remedy = (
            "Labels cross the borders of packed documents. Set the label of each document's first token to -100, as "
            "DataCollatorWithFlattening and TRL's padding-free collator do."
        )
    found = [f"{len(each):,} {name}" for name, each in (("wrong starts", wrong), ("labels cross", crossing)) if each]
    measured = ", ".join(found) or f"{num_rows:,} rows, {num_packed:,} of them packed: positions restart"
    return Finding(not found, measured, "none", (*wrong[:_MOST_SHOWN], *crossing[:_MOST_SHOWN]), remedy)


def rows_of(subject: TrainerSubject) -> Iterator[tuple[SeenBatch, int, list[Document]]]:
    """Yields each row of a batch that holds documents with known bounds."""
    documents: dict[tuple[int, int], list[Document]] = {}
    for each in subject.found.documents:
        documents.setdefault((each.batch, each.row), []).append(each)
    for (number, row), found in documents.items():
        if any(each.source for each in found):
            yield subject.batches[number], row, found


def _is_left_padded(batch: SeenBatch, row: int) -> bool:
    return batch.attended is not None and batch.attended[row, 0] == 0


def _few(values: np.ndarray) -> str:
    return " ".join(map(str, values[:4].tolist())) + " ..."


def truncation(subject: TrainerSubject) -> Finding:
    """No answer is cut off, no conversation loses its beginning, and no row is dropped or has nothing to train."""
    documents = [each for each in subject.found.documents if each.source]
    if len(documents) < _LEAST_KNOWN * len(subject.found.documents) or not documents:
        raise NotMeasuredError(f"the bounds of too few conversations are known: {subject.found.summary}")
    cut = [each for each in documents if each.is_cut_after]
    begins = [each for each in documents if each.num_cut_before]
    answers = [each for each in documents if each.cuts_answer]
    empty = [each[0] for batch, row, each in rows_of(subject) if (batch.labels[row, 1:] == IGNORE_INDEX).all()]
    missing = subject.found.missing if subject.is_whole else []
    if len(missing) <= sum(bool(each.difference or each.num_cut_before) for each in documents):
        missing = []  # they are there, as other ids or as fragments
    counts = {
        "answers cut off": answers,
        "conversations end early": cut,
        "conversations lack their beginning": begins,
        "rows have nothing to train": empty,
        "conversations are in no batch": missing,
    }
    found = [f"{len(each):,} {name}" for name, each in counts.items() if each]
    detail = [
        f"{name}: the first is {_where(each[0])}" for name, each in counts.items() if each and each is not missing
    ]
    detail += [f"in no batch: {text!r}" for text in missing[:_MOST_SHOWN]]
    longest = max(len(each) for each in documents)
    args = subject.trainer.args
    is_wrapped = getattr(args, "packing", False) and getattr(args, "packing_strategy", "") == "wrapped"
    remedy = (
        f"Conversations are longer than the limit; the longest document here has {longest:,} tokens. Raise max_length "
        "(axolotl: sequence_len, LLaMA-Factory: cutoff_len), or leave long rows out of the data."
    )
    if is_wrapped or (begins and cut and any(len(rows) > 1 for *_, rows in rows_of(subject))):
        remedy = (
            "Packing cuts conversations where a pack is full. TRL: packing_strategy='bfd' and a max_length above the "
            "longest conversation; LLaMA-Factory: neat_packing: true; axolotl: sample_packing: true."
        )
    elif missing and not (cut or begins):
        remedy = "Rows are dropped while the data is prepared. Raise max_length, or remove the filter that drops them."
    elif empty and not (cut or begins):
        remedy = "These rows train nothing: their answers are masked. Check the mask that trained tokens names."
    return Finding(
        not found, ", ".join(found) or f"{len(documents):,} documents are whole", "none", tuple(detail), remedy
    )


def _with_lone_answers(documents: Sequence[Document]) -> list[Document]:
    """Returns the documents read from ids that have an untrained answer, although most answers before a last one are.

    Labels that a script makes from the messages leave out an answer that only a text spells.
    """
    counts = {id(each): _answers_before_last(each) for each in documents if each.source == "ids"}
    num_trained, num_all = (sum(pair[n] for pair in counts.values()) for n in (0, 1))
    if 2 * num_trained <= num_all:
        return []
    return [each for each in documents if id(each) in counts and counts[id(each)][0] < counts[id(each)][1]]


def _answers_before_last(document: Document) -> tuple[int, int]:
    """Returns how many of the answers before the last one are trained, and how many there are."""
    turns = document.tokens.turns if document.tokens is not None else ()
    answers = [turn for turn in turns if turn.role is Role.ASSISTANT and turn.end > turn.start][:-1]
    return sum(bool(document.trained[turn.start : turn.end].any()) for turn in answers), len(answers)


def forgery(subject: TrainerSubject) -> Finding:
    """Text that spells a control token stays plain text."""
    known = [
        each for each in subject.found.documents if each.truth is not None and each.source in ("rows", "conversations")
    ]
    if lone := _with_lone_answers(subject.found.documents):
        measured = f"{len(lone):,} documents have an answer without a label, as those that a text spells"
        detail = [
            f"{_where(each)}: {subject.tokenizer.decode(each.ids[:40].tolist())!r}" for each in lone[:_MOST_SHOWN]
        ]
        return Finding(False, measured, "none", (*detail, "conversations= shows whether a text spells them"))
    if not known:
        raise NotMeasuredError("the messages of the rows are gone, and ids do not show who wrote a control token")
    forged = [each for each in known if each.is_forged]
    num_plain = sum(each.tokens is not None and each.tokens.holds_control_text for each in known)
    measured = f"{len(forged):,} of {len(known):,} documents have control tokens that a text spells"
    if not forged:
        measured = f"no text became a control token; {num_plain:,} of {len(known):,} documents spell one"
    detail = [f"{_where(each)}: {each.truth.excerpt!r}" for each in forged[:_MOST_SHOWN] if each.truth is not None]
    return Finding(not forged, measured, "none", tuple(detail))
