"""Compares LlamaForSFT with transformers on your own model, or an export with its server:

    sftron check --model path/to/model
    sftron check --model path/to/model --against vllm http://localhost:8000
    sftron check --model path/to/model --against vllm path/to/model
    sftron check --model path/to/model --against llama-server http://localhost:8080 --data rows.jsonl

Exit status: 0 all checks passed, 1 a check failed, 2 the model or the prompts cannot be used.
"""

import argparse

from sftron.commands.arguments import as_path, device, make_parser, positive, refusing, write_json
from sftron.errors import show
from sftron.regular_file import expand_home

_OTHER_SERVERS = ("llama-server", "ollama")


@refusing(ValueError, OSError, tool="sftron check")
def main(arguments: list[str]) -> int:
    parser = make_parser(
        "check",
        "LlamaForSFT against transformers, and peft: logits, packing, isolation, generation, weights.",
        epilog="docs/verify.md lists what a pass of each check proves.",
    )
    add = parser.add_argument
    add("--model", type=as_path, required=True, help="folder of a Hugging Face model (safetensors)")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--native", type=as_path, help="compare the weights in this folder with --model, e.g. an export")
    other.add_argument("--adapter", type=as_path, help="an adapter for --model in peft's format; the reference is peft")
    other.add_argument(
        "--against",
        nargs=2,
        type=expand_home,
        metavar=("KIND", "WHERE"),
        help="compare --model with a server: `vllm` and its URL, or a folder for `vllm serve` to serve; `gguf` and "
        "a file; with --data, also `llama-server` or `ollama` and a URL",
    )
    add(
        "--data",
        type=as_path,
        help="with --against: compare the prompt and the stop of each trained turn of these rows "
        "(a file, or a run's configuration) in place of answers",
    )
    add("--prompts", type=as_path, help="JSONL of `messages` that end with a user's (default: five examples)")
    add("--limit", type=positive, help="use the first LIMIT prompts, or rows of --data, only")
    add("--max-new-tokens", type=positive, help="limit of each generation (24)")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="the type that LlamaForSFT computes in (float32); with --against, the server's type (bfloat16; "
        "float32 for a folder)",
    )
    add(
        "--weights",
        type=positive,
        metavar="N",
        help="with --data, and llama-server or vllm: also compare the log-probabilities of the answers of N turns",
    )
    add("--served-model", metavar="NAME", help="which model of the server, if it serves several")
    add("--timeout", type=positive, metavar="SECONDS", help="how long a reply of the server may take (120)")
    add("--device", type=device, help="cpu (default) or cuda")
    add("--json", type=as_path, metavar="FILE", help="write the report there too")
    options = parser.parse_args(arguments)
    if problem := _problem(options):
        parser.error(problem)
    if options.data:
        from sftron.checks.served_turns import check_served_turns

        report = check_served_turns(
            options.model,
            options.data,
            tuple(options.against),
            limit=options.limit,
            served_model=options.served_model,
            timeout=options.timeout or 120,
            num_weighed=options.weights or 0,
        )
        show(report.as_text())
        write_json(options.json, report.as_dict())
        return 0 if report.passed else 1
    # Imported here, so that --help takes no time.
    import torch
    from transformers.utils.logging import disable_progress_bar

    from sftron.checks.parity import EXAMPLE_PROMPTS, check_parity, read_prompts
    from sftron.checks.served import check_served

    disable_progress_bar()
    prompts = read_prompts(options.prompts) if options.prompts else EXAMPLE_PROMPTS
    prompts, dtype = prompts[: options.limit], options.dtype and getattr(torch, options.dtype)
    if options.against:
        report = check_served(
            options.model,
            prompts,
            tuple(options.against),
            max_new_tokens=options.max_new_tokens or 24,
            dtype=dtype,
            device=options.device,
            served_model=options.served_model,
            timeout=options.timeout or 120,
        )
    else:
        report = check_parity(
            options.model,
            prompts,
            max_new_tokens=options.max_new_tokens or 24,
            dtype=dtype or torch.float32,
            device=options.device,
            native_folder=options.native,
            adapter=options.adapter,
        )
    show(report.as_text())
    write_json(options.json, report.as_dict())
    return 0 if report.passed else 1


def _problem(options: argparse.Namespace) -> str:
    """Returns why the options cannot be used together; empty if they can."""
    kind = (options.against or [""])[0]
    if options.data and not kind:
        return "give --data only with --against KIND WHERE"
    if (options.served_model or options.timeout) and kind not in ("vllm", *(_OTHER_SERVERS if options.data else ())):
        return f"give --served-model and --timeout only with --against {'KIND' if options.data else 'vllm'} URL"
    if kind in _OTHER_SERVERS and not options.data:
        return f"give --against {kind} only with --data: answers are compared with vllm and gguf"
    if options.weights and not options.data:
        return "give --weights only with --data, whose answers are compared"
    of_answers = ("prompts", "max_new_tokens", "dtype", "device")
    if options.data and (given := [name for name in of_answers if getattr(options, name) is not None]):
        named = ", ".join("--" + name.replace("_", "-") for name in given)
        return f"remove {named}: with --data, no answer is computed"
    return ""
