"""HTML pages from the templates of pages/: each is one file that needs no other and no network, in light and dark.

Every value that a template writes is made visible (`visible_text`) and escaped, whoever wrote it. A content security
policy that knows only the hash of the page's own script is the second lock: should text of the data ever pass the
escaping, a browser would still neither run it nor fetch anything for it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import groupby
from typing import Any

import jinja2
from markupsafe import Markup, escape

from sftron.data.types import IGNORE_INDEX, Pack, Role
from sftron.report.charts import chart_svg, line_color, line_dashes
from sftron.report.tokens import (
    Block,
    Decode,
    ShownConversation,
    ShownPiece,
    key_text,
    num_attention_documents,
    pack_trained_tokens,
    role_name,
    shown_conversations,
)
from sftron.visible_text import visible_text


def render(name: str, **values: Any) -> str:
    """Returns the page that a template of pages/ makes of the values; the same values give the same page."""
    return _ENVIRONMENT.get_template(name).render(**values)


def asset(name: str) -> Markup:
    """Returns the text of a file of pages/, as it is."""
    return Markup(files("sftron.report").joinpath("pages", name).read_text(encoding="utf-8"))


def shown_packs(packs: Sequence[Pack], decode: Decode, source_names: Sequence[str]) -> dict[str, Any]:
    """Returns what packs.html.jinja shows: the roles of the legend, and each pack with its conversations.

    A token costs about 30 bytes of a page, where a title attribute would take 120: each piece of text is an <i> without
    attributes, and the numbers of all tokens are one block of JSON, in which pack.js finds a piece's by counting.
    """
    return {
        "roles": sorted({Role(role) for pack in packs for role in pack.role_ids[: pack.num_tokens].tolist()}),
        "packs": [_shown_pack(pack, decode, source_names) for pack in packs],
    }


def _shown_pack(pack: Pack, decode: Decode, source_names: Sequence[str]) -> dict[str, Any]:
    conversations = list(shown_conversations(pack, decode))
    num_documents = num_attention_documents(pack)
    isolation = (
        "attention stays inside each conversation"
        if num_documents == len(pack.keys)
        else f"attention sees {num_documents:,} document{'s' * (num_documents != 1)}, across conversations"
    )
    return {
        "pack": pack,
        "isolation": isolation,
        "conversations": [(each, key_text(each.key, source_names)) for each in conversations],
        "trained": list(spans(pack_trained_tokens(pack).tolist())),
        "numbers": _token_numbers(pack, conversations),
    }


def spans(values: Sequence[Any]) -> Iterator[tuple[Any, int, int]]:
    """Yields each longest run of equal neighbors as (value, start, length)."""
    start = 0
    for value, run in groupby(values):
        length = len(list(run))
        yield value, start, length
        start += length


def _token_numbers(pack: Pack, conversations: Sequence[ShownConversation]) -> dict[str, Any]:
    """Returns the tooltips' numbers, indexed by token; `pieces` has the number of tokens of each <i>, in page order."""
    real = slice(0, pack.num_tokens)
    weights = pack.loss_weights[real].tolist()
    return {
        "ids": pack.input_ids[real].tolist(),
        "labels": pack.labels[real].tolist(),
        "weights": [float(f"{weight:.4g}") if weight % 1 else int(weight) for weight in weights],
        "positions": pack.position_ids[real].tolist(),
        "roles": pack.role_ids[real].tolist(),
        "documents": pack.cu_seqlens.tolist(),
        "conversations": pack.conversation_bounds.tolist(),
        "pieces": [piece.end - piece.start for c in conversations for block in c.blocks for piece in block.pieces],
        "role_names": [role_name(role) for role in Role],
        "ignore_index": IGNORE_INDEX,
    }


def _runs(block: Block) -> Iterator[tuple[tuple[Role, bool, bool], Iterator[ShownPiece]]]:
    """Yields the block's pieces, grouped while they look alike."""
    return groupby(block.pieces, lambda piece: (piece.role, piece.is_trained, piece.is_partly_trained))


def _with_line_ends(text: str) -> Markup:
    """Returns the escaped text with each newline in a <u>, before which the stylesheet draws an arrow."""
    return Markup(escape(visible_text(text)).replace("\n", Markup("<u>\n</u>")))


def _visible(value: Any) -> Any:
    return value if hasattr(value, "__html__") else visible_text(str(value))


def _script_source(script: str) -> Markup:
    """Returns what a content security policy says of the page's one script, or of none."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Markup(f"'sha256-{digest}'" if script else "'none'")


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("sftron.report", "pages"),
    autoescape=True,
    finalize=_visible,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
_ENVIRONMENT.globals.update(
    asset=asset, chart_svg=chart_svg, line_color=line_color, line_dashes=line_dashes, script_source=_script_source
)
_ENVIRONMENT.filters.update(
    commas=lambda number: f"{number:,}", line_ends=_with_line_ends, role_name=role_name, runs=_runs
)
