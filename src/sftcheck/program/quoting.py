"""How values become text of a program: as whole literals, once, and checked, so that no value can be code.

A program is run, and its values come from others: a model's config.json, a tokenizer, rows and their columns, paths.
`literal` is the one way in which a value becomes text, `called` keeps the names of others out of the program's own
names, and `filled` does not read what it has filled in. `require_own_code` then reads the text as Python does.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from sftcheck.program import measurements

MOST_DEPTH = 40
"""Python's parser takes up to 200 brackets within each other."""
_PLACE = re.compile(r"\$([a-z_]+)")


class NoSourceError(ValueError):
    """An object has no source text that a program could hold; the message says why."""


def no_literal(value: Any) -> str:
    raise NoSourceError(f"a value of {type(value).__name__} is no literal")


def literal(value: Any, other: Callable[[Any], str] = no_literal, depth: int = 0) -> str:
    """Returns an expression that is equal to the value, without names (NaN and infinities: a call of `float`).

    A subclass is written as its base, because its own `__repr__` may say anything.

    Args:
        other: Makes the expression of a value that is not None, a bool, a number, text, bytes, a list, a tuple or a
            mapping.

    Raises:
        NoSourceError: A value has no expression, or values are nested too deep.
    """
    if depth > MOST_DEPTH:
        raise NoSourceError(f"a value is nested more than {MOST_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, float) and value - value != 0:
        return f"float({float.__repr__(value)!r})"
    kinds: tuple[Any, ...] = (int, float, str, bytes)
    for kind in kinds:
        if isinstance(value, kind):
            return kind.__repr__(value)

    def inner(each: Any) -> str:
        return literal(each, other, depth + 1)

    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{inner(name)}: {inner(each)}' for name, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(inner, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(inner, value))}{',' * (len(value) == 1)})"
    return other(value)


def is_plain_name(name: str) -> bool:
    """Returns whether a text is a name in Python as it stands; Python reads other letters as the ASCII ones."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def called(name: str, first: Sequence[str], given: Mapping[str, str], own: Collection[str] | None = None) -> str:
    """Returns the call of a function.

    Args:
        name: The function.
        first: The expressions of arguments without a name.
        given: Those of arguments by name.
        own: The names that the function itself has, None for all of them. The others are keys of a dictionary, as text.
    """
    own = given if own is None else own
    names = {each: value for each, value in given.items() if each in own and is_plain_name(each)}
    texts = [f"{literal(each)}: {value}" for each, value in given.items() if each not in names]
    rest = [f"**{{{', '.join(texts)}}}"] if texts else []
    return f"{name}({', '.join([*first, *(f'{each}={value}' for each, value in names.items()), *rest])})"


def filled(text: str, places: Mapping[str, str]) -> str:
    """Returns a text with what its places ($name) stand for, which is not searched for places itself."""
    return _PLACE.sub(lambda place: places[place[1]], text)


# -- the check of a whole program --------------------------------------------------------------------------------------

_NODES = (
    ast.Module, ast.Expr, ast.Assign, ast.AugAssign, ast.For, ast.With, ast.withitem, ast.FunctionDef, ast.arguments,
    ast.arg, ast.Return, ast.Lambda, ast.Call, ast.keyword, ast.Attribute, ast.Subscript, ast.Slice, ast.Name,
    ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.Starred, ast.ListComp, ast.SetComp, ast.DictComp,
    ast.GeneratorExp, ast.comprehension, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.JoinedStr,
    ast.FormattedValue, ast.IfExp, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context,
)  # fmt: skip
_IMPORTS = (ast.Module, ast.Import, ast.ImportFrom, ast.alias)
_BUILTINS = {
    "abs", "any", "bool", "dict", "enumerate", "float", "id", "int", "isinstance", "iter", "len", "list", "max",
    "min", "next", "print", "range", "set", "sorted", "sum", "tuple", "zip",
}  # fmt: skip
_TEXTS = " ".join(each for name, each in vars(measurements).items() if name.isupper())
_ATTRIBUTES = {*re.findall(r"\.([A-Za-z]\w*)", _TEXTS)} | {
    "abs", "absmax", "add_tokens", "apply_chat_template", "argmax", "backend_tokenizer", "bos_token",
    "chat_template", "encode", "eos_token", "eval", "flatten", "for_model", "from_config",
    "from_list", "from_pretrained", "generation_config", "get_eval_dataloader", "get_train_dataloader",
    "logits", "manual_seed", "mask_token", "max", "model", "model_accepts_loss_kwargs", "named_parameters",
    "no_grad", "pad_token", "padding_side", "parameters", "pop", "post_processor",
    "requires_grad_", "resize_token_embeddings", "rstrip", "split", "strip", "unk_token",
}  # fmt: skip
"""Those of the measurements, and of the lines before them."""
_DTYPES = frozenset(name for name, each in vars(torch).items() if isinstance(each, torch.dtype))


def require_own_code(
    imports: Sequence[str], lines: Sequence[str], comments: Sequence[str], defined: Collection[str]
) -> None:
    """Raises AssertionError if a program has a statement, a name or an attribute that sftron does not write.

    Args:
        imports: The lines of imports.
        lines: All other lines but the definitions, which are the user's own classes and functions.
        comments: The comments at its head.
        defined: The names of the definitions.
    """
    _require(not ast.parse("\n".join(comments)).body, f"a comment is code: {comments}")
    tree, imported = ast.parse("\n".join(lines)), ast.parse("\n".join(imports))
    nodes = list(ast.walk(tree))
    bound = {"tokenizer", "model", *defined, *_BUILTINS}  # parts are also tried alone, with both given
    bound |= {each.asname or each.name for each in ast.walk(imported) if isinstance(each, ast.alias)}
    bound |= {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    bound |= {each.arg for each in nodes if isinstance(each, ast.arg)}
    bound |= {each.name for each in nodes if isinstance(each, ast.FunctionDef)}
    for node in nodes:
        is_known = isinstance(node, _NODES)
        is_known &= not isinstance(node, ast.Name) or node.id in bound
        is_known &= not isinstance(node, ast.Attribute) or node.attr in _ATTRIBUTES | _DTYPES
        _require(is_known, f"a program has {ast.unparse(node)!r}")
    for node in ast.walk(imported):
        _require(isinstance(node, _IMPORTS), f"the imports have {ast.unparse(node)!r}")


def _require(holds: bool, message: str) -> None:
    if not holds:  # not an `assert` statement, which `python -O` removes
        raise AssertionError(message)
