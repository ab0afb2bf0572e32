"""A ChatTokenizer from a folder or the Hub, with the template and the control tokens that the user wants."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sftron.data.chat.named_templates import NAMES, named_template
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.chat.trial import require_bounded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_chat_tokenizer(
    path: str | Path,
    *,
    chat_template: str | None = None,
    add_tokens: Collection[str] = (),
    date: datetime.date | None = None,
    allow_control_tokens: Mapping[str, Collection[str]] | None = None,
) -> ChatTokenizer:
    """path: a local folder or a Hub id. The other arguments are the configuration's keys of these names.

    Raises ValueError where the folder, the tokenizer or the template cannot be used.
    """
    from transformers import AddedToken  # slow to import

    tokenizer = _load_tokenizer(path)
    if added := [token for token in add_tokens if token not in tokenizer.get_vocab()]:
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    template = _chat_template(chat_template, tokenizer)

    def make() -> ChatTokenizer:
        return ChatTokenizer(tokenizer, template, date, allow_control_tokens, added)

    require_bounded(tokenizer, make, template or tokenizer.chat_template)
    return make()


def _load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        # False, not its default: that asks on the terminal whether code of the folder may run.
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exceptions for a broken tokenizer.json
        raise ValueError(f"no tokenizer can be loaded from {path}: {error}") from error


def _chat_template(template: str | None, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The source of a template given as a file, by one of our names, or by one of the tokenizer's own."""
    if template is None:
        return None
    if template in NAMES:
        return named_template(template, tokenizer)
    if isinstance(tokenizer.chat_template, dict) and template in tokenizer.chat_template:
        return tokenizer.chat_template[template]
    if not Path(template).is_file():
        raise ValueError(
            f"tokenizer.chat_template: {template} is not a file, nor one of {', '.join(NAMES)}; give the path of a "
            "Jinja template"
        )
    return _read_template(Path(template))


def _read_template(path: Path) -> str:
    try:
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"tokenizer.chat_template: {path} is not UTF-8 text ({error}); save it as UTF-8") from error
    if not source.strip():
        raise ValueError(f"tokenizer.chat_template: {path} is empty; write a Jinja template, or remove the key")
    return source
