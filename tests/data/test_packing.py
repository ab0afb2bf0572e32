"""A conversation is never split; the fill is the best there is; the toggle moves only what attention sees (law 4)."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftron.data.lanes.lane import EpochFetcher, Lane, PoolDelay, Stream
from sftron.data.packing import BestFitPacking, PoolPacking, lay_out
from sftron.data.types import IGNORE_INDEX, ConversationKey, LabeledConversation, Role


def conversation(length: int, number: int = 1) -> LabeledConversation:
    ids = np.full(length, number, dtype=np.int32)
    labels = np.append(ids[1:], IGNORE_INDEX).astype(np.int32)
    weights = (labels != IGNORE_INDEX).astype(np.float32)
    roles = np.full(length, Role.ASSISTANT, np.uint8)
    return LabeledConversation(ids, labels, weights, roles, ConversationKey(0, number))


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


def lane_of(
    lengths: Sequence[int], budget: int, *, num_epochs: int | None, pool_size: int = 256
) -> tuple[Lane, PoolDelay]:
    """Returns a lane of conversations of these lengths; a conversation's ids are all its number."""
    rows = [conversation(length, number) for number, length in enumerate(lengths)]
    stream = Stream(lambda positions: [rows[position % len(rows)] for position in positions], len(rows))
    sampler, delay = EpochFetcher(0, 1, stream, num_epochs=num_epochs), PoolDelay()
    return Lane(sampler, packing=PoolPacking(pool_size), token_budget=budget, delay=delay), delay


@pytest.mark.parametrize(
    ("median", "sigma", "longest", "budget", "wanted"),
    [
        pytest.param(170, 0.45, 2048, 2048, 0.995, id="GSM8K"),
        pytest.param(450, 1.0, 4096, 4096, 0.9995, id="chat"),
        pytest.param(1500, 1.0, 8192, 8192, 0.999, id="long chat"),
        pytest.param(450, 1.0, 4096, 32768, 0.999, id="micro-batches of 8"),
    ],
)
def test_a_pool_of_256_fills_packs_to_the_brim_and_no_conversation_waits_longer(
    median: int, sigma: float, longest: int, budget: int, wanted: float
) -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(median), sigma, 10_000)).astype(int) + 1, 1, longest).tolist()
    lane, delay = lane_of(lengths, budget, num_epochs=None)
    fills = [sum(len(each) for each in lane.next_pack().conversations) / budget for _ in range(100)]
    assert np.mean(fills) >= wanted
    assert 0 < delay.mean < delay.longest <= 256


lengths_of_all_kinds = st.integers(4, 60).flatmap(
    lambda budget: st.tuples(
        st.just(budget),
        st.lists(
            st.sampled_from([1, budget, budget - 1, budget // 2, budget // 2 + 1, budget // 2 - 1])
            | st.integers(1, budget),
            min_size=1,
            max_size=60,
        ),
    )
)


@given(case=lengths_of_all_kinds, pool_size=st.integers(1, 20))
def test_whatever_the_lengths_every_conversation_is_packed_once_whole_and_within_the_budget(
    case: tuple[int, list[int]], pool_size: int
) -> None:
    budget, lengths = case
    runs = []
    for _ in range(2):
        lane, delay = lane_of(lengths, budget, num_epochs=1, pool_size=pool_size)
        packs = []
        while conversations := lane.next_pack().conversations:
            pack = lay_out(conversations, token_budget=budget, remove_cross_attention=True, pad_id=-1)  # pyright: ignore
            rows = [key.row for key in pack.keys]
            assert pack.input_ids.tolist()[: pack.num_tokens] == [row for row in rows for _ in range(lengths[row])]
            packs.append(rows)
        assert delay.longest < max(pool_size, 2)
        runs.append(packs)
    assert sorted(row for pack in runs[0] for row in pack) == list(range(len(lengths)))
    assert runs[0] == runs[1]


def num_best_fit_packs(lengths: Sequence[int], budget: int) -> int:
    """Returns the number of packs of best-fit decreasing, by its definition."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        room = min((room for room in rooms if room >= length), default=budget)
        if room in rooms:
            rooms.remove(room)
        rooms.append(room - length)
    return len(rooms)


@given(case=lengths_of_all_kinds)
def test_best_fit_packs_are_one_plan_of_the_epoch_whichever_of_them_a_resume_finds_gone(
    case: tuple[int, list[int]],
) -> None:
    budget, lengths = case
    in_a_row, rest, num_packs = BestFitPacking(), list(lengths), 0
    in_a_row.choose(rest[::-1], budget)
    while rest:
        chosen = in_a_row.choose(rest, budget)
        assert chosen == BestFitPacking().choose(rest, budget)
        assert chosen[0] == 0
        assert sum(rest[index] for index in chosen) <= budget
        rest = [length for index, length in enumerate(rest) if index not in chosen]
        num_packs += 1
    assert num_packs == num_best_fit_packs(lengths, budget)


@pytest.mark.parametrize(
    ("remove_cross_attention", "position_ids", "cu_seqlens"),
    [(True, [0, 1, 2, 0, 1, 0, 1], [0, 3, 5, 7]), (False, [0, 1, 2, 3, 4, 0, 1], [0, 5, 7])],
)
def test_positions_and_documents_are_those_of_the_drawing(
    remove_cross_attention: bool, position_ids: list[int], cu_seqlens: list[int]
) -> None:
    conversations = [conversation(3, 7), conversation(2, 8)]
    pack = lay_out(conversations, token_budget=7, remove_cross_attention=remove_cross_attention, pad_id=0)
    assert pack.input_ids.tolist() == [7, 7, 7, 8, 8, 0, 0]
    assert pack.labels.tolist() == [7, 7, -100, 8, -100, -100, -100]
    assert pack.loss_weights.tolist() == [1, 1, 0, 1, 0, 0, 0]
    assert pack.role_ids.tolist() == [3, 3, 3, 3, 3, 7, 7]
    assert pack.position_ids.tolist() == position_ids
    assert pack.cu_seqlens.tolist() == cu_seqlens
    assert pack.conversation_bounds.tolist() == [0, 3, 5]
    assert (pack.num_tokens, pack.num_trained_tokens) == (5, 3)
