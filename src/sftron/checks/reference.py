"""The reference for the native model: transformers' own model, with an adapter loaded by peft if one is given."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from sftron.checkpoint.adapter import WEIGHTS, is_of_wrapper
from sftron.checkpoint.hf_weights import SafetensorsFolder
from sftron.checkpoint.model_folder import read_json
from sftron.checks.report import NotMeasuredError
from sftron.models.adapters import MAGNITUDE
from sftron.models.mxfp4 import MXFP4, quant_method
from sftron.models.quantization import NF4, from_stored, is_matrix, to_stored
from sftron.models.wrappers import wrapper_of
from sftron.train.run import Setup, frozen_dtype


def load_reference(folder: Path, dtype: torch.dtype, device: torch.device, adapter: Path | None = None) -> Any:
    """Loads transformers' own model with eager attention, without the generation settings of its folder.

    Raises:
        ValueError: peft does not load the whole adapter, or is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
    from transformers.utils.quantization_config import Mxfp4Config

    config = read_json(folder / "config.json")
    wrapper, is_mxfp4 = wrapper_of(config), quant_method(config) == MXFP4
    # Qwen 3.5 is the only wrapper with a class that loads just the text model; peft gives its adapters other names.
    is_text = wrapper is None or (wrapper.has_text_class and (adapter is None or not is_of_wrapper(adapter)))
    kind = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    # On a GPU, transformers would otherwise compute in MXFP4.
    options: dict[str, Any] = {"quantization_config": Mxfp4Config(dequantize=True)} if is_mxfp4 else {}
    model: Any = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager", **options)
    model.eval().to(device)
    # Otherwise generate() would take sampling or a repetition penalty from the model's folder.
    model.generation_config = GenerationConfig()
    if adapter is not None and (wrong := attach_adapter(model, adapter)):
        raise ValueError(
            f"{adapter}: peft does not load the whole adapter: {', '.join(wrong[:3])} ({len(wrong)} such keys)"
        )
    return model


def load_rounded_reference(setup: Setup) -> Any:
    """Loads transformers' own model in fp32, with the rounding that `model.frozen_dtype` gives to frozen matrices."""
    model = load_reference(setup.model.folder, torch.float32, setup.ranks.device)
    if setup.config.lora is not None:
        saved, dtype = setup.config.lora.modules_to_save, frozen_dtype(setup.config)
        outside = setup.model.compute_dtype if dtype == NF4 else dtype
        for name, parameter in model.named_parameters():
            if is_matrix(name, parameter) and name.split(".")[-2] not in saved:
                rounded = to_stored(parameter.detach(), dtype if ".layers." in name else outside)
                parameter.data.copy_(from_stored(rounded, torch.float32))
    return model


def attach_adapter(reference: Any, folder: Path) -> list[str]:
    """Adds the adapter in `folder` to transformers' model with peft, in place.

    Returns the keys that the folder lacks or that peft does not know. Raises NotMeasuredError if peft is not installed.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise NotMeasuredError(f"peft is missing ({error}): pip install 'sftron[lora]'") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about keys that are reported here
        adapted: Any = PeftModel.from_pretrained(reference, folder)
    names = (name for name, _ in adapted.named_parameters(remove_duplicate=False))
    known = {_in_file(name) for name in names if ".lora_" in name or ".modules_to_save." in name}
    with SafetensorsFolder(folder, WEIGHTS) as source:
        found = set(source.names())
    return sorted(f"{name} is {'missing' if name in known else 'unexpected'}" for name in known ^ found)


def _in_file(name: str) -> str:
    """Returns a parameter's name in an adapter's file, given its name in peft's model."""
    name = name.replace(".modules_to_save.default", "").replace(".default", "")
    return name.removesuffix(".weight") if name.endswith(f"{MAGNITUDE}.weight") else name
