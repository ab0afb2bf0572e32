"""Layouts of plain conversations, remembered by what the template writes around their texts.

Most rows of a data set are messages of plain text, and a template writes the same words around them. Whose each span is
then depends on these words alone, so it is read once:

    text    <|im_start|>user\\n  Why?   <|im_end|>\\n<|im_start|>assistant\\n  So.    <|im_end|>\\n
    frame   <|im_start|>user\\n  (user) <|im_end|>\\n<|im_start|>assistant\\n  (asst) <|im_end|>\\n

A conversation has no frame if one of its texts may decide by what it holds: it spells a control token or the end of
reasoning, is white space, or is written in part, twice, or out of order. Tools, tool calls
and reasoning have none either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sftron.data.chat.control_tokens import ControlTokens
from sftron.data.chat.generation_prompt import GenerationPrompt
from sftron.data.chat.token_roles import Layout
from sftron.data.chat.tracked_text import TrackedStr
from sftron.data.types import Conversation

_MOST_FRAMES = 1024

_Key = tuple[int | str, ...]
_Prompts = Mapping[int, GenerationPrompt | None]


class Frames:
    """The frames of a tokenizer's template."""

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self._known: dict[_Key, Layout] = {}

    def layout(
        self,
        text: TrackedStr,
        conversation: Conversation,
        plane: int,
        read: Callable[[], Layout],
        prompts: Callable[[], _Prompts],
    ) -> Layout:
        """Returns the layout of a text, which is read only if its frame is not known.

        Args:
            text: The rendered conversation.
            conversation: The conversation.
            plane: The private-use block of the control tokens' names.
            read: Reads the text.
            prompts: Returns what the template writes before each answer at inference.
        """
        found = self._find(text, conversation, plane)
        if found is None:
            return read()
        key, gaps, texts = found
        known = self._known.get(key)
        if known is None:
            layout = read()
            if _is_cut_by_gaps(layout, gaps, texts, prompts()):
                if len(self._known) >= _MOST_FRAMES:
                    self._known.clear()
                self._known[key] = layout
            return layout
        pieces = known.pieces.copy()
        for span, piece in zip(known.outline.texts, texts, strict=True):
            pieces[span] = piece
        return Layout(pieces, known.outline, plane, known.num_control, known.holds_control_text)

    def _find(
        self, text: TrackedStr, conversation: Conversation, plane: int
    ) -> tuple[_Key, list[str], list[str]] | None:
        """Returns the frame, the template's text before, between and after the conversation's, and these; None for a
        conversation without a frame."""
        if conversation.tools:
            return None
        messages, occurs_in = conversation.messages, self._control.occurs_in
        plain = str.__getitem__(text, slice(None))
        names: list[int | str] = []
        gaps, texts, start = [""], list[str](), 0
        for length, origin in text.runs:
            written = plain[start : start + length]
            start += length
            if origin is None:
                gaps[-1] += written
                continue
            number = len(texts)
            if origin.message != number or number == len(messages) or origin.field != "content" or origin.is_marked:
                return None
            message = messages[number]
            content = message.content or ""
            num_letters = len(content.strip())
            if not num_letters or length < num_letters or origin.role is not message.role:
                return None
            if message.fields or message.parts or "</think>" in content or occurs_in(written):
                return None
            texts.append(written)
            gaps.append("")
            names += (int(origin.role), message.role_name)
        return ((plane, *names, *gaps), gaps, texts) if len(texts) == len(messages) else None


def _is_cut_by_gaps(layout: Layout, gaps: Sequence[str], texts: list[str], prompts: _Prompts) -> bool:
    """Returns whether every text is one span, and what the template writes before an answer at inference stands whole
    in the gap before it: then no text had a say in where an answer begins."""
    is_whole = [layout.pieces[span] for span in layout.outline.texts] == texts
    asked = ((gaps[number], prompt) for number, prompt in prompts.items())
    return is_whole and all(prompt is not None and gap.startswith(prompt.text) for gap, prompt in asked)
