"""Does it learn the same? Every way trained from the same weights on the same conversations, and evaluated unpacked."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tools.bench import lengths
from tools.bench.conversations import Row
from tools.bench.lengths import MINIBATCH, NAMES, PADDING, Corpus
from tools.bench.ways import Way

NUM_EVALUATIONS = 6
REORDERED = MINIBATCH + ", another order"
"""The yardstick: what the order of the conversations alone makes of the same steps."""


def loss_curves(options: argparse.Namespace, corpus: Corpus) -> dict[str, list[dict[str, float]]]:
    """By way: tokens and seconds trained, and the validation loss after them, from before the first step on.

    Seconds are of this way alone in the process, so they are not by turns; read them for the shape only.
    """
    num_rows = options.per_step * options.loss_steps
    held_out, rows = corpus.rows[: options.held_out], corpus.rows[options.held_out :][:num_rows]
    shuffled = random.Random(options.seed + 1).sample(rows, len(rows))
    runs = [(name, name, rows) for name in NAMES] + [(REORDERED, MINIBATCH, shuffled)]
    curves = {}
    for name, way_name, its_rows in runs:
        (way,) = lengths.make_ways(options, corpus, [way_name], options.loss_shape)
        curves[name] = _train(way, its_rows, held_out, options.loss_steps)
    return curves


def _train(way: Way, rows: Sequence[Row], held_out: Sequence[Row], num_steps: int) -> list[dict[str, float]]:
    between = max(1, num_steps // NUM_EVALUATIONS)
    tokens, seconds = 0, 0.0
    curve = [{"tokens": 0, "seconds": 0.0, "loss": validation_loss(way, held_out)}]
    started = time.perf_counter()
    for number, batch in enumerate(way.batches(rows), 1):
        way.step(batch)
        tokens += batch.num_tokens
        if number % between == 0:
            seconds += time.perf_counter() - started
            curve.append({"tokens": tokens, "seconds": seconds, "loss": validation_loss(way, held_out)})
            started = time.perf_counter()
    if curve[-1]["tokens"] != tokens:
        seconds += time.perf_counter() - started
        curve.append({"tokens": tokens, "seconds": seconds, "loss": validation_loss(way, held_out)})
    return curve


def validation_loss(way: Way, held_out: Sequence[Row]) -> float:
    """Mean over the trained tokens, each conversation alone: nothing to pad, nothing to be packed with."""
    return torch.cat([way.token_losses([row]) for row in held_out]).mean().item()


def curve_targets(curves: dict[str, list[dict[str, float]]]) -> dict[str, bool]:
    """Ends agree within twice what another order of the conversations makes, or 1 %."""
    ends = {name: curve[-1]["loss"] for name, curve in curves.items()}
    noise = max(2 * abs(ends[REORDERED] - ends[MINIBATCH]), 0.01 * ends[PADDING])
    return {
        f"validation loss, {name}: {ends[name]:.4f}, padding {ends[PADDING]:.4f} +- {noise:.4f}": (
            abs(ends[name] - ends[PADDING]) <= noise
        )
        for name in NAMES
        if name != PADDING
    }


def plot(curves: dict[str, list[dict[str, float]]], path: Path, title: str) -> None:
    """Loss against tokens and against seconds. Raises ModuleNotFoundError without matplotlib (pip install
    'sftron[plots]')."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (by_tokens, by_seconds) = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for name, curve in curves.items():
        style = {"linestyle": "dotted" if name == REORDERED else "solid", "marker": "."}
        losses = [each["loss"] for each in curve]
        by_tokens.plot([each["tokens"] for each in curve], losses, label=name, **style)
        by_seconds.plot([each["seconds"] for each in curve], losses, label=name, **style)
    by_tokens.set(xlabel="real tokens", ylabel="validation loss, unpacked", title=title)
    by_seconds.set(xlabel="seconds of training", title="the same, by time")
    by_tokens.legend(fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
