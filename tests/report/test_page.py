"""Pages and the picture show what is in a pack, need nothing from outside, and keep text of others text."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from sftron.data.types import IGNORE_INDEX, Pack, Role
from sftron.report import page
from sftron.report.audit import Audit
from sftron.report.page import Inspection, asset, pack_picture
from sftron.report.tokens import shown_conversations
from sftron.visible_text import visible_text

from .bytes_tokenizer import CHATS, HOSTILE_TEXT, awkward_pack, conversation, decode, pack, trained_by_brute_force
from .pages import PAGES

SVG = "{http://www.w3.org/2000/svg}"


class Page(HTMLParser):
    """Reads a page back: the text of every span with what it stands in, the elements met, the data blocks."""

    VOID = frozenset({"meta", "input", "rect", "path", "br"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.spans: list[tuple[str, bool, str]] = []
        self.data_blocks: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs)))
        if tag == "i":
            parent, attributes = self.open[-2]
            self.spans.append(("", parent == "mark", (attributes["class"] or "").split()[0]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if "i" in [tag for tag, _ in self.open]:
            text, is_trained, role = self.spans[-1]
            self.spans[-1] = (text + data, is_trained, role)
        elif self.open and self.open[-1] == ("script", {"type": "application/json"}):
            self.data_blocks.append(data)


def page_of(*packs: Pack) -> str:
    return Inspection(packs, Audit(), decode, "Title").as_html()


def test_the_page_shows_the_decoded_text_and_marks_exactly_what_is_trained() -> None:
    shown = awkward_pack()
    shown.labels[::7] = IGNORE_INDEX  # so that no role is trained as a whole
    shown.loss_weights[::7] = 0
    found = Page(page_of(shown, shown)).spans
    trained = trained_by_brute_force(shown)
    expected = [
        (visible_text(span.text), any(trained[span.start : span.end]), Role(int(shown.role_ids[span.start])))
        for each in shown_conversations(shown, decode)
        for span in each.spans
    ]
    assert [(text, is_trained, Role[role.upper()]) for text, is_trained, role in found] == expected * 2
    ids = shown.input_ids[: shown.num_tokens].tolist()
    assert "".join(text for text, _, _ in found) == visible_text(decode(ids)) * 2
    assert {is_trained for _, is_trained, role in found if role == "assistant"} == {True, False}


def test_the_tooltips_numbers_are_the_packs_own() -> None:
    shown = awkward_pack()
    shown.loss_weights[shown.loss_weights > 0] = 0.25
    found = Page(page_of(shown))
    (block,) = found.data_blocks
    numbers, real = json.loads(block), slice(0, shown.num_tokens)
    names = {"ids": "input_ids", "weights": "loss_weights", "positions": "position_ids", "roles": "role_ids"}
    for name, field in {**names, "labels": "labels"}.items():
        assert numbers[name] == getattr(shown, field)[real].tolist(), name
    assert numbers["documents"] == shown.cu_seqlens.tolist()
    assert numbers["conversations"] == shown.conversation_bounds.tolist()
    assert len(numbers["spans"]) == len(found.spans)
    assert sum(numbers["spans"]) == shown.num_tokens
    assert max(numbers["spans"]) > 1


def test_links_and_labels_lead_somewhere_in_the_page_and_nothing_leads_out() -> None:
    text = page_of(awkward_pack(), awkward_pack())
    elements = Page(text).elements
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    links = [value or "" for _, attributes in elements for name, value in attributes.items() if name in ("src", "href")]
    assert len(ids) == len(set(ids))
    assert len(links) == 2 * len(CHATS)
    assert set(links) <= {f"#{each}" for each in ids}
    assert "url(" not in text
    assert "@import" not in text
    (policy,) = [a["content"] or "" for tag, a in elements if tag == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'; ")


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_whole_and_text_of_others_neither_acts_nor_hides(name: str) -> None:
    text = PAGES[name]()
    assert visible_text(text) == text
    elements = Page(text).elements
    assert not any(attribute.startswith("on") for _, attributes in elements for attribute in attributes)
    scripts = [attributes for tag, attributes in elements if tag == "script" and attributes]
    assert all(attributes == {"type": "application/json"} for attributes in scripts)
    assert "<script>alert" not in text
    assert name in ("empty", "inspect", "nothing") or "&lt;script&gt;alert" in text


# --- The picture of a pack ---


def drawn(shown: Pack, *, source_name: str = "rows.jsonl") -> ElementTree.Element:
    return ElementTree.fromstring(pack_picture(shown, decode, locate=lambda _: source_name))


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in root.iter() if name in element.get("class", "").split()]


def test_the_filled_tokens_are_those_that_are_trained_and_each_label_points_at_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page, "PICTURE_LINES", 10_000)
    monkeypatch.setattr(page, "_SHOWN_ENDS", 5_000)
    shown = pack([conversation(CHATS[0])[1]])
    root = drawn(shown)
    boxes = [box for box in of_class(root, "token") if box.get("rx")]
    filled = ["trained" in box.get("class", "").split() for box in boxes]
    assert filled == trained_by_brute_force(shown)[: shown.num_tokens]
    assert len(of_class(root, "arrow")) == sum(filled) > 0
    lines = [float(box.get("y", "")) for box, is_filled in zip(boxes, filled, strict=True) if is_filled]
    labeled = [float(re.findall(r"[\d.]+", arrow.get("d", ""))[1]) for arrow in of_class(root, "arrow")]
    assert np.allclose(np.subtract(lines, labeled), 19 - 10)  # a line is 19 pixels high


def test_the_masks_are_those_of_one_document_and_of_one_for_each_conversation() -> None:
    def area(path: ElementTree.Element) -> float:
        """Of a triangle "Ma aVbHbz" on the diagonal."""
        start, _, end, _ = map(float, re.findall(r"[\d.]+", path.get("d", "")))
        return (end - start) ** 2 / 2

    shown = pack([conversation(chat, row=row)[1] for row, chat in enumerate(CHATS[:3])])
    root, lengths = drawn(shown), np.diff(shown.conversation_bounds)
    own = of_class(root, "sees")
    assert len(of_class(root, "crosses")) == 1
    assert len(own) == 2 * len(lengths)
    share = sum(map(area, own)) / 2 / (225**2 / 2)  # a mask's side is 225 pixels
    assert share == pytest.approx((lengths**2).sum() / lengths.sum() ** 2, rel=0.02)


def test_text_in_the_picture_is_text_and_its_colors_are_those_of_the_pages() -> None:
    shown = pack([conversation([(Role.USER, HOSTILE_TEXT), (Role.ASSISTANT, HOSTILE_TEXT)])[1]])
    assert shown.num_tokens < len(shown.input_ids), "the example is to have padding"
    root = drawn(shown, source_name="<script>&")
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {"svg", "style", "rect", "g", "text", "path"}
    assert any("<script>&" in (element.text or "") for element in root.iter(f"{SVG}text"))
    assert not of_class(root, "padding")
    style = root.findtext(f"{SVG}style", "")
    assert style.count("--assistant:") == asset("page.css").count("--assistant:") == 2
    assert "prefers-color-scheme: dark" in style
    assert "body" not in style


def test_a_long_conversation_is_cut_and_the_rest_is_counted() -> None:
    root = drawn(pack([conversation([(Role.USER, "Hi"), (Role.ASSISTANT, "x" * 50)] * 60)[1]]))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert "…" in texts
    assert any(re.fullmatch(r"… \d+ tokens more", text) for text in texts)
    assert 0 < len(of_class(root, "name")) <= page.PICTURE_LINES
