"""A row on 2 or 4 ranks has the hidden states, the loss and the gradients of one rank, in every family."""

import json
from pathlib import Path
from typing import Any

import pytest

from sftron.models.context import share_heads
from tests.conftest import rest_nightly
from tests.models.context_ranks import RAGGED, ROWS, Case, Row, save_costs, save_differences, save_isolation, save_whole
from tests.models.reference import FAMILIES, make_native, make_reference, pack
from tests.train.ranks import launch

LIMITS = {
    "float32": {"hidden": 1e-6, "loss": 2e-6, "gradient": 5e-6},
    "float64": {"hidden": 1e-12, "loss": 1e-12, "gradient": 1e-12},
}
"""As shares of the largest value. In float64, hidden states differ by 7e-15 at most, losses by 4e-16 and gradients by
6e-14, so what differs in float32 is rounding."""
ROUNDED_OTHERWISE = {
    ("Mistral Nemo", 3): 1.5,
    ("Gemma 1", 3): 1.5,
    ("Qwen 2 MoE", 3): 1.5,
    ("Qwen 3.5", 3): 2,
    ("Qwen 3.5, tied, as many key heads", 3): 2,
    ("OLMoE with normalized scores", 3): 1.5,
    ("Granite 3 MoE", 3): 2,
    ("Gemma 4 31B", 3): 3,
    ("Gemma 4 12B", 3): 3,
    ("dots.llm1", 3): 1.5,
    ("Seed OSS with other biases", 3): 1.5,
    ("Qwen3-Next with dense layers", 3): 4,
    ("Phi 4 mini", 1): 1.5,
    ("Qwen 3.5", 1): 6,
    ("LFM2", 1): 1.5,
}
"""The families, with the fewest tokens of a part, that need so many times the limits of float32: products of few rows
are rounded otherwise than those of a whole row. On 2 ranks, most hidden states are equal to the bit."""
MARGINS = {"hidden": 1e5, "loss": 200, "gradient": 1e5}
"""How many times the limits of float32 a mistake has to exceed: half of what the least visible one does."""
# Grouped and single key-value heads, heads that ranks do not divide, longrope, query scaling, soft caps and windows,
# parallel blocks, experts, sinks, states, keys of another layer, latents, and convolutions.
KINDS = ["Llama 3", "SmolLM2", "TinyLlama, Yi", "Ministral 3", "Phi 4 mini", "Gemma 2", "Cohere 2", "Qwen 3 MoE"]
KINDS += ["gpt-oss", "Qwen 3.5", "Gemma 4 E2B", "DeepSeek V3", "LFM2"]
REST = [family for family in FAMILIES if family not in KINDS]


def differences(tmp_path: Path, num_ranks: int, cases: list[Case]) -> list[dict[str, dict[str, float]]]:
    run(num_ranks, save_differences, cases, tmp_path / "found", folder=tmp_path)
    return json.loads((tmp_path / "found").read_text())


def run(num_ranks: int, *work: Any, folder: Path) -> None:
    for rank, ended in enumerate(launch(num_ranks, *work, folder=folder)):
        assert ended.exit_code == 0, f"rank {rank}: {ended.err[-3000:]}"


def require_equal(cases: list[Case], found: list[dict[str, dict[str, float]]]) -> None:
    for case, by_type in zip(cases, found, strict=True):
        assert list(by_type) == list(LIMITS)[: 1 if case.compiled else 2]
        for dtype, measured in by_type.items():
            factor = ROUNDED_OTHERWISE.get((case.family, min(case.row.counts)), 1) if dtype == "float32" else 1
            for name, limit in LIMITS[dtype].items():
                assert measured[name] <= factor * limit, (case, dtype, measured)


@pytest.mark.parametrize("families", rest_nightly(["one of each kind", "the rest"], ["one of each kind"]))
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_hidden_states_loss_and_gradients_are_those_of_one_rank(tmp_path: Path, num_ranks: int, families: str) -> None:
    cases = [Case(family, ROWS[num_ranks]) for family in (REST if families == "the rest" else KINDS)]
    require_equal(cases, differences(tmp_path, num_ranks, cases))


@pytest.mark.parametrize("num_ranks", rest_nightly([2, 4], [4]))
def test_parts_of_any_size_cut_documents_anywhere(tmp_path: Path, num_ranks: int) -> None:
    families = ("Phi 4 mini", "Qwen 3.5", "LFM2")
    cases = [Case(family, row) for family in families for row in RAGGED[num_ranks]]
    require_equal(cases, differences(tmp_path, num_ranks, cases))


def test_windows_about_the_length_of_a_part_cross_its_border(tmp_path: Path) -> None:
    row = Row((89,), (40, 49))
    cases = [Case("Mistral 0.1", row, model={"sliding_window": window}) for window in (39, 40, 41)]
    require_equal(cases, differences(tmp_path, 2, cases))


@pytest.mark.parametrize("compiled", rest_nightly([False, True], [False]))
def test_what_is_computed_again_or_compiled_is_exchanged_in_the_same_order(tmp_path: Path, compiled: bool) -> None:
    cases = [Case("Qwen 3.5", ROWS[2], mode="full", compiled=compiled), Case("Qwen 3.5", ROWS[2], mode="selective")]
    cases += [Case(name, ROWS[2], mode="full", compiled=compiled) for name in ("Gemma 4 E2B", "LFM2")]
    require_equal(cases, differences(tmp_path, 2, cases))


@pytest.mark.parametrize("num_ranks", rest_nightly([2, 4], [2]))
def test_mistakes_of_others_are_seen(tmp_path: Path, num_ranks: int) -> None:
    cases = [
        Case("Phi 4 mini", ROWS[num_ranks], "rotations by the part"),
        Case("Qwen 3.5", ROWS[num_ranks], "bounds of the part in delta layers"),
        Case("LFM2", ROWS[num_ranks], "bounds of the part in convolutions"),
        Case("gpt-oss", ROWS[num_ranks], "sinks not cut"),
        Case("Gemma 2", ROWS[num_ranks], "window dropped"),
    ]
    for case, by_type in zip(cases, differences(tmp_path, num_ranks, cases), strict=True):
        for name, limit in LIMITS["float32"].items():
            assert by_type["float32"][name] > MARGINS[name] * limit, (case, by_type)


@pytest.mark.parametrize("num_ranks", rest_nightly([2, 4], [2]))
def test_a_changed_document_changes_no_bit_of_another_on_any_rank(tmp_path: Path, num_ranks: int) -> None:
    families = ["Llama 3", "Gemma 2", "Qwen 3.5", "gpt-oss", "LFM2"]
    run(num_ranks, save_isolation, families, ROWS[num_ranks], tmp_path / "found", folder=tmp_path)
    for rank in range(num_ranks):
        found = json.loads((tmp_path / f"found-{rank}").read_text())
        for family, documents in found.items():
            for measured in documents:
                assert measured["others"] <= (5e-6 if family == "gpt-oss" else 0), (rank, family, documents)
                assert measured["it"] is None or measured["it"] > 0.01, (rank, family, documents)
                assert measured["gradient of others"] == 0, (rank, family, documents)
                assert measured["gradient of it"] > 0.01, (rank, family, documents)
    assert len(found) == len(families)


def test_a_rank_sends_and_keeps_what_the_documentation_states(tmp_path: Path) -> None:
    """e T / n (2 N + 2 K') D (n - 1) / n bytes in each layer and direction. K' is K, or n where that is a multiple
    of K, or else what `share_heads` gives, at most N."""
    cases: list[tuple[dict[str, Any], int]] = [
        ({"num_attention_heads": 4, "num_key_value_heads": 2}, 2),
        ({"num_attention_heads": 4, "num_key_value_heads": 2}, 4),
        ({"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}, 5),
    ]
    for number, (options, num_sent_kv) in enumerate(cases):
        num_ranks = (2, 4, 4)[number]
        row = Row((16, 24), (40 // num_ranks,) * num_ranks)
        run(num_ranks, save_costs, options, row, tmp_path / "found", folder=tmp_path)
        num_heads = options["num_attention_heads"]
        found = [json.loads((tmp_path / f"found-{rank}").read_text()) for rank in range(num_ranks)]
        total = sum(sum(each["sent"]) for each in found)
        # Two layers, forward and backward.
        expected = 2 * 2 * 40 * (2 * num_heads + 2 * num_sent_kv) * 8 * (num_ranks - 1) // num_ranks
        assert total == expected, (options, num_ranks)
        for each in found:
            # The output of attention is kept by heads and by tokens.
            attention = 2 * 4 * (40 // num_ranks) * 8 * (num_heads + 2 * (num_sent_kv - options["num_key_value_heads"]))
            assert each["kept"]["shared"] <= 1.15 * each["kept"]["alone"] / num_ranks + attention


# --- The number of tokens of each rank ---


def test_ranks_that_share_rows_may_all_have_a_whole_one_only_without_gradients(tmp_path: Path) -> None:
    """Each rank's gradients would be those of the whole row, and their sum several times as large."""
    run(2, save_whole, ROWS[2], tmp_path / "found", folder=tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"found-{rank}").read_text())
        assert found["is that of one rank"]
        assert found["with gradients"].startswith(f"counts are (89,), but rank {rank} of 2 that share a row has 89 of")


@pytest.mark.parametrize(
    ("num_ids", "num_positions", "counts"), [(6, 5, (5,)), (4, 5, (5,)), (5, 6, (5,)), (5, 5, (3, 2))], ids=str
)
def test_counts_that_are_not_those_of_the_row_are_refused(
    num_ids: int, num_positions: int, counts: tuple[int, ...]
) -> None:
    model, (input_ids, position_ids, *bounds) = make_native(make_reference()), pack([6])
    with pytest.raises(
        ValueError, match=rf"has {num_ids} of its {num_positions} tokens\. Cut the row for as many ranks"
    ):
        model(input_ids[:num_ids], position_ids[:num_positions], *bounds, counts)


# --- The heads of each rank ---


@pytest.mark.parametrize(
    ("heads", "num_ranks", "expected"),
    [
        ((8, 4), 2, ((4, 4), (2, 2), (1, 1, 1, 1))),
        ((8, 2), 4, ((2, 2, 2, 2), (1, 1, 1, 1), (2, 2))),
        ((4, 1), 4, ((1, 1, 1, 1), (1, 1, 1, 1), (4,))),
        ((9, 3), 2, ((5, 4), (5, 4), (3, 3, 3))),
        ((9, 3), 4, ((3, 2, 2, 2), (1, 1, 2, 1), (1, 2, 2))),
        ((4, 4), 3, ((2, 1, 1), (2, 1, 1), (1, 1, 1, 1))),
    ],
    ids=str,
)
def test_heads_are_shared_so_that_each_rank_has_groups_of_one_size(
    heads: tuple[int, int], num_ranks: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    shares = share_heads(*heads, num_ranks)
    assert (shares.queries, shares.keys, shares.copies) == expected


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="5 ranks cannot share 4 heads"):
        share_heads(4, 2, 5)
