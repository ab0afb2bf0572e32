"""Each data set of a mixture has its share of the tokens at any time, in any layout, across any stop."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.lanes.lane import Lane, Waits
from sftron.data.lanes.mixture import Mixture, whole_weights
from sftron.data.lanes.sampler import Drawn, Stream
from sftron.data.packing import make_packing
from sftron.data.types import ConversationKey, DataError, Dropped, LabeledConversation, Pack
from tests.data.streams import (
    Rows,
    as_dataset,
    as_json,
    chat,
    facts,
    keys,
    make_mixture,
    mixed_rows,
    pretend_worker,
    take,
)


@dataclass
class Case:
    """Data sets by the lengths of a lane's rows, over and over; 0 is a dropped row. Keys hold positions, not rows."""

    weights: list[int]
    lengths: list[list[int]]
    num_lanes: int = 1

    def mixture(self, lane: int = 0, read: Callable[[ConversationKey], object] = lambda key: None) -> Mixture:
        def stream(source: int) -> Stream:
            def item(position: int) -> LabeledConversation | Dropped:
                key = ConversationKey(source, position)
                read(key)
                length = self.lengths[source][position // self.num_lanes % len(self.lengths[source])]
                blank = np.zeros(length)
                return LabeledConversation(blank, blank, blank, blank, key) if length else Dropped("short", "", key)

            return Stream(lambda positions: [item(p) for p in positions], len(self.lengths[source]))

        return Mixture(lane, self.num_lanes, [stream(n) for n in range(len(self.weights))], self.weights)

    def lane(self, state: str | None = None, **options: Any) -> Lane:
        draws = self.mixture(**options)
        packing = make_packing("pool", pool_size=20, micro_batch_size=1)
        lane = Lane(draws, packing=packing, token_budget=40, waits=Waits())
        if state is not None:
            lane.load_state(state)
        return lane


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any)
cases = st.integers(1, 5).flatmap(
    lambda n: st.builds(
        Case,
        weights=st.lists(st.integers(1, 60), min_size=n, max_size=n),
        lengths=st.lists(lengths, min_size=n, max_size=n),
        num_lanes=st.integers(1, 4),
    )
)


def sources(drawn: Sequence[Drawn]) -> list[int]:
    return [each.conversation.key.source for each in drawn]


def test_the_draws_are_those_of_the_drawing() -> None:
    assert sources(Case([2, 1, 1], [[5], [5], [5]]).mixture().draw(8, None)) == [0, 1, 0, 2, 0, 1, 0, 2]
    assert sources(Case([1, 1], [[6], [2]]).mixture().draw(8, None)) == [1, 0, 1, 1, 1, 0, 1, 1]


@given(case=cases)
def test_no_data_set_is_ever_further_from_its_share_than_one_conversation(case: Case) -> None:
    tokens, longest = np.zeros(len(case.weights)), max(map(max, case.lengths))
    shares = np.array(case.weights) / sum(case.weights)
    for drawn in case.mixture().draw(300, None):
        tokens[drawn.conversation.key.source] += len(drawn.conversation)
        above = tokens - shares * tokens.sum()
        assert (above <= [(1 - s) * max(own) + 1e-6 for s, own in zip(shares, case.lengths, strict=True)]).all()
        assert (above >= -longest - 1e-6).all()


@given(case=cases, limits=st.lists(st.integers(1, 30), min_size=1, max_size=12))
def test_how_many_are_drawn_and_read_at_once_changes_nothing(case: Case, limits: list[int]) -> None:
    whole, parts = case.mixture(), case.mixture()
    drawn = [each for limit in limits for each in parts.draw(limit, None)]
    expected = whole.draw(sum(limits), None)

    assert [(d.number, d.conversation.key, len(d.dropped)) for d in drawn] == [
        (d.number, d.conversation.key, len(d.dropped)) for d in expected
    ]


@given(case=cases, lane=st.integers(0, 3))
def test_a_lane_deals_each_of_its_rows_of_each_data_set_in_order_and_counts_the_dropped(case: Case, lane: int) -> None:
    lane %= case.num_lanes
    rows: list[list[int]] = [[] for _ in case.weights]
    numbers = []
    for drawn in case.mixture(lane).draw(200, None):
        own = rows[drawn.conversation.key.source]
        own += [*(drop.key.row for drop in drawn.dropped), drawn.conversation.key.row]
        numbers += range(drawn.number - len(drawn.dropped), drawn.number + 1)

    assert numbers == list(range(len(numbers)))
    for own in rows:
        assert own == list(range(lane, lane + len(own) * case.num_lanes, case.num_lanes))


@given(case=cases, stops=st.sets(st.integers(0, 40)))
def test_a_lane_made_anew_of_its_state_goes_on_as_if_never_stopped(case: Case, stops: set[int]) -> None:
    uninterrupted, stopped = case.lane(), case.lane()
    for number in range(40):
        if number in stops:
            state, stopped = stopped.state(), case.lane(case.lane(stopped.state()).state())
            # One that has gone on meanwhile comes back to where it was as well.
            for _ in range(number % 3):
                stopped.deal()
            stopped.load_state(state)
        ours, theirs = stopped.deal(), uninterrupted.deal()
        assert [c.key for c in ours.conversations] == [c.key for c in theirs.conversations]
        assert ours.dropped == theirs.dropped
        assert stopped.state() == uninterrupted.state()


def chat_lengths(median: int, num: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(np.log(median), 1.0, num)).astype(int) + 1, 1, 4096)
    return np.where(rng.random(num) < 0.03, 0, lengths).tolist()


@pytest.fixture(scope="module")
def chats() -> Case:
    return Case([10, 4, 3, 2, 1], [chat_lengths(median, 5000, median) for median in (450, 120, 1500, 300, 60)])


def deals(case: Case, num_packs: int) -> tuple[list[str], np.ndarray]:
    """Of a lane with packs of 4096 tokens: its states, and the tokens dealt of each data set."""
    packing = make_packing("pool", pool_size=256, micro_batch_size=1)
    lane = Lane(case.mixture(), packing=packing, token_budget=4096, waits=Waits())
    states, tokens = [], np.zeros(len(case.weights))
    for _ in range(num_packs):
        for conversation in lane.deal().conversations:
            tokens[conversation.key.source] += len(conversation)
        states.append(lane.state())
    return states, tokens


def test_the_packs_hold_the_shares(chats: Case) -> None:
    """What is pending stands between the draws and the packs; of 200 packs it is a small part."""
    _, tokens = deals(chats, 200)

    assert tokens.sum() > 0.99 * 200 * 4096
    assert tokens / tokens.sum() == pytest.approx(np.array(chats.weights) / 20, abs=0.02)


def test_the_state_is_small_and_does_not_grow_with_the_steps(chats: Case) -> None:
    """64 KB for 240 lanes."""
    sizes = [len(state) for state in deals(chats, 4000)[0]]

    assert max(sizes) <= 64 * 1024 // 240
    # Longer cursors and accounts are all that may be added: two digits each, in 4 times as many packs.
    assert max(sizes[-1000:]) <= max(sizes[:1000]) + 2 * 2 * 5


def test_a_resume_reads_little_more_than_the_pool_whatever_was_dealt_before(chats: Case) -> None:
    packing = make_packing("pool", pool_size=256, micro_batch_size=1)
    for state in islice(deals(chats, 4000)[0], 99, None, 1300):
        reads: list[ConversationKey] = []
        lane = Lane(chats.mixture(read=reads.append), packing=packing, token_budget=4096, waits=Waits())
        lane.load_state(state)
        lane.deal()
        assert 256 <= len(reads) < 3 * 256


def test_a_data_set_of_which_nothing_can_be_trained_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(DataError, match=r"not one of the last 1001 rows can be trained on: 1001 times short"):
        Case([1, 1], [[3], [0, 0]]).mixture().draw(20, None)


def test_weights_are_whole_numbers_in_the_proportion_in_which_they_are_written() -> None:
    assert whole_weights([0.1, 0.25]) == (2, 5)
    assert whole_weights([3, 6, 9.0]) == (1, 2, 3)
    assert whole_weights([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert whole_weights([5.0]) == (1,)
    assert whole_weights([1e-9, 1e9]) == (1, 10**18)


# --- Through the dataset ---

Make = Callable[..., PackedDataset]
NUM_PACKS = 48


@pytest.fixture
def make(chat_tokenizer: ChatTokenizer) -> Make:
    """Three data sets: one with dropped rows, one of short rows, and one of three rows, repeated again and again."""
    sets = [
        (mixed_rows(40), 5.0),
        ([chat(f"q {n}", "a") for n in range(25)], 2.5),
        ([chat(f"who are you {n}", "word " * (4 * n + 3)) for n in range(3)], 2.5),
    ]

    def make(**options: Any) -> PackedDataset:
        datasets = [as_dataset(Rows(rows, f"{n}.jsonl"), weight=weight) for n, (rows, weight) in enumerate(sets)]
        return make_mixture(datasets, chat_tokenizer, **options)

    return make


def shares(packs: Sequence[Pack]) -> list[float]:
    tokens = Counter[int]()
    for pack in packs:
        for key, length in zip(pack.keys, np.diff(pack.conversation_bounds).tolist(), strict=True):
            tokens[key.source] += length
    return [tokens[source] / tokens.total() for source in range(3)]


def test_over_200_packs_the_tokens_are_shared_as_the_weights_say(make: Make) -> None:
    packs = take(make(), 200)

    assert shares(packs) == pytest.approx([0.5, 0.25, 0.25], abs=0.02)
    # The set of three rows was dealt again and again, and dropped rows cost the first one nothing.
    assert max(epoch for source, _, epoch in keys(packs) if source == 2) > 40
    assert {source for pack in packs for source, _ in pack.dropped} == {0}


@pytest.mark.parametrize("num_lanes", [1, 6])
def test_each_data_set_deals_each_of_its_rows_once_in_its_own_epochs(make: Make, num_lanes: int) -> None:
    dataset = make(num_lanes=num_lanes)
    packs = take(dataset, 300)
    dealt = Counter(keys(packs))
    kept = {
        (source, row)
        for source, each in enumerate(dataset.preparation.datasets)
        for row in range(len(each.source))
        if isinstance(dataset.preparation.read(ConversationKey(source, row)), LabeledConversation)
    }

    assert max(dealt.values()) == 1
    for source in range(3):
        rows = sorted(row for s, row in kept if s == source)
        reached = max(epoch for s, _, epoch in dealt if s == source)
        whole = [epoch for epoch in range(reached) if all((source, row, epoch) in dealt for row in rows)]
        assert reached > 8
        # Lanes draw by tokens, so each is at another place of its epoch; but none is left behind.
        assert len(whole) > 0.6 * reached
        assert whole[: len(whole) // 2] == list(range(len(whole) // 2))


@pytest.mark.parametrize("layout", [(1, 2), (1, 6), (2, 0), (2, 3), (3, 2), (6, 1)])
def test_pack_n_is_the_same_for_any_ranks_and_workers_that_divide_the_lanes(
    make: Make, layout: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [facts(pack) for pack in take(make(), NUM_PACKS)]
    num_ranks, num_workers = layout
    union: dict[int, dict[str, Any]] = {}
    for rank in range(num_ranks):
        for worker_id in range(max(1, num_workers)):
            pretend_worker(monkeypatch, worker_id, num_workers)
            packs = take(make(dp_rank=rank, dp_world_size=num_ranks), NUM_PACKS // (num_ranks * max(1, num_workers)))
            union |= {pack.index: facts(pack) for pack in packs}

    assert [union[index] for index in range(NUM_PACKS)] == expected


def test_the_toggles_leave_the_order_and_the_ids_of_packs_byte_identical(make: Make) -> None:
    plain, other = (take(make(train_on_completions_only=on, remove_cross_attention=on), 24) for on in (True, False))

    for pack, twin in zip(plain, other, strict=True):
        assert (pack.keys, pack.lane_state, pack.dropped) == (twin.keys, twin.lane_state, twin.dropped)
        assert pack.input_ids.tobytes() == twin.input_ids.tobytes()


def test_stopped_after_any_pack_and_resumed_the_stream_is_the_same(make: Make) -> None:
    expected = [facts(pack) for pack in take(make(), NUM_PACKS)]
    stopped = make()
    stream = iter(stopped)
    for cut in range(NUM_PACKS - 1):
        resumed = make()
        resumed.load_state_dict(as_json(stopped.state_dict()))
        assert [facts(pack) for pack in take(resumed, min(9, NUM_PACKS - cut))] == expected[cut : cut + 9]
        next(stream)


def test_the_weights_have_a_say_in_the_packs(make: Make, chat_tokenizer: ChatTokenizer) -> None:
    rows = [mixed_rows(20), mixed_rows(30)]

    def stream(*weights: float | None) -> list[tuple[int, int, int]]:
        sets = [as_dataset(Rows(own), weight=weight) for own, weight in zip(rows, weights, strict=True)]
        return keys(take(make_mixture(sets, chat_tokenizer), 12))

    assert stream(1, 1) == stream(0.5, 0.5) != stream(1, 2)
    assert stream(None, None) != stream(2, 3)


def test_two_data_sets_have_no_order_in_common(chat_tokenizer: ChatTokenizer) -> None:
    """Of 60 rows, the first 20 or so of each: in one order they would be nearly the same, by chance they share 7."""
    rows = [chat(f"question {n}", "answer") for n in range(60)]
    datasets = [as_dataset(Rows(rows), weight=1), as_dataset(Rows(rows), weight=1)]
    packs = take(make_mixture(datasets, chat_tokenizer, num_lanes=1), 12)
    one, two = ({row for source, row, _ in keys(packs) if source == number} for number in (0, 1))

    assert 15 <= len(one) <= 30
    assert 15 <= len(two) <= 30
    assert len(one & two) < 0.7 * min(len(one), len(two))
