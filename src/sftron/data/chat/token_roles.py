"""The tokens of a rendered conversation, each with the role of the stretch of text that it begins in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from sftron.data.chat.control_tokens import Tokens, num_bytes
from sftron.data.chat.spans import SAID_ROLES, RenderedTurns
from sftron.data.chat.template import TemplateError
from sftron.data.types import Conversation, Message, Role, TokenizedConversation, Turn


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """Which span of a rendered text has which role: the same for all conversations that a template writes alike.

    Attributes:
        roles: uint8 [spans].
        messages: The message that each span belongs to, -1 for the template's.
        turns: Where each message's text stands: its first span, the span behind it, and the span behind its stop token
            or None. None for a message of which nothing is written.
        texts: The spans that hold the conversation's own text.
        after_template: Model-generated spans that begin where the template's text ends.
        left_out: Texts that the template does not write.
    """

    roles: np.ndarray
    messages: tuple[int, ...]
    turns: tuple[tuple[int, int, int | None] | None, ...]
    texts: tuple[int, ...]
    after_template: tuple[int, ...]
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, turns: RenderedTurns) -> Outline:
        segments = turns.segments
        roles = [segment.role for segment in segments]
        number_at = {segment.start: number for number, segment in enumerate(segments)}
        number_at[segments[-1].end if segments else 0] = len(segments)
        return cls(
            roles=np.array(roles, dtype=np.uint8),
            messages=tuple(segment.message for segment in segments),
            turns=tuple(
                place
                and (
                    number_at[place.start],
                    number_at[place.end],
                    None if place.stop is None else number_at[place.stop_end],
                )
                for place in turns.places
            ),
            texts=tuple(number for number, segment in enumerate(segments) if segment.is_text),
            after_template=tuple(
                number
                for number, (before, role) in enumerate(pairwise([Role.TEMPLATE, *roles]))
                if before is Role.TEMPLATE and role in SAID_ROLES
            ),
            left_out=tuple(what for _, what in turns.left_out),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A conversation's text, ready to tokenize: pieces are the spans' texts. num_control: control tokens in it."""

    pieces: list[str]
    outline: Outline
    plane: int
    num_control: int
    holds_control_text: bool


def assign_roles(tokens: Tokens, layout: Layout, conversation: Conversation) -> TokenizedConversation:
    """Give every token the role of the span it begins in."""
    if (found := int(np.count_nonzero(tokens.is_control))) != layout.num_control:
        raise TemplateError(
            f"the template writes {layout.num_control} control tokens here, and the tokenizer finds {found} of them"
        )
    outline, num_tokens = layout.outline, len(tokens.ids)
    bounds = [0, *accumulate(map(num_bytes if tokens.in_bytes else len, layout.pieces))]
    first_tokens = tokens.starts.searchsorted(bounds)
    first_tokens[0] = 0  # white space that a tokenizer puts before the text begins nowhere
    first_tokens[-1] = num_tokens
    counts = first_tokens[1:] - first_tokens[:-1]
    first = first_tokens.tolist()
    if any(after < before for before, after in pairwise(first)):
        raise TemplateError("the tokenizer does not give its tokens in the order of the text")

    num_seam_tokens = 0
    for span in outline.after_template:
        # A token of the template that ends in content is a merge that the model never meets at inference.
        if (token := first[span]) and tokens.ends[token - 1] > bounds[span]:
            num_seam_tokens += 1

    turns, end = [], 0
    for message, place in zip(conversation.messages, outline.turns, strict=True):
        if place is None:
            turns.append(Turn(message.role, end, end, None))
            continue
        start, end = first[place[0]], first[place[1]]
        turns.append(Turn(message.role, start, end, None if place[2] is None else first[place[2]] - 1))
    return TokenizedConversation(
        tokens.ids,
        outline.roles.repeat(counts),
        tuple(turns),
        conversation.key,
        num_seam_tokens,
        layout.holds_control_text,
        token_weights=_token_weights(outline, conversation.messages, counts),
        left_out=outline.left_out,
    )


def _token_weights(outline: Outline, messages: Sequence[Message], counts: np.ndarray) -> np.ndarray | None:
    """A token's weight is its message's."""
    weights = [message.weight for message in messages]
    if all(weight == 1.0 for weight in weights):
        return None
    weights.append(1.0)  # message -1, the template
    return np.repeat(np.array([weights[message] for message in outline.messages], dtype=np.float32), counts)
