"""A pack as text for a terminal, with its speakers and its trained tokens; legible with and without color.

         user │ <|im_start|>user↵
              │ Hi<|im_end|>↵
    assistant │ <|im_start|>assistant↵
              │ ⟦Yo<|im_end|>⟧↵

Trained text is enclosed in ⟦ ⟧, or, with color, is bold and underlined. ↵ is a newline in the text; a line without it
was wrapped to fit the width. All text is to the right of the bar, so it cannot imitate a rule between conversations.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import TextIO

from rich.cells import cell_len

from sftron.data.types import Pack, Role
from sftron.report.shown import Locate, Span, key_text, num_attention_documents, numbered_row, shown_conversations
from sftron.report.tokens import Decode, role_name
from sftron.visible_text import counted, visible_text

_COLORS = {
    Role.TEMPLATE: "90",
    Role.SYSTEM: "35",
    Role.USER: "36",
    Role.ASSISTANT: "32",
    Role.TOOL: "33",
    Role.REASONING: "34",
    Role.TOOL_CALL: "31",
    Role.TEXT: "32",
}
_TRAINED, _FAINT = "1;4", "2"
_NAME_COLUMNS = 9
"""The width of the speaker's column: the length of the longest name."""
_LAST_LINES = 20
"""The number of last lines to show of a pack that exceeds the terminal's limit."""
_WRITTEN_OUT = str.maketrans({"\t": "⇥   ", "\n": "↵\n"})
_BRACKETS_WRITTEN_OUT = str.maketrans({"⟦": "<U+27E6>", "⟧": "<U+27E7>"})

_Styled = tuple[str, str]
"""A text and the escape code of its color; "" means no color."""


def wants_color(stream: TextIO) -> bool:
    """Returns whether to write escape sequences: if the stream is a terminal and NO_COLOR (no-color.org) is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def pack_as_text(
    pack: Pack,
    decode: Decode,
    *,
    color: bool,
    width: int = 100,
    max_tokens: int | None = 1000,
    max_lines: int | None = None,
    whole_in: str = "",
    locate: Locate = numbered_row,
) -> str:
    """Returns the pack as lines of at most `width` columns, with a rule before each conversation.

    Args:
        color: Whether to write escape sequences; see `wants_color`.
        max_tokens: Shows only the first conversations up to this many tokens, at least one and each whole, and a line
            that counts the others; None shows all.
        max_lines: If there are more lines than this (at least 40), shows only the first and last ones, and a line that
            counts the others; None shows all.
        whole_in: Where to see the whole pack; that line names it.
        locate: Names the rows.
    """
    width = max(width, 40)
    bounds = pack.conversation_bounds.tolist()
    num_shown = num_conversations = len(pack.keys)
    if max_tokens is not None:
        num_shown = min(num_conversations, max(1, bisect_right(bounds, max_tokens) - 1))
    lines = [_rule("━", _pack_title(pack), width), _legend(pack, color=color)]
    for conversation in islice(shown_conversations(pack, decode), num_shown):
        counts = f"{counted(conversation.end - conversation.start, 'tokens')}, {conversation.num_trained:,} trained"
        title = f"conversation {conversation.number} · {key_text(conversation.key, locate)} · {counts}"
        lines.append(_rule("─", title, width))
        for block in conversation.blocks:
            lines.extend(_block_lines(block.role, block.spans, width, color=color))
    faint = _FAINT if color else ""
    if num_shown < num_conversations:
        rest = f"{num_conversations - num_shown:,} of {num_conversations:,} conversations"
        lines.append(
            _painted(f"[… not shown: {rest}, {counted(pack.num_tokens - bounds[num_shown], 'tokens')} …]", faint)
        )
    if num_unused := len(pack.input_ids) - pack.num_tokens:
        lines.append(_painted(f"[padding: {num_unused:,} unused tokens]", faint))
    if max_lines is not None and len(lines) > max_lines:
        lines = _shortened(lines, max_lines, whole_in, color=color)
    return "\n".join(lines) + "\n"


def _shortened(lines: list[str], max_lines: int, whole_in: str, *, color: bool) -> list[str]:
    """Returns the first and the last lines. The last ones begin with their speaker, and brackets stay pairs."""
    head, between, tail = lines[: max_lines - _LAST_LINES - 1], lines[:-_LAST_LINES], lines[-_LAST_LINES:]
    speaker, bar, text = tail[0].partition(" │ ")
    if bar and not speaker.strip():
        speaker = next(name for name, _, _ in (line.partition(" │ ") for line in reversed(between)) if name.strip())
    if not color and _is_open(between):
        text = f"⟦{text}"
    if not color and _is_open(head):
        head[-1] += "⟧"
    left_out = f"[… {counted(len(between) - len(head), 'lines')} more; {whole_in} has all …]"
    return [*head, _painted(left_out, _FAINT if color else ""), f"{speaker}{bar}{text}", *tail[1:]]


def _is_open(lines: Sequence[str]) -> bool:
    """Returns whether plain lines end within trained text."""
    text = "\n".join(lines)
    return text.rfind("⟦") > text.rfind("⟧")


def _pack_title(pack: Pack) -> str:
    share = pack.num_trained_tokens / max(pack.num_tokens, 1)
    return (
        f"pack {pack.index} · conversations {len(pack.keys):,}, attention documents {num_attention_documents(pack):,}"
        f" · {pack.num_tokens:,} of {len(pack.input_ids):,} tokens · {pack.num_trained_tokens:,} trained ({share:.0%})"
    )


def _legend(pack: Pack, *, color: bool) -> str:
    roles = [Role(role) for role in sorted(set(pack.role_ids[: pack.num_tokens].tolist()))]
    names = [_painted(role_name(role), _COLORS[role] if color else "") for role in roles]
    trained = _painted("trained", _TRAINED) if color else "⟦trained⟧"
    return " · ".join([trained, "not trained", *names, "↵ newline"])


def _rule(dash: str, title: str, width: int) -> str:
    return f"{dash * 2} {title} {dash * max(2, width - cell_len(title) - 4)}"


def _block_lines(role: Role, spans: Sequence[Span], width: int, *, color: bool) -> Iterator[str]:
    name = _painted(role_name(role).rjust(_NAME_COLUMNS), _COLORS[role] if color else "")
    texts = _colored(spans) if color else _bracketed(spans)
    for line in _broken(texts, room=width - _NAME_COLUMNS - 3 - len("↵⟧")):
        same_look = groupby(line, lambda styled: styled[1])
        yield f"{name} │ {''.join(_painted(''.join(text for text, _ in each), codes) for codes, each in same_look)}"
        name = " " * _NAME_COLUMNS


def _painted(text: str, codes: str) -> str:
    return f"\x1b[{codes}m{text}\x1b[0m" if codes else text


def _colored(spans: Sequence[Span]) -> Iterator[_Styled]:
    for span in spans:
        codes = _COLORS[span.role] + f";{_TRAINED}" * span.is_trained
        yield visible_text(span.text).translate(_WRITTEN_OUT), codes


def _bracketed(spans: Sequence[Span]) -> Iterator[_Styled]:
    """Yields texts with brackets around trained spans; a closing bracket precedes a newline at the end of its span."""
    for is_trained, group in groupby(spans, lambda span: span.is_trained):
        texts = [visible_text(span.text).translate(_BRACKETS_WRITTEN_OUT).translate(_WRITTEN_OUT) for span in group]
        if is_trained:
            texts[0] = f"⟦{texts[0]}"
            body = texts[-1].removesuffix("\n")
            texts[-1] = f"{body}⟧{texts[-1][len(body) :]}"
        yield from ((text, "") for text in texts)


def _broken(texts: Iterator[_Styled], room: int) -> Iterator[list[_Styled]]:
    """Yields lines of at most `room` columns, wrapped between spans if possible."""
    line: list[_Styled] = []
    num_columns = 0
    for text, codes in texts:
        for row in re.split(r"(?<=\n)", text):
            for chunk in _chunks(row.removesuffix("\n"), room):
                if num_columns + cell_len(chunk.rstrip("↵⟧")) > room:
                    yield line
                    line, num_columns = [], 0
                line.append((chunk, codes))
                num_columns += cell_len(chunk)
            if row.endswith("\n"):
                yield line
                line, num_columns = [], 0
    if line:
        yield line


def _chunks(text: str, room: int) -> Iterator[str]:
    """Yields the text in chunks of at most `room` columns, usually one. rich's chop_cells would lose joiners."""
    while cell_len(text) > room:
        num_characters = next(n for n in range(len(text), 0, -1) if n == 1 or cell_len(text[:n]) <= room)
        yield text[:num_characters]
        text = text[num_characters:]
    if text:
        yield text
