"""The same charts as PNG files, by matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sftron.report.charts import DASHES, NUM_COLORS, Chart, Line, nice_ticks

_COLORS = ("#1f62ad", "#c2410c", "#18744c", "#8b3fb0", "#8a5a00", "#0b7285", "#b3261e", "#62656d")
_LINE_STYLES: tuple[Any, ...] = ("-", (0, (7, 3)), (0, (2, 3)), (0, (9, 3, 2, 3)))


def write_images(charts: Sequence[Chart], folder: Path, *, words: Sequence[str], letters: Sequence[str]) -> list[Path]:
    """One file a chart that has points. words: what the lines of style 0, 1, ... are.

    Raises ImportError where matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in charts:
        if not any(line.points for line in chart.lines):
            continue
        figure = Figure(figsize=(7, 4.4), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        for line in chart.lines:
            _draw(axes, line, words, letters)
        axes.set_title(chart.title, loc="left", fontsize=11)
        axes.set_xlabel(chart.x_label)
        axes.set_ylabel(chart.y_label)
        points = [point for line in chart.lines for point in line.points]
        for numbers, set_limits in (([x for x, _ in points], axes.set_xlim), ([y for _, y in points], axes.set_ylim)):
            if min(numbers) == max(numbers):
                first, *_, last = nice_ticks(min(numbers), max(numbers))
                set_limits(first, last)
        if chart.from_zero:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower left", fontsize=8, frameon=False)
        written.append(folder / f"{chart.name}.png")
        figure.savefig(written[-1])
    return written


def _draw(axes: Any, line: Line, words: Sequence[str], letters: Sequence[str]) -> None:
    if not line.points:
        return
    color = _COLORS[line.style % NUM_COLORS]
    dashes = _LINE_STYLES[(line.style + line.style // NUM_COLORS) % len(DASHES)]
    label = None if line.is_faint else f"{letters[line.style]}  {words[line.style]}"
    axes.plot(
        [x for x, _ in line.points],
        [y for _, y in line.points],
        color=color,
        linestyle=dashes,
        linewidth=0.8 if line.is_faint else 1.8,
        alpha=0.4 if line.is_faint else 1.0,
        marker="o" if len(line.points) == 1 else None,
        label=label,
    )
    if line.letter:
        axes.annotate(
            line.letter,
            line.points[-1],
            xytext=(4 + 9 * (line.style % 4), 0),  # beside each other where lines end alike
            textcoords="offset points",
            va="center",
            color=color,
            fontweight="bold",
            fontsize=9,
        )
