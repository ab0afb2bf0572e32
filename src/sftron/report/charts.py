"""Line charts, described once and drawn by matplotlib as SVG for pages and as PNG files.

Each line can be identified by its color, its dashes, or the letter at its end. In a page, colors are CSS variables that
follow the light or dark scheme of the reader, and text remains text.
"""

from __future__ import annotations

import io
import math
import re
import statistics
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
"""The values of --s0, --s1, ... in the light scheme of charts.css."""
DASHES = ((), (7, 3), (2, 3), (9, 3, 2, 3))
_SOFT, _GRID = "#62656c", "#e4e1db"
_VARIABLES = {color: f"var(--s{number})" for number, color in enumerate(COLORS)}
_VARIABLES |= {_SOFT: "var(--soft)", _GRID: "var(--line)"}
_WIDTH, _HEIGHT = 480.0, 270.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 24.0, 12.0, 42.0
_TITLE, _LEGEND_ROW = 26.0, 14.0
"""The heights of an image's title and of one row of its legend, in points; one point is one pixel of a page."""
_LETTER = 13.0
"""The minimum distance between the centers of two letters."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "lines.scale_dashes": False,
    "legend.frameon": False,
}
_STYLE |= dict.fromkeys(
    ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.labelcolor", "ytick.labelcolor"), _SOFT
)
_STYLE |= dict.fromkeys(
    ("axes.spines.top", "axes.spines.right", "axes.spines.left", "xtick.bottom", "ytick.left"), False
)
_STYLE |= {"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": _GRID, "grid.linewidth": 1}
_STYLE |= {"legend.fontsize": 8, "legend.labelspacing": 0.3, "legend.handlelength": 4, "legend.borderaxespad": 0.2}

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
    """A chart of several lines. Its name is also that of its file, and unique among the charts of a page."""

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
    """Returns the lengths of the dashes and gaps of a style. Colors repeat after eight styles with other dashes."""
    return DASHES[(style + style // len(COLORS)) % len(DASHES)]


def thinned(points: Sequence[Point], most: int) -> tuple[Point, ...]:
    """Returns the points or, if they are more than `most`, their means over so many spans."""
    if len(points) <= most:
        return tuple(points)
    bounds = [number * len(points) // most for number in range(most + 1)]
    return tuple(mean_point(points[start:end]) for start, end in pairwise(bounds))


def mean_point(points: Sequence[Point]) -> Point:
    return statistics.fmean(x for x, _ in points), statistics.fmean(y for _, y in points)


def nice_ticks(low: float, high: float) -> list[float]:
    """Returns 2 to 8 round numbers that span `low` to `high`, with a step of 1, 2 or 5 times a power of ten."""
    from matplotlib.ticker import MaxNLocator

    # Differences in the last digits of equal means are not significant. A single number gets an axis from zero, because
    # an axis around it could include negative steps and tokens.
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        low, high = min(0.0, low), max(0.0, high)
        high += low == high
    return [float(tick) for tick in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high)]


def tick_words(ticks: Sequence[float]) -> list[str]:
    """Returns the ticks as text, with as many decimals as are needed to distinguish them."""
    decimals = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9))
    return [f"{tick:,.{decimals}f}" if decimals <= 6 else f"{tick:.3g}" for tick in ticks]


def chart_svg(chart: Chart) -> Markup:
    """Returns the chart as an <svg> element for a page with charts.css; empty if the chart has no points."""
    if not chart.points:
        return Markup()
    drawn = io.StringIO()
    with _style(chart.name):
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        _figure(chart).savefig(drawn, format="svg", transparent=True, metadata=metadata)
    head = f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="{escape(visible_text(chart.title))}">'
    svg = re.sub(r".*?<svg[^>]*>\s*<defs>.*?</defs>", lambda _: head, drawn.getvalue(), count=1, flags=re.DOTALL)
    svg = re.sub(r'(<g) id="[^"]*"| transform="rotate\(-0 [^"]*"|font-family: [^;"]*(?:; )?', r"\1", svg)
    svg = re.sub(r'(\d\.\d)\d+(?=[\s",)])', r"\1", svg).replace("xlink:href", "href")
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    return Markup(svg)  # matplotlib has escaped the text


def write_images(charts: Sequence[Chart], folder: Path, *, names: Sequence[str]) -> None:
    """Writes each chart that has points as a PNG file; `names` are the legend entries of the styles 0, 1, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [visible_text(name) for name in names]
    with _style():
        for chart in charts:
            if chart.points:
                figure = _figure(chart, names=names, title=visible_text(chart.title))
                figure.savefig(folder / f"{chart.name}.png", dpi=200)


@contextmanager
def _style(salt: str = "") -> Iterator[None]:
    """Sets the style of the pages; `salt` makes the ids in an SVG unique among the charts of a page."""
    import matplotlib

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": salt}), warnings.catch_warnings():
        # The font may lack the characters of a name. A browser substitutes another font; an image shows a box.
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
        yield


def _figure(chart: Chart, *, names: Sequence[str] = (), title: str = "") -> Figure:
    """Returns the drawn chart, with `title` above it and a legend of `names` below it."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    foot = _LEGEND_ROW * len(names)
    height = _TITLE * bool(title) + _HEIGHT + foot
    width, inner = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    figure = Figure(figsize=(_WIDTH / 72, height / 72))
    axes = figure.add_axes((_LEFT / _WIDTH, (foot + _BOTTOM) / height, width / _WIDTH, inner / height))
    xs, ys = zip(*chart.points, strict=True)
    x, y = nice_ticks(min(xs), max(xs)), nice_ticks(min(0.0, *ys) if chart.from_zero else min(ys), max(ys))
    axes.set(xticks=x, xticklabels=tick_words(x), xlim=(x[0], x[-1]), xlabel=visible_text(chart.x_label))
    axes.set(yticks=y, yticklabels=tick_words(y), ylim=(y[0], y[-1]), ylabel=visible_text(chart.y_label))
    axes.yaxis.set_label_coords((12 - _LEFT) / width, 0.5)
    for line in sorted(chart.lines, key=lambda line: not line.is_faint):
        if line.points:
            axes.plot(*zip(*line.points, strict=True), **_look(line), marker="o" * (len(line.points) == 1))
    _draw_letters([line for line in chart.lines if line.letter and line.points], axes, inner)
    for artist in figure.findobj():
        artist.set_clip_on(False)
    if title:
        figure.text(8 / _WIDTH, 1 - 18 / height, title, color="#24262b", weight="bold")
    if names:
        handles = [Line2D([], [], **_look(Line((), style))) for style in range(len(names))]
        figure.legend(handles, names, loc="lower left", bbox_to_anchor=(0, 0))
    return figure


def _look(line: Line) -> dict[str, Any]:
    width, opacity = (1, 0.4) if line.is_faint else (2, 1)
    style = (0, line_dashes(line.style)) if line_dashes(line.style) else "-"
    return {"color": COLORS[line_color(line.style)], "linestyle": style, "linewidth": width, "alpha": opacity}


def _draw_letters(lines: Sequence[Line], axes: Axes, height: float) -> None:
    """Writes the letters at the ends of the lines, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    ends = [(line.points[-1][1] - low) / (high - low) * height for line in lines]
    order = sorted(range(len(lines)), key=lambda number: (-ends[number], number))
    centers: list[float] = []
    for number in order:
        centers.append(min(ends[number], centers[-1] - _LETTER) if centers else ends[number])
    limit = 0.0  # letters that were moved below the axis are moved up again
    for index in reversed(range(len(centers))):
        centers[index] = max(centers[index], limit)
        limit = centers[index] + _LETTER
    for center, number in zip(centers, order, strict=True):
        line, offset = lines[number], (5, center - ends[number])
        font = {"color": COLORS[line_color(line.style)], "weight": "bold", "fontsize": 12, "va": "center"}
        axes.annotate(visible_text(line.letter), line.points[-1], offset, textcoords="offset points", **font)
