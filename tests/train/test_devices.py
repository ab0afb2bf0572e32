"""Which device each rank takes, what a device has to have, and what a run says that has too little memory."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from sftron.__main__ import main
from sftron.checkpoint.shards import HostCopy, Shard
from sftron.config import Config
from sftron.train import build_run, dry_run, evaluation, loop, ranks
from sftron.train.build_run import require_device
from sftron.train.dry_run import measure_step_memory
from sftron.train.ranks import Dimensions, Ranks, start_ranks
from sftron.train.step import OutOfMemory
from sftron.train.text import description
from sftron.train.trainer import open_setup, open_trainer
from tests.marked_gpu import wants_gpus
from tests.pretended import MEMORY, pretended_gpu
from tests.train.ranks import launch
from tests.train.runs import chat_line, make_config, make_model_folder, metrics, opened, result


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


@pytest.mark.parametrize("present", [[], ["RANK"], ["RANK", "MASTER_ADDR"]])
def test_a_world_size_that_a_scheduler_left_is_refused_with_what_is_missing(
    present: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        (monkeypatch.setenv(name, "3") if name in present else monkeypatch.delenv(name, raising=False))
    missing = ", ".join({"RANK": "", "MASTER_ADDR": "", "MASTER_PORT": ""}.keys() - {*present})
    with pytest.raises(ValueError, match="unset WORLD_SIZE for one process, or start all ranks") as caught:
        start_ranks()
    assert all(name in str(caught.value) for name in missing.split(", "))
    assert not any(f"{name}," in str(caught.value) for name in present)


def test_a_rank_that_a_scheduler_left_does_not_silence_a_process_that_is_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert main(["train", "--config", str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("num_gpus", [1, 3])
def test_more_ranks_than_gpus_are_refused_with_both_numbers(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    with pretended_gpu():
        monkeypatch.setattr(ranks, "num_gpus", lambda: num_gpus)
        with pytest.raises(ValueError, match=rf", but they see {num_gpus} GPUs? there; start at most {num_gpus} \("):
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
    for each, words in zip(ended, ("ValueError: rank 1: 2 ranks", "ValueError: 2 ranks"), strict=True):
        assert each.exit_code == 1
        assert f"{words} were started on" in each.err
        assert ", but they see 1 GPU there; start at most 1" in each.err


def start_without_a_network() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "nothere"
    start_ranks(timeout_s=20)


def test_a_connection_that_cannot_be_made_names_the_variable_of_the_network_interface(tmp_path: Path) -> None:
    for each in launch(2, start_without_a_network, folder=tmp_path):
        assert each.exit_code == 1
        assert "RuntimeError" in each.err
        assert "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network interface" in each.err


# --- What a device has to have ---


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), num_key_value_heads=4)


@pytest.fixture
def config(tmp_path: Path, model_folder: Path) -> Config:
    return make_config(tmp_path, model_folder, tokens__train_steps=2, tokens__batch_accumulation_per_replica=1)


def test_nf4_on_several_ranks_needs_torch_2_12(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    nf4 = config.model_copy(update={"model": config.model.model_copy(update={"frozen_dtype": "nf4"})})
    one, two = (Ranks(device=torch.device("cpu"), dimensions=Dimensions(shard=number)) for number in (1, 2))
    for version in ("2.11.0+cu128", "2.12.0"):
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        require_device(nf4, one)
        require_device(config, two)
        if version == "2.12.0":
            require_device(nf4, two)
        else:
            with pytest.raises(
                ValueError, match=r"nf4 over 2 ranks needs torch 2\.12, but 2\.11\.0\+cu128 is installed"
            ):
                require_device(nf4, two)


def test_bfloat16_on_a_gpu_that_emulates_it_is_refused(tmp_path: Path, model_folder: Path) -> None:
    with pretended_gpu() as gpu:
        gpu.capability = (7, 5)
        refused = make_config(tmp_path, model_folder, model__compute_dtype="bfloat16")
        with pytest.raises(
            ValueError, match=r"needs a GPU of compute capability 8\.0, but Pretended GPU has 7\.5, .*32"
        ):
            open_setup(refused)
        open_setup(make_config(tmp_path, model_folder, model__compute_dtype="float32"))


@pytest.mark.parametrize("lacks", ["neither gcc nor clang is on PATH", "/Python.h is missing"])
def test_a_run_on_a_gpu_needs_what_triton_needs_to_compile(
    lacks: str, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.delenv("CC", raising=False)
    commands, headers = tmp_path / "commands", tmp_path / "headers"
    commands.mkdir()
    headers.mkdir()
    monkeypatch.setenv("PATH", str(commands))
    monkeypatch.setattr(build_run.sysconfig, "get_paths", lambda _: {"include": str(headers)})
    if "gcc" in lacks:
        (headers / "Python.h").touch()
    else:
        (commands / "gcc").touch(mode=0o755)
    with pretended_gpu(), pytest.raises(ValueError, match=lacks):
        open_setup(config)
    (headers / "Python.h").touch()
    (commands / "clang").touch(mode=0o755)
    with pretended_gpu():
        open_setup(config)


# --- Memory ---


def _run_out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_step_that_does_not_fit_says_what_to_change_first(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"model__activation_checkpointing": "selective", "tokens__micro_batch_size": 2}
    monkeypatch.setattr(loop, "train_step", _run_out_of_memory)
    with pretended_gpu():
        trainer = opened(make_config(tmp_path, model_folder, **options))
        with pytest.raises(OutOfMemory) as raised:
            trainer.train()
    message, length = str(raised.value), trainer.config.tokens.sequence_length
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    assert message.startswith(
        f"step 1 on packs of {2 * length:,} tokens does not fit on Pretended GPU: at most 2.0 GB were allocated and "
        "3.0 GB reserved, of 80.0 GB. Change, in this order: (1) model.activation_checkpointing: full (now selective); "
        "(2) a lower tokens.micro_batch_size (now 2) with more tokens.batch_accumulation_per_replica"
    )
    assert f"(5) a lower tokens.sequence_length (now {length})" in message
    assert result(trainer)["status"] == "failed"
    assert result(trainer)["error"] == f"OutOfMemory: {message}"


def test_a_dry_run_that_does_not_fit_says_so_too(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "loss_of", _run_out_of_memory)
    with pytest.raises(
        OutOfMemory, match=r"a training step on packs of .* \(1\) model\.activation_checkpointing: selective"
    ):
        measure_step_memory(open_setup(config))


def test_answers_keep_the_blocks_gathered_if_they_take_half_of_the_free_memory_at_most(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    @contextmanager
    def gathered_blocks(_: object, fits: Callable[[int], bool]) -> Iterator[None]:
        half = (MEMORY + 2 * 10**9) // 2  # of 80 GB that are free, and 2 of the reserved 3 GB that are not allocated
        asked.extend([fits(half), fits(half + 1)])
        yield

    monkeypatch.setattr(evaluation, "gathered_blocks", gathered_blocks)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(chat_line("What is 3?") + "\n", encoding="utf-8")
    options = {"evaluation__prompts": str(prompts), "evaluation__max_new_tokens": 2, "tokens__train_steps": 1}
    with pretended_gpu():
        open_trainer(make_config(tmp_path, model_folder, **options)).train()
    assert asked == [True, False] * 2


@pytest.mark.parametrize("variable", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_of_gpu_memory_can_grow_unless_the_user_has_set_the_allocator(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", made.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "max_split_size_mb:512")
    start_ranks()
    assert made == []  # on the CPU
    with pretended_gpu():
        start_ranks()
    assert made == ([] if variable else ["expandable_segments:True"])


def test_a_step_on_a_gpu_states_the_reserved_memory_too(config: Config) -> None:
    with pretended_gpu():
        trainer = open_trainer(config)
        trainer.train()
    assert [(line["peak_memory_gb"], line["peak_reserved_gb"]) for line in metrics(trainer.directory.folder)] == [
        (2, 3)
    ] * 2


def test_a_run_whose_float32_is_tf32_says_so(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    with pretended_gpu():
        setup = open_setup(config)
        for precision in ("highest", "high"):
            monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
            said.append(any("TF32" in text for _, text in description._model_lines(setup)))
    assert said == [False, True]


def test_a_deterministic_run_does_not_fill_new_memory(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        open_setup(make_config(tmp_path, model_folder, general__deterministic=True))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_copy_for_a_save_in_the_background_is_one_pinned_buffer_a_kind() -> None:
    with pretended_gpu() as gpu:
        tensors = {
            "a": torch.arange(5.0, device=gpu.device),
            "b": torch.zeros((), device=gpu.device),
            "c": torch.arange(7, dtype=torch.uint8, device=gpu.device),
            "d": torch.arange(12.0, device=gpu.device).to(torch.bfloat16).view(3, 4).T,
            "e": torch.zeros(0, 3, device=gpu.device),
        }
        shards = {name: Shard(each, (0,) * each.ndim, tuple(each.shape)) for name, each in tensors.items()}
        copy = HostCopy()
        for _ in range(2):
            gpu.reset()
            taken = copy.take({"model": shards, "optimizer": {"a": shards["a"]}})
            assert not gpu.waits
            assert sorted(gpu.pinned.values()) == [64, 4 * 64]
        assert copy.take({"empty": {"e": shards["e"]}})["empty"]["e"].tensor.shape == (0, 3)
        for name, each in tensors.items():
            assert taken["model"][name].tensor.equal(each.cpu())
        assert taken["optimizer"]["a"].tensor.tolist() == [0, 1, 2, 3, 4]
        smaller = copy.take({"model": {"a": shards["a"]}})
        del taken
        assert sorted(gpu.pinned.values()) == [64, 64]
        assert smaller["model"]["a"].tensor.tolist() == [0, 1, 2, 3, 4]
