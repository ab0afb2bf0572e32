"""The parts of a pack that ranks share: together they are the whole batch, wherever the row is cut."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sftron.data.loader import collate
from sftron.data.packing import lay_out
from sftron.data.types import IGNORE_INDEX, Batch, ContextRank, ConversationKey, LabeledConversation, Pack, Role

MEASURED = frozenset({Role.USER, Role.TEMPLATE})


def make_pack(lengths: list[int], budget: int, *, isolated: bool = True) -> Pack:
    """Conversations with random roles, labels at about half of the tokens, and weights other than 1."""
    rng, conversations = np.random.default_rng(len(lengths)), []
    for number, length in enumerate(lengths):
        ids = rng.integers(1, 90, length).astype(np.int32)
        labels = np.append(ids[1:], IGNORE_INDEX).astype(np.int32)
        labels[rng.random(length) < 0.5] = IGNORE_INDEX
        weights = np.where(labels == IGNORE_INDEX, 0, rng.uniform(0.2, 2, length)).astype(np.float32)
        roles = rng.integers(0, 4, length).astype(np.uint8)
        conversations.append(LabeledConversation(ids, labels, weights, roles, ConversationKey(number % 2, number)))
    return lay_out(conversations, token_budget=budget, remove_cross_attention=isolated, pad_id=0)


def batches_of(pack: Pack, size: int, *, keep_tail: bool) -> list[Batch]:
    places = [ContextRank(rank, size) for rank in range(size)]
    return [collate(pack, keep_tail=keep_tail, measured_roles=MEASURED, context=place) for place in places]


@given(
    lengths=st.lists(st.integers(1, 9), max_size=6),
    padding=st.integers(0, 12),
    size=st.integers(1, 5),
    keep_tail=st.booleans(),
    isolated=st.booleans(),
)
def test_the_parts_are_the_whole_batch(
    lengths: list[int], padding: int, size: int, keep_tail: bool, isolated: bool
) -> None:
    pack = make_pack(lengths, max(size, sum(lengths) + padding), isolated=isolated)
    whole = collate(pack, keep_tail=keep_tail, measured_roles=MEASURED)
    parts = batches_of(pack, size, keep_tail=keep_tail)
    num_tokens = len(parts[0].position_ids)
    assert num_tokens == max(len(whole.input_ids), size)
    assert {part.part.counts for part in parts} == {tuple(map(len, (part.input_ids for part in parts)))}
    assert max(parts[0].part.counts) - min(parts[0].part.counts) in (0, 1)
    assert torch.cat([part.input_ids for part in parts]).tolist() == pack.input_ids[:num_tokens].tolist()
    assert torch.cat([part.role_ids for part in parts]).tolist() == pack.role_ids[:num_tokens].tolist()
    for names in (
        ("label_positions", "labels", "loss_weights", "label_roles", "label_sources"),
        ("untrained_rows", "untrained_labels", "untrained_roles"),
    ):
        for name in names:
            shift = [part.part.begin if name in ("label_positions", "untrained_rows") else 0 for part in parts]
            found = torch.cat([getattr(part, name) + by for part, by in zip(parts, shift, strict=True)])
            assert found.tolist() == getattr(whole, name).tolist(), name
        for part in parts:
            rows = getattr(part, names[0])
            assert ((rows >= 0) & (rows < len(part.input_ids))).all()
    assert sum(part.num_real for part in parts) == pack.num_tokens
    for part in parts:
        # The bounds and positions of the whole row, and what is counted once.
        assert part.position_ids.tolist() == pack.position_ids[:num_tokens].tolist()
        assert part.cu_seqlens.tolist() == parts[0].cu_seqlens.tolist()
        assert part.cu_seqlens[-1] == num_tokens
        assert part.weight_sum == whole.weight_sum


def test_a_label_at_a_border_is_the_first_token_of_the_next_rank() -> None:
    """As it is not where each rank shifts the labels of its part."""
    ids = np.arange(1, 9, dtype=np.int32)
    labels, weights = np.append(ids[1:], IGNORE_INDEX).astype(np.int32), np.append(np.ones(7), 0).astype(np.float32)
    row = LabeledConversation(ids, labels, weights, np.zeros(8, np.uint8), ConversationKey(0, 0))
    pack = lay_out([row], token_budget=8, remove_cross_attention=True, pad_id=0)
    first, second = batches_of(pack, 2, keep_tail=True)
    assert (first.labels.tolist(), second.labels.tolist()) == ([2, 3, 4, 5], [6, 7, 8])


def test_a_rank_may_have_only_padding_and_a_row_needs_a_token_for_each_rank() -> None:
    pack = make_pack([3], 16)
    *_, last = batches_of(pack, 4, keep_tail=True)
    assert (last.num_real, len(last.labels), last.cu_seqlens.tolist()) == (0, 0, [0, 3, 16])
    assert [len(part.input_ids) for part in batches_of(pack, 5, keep_tail=False)] == [1] * 5
    assert [part.num_real for part in batches_of(make_pack([], 16), 2, keep_tail=False)] == [0, 0]
    with pytest.raises(ValueError, match=r"17 ranks \(context\) cannot share a row of 16 tokens"):
        batches_of(pack, 17, keep_tail=True)
