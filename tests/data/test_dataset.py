"""Pack n is a pure function of the data, whoever asks for it; every conversation once an epoch, across any stop."""

from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.types import IGNORE_INDEX, ConversationKey, DataError, Dropped, Pack, Role
from tests.data.streams import (
    Rows,
    as_dataset,
    as_json,
    facts,
    keys,
    make_dataset,
    make_mixture,
    mixed_rows,
    pretend_worker,
    take,
)

NUM_ROWS, NUM_PACKS = 40, 48
Make = Callable[..., PackedDataset]


@pytest.fixture
def make(chat_tokenizer: ChatTokenizer) -> Make:
    def make(**options: Any) -> PackedDataset:
        return make_dataset(mixed_rows(NUM_ROWS), chat_tokenizer, **options)

    return make


def kept_rows(dataset: PackedDataset) -> list[int]:
    preparation = dataset.preparation
    return [
        row for row in range(preparation.num_rows) if not isinstance(preparation.read(preparation.key(row)), Dropped)
    ]


def test_the_small_stream_of_these_tests_has_what_they_are_about(make: Make) -> None:
    packs = take(make(num_epochs=3), NUM_PACKS)
    reasons = sum((Counter(pack.dropped) for pack in packs), Counter())

    assert set(reasons) == {(0, "overlong"), (0, "no_trained_token")}
    assert max(len(pack.keys) for pack in packs) > 2
    assert not packs[-1].keys  # it drains
    assert any({key.epoch for key in pack.keys} == {0, 1} for pack in packs)  # a pack over the edge of an epoch


@pytest.mark.parametrize("num_epochs", [3, None])
@pytest.mark.parametrize("layout", [(1, 2), (1, 6), (2, 0), (2, 3), (3, 2), (6, 1)])
def test_pack_n_is_the_same_for_any_ranks_and_workers_that_divide_the_lanes(
    make: Make, layout: tuple[int, int], num_epochs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = take(make(num_epochs=num_epochs), NUM_PACKS)
    num_ranks, num_workers = layout
    union: dict[int, Pack] = {}
    for rank in range(num_ranks):
        for worker_id in range(max(1, num_workers)):
            pretend_worker(monkeypatch, worker_id, num_workers)
            dataset = make(num_epochs=num_epochs, dp_rank=rank, dp_world_size=num_ranks)
            packs = take(dataset, NUM_PACKS // (num_ranks * max(1, num_workers)))
            assert [pack.index % num_ranks for pack in packs] == [rank] * len(packs)
            union |= {pack.index: pack for pack in packs}

    assert sorted(union) == list(range(NUM_PACKS))
    for pack in expected:
        assert facts(union[pack.index]) == facts(pack)


def test_both_toggles_leave_the_order_and_the_ids_of_packs_byte_identical(make: Make) -> None:
    """Rows that are dropped, because too long or without an answer, are so under any setting."""
    settings = [(on, off) for on in (True, False) for off in (True, False)]
    streams = [
        take(make(num_epochs=2, train_on_completions_only=completions, remove_cross_attention=isolated), NUM_PACKS)
        for completions, isolated in settings
    ]
    for packs in zip(*streams, strict=True):
        always_same = [
            {
                name: value
                for name, value in facts(pack).items()
                if name not in ("labels", "loss_weights", "position_ids", "cu_seqlens")
            }
            for pack in packs
        ]
        assert always_same[1:] == always_same[:-1]
        assert facts(packs[0])["labels"] == facts(packs[1])["labels"]
        assert facts(packs[0])["cu_seqlens"] == facts(packs[2])["cu_seqlens"]
    first = [stream[0] for stream in streams]
    # Each toggle does something, or nothing was compared.
    assert first[0].num_trained_tokens < first[2].num_trained_tokens
    assert len(first[0].cu_seqlens) > len(first[1].cu_seqlens)
    assert sum(sum(pack.dropped.values()) for pack in streams[0]) > 10


def test_the_packs_of_data_sets_without_weights_are_those_that_they_have_always_been(
    chat_tokenizer: ChatTokenizer,
) -> None:
    """Another order, or another form of the states, would let no checkpoint of an earlier version go on."""
    rows = mixed_rows(40)
    datasets = [as_dataset(Rows(rows[:25], "one.jsonl")), as_dataset(Rows(rows[25:], "two.jsonl"))]
    packs = take(make_mixture(datasets, chat_tokenizer), NUM_PACKS)
    dealt = [(pack.index, keys([pack]), pack.lane_state) for pack in packs]

    assert sha256(repr(dealt).encode()).hexdigest().startswith("26a95f590aee23ee99a3f3cd0c0415f2")


@pytest.mark.parametrize("setting", ["seed", "pool_size", "num_lanes", "token_budget", "strategy"])
def test_every_packing_setting_and_the_seed_has_a_say_in_the_packs(make: Make, setting: str) -> None:
    other = {"seed": 4, "pool_size": 2, "num_lanes": 3, "token_budget": 144, "strategy": "minibatch"}[setting]

    assert keys(take(make(), 12)) != keys(take(make(**{setting: other}), 12))


@pytest.mark.parametrize("num_epochs", [1, 3])
@pytest.mark.parametrize("strategy", ["pool", "minibatch", "none"])
def test_every_conversation_comes_exactly_once_per_epoch(make: Make, strategy: str, num_epochs: int) -> None:
    dataset = make(num_epochs=num_epochs, strategy=strategy)
    packs = take(dataset, 150)

    assert Counter(keys(packs)) == Counter((0, row, epoch) for row in kept_rows(dataset) for epoch in range(num_epochs))
    assert sum(pack.num_rows for pack in packs) == NUM_ROWS * num_epochs


def test_an_endless_stream_gives_each_epoch_whole_and_one_after_another(make: Make) -> None:
    dataset = make()
    dealt = keys(take(dataset, 200))
    num_epochs = min(epoch for _, _, epoch in dealt[-20:])

    assert num_epochs >= 3
    finished = Counter(key for key in dealt if key[2] < num_epochs)
    assert finished == Counter((0, row, epoch) for row in kept_rows(dataset) for epoch in range(num_epochs))
    assert max(Counter(dealt).values()) == 1


@pytest.mark.parametrize("num_epochs", [2, None])
def test_stopped_after_any_pack_and_resumed_the_stream_is_the_same(make: Make, num_epochs: int | None) -> None:
    """Epoch edges, the end, before the first pack, and a second resume at once or one pack later included."""
    expected = [facts(pack) for pack in take(make(num_epochs=num_epochs), NUM_PACKS)]
    stopped = make(num_epochs=num_epochs)
    stream = iter(stopped)
    for cut in range(NUM_PACKS - 2):
        resumed = make(num_epochs=num_epochs)
        resumed.load_state_dict(as_json(stopped.state_dict()))
        again = make(num_epochs=num_epochs)
        again.load_state_dict(as_json(resumed.state_dict()))
        assert facts(next(iter(again))) == expected[cut]
        third = make(num_epochs=num_epochs)
        third.load_state_dict(as_json(again.state_dict()))
        assert [facts(pack) for pack in take(third, NUM_PACKS - cut - 1)] == expected[cut + 1 :]
        next(stream)


def test_the_state_has_some_dozens_of_bytes_a_lane_whenever_it_is_taken(make: Make) -> None:
    dataset = make(pool_size=64, num_lanes=6)
    stream, sizes = iter(dataset), []
    for _ in range(600):
        next(stream)
        sizes.append(len(repr(dataset.state_dict())))

    assert max(sizes) < 6 * 40 + 60
    assert max(sizes[-100:]) <= max(sizes[:100]) + 6 * 2


def test_a_drained_stream_gives_empty_packs_that_train_nothing(make: Make) -> None:
    for isolated in (True, False):
        pack = take(make(num_epochs=1, remove_cross_attention=isolated), 60)[-1]

        assert (pack.keys, pack.num_tokens, pack.num_trained_tokens, pack.num_rows) == ((), 0, 0, 0)
        assert set(pack.role_ids) == {Role.PADDING}
        assert set(pack.labels) == {IGNORE_INDEX}
        assert not pack.loss_weights.any()
        assert pack.cu_seqlens.tolist() == [0, 96]
        assert np.array_equal(pack.position_ids, np.arange(96))


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(4, 0), (1, 4), (2, 2), (3, 4)])
def test_a_layout_that_does_not_divide_the_lanes_is_refused_with_those_that_do(
    make: Make, num_ranks: int, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_worker(monkeypatch, 0, num_workers)

    with pytest.raises(DataError, match=r"do not divide data\.num_lanes: 6; ranks x workers may be one of 1, 2, 3, 6"):
        next(iter(make(dp_world_size=num_ranks)))


def test_a_bad_row_is_told_by_line_and_a_skipped_one_is_counted(chat_tokenizer: ChatTokenizer) -> None:
    rows = [*mixed_rows(10), "broken_json", {"messages": []}]

    with pytest.raises(DataError, match=r"rows\.jsonl:1[12]: "):
        take(make_dataset(rows, chat_tokenizer, num_epochs=1), 30)
    packs = take(make_dataset(rows, chat_tokenizer, num_epochs=1, on_bad_row="skip"), 30)
    reasons = sum((Counter(pack.dropped) for pack in packs), Counter())
    assert (reasons[0, "broken_json"], reasons[0, "empty_conversation"]) == (1, 1)
    assert sum(pack.num_rows for pack in packs) == 12


def test_conversations_are_whole_and_are_those_that_their_keys_name(make: Make) -> None:
    dataset = make(num_epochs=1, overlong="truncate_turns")
    packs = take(dataset, 24)
    for pack in packs:
        for start, end, key in zip(pack.conversation_bounds[:-1], pack.conversation_bounds[1:], pack.keys, strict=True):
            alone = dataset.preparation.read(key)
            assert not isinstance(alone, Dropped)
            assert alone.key == key == ConversationKey(0, key.row, 0)
            assert np.array_equal(pack.input_ids[start:end], alone.input_ids)
            assert np.array_equal(pack.labels[start:end], alone.labels)
    assert sum(len(pack.keys) for pack in packs) > 20


# --- For loops of one's own ---

CHATS = [
    {"messages": [{"role": "user", "content": f"Q{n}"}, {"role": "assistant", "content": f"A{n}"}]} for n in range(70)
]


@pytest.mark.parametrize("num_lanes", [1, 2, 6])
def test_a_data_set_of_rows_ends_with_its_epochs_and_gives_each_row_once_in_each(
    chat_tokenizer: ChatTokenizer, num_lanes: int
) -> None:
    dataset = PackedDataset.from_rows(CHATS, chat_tokenizer, sequence_length=96, num_epochs=2, num_lanes=num_lanes)
    packs = list(dataset)
    assert all(pack.keys for pack in packs)
    keys = [(key.row, key.epoch) for pack in packs for key in pack.keys]
    assert sorted(keys) == [(row, epoch) for row in range(70) for epoch in range(2)]
    assert list(dataset) == []


def test_rows_of_which_none_fits_are_an_error_and_no_empty_loop(chat_tokenizer: ChatTokenizer) -> None:
    with pytest.raises(DataError, match="no row can be trained on: overlong"):
        list(PackedDataset.from_rows(CHATS, chat_tokenizer, sequence_length=3, num_epochs=1, num_lanes=2))
    with pytest.raises(DataError, match="not one of the last 1001 rows can be trained on"):
        next(iter(PackedDataset.from_rows(CHATS, chat_tokenizer, sequence_length=3)))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sequence_length": 0}, "sequence_length is 0"),
        ({"sequence_length": 9, "format": "x"}, "format is 'x'; it may be one of auto, messages"),
        ({"sequence_length": 9, "overlong": "x"}, "overlong is 'x'"),
        ({"sequence_length": 9, "packing": "minibatch"}, "packing is 'minibatch'"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    chat_tokenizer: ChatTokenizer, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        PackedDataset.from_rows(CHATS, chat_tokenizer, **options)
