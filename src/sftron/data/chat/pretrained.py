"""Loads a ChatTokenizer from a folder or the Hub, with the configured template and control tokens."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sftron.data.chat.template import TEMPLATE_NAMES, named_template
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
    """Loads a tokenizer from a local folder or a Hub id.

    The other arguments are the configuration's keys of the same names. Raises ValueError if the folder, the tokenizer
    or the template cannot be used.
    """
    from transformers import AddedToken, AutoTokenizer  # slow to import

    try:
        # By default, transformers may prompt on the terminal for permission to run the folder's code.
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exceptions for a broken tokenizer.json
        raise ValueError(f"no tokenizer can be loaded from {path}: {error}") from error
    if added := [token for token in add_tokens if token not in tokenizer.get_vocab()]:
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    template = _template_source(chat_template, tokenizer)

    def make() -> ChatTokenizer:
        return ChatTokenizer(tokenizer, template, date, allow_control_tokens, added)

    require_bounded(tokenizer, make, template or tokenizer.chat_template)
    return make()


def _template_source(template: str | None, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Returns the source of a template given as a file, as one of TEMPLATE_NAMES, or as one of the tokenizer's names.

    Raises ValueError if there is no such template.
    """
    if template is None:
        return None
    if template in TEMPLATE_NAMES:
        return named_template(template, tokenizer)
    if isinstance(tokenizer.chat_template, dict) and template in tokenizer.chat_template:
        return tokenizer.chat_template[template]
    if not Path(template).is_file():
        raise ValueError(
            f"tokenizer.chat_template: {template} is not a file, nor one of {', '.join(TEMPLATE_NAMES)}; give the "
            "path of a Jinja template"
        )
    try:
        source = Path(template).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        problem = f"{template} is not UTF-8 text ({error}); save it as UTF-8"
        raise ValueError(f"tokenizer.chat_template: {problem}") from error
    if not source.strip():
        raise ValueError(f"tokenizer.chat_template: {template} is empty; write a Jinja template, or remove the key")
    return source
