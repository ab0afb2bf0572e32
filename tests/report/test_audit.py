import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import median_low

import numpy as np
import pytest

from sftron.data.types import (
    IGNORE_INDEX,
    ConversationKey,
    Dropped,
    LabeledConversation,
    Role,
    TokenizedConversation,
    Turn,
)
from sftron.report.audit import Audit
from sftron.report.counts import LengthBucket, LengthCount
from sftron.report.inspection import Inspection

from .bytes_tokenizer import CHATS, HOSTILE_TEXT, awkward_pack, conversation, decode, pack


def audit_of(*rows) -> Audit:
    audit = Audit()
    for row in rows:
        audit.add_row(row)
    return audit


def test_counts_agree_with_brute_force():
    rows = [conversation(chat, row=row) for row, chat in enumerate(CHATS)]
    audit = audit_of(*rows, Dropped("too_long", "9 tokens", ConversationKey(0, 9)))
    tokens, trained = Counter(), Counter()
    for _, labeled in rows:
        for at in range(len(labeled)):
            role = Role(int(labeled.role_ids[at])).name.lower()
            tokens[role] += 1
            trained[role] += at > 0 and labeled.labels[at - 1] == labeled.input_ids[at]
    counted = audit.as_dict()["rows"]
    assert counted["tokens"]["by_role"] == {
        role: {"num_tokens": tokens[role], "num_trained_tokens": trained[role]} for role in tokens
    }
    assert counted["tokens"]["num_tokens"] == sum(len(labeled) for _, labeled in rows)
    assert counted["tokens"]["num_trained_tokens"] == trained["assistant"] == trained.total() > 0
    assert (counted["num_read"], counted["num_kept"]) == (len(CHATS) + 1, len(CHATS))
    num_turns = sum(role is Role.ASSISTANT for chat in CHATS for role, _ in chat)
    assert counted["assistant_turns"]["num_turns"] == counted["assistant_turns"]["num_stop_trained"] == num_turns
    assert audit.problems == []


def test_packs_are_counted_without_their_tails():
    shown = awkward_pack()
    audit = Audit()
    audit.add_pack(shown)
    audit.add_pack(shown)
    counted = audit.as_dict()["packs"]
    assert counted["num_packs"] == 2
    assert counted["num_conversations"] == 2 * len(CHATS)
    assert counted["fill"] == shown.num_tokens / len(shown.input_ids) < 1
    assert counted["tokens"]["num_trained_tokens"] == 2 * shown.num_trained_tokens > 0
    in_pack = Counter(Role(role).name.lower() for role in shown.role_ids[: shown.num_tokens].tolist())
    by_role = counted["tokens"]["by_role"]
    assert {role: count["num_tokens"] for role, count in by_role.items()} == {r: 2 * n for r, n in in_pack.items()}
    assert audit.problems == []


def test_a_stop_token_that_is_not_trained_is_a_problem_that_names_its_turn():
    audit = audit_of(conversation(CHATS[0], row=4), conversation(CHATS[2], row=5, is_stop_trained=False))
    assert audit.turns.num_turns == 3
    (problem,) = audit.problems
    assert problem.startswith("2 of 3 assistant turns do not train their stop token")
    assert problem.endswith("the first is message 1 of row 5 of data set 0.")


def test_a_stop_label_without_weight_is_not_trained():
    tokenized, labeled = conversation(CHATS[0])
    stop = tokenized.turns[-1].stop
    labeled.loss_weights[stop - 1] = 0
    assert audit_of((tokenized, labeled)).turns.num_stop_not_trained == 1


def test_turns_that_train_their_stop_alone_are_counted_and_the_first_is_named():
    """An answer that is empty, or whose white space the template's own token has taken in, teaches to stop at once."""
    empty, labeled = conversation([(Role.USER, "a"), (Role.ASSISTANT, "")], row=5)
    audit = audit_of(conversation(CHATS[0], row=4), (empty, labeled))
    assert audit.empty_turns == "1, the first in row 5 of data set 0"
    assert ("assistant turns training nothing else", audit.empty_turns) in audit.facts()
    assert audit.as_dict()["rows"]["assistant_turns"]["num_empty"] == 1
    assert audit.problems == []

    tokenized, labeled = conversation(CHATS[0])
    turn = tokenized.turns[-1]
    labeled.labels[turn.start - 1 : turn.end - 1] = IGNORE_INDEX
    assert audit_of((tokenized, labeled)).turns.num_empty == 1
    assert audit_of(conversation(CHATS[0])).empty_turns == ""


def test_a_turn_without_a_stop_token_is_a_problem_and_one_the_template_leaves_out_is_not():
    tokenized, labeled = conversation(CHATS[0])
    last = tokenized.turns[-1]
    for turn, num_not_trained, num_left_out in (
        (Turn(Role.ASSISTANT, last.start, last.end, stop=None), 1, 0),
        (Turn(Role.ASSISTANT, last.start, last.start, stop=None), 0, 1),
        (Turn(Role.USER, last.start, last.end, stop=None), 0, 0),
        (Turn(Role.TOOL_CALL, last.start, last.end, stop=None), 1, 0),
        (Turn(Role.TOOL_CALL, 0, 1, stop=None), 0, 0),
    ):
        changed = TokenizedConversation(tokenized.input_ids, tokenized.role_ids, (turn,), tokenized.key)
        audit = audit_of((changed, labeled))
        assert audit.turns.num_stop_not_trained == num_not_trained
        assert audit.turns.num_left_out == num_left_out


def test_a_turn_that_the_data_gives_no_weight_is_no_problem_and_one_that_lost_its_stop_still_is():
    tokenized, labeled = conversation(CHATS[0])
    turn = tokenized.turns[-1]
    weights = np.ones(len(tokenized), np.float32)
    weights[turn.start : turn.stop + 1] = 0
    labeled.loss_weights[:-1] *= weights[1:]
    audit = audit_of((replace(tokenized, token_weights=weights), labeled))
    assert (audit.turns.num_not_trained, audit.turns.num_stop_not_trained) == (1, 0)
    assert ("assistant turns not trained", "1") in audit.facts()
    weights[turn.start : turn.stop + 1] = 0.5
    audit = audit_of((replace(tokenized, token_weights=weights), labeled))
    assert (audit.turns.num_not_trained, audit.turns.num_stop_not_trained) == (0, 1)


def test_a_run_that_trains_nothing_is_a_problem():
    tokenized, labeled = conversation([(Role.USER, "a"), (Role.USER, "b")])
    audit = audit_of((tokenized, labeled))
    audit.add_pack(pack([labeled]))
    assert [problem.split(" among")[0] for problem in audit.problems] == ["No token is trained"] * 2


def test_one_row_that_trains_nothing_is_a_problem():
    (problem,) = audit_of(conversation(CHATS[0]), conversation([(Role.USER, "a")], row=3)).problems
    assert problem.startswith("1 of 2 kept rows train no token")
    assert problem.endswith("row 3 of data set 0.")


def test_labels_that_are_not_the_next_token_are_a_problem():
    tokenized, labeled = conversation(CHATS[0])
    num_labels = int((labeled.labels >= 0).sum())
    shifted_twice = np.append(labeled.labels[1:], -100).astype(np.int32)
    twice = LabeledConversation(
        labeled.input_ids, shifted_twice, (shifted_twice >= 0).astype(np.float32), labeled.role_ids, labeled.key
    )
    audit = audit_of((tokenized, twice))
    assert 0 < audit.num_wrong_labels <= num_labels
    assert any("are not the next token" in problem for problem in audit.problems)


@pytest.mark.parametrize("where", ["border", "tail"])
def test_a_label_that_crosses_a_border_is_a_problem(where):
    shown = awkward_pack()
    at = int(shown.conversation_bounds[1]) - 1 if where == "border" else shown.num_tokens
    shown.labels[at] = shown.input_ids[at + 1]
    audit = Audit()
    audit.add_pack(shown)
    assert audit.num_wrong_labels == 1
    assert len(audit.problems) == 1


def test_seams_control_text_and_truncation_are_counted_by_row():
    tokenized, labeled = conversation(CHATS[0])
    odd = replace(tokenized, num_boundary_tokens=3, holds_control_text=True, num_truncated_turns=2)
    audit = audit_of((odd, labeled), (odd, labeled), (tokenized, labeled))
    counted = audit.as_dict()["rows"]
    assert counted["num_seam_tokens"] == 6
    assert counted["num_holding_control_text"] == counted["num_truncated"] == 2
    assert ("rows cut to fit, last turns left out", "2") in audit.facts()


def test_drops_are_counted_by_reason_with_the_first_of_each():
    drops = [("long", 7), ("empty", 8), ("long", 9)]
    audit = audit_of(*(Dropped(reason, f"detail {row}", ConversationKey(0, row)) for reason, row in drops))
    assert audit.drops() == [
        ("long", 2, "row 7 of data set 0: detail 7"),
        ("empty", 1, "row 8 of data set 0: detail 8"),
    ]
    assert audit.problems == ["None of 3 rows was kept; the reasons are below."]


def test_stages_of_different_conversations_are_refused():
    with pytest.raises(ValueError, match="has 32 ids before labels and 71 after"):
        audit_of((conversation([(Role.ASSISTANT, "x" * 27)])[0], conversation(CHATS[0])[1]))


def test_lengths_are_exact_and_every_length_is_in_its_bucket():
    lengths = [1, 2, 3, 4, 5, 8, 9, 100, 4096, 4097]
    count = LengthCount()
    for length in lengths:
        count.add(length)
    assert count.quantile(0.5) == median_low(lengths)
    assert (count.quantile(0), count.quantile(1)) == (1, 4097)
    assert [count.quantile(share / 10) for share in range(1, 11)] == lengths
    buckets = count.buckets()
    for bucket in buckets:
        assert bucket.count == sum(bucket.low <= length <= bucket.high for length in lengths)
    assert sum(bucket.count for bucket in buckets) == len(lengths)
    assert buckets[2] == LengthBucket(low=3, high=4, count=2)
    assert all(left.high + 1 == right.low for left, right in pairwise(buckets))
    assert LengthCount().buckets() == []


def test_the_table_is_safe_and_holds_every_fact():
    audit = Audit((HOSTILE_TEXT,))
    audit.add_row(Dropped(HOSTILE_TEXT, HOSTILE_TEXT, ConversationKey(0, 1)))
    audit.add_row(conversation(CHATS[0]))
    audit.add_pack(awkward_pack())
    table = audit.as_table()
    assert not [c for c in table if c not in "\n" and not c.isprintable()]
    assert all(name in table and value in table for name, value in audit.facts())
    assert json.loads(json.dumps(audit.as_dict())) == audit.as_dict()


def test_rows_are_counted_for_each_data_set_and_names_are_safe():
    audit = Audit(("<u>one", "two"))
    rows = [conversation(CHATS[0]), conversation(CHATS[1]), conversation(CHATS[2])]
    for source, (tokenized, labeled) in zip((0, 1, 1), rows, strict=True):
        key = ConversationKey(source, 3)
        audit.add_row((replace(tokenized, key=key), replace(labeled, key=key)))
    audit.add_row(Dropped("long", "", ConversationKey(0, 4)))

    one, two = audit.as_dict()["sources"]
    lengths = [len(labeled) for _, labeled in rows]
    assert (one["name"], one["num_rows"], one["num_kept"], one["dropped"]) == ("<u>one", 2, 1, {"long": 1})
    assert (two["name"], two["num_rows"], two["num_kept"], two["dropped"]) == ("two", 2, 2, {})
    assert (one["num_tokens"], two["num_tokens"]) == (lengths[0], sum(lengths[1:]))
    assert 0 < two["num_trained_tokens"] == audit.row_roles.num_trained_tokens - one["num_trained_tokens"]
    assert dict(audit.facts())["two"].startswith("2 of 2 (100.0%) rows kept, ")
    assert "<u>" not in Inspection((), audit, decode, "").as_html()
