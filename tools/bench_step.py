"""Whole training steps, timed by turns with transformers': speed, memory and loss; see docs/benchmarks/step.md.

    python tools/bench_step.py --model FOLDER --conversations gsm8k.jsonl --out docs/benchmarks/step-cpu.md
    python tools/bench_step.py --device cuda --out docs/benchmarks/step-gpu.md

Needs torch, transformers and numpy alone, and matplotlib for the plot. Exit status: 0 measured, whatever the targets;
1 the ways do not compute the same, so nothing was timed; 2 the arguments or the conversations cannot be used.
"""

import argparse
import json
import shlex
import sys
import time
import warnings
from pathlib import Path
from typing import Any

# The modules beside this file and sftron itself are found without an installation too.
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tools.bench import curves, lengths, packs, report
from tools.bench.conversations import LONGEST
from tools.bench.measure import DifferentLossesError


def benchmark(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    results: dict[str, Any] = {
        "machine": report.machine(device),
        "command": shlex.join(["python", *sys.argv]),
        **{part: {} for part in ("speed", "memory", "loss", "packs")},
    }
    if "packs" in options.parts:
        for shape in options.shape:
            found = timed(f"packs of {shape}", lambda shape=shape: packs.run(options, shape, device))
            results["packs"][shape] = found | {"targets": packs.targets(shape, found)}
    corpora = lengths.make_corpora(options) if set(options.parts) - {"packs"} else []
    # First, while this process holds little: two models with their optimizers take as much as a small machine has.
    for corpus in corpora if "memory" in options.parts else []:
        found = timed(f"memory, {corpus.name}", lambda corpus=corpus: lengths.memory(corpus, sys.argv))
        results["memory"][corpus.name] = {"ways": found, "targets": lengths.memory_targets(corpus.name, found)}
    for corpus in corpora:
        name = corpus.name
        if "speed" in options.parts:
            found = timed(f"speed, {name}", lambda corpus=corpus: lengths.speed(options, corpus))
            results["speed"][name] = found | {"targets": lengths.speed_targets(name, found)}
        if "loss" in options.parts:
            results["loss"][name] = timed(f"loss, {name}", lambda corpus=corpus: loss(options, corpus))
    return results


def loss(options: argparse.Namespace, corpus: lengths.Corpus) -> dict[str, Any]:
    found = curves.loss_curves(options, corpus)
    path = options.plots / f"step-loss-{corpus.name}.png" if options.plots else None
    shape = options.loss_shape or options.model or options.shape[0]
    if path:
        curves.plot(found, path, f"{shape}, {report.TITLES[corpus.name]}")
    return {
        "curves": found,
        "shape": f"{shape}, {options.loss_steps} steps of {options.per_step} conversations",
        "plot": str(path) if path else None,
        "targets": curves.curve_targets(found),
    }


def timed(what: str, work: Any) -> Any:
    started = time.perf_counter()
    result = work()
    report.say(f"{what}: {time.perf_counter() - started:.0f} s")
    return result


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    add("--parts", nargs="+", choices=("speed", "memory", "loss", "packs"), help="default: packs on a GPU, else others")
    add("--model", type=Path, metavar="FOLDER", help="a Llama in Hugging Face's format, with its tokenizer")
    add("--shape", nargs="+", metavar="NAME[:LAYERS]", help="random weights instead of --model; several for packs")
    add("--tokenizer", type=Path, metavar="FOLDER", help="else the model's, or random ids")
    add("--conversations", type=Path, metavar="FILE", help="whose lengths and text are taken")
    add("--lengths", nargs="+", choices=("flan", "file"), help="default: both where there is a file, else flan")
    add("--per-step", type=positive, default=8, help="conversations a step (default: %(default)s)")
    add("--longest", type=positive, default=LONGEST, help="of FLAN-like conversations, tokens (default: %(default)s)")
    add("--rounds", type=positive, help="steps of each way (default: 4, on a GPU 8)")
    add("--document-length", type=positive, default=512, help="tokens, for packs (default: %(default)s)")
    add("--pack-length", type=positive, default=16_384, help="tokens, for packs (default: %(default)s)")
    add("--loss-steps", type=positive, default=60, help="default: %(default)s")
    add("--held-out", type=positive, default=32, help="conversations for the loss (default: %(default)s)")
    add("--loss-shape", metavar="NAME", help="for the loss alone, random weights of a smaller shape")
    add("--learning-rate", type=float, default=2e-4, help="default: %(default)s")
    add("--peak-tflops", type=float, help="dense bf16 of the device, where the table does not know it")
    add("--seed", type=int, default=0, help="of conversations and random weights (default: %(default)s)")
    add(
        "--quick", action="store_true", help="tiny shapes and few steps, to see that it works; its numbers mean nothing"
    )
    add("--json", type=Path, metavar="FILE", help="everything that was measured")
    add("--out", type=Path, metavar="FILE", help="the report, beside what is printed")
    add("--plots", type=Path, metavar="FOLDER", help="draw the loss there; default: where --out lies")
    add("--memory-of", help=argparse.SUPPRESS)
    return with_defaults(parser.parse_args())


def with_defaults(options: argparse.Namespace) -> argparse.Namespace:
    on_gpu = options.device == "cuda"
    options.parts = options.parts or (["packs"] if on_gpu else ["speed", "memory", "loss"])
    options.rounds = options.rounds or (8 if on_gpu else 4)
    options.lengths = options.lengths or (["flan", "file"] if options.conversations else ["flan"])
    options.shape = options.shape or (["llama3.2-1b", "llama3-8b:8"] if on_gpu else ["smollm2-135m"])
    options.plots = options.plots or (options.out.parent if options.out else None)
    if options.quick:
        options.shape, options.loss_shape, options.rounds, options.loss_steps = ["tiny"], None, 2, 3
        options.document_length, options.pack_length, options.per_step, options.longest = 16, 64, 4, 64
        options.held_out = 2
    return options


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main() -> int:
    options = parse_arguments()
    # Of torch and transformers about themselves; nothing of it is about what is measured.
    warnings.simplefilter("ignore")
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        report.say("bench_step: --device cuda, but torch sees no GPU; give --device cpu")
        return 2
    try:
        if options.memory_of:
            (corpus,) = lengths.make_corpora(options)
            print(json.dumps(lengths.memory_of(options, corpus, options.memory_of)))
            return 0
        results = benchmark(options, device)
    except DifferentLossesError as error:
        report.say(f"bench_step: {error}")
        return 1
    except (ValueError, OSError) as error:
        report.say(f"bench_step: {error}")
        return 2
    text = report.markdown(results)
    print(text)
    for path, content in ((options.out, text), (options.json, json.dumps(results, indent=2) + "\n")):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
