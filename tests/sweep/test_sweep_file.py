"""A sweep file declares which runs are made; what is not done here is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from sftron.sweep.sweep_file import SweepError, SweepFile, read_sweep_file
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
    parameters = {"general.seed": {"values": [1, 2]}, "a.b": {"value": "x"}, "a.c": {"values": [True, False]}}
    runs = [
        {"general.seed": 1, "a.b": "x", "a.c": True},
        {"general.seed": 1, "a.b": "x", "a.c": False},
        {"general.seed": 2, "a.b": "x", "a.c": True},
        {"general.seed": 2, "a.b": "x", "a.c": False},
    ]
    assert sweep_file(tmp_path, method="grid", parameters=parameters).grid() == runs
    assert sweep_file(tmp_path, method="grid", parameters=parameters, run_cap=3).grid() == runs[:3]


def test_the_ablation_of_the_toggles_is_twelve_runs() -> None:
    runs = read_sweep_file(ROOT / "configs" / "sweep_toggles.yaml").grid()
    assert len(runs) == 12
    assert [run["general.seed"] for run in runs] == [1] * 4 + [2] * 4 + [3] * 4
    assert len({tuple(run.items()) for run in runs}) == 12


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"method": "bayes"}, "method: found 'bayes', and a grid is all that is run here: use `wandb sweep`"),
        ({"method": "random"}, "method: found 'random', and a grid is all that is run here: use `wandb sweep`"),
        ({"early_terminate": {"type": "hyperband"}}, "early_terminate: needs wandb's server"),
        ({"controler": {}}, "controler: not known here"),
        ({"run_cap": 0}, "run_cap: found 0"),
        ({"run_cap": True}, "run_cap: found True"),
        ({"command": "python run_train.py"}, "command: wanted a list of words"),
        ({"parameters": {}}, "parameters: wanted a mapping of dotted configuration keys"),
        ({"parameters": {"data": {"parameters": {"x": {"value": 1}}}}}, "dotted keys in place of nested ones"),
        ({"parameters": {"a.b": {"values": []}}}, "parameters.a.b: values: found []"),
        ({"parameters": {"a.b": {"values": [None]}}}, "wandb writes null as None"),
        ({"parameters": {"a.b": {"min": 0.0, "max": 1.0}}}, "wanted value or values alone"),
        ({"parameters": {"a.b": {"values": [1, 2], "probabilities": [0.5, 0.5]}}}, "wanted value or values alone"),
        ({"parameters": {"a.b": {"values": [1, 2, 1]}}}, "parameters.a.b: values: 1 is given twice"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(tmp_path: Path, tree: dict[str, Any], problem: str) -> None:
    whole = {"method": "grid", "parameters": {"a.b": {"values": [1, 2]}}}
    assert problem in refusal(tmp_path, **(whole | tree))


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    problems = refusal(tmp_path, method="bayes", run_cap=-1, parameters={"a.b": {"values": []}})
    assert len(problems.splitlines()) == 3
