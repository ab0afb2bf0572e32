"""Whatever is killed, whenever, and on however many ranks it resumes: the run is the one that was left alone (laws 5, 6
and 12). `make chaos` does more of the same, and test_ranks.py hops."""

from pathlib import Path
from typing import Any

import pytest

from tests.train.chaos import ROUNDING, Chaos, Who
from tests.train.ranks import start_forked


@pytest.mark.nightly
@pytest.mark.parametrize("whom", ["launcher", "rank"])
def test_a_run_survives_the_kill_of_its_launcher_or_of_a_rank(tmp_path: Path, whom: Who) -> None:
    chaos = Chaos(tmp_path, start_forked)
    chaos.kill(1, whom=(whom,))

    assert len(chaos.table) == 1
    assert not chaos.violations, "\n".join(chaos.table + chaos.violations)


def _step(loss: float = 2.0, grad_norm: float = 2.0, rows: int = 3, loss_of_set: float = 2.0) -> dict[str, Any]:
    counts = ("step", "tokens", "trained_tokens", "total_tokens", "conversations", "epoch", "fill", "dropped")
    by_set = {"rows.jsonl": {"loss": loss_of_set, "rows": rows}}
    return {**dict.fromkeys(counts, 1), "loss": loss, "grad_norm": grad_norm, "datasets": by_set}


@pytest.mark.parametrize("name", ["loss", "grad_norm", "loss_of_set"])
def test_the_drill_wants_equal_bits_within_a_layout_rounding_between_layouts_and_equal_counts(
    tmp_path: Path, name: str
) -> None:
    chaos = Chaos(tmp_path, start_forked)
    chaos.compare([_step()], [_step()], "", most_apart=0)
    chaos.compare([_step()], [_step(**{name: 2 * (1 + ROUNDING / 4)})], "", most_apart=ROUNDING)
    assert not chaos.violations
    chaos.compare([_step()], [_step(**{name: 2 * (1 + ROUNDING / 4)})], "", most_apart=0)
    chaos.compare([_step()], [_step(**{name: 2 * (1 + 4 * ROUNDING)})], "", most_apart=ROUNDING)
    chaos.compare([_step()], [_step(rows=4)], "", most_apart=ROUNDING)
    assert len(chaos.violations) == 3
