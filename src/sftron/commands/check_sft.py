"""Compares LlamaForSFT with transformers on your own model:

    python tools/check_sft.py --model path/to/model

Exit status: 0 all checks passed, 1 a check failed, 2 the model or the prompts cannot be used.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from sftron.errors import exit_with, refuse, show
from sftron.verify.parity import EXAMPLE_PROMPTS, check_parity, read_prompts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="LlamaForSFT against transformers, and peft: logits, packing, isolation, generation, weights.",
        epilog="docs/verify.md lists what a pass of each check proves.",
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face model (safetensors)")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--native", type=Path, help="compare the weights in this folder with --model, e.g. an export")
    other.add_argument("--adapter", type=Path, help="an adapter of --model in peft's format, compared with peft")
    parser.add_argument("--prompts", type=Path, help="JSONL of `messages` ending in a user's (default: five examples)")
    parser.add_argument("--limit", type=positive, help="use the first LIMIT prompts only")
    parser.add_argument(
        "--max-new-tokens", type=positive, default=24, help="limit of each generation (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="the type that LlamaForSFT computes in"
    )
    parser.add_argument("--device", type=torch.device, help="cpu (default) or cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    return parser.parse_args()


def positive(text: str) -> int:
    """Parses an integer of 1 or more; argparse reports a ValueError with the name of the argument."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main() -> int:
    arguments = parse_arguments()
    disable_progress_bar()
    try:
        prompts = read_prompts(arguments.prompts) if arguments.prompts else EXAMPLE_PROMPTS
        report = check_parity(
            arguments.model,
            prompts[: arguments.limit],
            max_new_tokens=arguments.max_new_tokens,
            dtype=getattr(torch, arguments.dtype),
            device=arguments.device,
            native_folder=arguments.native,
            adapter=arguments.adapter,
        )
        show(report.table())
        if arguments.json:
            arguments.json.write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        return refuse(error, "check_sft")
    return 0 if report.passed else 1


if __name__ == "__main__":
    exit_with(main)
