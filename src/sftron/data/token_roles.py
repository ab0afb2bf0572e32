"""The tokens of a rendered conversation, each with the role of the stretch of text that it begins in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from sftron.data.chat_template import TemplateError
from sftron.data.control_tokens import Tokens
from sftron.data.turns import SAID_ROLES, RenderedTurns
from sftron.data.types import Conversation, Message, Role, TokenizedConversation, Turn


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A conversation's text, ready to tokenize: pieces are the segments' texts. num_control: control tokens in it."""

    pieces: list[str]
    turns: RenderedTurns
    plane: int
    num_control: int
    holds_control_text: bool


def assign_roles(tokens: Tokens, layout: Layout, conversation: Conversation) -> TokenizedConversation:
    """Give every token the role of the segment it begins in."""
    if (found := int(np.count_nonzero(tokens.is_control))) != layout.num_control:
        raise TemplateError(
            f"the template writes {layout.num_control} control tokens here, and the tokenizer finds {found} of them"
        )
    segments, messages = layout.turns.segments, conversation.messages
    num_bytes = _num_bytes if tokens.in_bytes else len
    bounds = [0, *accumulate(map(num_bytes, layout.pieces))]
    first_tokens = np.searchsorted(tokens.starts, bounds).tolist()
    first_tokens[0] = 0  # white space that a tokenizer puts before the text begins nowhere
    first_tokens[-1] = len(tokens.ids)
    counts = [after - first for first, after in pairwise(first_tokens)]
    if any(count < 0 for count in counts):
        raise TemplateError("the tokenizer does not give its tokens in the order of the text")
    role_ids = np.repeat(np.array([segment.role for segment in segments], dtype=np.uint8), counts)

    num_seam_tokens, before = 0, Role.TEMPLATE
    for segment, first, bound in zip(segments, first_tokens, bounds, strict=False):
        # A token of the template that ends in content is a merge that the model never meets at inference.
        if before is Role.TEMPLATE and first and segment.role in SAID_ROLES:
            num_seam_tokens += bool(tokens.ends[first - 1] > bound)
        before = segment.role

    token_at = {segment.start: first for segment, first in zip(segments, first_tokens, strict=False)}
    token_at[segments[-1].end if segments else 0] = len(tokens.ids)
    turns, end = [], 0
    for message, place in zip(messages, layout.turns.places, strict=True):
        if place is None:
            turns.append(Turn(message.role, end, end, None))
            continue
        start, end = token_at[place.start], token_at[place.end]
        turns.append(Turn(message.role, start, end, None if place.stop is None else token_at[place.stop_end] - 1))
    return TokenizedConversation(
        tokens.ids,
        role_ids,
        tuple(turns),
        conversation.key,
        num_seam_tokens,
        layout.holds_control_text,
        token_weights=_token_weights(layout.turns, messages, counts),
        left_out=tuple(what for _, what in layout.turns.left_out),
    )


def _token_weights(turns: RenderedTurns, messages: Sequence[Message], counts: Sequence[int]) -> np.ndarray | None:
    """A token's weight is its message's."""
    weights = [message.weight for message in messages]
    if all(weight == 1.0 for weight in weights):
        return None
    weights.append(1.0)  # message -1, the template
    return np.repeat(np.array([weights[segment.message] for segment in turns.segments], dtype=np.float32), counts)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
