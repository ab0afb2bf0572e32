"""Line charts, described once and drawn by matplotlib: as SVG for pages, in the light and the dark scheme, and as PNG.

Each line can be identified by its color, its dashes, or the letter at its end.
"""

from __future__ import annotations

import base64
import io
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from sftron.visible_text import visible_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#1f62ad", "#c2410c", "#18744c", "#8b3fb0", "#8a5a00", "#0b7285", "#b3261e", "#62656d")
"""The colors of lines in the light scheme, as --s0, --s1, ... of charts.css."""
DARK_COLORS = ("#82b5ee", "#f5a06b", "#6cc79b", "#cf9df0", "#dfb25b", "#6cc5d6", "#ff8a80", "#b4b7be")
DASHES = ((), (7, 3), (2, 3), (9, 3, 2, 3))
_SIZE = (480 / 72, 270 / 72)
_LETTER = 0.06
"""The minimum distance between the centers of two letters, as a share of the chart's height."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "lines.scale_dashes": False,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.linewidth": 1,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
_STYLE |= dict.fromkeys(
    ("axes.spines.top", "axes.spines.right", "axes.spines.left", "xtick.bottom", "ytick.left"), False
)

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart; lines with the same style share color and dashes."""

    points: tuple[Point, ...]
    """The points (x, y) by increasing x."""
    style: int
    letter: str = ""
    """The text at the end of the line."""
    is_faint: bool = False
    """Whether the line is drawn thin and below the others, as a single run whose group has a line for its mean."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of several lines. Its name also names its file, and is unique on a page."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    from_zero: bool = False
    """Whether the y axis begins at 0, so that heights are proportional to values."""
    note: str = ""

    @property
    def points(self) -> list[Point]:
        return [point for line in self.lines for point in line.points]


def line_color(style: int) -> int:
    """Returns the index of the color of a style, as in the CSS classes s0, s1, ..."""
    return style % len(COLORS)


def line_dashes(style: int) -> tuple[int, ...]:
    """Returns the lengths of a style's dashes and gaps. After eight styles, colors repeat with other dashes."""
    return DASHES[(style + style // len(COLORS)) % len(DASHES)]


def thinned(points: Sequence[Point], most: int) -> tuple[Point, ...]:
    """Returns the points or, if there are more than `most`, their means over `most` spans."""
    if len(points) <= most:
        return tuple(points)
    bounds = [number * len(points) // most for number in range(most + 1)]
    return tuple(mean_point(points[start:end]) for start, end in pairwise(bounds))


def mean_point(points: Sequence[Point]) -> Point:
    return statistics.fmean(x for x, _ in points), statistics.fmean(y for _, y in points)


def chart_images(chart: Chart) -> Markup:
    """Returns a <picture> of the chart in the scheme of the reader, for a page; empty if the chart has no points."""
    if not chart.points:
        return Markup()
    light, dark = (_svg(chart, is_dark=is_dark) for is_dark in (False, True))
    title = escape(visible_text(chart.title))
    source = f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
    return Markup(f'<picture>{source}<img src="{light}" alt="{title}"></picture>')  # the title is escaped


def _svg(chart: Chart, *, is_dark: bool) -> str:
    """Returns a data URL of the chart as matplotlib writes it; equal charts give equal ones."""
    drawn, metadata = io.BytesIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
    _draw(chart, is_dark=is_dark, file=drawn, format="svg", transparent=True, metadata=metadata)
    return f"data:image/svg+xml;base64,{base64.b64encode(drawn.getvalue()).decode()}"


def write_images(charts: Sequence[Chart], folder: Path, *, names: Sequence[str]) -> None:
    """Writes each chart that has points as a PNG file; `names` are the legend entries of the styles 0, 1, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for chart in charts:
        if chart.points:
            _draw(chart, names=names, title=chart.title, file=folder / f"{chart.name}.png", dpi=200)


def _draw(
    chart: Chart, *, file: Any, is_dark: bool = False, names: Sequence[str] = (), title: str = "", **options: Any
) -> None:
    """Draws the chart, with `title` above it and a legend of `names` below it."""
    import matplotlib
    from matplotlib.figure import Figure

    soft, grid = ("#9a9da5", "#33363c") if is_dark else ("#62656d", "#e4e1db")
    texts = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.labelcolor", "ytick.labelcolor")
    style = {**_STYLE, **dict.fromkeys(texts, soft), "grid.color": grid, "svg.hashsalt": chart.name}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        # The font may lack the characters of a name; the image shows a box.
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
        figure = Figure(figsize=(_SIZE[0], _SIZE[1] + 0.2 * (len(names) + bool(title))), layout="constrained")
        _plot(chart, figure, names, DARK_COLORS if is_dark else COLORS)
        if title:
            figure.suptitle(visible_text(title), x=0.01, ha="left", weight="bold", color="#24262b")
        figure.savefig(file, **options)


def _plot(chart: Chart, figure: Figure, names: Sequence[str], colors: Sequence[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes = figure.add_subplot()
    axes.set(xlabel=visible_text(chart.x_label), ylabel=visible_text(chart.y_label))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    for line in sorted(chart.lines, key=lambda line: not line.is_faint):
        if line.points:
            axes.plot(*zip(*line.points, strict=True), **_look(line, colors), marker="o" * (len(line.points) == 1))
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    _draw_letters([line for line in chart.lines if line.letter and line.points], axes, colors)
    if names:
        handles = [Line2D([], [], **_look(Line((), style), colors)) for style in range(len(names))]
        figure.legend(handles, [visible_text(name) for name in names], loc="outside lower left", handlelength=4)


def _look(line: Line, colors: Sequence[str]) -> dict[str, Any]:
    width, opacity = (1, 0.4) if line.is_faint else (2, 1)
    style = (0, line_dashes(line.style)) if line_dashes(line.style) else "-"
    return {"color": colors[line_color(line.style)], "linestyle": style, "linewidth": width, "alpha": opacity}


def _draw_letters(lines: Sequence[Line], axes: Axes, colors: Sequence[str]) -> None:
    """Writes the letters at the ends of the lines, from the top down, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    above = float("inf")
    for line in sorted(lines, key=lambda line: -line.points[-1][1]):
        x, y = line.points[-1]
        above = min((y - low) / (high - low), above - _LETTER)
        font = {"color": colors[line_color(line.style)], "weight": "bold", "fontsize": 12, "va": "center"}
        axes.annotate(
            visible_text(line.letter), (x, low + above * (high - low)), (5, 0), textcoords="offset points", **font
        )
