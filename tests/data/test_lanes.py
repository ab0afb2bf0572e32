"""A lane gives each of its positions exactly once, whenever it is stopped, and its state does not grow (laws 5, 6)."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from sftron.data.lanes.lane import EpochFetcher, Lane, LanePack, PoolDelay, Stream, parse_state
from sftron.data.lanes.mixture import MixtureFetcher
from sftron.data.packing import MinibatchPacking, PoolPacking
from sftron.data.types import ConversationKey, DataError, Dropped, LabeledConversation

BUDGET = 20
Read = Callable[[int], LabeledConversation | Dropped]


@dataclass
class Case:
    num_lanes: int
    num_rows: int
    num_epochs: int | None
    pool_size: int
    is_pool: bool
    lengths: list[int]
    """Lengths of rows, repeated; 0 is a dropped row."""

    def read(self, position: int) -> LabeledConversation | Dropped:
        row = position % self.num_rows
        key = ConversationKey(0, position)
        length = self.lengths[row % len(self.lengths)]
        blank = np.zeros(length)
        return LabeledConversation(blank, blank, blank, blank, key) if length else Dropped(f"reason {row % 2}", "", key)

    def lane(self, number: int = 0, state: str | None = None, read: Read | None = None) -> Lane:
        def read_many(positions: Sequence[int]) -> list[LabeledConversation | Dropped]:
            return [(read or self.read)(position) for position in positions]

        stream = Stream(read_many, self.num_rows)
        sampler = EpochFetcher(number, self.num_lanes, stream, num_epochs=self.num_epochs)
        packing = PoolPacking(self.pool_size) if self.is_pool else MinibatchPacking(2)
        lane = Lane(sampler, packing=packing, token_budget=BUDGET, delay=PoolDelay())
        if state is not None:
            lane.load_state(state)
        return lane


def positions(pack: LanePack) -> list[int]:
    return [conversation.key.row for conversation in pack.conversations]


cases = st.builds(
    Case,
    num_lanes=st.integers(1, 5),
    num_rows=st.integers(1, 23),
    num_epochs=st.integers(1, 3),
    pool_size=st.integers(1, 7),
    is_pool=st.booleans(),
    lengths=st.lists(st.integers(0, BUDGET // 2), min_size=1, max_size=9),
)


@given(case=cases)
@example(case=Case(3, 1, 9, pool_size=1, is_pool=True, lengths=[5]))  # a lane has a row in every third epoch
def test_every_position_is_in_exactly_one_lane_once_and_then_nothing_more_comes(case: Case) -> None:
    end = case.num_rows * (case.num_epochs or 0)
    found: Counter[int] = Counter()
    for number in range(case.num_lanes):
        lane = case.lane(number)
        for _ in range(end + 1):
            pack = lane.next_pack()
            found.update([*positions(pack), *(drop.key.row for drop in pack.dropped_rows)])
            assert all(isinstance(case.read(drop.key.row), Dropped) for drop in pack.dropped_rows)
            assert {position % case.num_lanes for position in positions(pack)} <= {number}
        assert lane.next_pack() == LanePack((), ())
    assert found == Counter(range(end))


@given(case=cases, is_endless=st.booleans(), stops=st.sets(st.integers(0, 30)))
def test_a_lane_made_again_of_its_state_goes_on_as_if_never_stopped(
    case: Case, is_endless: bool, stops: set[int]
) -> None:
    """Stops come anywhere, epoch edges and the drained end included, and any number of them in a row."""
    if is_endless:
        case.num_epochs = None
        own = range(0, case.num_lanes * case.num_rows, case.num_lanes)
        # A lane that never meets a row to train on is an error, and has a test of its own.
        assume(any(isinstance(case.read(position), LabeledConversation) for position in own))
    uninterrupted, stopped = case.lane(), case.lane()
    for number in range(30):
        if number in stops:
            state, stopped = stopped.state(), case.lane(0, case.lane(0, stopped.state()).state())
            # One that has gone on meanwhile comes back to its position as well.
            for _ in range(number % 3):
                stopped.next_pack()
            stopped.load_state(state)
        found, expected = stopped.next_pack(), uninterrupted.next_pack()
        assert (positions(found), found.dropped_rows) == (positions(expected), expected.dropped_rows)
        assert stopped.state() == uninterrupted.state()


@pytest.mark.parametrize("num_epochs", [3, None])
def test_a_small_set_is_consumed_epoch_by_epoch(num_epochs: int | None) -> None:
    """A pool that could hold ten epochs holds at most the one after its oldest conversation's."""
    case = Case(2, 9, num_epochs, pool_size=90, is_pool=True, lengths=[7, 3, 11, 5])
    lane, oldest = case.lane(), 0
    seen: list[int] = []
    for _ in range(12):
        found = positions(lane.next_pack())
        assert all(position // 9 <= oldest // 9 + 1 for position in found)
        seen += found
        oldest = next(position for position in range(0, 1000, 2) if position not in seen)
    assert len(seen) == len(set(seen)) > 12


@pytest.mark.parametrize("num_sets", [1, 10])
def test_the_state_is_small_and_does_not_grow_with_the_steps(num_sets: int) -> None:
    """Rows as of chats, in packs of 4096 tokens, of one set or of a mixture; 240 lanes have 64 KB for their states."""
    rng = np.random.default_rng(0)
    lengths = np.where(rng.random(50_021) < 0.03, 0, np.clip(rng.lognormal(5.5, 1.1, 50_021), 4, 4096)).astype(int)

    def item(position: int) -> LabeledConversation | Dropped:
        key, blank = ConversationKey(0, position), np.empty(lengths[position % len(lengths)])
        return LabeledConversation(blank, blank, blank, blank, key) if len(blank) else Dropped("short", "", key)

    stream = Stream(lambda positions: [item(position) for position in positions], 10_000_000)
    sampler = EpochFetcher(0, 240, stream, num_epochs=None)
    if num_sets > 1:
        sampler = MixtureFetcher(0, 240, [stream] * num_sets, range(1, num_sets + 1))
    lane = Lane(sampler, packing=PoolPacking(256), token_budget=4096, delay=PoolDelay())
    sizes = []
    for _ in range(2000):
        lane.next_pack()
        sizes.append(len(lane.state()))
    assert max(sizes) <= 64 * 1024 // 240
    # Longer numbers before the bitmap are all that may be added: a digit or two each.
    assert np.mean(sizes[-500:]) <= np.mean(sizes[500:1000]) + 2 * (1 + num_sets)


@pytest.mark.parametrize("share", [0.02, 0.9])
def test_at_any_time_the_dropped_share_of_the_consumed_rows_is_that_of_the_data(share: float) -> None:
    """Rows are read a pool ahead; counted when read, 2 % of dropped rows looked like 30 % at the first packs."""
    rng = np.random.default_rng(0)
    case = Case(1, 20_000, None, 256, is_pool=True, lengths=np.where(rng.random(20_000) < share, 0, 5).tolist())
    lane, rows, num_dropped, shares = case.lane(), 0, 0, []
    while rows < 15_000:
        pack = lane.next_pack()
        rows += len(pack.conversations) + len(pack.dropped_rows)
        num_dropped += len(pack.dropped_rows)
        if rows >= 200:
            shares.append(num_dropped / rows)
    assert len(shares) > 100
    assert max(abs(s - share) for s in shares) < 0.06
    assert shares[-1] == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("state", ["", "1.2:0", "x:0", "1:-1", "1:00", "1"])
def test_a_state_that_is_not_a_lanes_is_refused(state: str) -> None:
    with pytest.raises(ValueError, match=r"the lane state is .*; wanted low:bitmap"):
        parse_state(state, None)


@pytest.mark.parametrize("state", ["", "1:0", "1.2:0", "1.2,3:0", "1.2,3.4,5.6:0", "1.2,3.4"])
def test_a_state_of_another_mixture_is_refused(state: str) -> None:
    with pytest.raises(ValueError, match=r"the lane state is .*; wanted cursor\.tokens of 2 data sets:bitmap"):
        parse_state(state, 2)


def test_a_lane_without_any_usable_row_is_an_error_and_a_rare_one_is_found() -> None:
    with pytest.raises(DataError, match=r"none of the last 1001 rows can be trained on: 1001 times reason 0"):
        Case(2, 10, None, 4, is_pool=True, lengths=[0]).lane().next_pack()
    # A lane of a small set may meet a dropped row many epochs in a row.
    case = Case(48, 4, None, 4, is_pool=False, lengths=[0, 0, 5, 0])
    assert [positions(case.lane(number).next_pack())[0] % 4 for number in (2, 46)] == [2, 2]
    with pytest.raises(DataError, match="none of the last 1001 rows"):
        case.lane(1).next_pack()  # without the shuffle of the data set, this lane has row 1 only
    case = Case(1, 3000, 1, 4, is_pool=False, lengths=[0] * 2999 + [5])
    assert len(case.lane().next_pack().dropped_rows) == 2999
