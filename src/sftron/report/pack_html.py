"""A pack as HTML: a map of it, then its conversations block by block; trained text is in <mark>.

Each piece of text is one <i> without attributes, and the numbers of all tokens stand once, as JSON, at the end of the
section; pack.js finds a piece's tokens by counting. A token costs about 30 bytes, where a title attribute takes 120.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby

from sftron.data.types import IGNORE_INDEX, Pack, Role
from sftron.report.page import escaped
from sftron.report.pieces import Decode
from sftron.report.transcript import (
    Block,
    ShownConversation,
    ShownPiece,
    key_text,
    num_attention_documents,
    pack_trained_tokens,
    role_name,
    shown_conversations,
)


def pack_section(pack: Pack, decode: Decode, *, number: int, source_names: Sequence[str]) -> str:
    """The <section> of one pack; `number` (from 0) tells it from others on the page."""
    conversations = list(shown_conversations(pack, decode))
    num_unused = len(pack.input_ids) - pack.num_tokens
    tail = f'<p class="tail">[tail: {num_unused:,} unused tokens]</p>' if num_unused else ""
    return (
        f'<section class="pack" id="p{number}"><h2>Pack {pack.index}</h2><p class="facts">{_facts(pack)}</p>'
        + _map(pack, conversations, number)
        + "".join(_conversation(conversation, number, source_names) for conversation in conversations)
        + tail
        + f'<script type="application/json">{_token_numbers(pack, conversations)}</script></section>\n'
    )


def role_class(role: Role) -> str:
    return role.name.lower()


def _facts(pack: Pack) -> str:
    num_documents = num_attention_documents(pack)
    isolation = (
        "attention stays inside each conversation"
        if num_documents == len(pack.keys)
        else f"attention sees {num_documents:,} document{'s' * (num_documents != 1)}, across conversations"
    )
    share = pack.num_trained_tokens / max(pack.num_tokens, 1)
    return (
        f"{len(pack.keys):,} conversation{'s' * (len(pack.keys) != 1)} · "
        f"{pack.num_tokens:,} of {len(pack.input_ids):,} tokens · "
        f"{pack.num_trained_tokens:,} trained ({share:.0%}) · {isolation}"
    )


def _map(pack: Pack, conversations: Sequence[ShownConversation], number: int) -> str:
    """The pack as one strip: a box a conversation, which is a link to it, with its trained tokens filled in."""
    boxes = []
    for conversation in conversations:
        start, width = conversation.start, conversation.end - conversation.start
        title = f"Conversation {conversation.number}: {width:,} tokens, {conversation.num_trained:,} trained"
        boxes.append(
            f'<a href="#p{number}c{conversation.number}"><title>{title}</title>'
            f'<rect class="box" x="{start}" width="{width}" height="28"/></a>'
        )
    trained = pack_trained_tokens(pack).tolist()
    runs = []
    at = 0
    for is_trained, group in groupby(trained):
        width = len(list(group))
        if is_trained:
            runs.append(f"M{at} 7h{width}v14h-{width}z")
        at += width
    borders = "".join(f"M{c.start} 0v28" for c in conversations[1:])
    return (
        f'<svg class="map" viewBox="0 0 {len(trained)} 28" preserveAspectRatio="none" role="img" '
        f'aria-label="Where the trained tokens lie in the pack">{"".join(boxes)}'
        f'<path class="runs" d="{"".join(runs)}"/><path class="borders" d="{borders}"/></svg>'
    )


def _conversation(conversation: ShownConversation, number: int, source_names: Sequence[str]) -> str:
    num_tokens = conversation.end - conversation.start
    return (
        f'<details open class="conversation" id="p{number}c{conversation.number}"><summary>'
        f"<b>Conversation {conversation.number}</b> {escaped(key_text(conversation.key, source_names))}"
        f"<span>{num_tokens:,} tokens, {conversation.num_trained:,} trained</span></summary>"
        f'<div class="blocks" tabindex="0" role="group" aria-label="Tokens of conversation {conversation.number}; '
        'the arrow keys go from one to the next">' + "".join(map(_block, conversation.blocks)) + "</div></details>"
    )


def _block(block: Block) -> str:
    runs = groupby(block.pieces, lambda piece: (piece.role, piece.is_trained, piece.is_partly_trained))
    text = "".join(_run(*look, pieces) for look, pieces in runs)
    return (
        f'<div class="block"><div class="who {role_class(block.role)}">{role_name(block.role)}</div><p>{text}</p></div>'
    )


def _run(role: Role, is_trained: bool, is_partly_trained: bool, pieces: Iterator[ShownPiece]) -> str:
    tag = "mark" if is_trained else "span"
    names = role_class(role) + " partly" * is_partly_trained
    text = "".join(f"<i>{_with_line_ends(piece.text)}</i>" for piece in pieces)
    return f'<{tag} class="{names}">{text}</{tag}>'


def _with_line_ends(text: str) -> str:
    """Each newline in a <u>, before which the stylesheet draws an arrow that is no part of the text."""
    return escaped(text).replace("\n", "<u>\n</u>")


def _token_numbers(pack: Pack, conversations: Sequence[ShownConversation]) -> str:
    """What the tooltips say, indexed by token; `pieces` has the number of tokens of each <i>, in document order."""
    num_tokens = pack.num_tokens
    pieces = [piece.end - piece.start for c in conversations for block in c.blocks for piece in block.pieces]
    numbers = {
        "ids": pack.input_ids[:num_tokens].tolist(),
        "labels": pack.labels[:num_tokens].tolist(),
        "weights": [
            float(f"{weight:.4g}") if weight % 1 else int(weight) for weight in pack.loss_weights[:num_tokens].tolist()
        ],
        "positions": pack.position_ids[:num_tokens].tolist(),
        "roles": pack.role_ids[:num_tokens].tolist(),
        "documents": pack.cu_seqlens.tolist(),
        "conversations": pack.conversation_bounds.tolist(),
        "pieces": pieces,
        "role_names": [role_name(role) for role in Role],
        "ignore_index": IGNORE_INDEX,
    }
    return json.dumps(numbers, separators=(",", ":"), allow_nan=False)
