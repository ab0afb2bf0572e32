"""A frozen base that streams from its files trains the bits of one in memory, and ends clearly if a file fails."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sftron.checkpoint import frozen_files
from sftron.checkpoint.adapter import model_projections
from sftron.checkpoint.frozen_files import NF4_FACTS, NF4_FILE, FrozenFiles, FrozenWeightsError
from sftron.checkpoint.hf_weights import StreamedBase, load_model
from sftron.checkpoint.model_folder import read_config
from sftron.commands.train import run as main
from sftron.config import Config, load_config
from sftron.data.loader import collate
from sftron.data.packing import lay_out
from sftron.data.types import Batch
from sftron.models.adapters import AdapterStart, LoraSpec
from sftron.models.generation import greedy_generate
from sftron.models.llama import ACTIVATION_CHECKPOINTING, LlamaForSFT
from sftron.models.quantization import NF4
from sftron.models.weight_stream import WeightStream
from sftron.train import build_run
from sftron.train.objective import loss_of
from sftron.train.optimizer import make_by_name
from sftron.train.step import train_step
from tests.conftest import rest_nightly
from tests.models.reference import FAMILIES, make_reference
from tests.train.killed_run import run_killed
from tests.train.ranks import launch, train
from tests.train.runs import chat_line, make_config, make_model_folder, metrics, on_each_step, opened, run, write_rows
from tools.bench_step import random_rows

NUM_STEPS, FEW_STEPS = 20, 4
WAYS = ("LoRA", "DoRA", "NF4")
KINDS = {
    "norm_before": ("Llama 3", "full"),
    "norm_after": ("OLMo 2", "none"),
    "norm_around": ("Gemma 2", "selective"),
    "parallel": ("Phi 1.5, 2", "selective"),
    "delta": ("Qwen 3.5", "full"),
    "gemma4": ("Gemma 4 E2B", "none"),
    "short_convolution": ("LFM2 with biases, untied", "selective"),
    "mixture": ("Qwen 3 MoE with dense layers", "none"),
}
"""A family with each kind of block, and the activation checkpointing with which it is tried by day."""
LISTS = {"layer_types", "no_rope_layers", "mlp_layer_types"}
"""The keys with an entry for each layer."""
WHOLE_BLOCKS = {"hidden_size": 64, "intermediate_size": 128}
"""NF4 rounds blocks of 64 weights."""
WHOLE_IF_THERE = dict.fromkeys(("head_dim", "global_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16)
WHOLE_IF_THERE |= {"v_head_dim": 16, "hidden_size_per_layer_input": 64, "block_multiple_of": 64}
WHOLE_IF_THERE |= {"q_lora_rank": 64, "kv_lora_rank": 64, "shared_intermediate_size": 64}
NOT_IN_NF4 = {"Cohere": "nf4 rounds blocks of 64 weights, but a row of .*q_norm.weight has 16"}
BY_DAY = [(*KINDS[kind], way) for kind in KINDS for way in WAYS if (kind, way) != ("mixture", "NF4")]
EVERY = dict.fromkeys([*BY_DAY, *product(FAMILIES, ("none", "full"), WAYS)])


def make_folder(folder: Path, family: str, *, for_nf4: bool = False) -> Path:
    """A model of more layers than there are buffers, and an odd number of them if that can be."""
    options = dict(FAMILIES[family])
    if not options.get("model_type", "").startswith("gemma4"):
        lists = LISTS & options.keys()
        options |= {key: [*options[key]] * 2 for key in lists}
        options["num_hidden_layers"] = len(options[min(lists)]) if lists else 5
    if for_nf4:
        # The factors of Phi 4 mini are for heads of 8.
        heads = {"num_attention_heads": 8 if {"partial_rotary_factor", "rope_scaling"} <= options.keys() else 4}
        options |= WHOLE_BLOCKS | heads | {key: size for key, size in WHOLE_IF_THERE.items() if options.get(key)}
    make_reference(**options).save_pretrained(folder)
    return folder


def load(folder: Path, way: str, mode: str, *, streams: bool, dtype: torch.dtype = torch.float32) -> LlamaForSFT:
    config = read_config(folder)
    names = model_projections(config)
    spec = LoraSpec(ranks=dict.fromkeys(names, 4), alphas=dict.fromkeys(names, 8.0), dora=way == "DoRA")
    return load_model(
        folder,
        "sdpa",
        dtype,
        256,
        mode,
        adapters=AdapterStart(spec=spec),
        frozen_dtype=NF4 if way == "NF4" else dtype,
        stream=StreamedBase(folder, "its digest") if streams else None,
    )


def steps(model: LlamaForSFT, num_steps: int = NUM_STEPS) -> tuple[str, float | None]:
    """Trains; the digest of the adapters, of the optimizer's state, of an evaluation and an answer, and the loss."""
    settings: dict[str, Any] = {"learning_rate": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer, loss = make_by_name(model.named_parameters(), **settings), None
    batch = _batch(model)
    for _ in range(num_steps):
        loss = train_step(model, optimizer, [batch, batch], max_grad_norm=1.0).loss
    with torch.no_grad():
        evaluated = loss_of(model, batch)
    answer = greedy_generate(model, [1, 2, 3], 3, ())
    found = hashlib.sha256(repr((evaluated.item(), answer)).encode())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for key, value in {"": parameter.detach(), **optimizer.state[parameter]}.items():
                found.update(f"{name} {key}".encode() + value.numpy().tobytes())
    return found.hexdigest(), loss


def _batch(model: LlamaForSFT) -> Batch:
    rows = random_rows([25, 12], model.config.vocab_size)
    return collate(lay_out(rows, token_budget=40, remove_cross_attention=True, pad_id=0), keep_tail=True)


# --- The same bits ---


@pytest.mark.parametrize("case", rest_nightly(EVERY, BY_DAY), ids=", ".join)
def test_a_streamed_base_trains_evaluates_and_answers_with_the_bits_of_a_resident_one(
    tmp_path: Path, case: tuple[str, str, str]
) -> None:
    family, mode, way = case
    folder = make_folder(tmp_path, family, for_nf4=way == "NF4")
    if way == "NF4":
        pytest.importorskip("bitsandbytes")
        refusal = "nf4 is not implemented for experts" if read_config(folder).mixture is not None else ""
        if refusal := refusal or NOT_IN_NF4.get(family, ""):
            with pytest.raises(ValueError, match=refusal):
                load(folder, way, mode, streams=True)
            return
    resident, streamed = (load(folder, way, mode, streams=streams) for streams in (False, True))
    assert streamed.stream is not None
    before = {path: path.read_bytes() for path in folder.glob("*.safetensors")}
    num_steps = NUM_STEPS if case == BY_DAY[0] or case not in BY_DAY else FEW_STEPS
    expected = steps(resident, num_steps)
    assert steps(streamed, num_steps) == expected
    assert expected[1] is not None
    assert math.isfinite(expected[1])
    for name in streamed.stream.names:
        assert streamed.get_parameter(name).untyped_storage().nbytes() <= max(streamed.stream.buffer_bytes // 2, 4)
    assert {path: path.read_bytes() for path in before} == before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), "Llama 3")


@pytest.mark.parametrize("mode", ACTIVATION_CHECKPOINTING)
def test_the_types_of_file_computation_and_base_may_differ(tmp_path: Path, folder: Path, mode: str) -> None:
    tensors = {name: each.bfloat16() for name, each in load_file(folder / "model.safetensors").items()}
    shutil.copytree(folder, tmp_path / "model")
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    for dtype in (torch.float32, torch.bfloat16):
        found = [
            steps(load(tmp_path / "model", "LoRA", mode, streams=streams, dtype=dtype), FEW_STEPS)
            for streams in (False, True)
        ]
        assert found[0] == found[1]


def test_a_step_reads_each_block_as_often_as_it_says_and_keeps_two(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = load(folder, "LoRA", "none", streams=True), []
    fill = FrozenFiles.fill

    def counted(self: FrozenFiles, name: str, out: Tensor) -> None:
        read.append((int(name.split(".")[2]), out.nbytes))
        fill(self, name, out)

    monkeypatch.setattr(FrozenFiles, "fill", counted)
    stream = model.stream
    assert stream is not None
    stream.close()
    steps_of = partial(loss_of, model, _batch(model))
    orders = []
    for _ in range(2):
        read.clear()
        steps_of().backward()
        stream.close()
        orders.append([number for n, (number, _) in enumerate(read) if not n or read[n - 1][0] != number])
    assert orders == [[0, 1, 2, 3, 4, 2, 1, 0], [2, 3, 4, 2, 1, 0]]
    assert sum(size for _, size in read) == stream.bytes_per_pass
    assert stream.waited > 0
    matrices = [model.get_parameter(name) for name in stream.names]
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in matrices}
    assert sum(held.values()) <= stream.buffer_bytes + 4 * len(matrices)
    assert sum(held.values()) <= stream.buffer_bytes


# --- Broken on purpose ---


def _wrong_block(patch: pytest.MonkeyPatch) -> None:
    read = WeightStream._read
    patch.setattr(WeightStream, "_read", lambda self, block, *rest: read(self, max(0, block - 1), *rest))


def _stale_buffer(patch: pytest.MonkeyPatch) -> None:
    """A block that was fetched once is not fetched again."""
    read, seen = WeightStream._read, set[int]()

    def once(self: WeightStream, block: int, *rest: Any) -> Any:
        if block not in seen:
            seen.add(block)
            return read(self, block, *rest)
        return None

    patch.setattr(WeightStream, "_read", once)


def _before_the_copy_is_done(patch: pytest.MonkeyPatch) -> None:
    """The first block computes with its buffer before anything is read into it."""
    read, forward, has_computed = WeightStream._read, WeightStream._forward, threading.Event()

    def late(self: WeightStream, *arguments: Any) -> Any:
        assert has_computed.wait(60)
        return read(self, *arguments)

    def eager(self: WeightStream, *arguments: Any) -> Tensor:
        if not has_computed.is_set():
            for buffer in self.buffers:
                buffer.zero_()  # it might hold the same weights by chance, from a model that is gone
        try:
            return forward(self, *arguments)
        finally:
            has_computed.set()

    patch.setattr(WeightStream, "_read", late)
    patch.setattr(WeightStream, "_forward", eager)
    patch.setattr(WeightStream, "_wait", lambda self: None)


def _buffer_in_use(patch: pytest.MonkeyPatch) -> None:
    """The next block is fetched into the buffer of the current one."""
    fetch = WeightStream._fetch

    def same_slot(self: WeightStream, block: int, slot: int) -> None:
        fetch(self, block, slot)
        assert self._pending is not None
        self._pending.result()
        self._read(block, self.buffers[1 - slot], None)

    patch.setattr(WeightStream, "_fetch", same_slot)


def _kept_view(patch: pytest.MonkeyPatch) -> None:
    """The backward pass keeps views of a buffer, whose content is then another block's."""
    patch.setattr(WeightStream, "_pack", lambda self, block, saved: saved)


@pytest.mark.parametrize(
    "break_it", [_wrong_block, _stale_buffer, _before_the_copy_is_done, _buffer_in_use, _kept_view]
)
def test_a_stream_that_is_broken_on_purpose_gives_other_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None]
) -> None:
    expected = steps(load(folder, "LoRA", "none", streams=False), FEW_STEPS)
    break_it(monkeypatch)
    assert steps(load(folder, "LoRA", "none", streams=True), FEW_STEPS) != expected


def test_a_matrix_that_is_not_fetched_is_not_a_number(folder: Path) -> None:
    model = load(folder, "LoRA", "full", streams=True, dtype=torch.bfloat16)
    assert model.stream is not None
    assert len(model.stream.names) == 5 * 4 + 1
    for name in model.stream.names:
        assert model.get_parameter(name).isnan().all(), name


# --- Files that fail ---


def _shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def _changed(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"1234")
    os.utime(path, ns=(0, 0))


def _changed_unnoticed(path: Path) -> None:
    """Other weights in the same size, under the old mtime."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"1234")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _gone(_: Path) -> None:
    """What the system says of a disk that is gone."""


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (_shorter, "ends at byte|changed while"),
        (_changed, "changed while"),
        (_changed_unnoticed, "changed while"),
        (_gone, "cannot be read at byte"),
    ],
)
def test_a_file_that_fails_ends_the_step_with_its_name_and_the_remedy(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[[Path], None], message: str
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    model = load(tmp_path / "model", "LoRA", "full", streams=True)
    before = {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}
    steps(model, 0)
    fail(tmp_path / "model" / "model.safetensors")
    if fail is _gone:

        def failing(*_: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(FrozenWeightsError, match=message) as raised:
        steps(model, 1)
    assert "model.safetensors" in str(raised.value)
    assert "repeat the command to continue" in str(raised.value)
    assert all(value.equal(model.get_parameter(name)) for name, value in before.items())


def test_matrices_in_nf4_are_stored_once_and_again_if_they_are_damaged_or_of_another_base(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = make_folder(tmp_path, "Llama 3", for_nf4=True)
    expected = steps(load(folder, "NF4", "full", streams=True), 1)
    path, facts = folder / NF4_FILE, folder / NF4_FACTS
    stored, made = path.read_bytes(), path.stat().st_mtime_ns
    assert hashlib.sha256(stored).hexdigest() == json.loads(facts.read_text())["sha256"]

    def is_made_again() -> bool:
        nonlocal made
        before, found = made, steps(load(folder, "NF4", "full", streams=True), 1)
        assert (found, path.read_bytes()) == (expected, stored)
        made = path.stat().st_mtime_ns
        return made != before

    assert not is_made_again()
    path.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))
    assert is_made_again()
    facts.write_text(facts.read_text().replace("its digest", "another"))
    assert is_made_again()
    facts.unlink()
    assert is_made_again()
    assert not is_made_again()


# --- Whole runs ---

RUN: dict[str, Any] = {
    "lora__rank": 4,
    "optimizer__schedule": "constant",
    "tokens__train_steps": 6,
    "checkpoints__interval": 3,
    "checkpoints__async": False,
    "evaluation__share": 0.1,
    "evaluation__interval": 3,
    "evaluation__max_new_tokens": 4,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "LoRA": {"model__activation_checkpointing": "full"},
    "DoRA": {"lora__dora": True},
    "NF4": {"model__frozen_dtype": "nf4"},
}
CONTEXT = {"model__activation_checkpointing": "selective", "parallelism__context": 2}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5}
    return make_model_folder(tmp_path_factory.mktemp("model of runs"), **options)


def _config(tmp_path: Path, run_folder: Path, base: str, **options: Any) -> Config:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(chat_line("What is 3?") + "\n")
    named = {"general__run_name": base, "evaluation__prompts": str(prompts), "model__frozen_base": base}
    return make_config(tmp_path, run_folder, **RUN | named | options)


def _results(folder: Path) -> dict[str, Any]:
    """What a run leaves that a stream may not change: its adapters and moments, its merge, its losses and answers."""
    files = [*folder.glob("checkpoints/step-6/*.safetensors"), *folder.glob("*/step-6/*.safetensors")]
    evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    return {
        "files": {str(each.relative_to(folder)): hashlib.sha256(each.read_bytes()).hexdigest() for each in files},
        "losses": [(line["loss"], line["grad_norm"]) for line in metrics(folder)],
        "evaluations": [(each["sets"], each["answers"]) for each in evaluations],
    }


@pytest.mark.parametrize("way", OPTIONS)
def test_a_streamed_run_is_killed_resumed_evaluated_and_exported_with_the_same_bits(
    tmp_path: Path, run_folder: Path, way: str
) -> None:
    if way == "NF4":
        pytest.importorskip("bitsandbytes")
    write_rows(tmp_path / "rows.jsonl", 200)
    before = threading.enumerate()  # other tests' models may not be collected yet
    resident = run(_config(tmp_path, run_folder, "resident", **OPTIONS[way]))
    config = _config(tmp_path, run_folder, "stream", **OPTIONS[way])
    run_killed(tmp_path / "config.yaml", 5, "in the step")
    assert metrics(config.run_dir)[-1]["step"] == 4
    streamed = run(config)
    expected, found = _results(resident.directory.folder), _results(streamed.directory.folder)
    assert len(expected["files"]) == 4
    assert len(expected["evaluations"]) == 3
    assert found == expected
    assert not [each for each in threading.enumerate() if each.name.startswith("weights") and each not in before]
    assert all(line["weights_seconds"] > 0 for line in metrics(streamed.directory.folder))
    assert all(line["weights_seconds"] is None for line in metrics(resident.directory.folder))
    assert (streamed.directory.folder / NF4_FILE).exists() == (way == "NF4")


@pytest.mark.parametrize("way", rest_nightly([*OPTIONS, "context"], ["NF4"]))
def test_ranks_that_stream_have_the_bits_of_ranks_that_do_not(tmp_path: Path, run_folder: Path, way: str) -> None:
    if way == "NF4":
        pytest.importorskip("bitsandbytes")
    write_rows(tmp_path / "rows.jsonl", 200)
    found = []
    for base in ("resident", "stream"):
        options = {"tokens__batch_accumulation_per_replica": 1, "parallelism__timeout_seconds": 60}
        config = _config(tmp_path, run_folder, base, **OPTIONS.get(way, CONTEXT) | options)
        for ended in launch(2, train, tmp_path / "config.yaml", folder=tmp_path):
            assert ended.exit_code == 0, ended.err[-3000:]
        found.append(_results(config.run_dir))
    assert len(found[0]["files"]) == 6
    assert found[1] == found[0]


def test_a_run_whose_base_changes_saves_its_last_step_and_goes_on_once_it_is_restored(
    tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "rows.jsonl", 200)
    shutil.copytree(run_folder, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    resident = run(_config(tmp_path, tmp_path / "model", "resident"))
    config = _config(tmp_path, tmp_path / "model", "stream")
    stamp = weights.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        on_each_step(patch, lambda step: os.utime(weights, ns=(0, 0)) if step == 5 else None)
        assert main(["--config", str(tmp_path / "config.yaml")]) == 2
    assert f"{weights} changed while the run streamed its weights" in capsys.readouterr().err
    assert "FrozenWeightsError" in json.loads((config.run_dir / "result.json").read_text())["error"]
    assert sorted(each.name for each in (config.run_dir / "checkpoints").iterdir()) == ["step-3", "step-4"]
    os.utime(weights, ns=(stamp, stamp))
    streamed = run(config)
    assert _results(streamed.directory.folder)["files"] == _results(resident.directory.folder)["files"]


@pytest.mark.parametrize("way", ["LoRA", "NF4"])
def test_a_base_that_changes_between_its_digest_and_its_streaming_is_refused(
    tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Of the bytes in NF4, nothing may be kept under the digest of the base before."""
    if way == "NF4":
        pytest.importorskip("bitsandbytes")
    write_rows(tmp_path / "rows.jsonl")
    shutil.copytree(run_folder, tmp_path / "model")
    weights, digest = tmp_path / "model" / "model.safetensors", build_run.base_digest

    def changed_after(*arguments: Any) -> Any:
        found = digest(*arguments)
        _changed_unnoticed(weights)
        return found

    monkeypatch.setattr(build_run, "base_digest", changed_after)
    config = _config(tmp_path, tmp_path / "model", "stream", **OPTIONS[way])
    with pytest.raises(ValueError, match=f"{weights} changed after the run had computed its digest"):
        opened(config)
    assert not (config.run_dir / NF4_FACTS).exists()


def _no_space(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_nf4_weights_that_cannot_be_stored_end_the_start_clearly_and_lose_nothing(
    tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options
) -> None:
    pytest.importorskip("bitsandbytes")
    write_rows(tmp_path / "rows.jsonl", 200)
    path = _config(tmp_path, run_folder, "stream", **OPTIONS["NF4"]).run_dir / NF4_FILE
    arguments = ["--config", str(tmp_path / "config.yaml")]

    def fills_the_disk(begun: Path, *rest: Any) -> Any:
        begun.write_bytes(b"begun")
        return _no_space()

    with monkeypatch.context() as patch:
        patch.setattr(frozen_files, "write_tensors", fills_the_disk)
        assert main([*arguments, *options]) == 2
    refusal = capsys.readouterr().err
    assert re.search(f"cannot store the weights in NF4 in .*{NF4_FILE}: No space left .* bytes", refusal)
    assert not path.exists()
    if not options:
        path.mkdir()
        assert main(arguments) == 2
        assert f"cannot store the weights in NF4 in {path}: Is a directory" in capsys.readouterr().err
        path.rmdir()
        assert main(arguments) == 0


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_base_that_cannot_be_read_at_the_start_is_refused_by_its_name(
    tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options
) -> None:
    write_rows(tmp_path / "rows.jsonl", 200)
    _config(tmp_path, run_folder, "stream")
    monkeypatch.setattr(os, "preadv", _no_space)
    assert main(["--config", str(tmp_path / "config.yaml"), *options]) == 2
    assert f"{run_folder / 'model.safetensors'}: cannot be read at byte" in capsys.readouterr().err


@pytest.mark.parametrize("change", [_changed_unnoticed, None])
def test_an_nf4_file_that_changes_between_its_digest_and_its_streaming_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None] | None
) -> None:
    pytest.importorskip("bitsandbytes")
    folder, is_intact = make_folder(tmp_path, "Llama 3", for_nf4=True), frozen_files._is_intact
    load(folder, "NF4", "none", streams=True)

    def changed_after(path: Path, *rest: Any) -> bool:
        found = is_intact(path, *rest)
        if change:
            change(path)
        return found

    monkeypatch.setattr(frozen_files, "_is_intact", changed_after)
    with pytest.raises(ValueError, match=f"{NF4_FILE} changed after") if change else nullcontext():
        load(folder, "NF4", "none", streams=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--lora=null", "model.frozen_base: is stream, but without lora no weight is frozen"),
        (
            "--model.compile=on",
            "model.frozen_base: is stream, but compiled blocks cannot follow weights",
        ),
    ],
)
def test_what_cannot_stream_is_refused_by_name(tmp_path: Path, run_folder: Path, override: str, message: str) -> None:
    _config(tmp_path, run_folder, "stream")
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path / "config.yaml", [override])


def test_weights_of_a_streamed_base_that_are_not_finite_are_refused_at_the_start(
    tmp_path: Path, run_folder: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl")
    shutil.copytree(run_folder, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.3.mlp.up_proj.weight"):
        weights[name][-1, -1] = torch.inf
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"not finite .*model.embed_tokens.weight, model.layers.3.mlp.gate_up_proj"):
        opened(_config(tmp_path, tmp_path / "model", "stream"))
