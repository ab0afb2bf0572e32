"""The statistics of packing, against the definitions in docs/packing.md, written out."""

import pytest

from sftron.data.lanes.lane import PoolDelay
from sftron.report.audit import Audit
from sftron.report.counts import PackingCount

from .bytes_tokenizer import CHATS, conversation, pack


def test_every_statistic_is_its_definition() -> None:
    chats = [conversation(chat)[1] for chat in CHATS]
    packs = [pack(chats[:3], num_unused=9), pack(chats[2:], num_unused=0), pack(chats[:1], num_unused=70)]
    lengths = [[len(each) for each in own] for own in (chats[:3], chats[2:], chats[:1])]
    positions = [len(each.input_ids) for each in packs]
    count = PackingCount(sequence_length=300, waits=PoolDelay(4, 10, 7))
    for each in packs:
        count.add(each)

    every = [length for own in lengths for length in own]
    told = count.as_dict()
    assert (told["num_packs"], told["num_conversations"], told["num_positions"]) == (3, 6, sum(positions))
    assert told["fill"] == sum(every) / sum(positions)
    assert told["mean_length_before"] == sum(every) / 6
    assert told["mean_length_after"] == sum(every) / 3
    assert told["attention_share"] == sum(n * n for n in every) / sum(n * n for n in positions)
    assert told["padding_to_longest"] == sum(len(own) * max(own) for own in lengths) / sum(positions)
    assert told["padding_to_sequence_length"] == 6 * 300 / sum(positions)
    assert told["packs_waited"] == {"mean": 2.5, "longest": 7}
    facts = dict(count.facts())
    assert facts["conversations to packs"] == "6 to 3, 2.0 a pack"
    assert facts["positions if padded to 300"] == f"{1800 / sum(positions):.2f} times"
    assert facts["packs waited in the pool"] == "2.5 on average, 7 at most"


def test_empty_packs_of_a_drained_lane_count_for_nothing() -> None:
    count = PackingCount()
    count.add(pack([conversation(CHATS[0])[1]]))
    before = count.as_dict()
    empty = pack([conversation(CHATS[0])[1]])
    object.__setattr__(empty, "keys", ())
    count.add(empty)

    assert count.as_dict() == before


def test_what_is_not_known_is_left_out() -> None:
    assert list(PackingCount().facts()) == []
    audit = Audit()
    audit.add_pack(pack([conversation(CHATS[0])[1]]))
    assert [name for name, _ in audit.facts() if "padded" in name or "waited" in name] == [
        "positions if padded to the longest"
    ]
    assert audit.as_dict()["packs"]["padding_to_sequence_length"] is None
    assert audit.as_dict()["packs"]["packs_waited"] is None
    assert audit.packing.fill == pytest.approx(audit.as_dict()["packs"]["fill"])
