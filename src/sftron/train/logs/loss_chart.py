"""The picture of a run, loss.png: the loss of every step and of every evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sftron.report.charts import Chart, Line, Point, thinned, write_images
from sftron.train.logs import console
from sftron.train.run_directory import RunDirectory, read_records

_MOST_POINTS, _MOST_MEANS = 400, 40
"""The maximum number of points in the faint line of the steps, and in the line of their means."""


def write_loss_chart(directory: RunDirectory) -> Path | None:
    """Draws loss.png from metrics.jsonl and evaluations.jsonl. Returns its path, or None if there is nothing to draw.

    Only the main rank draws. A failure is reported and ends nothing.
    """
    if not directory.is_main:
        return None
    try:
        steps = _points((record["step"], record["loss"]) for record in read_records(directory.metrics))
        sets: dict[str, list[Point]] = {}
        for record in read_records(directory.evaluations):
            for name, found in record["sets"].items():
                sets.setdefault(name, []).extend(_points([(record["step"], found["loss"])]))
        lines, names = [Line(thinned(steps, _MOST_MEANS), 0)], ["training"]
        if len(steps) > _MOST_MEANS:
            lines.append(Line(thinned(steps, _MOST_POINTS), 0, is_faint=True))
            names = [f"training: every step, and means of {_MOST_MEANS} spans of steps"]
        for style, (name, points) in enumerate(sets.items(), start=1):
            lines.append(Line(tuple(points), style, letter="e" if len(sets) == 1 else f"e{style}"))
            names.append(f"{lines[-1].letter}  evaluation, {name}")
        chart = Chart("loss", directory.folder.name, "step", "loss", tuple(lines))
        if not chart.points:
            return None
        write_images([chart], directory.folder, names=names)
        return directory.folder / f"{chart.name}.png"
    except Exception as error:  # a full disk, a damaged line, a fault of matplotlib
        console.write(f"WARNING    loss.png could not be drawn: {error}")
        return None


def _points(pairs: Iterable[tuple[int, float | None]]) -> list[Point]:
    return [(float(step), loss) for step, loss in pairs if loss is not None]
