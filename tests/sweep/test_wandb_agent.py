"""The sweep file as wandb's own code reads it, and the command that its agent makes of it: the same runs as ours."""

import json
import os
import queue
import sys
from pathlib import Path
from typing import Any

import pytest

from sftron.config import load_config
from sftron.sweep.planned_run import command_for, config_and_overrides, plan_runs
from sftron.sweep.sweep_file import read_sweep_file
from tests.conftest import ROOT
from tests.sweep.sweeps import write_sweep

pytest.importorskip("wandb")

from wandb.apis.public.sweeps import _validate_config_and_fill_distribution
from wandb.sdk.launch.sweeps import utils
from wandb.wandb_agent import Agent

# wandb leaves the file open.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
TOGGLES = ROOT / "configs" / "sweep_toggles.yaml"


def wandbs_command(path: Path, settings: dict[str, Any]) -> list[str]:
    """What wandb's agent makes of the file's command for a run with these settings."""
    sweep = utils.load_sweep_config(str(path))
    assert sweep is not None
    flags = utils.create_sweep_command_args({"args": {key: {"value": value} for key, value in settings.items()}})
    words: list[str] = []
    for word in utils.create_sweep_command(sweep["command"]):
        words += flags[word[2:-1]] if word == "${args}" else [str(word)]
    return words


def test_wandb_accepts_the_file() -> None:
    sweep = utils.load_sweep_config(str(TOGGLES))
    assert sweep is not None
    checked = _validate_config_and_fill_distribution(sweep)
    assert checked["method"] == "grid"
    assert list(checked["parameters"]) == list(read_sweep_file(TOGGLES).parameters)


def test_wandbs_agent_trains_what_the_sweep_without_a_server_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sweep = read_sweep_file(TOGGLES)
    all_settings = sweep.grid()
    ours = plan_runs(sweep, wandb_mode="online")
    assert ours[3].settings["data.remove_cross_attention"] is False
    for settings, run in zip(all_settings, ours, strict=True):
        # Through JSON, as from the server.
        words = wandbs_command(TOGGLES, json.loads(json.dumps(settings)))
        assert "--data.remove_cross_attention=" + str(settings["data.remove_cross_attention"]) in words
        assert load_config(*config_and_overrides(words)) == run.config


@pytest.mark.parametrize("value", [True, False, 0.0004, 1e-05, 3, "linear", [0.9, 0.999]])
def test_a_value_that_wandb_writes_is_read_as_what_it_was(tmp_path: Path, value: Any) -> None:
    key = {bool: "data.remove_cross_attention", float: "optimizer.learning_rate", int: "tokens.train_steps"}.get(
        type(value), "optimizer.schedule" if isinstance(value, str) else "optimizer.betas"
    )
    path = write_sweep(tmp_path, {key: {"value": value}})
    path.write_text(path.read_text().replace(f"run-{{{key}}}", "run"))
    command = wandbs_command(path, {key: value})
    config = load_config(*config_and_overrides(command[1:]))
    section, name = key.split(".")
    found = getattr(getattr(config, section), name)
    assert found == (tuple(value) if isinstance(value, list) else value)
    assert type(found) is (tuple if isinstance(value, list) else type(value))
    ours = command_for(read_sweep_file(path), {key: value}, wandb_mode="disabled")
    assert [word for word in ours if word.startswith(f"--{key}")] == [
        word for word in command if word.startswith(f"--{key}")
    ]


def test_a_real_agent_starts_the_runs_in_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's own code from the server's order to the process; only the server is not there."""
    rates = [0.1, 0.2]
    path = write_sweep(
        tmp_path, {"optimizer.learning_rate": {"values": rates}, "data.remove_cross_attention": {"value": False}}
    )
    # The sweep's command says `python`, which a system may not have outside of an environment.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    monkeypatch.setenv("WANDB_SWEEP_ID", "toggles")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):  # which the agent sets, for us to forget
        monkeypatch.setenv(name, "")
    sweep = utils.load_sweep_config(str(path))
    assert sweep is not None
    agent = Agent(api=None, queue=queue.Queue())
    agent._sweep_command = sweep["command"]
    for number, rate in enumerate(rates):
        values = {"optimizer.learning_rate": rate, "data.remove_cross_attention": False}
        order = {
            "run_id": f"id{number}",
            "program": "run_train.py",
            "args": {key: {"value": value} for key, value in values.items()},
        }
        agent._command_run(order)
        assert agent._run_processes[f"id{number}"].wait(timeout=60) == 0
    for rate in rates:
        config = load_config(tmp_path / "runs" / f"run-{rate}-false" / "config.yaml")
        assert config.optimizer.learning_rate == rate
        assert not config.data.remove_cross_attention
