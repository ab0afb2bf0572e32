"""A sweep file declares which runs are made: each has a checked configuration and a directory of its own."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sftron.compare.comparison import Metric
from sftron.compare.grid import PlannedRun, SweepFile, plan_runs, read_sweep_file
from tests.compare.sweeps import write_run, write_sweep
from tests.conftest import ROOT


def sweep_file(folder: Path, **tree: Any) -> SweepFile:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return read_sweep_file(path)


def plan(path: Path) -> list[PlannedRun]:
    return plan_runs(path, read_sweep_file(path))


def with_command(path: Path, *added: str, without: str) -> Path:
    """Words of the command left out or added."""
    tree = yaml.safe_load(path.read_text())
    words = [word for word in tree["command"] if without not in word]
    path.write_text(yaml.safe_dump({**tree, "command": [*words, *added]}))
    return path


def test_a_grid_is_every_combination_and_its_last_parameter_changes_fastest(tmp_path: Path) -> None:
    parameters = {"general.seed": {"values": [1, 2]}, "a.b": {"value": "x"}, "a.c": {"values": [True, False]}}
    runs = [
        {"general.seed": 1, "a.b": "x", "a.c": True},
        {"general.seed": 1, "a.b": "x", "a.c": False},
        {"general.seed": 2, "a.b": "x", "a.c": True},
        {"general.seed": 2, "a.b": "x", "a.c": False},
    ]
    tree = {"method": "grid", "parameters": parameters, "command": ["${args}"]}
    assert sweep_file(tmp_path, **tree).grid() == runs


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"method": "bayes"}, "method"),
        ({"early_terminate": {"type": "hyperband"}}, "early_terminate"),
        ({"run_cap": 3}, "run_cap"),
        ({"command": "python run_train.py"}, "command"),
        ({"metric": "loss"}, "metric"),
        ({"metric": {"name": "loss", "goal": "small"}}, "metric.goal"),
        ({"parameters": {}}, "parameters"),
        ({"parameters": {"data": {"parameters": {"x": {"value": 1}}}}}, "parameters.data"),
        ({"parameters": {"a.b": {"values": []}}}, "parameters.a.b"),
        ({"parameters": {"a.b": {"values": [None]}}}, "parameters.a.b"),
        ({"parameters": {"a.b": {"min": 0.0, "max": 1.0}}}, "parameters.a.b"),
    ],
)
def test_unsupported_features_of_a_sweep_are_refused_together_by_name(
    tmp_path: Path, tree: dict[str, Any], key: str
) -> None:
    whole = {"method": "grid", "parameters": {"a.b": {"values": [1, 2]}}, "command": ["${args}"]}
    assert sweep_file(tmp_path, **whole, metric={"name": "loss"}).metric == Metric("loss", "minimize")
    with pytest.raises(ValueError, match="wandb agent") as caught:
        sweep_file(tmp_path, **(whole | tree | {"a_typo": 1}))
    lines = (tmp_path / "sweep.yaml").read_text().splitlines()
    for name in (key, "a_typo"):
        (number,) = re.findall(rf"sweep\.yaml:(\d+): {re.escape(name)}: found ", str(caught.value))
        assert name.removeprefix("parameters.").rpartition("metric.")[2] in lines[int(number) - 1]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            "method: random\nparameters: {optimizer.learning_rate: {min: 1e-5, max: 1e-3}}\n",
            [
                "1: command: is missing: write command: [${interpreter}, -m, sftron, train, --config, FILE, ${args}]",
                '1: method: found "random" (text); write method: grid',
                '2: parameters.optimizer.learning_rate: found {"min": "1e-5", "max": "1e-3"} (a mapping); a grid needs '
                "explicit values: write {values: [...]} with numbers, texts, true or false",
            ],
        ),
        (
            "program: train.py\nmethod: grid\nparameters:\n  general.seed: [1, 2]\n  tokens.train_steps: 5\n"
            "  optimizer:\n    parameters: {eps: {value: 1}}\ncommand: python train.py\n",
            [
                '1: program: found "train.py" (text); programs cannot be started by name: write command: '
                "[${interpreter}, -m, sftron, train, --config, FILE, ${args}]",
                "4: parameters.general.seed: found [1, 2] (a list); write {values: [1, 2]}",
                "5: parameters.tokens.train_steps: found 5 (a whole number); write {values: [5]}",
                '6: parameters.optimizer: found {"parameters": {"eps": {"value": 1}}} (a mapping); write dotted keys, '
                "as in optimizer.eps: {values: [...]}",
                '8: command: found "python train.py" (text); write command: [${interpreter}, -m, sftron, train, '
                "--config, FILE, ${args}]",
            ],
        ),
        ("", ["1: found null; write the keys method, parameters and command"]),
        ("- a\n", ['1: found ["a"] (a list); write the keys method, parameters and command']),
    ],
)
def test_wandbs_own_files_are_answered_by_line_key_and_remedy(tmp_path: Path, text: str, problems: list[str]) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="wandb agent") as caught:
        read_sweep_file(path)
    assert str(caught.value).splitlines()[:-1] == [f"{path}:{problem}" for problem in problems]


def test_broken_yaml_is_answered_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text("method: grid\nparameters: {a: [1, 2}\n")
    with pytest.raises(ValueError, match=r"sweep\.yaml:2: is not YAML: expected ',' or ']'"):
        read_sweep_file(tmp_path / "sweep.yaml")


def test_the_ablation_of_the_toggles_has_twelve_configurations_with_a_directory_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    runs = plan(Path("configs/sweep_toggles.yaml"))
    assert len({run.folder for run in runs}) == 12
    assert all(run.folder.parent == Path("runs/sweep_toggles") for run in runs)
    assert [run.config.general.seed for run in runs] == [1] * 4 + [2] * 4 + [3] * 4
    run = runs[3]
    assert run.name == "completions_false-isolated_false-seed_1"
    assert not run.config.data.train_on_completions_only
    assert not run.config.data.remove_cross_attention


def test_runs_that_would_share_a_directory_are_refused_with_a_name_to_use(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, {"general.seed": {"values": [1, 2]}})
    with_command(path, without="run_name")
    with pytest.raises(ValueError, match=r"two runs would share .*run-\{general.seed\} to the command"):
        plan(path)


def test_a_bad_configuration_of_any_run_is_refused_before_the_first_begins(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, {"optimizer.learning_rate": {"values": [0.1, -1.0]}, "data.no_such": {"value": 1}})
    with pytest.raises(ValueError, match=r"(?s)(?=.*unknown key)(?=.*wanted a number above 0)"):
        plan(path)


@pytest.mark.parametrize("added", [["${args_no_boolean_flags}"], ["${args}", "--model.path=${envvar:X}"], []])
def test_arguments_that_would_not_arrive_are_refused(tmp_path: Path, added: list[str]) -> None:
    path = write_sweep(tmp_path, {"general.seed": {"value": 1}})
    with pytest.raises(ValueError, match=r"works only in `wandb agent`|command: add \$\{args\}"):
        plan(with_command(path, *added, without="${args}"))


def test_the_runs_of_this_machine_do_not_log_to_wandb(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, {"general.seed": {"value": 1}})
    (run,) = plan(with_command(path, "--logging.wandb.mode=online", without="no such word"))
    assert run.config.logging.wandb.mode == "disabled"


def test_a_directory_is_new_begun_completed_or_of_another_run_whatever_is_logged_and_kept(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, {"general.seed": {"values": [1, 2, 3, 4, 5]}})
    kept = ("--logging.interval=7", "--checkpoints.interval=2", "--checkpoints.async=true")
    other = ("--optimizer.learning_rate=0.5",)
    for seed, status, overrides in (
        (2, "running", ()),
        (3, "completed", ()),
        (4, "completed", kept),
        (5, "completed", other),
    ):
        write_run(tmp_path / "runs" / f"run-{seed}", f"--general.seed={seed}", *overrides, status=status)
    *runs, another = plan(path)
    assert [run.state() for run in runs] == ["new", "begun", "completed", "completed"]
    with pytest.raises(ValueError, match=r"optimizer.learning_rate is 0.5 there but 0.001 in the sweep"):
        another.state()


def test_a_sweep_over_a_key_of_an_optional_section_opens_it_and_tells_its_runs_from_others(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, {"lora.rank": {"values": [4, 8, 16]}})
    assert [run.name for run in plan(path)] == ["run-4", "run-8", "run-16"]
    assert [run.config.lora and run.config.lora.rank for run in plan(path)] == [4, 8, 16]
    write_run(tmp_path / "runs" / "run-4", "--lora.rank=4", "--lora.merge=false", status="completed")
    write_run(tmp_path / "runs" / "run-8", "--lora.rank=2", status="completed")
    write_run(tmp_path / "runs" / "run-16", status="completed")
    merged, other_rank, whole = plan(path)
    assert merged.state() == "completed"
    with pytest.raises(ValueError, match=r"lora\.rank is 2 there but 8 in the sweep"):
        other_rank.state()
    with pytest.raises(ValueError, match=r"lora\.rank is none there but 16 in the sweep"):
        whole.state()
