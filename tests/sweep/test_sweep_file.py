"""A sweep file says which runs are made; what is not done here is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from sftron.sweep.expansion import expand
from sftron.sweep.sweep_file import DISTRIBUTIONS, SweepError, SweepFile, read_sweep_file
from tests.conftest import ROOT


def sweep_file(tmp_path: Path, **tree: Any) -> SweepFile:
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return read_sweep_file(path)


def refusal(tmp_path: Path, **tree: Any) -> str:
    with pytest.raises(SweepError) as caught:
        sweep_file(tmp_path, **tree)
    return str(caught.value)


def test_a_grid_is_every_combination_and_its_last_parameter_changes_fastest(tmp_path: Path) -> None:
    sweep = sweep_file(
        tmp_path,
        method="grid",
        parameters={"general.seed": {"values": [1, 2]}, "a.b": {"value": "x"}, "a.c": {"values": [True, False]}},
    )
    assert expand(sweep) == [
        {"general.seed": 1, "a.b": "x", "a.c": True},
        {"general.seed": 1, "a.b": "x", "a.c": False},
        {"general.seed": 2, "a.b": "x", "a.c": True},
        {"general.seed": 2, "a.b": "x", "a.c": False},
    ]
    assert expand(sweep, count=3) == expand(sweep)[:3]


def test_the_ablation_of_the_toggles_is_twelve_runs() -> None:
    runs = expand(read_sweep_file(ROOT / "configs" / "sweep_toggles.yaml"))
    assert len(runs) == 12
    assert [run["general.seed"] for run in runs] == [1] * 4 + [2] * 4 + [3] * 4
    assert len({tuple(run.items()) for run in runs}) == 12


RANDOM = {
    "uniform": {"distribution": "uniform", "min": 0.1, "max": 0.3},
    "log": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-3},
    "stepped": {"distribution": "q_uniform", "min": 0.0, "max": 1.0, "q": 0.1},
    "whole": {"min": 3, "max": 9},
    "choice": {"values": ["a", "b"], "probabilities": [0.9, 0.1]},
}


def test_random_runs_are_decided_by_the_seed_and_the_first_ones_by_no_count(tmp_path: Path) -> None:
    sweep = sweep_file(tmp_path, method="random", parameters=RANDOM, run_cap=50)
    runs = expand(sweep, seed=3)
    assert len(runs) == 50
    assert runs == expand(sweep, seed=3)
    assert runs[:7] == expand(sweep, count=7, seed=3)
    assert runs != expand(sweep, seed=4)


def test_random_values_lie_where_they_should(tmp_path: Path) -> None:
    runs = expand(sweep_file(tmp_path, method="random", parameters=RANDOM), count=400)
    assert all(0.1 <= run["uniform"] <= 0.3 for run in runs)
    assert all(1e-5 <= run["log"] <= 1e-3 for run in runs)
    assert 150 < sum(run["log"] < 1e-4 for run in runs) < 250
    assert {run["stepped"] for run in runs} == {n / 10 for n in range(11)}
    assert {run["whole"] for run in runs} == set(range(3, 10))
    assert 300 < sum(run["choice"] == "a" for run in runs) < 400


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_distribution_that_is_named_gives_numbers(tmp_path: Path, distribution: str) -> None:
    options = {
        name: {"min": 1, "max": 2, "q": 1, "mu": 0.0, "sigma": 1.0}[name] for name in DISTRIBUTIONS[distribution]
    }
    sweep = sweep_file(tmp_path, method="random", parameters={"a.b": {"distribution": distribution, **options}})
    assert all(isinstance(run["a.b"], (int, float)) for run in expand(sweep, count=2))


def test_no_run_is_drawn_twice(tmp_path: Path) -> None:
    sweep = sweep_file(tmp_path, method="random", parameters={"a.b": {"values": [1, 2, 3]}})
    assert sorted(run["a.b"] for run in expand(sweep, count=3)) == [1, 2, 3]
    with pytest.raises(SweepError, match="4 different runs are wanted, and there seem to be 3"):
        expand(sweep, count=4)


def test_random_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="give run_cap in the file, or --count"):
        expand(sweep_file(tmp_path, method="random", parameters=RANDOM))


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"method": "bayes"}, "method: bayes needs wandb's server"),
        ({"method": "anneal"}, "method: found 'anneal'; wanted grid or random"),
        ({"early_terminate": {"type": "hyperband"}}, "early_terminate: needs wandb's server"),
        ({"controler": {}}, "controler: not known here"),
        ({"run_cap": 0}, "run_cap: found 0"),
        ({"run_cap": True}, "run_cap: found True"),
        ({"command": "python run_train.py"}, "command: wanted a list of words"),
        ({"parameters": {}}, "parameters: wanted a mapping of dotted configuration keys"),
        ({"parameters": {"data": {"parameters": {"x": {"value": 1}}}}}, "write dotted keys, as data.parameters"),
        ({"parameters": {"a.b": {"values": []}}}, "parameters.a.b: values: found []"),
        ({"parameters": {"a.b": {"values": [None]}}}, "null is written as None by wandb"),
        ({"parameters": {"a.b": {"min": 0.0, "max": 1.0}}}, "a grid needs values; uniform has no end of them"),
        ({"parameters": {"a.b": {"min": 0, "max": 1.0}}}, "min and max, both whole numbers or both"),
        ({"method": "random", "parameters": {"a.b": {"distribution": "beta"}}}, "distribution beta is not done here"),
        (
            {"method": "random", "parameters": {"a.b": {"distribution": "uniform", "min": "1e-5", "max": 1.0}}},
            "min: found '1e-5'; wanted a number; write 1.0e-4 for 1e-4",
        ),
        ({"method": "random", "parameters": {"a.b": {"min": 2.0, "max": 1.0}}}, "min 2.0 is not below max 1.0"),
        ({"parameters": {"a.b": {"values": [1, 2], "probabilities": [0.5]}}}, "wanted 2 numbers from 0 with the sum 1"),
        ({"parameters": {"a.b": {"values": [1, 2], "probabilities": ["a", 1]}}}, "with the sum 1, found ['a', 1]"),
        ({"parameters": {"a.b": {"values": [1, 2], "probabilities": [1.5, -0.5]}}}, "2 numbers from 0 with the sum 1"),
        ({"parameters": {"a.b": {"values": [1, 2], "probabilities": 1}}}, "with the sum 1, found 1"),
        ({"parameters": {"a.b": {"values": [1, 2, 1]}}}, "parameters.a.b: values: 1 is given twice"),
        ({"parameters": {"a.b": {"distribution": ["uniform"], "min": 1, "max": 2}}}, "['uniform'] is not done here"),
        ({"parameters": {"a.b": {"values": [1], "mu": 2}}}, "mu: not known beside values"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(tmp_path: Path, tree: dict[str, Any], problem: str) -> None:
    whole = {"method": "grid", "parameters": {"a.b": {"values": [1, 2]}}}
    assert problem in refusal(tmp_path, **(whole | tree))


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    told = refusal(tmp_path, method="bayes", run_cap=-1, parameters={"a.b": {"values": []}})
    assert len(told.splitlines()) == 3
