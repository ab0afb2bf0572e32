"""Copies of a model and of an adapter with only the first layers, for checks of large models."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from sftron.checkpoint import adapter as adapter_files
from sftron.checkpoint.hf_weights import SafetensorsFolder
from sftron.checkpoint.model_folder import read_json
from sftron.models.wrappers import text_config, with_text_config


def layer_of(name: str) -> int:
    """Returns the number of the layer in the name of a tensor or module; -1 if it is in no layer."""
    found = re.search(r"\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def cut_adapter(source: Path, folder: Path, num_layers: int) -> None:
    """Copies the adapter in `source` with only the tensors of the first `num_layers` layers to `folder`."""
    folder.mkdir(parents=True)
    shutil.copyfile(source / adapter_files.CONFIG, folder / adapter_files.CONFIG)
    with SafetensorsFolder(source, adapter_files.WEIGHTS) as tensors:
        kept = {name: tensors.read(name) for name in tensors.names() if layer_of(name) < num_layers}
    save_file(kept, folder / adapter_files.WEIGHTS, metadata={"format": "pt"})


def cut_model(source: Path, folder: Path, num_layers: int) -> None:
    """Copies the model in `source` with only its first `num_layers` layers to `folder`."""
    folder.mkdir(parents=True)
    for path in source.glob("*.json"):
        if not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    config = read_json(source / "config.json")
    changes: dict[str, Any] = {"num_hidden_layers": num_layers}
    if isinstance(layer_types := text_config(config)[0].get("layer_types"), list):
        changes["layer_types"] = layer_types[:num_layers]
    (folder / "config.json").write_text(json.dumps(with_text_config(config, changes)), encoding="utf-8")
    with SafetensorsFolder(source) as weights:
        names = weights.stored_names
        kept = {names[name]: weights.read(name) for name in weights.names() if layer_of(name) < num_layers}
        for name, read in weights.carried().items():
            # Other layers, such as a vision tower's, stay.
            if not (name.startswith("model.layers.") and layer_of(name) >= num_layers):
                kept[name] = read()
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
