"""Whatever is killed, whenever, and on however many ranks it resumes: the run is the one that was left alone (laws 5, 6
and 12). `make chaos` does more of the same."""

from pathlib import Path
from typing import Any

import pytest

from tests.train.chaos import ROUNDING, Chaos
from tests.train.ranks import start_forked


def test_a_run_survives_the_kills_of_a_rank_and_of_the_launcher_and_a_hop_from_two_ranks_to_one(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, start_forked)
    chaos.kill(2, whom=("rank", "launcher"))
    chaos.hop(2)

    assert len(chaos.table) == 3
    assert not chaos.violations, "\n".join(chaos.table + chaos.violations)


def _step(loss: float = 2.0, grad_norm: float = 1.0, rows: int = 3, loss_of_set: float = 2.0) -> dict[str, Any]:
    counts = ("step", "tokens", "trained_tokens", "total_tokens", "conversations", "epoch", "fill", "dropped")
    by_set = {"rows.jsonl": {"loss": loss_of_set, "rows": rows}}
    return {**dict.fromkeys(counts, 1), "loss": loss, "grad_norm": grad_norm, "datasets": by_set}


@pytest.mark.parametrize("name", ["loss", "grad_norm", "loss_of_set"])
def test_the_drill_wants_equal_bits_within_a_layout_rounding_between_layouts_and_equal_counts(
    tmp_path: Path, name: str
) -> None:
    def violations(other: dict[str, Any], most_apart: float) -> int:
        chaos = Chaos(tmp_path, start_forked)
        chaos.compare([_step()], [other], "hops", most_apart=most_apart)
        return len(chaos.violations)

    value = _step()["datasets"]["rows.jsonl"]["loss"] if name == "loss_of_set" else _step()[name]
    rounded, other = _step(**{name: value * (1 + ROUNDING / 4)}), _step(**{name: value * (1 + 4 * ROUNDING)})
    assert violations(_step(), 0) == 0
    assert (violations(rounded, 0), violations(rounded, ROUNDING)) == (1, 0)
    assert violations(other, ROUNDING) == 1
    assert violations(_step(rows=4), ROUNDING) == 1
