"""The configuration of a run: schema.py declares it, load.py reads it, help.py describes it."""

from sftron.config.help import describe_config
from sftron.config.load import ConfigError, load_config
from sftron.config.plain_yaml import dump_config
from sftron.config.results_schema import Checkpoints, Evaluation, Hub, Logging, Wandb
from sftron.config.schema import Config, Lora, Parallelism

__all__ = [
    "Checkpoints",
    "Config",
    "ConfigError",
    "Evaluation",
    "Hub",
    "Logging",
    "Lora",
    "Parallelism",
    "Wandb",
    "describe_config",
    "dump_config",
    "load_config",
]
