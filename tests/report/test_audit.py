"""The audit counts what a brute-force reading of rows and packs counts, and names each problem with its first place."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import median_low
from typing import Any

import numpy as np

from sftron.data.lanes.lane import PoolDelay
from sftron.data.types import IGNORE_INDEX, ConversationKey, Dropped, Pack, Role, Turn
from sftron.report.audit import Audit, AuditedRow
from sftron.report.counts import LengthCount, PackingCount
from sftron.report.page import inspect_packs

from .bytes_tokenizer import CHATS, HOSTILE_TEXT, awkward_pack, conversation, decode, pack


def audit_of(*rows: AuditedRow, packs: tuple[Pack, ...] = ()) -> Audit:
    audit = Audit()
    for row in rows:
        audit.add_row(row)
    for each in packs:
        audit.add_pack(each)
    return audit


def test_counts_agree_with_brute_force() -> None:
    rows = [conversation(chat, row=row) for row, chat in enumerate(CHATS)]
    audit = audit_of(*rows, Dropped("too_long", "9 tokens", ConversationKey(0, 9)), packs=(awkward_pack(),))
    tokens, trained = Counter(), Counter()
    for _, labeled in rows:
        for at in range(len(labeled)):
            role = Role(int(labeled.role_ids[at])).name.lower()
            tokens[role] += 1
            trained[role] += at > 0 and labeled.labels[at - 1] == labeled.input_ids[at]
    counted = audit.as_dict()["rows"]
    assert counted["tokens"] == {
        "num_tokens": sum(len(labeled) for _, labeled in rows),
        "num_trained_tokens": trained["assistant"],
        "by_role": {role: {"num_tokens": tokens[role], "num_trained_tokens": trained[role]} for role in tokens},
    }
    assert trained["assistant"] == trained.total() > 0
    assert (counted["num_read"], counted["num_kept"]) == (len(CHATS) + 1, len(CHATS))
    assert f"No problem found in the {len(CHATS)} rows kept (dropped: 1). Each of" in audit.as_table()
    assert audit.as_dict()["packs"]["tokens"] == counted["tokens"]  # of the same conversations, and padding
    num_turns = sum(role is Role.ASSISTANT for chat in CHATS for role, _ in chat)
    assert counted["assistant_turns"]["num_turns"] == counted["assistant_turns"]["num_stop_trained"] == num_turns
    assert audit.problems == []


def test_every_statistic_of_packing_is_its_definition() -> None:
    """The definitions of docs/packing.md, written out."""
    chats = [conversation(chat)[1] for chat in CHATS]
    packs = [pack(chats[:3], num_unused=9), pack(chats[2:], num_unused=0), pack(chats[:1], num_unused=70)]
    lengths = [[len(each) for each in own] for own in (chats[:3], chats[2:], chats[:1])]
    positions = [len(each.input_ids) for each in packs]
    count, plain, empty = PackingCount(300, PoolDelay(4, 10, 7)), PackingCount(), pack(chats[:1])
    object.__setattr__(empty, "keys", ())  # the pack of a drained lane
    assert list(plain.facts()) == []
    for each in (*packs, empty):
        count.add(each)
        plain.add(each)

    every = [length for own in lengths for length in own]
    assert count.as_dict() == {
        "num_packs": 3,
        "num_conversations": 6,
        "num_positions": sum(positions),
        "fill": sum(every) / sum(positions),
        "mean_length_before": sum(every) / 6,
        "mean_length_after": sum(every) / 3,
        "attention_share": sum(n * n for n in every) / sum(n * n for n in positions),
        "padding_to_longest": sum(len(own) * max(own) for own in lengths) / sum(positions),
        "padding_to_sequence_length": 6 * 300 / sum(positions),
        "packs_waited": {"mean": 2.5, "longest": 7},
    }
    facts = dict(count.facts())
    assert facts["positions if padded to 300"] == f"{1800 / sum(positions):.2f} times"
    assert facts["wait in the pool, in packs"] == "2.5 on average, 7 at most"
    assert facts.keys() - dict(plain.facts()).keys() == {"positions if padded to 300", "wait in the pool, in packs"}


def test_a_stop_token_that_is_not_trained_is_a_problem_that_names_its_turn() -> None:
    audit = audit_of(conversation(CHATS[0], row=4), conversation(CHATS[2], row=5, is_stop_trained=False))
    (problem,) = audit.problems
    assert problem.startswith("2 of 3 assistant turns do not train their stop token")
    assert problem.endswith("the first is message 1 of row 5 of data set 0.")

    tokenized, labeled = conversation(CHATS[0])
    labeled.loss_weights[tokenized.turns[-1].end - 1] = 0  # the stop token's label without weight
    assert audit_of((tokenized, labeled)).turns.num_stop_not_trained == 1


def test_turns_that_train_their_stop_alone_are_counted_and_the_first_is_named() -> None:
    """An answer that is empty, or whose white space the template's own token has taken in, teaches to stop at once."""
    audit = audit_of(conversation(CHATS[0], row=4), conversation([(Role.USER, "a"), (Role.ASSISTANT, "")], row=5))
    assert audit.empty_turns == "1, the first in row 5 of data set 0"
    assert ("assistant turns training nothing else", audit.empty_turns) in audit.row_facts()
    assert audit.problems == []

    tokenized, labeled = conversation(CHATS[0])
    turn = tokenized.turns[-1]
    labeled.labels[turn.start - 1 : turn.end - 1] = IGNORE_INDEX
    assert audit_of((tokenized, labeled)).turns.num_empty == 1
    assert audit_of(conversation(CHATS[0])).empty_turns == ""


def test_a_turn_without_a_stop_token_is_a_problem_and_one_the_template_leaves_out_is_not() -> None:
    tokenized, labeled = conversation(CHATS[0])
    last = tokenized.turns[-1]
    for turn, num_not_trained, num_left_out in (
        (Turn(Role.ASSISTANT, last.start, last.end, stop=None), 1, 0),
        (Turn(Role.ASSISTANT, last.start, last.start, stop=None), 0, 1),
        (Turn(Role.USER, last.start, last.end, stop=None), 0, 0),
        (Turn(Role.TOOL_CALL, last.start, last.end, stop=None), 1, 0),
        (Turn(Role.TOOL_CALL, 0, 1, stop=None), 0, 0),
    ):
        turns = audit_of((replace(tokenized, turns=(turn,)), labeled)).turns
        assert (turns.num_stop_not_trained, turns.num_left_out_by_template) == (num_not_trained, num_left_out)


def test_a_turn_that_the_data_gives_no_weight_is_no_problem_and_one_that_lost_its_stop_still_is() -> None:
    tokenized, labeled = conversation(CHATS[0])
    turn = tokenized.turns[-1]
    for weight, num_not_trained, num_stop_not_trained in ((0.0, 1, 0), (0.5, 0, 1)):
        weights = np.ones(len(tokenized), np.float32)
        weights[turn.start : turn.end + 1] = weight  # with the stop token, which stands at turn.end
        labeled.loss_weights[turn.start - 1 : turn.end] = 0
        turns = audit_of((replace(tokenized, token_weights=weights), labeled)).turns
        assert (turns.num_not_trained, turns.num_stop_not_trained) == (num_not_trained, num_stop_not_trained)


def test_what_trains_nothing_is_a_problem() -> None:
    tokenized, labeled = conversation([(Role.USER, "a"), (Role.USER, "b")])
    audit = audit_of((tokenized, labeled), packs=(pack([labeled]),))
    assert [problem.split(" among")[0] for problem in audit.problems] == ["No token is trained"] * 2

    (problem,) = audit_of(conversation(CHATS[0]), conversation([(Role.USER, "a")], row=3)).problems
    assert problem.startswith("1 of 2 kept rows train no token")
    assert problem.endswith("row 3 of data set 0.")


def test_labels_that_are_not_the_next_token_of_their_conversation_are_a_problem() -> None:
    tokenized, labeled = conversation(CHATS[0])
    shifted = np.append(labeled.labels[1:], IGNORE_INDEX).astype(np.int32)
    weights = (shifted >= 0).astype(np.float32)
    audit = audit_of((tokenized, replace(labeled, labels=shifted, loss_weights=weights)))
    assert 0 < audit.as_dict()["num_wrong_labels"] <= int((labeled.labels >= 0).sum())
    assert any("are not the next token" in problem for problem in audit.problems)

    shown = awkward_pack()
    for at in (shown.conversation_bounds[1] - 1, shown.num_tokens):  # at a border, and in the padding
        crossed = replace(shown, labels=shown.labels.copy())
        crossed.labels[at] = shown.input_ids[at + 1]
        audit = audit_of(packs=(crossed,))
        assert (audit.as_dict()["num_wrong_labels"], len(audit.problems)) == (1, 1)


def test_boundary_tokens_control_text_second_thoughts_and_truncation_are_counted_by_row() -> None:
    tokenized, labeled = conversation(CHATS[0])
    odd = replace(
        tokenized, num_boundary_tokens=3, holds_control_text=True, num_truncated_turns=2, has_second_thought=True
    )
    audit = audit_of((odd, labeled), (odd, labeled), (tokenized, labeled))
    counted = audit.as_dict()["rows"]
    assert counted["num_boundary_tokens"] == 6
    assert counted["num_holding_control_text"] == counted["num_truncated"] == 2
    assert counted["num_with_second_thought"] == 2
    assert ("rows with a second thought of the template's", "2") in audit.row_facts()


def test_a_drop_has_its_location_once() -> None:
    audit = Audit(locate=lambda key: f"a.jsonl:{key.row + 1}")
    audit.add_row(Dropped("a", "detail", ConversationKey(0, 7)))
    audit.add_row(Dropped("b", "a.jsonl:1: detail", ConversationKey(0, 0)))
    assert audit.drops() == [("a", 1, "a.jsonl:8: detail"), ("b", 1, "a.jsonl:1: detail")]


def test_rows_and_drops_are_counted_for_each_data_set_and_reason_with_the_first() -> None:
    def of(source: int, row: int) -> Any:
        return tuple(replace(each, key=ConversationKey(source, 3)) for each in rows[row])

    rows = [conversation(chat) for chat in CHATS[:3]]
    drops = [Dropped(reason, f"detail {row}", ConversationKey(0, row)) for row, reason in enumerate("aba", start=7)]
    audit = audit_of(*drops, of(0, 0), of(1, 1), of(1, 2))
    assert audit.drops() == [("a", 2, "row 7 of data set 0: detail 7"), ("b", 1, "row 8 of data set 0: detail 8")]
    one, two = audit.as_dict()["sources"]
    lengths = [len(labeled) for _, labeled in rows]
    assert (one["num_rows"], one["num_kept"], one["dropped"]) == (4, 1, {"a": 2, "b": 1})
    assert (two["num_rows"], two["num_kept"], two["dropped"]) == (2, 2, {})
    assert (one["num_tokens"], two["num_tokens"]) == (lengths[0], sum(lengths[1:]))
    assert 0 < two["num_trained_tokens"] == audit.row_roles.num_trained_tokens - one["num_trained_tokens"]
    assert [kept for _, kept, _ in audit.source_facts()] == ["1 of 4 (25.0%)", "2 of 2 (100.0%)"]
    assert audit_of(*drops).problems == ["None of 3 rows was kept; the reasons are below."]


def test_lengths_are_exact_and_every_length_is_in_its_bucket() -> None:
    lengths = [1, 2, 3, 4, 5, 8, 9, 100, 4096, 4097]
    count = LengthCount(lengths)
    assert count.quantile(0.5) == median_low(lengths)
    assert [count.quantile(share / 10) for share in range(11)] == [1, *lengths]
    buckets = count.buckets()
    assert all(num == sum(low <= length <= high for length in lengths) for low, high, num in buckets)
    assert sum(num for _, _, num in buckets) == len(lengths)
    assert buckets[2] == [3, 4, 2]
    assert all(left[1] + 1 == right[0] for left, right in pairwise(buckets))
    assert LengthCount().buckets() == []


def test_the_table_is_safe_and_holds_every_fact() -> None:
    audit = Audit((HOSTILE_TEXT,), num_held_out=1234)
    audit.add_row(Dropped(HOSTILE_TEXT, HOSTILE_TEXT, ConversationKey(0, 1)))
    audit.add_row(conversation(CHATS[0]))
    audit.add_pack(awkward_pack())
    table = audit.as_table()
    assert not [c for c in table if c not in "\n" and not c.isprintable()]
    assert all(name in table and value in table for name, value in (*audit.row_facts(), *audit.pack_facts()))
    assert json.loads(json.dumps(audit.as_dict())) == audit.as_dict()


def test_an_inspection_counts_all_packs_shows_the_first_and_reports_its_cap_and_the_rows_held_out() -> None:
    rows = iter([conversation(CHATS[0], row=row) for row in range(10)])
    packs = [awkward_pack() for _ in range(5)]
    capped = inspect_packs(packs, rows, decode, audit=Audit(num_held_out=7), max_rows=4, num_shown=2)
    assert (len(capped.packs), capped.audit.packing.num_packs, capped.problems) == (2, 5, [])
    assert (capped.audit.num_rows, capped.audit.is_partial, len(list(rows))) == (4, True, 5)
    assert json.loads(json.dumps(capped.audit.as_dict()))["rows"]["num_held_out"] == 7
    for text in (capped.as_text(color=False), capped.as_html()):
        assert "the first ones only" in text
        assert "7, which are not audited" in text
    packs[0].loss_weights[:] = 0
    whole = inspect_packs(packs[:1], [conversation(CHATS[0])] * 10, decode, max_rows=10)
    assert (whole.audit.num_rows, whole.audit.is_partial) == (10, False)
    assert "held out" not in whole.as_text(color=False)
    assert "Do not train on this." in whole.as_html()
