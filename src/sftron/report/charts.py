"""Line charts as inline SVG: they follow the page's colours, light and dark, and their text can be selected.

A line is told apart by its colour, its dashes and the letter at its end, so that any one of them is enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sftron.report.page import escaped

NUM_COLORS = 8
DASHES = ("", "7 3", "2 3", "9 3 2 3")
_WIDTH, _HEIGHT = 480.0, 270.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 24.0, 12.0, 42.0
_LETTER_HEIGHT = 13.0

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """points: by rising x. style: lines of one style have one colour and dash. letter: written at the line's end.

    is_faint: drawn thin behind the others, as one of the runs that a mean is of.
    """

    points: tuple[Point, ...]
    style: int
    letter: str = ""
    is_faint: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """name: of its file, where it has one. from_zero: the y axis begins at 0, so that heights are in proportion."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    from_zero: bool = False
    note: str = ""


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers, 1, 2 or 5 times a power of ten apart, that span `low` to `high`: 2 to `most` + 2 of them."""
    # Means of the same numbers differ in their last digits, which are no distance to draw. A number alone is drawn
    # against zero: an axis around it would run into steps and tokens that there are not, below zero even.
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        low, high = min(0.0, low), max(0.0, high)
        high += low == high
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12 - math.floor(math.log10(step))) for number in range(first, last + 1)]


def tick_words(ticks: Sequence[float]) -> list[str]:
    """The ticks with as many decimals as tell them apart."""
    step = ticks[1] - ticks[0]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{tick:,.{decimals}f}" for tick in ticks] if decimals <= 6 else [f"{tick:.3g}" for tick in ticks]


def chart_html(chart: Chart) -> str:
    """A figure; a chart without a point says so."""
    note = f"<small>{escaped(chart.note)}</small>" if chart.note else ""
    caption = f"<figcaption>{escaped(chart.title)}{note}</figcaption>"
    points = [point for line in chart.lines for point in line.points]
    if not points:
        return f'<figure class="chart">{caption}<p class="facts">Nothing was recorded.</p></figure>\n'
    x_ticks = nice_ticks(min(x for x, _ in points), max(x for x, _ in points))
    lowest = min(y for _, y in points)
    y_ticks = nice_ticks(min(0.0, lowest) if chart.from_zero else lowest, max(y for _, y in points))
    plane = _Plane(x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1])
    ordered = sorted(chart.lines, key=lambda line: not line.is_faint)
    return (
        f'<figure class="chart">{caption}\n'
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="{escaped(chart.title)}">\n'
        + _axes(chart, plane, x_ticks, y_ticks)
        + "".join(_line(line, plane) for line in ordered if line.points)
        + _letters(ordered, plane)
        + "</svg></figure>\n"
    )


def legend_html(words: Sequence[str], letters: Sequence[str]) -> str:
    """What the lines of style 0, 1, ... are."""
    rows = "".join(
        f'<li><svg viewBox="0 0 44 12" aria-hidden="true"><path class="line s{style % NUM_COLORS}"{_dash(style)} '
        f'd="M1 6H43"/></svg><b class="s{style % NUM_COLORS}">{escaped(letter)}</b> {escaped(text)}</li>\n'
        for style, (text, letter) in enumerate(zip(words, letters, strict=True))
    )
    return f'<ul class="legend">\n{rows}</ul>\n'


@dataclass(frozen=True, slots=True)
class _Plane:
    """What is drawn where."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (_HEIGHT - _TOP - _BOTTOM)


def _axes(chart: Chart, plane: _Plane, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [
        f'<path class="grid" d="M{_LEFT:.1f} {plane.y(tick):.1f}H{right:.1f}"/>'
        f'<text class="tick end" x="{_LEFT - 6:.1f}" y="{plane.y(tick) + 3.5:.1f}">{word}</text>\n'
        for tick, word in zip(y_ticks, tick_words(y_ticks), strict=True)
    ]
    parts += [
        f'<text class="tick middle" x="{plane.x(tick):.1f}" y="{bottom + 15:.1f}">{word}</text>\n'
        for tick, word in zip(x_ticks, tick_words(x_ticks), strict=True)
    ]
    parts.append(f'<path class="axis" d="M{_LEFT:.1f} {bottom:.1f}H{right:.1f}"/>\n')
    middle = (_LEFT + right) / 2
    parts.append(f'<text class="tick middle" x="{middle:.1f}" y="{_HEIGHT - 8:.1f}">{escaped(chart.x_label)}</text>\n')
    turn = f"translate(13 {(_TOP + bottom) / 2:.1f}) rotate(-90)"
    parts.append(f'<text class="tick middle" transform="{turn}">{escaped(chart.y_label)}</text>\n')
    return "".join(parts)


def _line(line: Line, plane: _Plane) -> str:
    kind = f"line s{line.style % NUM_COLORS}" + (" faint" if line.is_faint else "")
    if len(line.points) == 1:
        ((x, y),) = line.points
        return f'<circle class="{kind}" cx="{plane.x(x):.1f}" cy="{plane.y(y):.1f}" r="3"/>\n'
    path = "L".join(f"{plane.x(x):.1f} {plane.y(y):.1f}" for x, y in line.points)
    return f'<path class="{kind}"{_dash(line.style)} d="M{path}"/>\n'


def _letters(lines: Sequence[Line], plane: _Plane) -> str:
    """At the lines' ends, pushed apart where they would cover each other."""
    ends = [(plane.y(line.points[-1][1]), plane.x(line.points[-1][0]), line) for line in lines if _has_letter(line)]
    ends.sort(key=lambda end: end[0])
    heights: list[float] = []
    for y, *_ in ends:
        heights.append(max(y, heights[-1] + _LETTER_HEIGHT) if heights else y)
    # What was pushed below the axis is pushed back up.
    limit = _HEIGHT - _BOTTOM
    for number in reversed(range(len(heights))):
        heights[number] = min(heights[number], limit)
        limit = heights[number] - _LETTER_HEIGHT
    return "".join(
        f'<text class="letter s{line.style % NUM_COLORS}" x="{x + 5:.1f}" y="{height + 4:.1f}">'
        f"{escaped(line.letter)}</text>\n"
        for height, (_, x, line) in zip(heights, ends, strict=True)
    )


def _has_letter(line: Line) -> bool:
    return bool(line.letter and line.points)


def _dash(style: int) -> str:
    # Colours repeat after 8: the dashes of the second round are others.
    dash = DASHES[(style + style // NUM_COLORS) % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""
