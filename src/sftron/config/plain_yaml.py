"""YAML with the plain values of YAML 1.2, in which 1e-5 is a number, and on, off, yes, no and dates are text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from sftron.config.schema import Config

_LONGEST_ALIASED = 1000


class Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  PyYAML's own protocol: a class attribute, not shared with the parent

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # Aliases of collections can expand a small file to gigabytes.
        mark = self.peek_event().start_mark if self.check_event(yaml.AliasEvent) else None
        node = super().compose_node(parent, index)
        if mark is not None and (not isinstance(node, yaml.ScalarNode) or len(node.value) > _LONGEST_ALIASED):
            problem = "only short single values can be aliased; write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return node


class Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes every text that YAML 1.1 or `Loader` would read as another type."""


PLAIN_VALUES: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "tag:yaml.org,2002:null": (r"(~|null|Null|NULL|)$", "~nN", lambda text: None),
    "tag:yaml.org,2002:bool": (r"(true|True|TRUE|false|False|FALSE)$", "tTfF", lambda text: text.lower() == "true"),
    "tag:yaml.org,2002:int": (r"[-+]?[0-9]+$", "-+0123456789", int),
    "tag:yaml.org,2002:float": (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$", "-+.0123456789", float),
    "tag:yaml.org,2002:str": (r"(?!)", "", str),
}
"""The plain values by tag: a pattern of the text, the characters that it can begin with, and its conversion."""

for _tag, (_pattern, _first, _) in PLAIN_VALUES.items():
    Loader.add_implicit_resolver(_tag, re.compile(_pattern), ["", *_first])
    Dumper.add_implicit_resolver(_tag, re.compile(_pattern), ["", *_first])


_ODD_SPACE = "[\u00a0\u1680\u2000-\u200b\u202f\u205f\u2060\u3000\ufeff]"
_AT_EDGE = re.compile(f"^-?{_ODD_SPACE}|{_ODD_SPACE}$|:{_ODD_SPACE}")
_VARIABLE = re.compile(r"\$\{\w*\}|(?:^|/)\$[A-Za-z_]\w*")
_FREE_TEXTS = {"prompt_template", "add_tokens", "allow_control_tokens", "columns", "targets"}
"""The keys whose texts may have any characters."""


def odd_space(text: str, *, anywhere: bool = False) -> str | None:
    """Returns the problem with a space that YAML takes for a letter, at an edge or after a colon; else None."""
    found = re.search(_ODD_SPACE, text) if anywhere else _AT_EDGE.search(text)
    if found is None:
        return None
    (code,) = (each for each in found[0] if each not in ":-")
    return f"a non-breaking or other special space (U+{ord(code):04X}); replace it with an ordinary space"


def variable_problem(text: str, path: Sequence[str | int] = ()) -> str | None:
    """Returns the problem with a value that names a shell variable; else None."""
    found = None if _FREE_TEXTS.intersection(path) else _VARIABLE.search(text)
    if found is None:
        return None
    name = found[0].lstrip("/")
    return f'{name} is not expanded here; write its value, or let the shell expand it in an override: --KEY="{name}"'


def first_odd_space(text: str) -> tuple[int, str] | None:
    """Returns the line and the problem of the first special space between the words of YAML, outside of quotes."""
    for number, line in enumerate(text.splitlines(), start=1):
        words = re.split("[\"'#]", line, maxsplit=1)[0].strip(" \t\r")
        if problem := odd_space(words):
            return number, problem
    return None


def syntax_problem(problem: str, lines: Sequence[str], column: int) -> str:
    """Returns PyYAML's problem with the word at `column` of the first line, and the remedy for common mistakes."""
    words = [word for word in re.finditer(r"[^\s:]+", lines[0]) if word[0].strip("-")] if lines else []
    if not words:
        return problem
    word = next((each for each in reversed(words) if each.start() <= column), words[0])
    if "mapping values" in problem and ":" in lines[0][:column]:
        problem += "; put quotes around a value with a colon and a space"
    elif "mapping values" in problem:
        problem = "YAML reads it as part of the value above; indent it like the keys beside it, each with a colon"
    elif "<block mapping start>" in problem:
        problem = "its indentation matches no key above; indent it like the keys beside it"
    elif variable := variable_problem(lines[0]):
        problem = variable
    elif "'\\t'" in problem:
        problem = "a tab; indent with spaces"
    shown = word[0] if len(word[0]) <= 60 else f"{word[0][:57]}..."
    return f"column {word.start() + 1}, {shown!r}: {problem}"


def dump_config(config: Config) -> str:
    """Returns the resolved configuration as YAML; `load_config` reads it back as an equal configuration."""
    # allow_unicode is not set, because PyYAML would then turn Unicode line ends (U+0085) into spaces.
    return yaml.dump(config.model_dump(mode="json"), Dumper=Dumper, sort_keys=False)
