"""Converts a run's checkpoint to a Hugging Face folder, or a Hugging Face folder to a checkpoint of weights:

    python tools/convert_checkpoint.py runs/my-run/checkpoints/step-1000 exported/step-1000
    python tools/convert_checkpoint.py models/SmolLM2-135M-Instruct checkpoints/smollm2

Every tensor is then read back and compared by its bits. Exit status: 0 if all are the same, 1 if some are not, 2 if the
source cannot be read or the target cannot be written.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from sftron.checkpoint.checkpoint import MANIFEST, read_state
from sftron.checkpoint.convert import checkpoint_to_hf, differing, hf_to_checkpoint
from sftron.checkpoint.hf_export import ExportSource
from sftron.config import load_config
from sftron.config.errors import exit_with, refuse, show
from sftron.train.export import export_checkpoint
from sftron.train.model_card import plain_model_card, read_base_model


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="--section.key=value overrides the run's configuration, as for a model that has moved.",
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a checkpoint, or a Hugging Face folder")
    parser.add_argument("target", type=Path, metavar="TARGET", help="the folder to make")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="for a checkpoint outside a run directory: the model's folder"
    )
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], help="the type of a Hugging Face folder (the run's)"
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
    if not (source / MANIFEST).is_file():
        hf_to_checkpoint(source, target)
        return differing(target, source)
    dtype = options.dtype and getattr(torch, options.dtype)
    run_config = source.resolve().parents[1] / "config.yaml"
    if options.model is None and run_config.is_file():
        config = load_config(run_config, overrides)
        export_checkpoint(config, source, target, dtype=dtype, stop_token_ids=options.stop_token_ids)
    elif options.model is not None:
        checkpoint_to_hf(
            source,
            target,
            source=ExportSource.read(options.model),
            dtype=dtype or torch.bfloat16,
            stop_token_ids=options.stop_token_ids,
            model_card=plain_model_card(read_base_model(str(options.model), options.model), read_state(source)["step"]),
        )
    else:
        raise ValueError(f"{source} is not in a run directory; give the model's folder (--model)")
    return differing(source, target)


def main(arguments: list[str]) -> int:
    options, overrides = parse_arguments(arguments)
    try:
        num_tensors, different = convert(options, overrides)
    except (ValueError, OSError) as error:
        return refuse(error, "convert_checkpoint")
    show(f"{options.target}: {num_tensors} tensors, {len(different)} of which differ from {options.source}")
    for name in different:
        show(f"  {name}")
    if options.json:
        found = {"target": str(options.target), "num_tensors": num_tensors, "different": different}
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 1 if different else 0


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
