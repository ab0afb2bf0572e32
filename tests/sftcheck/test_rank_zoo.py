"""Each set-up of the zoo of ranks is broken, or sound, as it claims; and verify_trainer finds it on all ranks."""

from typing import Any

import pytest

from sftcheck.faults import Fault
from tests.sftcheck.rank_zoo import RANK_ZOO, results

FAST = {
    "mean_per_rank": ("denominators", "each rank counts its own labels"),
    "floor_of_the_count": ("denominators", "a quotient that is rounded down"),
    "divided_twice": ("gradients", "0.5 of the reference: 1 by the number of ranks"),
    "never_synced": ("gradients", "the ranks have different gradients"),
    "different_adapters": ("replicas", "tensors differ between the ranks before the first step"),
    "same_rows_on_every_rank": ("rows", "24 rows are computed more than once"),
    "sharded_twice": ("rows", "12 of 24 rows are computed by no rank"),
    "uneven_batches": ("rows", "the ranks have 6 and 4 batches; training would hang"),
    "labels_shifted_after_the_cut": ("borders", "labels are not trained"),
    "longrope_by_the_part": ("rotations", "rank 0: rotations differ by"),
    "borders_of_the_part": ("across ranks", "rank 1: conversations on 2 ranks: others change by"),
    "one_fabricated_document": ("gradients", "from one process; worst"),
    "size_that_is_silently_one": (
        "rows",
        "that 2 ranks share the same rows, but each computes whole rows",
    ),
    "ddp_of_trl": ("gradients", "from one process at most, in 21 tensors"),
    "rows_that_fill_the_last_batch": ("rows", "3 repeated at the end, where the last batches are filled"),
    "each_rank_logs_its_own_loss": ("loss", "the gradients are right; the returned and logged loss is"),
    "fsdp2_of_accelerate": ("replicas", "21 tensors are equal on 2 ranks, also after a step"),
    "rows_in_heads_and_tails": ("rotations", "from whole rows"),
    "rows_cut_by_the_collator": ("borders", "labels are trained by the tokens before them"),
}
"""The set-ups of make test, with a row and what it has measured."""


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return results(list(FAST), tmp_path_factory.mktemp("fast"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return results([name for name in RANK_ZOO if name not in FAST], tmp_path_factory.mktemp("others"))


@pytest.fixture(scope="module")
def proofs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return results(list(RANK_ZOO), tmp_path_factory.mktemp("proofs"), prove=True)


def same_on_all_ranks(ranks: list[dict[str, Any]], num_ranks: int) -> bool:
    return len(ranks) == num_ranks and all(each["rows"] == ranks[0]["rows"] for each in ranks)


@pytest.mark.parametrize("name", FAST)
def test_verify_trainer_fails_the_rows_that_are_wrong_on_all_ranks(
    fast: dict[str, list[dict[str, Any]]], name: str
) -> None:
    row, words = FAST[name]
    assert not fast[name][0]["problem"]
    assert same_on_all_ranks(fast[name], RANK_ZOO[name].ranks)
    assert words in fast[name][0]["rows"][row][1]
    for own, faults in fast[name][0]["faults"].items():
        assert faults
        assert all(own in Fault[fault].entry.rows for fault in faults), (own, faults)


def test_unequal_numbers_of_batches_are_a_fault_of_their_own(fast: dict[str, list[dict[str, Any]]]) -> None:
    # The longer rank's last rows are computed by nobody, which is the second fault.
    assert fast["uneven_batches"][0]["faults"]["rows"] == ["BATCHES_UNEQUAL", "ROWS_REPEATED"]
    assert fast["same_rows_on_every_rank"][0]["faults"]["rows"] == ["ROWS_REPEATED"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in RANK_ZOO if name not in FAST])
def test_verify_trainer_fails_the_rows_that_are_wrong_in_the_rest_of_the_zoo(
    others: dict[str, list[dict[str, Any]]], name: str
) -> None:
    assert not others[name][0]["problem"]
    assert same_on_all_ranks(others[name], RANK_ZOO[name].ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("name", RANK_ZOO)
def test_a_set_up_is_what_it_claims_to_be(proofs: dict[str, list[dict[str, Any]]], name: str) -> None:
    assert [each["problem"] for each in proofs[name]] == [""] * RANK_ZOO[name].ranks


def test_the_zoo_has_twenty_broken_set_ups_and_ten_sound_ones_in_parts_and_whole() -> None:
    broken = [each for each in RANK_ZOO.values() if each.fails]
    assert len(broken) >= 20
    assert len(RANK_ZOO) - len(broken) >= 10
    assert {row for each in broken for rows in each.fails for row in rows.split("|")} == {
        "rows",
        "denominators",
        "loss",
        "gradients",
        "replicas",
        "rotations",
        "borders",
        "across ranks",
    }
