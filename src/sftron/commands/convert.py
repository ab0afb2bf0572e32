"""Converts a run's checkpoint to a Hugging Face folder, or a Hugging Face folder to a checkpoint of weights:

    sftron convert runs/my-run/checkpoints/step-1000 exported/step-1000
    sftron convert models/SmolLM2-135M-Instruct checkpoints/smollm2

A checkpoint of adapters (LoRA) becomes a folder of peft or, with --merge, a model; an adapter becomes a model:

    sftron convert runs/my-lora/checkpoints/step-1000 exported/adapter
    sftron convert exported/adapter exported/merged --model models/SmolLM2-135M-Instruct

Every tensor is then read back and compared by its bits. Exit status: 0 if all are the same, 1 if some are not, 2 if the
source cannot be read or the target cannot be written.
"""

import argparse
from functools import partial
from pathlib import Path

import torch

from sftron.checkpoint.adapter import read_adapter, vllm_limits
from sftron.checkpoint.adapter_config import CONFIG as ADAPTER
from sftron.checkpoint.checkpoint import MANIFEST, read_state
from sftron.checkpoint.convert import (
    adapter_to_hf,
    checkpoint_to_adapter,
    checkpoint_to_hf,
    differing,
    differing_in_adapter,
    differing_weights,
    hf_to_checkpoint,
    lora_of,
)
from sftron.checkpoint.hf_export import ExportSource
from sftron.checkpoint.merge import MergeReport, merged_weights
from sftron.checkpoint.model_folder import local_folder, read_config
from sftron.commands.arguments import make_parser, write_json
from sftron.config import load_config
from sftron.errors import refuse, show
from sftron.models.adapters import LoraSpec
from sftron.models.quantization import as_computed
from sftron.train.exports.base_model import hub_id, read_base_model
from sftron.train.exports.exporter import export_checkpoint
from sftron.train.exports.model_card import AdapterFacts, plain_model_card
from sftron.train.start.lora import frozen_dtype


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = make_parser(
        "convert",
        __doc__,
        epilog="--section.key=value overrides the run's configuration, as for a model that has moved.",
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a checkpoint, a Hugging Face folder or an adapter")
    parser.add_argument("target", type=Path, metavar="TARGET", help="the folder to make")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="the base of an adapter; for a checkpoint outside a run directory: the model's folder",
    )
    parser.add_argument("--merge", action="store_true", help="merge a checkpoint of adapters into its base")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="the type of a Hugging Face folder (the run's), or of an adapter (float32)",
    )
    ids = {"type": lambda text: [int(each) for each in text.split(",")], "metavar": "ID,..."}
    parser.add_argument("--stop-token-ids", **ids, help="the ids that end a turn (those that the run has trained)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    return parser.parse_known_args(arguments)


def convert(options: argparse.Namespace, overrides: list[str]) -> tuple[int, list[str]]:
    """Converts the source. Returns the number of tensors and the names of those that differ after reading them back.

    Raises:
        ValueError: If the source cannot be used or the target exists.
        OSError: If the target cannot be written.
    """
    source, target = options.source, options.target
    if target.exists():
        raise ValueError(f"{target} already exists; choose another folder")
    dtype = options.dtype and getattr(torch, options.dtype)
    if (source / ADAPTER).is_file():
        return _merge_adapter(options, dtype or torch.bfloat16)
    if not (source / MANIFEST).is_file():
        hf_to_checkpoint(source, target)
        return differing(target, source)
    state, run_config = read_state(source), source.resolve().parents[1] / "config.yaml"
    spec = None if options.merge else lora_of(state)  # of the adapter that the target will be
    read_base = None
    if options.model is None and run_config.is_file():
        config = load_config(run_config, overrides)
        model = local_folder(config.model.path)
        stops = options.stop_token_ids
        export_checkpoint(config, source, target, dtype=dtype, stop_token_ids=stops, merge=options.merge)
        read_base = partial(as_computed, dtype=frozen_dtype(config))
    elif (model := options.model) is None:
        raise ValueError(f"{source} is not in a run directory; give the model's folder (--model)")
    else:
        _convert_alone(options, dtype, state["step"], spec)
    if spec is None:
        return differing(source, target, model, read_base)
    for line in vllm_limits(spec):
        show(f"WARNING    {line}")
    return differing_in_adapter(source, target, model)


def _convert_alone(options: argparse.Namespace, dtype: torch.dtype | None, step: int, spec: LoraSpec | None) -> None:
    """Converts a checkpoint outside a run directory, to an adapter if `spec` describes one; see `convert`."""
    base = read_base_model(str(options.model), options.model)
    card = plain_model_card(base, step, None if spec is None else AdapterFacts(spec=spec))
    common = {"source": ExportSource.read(options.model), "stop_token_ids": options.stop_token_ids, "model_card": card}
    if spec is None:
        dtype = dtype or torch.bfloat16
        _show_merge(checkpoint_to_hf(options.source, options.target, dtype=dtype, **common))
    else:
        common |= {"base_model": base.name if hub_id(base.name) else str(options.model), "base_revision": base.revision}
        checkpoint_to_adapter(options.source, options.target, dtype=dtype or torch.float32, **common)


def _merge_adapter(options: argparse.Namespace, dtype: torch.dtype) -> tuple[int, list[str]]:
    """Merges an adapter folder into its base; see `convert`."""
    if options.model is None:
        raise ValueError(f"{options.source} is an adapter; give the folder of its base (--model)")
    config = read_config(options.model)
    found = read_adapter(options.source, config)
    card = plain_model_card(read_base_model(str(options.model), options.model), None)
    stops = options.stop_token_ids
    report = adapter_to_hf(
        options.source, options.target, base=options.model, dtype=dtype, stop_token_ids=stops, model_card=card
    )
    _show_merge(report)
    weights = merged_weights(options.model, config, found.tensors, found.spec, MergeReport(dtype))
    return differing_weights(weights, options.target)


def _show_merge(report: MergeReport | None) -> None:
    for line in report.lines() if report else ():
        show(line)


def main(arguments: list[str]) -> int:
    options, overrides = parse_arguments(arguments)
    try:
        num_tensors, different = convert(options, overrides)
        found = {"target": str(options.target), "num_tensors": num_tensors, "different": different}
        write_json(options.json, found)
    except (ValueError, OSError) as error:
        return refuse(error, "sftron convert")
    show(f"{options.target}: {num_tensors} tensors, {len(different)} of which differ from {options.source}")
    for name in different:
        show(f"  {name}")
    return 1 if different else 0
