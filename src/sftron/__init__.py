"""Supervised fine-tuning that you can verify.

`from sftron import ...` gives the Python API of docs/python.md. Each name is imported on first use, so `import sftron`
itself loads nothing, and the models and kernels need no dependency but torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sftcheck.check_isolation import IsolationError as IsolationError
    from sftcheck.check_isolation import check_isolation as check_isolation
    from sftcheck.record.recorder import record_step as record_step
    from sftcheck.record.recorder import record_trainer as record_trainer
    from sftcheck.verify_step import verify_step as verify_step
    from sftcheck.verify_trainer import verify_trainer as verify_trainer
    from sftron.checkpoint.export import export_hf as export_hf
    from sftron.checkpoint.hf_weights import load_model as load_model
    from sftron.checkpoint.shards import CheckpointError as CheckpointError
    from sftron.checks.inspect_run import inspect as inspect
    from sftron.checks.verify_run import verify_run as verify_run
    from sftron.config import Config as Config
    from sftron.config import ConfigError as ConfigError
    from sftron.config import load_config as load_config
    from sftron.data.chat.tokenizer import ChatTokenizer as ChatTokenizer
    from sftron.data.dataset import PackedDataset as PackedDataset
    from sftron.data.for_transformers import FlattenPacks as FlattenPacks
    from sftron.data.loader import PackLoader as PackLoader
    from sftron.data.types import Batch as Batch
    from sftron.data.types import DataError as DataError
    from sftron.data.types import Pack as Pack
    from sftron.data.types import Role as Role
    from sftron.models.llama import LlamaForSFT as LlamaForSFT
    from sftron.models.loss import weighted_loss_sum as weighted_loss_sum
    from sftron.train.chat import generate as generate
    from sftron.train.extension import Callback as Callback
    from sftron.train.extension import Extension as Extension
    from sftron.train.objective import Objective as Objective
    from sftron.train.objective import TokenLoss as TokenLoss
    from sftron.train.objective import base_hidden_states as base_hidden_states
    from sftron.train.objective import hidden_states as hidden_states
    from sftron.train.objective import label_log_probabilities as label_log_probabilities
    from sftron.train.step import train_step as train_step
    from sftron.train.trainer import Trainer as Trainer
    from sftron.train.trainer import open_trainer as open_trainer

__version__ = "0.2.0"

_MODULES = {
    "Batch": "sftron.data.types",
    "ChatTokenizer": "sftron.data.chat.tokenizer",
    "CheckpointError": "sftron.checkpoint.shards",
    "Config": "sftron.config",
    "ConfigError": "sftron.config",
    "DataError": "sftron.data.types",
    "FlattenPacks": "sftron.data.for_transformers",
    "LlamaForSFT": "sftron.models.llama",
    "Pack": "sftron.data.types",
    "PackLoader": "sftron.data.loader",
    "PackedDataset": "sftron.data.dataset",
    "Role": "sftron.data.types",
    "Callback": "sftron.train.extension",
    "Extension": "sftron.train.extension",
    "Objective": "sftron.train.objective",
    "TokenLoss": "sftron.train.objective",
    "base_hidden_states": "sftron.train.objective",
    "hidden_states": "sftron.train.objective",
    "label_log_probabilities": "sftron.train.objective",
    "train_step": "sftron.train.step",
    "Trainer": "sftron.train.trainer",
    "IsolationError": "sftcheck.check_isolation",
    "check_isolation": "sftcheck.check_isolation",
    "export_hf": "sftron.checkpoint.export",
    "generate": "sftron.train.chat",
    "inspect": "sftron.checks.inspect_run",
    "load_config": "sftron.config",
    "load_model": "sftron.checkpoint.hf_weights",
    "record_step": "sftcheck.record.recorder",
    "record_trainer": "sftcheck.record.recorder",
    "open_trainer": "sftron.train.trainer",
    "verify_run": "sftron.checks.verify_run",
    "verify_step": "sftcheck.verify_step",
    "verify_trainer": "sftcheck.verify_trainer",
    "weighted_loss_sum": "sftron.models.loss",
}

__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_MODULES)}")
    try:
        module = import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("sftron", "sftcheck"):
            raise
        message = f"sftron.{name} needs the package {error.name}: pip install 'sftron[train]'"
        raise ModuleNotFoundError(message, name=error.name) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
