"""Escapes characters that would act on a terminal or be invisible on a page."""

from __future__ import annotations

import re

# Control characters (ESC begins an escape sequence), bidirectional overrides, zero-width spaces, line separators, tags
# and lone surrogates.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e01ef]"
)


def visible_text(text: str) -> str:
    """Returns the text with every control or invisible character spelled out, except newline and tab.

    For example, ESC becomes ␛ (a control picture at U+2400 and up) and a right-to-left override becomes `<U+202E>`.
    All other text is unchanged.
    """
    return _UNSEEN.sub(_written_out, text)


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"<U+{code:04X}>"
