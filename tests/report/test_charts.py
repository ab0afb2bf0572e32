"""Charts are well-formed SVG whose marks lie where the numbers say, and can be told apart without colour."""

import math
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftron.report.chart_images import write_images
from sftron.report.charts import Chart, Line, chart_html, legend_html, nice_ticks, tick_words


def chart(*lines: Line, **options: bool) -> Chart:
    return Chart("loss", "Loss < 1 & falling", "tokens", "loss", lines, **options)


def drawn(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html)


@given(
    st.floats(-1e12, 1e12, allow_nan=False),
    st.floats(1e-6, 1e12, allow_nan=False),
)
def test_ticks_are_round_evenly_apart_and_span_what_they_should(low: float, size: float) -> None:
    high = low + size
    if high - low < 1e-9 * max(abs(low), 1):
        return  # closer together than their digits
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 8
    step = ticks[1] - ticks[0]
    tolerance = 1e-6 * max(step, abs(low) * 1e-6)
    assert ticks[0] <= low + tolerance
    assert ticks[-1] >= high - tolerance
    assert round(step / 10 ** math.floor(math.log10(step * 1.0000001)), 4) in (1, 2, 5)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.42, 1.17, ["0.4", "0.6", "0.8", "1.0", "1.2"]),
        (0, 16_384, ["0", "5,000", "10,000", "15,000", "20,000"]),
        (2.0, 2.0, ["0.0", "0.5", "1.0", "1.5", "2.0"]),
        (2.0, math.nextafter(2.0, 3.0), ["0.0", "0.5", "1.0", "1.5", "2.0"]),
        (0.001, 0.0034, ["0.0010", "0.0015", "0.0020", "0.0025", "0.0030", "0.0035"]),
    ],
)
def test_ticks_have_the_decimals_that_tell_them_apart(low: float, high: float, words: list[str]) -> None:
    assert tick_words(nice_ticks(low, high)) == words


def test_a_chart_is_well_formed_whatever_its_words() -> None:
    line = Line(((1, 1.0), (2, 0.5)), 0, letter="A")
    figure = drawn(chart_html(Chart("x", "<b>&\"'", "<x>", "&y", (line,), note="<!--")))
    assert "".join(figure.itertext()).count("<b>&\"'") == 1
    assert [text.text for text in figure.iter("text")][-3:] == ["<x>", "&y", "A"]


def test_points_lie_where_the_ticks_say() -> None:
    html = chart_html(chart(Line(((0, 0.0), (10, 100.0)), 0), from_zero=True))
    figure = drawn(html)
    path = next(path.get("d", "") for path in figure.iter("path") if path.get("class") == "line s0")
    ends = [float(number) for number in re.findall(r"[\d.]+", path)]
    at = {text.text: float(text.get("y", 0)) - 3.5 for text in figure.iter("text") if text.get("class") == "tick end"}
    across = {text.text: float(text.get("x", 0)) for text in figure.iter("text") if text.get("class") == "tick middle"}
    assert ends == pytest.approx([across["0"], at["0"], across["10"], at["100"]], abs=0.11)


def test_an_axis_from_zero_begins_there_and_another_does_not() -> None:
    line = Line(((1, 90.0), (2, 100.0)), 0)
    assert ">0<" in chart_html(chart(line, from_zero=True))
    assert ">0<" not in chart_html(chart(line))


def test_twelve_lines_differ_by_letter_and_neighbours_by_dash_as_well() -> None:
    letters = "ABCDEFGHIJKL"
    html = chart_html(chart(*(Line(((0, n), (1, n)), n, letter=letters[n]) for n in range(12))))
    paths = [path for path in drawn(html).iter("path") if (path.get("class") or "").startswith("line")]
    looks = [(path.get("class"), path.get("stroke-dasharray")) for path in paths]
    assert len(set(looks)) == 12
    assert all(looks[n][1] != looks[n + 1][1] for n in range(7))
    assert [text.text for text in drawn(html).iter("text") if "letter" in (text.get("class") or "")][::-1] == [*letters]


@pytest.mark.parametrize("end", [1.0, 2.0, 3.0])
def test_letters_do_not_cover_each_other_nor_leave_the_chart(end: float) -> None:
    """At the bottom, the middle and the top of an axis from 1 to 3."""
    frame = Line(((0, 1.0), (1, 3.0)), 0)
    html = chart_html(chart(frame, *(Line(((0, 1.5), (1, end)), n, letter="ABC"[n]) for n in range(3))))
    heights = sorted(
        float(text.get("y", 0)) for text in drawn(html).iter("text") if "letter" in (text.get("class") or "")
    )
    assert all(after - before >= 12 for before, after in pairwise(heights))
    assert heights[0] >= 12
    assert heights[-1] <= 270 - 42 + 4


def test_one_point_is_drawn_and_none_is_said() -> None:
    assert "<circle" in chart_html(chart(Line(((1, 1.0),), 0)))
    assert "Nothing was recorded." in chart_html(chart(Line((), 0)))


def test_a_legend_names_every_line() -> None:
    items = [*drawn(legend_html(["first", "second <2>"], ["A", "B"])).iter("li")]
    assert ["".join(item.itertext()).strip() for item in items] == ["A first", "B second <2>"]


def test_pictures_are_written_for_charts_that_have_points(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = (Line(((0, 1.0), (1, 2.0)), 0, is_faint=True), Line(((0, 1.0), (1, 2.0)), 0, letter="A"))
    empty = Chart("empty", "", "", "", (Line((), 0),))
    written = write_images([chart(*lines), empty], tmp_path / "plots", words=["all"], letters=["A"])
    assert written == [tmp_path / "plots" / "loss.png"]
    assert written[0].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("number", [0.0, 4.0, 0.003, 250_000.0])
def test_the_axis_of_a_single_point_begins_at_zero_and_ends_at_or_behind_it(number: float) -> None:
    first, *_, last = nice_ticks(number, number)
    assert first == 0
    assert last >= number
    assert last > 0
