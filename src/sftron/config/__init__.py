"""The run's configuration: declared in schema.py, read by reading.py, put into words by words.py."""

from sftron.config.help import describe_config
from sftron.config.load import ConfigError, dump_config, load_config
from sftron.config.schema import (
    Checkpoints,
    Config,
    Data,
    Dataset,
    Evaluation,
    General,
    Logging,
    Model,
    Optimizer,
    Packing,
    Tokenizer,
    Tokens,
    Wandb,
)

__all__ = [
    "Checkpoints",
    "Config",
    "ConfigError",
    "Data",
    "Dataset",
    "Evaluation",
    "General",
    "Logging",
    "Model",
    "Optimizer",
    "Packing",
    "Tokenizer",
    "Tokens",
    "Wandb",
    "describe_config",
    "dump_config",
    "load_config",
]
