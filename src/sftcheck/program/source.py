"""Source text of live objects: an expression for a value, and the imports and definitions that its names need."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib
import inspect
import io
import symtable
import sys
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from sftcheck.program.quoting import NoSourceError, called, literal

WIDTH = 120
OPENING, CLOSING = frozenset("([{"), frozenset(")]}")

_OURS = ("sftron", "sftcheck")


class Names:
    """The imports and definitions of names; a program holds only those it uses."""

    def __init__(self, imports: Mapping[str, str]) -> None:
        self.imports = dict(imports)
        self.definitions: dict[str, str] = {}
        self._defined: dict[int, str] = {}

    def expression(self, value: Any) -> str:
        """Returns an expression that makes an equal value. Raises NoSourceError."""
        return literal(value, self._of_object)

    def _of_object(self, value: Any) -> str:
        if isinstance(value, Enum):
            return self.expression(value.value)
        if isinstance(value, torch.dtype):
            self.imports["torch"] = "import torch"
            return str(value)
        if isinstance(value, PreTrainedTokenizerBase):
            return "tokenizer"
        if isinstance(value, nn.Module):
            return "model"
        if isinstance(value, (set, frozenset)):
            return self.expression(sorted(value, key=str))
        if isinstance(value, functools.partial):
            self.imports["partial"] = "from functools import partial"
            given = [self.expression(value.func), *map(self.expression, value.args)]
            return called("partial", given, self._expressions(value.keywords))
        if isinstance(value, type) or inspect.isroutine(value):
            return self.name_of(value)
        return self.call(value)

    def name_of(self, value: Any) -> str:
        """Returns the name of a class or function, with its import or its own source. Raises NoSourceError."""
        if inspect.ismethod(value):
            raise NoSourceError(f"{value.__qualname__} is a method of an object that a program does not have")
        if is_of_library(value):
            module = _public_module(value)
            self.imports[value.__name__] = f"from {module} import {value.__name__}"
            return value.__name__
        return self._define(value)

    def _expressions(self, given: Mapping[str, Any]) -> dict[str, str]:
        return {name: self.expression(value) for name, value in given.items()}

    def call(self, value: Any) -> str:
        """Returns a call of the value's class with what its attributes hold. Raises NoSourceError."""
        kind, missing = type(value), object()
        name, given = self.name_of(kind), {}
        for parameter in inspect.signature(kind).parameters.values():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            own = getattr(value, parameter.name, missing)
            if own is missing and parameter.default is parameter.empty:
                raise NoSourceError(f"{kind.__name__} does not keep its argument {parameter.name}")
            if own is not missing and not _is_same(own, parameter.default):
                given[parameter.name] = own
        return called(name, [], self._expressions(given))

    def _define(self, value: Any) -> str:
        """Adds the source of a class or function of the user's, and all that it needs; returns its name."""
        name = value.__name__
        if id(value) in self._defined:
            return self._defined[id(value)]
        if value.__module__.partition(".")[0] in _OURS:
            raise NoSourceError(f"{name} is sftron's own")
        tree = _parsed(value)
        name = "function" if isinstance(value, FunctionType) and name == "<lambda>" else name
        self._defined[id(value)] = name
        scope = _scope(value)
        for used in sorted(used_names(tree)):
            if used in scope and used != name:
                self._bind(used, scope[used])
        self.definitions[name] = "\n".join(folded(line) for line in ast.unparse(tree).split("\n") if line.strip())
        return name

    def _bind(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType):
            self.imports[name] = f"import {value.__name__}" + f" as {name}" * (value.__name__ != name)
        elif (found := self.expression(value)) in self.imports and found != name:
            self.imports[name] = f"{self.imports[found]} as {name}"
        elif found != name:
            self.definitions[name] = folded(f"{name} = {found}")


def is_of_library(value: Any) -> bool:
    """Returns whether a class or function is of an installed package other than sftron, or of Python itself."""
    top = value.__module__.partition(".")[0]
    module = sys.modules.get(value.__module__)
    path = getattr(module, "__file__", None)
    if top in _OURS or top == "__main__":
        return False
    # Packages may lie in other environments on sys.path than the interpreter's own.
    is_installed = path is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)
    return path is None or is_installed or path.startswith(sysconfig.get_paths()["stdlib"])


def _public_module(value: Any) -> str:
    """Returns the shortest module that has the class or function under its own name."""
    parts = value.__module__.split(".")
    for size in range(1, len(parts) + 1):
        module = ".".join(parts[:size])
        try:
            if getattr(importlib.import_module(module), value.__name__, None) is value:
                return module
        except ImportError:
            continue
    raise NoSourceError(f"{value.__qualname__} cannot be imported from {value.__module__}")


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (bool, int, float, str, tuple)) and a == b)


def _scope(value: Any) -> dict[str, Any]:
    """Returns what the names in a class or function stand for."""
    scope = dict(vars(sys.modules[value.__module__]))
    for function in [value] if isinstance(value, FunctionType) else vars(value).values():
        if isinstance(function, FunctionType):
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            scope |= {name: cell.cell_contents for name, cell in cells if name != "__class__"}
    return scope


def _bare(tree: ast.AST) -> ast.AST:
    """Removes docstrings and annotations, which a program does not need."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Name("object", ast.Load())  # the fields of a dataclass need one
    return tree


def _parsed(value: Any) -> ast.AST:
    """Returns the definition of a class or function, bare. Raises NoSourceError."""
    try:
        source = textwrap.dedent(inspect.getsource(value))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError) as error:
        raise NoSourceError(f"the source of {value.__qualname__} cannot be read") from error
    if isinstance(value, FunctionType) and value.__name__ == "<lambda>":
        lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
        if len(lambdas) != 1:
            raise NoSourceError("a lambda does not stand alone in its line, so its source cannot be told")
        tree = ast.Module([ast.Assign([ast.Name("function", ast.Store())], lambdas[0])], [])
    return ast.fix_missing_locations(_bare(tree))


def used_names(tree: ast.AST) -> set[str]:
    """Returns the names that are read from outside of functions, and are no builtins."""
    tables, names = [symtable.symtable(ast.unparse(tree), "<program>", "exec")], set[str]()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        is_top = table.get_name() == "top"
        names |= {
            each.get_name() for each in table.get_symbols() if each.is_referenced() and (is_top or each.is_global())
        }
    return names - set(dir(builtins))


def folded(line: str) -> str:
    """Breaks a line of code that is too long, after commas within brackets.

    A string is not broken.
    """
    if len(line) <= WIDTH or line.lstrip().startswith("#"):
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    breaks, depth = [0], 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(line.strip()).readline):
            depth += (token.string in OPENING) - (token.string in CLOSING) if token.type == tokenize.OP else 0
            if depth and token.type == tokenize.OP and token.string in {",", *OPENING}:
                breaks.append(token.end[1] + len(indent) - 4)
    except tokenize.TokenError:  # a part of a longer string
        return line
    lines = [""]
    for begin, end in pairwise([*breaks, len(line)]):
        if len(lines[-1]) + len(line[begin:end].rstrip()) > WIDTH and lines[-1].strip():
            lines.append(indent)
        lines[-1] += line[begin:end].lstrip() if lines[-1] == indent else line[begin:end]
    return "\n".join(each.rstrip() for each in lines)


def needed(names: Names, body: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the import lines and the definitions that the body needs, each in the order in which it may stand."""
    wanted, texts = set[str](), ["\n".join(body)]
    while texts:
        new = used_names(ast.parse(texts.pop())) - wanted
        wanted |= new
        texts += [names.definitions[name] for name in new if name in names.definitions]
    grouped: dict[str, list[str]] = {}
    for line in sorted({names.imports[name] for name in wanted if name in names.imports}):
        module, _, name = line.removeprefix("from ").rpartition("import ")
        grouped.setdefault(module.strip(), []).append(name)
    lines = []
    for module, given in sorted(grouped.items()):
        line = f"from {module} import {', '.join(given)}" if module else f"import {', '.join(given)}"
        lines.append(line if len(line) <= WIDTH or not module else f"from {module} import ({', '.join(given)})")
    return lines, {name: text for name, text in names.definitions.items() if name in wanted}


def dataclass_changes(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that are not their defaults."""
    found = {}
    for each in dataclasses.fields(value):
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        if each.init and getattr(value, each.name) != default:
            found[each.name] = getattr(value, each.name)
    return found
