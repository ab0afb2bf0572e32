"""Loads a tokenizer and the source of its chat template, from a folder, the Hub, or by a template's name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.resources import files
from pathlib import Path

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from sftron.data.chat.template import TemplateError
from sftron.data.chat.tokenizer_file import difference_from_file
from sftron.regular_file import where_missing

_MAIN_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model"),
)
"""A tokenizer's folder has one of these files."""

_NEEDED_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "hermes": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "alpaca": (),
    "vicuna": (),
    "zephyr": (),
    "plain": (),
}
"""The control tokens of each named template; a template without any ends turns with the tokenizer's eos_token."""
TEMPLATE_NAMES = tuple(_NEEDED_TOKENS)
"""The names of the chat templates that come with sftron, for base models without one."""


def load_tokenizer(path: str | Path, add_tokens: Collection[str] = ()) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """Loads a tokenizer and adds the given tokens that it lacks. Returns both.

    Raises ValueError if it cannot be loaded, or if transformers builds a tokenizer that differs from tokenizer.json.
    """
    from transformers import AddedToken, AutoTokenizer  # slow to import

    if Path(path).is_dir() and not any((Path(path) / name).exists() for name in _MAIN_FILES):
        # Some versions of transformers would make an empty tokenizer.
        raise ValueError(f"{path} has no {_MAIN_FILES[0]}; copy the tokenizer's files from the original model")
    try:
        # By default, transformers may prompt on the terminal for permission to run the folder's code.
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exceptions for a broken tokenizer.json
        remedy = "; check its tokenizer.json, tokenizer_config.json and config.json" if Path(path).is_dir() else ""
        raise ValueError(
            f"no tokenizer can be loaded from {path}: {' '.join(str(error).split()).rstrip('.')}{remedy}"
        ) from error
    if problem := difference_from_file(tokenizer, path):
        raise ValueError(problem)
    if added := [token for token in add_tokens if token not in tokenizer.get_vocab()]:
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    return tokenizer, added


def template_source(template: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the source of a template: a file, one of TEMPLATE_NAMES, or one of the tokenizer's. Raises ValueError."""
    if template in TEMPLATE_NAMES:
        return named_template(template, tokenizer)
    if isinstance(tokenizer.chat_template, dict) and template in tokenizer.chat_template:
        return tokenizer.chat_template[template]
    if not Path(template).is_file():
        raise ValueError(
            f"tokenizer.chat_template: {template} is neither a file{where_missing(template)} nor one of "
            f"{', '.join(TEMPLATE_NAMES)}; give the path of a Jinja template"
        )
    try:
        source = Path(template).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        problem = f"{template} is not UTF-8 text ({error}); save it as UTF-8"
        raise ValueError(f"tokenizer.chat_template: {problem}") from error
    if not source.strip():
        raise ValueError(f"tokenizer.chat_template: {template} is empty; write a Jinja template, or remove the key")
    return source


def named_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the Jinja source of a named template. Raises TemplateError if the tokenizer lacks a token of it."""
    needed = _NEEDED_TOKENS[name]
    known = {token.content for token in tokenizer.added_tokens_decoder.values()}
    if missing := [token for token in needed if token not in known]:
        listed = ", ".join(f'"{token}"' for token in missing)
        raise TemplateError(
            f"tokenizer.chat_template {name} writes {listed}, which the tokenizer lacks: set "
            f"tokenizer.add_tokens: [{listed}], or use a template that needs none: "
            + ", ".join(each for each in TEMPLATE_NAMES if not _NEEDED_TOKENS[each])
        )
    if not needed and tokenizer.eos_token not in known:
        raise TemplateError(
            f"tokenizer.chat_template {name} ends turns with the eos_token, but the tokenizer has none; set it in "
            "tokenizer_config.json"
        )
    return (files("sftron.data.chat") / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def template_sources(template: str | Mapping[str, str] | None) -> dict[str, str]:
    """Returns the templates by their names in apply_chat_template: "default", and "tool_use" if there is one.

    Raises TemplateError if there is no default template.
    """
    if isinstance(template, str):
        return {"default": template}
    given = template if isinstance(template, Mapping) else {}
    named = {name: each for name, each in given.items() if isinstance(each, str)}
    if "default" in named:
        return {name: named[name] for name in ("default", "tool_use") if name in named}
    found = "several named ones without a default" if named else f"{template!r:.60}" if template else "none"
    raise TemplateError(
        f"the tokenizer must have one chat template, but has {found}; set tokenizer.chat_template to one of "
        f"{', '.join([*named, *TEMPLATE_NAMES])}, or a .jinja file"
    )
