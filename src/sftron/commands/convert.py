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
from pathlib import Path

from sftron.commands.arguments import integers, make_parser, write_json, writing
from sftron.errors import refuse, show


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
    parser.add_argument(
        "--stop-token-ids",
        type=integers,
        metavar="ID,...",
        help="the ids that end a turn (those that the run has trained)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    return parser.parse_known_args(arguments)


def main(arguments: list[str]) -> int:
    options, overrides = parse_arguments(arguments)
    # Imported here, so that --help takes no time.
    import torch

    from sftron.train.exports.conversion import convert

    try:
        with writing(options.target, "choose another TARGET"):
            num_tensors, different = convert(
                options.source,
                options.target,
                model=options.model,
                merge=options.merge,
                dtype=options.dtype and getattr(torch, options.dtype),
                stop_token_ids=options.stop_token_ids,
                overrides=overrides,
            )
        found = {"target": str(options.target), "num_tensors": num_tensors, "different": different}
        if options.json:
            with writing(options.json, "choose another place with --json"):
                write_json(options.json, found)
    except (ValueError, OSError) as error:
        return refuse(error, "sftron convert")
    show(f"{options.target}: {num_tensors} tensors, {len(different)} of which differ from {options.source}")
    for name in different:
        show(f"  {name}")
    return 1 if different else 0
