"""Whatever is killed, whenever, and on however many ranks it goes on: the run is the one that was left alone (laws 5, 6
and 12). `make chaos` does more of the same."""

from pathlib import Path

from tests.train.chaos import Chaos
from tests.train.ranks import start_forked


def test_a_run_survives_the_kills_of_a_rank_and_of_the_launcher_and_a_hop_from_two_ranks_to_one(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, start_forked)
    chaos.kill(2, whom=("rank", "launcher"))
    chaos.hop(2)

    assert len(chaos.table) == 3
    assert not chaos.violations, "\n".join(chaos.table + chaos.violations)
