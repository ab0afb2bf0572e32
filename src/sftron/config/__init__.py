"""The configuration of a run: schema.py declares it, load.py reads it, help.py describes it."""

from sftron.config.help import describe_config
from sftron.config.load import ConfigError, load_config
from sftron.config.plain_yaml import dump_config
from sftron.config.schema import Checkpoints, Config, Evaluation, Hub, Logging, Lora, Parallelism, Wandb

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
