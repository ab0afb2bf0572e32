"""Chat templates by name, for base models that have none; the files are beside this one, in templates/."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from sftron.data.chat.template import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NEEDED_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "alpaca": (),
    "vicuna": (),
    "zephyr": (),
    "plain": (),
}
"""Control tokens that a template writes. Those without end their turns with the tokenizer's own eos_token."""

NAMES = tuple(_NEEDED_TOKENS)


def named_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The template's Jinja source. Raises TemplateError where the tokenizer lacks a token that it needs."""
    needed = _NEEDED_TOKENS[name]
    known = {token.content for token in tokenizer.added_tokens_decoder.values()}
    if missing := [token for token in needed if token not in known]:
        listed = ", ".join(f'"{token}"' for token in missing)
        raise TemplateError(
            f"tokenizer.chat_template {name} writes {listed}, which the tokenizer does not have: set "
            f"tokenizer.add_tokens: [{listed}], or take a template that needs none: "
            + ", ".join(each for each in NAMES if not _NEEDED_TOKENS[each])
        )
    if not needed and tokenizer.eos_token not in known:
        raise TemplateError(
            f"tokenizer.chat_template {name} ends turns with the eos_token, and the tokenizer has none; give it one"
        )
    return (files("sftron.data.chat") / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
