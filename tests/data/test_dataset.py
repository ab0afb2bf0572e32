"""Pack n is a pure function of the data, whoever asks for it; every conversation is whole, and once in an epoch."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.types import IGNORE_INDEX, ConversationKey, DataError, Dropped, Pack, Role
from tests.data.streams import (
    Rows,
    as_dataset,
    chat,
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
    def make(num_rows: int = NUM_ROWS, **options: Any) -> PackedDataset:
        return make_dataset(mixed_rows(num_rows), chat_tokenizer, **options)

    return make


@pytest.mark.parametrize(
    ("num_ranks", "num_workers", "options"),
    [
        (1, 6, {"num_epochs": 3}),
        (2, 0, {}),
        (2, 3, {}),
        (6, 1, {"num_epochs": 3}),
        (1, 3, {"num_lanes": "auto"}),
        (8, 1, {"num_lanes": "auto", "num_epochs": 3}),
        (3, 2, {"num_lanes": "auto", "packing": "minibatch"}),
        (3, 2, {"num_lanes": "auto", "packing": "none"}),
    ],
)
def test_pack_n_is_the_same_for_any_ranks_and_workers_that_divide_the_lanes(
    make: Make, num_ranks: int, num_workers: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 5; packs that are planned are those of one lane. test_elastic.py has streams, mixtures and stops."""
    is_planned = options.get("num_lanes") == "auto"
    expected = take(make(**options | ({"num_lanes": 1} if is_planned else {})), NUM_PACKS)
    lengths = make(**options).measure() if is_planned else None
    union: dict[int, Pack] = {}
    for rank in range(num_ranks):
        for worker_id in range(max(1, num_workers)):
            pretend_worker(monkeypatch, worker_id, num_workers)
            dataset = make(**options, dp_rank=rank, dp_world_size=num_ranks, row_lengths=lengths)
            packs = take(dataset, -(-NUM_PACKS // (num_ranks * max(1, num_workers))))
            assert {pack.index % num_ranks for pack in packs} == {rank}
            union |= {pack.index: pack for pack in packs}
    assert sorted(union) == list(range(NUM_PACKS))
    assert all(facts(union[pack.index]) == facts(pack) for pack in expected)
    assert sum(bool(pack.dropped_rows) for pack in expected) > 3
    assert any(key.epoch == 1 for pack in expected for key in pack.keys)


@pytest.mark.parametrize(("weights", "num_lanes"), [((None,), 6), ((1, 2), 6), ((1, 2), "auto")])
def test_both_toggles_leave_the_order_and_the_ids_of_packs_byte_identical(
    chat_tokenizer: ChatTokenizer, weights: tuple[float | None, ...], num_lanes: Any
) -> None:
    """Also of a mixture, whose shares are of all tokens. Rows that are dropped are so under any setting (law 5)."""
    rows = [mixed_rows(NUM_ROWS), [chat(f"a long question, number {n}", "yes") for n in range(25)]]
    sets = [as_dataset(Rows(own), weight=weight) for own, weight in zip(rows, weights, strict=False)]
    streams = [
        take(make_mixture(sets, chat_tokenizer, num_lanes=num_lanes, train_on_completions_only=completions,
                          remove_cross_attention=isolated), NUM_PACKS)
        for completions in (True, False) for isolated in (True, False)
    ]  # fmt: skip
    may_differ = ("labels", "loss_weights", "position_ids", "cu_seqlens")
    for packs in zip(*streams, strict=True):
        same = [{name: value for name, value in facts(pack).items() if name not in may_differ} for pack in packs]
        assert same[1:] == same[:-1]
        assert facts(packs[0])["labels"] == facts(packs[1])["labels"]
        assert facts(packs[0])["cu_seqlens"] == facts(packs[2])["cu_seqlens"]
    first = [stream[0] for stream in streams]
    # Each toggle has an effect, or nothing was compared.
    assert first[0].num_trained_tokens < first[2].num_trained_tokens
    assert len(first[0].cu_seqlens) > len(first[1].cu_seqlens)
    reasons = {reason for pack in streams[0] for reason in pack.dropped}
    assert reasons == {(0, "overlong"), (0, "no_trained_token")}


@pytest.mark.parametrize(
    ("option", "value"),
    [("seed", 4), ("pool_size", 2), ("num_lanes", 3), ("token_budget", 144), ("packing", "minibatch")],
)
def test_every_packing_option_and_the_seed_change_the_packs(make: Make, option: str, value: Any) -> None:
    assert keys(take(make(), 12)) != keys(take(make(**{option: value}), 12))


@pytest.mark.parametrize(
    ("num_rows", "options"),
    [
        (NUM_ROWS, {"num_epochs": 3}),
        (NUM_ROWS, {"num_epochs": 1, "packing": "minibatch"}),
        (NUM_ROWS, {"num_epochs": 3, "packing": "none"}),
        (NUM_ROWS, {}),
        (9, {}),  # less rows in a lane than in a pack
    ],
)
def test_every_conversation_comes_exactly_once_per_epoch(make: Make, num_rows: int, options: dict[str, Any]) -> None:
    """test_elastic.py has streams, mixtures and planned sets."""
    dataset = make(num_rows, **options)
    packs = take(dataset, 200)
    num_epochs = options.get("num_epochs") or min(epoch for _, _, epoch in keys(packs)[-20:])
    assert num_epochs >= 1
    read = dataset.preparation
    kept = [key.row for key in read.all_keys() if not isinstance(read.read(key), Dropped)]
    found = Counter(keys(packs))
    finished = Counter({key: count for key, count in found.items() if key[2] < num_epochs})
    assert finished == Counter((0, row, epoch) for row in kept for epoch in range(num_epochs))
    assert max(found.values()) == 1
    assert "num_epochs" not in options or sum(pack.num_rows for pack in packs) == num_rows * num_epochs


@pytest.mark.parametrize("isolated", [True, False])
def test_a_drained_stream_gives_empty_packs_that_train_nothing(make: Make, isolated: bool) -> None:
    pack = take(make(num_epochs=1, remove_cross_attention=isolated), 60)[-1]
    assert (pack.keys, pack.num_tokens, pack.num_trained_tokens, pack.num_rows) == ((), 0, 0, 0)
    assert (set(pack.role_ids), set(pack.labels), pack.loss_weights.any()) == ({Role.PADDING}, {IGNORE_INDEX}, False)
    assert pack.cu_seqlens.tolist() == [0, 96]
    assert np.array_equal(pack.position_ids, np.arange(96))


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(4, 0), (1, 4), (2, 2), (3, 4)])
def test_a_layout_that_does_not_divide_the_lanes_is_refused_with_those_that_do(
    make: Make, num_ranks: int, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_worker(monkeypatch, 0, num_workers)
    with pytest.raises(DataError, match=r"do not divide data\.num_lanes: 6; set ranks x workers to one of 1, 2, 3, 6"):
        next(iter(make(dp_world_size=num_ranks)))


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

CHATS = [chat(f"Q{n}", f"A{n}") for n in range(70)]


@pytest.mark.parametrize("num_lanes", [1, 6, "auto"])
def test_a_data_set_of_rows_ends_with_its_epochs_and_gives_each_row_once_in_each(
    chat_tokenizer: ChatTokenizer, num_lanes: Any
) -> None:
    dataset = PackedDataset.from_rows(CHATS, chat_tokenizer, sequence_length=96, num_epochs=2, num_lanes=num_lanes)
    packs = list(dataset)
    assert all(pack.keys for pack in packs)
    assert sorted(keys(packs)) == sorted((0, row, epoch) for row in range(70) for epoch in range(2))
    assert list(dataset) == []


def test_rows_of_which_none_fits_are_an_error_and_no_empty_loop(chat_tokenizer: ChatTokenizer) -> None:
    with pytest.raises(DataError, match="no row can be trained on: overlong"):
        list(PackedDataset.from_rows(CHATS, chat_tokenizer, sequence_length=3, num_epochs=1, num_lanes=2))
    with pytest.raises(DataError, match="none of the last 1001 rows can be trained on"):
        next(iter(PackedDataset.from_rows(CHATS, chat_tokenizer, sequence_length=3)))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sequence_length": 0}, "sequence_length is 0"),
        ({"sequence_length": 9, "format": "x"}, "unknown format 'x'; choose from auto, messages"),
        ({"sequence_length": 9, "overlong": "x"}, "overlong is 'x'; choose from drop"),
        ({"sequence_length": 9, "packing": "x"}, "packing is 'x'; choose from pool"),
        ({"sequence_length": 9, "token_budget": 8}, "token_budget is 8, but a pack may need 9 tokens"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    chat_tokenizer: ChatTokenizer, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        PackedDataset.from_rows(CHATS, chat_tokenizer, **options)
