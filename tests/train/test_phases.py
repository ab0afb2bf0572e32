"""The first failure of a run is found in the store of its ranks, with the phase that each of them was in."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from sftron.train import ranks
from sftron.train.ranks import Phases

GLOO = RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> list[Phases]:
    """Three ranks of this process."""
    monkeypatch.setattr(ranks, "_TIME_TO_GIVE_UP_S", 0.0)
    store = dist.HashStore()
    return [Phases(store, rank, 3) for rank in range(3)]


def test_an_error_of_a_ranks_own_is_the_first_failure_and_stays_it_for_all(phases: list[Phases]) -> None:
    first = "rank 1: ValueError: out of luck"
    assert phases[1].first_failure(ValueError("out of luck")) == first
    assert phases[0].first_failure(GLOO) == first
    assert phases[2].first_failure(OSError("a full disk")) == first


@pytest.mark.parametrize("error", [GLOO, dist.DistBackendError("the communicator was aborted")])
def test_an_error_about_another_rank_shows_which_ranks_wait_and_what_each_was_doing(
    phases: list[Phases], error: RuntimeError
) -> None:
    phases[0].enter("the data of step 7")
    phases[1].enter("step 6")
    phases[2].enter("the data of step 7")
    first = phases[0].first_failure(error)

    assert first.startswith(f"rank 0: {type(error).__name__}: {error}. Another rank has died, or has not answered")
    assert first.endswith(
        'ranks waiting in "the data of step 7": 0; ranks in "step 6": 1; ranks in "the data of step 7": 2'
    )


class _NoStore(dist.Store):
    """The store of a process that has ended, or of a machine that no longer answers."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        super().__init__()
        self._answer = answer

    def set(self, *_: Any) -> None:
        raise RuntimeError("failed to send")

    def compare_set(self, *_: Any) -> bytes:
        return self._answer()


@pytest.mark.parametrize("hangs", [False, True])
def test_without_the_store_a_rank_reports_its_own_error(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_STORE_PATIENCE_S", 0.1 if hangs else 60)
    released = threading.Event()

    def answer() -> bytes:
        if hangs:
            released.wait()
        raise RuntimeError("failed to receive")

    alone = Phases(_NoStore(answer), 1, 3)
    alone.enter("step 6")
    assert alone.own == "step 6"
    assert alone.first_failure(ValueError("out of luck")) == "rank 1: ValueError: out of luck"
    released.set()
