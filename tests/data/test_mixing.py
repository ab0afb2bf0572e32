"""Each data set of a mixture has its share of the tokens at any time, in any layout, across any stop."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.lanes.lane import Fetched, Lane, PoolDelay, Stream
from sftron.data.lanes.mixture import MixtureFetcher
from sftron.data.packing import PoolPacking
from sftron.data.prepare import whole_weights
from sftron.data.types import ConversationKey, Dropped, LabeledConversation
from tests.data.streams import Rows, as_dataset, chat, keys, make_mixture, mixed_rows, take


@dataclass
class Case:
    """Data sets by the lengths of a lane's rows, repeated; 0 is a dropped row. Keys hold positions, not rows."""

    weights: list[int]
    lengths: list[list[int]]
    num_lanes: int = 1

    def mixture(self, lane: int = 0) -> MixtureFetcher:
        def stream(source: int) -> Stream:
            def item(position: int) -> LabeledConversation | Dropped:
                key = ConversationKey(source, position)
                length = self.lengths[source][position // self.num_lanes % len(self.lengths[source])]
                blank = np.zeros(length)
                return LabeledConversation(blank, blank, blank, blank, key) if length else Dropped("short", "", key)

            return Stream(lambda positions: [item(p) for p in positions], len(self.lengths[source]))

        return MixtureFetcher(lane, self.num_lanes, [stream(n) for n in range(len(self.weights))], self.weights)

    def lane(self, state: str | None = None) -> Lane:
        lane = Lane(self.mixture(), packing=PoolPacking(20), token_budget=40, delay=PoolDelay())
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


def sources(samples: Sequence[Fetched]) -> list[int]:
    return [each.conversation.key.source for each in samples]


def test_the_samples_are_those_of_the_drawing() -> None:
    assert sources(Case([2, 1, 1], [[5], [5], [5]]).mixture().fetch(8, None)) == [0, 1, 0, 2, 0, 1, 0, 2]
    assert sources(Case([1, 1], [[6], [2]]).mixture().fetch(8, None)) == [1, 0, 1, 1, 1, 0, 1, 1]


@given(case=cases)
def test_no_data_set_is_ever_further_from_its_share_than_one_conversation(case: Case) -> None:
    tokens, longest = np.zeros(len(case.weights)), max(map(max, case.lengths))
    shares = np.array(case.weights) / sum(case.weights)
    for sample in case.mixture().fetch(300, None):
        tokens[sample.conversation.key.source] += len(sample.conversation)
        above = tokens - shares * tokens.sum()
        assert (above <= [(1 - s) * max(own) + 1e-6 for s, own in zip(shares, case.lengths, strict=True)]).all()
        assert (above >= -longest - 1e-6).all()


@given(case=cases, stops=st.sets(st.integers(0, 40)))
def test_a_lane_made_again_of_its_state_goes_on_as_if_never_stopped(case: Case, stops: set[int]) -> None:
    uninterrupted, stopped = case.lane(), case.lane()
    for number in range(40):
        if number in stops:
            state, stopped = stopped.state(), case.lane(case.lane(stopped.state()).state())
            # One that has gone on meanwhile comes back to its position as well.
            for _ in range(number % 3):
                stopped.next_pack()
            stopped.load_state(state)
        found, expected = stopped.next_pack(), uninterrupted.next_pack()
        assert [c.key for c in found.conversations] == [c.key for c in expected.conversations]
        assert found.dropped_rows == expected.dropped_rows
        assert stopped.state() == uninterrupted.state()


def test_weights_are_whole_numbers_in_the_proportion_in_which_they_are_written() -> None:
    assert whole_weights([0.1, 0.25]) == (2, 5)
    assert whole_weights([3, 6, 9.0]) == (1, 2, 3)
    assert whole_weights([1e-9, 1e9]) == (1, 10**18)


# --- Through the dataset ---


def test_over_200_packs_the_tokens_are_shared_as_the_weights_say(chat_tokenizer: ChatTokenizer) -> None:
    """One data set has dropped rows, which cost it nothing, and one has three rows, repeated again and again."""
    rows = [mixed_rows(40), [chat(f"q {n}", "a") for n in range(25)]]
    rows.append([chat(f"who are you {n}", "word " * (4 * n + 3)) for n in range(3)])
    weights = (5.0, 2.5, 2.5)
    sets = [as_dataset(Rows(own), weight=weight) for own, weight in zip(rows, weights, strict=True)]
    packs = take(make_mixture(sets, chat_tokenizer), 200)
    tokens = Counter[int]()
    for pack in packs:
        for key, length in zip(pack.keys, np.diff(pack.conversation_bounds).tolist(), strict=True):
            tokens[key.source] += length
    assert [tokens[source] / tokens.total() for source in range(3)] == pytest.approx([0.5, 0.25, 0.25], abs=0.02)
    assert max(epoch for source, _, epoch in keys(packs) if source == 2) > 40
    assert {source for pack in packs for source, _ in pack.dropped} == {0}


def test_the_weights_change_the_packs_and_two_data_sets_have_no_order_in_common(chat_tokenizer: ChatTokenizer) -> None:
    """Of 60 rows, the first 20 or so of each: in one order they would be nearly the same, by chance they share 7."""
    rows = [chat(f"question {n}", "answer") for n in range(60)]

    def stream(*weights: float | None) -> list[tuple[int, int, int]]:
        sets = [as_dataset(Rows(rows), weight=weight) for weight in weights]
        return keys(take(make_mixture(sets, chat_tokenizer, num_lanes=1), 12))

    assert stream(1, 1) == stream(0.5, 0.5) != stream(1, 2)
    assert stream(None, None) != stream(1, 1)
    one, two = ({row for source, row, _ in stream(1, 1) if source == number} for number in (0, 1))
    assert 15 <= min(len(one), len(two)) <= max(len(one), len(two)) <= 30
    assert len(one & two) < 0.7 * min(len(one), len(two))
