import re
from xml.etree import ElementTree

import numpy as np
import pytest

from sftron.data.types import Role
from sftron.report import picture
from sftron.report.page import asset
from sftron.report.picture import pack_picture

from .bytes_tokenizer import CHATS, HOSTILE_TEXT, awkward_pack, conversation, decode, pack, trained_by_brute_force

LINE, MASK = 19, 225
"""Pixels from one token's line to the next, and of a mask's side."""
SVG = "{http://www.w3.org/2000/svg}"


def drawn(shown) -> ElementTree.Element:
    return ElementTree.fromstring(pack_picture(shown, decode, source_names=["rows.jsonl"]))


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in root.iter() if name in element.get("class", "").split()]


def area(path: ElementTree.Element) -> float:
    """Of a triangle "Ma aVbHbz" on the diagonal."""
    start, _, end, _ = map(float, re.findall(r"[\d.]+", path.get("d", "")))
    return (end - start) ** 2 / 2


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token left out."""
    monkeypatch.setattr(picture, "_RUN", 10_000)
    monkeypatch.setattr(picture, "_NUM_LINES", 10_000)


@pytest.mark.usefixtures("whole")
def test_the_filled_tokens_are_those_that_are_trained_and_each_label_points_at_the_next_one() -> None:
    shown = pack([conversation(CHATS[0])[1]])
    root = drawn(shown)
    boxes = [box for box in of_class(root, "token") if box.get("rx")]
    filled = ["trained" in box.get("class", "").split() for box in boxes]

    assert filled == list(trained_by_brute_force(shown))[: shown.num_tokens]
    assert len(of_class(root, "arrow")) == sum(filled) > 0
    lines = [float(box.get("y", "")) for box, is_filled in zip(boxes, filled, strict=True) if is_filled]
    labelled = [float(re.findall(r"[\d.]+", arrow.get("d", ""))[1]) for arrow in of_class(root, "arrow")]
    assert np.allclose(np.subtract(lines, labelled), LINE - 10)


def test_the_masks_are_those_of_one_document_and_of_one_for_each_conversation() -> None:
    shown = pack([conversation(chat, row=row)[1] for row, chat in enumerate(CHATS[:3])])
    root = drawn(shown)
    lengths = np.diff(shown.conversation_bounds)
    own = of_class(root, "sees")

    assert len(of_class(root, "crosses")) == 1
    assert len(own) == 2 * len(lengths)
    share = sum(map(area, own)) / 2 / (MASK**2 / 2)
    assert share == pytest.approx((lengths**2).sum() / lengths.sum() ** 2, rel=0.02)


def test_text_of_the_data_is_text_and_nothing_else() -> None:
    shown = pack([conversation([(Role.USER, HOSTILE_TEXT), (Role.ASSISTANT, HOSTILE_TEXT)])[1]])
    root = ElementTree.fromstring(pack_picture(shown, decode, source_names=["<script>&"]))

    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {"svg", "style", "rect", "g", "text", "path"}
    assert any("<script>&" in (element.text or "") for element in root.iter(f"{SVG}text"))


def test_a_long_conversation_is_cut_and_says_so() -> None:
    root = drawn(pack([conversation([(Role.USER, "Hi"), (Role.ASSISTANT, "x" * 50)] * 9)[1]]))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert "…" in texts
    assert any(re.fullmatch(r"… \d+ tokens more", text) for text in texts)
    assert 0 < len(of_class(root, "name")) <= picture._NUM_LINES


def test_the_colours_are_those_of_the_pages_in_light_and_dark() -> None:
    style = drawn(awkward_pack()).find(f"{SVG}style")
    assert style is not None
    assert (style.text or "").count("--assistant:") == asset("page.css").count("--assistant:") == 2
    assert "prefers-color-scheme: dark" in (style.text or "")
    assert "body" not in (style.text or "")


def test_a_pack_with_a_tail_draws_the_tail_as_nothing() -> None:
    shown = awkward_pack()
    assert shown.num_tokens < len(shown.input_ids), "the example is to have a tail"
    assert not of_class(drawn(shown), "padding")
