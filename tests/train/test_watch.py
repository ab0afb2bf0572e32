"""Who is to blame is found without torch, which in NCCL only waits: by the places of the ranks and their processes."""

import subprocess
import time

import pytest
import torch.distributed as dist

from sftron.train import watch
from sftron.train.watch import Watch


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> list[Watch]:
    """Of three ranks of this process, without their threads; a rank is late after 0.1 s."""
    monkeypatch.setattr(watch, "_LATER_THAN_TORCH_S", 0.0)
    monkeypatch.setattr(watch.os, "kill", lambda process, number: None)  # all of them are this process
    monkeypatch.setattr(watch, "_BEAT_S", 0.01)
    monkeypatch.setattr(watch, "_TIME_TO_END_S", 0.1)
    store = dist.HashStore()
    return [Watch(store, rank, 3, 0.1) for rank in range(3)]


def look(watches: list[Watch], *silent: int) -> str | None:
    """What rank 0 finds when all but the silent ranks have written what they are at."""
    for rank, each in enumerate(watches):
        if rank not in silent:
            each._write()
    watches[0]._read()
    return watches[0]._verdict()


def test_a_rank_that_does_not_go_on_while_others_do_is_named_with_what_it_is_at(watches: list[Watch]) -> None:
    for each in watches:
        each.at("step 1")
    assert look(watches) is None
    for each in watches[:2]:
        each.at("the data of step 2")
        each.waits(True)
    assert look(watches) is None
    time.sleep(0.15)
    found = look(watches)

    assert found is not None
    assert found.startswith("rank 2 (process ")
    assert found.endswith(" did not come; for 0 s it has been at: step 1")


def test_ranks_that_all_take_long_over_the_same_are_left_alone(watches: list[Watch]) -> None:
    for each in watches:
        each.at("step 1")
    assert look(watches) is None
    time.sleep(0.15)
    assert look(watches) is None


def test_a_rank_whose_process_is_gone_has_died_and_one_that_ended_in_order_has_not(watches: list[Watch]) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    watches[1]._state["process"] = gone.pid
    watches[1]._write(ended=True)
    assert look(watches, 1) is None
    watches[1]._write(ended=False)
    assert f"rank 1 (process {gone.pid} on" in (look(watches, 1) or "")
    # The first failure stays, whoever tells of another one.
    assert "died" in watches[2].blame(RuntimeError("out of luck"))


def test_a_rank_that_ends_in_order_just_after_it_was_read_has_not_died(watches: list[Watch]) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    watches[1]._state["process"] = gone.pid
    watches[1]._write()
    watches[0]._read()
    watches[1]._write(ended=True)
    assert watches[0]._verdict() is None


def test_a_process_id_of_another_container_says_nothing_though_the_hosts_have_one_name(watches: list[Watch]) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    watches[1]._state |= {"process": gone.pid, "processes": "of another container"}
    assert look(watches) is None
    assert watches[0]._state["host"] == watches[1]._state["host"]


def test_a_rank_that_is_silent_is_named(watches: list[Watch]) -> None:
    assert look(watches) is None
    time.sleep(0.15)
    assert "rank 2 (process " in (look(watches, 2) or "")


def test_an_error_that_only_tells_of_others_is_not_the_first_failure(watches: list[Watch]) -> None:
    look(watches)
    gloo = RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    watches[1]._state["gave_up"] = True
    watches[1]._write()
    watches[0]._read()
    assert watches[0].blame(gloo).startswith("rank 2 (process ")
