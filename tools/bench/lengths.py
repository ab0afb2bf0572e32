"""Conversations of natural lengths: padding, flattening and ours, as Hugging Face's packing blog compares them."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tools.bench import conversations, measure, models
from tools.bench.conversations import Encoder, IdEncoder, Row, TextEncoder
from tools.bench.ways import POOL_SIZE, OursWay, TransformersWay, Way, each, flatten, pad_to_longest, pool

PADDING, FLATTENING = "transformers, dynamic padding", "transformers, flattened"
LEAKING = "transformers, flattened, use_cache=True"
MINIBATCH, POOL = "sftron, minibatch", "sftron, pool"
NAMES = (PADDING, FLATTENING, MINIBATCH, POOL)

FASTER_THAN_PADDING = {"flan": 2.0, "file": 1.45}
LESS_MEMORY_THAN_PADDING = {"flan": 0.20, "file": 0.06}
FASTER_THAN_FLATTENING = 1.2


@dataclass(frozen=True, slots=True)
class Corpus:
    """Conversations whose lengths are like those of `name`. token_budget: of a pack of `pool`, so that its steps have
    as many tokens as the others' have on average. num_left_out: conversations longer than that, which no way gets."""

    name: str
    rows: list[Row]
    encoder: Encoder
    token_budget: int
    num_left_out: int


def make_corpora(options: argparse.Namespace) -> list[Corpus]:
    """flan: FLAN-like lengths, of real text where a file of conversations and a tokenizer are given, else of random
    ids. file: the conversations of the file. Raises ValueError where they cannot be used."""
    draw = random.Random(options.seed)
    # So many that the pool is full to the end.
    num_rows = options.per_step * max(options.rounds, options.loss_steps) + 2 * POOL_SIZE
    folder = options.tokenizer or options.model
    encoder: Encoder
    if options.conversations is None or folder is None:
        encoder = IdEncoder()
        vocab_size = models.shape_of(options.shape[0])["vocab_size"]
        lengths = conversations.flan_lengths(num_rows, draw, options.longest)
        made = {"flan": conversations.id_rows(lengths, vocab_size, draw)}
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        encoder = TextEncoder(tokenizer)
        read = conversations.file_rows(options.conversations)
        draw.shuffle(read)
        made = {
            "flan": conversations.flan_like_rows(read, num_rows, tokenizer, draw, options.longest),
            "file": (read * (num_rows // len(read) + 1))[:num_rows],
        }
    if missing := [name for name in options.lengths if name not in made]:
        needed = "--conversations FILE, and --model or --tokenizer"
        raise ValueError(f"--lengths {' '.join(missing)} needs {needed}; give them, or --lengths flan")
    corpora = []
    for name in options.lengths:
        rows, budget = conversations.within_budget(made[name], encoder, options.per_step)
        corpora.append(Corpus(name, rows, encoder, budget, len(made[name]) - len(rows)))
    return corpora


def make_ways(
    options: argparse.Namespace, corpus: Corpus, names: Sequence[str] = NAMES, shape: str | None = None
) -> list[Way]:
    """The ways of these names, with equal weights; transformers' share a model and an optimizer, and so do ours.

    shape: random weights of it in place of those that the options name.
    """
    sizes = models.shape_of(shape or options.shape[0])
    if isinstance(corpus.encoder, TextEncoder):
        sizes["vocab_size"] = corpus.encoder.vocab_size
    theirs = models.make_theirs(None if shape else options.model, sizes, torch.device("cpu"), options.seed)
    encoder, per_step, budget = corpus.encoder, options.per_step, corpus.token_budget
    made: list[Way] = []
    if not {PADDING, FLATTENING, LEAKING}.isdisjoint(names):
        optimizer = models.make_optimizer(theirs, options.learning_rate)
        collates = {PADDING: pad_to_longest, FLATTENING: flatten, LEAKING: flatten}
        made += [
            TransformersWay(name, theirs, optimizer, encoder, collate, per_step, use_cache=name is LEAKING)
            for name, collate in collates.items()
            if name in names
        ]
    if not {MINIBATCH, POOL}.isdisjoint(names):
        ours = models.make_ours(theirs, budget)
        optimizer = models.make_optimizer(ours, options.learning_rate)
        packs = {MINIBATCH: (each(per_step), None), POOL: (pool(budget), budget)}
        made += [OursWay(name, ours, optimizer, encoder, *pack) for name, pack in packs.items() if name in names]
    return made


# --- Speed ---


def speed(options: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    """Checked to compute the same, then timed by turns."""
    ways = {way.name: way for way in make_ways(options, corpus, (*NAMES, LEAKING))}
    few = corpus.rows[: options.per_step]
    leaking = ways.pop(LEAKING)
    checked = measure.require_same_losses([*ways.values()], few)
    disease = measure.differences([ways[PADDING], leaking], few)[LEAKING]
    device = torch.device("cpu")
    timed = measure.take_turns([*ways.values()], corpus.rows, options.rounds, device, [corpus.rows[-2:]])
    return {
        "conversations": conversations.described(corpus.rows, corpus.encoder),
        "left out": corpus.num_left_out,
        "token budget": corpus.token_budget,
        "same losses": checked,
        LEAKING: disease,
        "ways": {name: measure.summary(each) for name, each in timed.items()},
        "seconds": {name: each.seconds for name, each in timed.items()},
    }


def speed_targets(name: str, found: dict[str, Any]) -> dict[str, bool]:
    """What is asked for, in words with what was found, and whether it is reached."""
    rates = {way: each["tokens/s"] for way, each in found["ways"].items()}
    wanted = FASTER_THAN_PADDING[name]
    ratios = [
        ("minibatch over padding, the same conversations a step", rates[MINIBATCH] / rates[PADDING], wanted),
        ("pool over padding, as many tokens a step", rates[POOL] / rates[PADDING], wanted),
        ("minibatch over flattening", rates[MINIBATCH] / rates[FLATTENING], FASTER_THAN_FLATTENING),
        ("pool over flattening", rates[POOL] / rates[FLATTENING], FASTER_THAN_FLATTENING),
    ]
    return {f"{what}: {ratio:.2f}x, wanted {least}x": ratio >= least for what, ratio, least in ratios}


# --- Memory: a process for each way ---


def memory(corpus: Corpus, command: Sequence[str]) -> dict[str, dict[str, float]]:
    """By way; see `memory_of`. command: of this run."""
    found = {}
    for name in NAMES:
        alone = [sys.executable, *command, "--memory-of", name, "--lengths", corpus.name]
        ended = subprocess.run(alone, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise ValueError(f"the memory of {name} could not be measured: {ended.stderr[-2000:]}")
        found[name] = json.loads(ended.stdout.splitlines()[-1])
    return found


def memory_of(options: argparse.Namespace, corpus: Corpus, name: str) -> dict[str, float]:
    """peak: of the largest of the steps that `speed` times, in GB of 1e9 bytes, beyond what the imports hold. weights:
    how much of it is weights, gradients and AdamW's state, 16 bytes a parameter."""
    imports = _held("VmRSS")
    (way,) = make_ways(options, corpus, [name])
    for batch in way.batches(corpus.rows[-2:]):
        way.step(batch)  # makes the optimizer's state
    steps = islice(way.batches(corpus.rows), options.rounds)
    way.step(max(steps, key=lambda batch: batch.num_positions))
    return {"peak": (_held("VmHWM") - imports) / 1e9, "weights": 16 * way.num_parameters / 1e9}


def _held(field: str) -> int:
    """Bytes of this process, VmRSS now and VmHWM at most; Linux. (getrusage gives the parent's peak, if higher.)"""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def memory_targets(name: str, found: dict[str, dict[str, float]]) -> dict[str, bool]:
    wanted = LESS_MEMORY_THAN_PADDING[name]
    saved = {way: 1 - found[way]["peak"] / found[PADDING]["peak"] for way in (MINIBATCH, POOL)}
    return {
        f"peak memory of {way.split(', ')[1]}: {share:.0%} below padding, wanted {wanted:.0%}": share >= wanted
        for way, share in saved.items()
    }
