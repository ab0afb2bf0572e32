"""Text whose every character can be seen: none acts on a terminal or hides in a page."""

from __future__ import annotations

import re

# Characters that a reader would not see, or that act on the screen instead of standing on it: controls (ESC begins an
# escape sequence), bidirectional overrides, zero-width spaces, line separators, tags, lone surrogates.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e01ef]"
)


def visible_text(text: str) -> str:
    """The text with every character that would act or hide instead of being seen written out; newline and tab stay.

    ESC becomes ␛ (the control pictures at U+2400), a right-to-left override `<U+202E>`. Ordinary text is unchanged.
    """
    return _UNSEEN.sub(_written_out, text)


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"<U+{code:04X}>"
