"""Planned packing: with known lengths any ranks and workers follow one lane, and an epoch ends in full packs."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.lanes import row_lengths
from sftron.data.lanes.row_lengths import is_plannable, measure_rows
from sftron.data.prepare import DataOptions, Preparation
from sftron.data.types import DataError, Dropped, Row
from tests.data.streams import OVERLONG, Rows, as_dataset, keys, make_mixture, mixed_rows, take
from tests.data.test_elastic import ManyRows


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


def test_rows_of_few_packs_are_planned_and_those_of_many_are_not_even_read(chat_tokenizer: ChatTokenizer) -> None:
    """A row of `ManyRows` has some 20 tokens, so that 100,000 rows are 20 packs, or 20,000."""
    few, many, too_many = sources = [ManyRows(rows) for rows in (3000, 100_000, 10_000_000)]
    assert is_plannable(preparation(few, chat_tokenizer), 48)
    assert is_plannable(preparation(many, chat_tokenizer), 100_000)
    assert not is_plannable(preparation(many, chat_tokenizer), 100)
    assert not is_plannable(preparation(too_many, chat_tokenizer), 10**9)
    assert [0 < len(each.requested) <= 400 for each in sources] == [False, True, False]


# --- What is measured ---


@pytest.mark.parametrize("overlong", ["drop", "truncate_turns"])
def test_what_is_measured_is_what_is_read(chat_tokenizer: ChatTokenizer, overlong: Any) -> None:
    read = preparation(Rows(mixed_rows(60)), chat_tokenizer, overlong=overlong)
    measured = measure_rows(read, range(60))
    rows = read.read_many([read.key(row) for row in range(60)])
    assert measured == [each.reason if isinstance(each, Dropped) else len(each) for each in rows]
    assert {str(each) for each in measured if isinstance(each, str)} >= {"no_trained_token"}


def test_several_processes_measure_what_one_does_and_name_a_bad_row_and_leave_the_runs_random_numbers_alone(
    chat_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, before = preparation(Rows(mixed_rows(700)), chat_tokenizer), torch.get_rng_state()
    alone = measure_rows(read, range(1, 700, 2))
    monkeypatch.setattr(row_lengths, "_FEWEST_ROWS_FOR_A_PROCESS", 100)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))
    assert measure_rows(read, range(1, 700, 2)) == alone
    assert torch.equal(torch.get_rng_state(), before)

    rows = [*mixed_rows(299), "broken_json"]
    for number in (150, 300):  # in this process, and in others
        with pytest.raises(DataError, match=r"^rows\.jsonl:300: broken_json$"):
            measure_rows(preparation(Rows(rows), chat_tokenizer), range(300 - number, 300))
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
