"""verify_trainer on several ranks ends on all of them, whatever happens on one, and leaves the trainer as it was."""

import ast
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sftcheck.faults import Fault
from sftcheck.ranks.exchange import Exchange, time_limit_of_trainer
from sftcheck.ranks.on_ranks import join_findings
from sftcheck.ranks.plain_values import read_back, written
from sftron.checks.report import Finding, NotMeasuredError
from tests.conftest import ROOT
from tests.train.ranks import launch

PASSED = Finding(True, "measured")


def test_a_finding_of_all_ranks_says_of_each_what_it_found_and_of_none_what_it_did_not() -> None:
    prompts = Finding(False, "4 prompt tokens trained", faults=(Fault.PROMPTS_TRAINED,))
    nothing = Finding(False, "nothing is trained", detail=("a row",), faults=(Fault.NOTHING_TRAINED,))
    found = join_findings([prompts, nothing])
    assert found.measured == "rank 0: 4 prompt tokens trained; rank 1: nothing is trained"
    assert (found.faults, found.detail) == ((Fault.PROMPTS_TRAINED, Fault.NOTHING_TRAINED), ("rank 1: a row",))
    assert join_findings([Finding(None, "no padding"), Finding(None, "no batch")]).measured == "rank 0: no padding"
    found = join_findings([Finding(None, "no padding"), PASSED])
    assert found.measured == "measured (rank 1; 1 of 2 ranks measured it)"
    assert join_findings([PASSED, Finding(True, "other")]).measured == "measured (rank 0; the others pass too)"


def on_two_ranks(folder: Path, work: Callable[[Exchange], Any], time_limit: float = 30) -> list[Any]:
    """Returns what the work gives on each of two ranks."""
    ended = launch(2, _started, work, time_limit, folder, folder=folder)
    assert [each.exit_code for each in ended] == [0, 0], "".join(each.err for each in ended)
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def _started(work: Callable[[Exchange], Any], time_limit: float, folder: Path) -> None:
    dist.init_process_group("gloo")
    exchange = Exchange(time_limit)
    with time_limit_of_trainer(time_limit):
        found = work(exchange)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    time.sleep(6 if dist.get_rank() == 0 and time_limit < 5 else 0.5)  # rank 0 has the store


def measured(exchange: Exchange, *rows: Callable[[], Finding]) -> list[str]:
    return [exchange.row(f"row {number}", row)[0].measured for number, row in enumerate(rows)]


def _raises_between_two_exchanges(exchange: Exchange) -> list[str]:
    def wrong() -> Finding:
        exchange.gather("a value", 1)
        if exchange.rank == 1:
            raise KeyError("lost")
        exchange.gather("another value", 2)
        return PASSED

    return measured(exchange, wrong, lambda: PASSED)


def test_an_exception_on_one_rank_ends_the_row_on_all_and_the_next_one_is_measured(tmp_path: Path) -> None:
    first, second = on_two_ranks(tmp_path, _raises_between_two_exchanges)
    assert "rank 1" in first[0]
    assert "KeyError: 'lost'" in first[0]
    assert "rank 1" in second[0]
    assert first[1] == second[1] == "measured"


def _asks_for_other_values(exchange: Exchange) -> list[str]:
    def wrong() -> Finding:
        exchange.gather(f"value {exchange.rank}", 1)
        return PASSED

    def longer() -> Finding:
        if exchange.rank == 0:
            exchange.gather("one more", 1)
        return PASSED

    return measured(exchange, wrong, longer, lambda: PASSED)


def test_ranks_that_ask_for_different_values_hear_of_it(tmp_path: Path) -> None:
    first, second = on_two_ranks(tmp_path, _asks_for_other_values)
    assert first[0] == second[0] == "not measured: rank 0 is at value 0; rank 1 is at value 1"
    assert "rank 1 is at the end of the row" in first[1]
    assert "ranks 0 measure more than the others" in second[1]
    assert first[2] == second[2] == "measured"


def _waits_in_the_trainer(exchange: Exchange) -> list[Any]:
    started = time.monotonic()

    def wrong() -> Finding:
        if exchange.rank == 0:
            dist.all_reduce(torch.ones(1))  # the trainer's own, in which rank 1 never is
        return PASSED

    return [*measured(exchange, wrong, lambda: PASSED), time.monotonic() - started]


def test_a_collective_of_the_trainer_that_hangs_ends_after_the_time_limit(tmp_path: Path) -> None:
    first, second = on_two_ranks(tmp_path, _waits_in_the_trainer, time_limit=2)
    for row, after, seconds in (first, second):
        assert row.startswith("rank 0: not measured: RuntimeError")
        assert after == "measured"
        assert seconds < 10


def _never_arrives(exchange: Exchange) -> list[str]:
    def late() -> Finding:
        if exchange.rank == 1:
            time.sleep(8)
        return PASSED

    return measured(exchange, lambda: PASSED, late)


def test_a_rank_that_does_not_answer_is_named_with_its_row(tmp_path: Path) -> None:
    first, _ = on_two_ranks(tmp_path, _never_arrives, time_limit=2)
    assert first[0] == "measured"
    assert "rank 0 waited in the row 'row 1' for 4 s" in first[1]
    assert "rank 1 is in 'row 1'" in first[1]


def _nothing_to_measure(exchange: Exchange) -> list[str]:
    def alone() -> Finding:
        raise NotMeasuredError("nothing is there")

    return measured(exchange, lambda: exchange.of_first("a finding", alone))


def test_what_only_rank_0_measures_is_the_finding_of_all(tmp_path: Path) -> None:
    assert on_two_ranks(tmp_path, _nothing_to_measure) == [["nothing is there"]] * 2


VALUES = {
    "numbers": [1, -2.5, True, None, 2**70, float("inf")],
    ("a", 3): ("Straße", [(), {}]),
    "arrays": [np.arange(6).reshape(2, 3), np.zeros((0, 2), dtype=np.float32), np.array([[True, False]])],
    "tensors": [
        torch.arange(4).view(2, 2),
        torch.tensor(0.1, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.ones(2) > 0,
    ],
    "of numpy": [np.int64(3), np.bool_(True), np.float32(0.5)],
}


def test_values_are_the_same_after_they_were_text() -> None:
    found = read_back(written(VALUES))
    assert list(found) == list(VALUES)
    for name in ("numbers", ("a", 3), "of numpy"):
        assert found[name] == VALUES[name]
    for one, other in zip(found["arrays"], VALUES["arrays"], strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    for one, other in zip(found["tensors"], VALUES["tensors"], strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.equal(other)


@pytest.mark.parametrize(
    "value",
    [PASSED, Path("x"), {1, 2}, np.array([Path("x")]), torch.eye(2).to_sparse(), lambda: 0, {"inner": [object()]}],
)
def test_values_of_other_types_are_not_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        written(value)


def _without_pickles(exchange: Exchange) -> list[Any]:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle")

    for name in ("loads", "dumps", "load", "Unpickler", "_Unpickler"):
        setattr(pickle, name, refused)
    dist.distributed_c10d._unpickler = refused  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    found: list[Any] = exchange.gather("values", {"rank": exchange.rank, "ids": np.arange(3 + exchange.rank)})
    return [[each["rank"], each["ids"].tolist()] for each in found] + measured(exchange, lambda: PASSED)


def test_ranks_exchange_no_pickles(tmp_path: Path) -> None:
    found = [[0, [0, 1, 2]], [1, [0, 1, 2, 3]], "measured"]
    assert on_two_ranks(tmp_path, _without_pickles) == [found] * 2


def _sends_an_object(exchange: Exchange) -> list[str]:
    def wrong() -> Finding:
        exchange.gather("an object", Path("x") if exchange.rank else 1)
        return PASSED

    return measured(exchange, wrong, lambda: PASSED)


def test_a_value_that_cannot_be_sent_ends_the_row_on_all_ranks(tmp_path: Path) -> None:
    for row, after in on_two_ranks(tmp_path, _sends_an_object):
        assert "rank 1: not measured: TypeError" in row
        assert "cannot be sent to other ranks" in row
        assert after == "measured"


def _weights_after(is_verified: bool) -> list[Tensor]:
    from sftron import verify_trainer
    from tests.sftcheck.rank_materials import plain

    trainer = plain(max_steps=2, learning_rate=1e-2)
    if is_verified:
        assert verify_trainer(trainer).passed
    trainer.train()
    return [each.detach().clone() for each in trainer.model.parameters()]


def _trained_twice(exchange: Exchange) -> bool:
    from tests.sftcheck.trainer_zoo import hush

    hush()
    return all(torch.equal(one, two) for one, two in zip(_weights_after(False), _weights_after(True), strict=True))


@pytest.mark.filterwarnings("ignore::")
def test_a_run_on_two_ranks_after_it_has_the_bits_of_a_run_without_it(tmp_path: Path) -> None:
    assert on_two_ranks(tmp_path, _trained_twice, time_limit=60) == [True, True]


_COLLECTIVES = {"gather", "of_first", "broadcast", "on_all", "row", "measure", "reference"}


def _hidden_collectives(source: str) -> Iterator[str]:
    """Yields the properties that are collectives, and the statements that read one for its effect alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_" and "self." in ast.unparse(node.value):
            yield ast.unparse(node)
        elif isinstance(node, ast.FunctionDef) and any("property" in ast.unparse(each) for each in node.decorator_list):
            calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
            names = {each.attr for each in calls if isinstance(each, ast.Attribute)}
            yield from [node.name] if names & _COLLECTIVES else []


def test_no_property_is_a_collective() -> None:
    body = "    @cached_property\n    def b(self):\n        _ = self.c\n        return self.d.gather('d', 1)"
    example = f"class A:\n{body}"
    assert list(_hidden_collectives(example)) == ["b", "_ = self.c"]
    paths = sorted((ROOT / "src/sftcheck/ranks").glob("*.py"))
    assert len(paths) > 5
    assert [each for path in paths for each in _hidden_collectives(path.read_text(encoding="utf-8"))] == []


SCRIPT = """
from tests.sftcheck.rank_materials import plain
from tests.sftcheck.rank_zoo_rows import mean_per_rank

def sound():
    return plain()
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("function", "status"), [("sound", 0), ("mean_per_rank", 1), ("absent", 2)])
def test_torchrun_exits_as_the_command_does_and_rank_0_prints(tmp_path: Path, function: str, status: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "sftron"]
    command += ["verify-trainer", f"{script}:{function}", "--json", str(tmp_path / "report.json")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    assert bool(ended.returncode) == bool(status)  # torchrun's own is 1
    assert f"exitcode  : {status}" in ended.stderr or not status
    if status < 2:
        assert ended.stdout.count("before it trains, on 2 ranks\n") == 1
        assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["passed"] is (status == 0)
