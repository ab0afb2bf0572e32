"""Pages show what is in a pack, need nothing from outside, and keep text of others text."""

import json
from html.parser import HTMLParser

import pytest

from sftron.data.types import IGNORE_INDEX, Pack, Role
from sftron.report.audit import Audit
from sftron.report.page import Inspection
from sftron.report.shown import shown_conversations
from sftron.visible_text import visible_text

from .bytes_tokenizer import CHATS, awkward_pack, decode, trained_by_brute_force
from .pages import PAGES


class Page(HTMLParser):
    """Reads a page back: the text of every span with what it stands in, the elements met, the data blocks."""

    VOID = frozenset({"meta", "input", "rect", "path", "br", "img", "source"})

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
