"""Whatever is killed, whenever: the run that goes on is the run that was left alone (laws 6 and 12)."""

from pathlib import Path

from tests.train.chaos import Chaos
from tests.train.ranks import start_forked


def test_a_run_of_two_ranks_survives_the_kill_of_a_rank_of_a_worker_and_of_the_launcher(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, start_forked)
    chaos.kill(3, whom=("rank", "worker", "launcher"))

    assert len(chaos.table) == 3
    assert not chaos.violations, "\n".join(chaos.table + chaos.violations)
