"""Charts are drawn in both schemes and can be read without color."""

import base64
import re
from pathlib import Path
from xml.etree import ElementTree

from sftron.report.charts import (
    COLORS,
    DARK_COLORS,
    DASHES,
    Chart,
    Line,
    chart_images,
    line_color,
    line_dashes,
    write_images,
)
from sftron.report.html import asset


def chart(*lines: Line, title: str = "Loss") -> Chart:
    return Chart("loss", title, "tokens", "loss", lines)


def drawn(chart: Chart) -> dict[str, str]:
    """The SVG of each scheme."""
    images = dict(re.findall(r'(srcset|src)="data:image/svg\+xml;base64,([^"]+)"', chart_images(chart)))
    return {name: base64.b64decode(images[key]).decode() for name, key in (("light", "src"), ("dark", "srcset"))}


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_a_chart_is_well_formed_whatever_its_words() -> None:
    hostile, visible = "<b>&\"' $x$ \u202e\x1b", "<b>&\"' $x$ <U+202E>␛"
    shown = Chart("x", hostile, hostile, "y", (Line(((1, 1.0), (2, 0.5)), 0, letter=hostile),))
    assert texts(drawn(shown)["light"]).count(visible) == 2
    assert 'alt="&lt;b&gt;&amp;&#34;&#39; $x$ &lt;U+202E&gt;␛"' in chart_images(shown)


def test_lines_differ_by_letter_and_neighbors_by_dash_as_well_as_color_in_both_schemes() -> None:
    lines = chart(*(Line(((0, n), (1, n)), n, letter="ABCDEFGHIJKL"[n]) for n in range(12)))
    for scheme, colors in (("light", COLORS), ("dark", DARK_COLORS)):
        svg = drawn(lines)[scheme]
        assert set("ABCDEFGHIJKL") <= set(texts(svg))
        assert all(color in svg for color in colors)
    assert drawn(lines) == drawn(lines), "the same chart is the same SVG"
    assert all(line_dashes(n) != line_dashes(n + 1) for n in range(7))
    assert len({(line_color(style), line_dashes(style)) for style in range(32)}) == len(COLORS) * len(DASHES)
    light, dark = asset("charts.css").split("@media")
    assert [tuple(re.findall(r"--s\d: (#\w+)", css)) for css in (light, dark)] == [COLORS, DARK_COLORS]


def test_a_single_point_is_drawn_and_an_empty_chart_is_not() -> None:
    assert "<use " in drawn(chart(Line(((1, 1.0),), 0)))["light"]
    assert chart_images(chart(Line((), 0))) == ""


def test_images_are_written_for_charts_that_have_points(tmp_path: Path) -> None:
    lines = (Line(((0, 1.0), (1, 2.0)), 0, is_faint=True), Line(((0, 1.0), (1, 2.0)), 0, letter="A"))
    write_images([chart(*lines), Chart("empty", "", "", "", (Line((), 0),))], tmp_path / "plots", names=["A  雪 $x$"])
    (image,) = (tmp_path / "plots").iterdir()
    assert image.name == "loss.png"
    assert image.read_bytes().startswith(b"\x89PNG")
