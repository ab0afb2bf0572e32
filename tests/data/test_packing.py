"""A conversation is never split; the fill is the best there is; the toggle moves only what attention sees."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftron.data.packing import MinibatchPacking, PoolPacking, lay_out, make_packing
from sftron.data.types import IGNORE_INDEX, ConversationKey, LabeledConversation, Role


def conversation(length: int, number: int = 1) -> LabeledConversation:
    ids = np.full(length, number, dtype=np.int32)
    labels = np.append(ids[1:], IGNORE_INDEX).astype(np.int32)
    weights = (labels != IGNORE_INDEX).astype(np.float32)
    return LabeledConversation(
        ids, labels, weights, np.full(length, Role.ASSISTANT, np.uint8), ConversationKey(0, number)
    )


@given(budget=st.integers(1, 60), data=st.data())
def test_the_pool_holds_the_oldest_and_fills_the_rest_as_well_as_any_subset_could(
    budget: int, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, budget), min_size=1, max_size=9))
    chosen = PoolPacking(256).choose(lengths, budget)
    total = sum(lengths[index] for index in chosen)

    assert chosen[0] == 0
    assert chosen == sorted(set(chosen))
    assert total <= budget
    subsets = itertools.chain.from_iterable(itertools.combinations(lengths[1:], n) for n in range(len(lengths)))
    assert total == max(s for s in (lengths[0] + sum(subset) for subset in subsets) if s <= budget)


def test_a_pool_of_chat_lengths_fills_packs_to_the_brim() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(np.exp(rng.normal(np.log(450), 1.0, 4000)).astype(int) + 1, 4096).tolist()
    packing, pool, fills, waits = PoolPacking(256), [], [], []
    while lengths:
        while len(pool) < 256 and lengths:
            pool.append((len(fills), lengths.pop()))
        if len(pool) < 256:
            break
        chosen = packing.choose([length for _, length in pool], 4096)
        fills.append(sum(pool[index][1] for index in chosen) / 4096)
        waits += [len(fills) - 1 - pool[index][0] for index in chosen]
        pool = [pending for index, pending in enumerate(pool) if index not in set(chosen)]

    assert len(fills) > 100
    assert np.mean(fills) > 0.999
    assert max(waits) <= 256


def test_minibatch_takes_exactly_so_many_and_none_takes_one() -> None:
    assert MinibatchPacking(3).choose([5, 5, 5], 20) == [0, 1, 2]
    assert make_packing("minibatch", pool_size=256, micro_batch_size=4).pool_size == 4
    assert make_packing("none", pool_size=256, micro_batch_size=4).pool_size == 1
    assert make_packing("pool", pool_size=99, micro_batch_size=4).pool_size == 99


@pytest.mark.parametrize(
    ("remove_cross_attention", "position_ids", "cu_seqlens"),
    [(True, [0, 1, 2, 0, 1, 0, 1], [0, 3, 5, 7]), (False, [0, 1, 2, 3, 4, 0, 1], [0, 5, 7])],
)
def test_positions_and_documents_are_those_of_the_drawing(
    remove_cross_attention: bool, position_ids: list[int], cu_seqlens: list[int]
) -> None:
    pack = lay_out(
        [conversation(3, 7), conversation(2, 8)],
        token_budget=7,
        remove_cross_attention=remove_cross_attention,
        pad_id=0,
    )

    assert pack.input_ids.tolist() == [7, 7, 7, 8, 8, 0, 0]
    assert pack.labels.tolist() == [7, 7, -100, 8, -100, -100, -100]
    assert pack.loss_weights.tolist() == [1, 1, 0, 1, 0, 0, 0]
    assert pack.role_ids.tolist() == [3, 3, 3, 3, 3, 7, 7]
    assert pack.position_ids.tolist() == position_ids
    assert pack.cu_seqlens.tolist() == cu_seqlens
    assert pack.conversation_bounds.tolist() == [0, 3, 5]
    assert (pack.num_tokens, pack.num_trained_tokens) == (5, 3)


@given(lengths=st.lists(st.integers(1, 10), max_size=6), room=st.integers(0, 5))
def test_the_cross_attention_toggle_leaves_everything_else_byte_identical(lengths: list[int], room: int) -> None:
    budget = max(1, sum(lengths) + room)
    on, off = (
        lay_out([conversation(n) for n in lengths], token_budget=budget, remove_cross_attention=setting, pad_id=0)
        for setting in (True, False)
    )

    for name in ("input_ids", "labels", "loss_weights", "role_ids", "conversation_bounds"):
        assert getattr(on, name).tobytes() == getattr(off, name).tobytes(), name
    assert on.keys == off.keys
    for pack in (on, off):
        assert pack.cu_seqlens[0] == 0
        assert pack.cu_seqlens[-1] == budget
        assert (np.diff(pack.cu_seqlens) > 0).all()
        assert (pack.position_ids[pack.cu_seqlens[:-1]] == 0).all()
        assert pack.position_ids.dtype == pack.cu_seqlens.dtype == np.int32
