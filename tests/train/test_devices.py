"""Which device each rank takes, and what a rank without one says."""

import os
from pathlib import Path

import pytest
import torch

from sftron.train import ranks
from sftron.train.ranks import start_ranks
from tests.marked_gpu import wants_gpus
from tests.pretended import pretended_gpu
from tests.train.ranks import launch


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], False),
        (["-n", "auto", "tests/kernels"], False),
        (["-m", "nightly or hypothesis"], False),
        (["-m", "not gpu"], False),
        (["-q", "-m", "gpu", "tests/kernels"], True),
        (["-mgpu and not nightly"], True),
        (["-m", "gpu or not gpu"], True),
    ],
    ids=str,
)
def test_gpus_are_visible_to_the_tests_that_are_marked_for_them(arguments: list[str], wanted: bool) -> None:
    assert wants_gpus(arguments) == wanted


def test_all_other_tests_see_no_gpu(pytestconfig: pytest.Config) -> None:
    if not wants_gpus(["-m", pytestconfig.option.markexpr]):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("environment", "num_gpus", "index"),
    [
        ({}, 8, 0),
        (TORCHRUN | {"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}, 8, 5),
        (TORCHRUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, 1, 0),
        ({"LOCAL_RANK": "5"}, 1, 0),  # srun --gpus-per-task=1
        ({"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}, 1, 0),
    ],
    ids=str,
)
def test_each_rank_takes_a_gpu_of_its_own(
    environment: dict[str, str], num_gpus: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pretended_gpu():
        monkeypatch.setattr(ranks, "num_gpus", lambda: num_gpus)
        assert start_ranks().device == torch.device("gpu", index)


@pytest.mark.parametrize("num_gpus", [1, 3])
def test_more_ranks_than_gpus_are_refused_with_both_numbers(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    with pretended_gpu():
        monkeypatch.setattr(ranks, "num_gpus", lambda: num_gpus)
        with pytest.raises(
            ValueError, match=rf": 4, GPUs that they see there: {num_gpus}; start at most {num_gpus} \("
        ):
            start_ranks()


def start_where_one_gpu_is() -> None:
    class Functions:
        @staticmethod
        def set_device(_: torch.device) -> None: ...

    os.environ |= TORCHRUN
    ranks.default_device = lambda: torch.device("cuda")
    ranks.collective_backends = lambda _: "gloo"
    ranks.gpu_functions = lambda _: Functions
    ranks.num_gpus = lambda: 1
    start_ranks(timeout_s=20)


def test_all_ranks_refuse_if_one_of_them_has_no_gpu(tmp_path: Path) -> None:
    ended = launch(2, start_where_one_gpu_is, folder=tmp_path)
    for each, words in zip(ended, ("ValueError: rank 1: ranks that", "ValueError: ranks that"), strict=True):
        assert each.exit_code == 1
        assert f"{words} were started on" in each.err
        assert ": 2, GPUs that they see there: 1; start at most 1" in each.err


def start_without_a_network() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "nothere"
    start_ranks(timeout_s=20)


def test_a_connection_that_cannot_be_made_names_the_variable_of_the_network_interface(tmp_path: Path) -> None:
    for each in launch(2, start_without_a_network, folder=tmp_path):
        assert each.exit_code == 1
        assert "RuntimeError" in each.err
        assert "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network interface" in each.err
