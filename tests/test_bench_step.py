"""The benchmark of whole steps runs, compares equals, and refuses what is not. Nothing here looks at a time."""

import json
import math
import random
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from sftron.data.types import IGNORE_INDEX
from tests.conftest import ASSETS, ROOT
from tools import bench_gpu, bench_step
from tools.bench import conversations, lengths, measure, models, packs
from tools.bench.conversations import IdEncoder, Row, TextEncoder
from tools.bench.measure import DifferentLossesError, Timed, take_turns
from tools.bench.ways import StepBatch, flatten, pad_to_longest, pool

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of so small a model mostly wait for each other, and on a busy machine ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parse(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Namespace:
    monkeypatch.setattr("sys.argv", ["bench_step.py", "--quick", *arguments])
    return bench_step.parse_arguments()


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    return parse(monkeypatch)


@pytest.fixture
def corpus(options: Namespace) -> lengths.Corpus:
    (made,) = lengths.make_corpora(options)
    return made


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    rows = [{"question": f"Add {n}? " * (n % 3 + 1), "answer": f"{n + n}."} for n in range(50)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Everything that was measured, and the report."""
    found, report = tmp_path / "out.json", tmp_path / "report" / "out.md"
    command = ["bench_step.py", "--quick", *arguments, f"--json={found}", f"--out={report}"]
    monkeypatch.setattr("sys.argv", command)
    assert bench_step.main() == 0
    return json.loads(found.read_text(encoding="utf-8")), report.read_text(encoding="utf-8")


# --- Runs ---


def test_speed_and_loss_are_measured_of_every_way_and_said_beside_what_is_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chats: Path
) -> None:
    text = ["--tokenizer", str(ASSETS / "tokenizer"), "--conversations", str(chats)]
    found, report = run(monkeypatch, tmp_path, *text, "--parts", "speed", "loss")

    for name in ("flan", "file"):
        speed, curves = found["speed"][name], found["loss"][name]["curves"]
        assert set(speed["ways"]) == set(speed["seconds"]) == set(lengths.NAMES) < set(curves)
        assert all(len(seconds) == 2 for seconds in speed["seconds"].values())
        assert max(each["difference"] for each in speed["same losses"].values()) < measure.LARGEST_DIFFERENCE
        starts, ends = ({way: curve[end] for way, curve in curves.items()} for end in (0, -1))
        # Each conversation once, whatever it was packed with.
        assert len({each["tokens"] for each in ends.values()}) == 1
        assert len({round(each["loss"], 2) for each in starts.values()}) == 1
        assert all(ends[way]["loss"] < starts[way]["loss"] for way in curves)
        targets = [*speed["targets"], *found["loss"][name]["targets"]]
        assert len(targets) == 4 + 3
        assert all(target in report for target in targets)
        assert (tmp_path / "report" / f"step-loss-{name}.png").stat().st_size > 1000
    assert all(way in report for way in (*lengths.NAMES, "use_cache=True"))


def test_whole_steps_in_packs_run_without_a_gpu_and_say_what_was_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found, report = run(monkeypatch, tmp_path, "--parts", "packs", "--peak-tflops", "0.5")

    (each,) = found["packs"].values()
    ours = {name for name in each["ways"] if name.startswith("sftron")}
    assert {"sftron, compile off, checkpointing none", "sftron, compile on, checkpointing none"} <= ours
    assert {packs.THEIRS, packs.THEIRS_COMPILED} <= each["ways"].keys() - ours
    assert packs.LIGER in each["left out"]
    assert each["interleaved"]
    for name, way in each["ways"].items():
        assert way["tokens/step"] == 64, name
        assert way["computed/real"] == 1, name
        assert way["mfu"] == pytest.approx(way["TFLOP/s"] / 0.5), name
        assert name in report
    assert all(name in report for name in (*each["left out"], *each["targets"]))


@pytest.mark.slow
def test_memory_is_measured_in_a_process_for_each_way(tmp_path: Path) -> None:
    """Of a shape whose logits dwarf all else: padding holds more of them."""
    found = tmp_path / "out.json"
    command = [sys.executable, "tools/bench_step.py", "--shape", "small", "--parts", "memory", "--per-step", "8"]
    command += ["--longest", "600", "--rounds", "2", f"--json={found}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)

    assert ended.returncode == 0, ended.stderr
    memory = json.loads(found.read_text(encoding="utf-8"))["memory"]["flan"]
    assert set(memory["ways"]) == set(lengths.NAMES)
    assert all(each["peak"] > each["weights"] > 0 for each in memory["ways"].values())
    assert memory["ways"][lengths.PADDING]["peak"] > memory["ways"][lengths.POOL]["peak"]


def test_what_cannot_be_used_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, said in (
        (["--lengths", "file"], "--lengths file needs --conversations FILE"),
        (["--conversations", "nowhere.jsonl", "--tokenizer", str(ASSETS / "tokenizer")], "nowhere.jsonl"),
    ):
        monkeypatch.setattr("sys.argv", ["bench_step.py", "--quick", *arguments])
        assert bench_step.main() == 2
        assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match="shape 'huge' is not one of tiny, small"):
        models.shape_of("huge")


# --- Equals ---


def test_flattened_documents_that_see_each_other_are_refused_though_their_mean_loss_is_the_same(
    options: Namespace, corpus: lengths.Corpus
) -> None:
    ways = {way.name: way for way in lengths.make_ways(options, corpus, (*lengths.NAMES, lengths.LEAKING))}
    rows = corpus.rows[:4]
    leaking = ways.pop(lengths.LEAKING)
    honest = measure.require_same_losses([*ways.values()], rows)

    assert max(each["difference"] for each in honest.values()) < measure.LARGEST_DIFFERENCE / 3
    with pytest.raises(DifferentLossesError, match=r"use_cache=True does not compute what .* dynamic padding does"):
        measure.require_same_losses([ways[lengths.PADDING], leaking], rows)
    leaked = measure.differences([ways[lengths.PADDING], leaking], rows)[lengths.LEAKING]
    assert leaked["loss"] == pytest.approx(honest[lengths.PADDING]["loss"], rel=0.01)


def test_a_step_whose_loss_is_not_that_of_its_tokens_is_refused() -> None:
    checked = {"compiled": {"loss": 2.0, "difference": 0.0}}
    packs._require_the_loss_of_tokens({"compiled": 2.01}, checked)
    for loss in (2.03, math.nan):
        with pytest.raises(DifferentLossesError, match=r"compiled: .* 2\.0000 is the mean"):
            packs._require_the_loss_of_tokens({"compiled": loss}, checked)


def test_both_sides_encode_a_conversation_to_the_same_ids_and_targets(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = [Row((("user", f"What is {n}?"), ("assistant", "One more. " * n))) for n in range(1, 6)]
    ids = conversations.id_rows([5, 9, 2], 100, random.Random(0))
    for encoder, rows in ((TextEncoder(tokenizer), texts), (IdEncoder(), ids)):
        for ours, theirs in zip(encoder.ours(rows), encoder.theirs(rows), strict=True):
            assert ours.input_ids.tolist() == theirs["input_ids"]
            # Theirs are shifted by the model.
            assert ours.labels.tolist() == [*theirs["labels"][1:], IGNORE_INDEX]
            assert 0 < sum(label != IGNORE_INDEX for label in theirs["labels"]) < len(theirs["labels"])


def test_flan_like_lengths_have_the_median_and_the_tail_and_text_is_cut_to_them(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    drawn = conversations.flan_lengths(4000, random.Random(0))
    assert 90 < median(drawn) < 110
    assert 1.7 < fmean(drawn) / median(drawn) < 2.1
    assert max(drawn) == conversations.LONGEST

    texts = [Row((("user", "How many are there? " * 40), ("assistant", "There are seven of them. " * 40)))] * 20
    rows = conversations.flan_like_rows(texts, 60, tokenizer, random.Random(1), longest=500)
    wanted = conversations.flan_lengths(60, random.Random(1), 500)
    found = [len(each) for each in TextEncoder(tokenizer).ours(rows)]
    assert 0.8 < fmean(found) / fmean(wanted) < 1.25
    assert max(found) < 520


def test_no_way_gets_a_conversation_that_a_pack_of_the_mean_budget_cannot_hold() -> None:
    rows = conversations.id_rows([10] * 30 + [200, 46], 50, random.Random(0))
    kept, budget = conversations.within_budget(rows, IdEncoder(), 4)

    assert (len(kept), budget) == (30, 40)
    assert conversations.within_budget(kept, IdEncoder(), 4) == (kept, budget)


def test_the_pool_deals_every_conversation_once_and_fills_its_packs() -> None:
    draw = random.Random(0)
    rows = conversations.id_rows([draw.randint(2, 60) for _ in range(500)], 50, draw)
    labeled = IdEncoder().ours(rows)
    dealt = list(pool(100)(iter(labeled)))

    assert sorted(map(id, labeled)) == sorted(id(each) for pack in dealt for each in pack)
    sizes = [sum(map(len, pack)) for pack in dealt]
    assert max(sizes) <= 100
    assert fmean(sizes[:-20]) > 99


def test_padding_has_a_mask_where_it_pads_and_flattening_restarts_positions() -> None:
    features = IdEncoder().theirs([Row(input_ids=(1, 2, 3), num_prompt=1), Row(input_ids=(4, 5), num_prompt=1)])

    padded = {name: tensor.tolist() for name, tensor in pad_to_longest(features).items()}
    assert padded == {
        "input_ids": [[1, 2, 3], [4, 5, 0]],
        "labels": [[-100, 2, 3], [-100, 5, -100]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
    }
    assert set(pad_to_longest(features[:1] * 2)) == {"input_ids", "labels"}
    flat = flatten(features)
    assert flat["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert flat["labels"].tolist() == [[-100, 2, 3, -100, 5]]


def test_a_model_that_shares_weights_trains_the_very_same_parameters(options: Namespace) -> None:
    first = models.make_ours(models.make_theirs(None, models.shape_of("tiny"), CPU, 0), 64)
    other = models.sharing_weights(first, "full")

    pairs = dict(other.named_parameters())
    assert pairs.keys() == dict(first.named_parameters()).keys()
    assert all(pairs[name] is parameter for name, parameter in first.named_parameters())


# --- Timing ---


class Turn:
    """A way that writes down when it is asked for what; a step takes no time."""

    is_ours, num_parameters = False, 0

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def batches(self, rows: Any) -> Iterator[StepBatch]:
        for row in rows:
            self._log.append(f"{self.name} takes {row}")
            yield StepBatch(None, 10, 5, 20, (10,))

    def step(self, batch: StepBatch) -> float:
        self._log.append(f"{self.name} steps")
        return 1.0

    def token_losses(self, rows: Sequence[Row]) -> torch.Tensor:
        raise AssertionError


def test_ways_take_turns_over_the_same_rows_after_a_warm_up_that_is_not_timed() -> None:
    log: list[str] = []
    rows: Any = ["r1", "r2"]
    ways = [Turn("A", log), Turn("B", log)]
    timed = take_turns(ways, rows, 3, CPU, [["w"]], between=lambda: log.append("round"))  # type: ignore[list-item]

    def turn(name: str, row: str) -> list[str]:
        return [f"{name} takes {row}", f"{name} steps"]

    rounds = [["round", *turn("A", row), *turn("B", row)] for row in ("r1", "r2", "r1")]
    assert log == [*turn("A", "w"), *turn("B", "w"), *(line for each in rounds for line in each)]
    assert [len(each.seconds) for each in timed.values()] == [3, 3]


def test_rates_count_real_tokens_and_all_seconds() -> None:
    timed = Timed()
    for seconds, tokens, positions in ((1.0, 100, 400), (2.0, 100, 100), (1.0, 300, 300)):
        timed.add(seconds, StepBatch(None, tokens, 1, positions, (tokens,)))
    summary = measure.summary(timed)

    assert summary["tokens/s"] == 500 / 4
    assert (summary["lowest"], summary["median"], summary["quartiles"]) == (50, 100, [75, 200])
    assert summary["computed/real"] == 800 / 500


def test_a_target_is_missed_just_below_it() -> None:
    def reached(minibatch: float) -> list[bool]:
        rates = dict(zip(lengths.NAMES, (100.0, 150.0, minibatch, 500.0), strict=True))
        return [*lengths.speed_targets("flan", {"ways": {n: {"tokens/s": r} for n, r in rates.items()}}).values()]

    assert reached(200.0) == [True] * 4
    assert reached(199.0) == [False, True, True, True]
    assert reached(179.0) == [False, True, False, True]
    peaks = dict(zip(lengths.NAMES, ({"peak": peak} for peak in (10.0, 9.0, 7.9, 8.1)), strict=True))
    assert [*lengths.memory_targets("flan", peaks).values()] == [True, False]


# --- On a GPU machine ---


def test_the_way_to_a_gpu_needs_neither_torchdata_nor_pydantic_nor_datasets() -> None:
    folders = ("tests/kernels", "tests/models")
    paths = sorted(path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).glob("*.py"))
    modules = [".".join(path.with_suffix("").parts) for path in paths]
    code = (
        "import sys, importlib\n"
        "sys.path[:0] = ['src', '.']\n"
        "for name in ('torchdata', 'pydantic', 'pydantic_core', 'datasets', 'wandb', 'matplotlib', 'liger_kernel'):\n"
        "    sys.modules[name] = None\n"
        f"for name in {['tools.bench_step', 'tools.bench_gpu', 'tests.conftest', *modules]!r}:\n"
        "    importlib.import_module(name)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)

    assert len(modules) > 5
    assert ended.returncode == 0, ended.stderr


def test_all_parts_run_though_one_fails_and_one_never_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "new" / "gpu.md"
    monkeypatch.setattr("sys.argv", ["bench_gpu.py", f"--out={report}", "--without-gpu"])
    well = (["-c", "print('all is well')"], 60)
    fails = (["-c", "print('half of it'); raise SystemExit(3)"], 60)
    stays = (["-c", "import time; print('begun', flush=True); time.sleep(60)"], 3)

    assert bench_gpu.main({"First": well, "Second": fails, "Third": stays, "Fourth": well}) == 1
    text = report.read_text(encoding="utf-8")
    said = ["# First", "all is well", "# Second", "FAILED with exit status 3", "half of it"]
    said += ["# Third", "FAILED: given up after 3 s", "begun", "# Fourth", "all is well"]
    places = list(islice(_in_order(text, said), len(said)))
    assert len(places) == len(said)
    assert bench_gpu.main({"First": well}) == 0


def test_a_part_that_is_given_up_ends_with_all_that_it_started() -> None:
    sleeps = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    started = time.perf_counter()
    assert bench_gpu.run_part(["-c", sleeps], 2) == ("", "FAILED: given up after 2 s")
    assert time.perf_counter() - started < 30


def _in_order(text: str, parts: Sequence[str]) -> Iterator[int]:
    place = 0
    for part in parts:
        place = text.index(part, place)
        yield place
        place += len(part)


def test_without_pytest_its_part_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "has", lambda name: name != "hypothesis")
    assert bench_gpu.run_part(["-m", "pytest"], 1) == ("", "left out, as hypothesis are not installed")


def test_the_parts_take_less_than_ten_minutes_in_all() -> None:
    assert sum(limit_s for _, limit_s in bench_gpu.PARTS.values()) < 600
