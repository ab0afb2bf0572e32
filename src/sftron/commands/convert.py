"""Converts a run's checkpoint to a Hugging Face folder, or a Hugging Face folder to a checkpoint of weights:

    sftron convert runs/my-run/checkpoints/step-1000 exported/step-1000
    sftron convert models/SmolLM2-135M-Instruct checkpoints/smollm2

A checkpoint of adapters (LoRA) becomes a folder of peft or, with --merge, a model; an adapter becomes a model:

    sftron convert runs/my-lora/checkpoints/step-1000 exported/adapter
    sftron convert exported/adapter exported/merged --model models/SmolLM2-135M-Instruct

It then reads every tensor back and compares its bits. Exit status: 0 if all are equal, 1 if some differ, 2 if the
source cannot be read or the target cannot be written.
"""

from sftron.commands.arguments import OVERRIDES_OF_RUN, as_path, integers, make_parser, refusing, write_json, writing
from sftron.errors import show
from sftron.visible_text import counted


@refusing(ValueError, OSError, tool="sftron convert")
def main(arguments: list[str]) -> int:
    parser = make_parser("convert", __doc__, OVERRIDES_OF_RUN)
    add = parser.add_argument
    add("source", type=as_path, metavar="SOURCE", help="a checkpoint, a Hugging Face folder or an adapter")
    add("target", type=as_path, metavar="TARGET", help="the folder to write")
    add(
        "--model",
        type=as_path,
        metavar="DIR",
        help="the base of an adapter, or the model's folder for a checkpoint outside a run directory",
    )
    add("--merge", action="store_true", help="merge a checkpoint of adapters into its base")
    add(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="the type of a Hugging Face folder (the run's), or of an adapter (float32)",
    )
    add(
        "--stop-token-ids",
        type=integers,
        metavar="ID,...",
        help="the ids that end a turn (default: the ones that the run trained)",
    )
    add("--json", type=as_path, metavar="FILE", help="write the result there too")
    options, overrides = parser.parse_known_args(arguments)
    # Imported here, so that --help takes no time.
    import torch

    from sftron.train.exports import convert

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
    write_json(options.json, {"target": str(options.target), "num_tensors": num_tensors, "different": different})
    show(f"{options.target}: {len(different)} of {counted(num_tensors, 'tensors')} differ from {options.source}")
    for name in different:
        show(f"  {name}")
    return 1 if different else 0
