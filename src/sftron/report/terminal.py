"""A pack as text for a terminal: who says what, and what of it is trained. Legible with color and without.

         user │ <|im_start|>user↵
              │ Hi<|im_end|>↵
    assistant │ <|im_start|>assistant↵
              │ ⟦Yo<|im_end|>⟧↵

⟦ ⟧ enclose what is trained; with color it is bold and underlined instead. ↵ is a newline of the text; a line that
ends without it was broken to fit. Every line of text stands behind the bar, so no text can pass for a rule between
conversations.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TextIO

from rich.cells import cell_len

from sftron.data.types import Pack, Role
from sftron.report.tokens import (
    Decode,
    ShownConversation,
    ShownPiece,
    key_text,
    num_attention_documents,
    role_name,
    shown_conversations,
)
from sftron.visible_text import visible_text

_COLOR_OF_ROLE = {
    Role.TEMPLATE: "90",
    Role.SYSTEM: "35",
    Role.USER: "36",
    Role.ASSISTANT: "32",
    Role.TOOL: "33",
    Role.REASONING: "34",
    Role.TOOL_CALL: "31",
}
_TRAINED = "1;4"
_FAINT = "2"
_GUTTER = 10
"""Columns for the speaker's name; the longest are nine."""
_TAB = "⇥   "
_BRACKETS = {"⟦": "<U+27E6>", "⟧": "<U+27E7>"}


def wants_color(stream: TextIO) -> bool:
    """Returns whether escape sequences may be written: to a terminal, and not if NO_COLOR (no-color.org) is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def pack_as_text(
    pack: Pack,
    decode: Decode,
    *,
    color: bool,
    width: int = 100,
    max_tokens: int | None = 1000,
    source_names: Sequence[str] = (),
) -> str:
    """Returns the pack as lines of at most `width` columns, with a rule before each conversation.

    Args:
        color: Whether to write escape sequences; `wants_color` answers it for a stream.
        max_tokens: About how many tokens are shown, two thirds of them from the beginning and the rest from the end,
            with a line that counts what was left out; None shows all.
        source_names: A name for each entry of `data.datasets`.
    """
    screen = _Screen(color, max(width, 40))
    hidden = _hidden_tokens(pack.num_tokens, max_tokens)
    lines = [screen.rule(_pack_title(pack), "━"), screen.legend(pack)]
    gap, num_hidden = 0, 0
    for conversation in shown_conversations(pack, decode):
        if not _lies_within(conversation, hidden):
            num_tokens = conversation.end - conversation.start
            key = key_text(conversation.key, source_names)
            counts = f"{num_tokens:,} tokens, {conversation.num_trained:,} trained"
            lines.append(screen.rule(f"conversation {conversation.number} · {key} · {counts}", "─"))
        for block in conversation.blocks:
            for is_hidden, group in groupby(block.pieces, lambda piece: _lies_within(piece, hidden)):
                pieces = list(group)
                if is_hidden:
                    gap = gap or len(lines)
                    num_hidden += sum(piece.end - piece.start for piece in pieces)
                else:
                    lines.extend(screen.text(block.role, pieces))
    if num_hidden:
        lines.insert(gap, screen.faint(f"[… {num_hidden:,} tokens not shown …]"))
    num_unused = len(pack.input_ids) - pack.num_tokens
    if num_unused:
        lines.append(screen.faint(f"[tail: {num_unused:,} unused tokens]"))
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class _Screen:
    """Writes with escape sequences or without, on lines of `width` columns."""

    color: bool
    width: int

    def rule(self, title: str, dash: str) -> str:
        return f"{dash * 2} {title} {dash * max(2, self.width - cell_len(title) - 4)}"

    def faint(self, text: str) -> str:
        return self._escaped(_FAINT, text)

    def legend(self, pack: Pack) -> str:
        roles = [Role(role) for role in sorted(set(pack.role_ids[: pack.num_tokens].tolist()))]
        names = [
            self._escaped(_COLOR_OF_ROLE[role], role_name(role)) if self.color else role_name(role) for role in roles
        ]
        trained = self._escaped(_TRAINED, "trained") if self.color else "⟦trained⟧"
        return f"{trained} · not trained · " + " · ".join(names) + " · ↵ newline"

    def text(self, role: Role, pieces: Sequence[ShownPiece]) -> Iterator[str]:
        """Yields the lines of some pieces of one speaker."""
        name = role_name(role).rjust(_GUTTER - 1)
        for parts in self._lines(pieces):
            runs = groupby(parts, lambda part: (part[1].role, part[1].is_trained))
            line = "".join(self._run("".join(text for text, _ in run), *look) for look, run in runs)
            gutter = self._escaped(_COLOR_OF_ROLE[role], name) if self.color and name.strip() else name
            yield f"{gutter} │ {line}"
            name = " " * (_GUTTER - 1)

    def _lines(self, pieces: Sequence[ShownPiece]) -> Iterator[list[tuple[str, ShownPiece]]]:
        """Yields texts with their piece, a line at a time; lines are broken between pieces where that is possible."""
        room = self.width - _GUTTER - 2 - len("↵⟧")
        line: list[tuple[str, ShownPiece]] = []
        num_columns = 0
        for piece, text in zip(pieces, self._marked(pieces), strict=True):
            for part in re.split(r"(?<=\n)", text):
                for chunk in _chunks(part.removesuffix("\n"), room):
                    if num_columns + cell_len(chunk.rstrip("↵⟧")) > room:
                        yield line
                        line, num_columns = [], 0
                    line.append((chunk, piece))
                    num_columns += cell_len(chunk)
                if part.endswith("\n"):
                    yield line
                    line, num_columns = [], 0
        if line:
            yield line

    def _marked(self, pieces: Sequence[ShownPiece]) -> Iterator[str]:
        """Yields safe texts; without color, brackets open before and close after each run of trained pieces."""
        for index, piece in enumerate(pieces):
            text = visible_text(piece.text).replace("\t", _TAB).replace("\n", "↵\n")
            if self.color:
                yield text
                continue
            for bracket, name in _BRACKETS.items():
                text = text.replace(bracket, name)
            opens = piece.is_trained and not (index > 0 and pieces[index - 1].is_trained)
            closes = piece.is_trained and not (index + 1 < len(pieces) and pieces[index + 1].is_trained)
            body = text.removesuffix("\n")
            yield "⟦" * opens + body + "⟧" * closes + text[len(body) :]

    def _run(self, text: str, role: Role, is_trained: bool) -> str:
        if not self.color:
            return text
        return self._escaped(_COLOR_OF_ROLE[role] + f";{_TRAINED}" * is_trained, text)

    def _escaped(self, codes: str, text: str) -> str:
        return f"\x1b[{codes}m{text}\x1b[0m" if self.color else text


def _pack_title(pack: Pack) -> str:
    share = pack.num_trained_tokens / max(pack.num_tokens, 1)
    return (
        f"pack {pack.index} · conversations {len(pack.keys):,}, attention documents {num_attention_documents(pack):,}"
        f" · {pack.num_tokens:,} of {len(pack.input_ids):,} tokens · {pack.num_trained_tokens:,} trained ({share:.0%})"
    )


def _hidden_tokens(num_tokens: int, max_tokens: int | None) -> range:
    if max_tokens is None or num_tokens <= max_tokens:
        return range(0)
    num_head = max_tokens * 2 // 3
    return range(num_head, num_tokens - (max_tokens - num_head))


def _lies_within(part: ShownConversation | ShownPiece, tokens: range) -> bool:
    return tokens.start <= part.start and part.end <= tokens.stop


def _chunks(text: str, room: int) -> Iterator[str]:
    """Yields the text in chunks of at most `room` columns: nearly always one. rich's chop_cells loses joiners."""
    while cell_len(text) > room:
        num_characters = next(n for n in range(len(text), 0, -1) if n == 1 or cell_len(text[:n]) <= room)
        yield text[:num_characters]
        text = text[num_characters:]
    if text:
        yield text
