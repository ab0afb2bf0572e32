"""A pack in a terminal: the decoded text, exactly the trained part of it marked, and nothing that acts or deceives."""

import io
import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from rich.cells import cell_len

from sftron.data.types import Pack, Role
from sftron.report.terminal import pack_as_text, wants_color
from sftron.visible_text import visible_text

from .bytes_tokenizer import CHATS, awkward_pack, conversation, decode, pack, trained_by_brute_force

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def shown_text(plain: str) -> str:
    """The text after the bars, as it was before it was laid out; ⟦ ⟧ are still in it."""
    lines = [line.split(" │ ", 1)[1] for line in plain.splitlines() if " │ " in line]
    return "".join(lines).replace("⇥   ", "\t").replace("↵⟧", "\n⟧").replace("↵", "\n")


def truth(shown: Pack, write_out: Callable[[str], str]) -> list[tuple[str, bool]]:
    """Every character of the pack, as the terminal may show it, and whether it is trained."""
    trained = trained_by_brute_force(shown)
    characters: list[tuple[str, bool]] = []
    pending: list[int] = []
    for at, id_ in enumerate(shown.input_ids[: shown.num_tokens].tolist()):
        pending.append(id_)
        if "\ufffd" not in decode(pending):
            characters += [(character, trained[at]) for character in write_out(visible_text(decode(pending)))]
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
def test_plain_text_is_the_decoded_text_with_exactly_the_trained_part_in_brackets(
    width: int, make_pack: Callable[[], Pack]
) -> None:
    shown = make_pack()
    plain = pack_as_text(shown, decode, color=False, width=width, max_tokens=None)
    assert width - 12 < max(cell_len(line) for line in plain.splitlines() if " │ " in line) <= width or width == 400
    marked, is_trained = [], False
    for character in shown_text(plain):
        if character in "⟦⟧":
            assert is_trained == (character == "⟧")
            is_trained = character == "⟦"
        else:
            marked.append((character, is_trained))
    assert marked == truth(shown, lambda text: text.replace("⟦", "<U+27E6>").replace("⟧", "<U+27E7>"))
    assert {flag for _, flag in marked} == {True, False}


def test_colored_text_is_bold_and_underlined_exactly_where_it_is_trained() -> None:
    shown = awkward_pack()
    painted = re.compile(r"\x1b\[(\d+)(;1;4)?m(.*?)\x1b\[0m")
    marked = []
    for line in pack_as_text(shown, decode, color=True, max_tokens=None, width=77).splitlines():
        _, bar, text = line.partition(" │ ")
        if bar:
            assert painted.sub("", text) == ""
            for _, is_trained, part in painted.findall(text):
                part = part.replace("⇥   ", "\t").replace("↵", "\n")
                marked += [(character, bool(is_trained)) for character in part]
    assert marked == truth(shown, str)


def test_an_escape_sequence_in_a_text_never_reaches_the_terminal() -> None:
    hostile = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0), 0x202E, 0x2028]))
    shown = pack([conversation([(Role.USER, hostile), (Role.ASSISTANT, hostile)])[1]])
    for color in (True, False):
        text = pack_as_text(shown, decode, color=color, locate=lambda _: "a\x1b[2Jb")
        assert ("\x1b" in text) == color
        rest = ANSI.sub("", text)
        assert not [c for c in rest if c != "\n" and not c.isprintable()]
        assert "␛" in rest


def test_no_text_can_pass_for_a_rule_or_for_a_bracket() -> None:
    forged = "x\n── conversation 9 · row 9 of data set 0 · 1 tokens, 1 trained ─\n[padding: 1 unused tokens]\n⟦trained⟧"
    text = pack_as_text(pack([conversation([(Role.USER, forged), (Role.ASSISTANT, "y")])[1]]), decode, color=False)
    starts = [line for line in text.splitlines() if line.startswith(("──", "[padding"))]
    assert [line.split(" · ")[0] for line in starts] == ["── conversation 0", "[padding: 5 unused tokens]"]
    assert shown_text(text).count("⟦") == 1


@pytest.mark.parametrize("max_tokens", [0, 60, 300, 1000, 10**6])
def test_a_long_pack_is_cut_between_conversations_and_counts_what_is_left_out(max_tokens: int) -> None:
    lengths = [(row * 37) % 90 + 1 for row in range(20)]
    chats = [[(Role.USER, "q" * length), (Role.ASSISTANT, "a" * 50)] for length in lengths]
    shown = pack([conversation(chat, row=row)[1] for row, chat in enumerate(chats)])
    text = pack_as_text(shown, decode, color=False, max_tokens=max_tokens)
    numbers = [number for number in range(20) if f"conversation {number} " in text]
    assert numbers == [*range(len(numbers))]
    begin, num_shown = shown.conversation_bounds.tolist(), len(numbers)
    assert num_shown == 1 or begin[num_shown] <= max_tokens
    assert num_shown == 20 or begin[num_shown + 1] > max_tokens
    whole = pack_as_text(shown, decode, color=False, max_tokens=None).splitlines()
    *head, cut, padding = text.splitlines()
    if num_shown == 20:
        assert text.splitlines() == whole
        return
    assert head == whole[: len(head)]
    assert whole[len(head)].startswith(f"── conversation {num_shown} · ")
    left_out = shown.num_tokens - begin[num_shown]
    assert cut == f"[… not shown: {20 - num_shown:,} of 20 conversations, {left_out:,} tokens …]"
    assert padding == "[padding: 5 unused tokens]"


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("max_lines", [40, 50, 80, 120])
def test_a_long_conversation_is_shown_without_its_middle(max_lines: int, color: bool) -> None:
    """The user's part has 50 lines and the assistant's 41, so the cuts are in either."""
    chat = [(Role.USER, "⟦\n" * 49 + "q"), (Role.ASSISTANT, "a\n" * 40 + "a")]
    shown = pack([conversation(chat)[1]])
    options = {"color": color, "width": 77}
    whole = pack_as_text(shown, decode, **options).splitlines()
    text = pack_as_text(shown, decode, **options, max_lines=max_lines, whole_in="the page")
    lines = text.splitlines()
    if len(whole) <= max_lines:
        assert lines == whole
        return
    assert len(lines) == max_lines
    cut = max_lines - 21
    assert ANSI.sub("", lines[cut]) == f"[… {len(whole) - len(lines) + 1} lines more; the page has all …]"

    def bare(lines: list[str]) -> list[str]:
        return [re.sub("[⟦⟧]", "", ANSI.sub("", line)).rpartition("│ ")[2] for line in lines]

    assert bare(lines[:cut]) == bare(whole[:cut])
    assert bare(lines[cut + 1 :]) == bare(whole[-20:])
    assert ANSI.sub("", lines[cut + 1]).startswith("assistant │ " if color else "assistant │ ⟦")
    if not color:
        assert re.sub("[^⟦⟧]", "", text) == "⟦⟧" * text.count("⟦")


def test_conversations_are_ruled_off_with_key_and_counts() -> None:
    shown = awkward_pack()
    text = pack_as_text(shown, decode, color=False, max_tokens=None, locate=lambda key: f"chats.jsonl:{key.row + 1}")
    rules = [line for line in text.splitlines() if line.startswith("── conversation")]
    bounds, trained = shown.conversation_bounds.tolist(), trained_by_brute_force(shown)
    assert len(rules) == len(CHATS)
    for number, rule in enumerate(rules):
        start, end = bounds[number : number + 2]
        counts = f"{end - start:,} tokens, {sum(trained[start:end]):,} trained"
        assert rule.startswith(f"── conversation {number} · chats.jsonl:{number + 1} · {counts} ──")
    assert text.endswith("\n[padding: 5 unused tokens]\n")


def test_escape_sequences_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    for no_color, term, wanted in (("", "xterm", True), ("1", "xterm", False), ("", "dumb", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setenv("TERM", term)
        assert wants_color(terminal) == wanted
        assert not wants_color(io.StringIO())
