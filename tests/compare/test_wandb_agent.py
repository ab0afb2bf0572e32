"""The sweep file as wandb's own code reads it, and the command that its agent makes of it: the same runs as here."""

import json
from pathlib import Path
from typing import Any

import pytest

from sftron.compare.grid import config_and_overrides, plan_runs, read_sweep_file
from sftron.config import load_config
from tests.compare.sweeps import ISOLATED, write_sweep
from tests.conftest import ROOT, LazyModule

sweeps, utils = LazyModule("wandb.apis.public.sweeps"), LazyModule("wandb.sdk.launch.sweeps.utils")

# wandb leaves the file open.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
TOGGLES = ROOT / "configs" / "sweep_toggles.yaml"


def wandb_sweep(path: Path) -> dict[str, Any]:
    sweep = utils.load_sweep_config(str(path))
    assert sweep is not None
    return sweep


def wandb_values(settings: dict[str, Any]) -> dict[str, Any]:
    """A run's settings as the server sends them."""
    return {key: {"value": value} for key, value in json.loads(json.dumps(settings)).items()}


def wandb_command(path: Path, settings: dict[str, Any]) -> list[str]:
    """What wandb's agent makes of the file's command for a run with these settings."""
    flags = utils.create_sweep_command_args({"args": wandb_values(settings)})
    words: list[str] = []
    for word in utils.create_sweep_command(wandb_sweep(path)["command"]):
        words += flags[word[2:-1]] if word == "${args}" else [str(word)]
    return words


def test_wandbs_agent_trains_what_the_sweep_without_a_server_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    checked, sweep = sweeps._validate_config_and_fill_distribution(wandb_sweep(TOGGLES)), read_sweep_file(TOGGLES)
    assert checked["method"] == "grid"
    assert list(checked["parameters"]) == list(sweep.parameters)
    for settings, run in zip(sweep.grid(), plan_runs(TOGGLES, sweep), strict=True):
        words = wandb_command(TOGGLES, settings)
        assert f"--{ISOLATED}={settings[ISOLATED]}" in words
        path, overrides = config_and_overrides([word.replace("mode=online", "mode=disabled") for word in words])
        assert load_config(path, overrides) == run.config


def test_a_float_arrives_as_it_is_in_the_file(tmp_path: Path) -> None:
    """wandb writes floats in its own way: 1e-05, which YAML takes for a text."""
    path = write_sweep(tmp_path, {"optimizer.learning_rate": {"values": [0.1, 1e-05]}, ISOLATED: {"value": False}})
    for rate in (0.1, 1e-05):
        words = wandb_command(path, {"optimizer.learning_rate": rate, ISOLATED: False})
        config = load_config(*config_and_overrides(words))
        assert config.optimizer.learning_rate == rate
        assert not config.data.remove_cross_attention
