"""A run's name may hold other keys' values, so that each run of a sweep has a directory of its own."""

from pathlib import Path

import pytest

from sftron.config import Config, ConfigError, dump_config, load_config
from tests.conftest import ROOT

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def named(name: str, *overrides: str) -> Config:
    return load_config(QUICKSTART, [f"--general.run_name={name!r}", *overrides])


@pytest.mark.parametrize(
    ("name", "filled"),
    [
        ("isolated_{data.remove_cross_attention}", "isolated_false"),
        ("{optimizer.learning_rate}-{tokens.micro_batch_size}", "0.0004-1"),
        ("of-{model.path}", "of-models-SmolLM2-135M-Instruct"),
        ("{data.datasets.1.path}", "examples-quickstart-product.jsonl"),
        ("epochs_{tokens.train_epochs}", "epochs_null"),
        ("{data.overlong}", "drop"),
        ("plain", "plain"),
    ],
)
def test_a_key_in_braces_stands_for_its_value_as_given_or_by_default(name: str, filled: str) -> None:
    config = named(name, "--data.remove_cross_attention=False")
    assert config.general.run_name == filled
    assert config.run_dir == Path("runs") / filled


def test_the_resolved_configuration_holds_the_name_itself(tmp_path: Path) -> None:
    config = named("seed_{general.seed}", "--general.seed=7")
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("{data.remove_cross_atention}", "is no key; did you mean remove_cross_attention?"),
        ("{data.datasets}", "which cannot be part of a name"),
        ("{optimizer}", "which cannot be part of a name"),
        ("{general.run_name}", "holds itself"),
        ("{}", "{} is no key"),
        ("{data.overlong", "wanted a plain name"),
    ],
)
def test_what_is_no_single_value_is_refused_once(name: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        named(name)
    (line,) = caught.value.problems
    assert "general.run_name: " in line
    assert problem in line
