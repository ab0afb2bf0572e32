import io
import re
from itertools import pairwise

import pytest

from sftron.data.types import Pack, Role
from sftron.report.terminal import pack_as_text, wants_color
from sftron.visible_text import visible_text

from .bytes_tokenizer import CHATS, awkward_pack, conversation, decode, pack, trained_by_brute_force

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def shown_text(plain: str) -> str:
    """The text behind the bars, as it was before it was laid out; ⟦ ⟧ are still in it."""
    lines = [line.split(" │ ", 1)[1] for line in plain.splitlines() if " │ " in line]
    return "".join(lines).replace("⇥   ", "\t").replace("↵⟧", "\n⟧").replace("↵", "\n")


def safe(text: str) -> str:
    return visible_text(text).replace("⟦", "<U+27E6>").replace("⟧", "<U+27E7>")


def truth(shown) -> list[tuple[str, bool]]:
    """Every character of the pack, as the terminal may show it, and whether it is trained."""
    trained = trained_by_brute_force(shown)
    characters = []
    pending: list[int] = []
    for at, id_ in enumerate(shown.input_ids[: shown.num_tokens].tolist()):
        pending.append(id_)
        if "\ufffd" not in decode(pending):
            characters += [(character, trained[at]) for character in safe(decode(pending))]
            pending = []
    assert not pending
    return characters


def pack_trained_on_all() -> Pack:
    """As without `train_on_completions_only`: every token that has one before it is trained."""
    shown = awkward_pack()
    for start, end in pairwise(shown.conversation_bounds.tolist()):
        shown.labels[start : end - 1] = shown.input_ids[start + 1 : end]
        shown.loss_weights[start : end - 1] = 1
    return shown


@pytest.mark.parametrize("width", [40, 77, 400])
@pytest.mark.parametrize("make_pack", [awkward_pack, pack_trained_on_all])
def test_plain_text_is_the_decoded_text_with_exactly_the_trained_part_in_brackets(width, make_pack):
    shown = make_pack()
    text = shown_text(pack_as_text(shown, decode, color=False, width=width, max_tokens=None))
    marked, is_trained = [], False
    for character in text:
        if character in "⟦⟧":
            assert is_trained == (character == "⟧")
            is_trained = character == "⟦"
        else:
            marked.append((character, is_trained))
    assert marked == truth(shown)
    assert {flag for _, flag in marked} == {True, False}


def test_coloured_text_is_bold_and_underlined_exactly_where_it_is_trained():
    shown = awkward_pack()
    text = pack_as_text(shown, decode, color=True, max_tokens=None, width=77)
    marked = []
    for line in text.splitlines():
        if " │ " not in line:
            continue
        run = re.compile(r"\x1b\[(\d+)(;1;4)?m(.*?)\x1b\[0m")
        line = line.split(" │ ", 1)[1]
        assert run.sub("", line) == ""
        for _, is_trained, part in run.findall(line):
            part = part.replace("⇥   ", "\t").replace("↵", "\n")
            marked += [(character, bool(is_trained)) for character in part]
    expected = [(c, flag) for c, flag in truth(shown)]
    assert [(c, f) for c, f in marked if c not in "⟦⟧"] == [(c, f) for c, f in _without_bracket_names(expected)]


def _without_bracket_names(characters: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    text = "".join(character for character, _ in characters)
    named = {at for match in re.finditer(r"<U\+27E[67]>", text) for at in range(*match.span())}
    assert named
    return [pair for at, pair in enumerate(characters) if at not in named]


def test_an_escape_sequence_in_a_text_never_reaches_the_terminal():
    hostile = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0), 0x202E, 0x2028]))
    shown = pack([conversation([(Role.USER, hostile), (Role.ASSISTANT, hostile)])[1]])
    for color in (True, False):
        text = pack_as_text(shown, decode, color=color, source_names=["a\x1b[2Jb"])
        assert ("\x1b" in text) == color
        rest = ANSI.sub("", text)
        assert not [c for c in rest if c != "\n" and not c.isprintable()]
        assert "␛" in rest


def test_no_text_can_pass_for_a_rule_or_for_a_bracket():
    forged = "x\n── conversation 9 · row 9 of data set 0 · 1 tokens, 1 trained ─\n[tail: 1 unused tokens]\n⟦trained⟧"
    text = pack_as_text(pack([conversation([(Role.USER, forged), (Role.ASSISTANT, "y")])[1]]), decode, color=False)
    starts = [line for line in text.splitlines() if line.startswith(("──", "[tail"))]
    assert [line.split(" · ")[0] for line in starts] == ["── conversation 0", "[tail: 5 unused tokens]"]
    assert shown_text(text).count("⟦") == 1


def test_no_line_is_wider_than_asked():
    ascii_chats = [[(role, content.encode("ascii", "ignore").decode()) for role, content in chat] for chat in CHATS]
    shown = pack([conversation(chat)[1] for chat in ascii_chats])
    lines = pack_as_text(shown, decode, color=False, width=60, max_tokens=None).splitlines()
    assert max(len(line) for line in lines if " │ " in line) in range(50, 61)


def test_a_long_pack_shows_its_ends_and_says_how_much_is_left_out():
    shown = pack([conversation([(Role.USER, "q" * 50), (Role.ASSISTANT, "a" * 50)], row=row)[1] for row in range(20)])
    text = pack_as_text(shown, decode, color=False, max_tokens=300)
    (num_hidden,) = re.findall(r"\[… ([\d,]+) tokens not shown …\]", text)
    num_hidden = int(num_hidden.replace(",", ""))
    assert num_hidden == shown.num_tokens - 300
    assert "conversation 0 " in text
    assert "conversation 19 " in text
    assert "conversation 10 " not in text
    whole = shown_text(pack_as_text(shown, decode, color=False, max_tokens=None)).translate({0x27E6: "", 0x27E7: ""})
    head_and_tail = shown_text(text).translate({0x27E6: "", 0x27E7: ""})
    num_head = next(n for n in range(len(whole)) if whole[n] != head_and_tail[n : n + 1])
    assert (
        head_and_tail[:num_head] + head_and_tail[num_head:] == whole[:num_head] + whole[num_head - len(head_and_tail) :]
    )


def test_conversations_are_ruled_off_with_key_and_counts():
    shown = awkward_pack()
    text = pack_as_text(shown, decode, color=False, max_tokens=None, source_names=["chats.jsonl"])
    rules = [line for line in text.splitlines() if line.startswith("── conversation")]
    bounds = shown.conversation_bounds.tolist()
    trained = trained_by_brute_force(shown)
    assert len(rules) == len(CHATS)
    for number, rule in enumerate(rules):
        start, end = bounds[number : number + 2]
        counts = f"{end - start:,} tokens, {sum(trained[start:end]):,} trained"
        assert rule.startswith(f"── conversation {number} · row {number} of chats.jsonl · {counts} ──")
    assert text.endswith("\n[tail: 5 unused tokens]\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_escape_sequences_are_for_terminals_that_want_them(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert wants_color(Terminal())
    assert not wants_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(Terminal())
    monkeypatch.setenv("NO_COLOR", "")
    assert wants_color(Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_color(Terminal())
