"""Charts are well-formed SVG whose marks lie where the numbers put them, and can be read without color."""

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sftron.report.charts import (
    COLORS,
    DASHES,
    Chart,
    Line,
    chart_svg,
    line_color,
    line_dashes,
    nice_ticks,
    tick_words,
    write_images,
)
from sftron.report.page import asset

SVG = "{http://www.w3.org/2000/svg}"


def chart(*lines: Line, from_zero: bool = False) -> Chart:
    return Chart("loss", "Loss", "tokens", "loss", lines, from_zero=from_zero)


def drawn(chart: Chart) -> ElementTree.Element:
    svg = str(chart_svg(chart)).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return ElementTree.fromstring(svg)


def texts(root: ElementTree.Element) -> dict[str, tuple[float, float]]:
    """Where each text stands."""
    return {text.text or "": (float(text.get("x", 0)), float(text.get("y", 0))) for text in root.iter(f"{SVG}text")}


def lines_of(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [path for path in root.iter(f"{SVG}path") if re.search(r"stroke: var\(--s\d\)", path.get("style", ""))]


@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12))
def test_ticks_are_evenly_apart_and_span_what_they_should(low: float, size: float) -> None:
    high = low + size
    assume(high - low >= 1e-9 * max(abs(low), 1))  # not closer together than their digits
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 8
    step = ticks[1] - ticks[0]
    tolerance = 1e-6 * max(step, abs(low) * 1e-6)
    assert ticks[0] - tolerance <= low < high <= ticks[-1] + tolerance
    assert ticks == pytest.approx([ticks[0] + n * step for n in range(len(ticks))], abs=tolerance)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.42, 1.17, ["0.4", "0.6", "0.8", "1.0", "1.2"]),
        (0, 16_384, ["0", "5,000", "10,000", "15,000", "20,000"]),
        (2.0, 2.0000000000000004, ["0.0", "0.5", "1.0", "1.5", "2.0"]),
        (0.0, 0.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_ticks_have_the_decimals_that_distinguish_them_and_one_number_is_drawn_against_zero(
    low: float, high: float, words: list[str]
) -> None:
    assert tick_words(nice_ticks(low, high)) == words


def test_a_chart_is_well_formed_whatever_its_words() -> None:
    hostile, visible = "<b>&\"' $x$ \u202e\x1b", "<b>&\"' $x$ <U+202E>␛"
    root = drawn(Chart("x", hostile, hostile, "y", (Line(((1, 1.0), (2, 0.5)), 0, letter=hostile),)))
    assert [text.text for text in root.iter(f"{SVG}text")].count(visible) == 2
    assert root.get("aria-label") == visible


def test_points_lie_where_the_ticks_are() -> None:
    root = drawn(chart(Line(((0, 0.0), (10, 100.0)), 0), from_zero=True))
    (path,) = lines_of(root)
    ends = [float(number) for number in re.findall(r"[\d.]+", path.get("d", ""))]
    at = texts(root)
    # A word stands next to its grid line, not on it: the words of y are as far below theirs everywhere.
    below = at["100"][1] - ends[3]
    assert ends[:3] == pytest.approx([64, 228, at["10"][0]], abs=0.2)
    assert at["20"][1] - below == pytest.approx(ends[1] - 0.2 * (ends[1] - ends[3]), abs=0.2)
    assert abs(below) < 6
    assert "0" not in texts(drawn(chart(Line(((1, 90.0), (2, 100.0)), 0))))


def test_lines_differ_by_letter_and_neighbors_by_dash_as_well_as_color() -> None:
    letters = "ABCDEFGHIJKL"
    root = drawn(chart(*(Line(((0, n), (1, n)), n, letter=letters[n]) for n in range(12))))
    looks = [re.sub(r"\s", "", path.get("style", "")) for path in lines_of(root)]
    assert len(set(looks)) == 12
    assert all(line_dashes(n) != line_dashes(n + 1) for n in range(7))
    assert len({(line_color(style), line_dashes(style)) for style in range(32)}) == len(COLORS) * len(DASHES)
    heights = {word: y for word, (_, y) in texts(root).items() if word in letters}
    assert sorted(heights, key=heights.__getitem__, reverse=True) == [*letters]


@pytest.mark.parametrize("end", [1.0, 2.0, 3.0])
def test_letters_do_not_cover_each_other_nor_leave_the_chart(end: float) -> None:
    """At the bottom, the middle and the top of an axis from 1 to 3."""
    frame = Line(((0, 1.0), (1, 3.0)), 0)
    at = texts(drawn(chart(frame, *(Line(((0, 1.5), (1, end)), n, letter="ABC"[n]) for n in range(3)))))
    heights = [at[letter][1] for letter in "ABC"]
    assert all(after - before >= 12 for before, after in pairwise(heights))
    assert heights[0] >= 12
    assert heights[-1] <= 270 - 42 + 6


def test_one_point_is_drawn_and_none_is_nothing() -> None:
    (mark,) = drawn(chart(Line(((1, 1.0),), 0))).iter(f"{SVG}use")
    assert (float(mark.get("x", 0)), float(mark.get("y", 0))) == pytest.approx((456, 12), abs=0.1)
    assert chart_svg(chart(Line((), 0))) == ""


def test_every_color_is_a_variable_that_has_a_value_in_light_and_dark() -> None:
    lines = chart(*(Line(((0, n), (1, n)), n, letter="x") for n in range(8)))
    svg = chart_svg(lines)
    assert svg == chart_svg(lines), "the same chart is the same SVG"
    assert not re.search("metadata|matplotlib|xmlns", svg)
    assert "#" not in re.sub(r'href="#\w+"', "", svg)
    assert {f"var(--s{n})" for n in range(8)} <= set(re.findall(r"var\(--\w+\)", svg))
    css = asset("charts.css")
    assert tuple(re.findall(r"--s\d: (#\w+)", css.partition("@media")[0])) == COLORS
    assert all(len(re.findall(rf"--s{n}: #", css)) == 2 for n in range(8))


def test_images_are_written_for_charts_that_have_points(tmp_path: Path) -> None:
    lines = (Line(((0, 1.0), (1, 2.0)), 0, is_faint=True), Line(((0, 1.0), (1, 2.0)), 0, letter="A"))
    write_images([chart(*lines), Chart("empty", "", "", "", (Line((), 0),))], tmp_path / "plots", names=["A  雪 $x$"])
    (image,) = (tmp_path / "plots").iterdir()
    assert image.name == "loss.png"
    assert image.read_bytes().startswith(b"\x89PNG")
