import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from sftron.data.types import IGNORE_INDEX, ConversationKey, Dropped, Role
from sftron.report.audit import Audit
from sftron.report.inspection import Inspection
from sftron.report.tokens import shown_conversations
from sftron.visible_text import visible_text

from .bytes_tokenizer import CHATS, HOSTILE_TEXT, awkward_pack, conversation, decode, pack, trained_by_brute_force
from .pages import PAGES


class Page(HTMLParser):
    """Reads a page back: the text of every piece with what it stands in, the elements met, the data blocks."""

    VOID = frozenset({"meta", "input", "rect", "path", "br"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.pieces: list[tuple[str, bool, str]] = []
        self.data_blocks: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs)))
        if tag == "i":
            run, run_attributes = self.open[-2]
            self.pieces.append(("", run == "mark", (run_attributes["class"] or "").split()[0]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self.open]
        if "i" in tags:
            text, is_trained, role = self.pieces[-1]
            self.pieces[-1] = (text + data, is_trained, role)
        elif tags and self.open[-1] == ("script", {"type": "application/json"}):
            self.data_blocks.append(data)


def page_of(packs, audit: Audit | None = None, **names: str) -> str:
    return Inspection(tuple(packs), audit or Audit(), decode, names.get("title", "Title")).as_html()


def test_the_page_shows_the_decoded_text_and_marks_exactly_what_is_trained():
    shown = awkward_pack()
    shown.labels[::7] = IGNORE_INDEX  # so that no role is trained as a whole
    shown.loss_weights[::7] = 0
    page = Page(page_of([shown, shown]))
    trained = trained_by_brute_force(shown)
    expected = [
        (visible_text(piece.text), any(trained[piece.start : piece.end]), Role(int(shown.role_ids[piece.start])))
        for conversation_ in shown_conversations(shown, decode)
        for block in conversation_.blocks
        for piece in block.pieces
    ]
    assert [(text, is_trained, Role[role.upper()]) for text, is_trained, role in page.pieces] == expected * 2
    ids = shown.input_ids[: shown.num_tokens].tolist()
    assert "".join(text for text, _, _ in page.pieces) == visible_text(decode(ids)) * 2
    assert {is_trained for _, is_trained, role in page.pieces if role == "assistant"} == {True, False}


def test_the_marked_characters_are_as_many_as_the_assistant_says():
    page = Page(page_of([awkward_pack(), awkward_pack()]))
    num_trained_characters = sum(len(text) for text, is_trained, _ in page.pieces if is_trained)
    said_by_assistant = "".join(
        content + "<|im_end|>" for chat in CHATS for role, content in chat if role is Role.ASSISTANT
    )
    assert num_trained_characters == 2 * len(visible_text(said_by_assistant)) > 0


def test_the_tooltips_numbers_are_the_packs_own():
    shown = awkward_pack()
    shown.loss_weights[shown.loss_weights > 0] = 0.25
    page = Page(page_of([shown]))
    (block,) = page.data_blocks
    numbers = json.loads(block)
    real = slice(0, shown.num_tokens)
    assert numbers["ids"] == shown.input_ids[real].tolist()
    assert numbers["labels"] == shown.labels[real].tolist()
    assert numbers["weights"] == shown.loss_weights[real].tolist()
    assert numbers["positions"] == shown.position_ids[real].tolist()
    assert numbers["roles"] == shown.role_ids[real].tolist()
    assert numbers["documents"] == shown.cu_seqlens.tolist()
    assert numbers["conversations"] == shown.conversation_bounds.tolist()
    assert len(numbers["pieces"]) == len(page.pieces)
    assert sum(numbers["pieces"]) == shown.num_tokens
    assert max(numbers["pieces"]) > 1


def test_hostile_text_stays_text_wherever_it_comes_from():
    audit = Audit((HOSTILE_TEXT,))
    audit.add_row(Dropped(HOSTILE_TEXT, HOSTILE_TEXT, ConversationKey(0, 1)))
    audit.add_row(conversation([(Role.ASSISTANT, HOSTILE_TEXT)], is_stop_trained=False))
    calm, hostile = Page(page_of([awkward_pack()])), Page(page_of([awkward_pack()], audit, title=HOSTILE_TEXT))
    assert audit.problems
    for page in (calm, hostile):
        scripts = [attributes for tag, attributes in page.elements if tag == "script"]
        assert scripts == [{"type": "application/json"}, {}]
        assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert not re.search(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", page_of([awkward_pack()], audit, title=HOSTILE_TEXT)
    )


def test_the_page_needs_nothing_from_outside():
    text = page_of([awkward_pack()])
    page = Page(text)
    sources = {
        name: value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href")
    }
    assert sources, "the map's links are missing"
    assert all(value.startswith("#") for value in sources.values())
    assert "url(" not in text
    assert "@import" not in text
    (policy,) = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'; ")


def test_links_and_labels_lead_somewhere():
    page = Page(page_of([awkward_pack(), awkward_pack()]))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert len(ids) == len(set(ids))
    assert len(links) == 2 * len(CHATS)
    assert {link.removeprefix("#") for link in links} <= set(ids)


def test_a_pack_of_4096_tokens_takes_less_than_half_a_megabyte():
    long = conversation([(Role.USER, "a b " * 256), (Role.ASSISTANT, "c d " * 760)])[1]
    shown = pack([long])
    assert shown.num_tokens > 4000
    assert len(page_of([shown]).encode()) < 500_000


def test_a_page_without_packs_or_without_rows_is_whole():
    Page(page_of([]))
    audit = Audit()
    audit.add_row(conversation(CHATS[0]))
    text = page_of([], audit)
    Page(text)
    assert "Conversation lengths" in text


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to parse JavaScript")
def test_the_script_is_valid_javascript(tmp_path):
    script = page_of([]).rsplit("<script>", 1)[1].split("</script>")[0]
    (tmp_path / "page.js").write_text(script, encoding="utf-8")
    subprocess.run(["node", "--check", str(tmp_path / "page.js")], check=True)


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_whole_and_text_of_others_neither_acts_nor_hides(name):
    text = PAGES[name]()
    assert visible_text(text) == text
    assert not any(attribute.startswith("on") for _, attributes in Page(text).elements for attribute in attributes)
    assert "<script>alert" not in text
    assert name in ("empty", "inspect") or "&lt;script&gt;alert" in text
