"""Planned packing: with known lengths any ranks and workers follow one lane, and an epoch ends in full packs."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.lanes.order import ShuffledOrder
from sftron.data.lanes.row_lengths import is_plannable, measure_rows
from sftron.data.prepare import DataOptions, Preparation
from sftron.data.types import DataError, Dropped, Row
from tests.conftest import rest_nightly
from tests.data.streams import OVERLONG, Rows, as_dataset, keys, make_mixture, mixed_rows, take
from tests.data.test_elastic import ManyRows
from tests.data.test_packing import num_best_fit_packs


def planned(chat_tokenizer: ChatTokenizer, **options: Any) -> PackedDataset:
    sets = [as_dataset(Rows(mixed_rows(50), "one.jsonl")), as_dataset(Rows(mixed_rows(23), "two.jsonl"))]
    return make_mixture(sets, chat_tokenizer, **{"num_lanes": "auto", "num_epochs": 2} | options)


def preparation(source: Rows, chat_tokenizer: ChatTokenizer, **options: Any) -> Preparation:
    return Preparation([as_dataset(source)], chat_tokenizer, DataOptions(sequence_length=48, **options))


def ids_rows(lengths: list[int]) -> list[Row]:
    """Returns pretokenized rows, which need no tokenizer, of these lengths."""
    return [{"input_ids": [5] * length, "labels": [5] * length} for length in lengths]


def test_a_rank_reads_the_rows_of_its_own_packs_alone(chat_tokenizer: ChatTokenizer) -> None:
    dataset = planned(chat_tokenizer, dp_rank=1, dp_world_size=3, row_lengths=planned(chat_tokenizer).measure())
    read: list[Any] = []
    whole = dataset.preparation.read_many
    dataset.preparation.read_many = lambda keys: (read.extend(keys), whole(keys))[1]
    packs = take(dataset, 5)
    own = [key for pack in packs for key in [*pack.keys, *(drop.key for drop in pack.dropped_rows)]]
    assert Counter(read) == Counter(own)


@pytest.mark.parametrize("num_rows", [3, 40])
def test_torchs_own_loader_gives_every_row_once_though_a_worker_may_have_no_pack(
    chat_tokenizer: ChatTokenizer, num_rows: int
) -> None:
    dataset = PackedDataset.from_rows(ids_rows([30] * num_rows), chat_tokenizer, sequence_length=96, num_epochs=1)
    packs = list(DataLoader(dataset, batch_size=None, num_workers=2))
    assert sorted(keys(packs)) == [(0, row, 0) for row in range(num_rows)]


@pytest.mark.parametrize(("mean", "spread", "num_rows", "budget"), [(90, 0.7, 2000, 2048), (60, 1.0, 700, 512)])
def test_an_epoch_of_a_small_set_takes_one_pack_more_than_its_tokens_at_most(
    chat_tokenizer: ChatTokenizer, mean: int, spread: float, num_rows: int, budget: int
) -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(mean), spread, num_rows).clip(2, budget).astype(int).tolist()
    packs = list(PackedDataset.from_rows(ids_rows(lengths), chat_tokenizer, sequence_length=budget, num_epochs=1))
    assert len(keys(packs)) == num_rows
    assert len(packs) <= -(-sum(lengths) // budget) + 1
    assert sum(lengths) / (len(packs) * budget) >= 0.977


Lengths = Callable[[np.random.Generator, int], np.ndarray]
LENGTHS: dict[str, Lengths] = {
    "near half": lambda rng, n: rng.normal(0.5, 0.1, n),
    "near, and mostly below, half": lambda rng, n: rng.normal(0.45, 0.08, n),
    "near a third": lambda rng, n: rng.normal(1 / 3, 0.05, n),
    "above half, and short": lambda rng, n: np.where(
        rng.random(n) < 0.6, rng.normal(0.52, 0.05, n), rng.exponential(0.1, n)
    ),
    "uniform": lambda rng, n: rng.uniform(0.1, 0.9, n),
    "log-normal": lambda rng, n: rng.lognormal(np.log(0.4), 0.5, n),
    "chats": lambda rng, n: rng.lognormal(np.log(0.11), 1.0, n),
    "GSM8K in packs of 512": lambda rng, n: rng.lognormal(np.log(170 / 512), 0.35, n),
    "FLAN": lambda rng, n: np.where(
        rng.random(n) < 0.5, rng.lognormal(np.log(0.06), 0.8, n), rng.lognormal(np.log(0.4), 0.6, n)
    ),
    "all of one length": lambda rng, n: np.full(n, rng.uniform(0.05, 0.95)),
}
"""Lengths as shares of the budget, of all kinds that packing finds easy or hard."""


@pytest.mark.parametrize("kind", rest_nightly(LENGTHS, ["near half", "chats"]))
def test_a_planned_epoch_is_never_half_a_point_below_best_fit_decreasing(
    chat_tokenizer: ChatTokenizer, kind: str
) -> None:
    seen: set[bool] = set()

    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(
        num_rows=st.integers(1, 40) | st.integers(40, 200),
        budget=st.sampled_from([40, 128, 509]),
        pool_size=st.sampled_from([1, 16, 256]),
        seed=st.integers(0, 2**16),
    )
    def check(num_rows: int, budget: int, pool_size: int, seed: int) -> None:
        shares = LENGTHS[kind](np.random.default_rng(seed), num_rows)
        lengths = np.clip(shares * budget, 2, budget).astype(int).tolist()
        options = {"sequence_length": budget, "pool_size": pool_size, "seed": seed, "num_epochs": 1}
        dataset = PackedDataset.from_rows(ids_rows(lengths), chat_tokenizer, **options)
        packs = list(dataset)
        assert sorted(row for _, row, _ in keys(packs)) == list(range(num_rows))
        assert all(pack.num_tokens <= budget for pack in packs)
        fill, best = (sum(lengths) / (number * budget) for number in (len(packs), num_best_fit_packs(lengths, budget)))
        assert fill >= best - 0.005
        seen.add(dataset.is_best_fit)

    check()
    assert False in seen
    assert True in seen or kind in ("near a third", "all of one length")


def test_best_fit_packs_come_epoch_by_epoch_in_the_order_of_their_oldest_rows(chat_tokenizer: ChatTokenizer) -> None:
    lengths = np.clip(np.random.default_rng(0).normal(64, 13, 300), 2, 128).astype(int).tolist()
    options: dict[str, Any] = {"sequence_length": 128, "num_epochs": 3}
    dataset = PackedDataset.from_rows(ids_rows(lengths), chat_tokenizer, **options)
    assert dataset.is_best_fit
    packs = list(dataset)
    not_measured = PackedDataset(dataset.preparation, DataOptions(**options), ends=True)
    assert [pack.keys for pack in not_measured] == [pack.keys for pack in packs]
    assert [{key.epoch for key in pack.keys} for pack in packs] == [{n} for n in range(3) for _ in packs[::3]]
    for epoch in range(3):
        order, _ = ShuffledOrder(300, seed=dataset.seed).compute(np.arange(epoch * 300, (epoch + 1) * 300))
        place = {row: number for number, row in enumerate(order.tolist())}
        places = [[place[key.row] for key in pack.keys] for pack in packs if pack.keys[0].epoch == epoch]
        assert places == sorted(places)
        assert all(each == sorted(each) for each in places)
        assert sorted(place for each in places for place in each) == list(range(300))


def test_an_endless_run_keeps_the_pool_where_the_next_epoch_fills_what_one_epoch_could_not(
    chat_tokenizer: ChatTokenizer,
) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(102), 0.8, 300), 2, 512).astype(int).tolist()
    uses = {}
    for num_epochs in (1, None):
        options = {"sequence_length": 512, "num_epochs": num_epochs, "seed": 5}
        uses[num_epochs] = PackedDataset.from_rows(ids_rows(lengths), chat_tokenizer, **options).is_best_fit
    assert uses == {1: True, None: False}


def test_rows_of_few_packs_are_planned_and_those_of_many_are_not_even_read(chat_tokenizer: ChatTokenizer) -> None:
    """A row of `ManyRows` has some 20 tokens, so that 100,000 rows are 20 packs, or 20,000."""
    few, many, too_many = sources = [ManyRows(rows) for rows in (3000, 100_000, 10_000_000)]
    assert is_plannable(preparation(few, chat_tokenizer), 48)
    assert is_plannable(preparation(many, chat_tokenizer), 100_000)
    assert not is_plannable(preparation(many, chat_tokenizer), 100)
    assert not is_plannable(preparation(too_many, chat_tokenizer), 10**9)
    assert [0 < len(each.requested) <= 400 for each in sources] == [False, True, False]
    assert 0 <= min(many.requested) <= max(many.requested) < len(many)


# --- What is measured ---


@pytest.mark.parametrize("overlong", ["drop", "truncate_turns"])
def test_what_is_measured_is_what_is_read(chat_tokenizer: ChatTokenizer, overlong: Any) -> None:
    read = preparation(Rows(mixed_rows(60)), chat_tokenizer, overlong=overlong)
    measured = measure_rows(read, range(60))
    rows = read.read_many([read.key(row) for row in range(60)])
    assert measured == [each.reason if isinstance(each, Dropped) else len(each) for each in rows]
    assert {str(each) for each in measured if isinstance(each, str)} >= {"no_trained_token"}


def test_a_bad_row_is_named_or_measured_as_one(chat_tokenizer: ChatTokenizer) -> None:
    rows = [*mixed_rows(299), "broken_json"]
    with pytest.raises(DataError, match=r"^rows\.jsonl:300: broken_json$"):
        measure_rows(preparation(Rows(rows), chat_tokenizer), range(300))
    skipping = preparation(Rows(rows), chat_tokenizer, on_bad_row="skip")
    assert measure_rows(skipping, range(300))[-1] == "broken_json"


@pytest.mark.parametrize("change", ["44 tokens", "dropped as overlong"])
def test_a_row_that_is_no_longer_what_was_measured_is_refused(chat_tokenizer: ChatTokenizer, change: str) -> None:
    rows = Rows(mixed_rows(30))
    dataset = make_mixture([as_dataset(rows)], chat_tokenizer, num_lanes="auto", num_epochs=1)
    dataset.measure()
    rows.rows[6] = OVERLONG if change == "dropped as overlong" else rows.rows[7]
    with pytest.raises(DataError, match=rf"rows\.jsonl:7: {change}, but 30 tokens when the rows were measured"):
        take(dataset, 20)
