"""Text for people: escapes characters that act on a terminal or are invisible on a page, and counts things."""

from __future__ import annotations

import re

# Control characters (ESC begins an escape sequence), bidirectional overrides, zero-width spaces, line separators, lone
# surrogates, what Unicode says a font leaves out (Default_Ignorable_Code_Point: fillers of Hangul and Khmer, variation
# selectors, tags), and the blank patterns of Braille and of music. The joiners U+200C and U+200D write words and emoji.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\u2800\u3164\ufe00-\ufe0d\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U0001bca0-\U0001bca3\U0001d159"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
    # The variation selectors of text and of emoji, but behind a symbol, as in a heart, and before a keycap.
    "|(?<![\xa9\xae\u203c\u2049\u20e3\u2122\u2139\u2190-\u27bf\u2900-\u2bff\u3030\u303d\u3297\u3299\U0001f000-\U0001faff#*0-9])"
    "[\ufe0e\ufe0f]|(?<=[#*0-9])[\ufe0e\ufe0f](?!\u20e3)"
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


def counted(number: int, nouns: str) -> str:
    """Returns a number with its noun, which is singular after 1: `1,200 rows`, `1 row`, `1 copy`, `1 batch`."""
    if number != 1:
        return f"{number:,} {nouns}"
    if nouns.endswith("ies"):
        return f"1 {nouns[:-3]}y"
    return f"1 {nouns[:-2] if nouns.endswith(('sses', 'ches', 'shes')) else nouns[:-1]}"
