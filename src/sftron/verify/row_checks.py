"""Laws 1 and 2 on the user's own rows: ids, headers, stop tokens and masks, against what transformers renders."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from sftron.data.labels import DEFAULT_TRAINED_ROLES
from sftron.data.mask_check import MOST_NOT_COMPARED, MaskCount
from sftron.data.template_check import own_ids, require_own_ids
from sftron.data.types import IGNORE_INDEX, Conversation, DataError, Role
from sftron.report.audit import Audit
from sftron.verify.run_check import Finding, skipped
from sftron.verify.run_subject import Row, Subject

_MOST_SHOWN = 5
_NO_CHATS = "every row holds ready-made ids, which no template has made"


@dataclass(slots=True)
class Tally:
    """How many of what was looked at are right; the places of the first that are not."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, is_right: bool, problem: str) -> None:
        if is_right:
            self.right += 1
        else:
            self.wrong.append(problem)

    @property
    def total(self) -> int:
        return self.right + len(self.wrong)

    def finding(self, what: str, *detail: str) -> Finding:
        shown = (*self.wrong[:_MOST_SHOWN], *detail)
        return Finding(not self.wrong, f"{self.right:,} of {self.total:,} {what}", "all", shown)


def check_template(subject: Subject) -> Finding:
    """Every conversation's ids against apply_chat_template; texts that spell control tokens have to differ there."""
    if not subject.chats:
        return skipped(_NO_CHATS)
    tally, num_control, left_out = Tally(), 0, Counter[str]()
    for conversation, row in subject.chats:
        problem = ""
        try:
            require_own_ids(subject.chat_tokenizer, conversation, row.tokenized)
        except DataError as error:
            problem = str(error)
        tally.add(not problem, problem)
        num_control += row.tokenized.holds_control_text
        left_out.update(row.tokenized.left_out)
    return tally.finding(
        "conversations have the template's ids",
        f"{num_control:,} conversations spell a control token in a text; it is encoded as plain text, and they are "
        "compared without it",
        *(f"the template does not write the {text} of {count:,} messages" for text, count in left_out.most_common()),
    )


def check_prompt(subject: Subject) -> Finding:
    """What stands before the first trained token of the last answer, against the prompt that asks for it."""
    tally, num_left = Tally(), 0
    for conversation, row in subject.chats:
        ids, number = row.tokenized.input_ids.tolist(), _last_answer(conversation, row)
        if number is None or row.tokenized.holds_control_text:
            num_left += 1
            continue
        asked = replace(conversation, messages=conversation.messages[:number])
        try:
            prompt = own_ids(subject.chat_tokenizer, asked, add_generation_prompt=True)
        except Exception:  # a template raises whatever it likes for messages that it takes only with an answer
            num_left += 1
            continue
        start = _start_of_said(row, number)
        decode = subject.chat_tokenizer.decode
        tally.add(
            ids[:start] == prompt,
            f"{row.location}: trained after {decode(ids[max(0, start - 8) : start])!r}, asked after "
            f"{decode(prompt[-8:])!r}",
        )
    if not tally.total:
        return skipped("no row has an answer that transformers can be asked for")
    detail = (f"{num_left:,} conversations spell a control token, or cannot be asked for",) if num_left else ()
    return tally.finding("answers follow the generation prompt", *detail)


def _last_answer(conversation: Conversation, row: Row) -> int | None:
    """The number of the last message, where it is an assistant's that the template writes."""
    last = len(conversation.messages) - 1
    turn = row.tokenized.turns[last]
    return last if turn.role is Role.ASSISTANT and last > 0 and (turn.start < turn.end or turn.stop) else None


def _start_of_said(row: Row, number: int) -> int:
    """The first token of a turn that the model has to say."""
    before = row.tokenized.turns[number - 1]
    start = before.end if before.stop is None else before.stop + 1
    is_said = np.isin(row.tokenized.role_ids[start:], list(DEFAULT_TRAINED_ROLES))
    return start + int(np.argmax(is_said))


def check_stops(subject: Subject) -> Finding:
    """Every answer that is trained to its end trains the token that ends it, and the model's files know that token."""
    audit, stops = Audit(subject.preparation.source_names, subject.preparation.targets), Counter[int]()
    for _, row in subject.chats:
        audit.add_row((row.tokenized, row.labeled))
        for turn in row.tokenized.turns:
            if turn.role is Role.ASSISTANT and turn.stop is not None:
                stops[int(row.tokenized.input_ids[turn.stop])] += 1
    turns = audit.turns
    if not turns.num_turns:
        return skipped(_NO_CHATS if not subject.chats else "no answer of the rows is trained to its end")
    names = {token_id: subject.chat_tokenizer.decode([token_id]) for token_id in stops}
    known = [names[token_id] for token_id in stops if token_id in subject.own_stop_ids]
    new = [names[token_id] for token_id in stops if token_id not in subject.own_stop_ids]
    detail = [f"{names[token_id]} ends {count:,} turns" for token_id, count in stops.most_common()]
    if known:
        detail.append(f"generation_config.json of the model stops at {', '.join(known)}")
    if new:
        detail.append(f"the model's own files do not stop at {', '.join(new)}; the export adds that to them")
    detail += [problem for problem in audit.problems if "stop token" in problem]
    return Finding(
        turns.num_stop_trained == turns.num_turns,
        f"{turns.num_stop_trained:,} of {turns.num_turns:,} answers train {', '.join(names.values())}",
        "all",
        tuple(detail),
    )


def check_masks(subject: Subject) -> Finding:
    """Labels are the next tokens of their conversation, and the trained ones are those that a second way finds."""
    audit, masks = Audit(subject.preparation.source_names, subject.preparation.targets), MaskCount()
    for row in subject.rows:
        audit.add_row((row.tokenized, row.labeled))
    for pack in subject.packs:
        audit.add_pack(pack)
    for conversation, row in subject.chats:
        masks.add(subject.preparation, conversation, row.tokenized, row.labeled, subject.own_stop_ids)
    problems = [problem for problem in audit.problems if "stop token" not in problem]
    problems += masks.problems
    num_trained = sum(int((row.labeled.labels != IGNORE_INDEX).sum()) for row in subject.rows)
    num_tokens = sum(len(row.labeled) for row in subject.rows)
    share = f"{num_trained:,} of {num_tokens:,} tokens trained ({num_trained / max(1, num_tokens):.0%})"
    second = f"{masks.num_compared:,} masks found a second way, by transformers' rendering of each turn's prompt alone"
    left = f"{masks.not_compared.total():,} masks could not be compared: {masks.reasons}" if masks.not_compared else ""
    measured = f"{masks.num_equal:,} of {masks.num_rows:,} masks as found a second way" if masks.num_rows else share
    if problems:
        measured = problems[0]
    elif masks.not_compared:
        measured += f", {masks.not_compared.total():,} not comparable"
    return Finding(
        not problems,
        measured,
        "next tokens only"
        if not masks.num_rows
        else f"all but {MOST_NOT_COMPARED:.0%}"
        if masks.not_compared
        else "all",
        (*problems, *masks.wrong[:_MOST_SHOWN], left, share, second, audit.assurance if not audit.problems else ""),
    )
