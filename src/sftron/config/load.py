"""Loads a Config from a YAML file and command-line overrides, and reports all problems together, with file and line."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from sftron.config.contradictions import UnusableError, contradictions
from sftron.config.errors import redacted
from sftron.config.help import (
    KeyPath,
    default_of,
    describe_value,
    dotted,
    is_section,
    keys_of,
    locate,
    section_in,
    suggest_key,
    words_of,
)
from sftron.config.other_trainers import SENTENCES
from sftron.config.schema import Config, Section
from sftron.regular_file import read_regular


class ConfigError(ValueError):
    """All problems of a configuration, one line per problem."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(map(redacted, problems))
        super().__init__("\n".join(self.problems))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, applies overrides (`--section.key=value`), and validates the result.

    Raises ConfigError with one line for each problem: `configs/x.yaml:12: optimizer.learning_rat: unknown key; did
    you mean learning_rate?`.
    """
    draft = _Draft(Path(path))
    draft.read_file()
    if draft.problems and not draft.tree:
        raise ConfigError(draft.problems)
    for number, argument in enumerate(overrides, start=1):
        draft.override(number, argument)
    _open_sections(Config, draft.tree)
    draft.fill_in_run_name()
    try:
        config = Config.model_validate(draft.tree)
    except ValidationError as error:
        draft.report_invalid(error)
        raise ConfigError(draft.problems) from None
    if draft.problems:
        raise ConfigError(draft.problems)
    return config


def dump_config(config: Config) -> str:
    """Returns the resolved configuration as YAML; `load_config` reads it back as an equal configuration."""
    # allow_unicode is not set, because PyYAML would then turn Unicode line ends (U+0085) into spaces.
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


_MAX_FILE_BYTES = 256 * 2**10
"""The largest accepted file, ten times the size of a long configuration; PyYAML reads 60 KB/s."""
_LONGEST_ALIASED = 1000


class _Loader(yaml.SafeLoader):
    """A YAML loader with the plain values of YAML 1.2: 1e-5 is a number, and on, off, yes, no and dates are text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  PyYAML's own protocol: a class attribute, not shared with the parent

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # Aliases of collections can expand a small file to gigabytes.
        mark = self.peek_event().start_mark if self.check_event(yaml.AliasEvent) else None
        node = super().compose_node(parent, index)
        if mark is not None and (not isinstance(node, yaml.ScalarNode) or len(node.value) > _LONGEST_ALIASED):
            raise yaml.MarkedYAMLError(
                problem="only short single values can be aliased: write it out", problem_mark=mark
            )
        return node


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes every text that YAML 1.1 or `_Loader` would read as another type."""


_PLAIN_VALUES: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "tag:yaml.org,2002:null": (r"(~|null|Null|NULL|)$", "~nN", lambda text: None),
    "tag:yaml.org,2002:bool": (r"(true|True|TRUE|false|False|FALSE)$", "tTfF", lambda text: text.lower() == "true"),
    "tag:yaml.org,2002:int": (r"[-+]?[0-9]+$", "-+0123456789", int),
    "tag:yaml.org,2002:float": (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$", "-+.0123456789", float),
    "tag:yaml.org,2002:str": (r"(?!)", "", str),
}
"""The plain values by tag: a pattern of the text, the characters that it can begin with, and its conversion."""

for _tag, (_pattern, _first, _) in _PLAIN_VALUES.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), ["", *_first])
    _Dumper.add_implicit_resolver(_tag, re.compile(_pattern), ["", *_first])


@dataclass(frozen=True, order=True)
class _Origin:
    """The origin of a value. Origins are ordered as problems are reported: the file by line, then overrides."""

    override: int
    line: int
    words: str


class _Draft:
    """The given values before validation, each with its origin, and the problems found so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree: dict[str, Any] = {}
        self._origins: dict[KeyPath, _Origin] = {(): _Origin(0, 0, str(path))}
        self._problems: list[tuple[_Origin, str]] = []

    @property
    def problems(self) -> list[str]:
        return [f"{origin.words}: {problem}" for origin, problem in sorted(self._problems)]

    def report(self, path: KeyPath, problem: str, causes: Sequence[KeyPath] = ()) -> None:
        """Records a problem with the value at `path`.

        If an override has set one of the `causes`, or a key inside one, the problem is reported at the override,
        because the file alone may be correct.
        """
        overrides = [
            origin
            for known, origin in self._origins.items()
            if origin.override and any(known[: len(cause)] == cause for cause in causes)
        ]
        origin = min(overrides, default=self._origin_of(path))
        self._problems.append((origin, f"{dotted(path)}: {problem}" if path else problem))

    def _origin_of(self, path: KeyPath) -> _Origin:
        """Returns the origin of a value, else of the first value inside it, else of the section where it is missing."""
        if path not in self._origins:
            inside = [origin for known, origin in self._origins.items() if path and known[: len(path)] == path]
            if inside:
                return min(inside)
        return next(self._origins[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self._origins)

    def read_file(self) -> None:
        try:
            text = read_regular(self.path, _MAX_FILE_BYTES).decode("utf-8-sig")
        except OSError as error:
            return self.report((), f"cannot be read: {error.strerror}")
        except UnicodeDecodeError as error:
            return self.report((), f"byte {error.start} is not UTF-8; save the file as UTF-8")
        except ValueError as error:
            return self.report((), str(error))
        tree = self._parse(text, (), lambda line: _Origin(0, line, f"{self.path}:{line}"))
        if isinstance(tree, dict):
            self.tree = tree
        elif not self._problems:
            found = "is empty" if tree is None else f"found {describe_value(tree)}"
            self.report((), f"{found}; wanted {words_of(Config)}")
        return None

    def override(self, number: int, argument: str) -> None:
        """Applies `--section.key=value`; list items are given by index, as in `--data.datasets.0.path=x`."""
        origin = _Origin(number, 0, f"override {argument}")
        match = re.fullmatch(r"--([^=\s]+)=(.*)", argument, re.DOTALL)
        if match is None:
            self._problems.append((origin, "wanted --section.key=value"))
            return
        *sections, key = match[1].split(".")
        holder: Any = self.tree
        path: KeyPath = ()
        for part in sections:
            step = self._step(holder, part, path, origin)
            if step is None:
                return
            path = (*path, step)
            if isinstance(holder, dict) and holder.get(step) is None:
                holder[step] = {}
            holder = holder[step]
        last = self._step(holder, key, path, origin)
        if last is None:
            return
        path = (*path, last)
        if path in self._origins and self._origins[path].override:
            self._problems.append((origin, f"{dotted(path)}: given twice; keep one"))
        self._origins = {known: at for known, at in self._origins.items() if known[: len(path)] != path}
        self._origins[path] = origin
        num_problems = len(self._problems)
        value = self._parse(match[2], path, lambda line: origin)
        if len(self._problems) == num_problems:
            holder[last] = value

    def _step(self, holder: Any, part: str, path: KeyPath, origin: _Origin) -> str | int | None:
        """Returns `part` as a key or an index of `holder`, which is the value at `path`.

        If it is neither, a problem is recorded and the result is None.
        """
        if isinstance(holder, dict):
            return part
        if isinstance(holder, list) and part.isdecimal() and int(part) < len(holder):
            return int(part)
        if isinstance(holder, list):
            problem = f"no item {part}; wanted an index below {len(holder)}"
        else:
            problem = f"is {describe_value(holder)}, which holds no keys"
        self._problems.append((origin, f"{dotted(path)}: {problem}"))
        return None

    def _parse(self, text: str, path: KeyPath, origin_at: Callable[[int], _Origin]) -> Any:
        try:
            node = _Loader(text).get_single_node()
            return None if node is None else self._build(node, path, origin_at)
        except yaml.MarkedYAMLError as error:
            origin = origin_at(error.problem_mark.line + 1 if error.problem_mark else 1)
            self._problems.append((origin, f"is not YAML: {error.problem}"))
        except yaml.reader.ReaderError as error:
            origin = origin_at(text.count("\n", 0, error.position) + 1)
            self._problems.append((origin, f"is not YAML: the character {error.character!r} is not allowed"))
        except RecursionError:
            self._problems.append((origin_at(1), "is nested too deeply"))
        return None

    def _build(self, node: yaml.Node, path: KeyPath, origin_at: Callable[[int], _Origin]) -> Any:
        """Returns the node as plain Python values, and records their lines and duplicate keys.

        PyYAML's own constructor keeps no lines and silently takes the last of duplicate keys.
        """
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            mapping: dict[str, Any] = {}
            lines: dict[str, int] = {}
            for key_node, value_node in node.value:
                line, key = key_node.start_mark.line + 1, str(key_node.value)
                if key in mapping:
                    problem = f"{dotted((*path, key))}: given twice, first on line {lines[key]}; keep one"
                    self._problems.append((origin_at(line), problem))
                    continue
                lines[key] = line
                self._origins[(*path, key)] = origin_at(line)
                mapping[key] = self._build(value_node, (*path, key), origin_at)
            return mapping
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            for index, item in enumerate(node.value):
                self._origins[(*path, index)] = origin_at(item.start_mark.line + 1)
            return [self._build(item, (*path, index), origin_at) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag in _PLAIN_VALUES:
            if redacted(node.value) != node.value:
                problem = f"{dotted(path)}: holds a password or a token, which would be written to logs"
                remedy = "leave it out; the environment has it (HF_TOKEN, WANDB_API_KEY)"
                self._problems.append((origin_at(node.start_mark.line + 1), f"{problem}; {remedy}"))
            try:
                return _PLAIN_VALUES[node.tag][2](node.value)
            except ValueError:
                pass
        raise yaml.MarkedYAMLError(problem=f"{node.tag} is not read here", problem_mark=node.start_mark)

    def fill_in_run_name(self) -> None:
        general = self.tree.get("general")
        name = general.get("run_name") if isinstance(general, dict) else None
        if isinstance(general, dict) and isinstance(name, str):
            try:
                general["run_name"] = fill_in(name, self._value_at)
            except ValueError as error:
                self.report(("general", "run_name"), str(error))
                general["run_name"] = "unusable"  # otherwise its braces would be reported again

    def report_invalid(self, error: ValidationError) -> None:
        """Reports pydantic's errors by key, and the contradictions between valid values."""
        invalid: set[KeyPath] = set()
        for detail in error.errors(include_url=False):
            if detail["type"] == "contradictions":
                continue
            path, field = locate(detail["loc"])
            # Pydantic reports each branch of a union, and reports a list as too short if its items are invalid.
            if any(known[: len(path)] == path for known in invalid):
                continue
            invalid.add(path)
            if detail["type"] == "missing" and path == detail["loc"]:
                self.report(path, f"missing; wanted {_wanted(field)}")
            else:
                self.report(path, _problem(path, field, detail["type"], detail["msg"], self._value_at(path)))

        def value_of(key: str) -> Any:
            path = tuple(key.split("."))
            if any(path[:n] in invalid for n in range(len(path) + 1)):
                raise UnusableError
            return self._value_at(path)

        for keys, problem in contradictions(value_of):
            causes = [tuple(key.split(".")) for key in keys]
            self.report(causes[0], problem, causes)

    def _value_at(self, path: KeyPath) -> Any:
        """Returns the given value, or the default if there is none."""
        value: Any = self.tree
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return default_of(path)
        return value


_HOLE = re.compile(r"\{([^{}]*)\}")


def fill_in(name: str, value_at: Callable[[KeyPath], Any]) -> str:
    """Replaces each `{section.key}` in a run name by its value: `lr_{optimizer.learning_rate}` becomes `lr_0.0004`.

    Characters in values that are not allowed in a folder name become `-`. Raises ValueError if a key does not exist or
    has no single value.
    """

    def value_of(hole: re.Match[str]) -> str:
        key = hole[1]
        path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
        if key == "general.run_name":
            raise ValueError("holds itself; name other keys in the braces")
        if locate(path)[1] is None:
            raise ValueError(f"{{{key}}} is no key; {suggest_key(path)}")
        value = value_at(path)
        if isinstance(value, (dict, list, tuple)):
            found = describe_value(value)
            raise ValueError(f"{{{key}}} is {found}, which cannot be part of a name; take one of its keys")
        return re.sub(r"[^A-Za-z0-9_.-]", "-", value if isinstance(value, str) else json.dumps(value))

    return _HOLE.sub(value_of, name)


def _problem(path: KeyPath, field: FieldInfo | None, kind: str, message: str, value: Any) -> str:
    if kind == "extra_forbidden":
        return f"unknown key; {suggest_key(path)}"
    if kind == "refused":
        return message
    section = None if field is None else section_in(field.annotation)
    words = words_of(section) if kind == "model_type" and section is not None else _wanted(field)
    remedy = "" if field is None else _quoting_remedy(field, value)
    if kind == "model_type" and str(path[-1]) in SENTENCES:
        remedy = f"; {SENTENCES[str(path[-1])]}"
    return f"found {describe_value(value)}; wanted {words}{remedy}"


def _wanted(field: FieldInfo | None) -> str:
    return words_of(Config if field is None else field.rebuild_annotation())


def _quoting_remedy(field: FieldInfo, value: Any) -> str:
    """Returns advice to add or remove quotes if that alone would make the value valid; else an empty string."""
    if isinstance(value, str):
        other, remedy = _plain_value(value), "; remove the quotes"
    elif type(value) in (int, float):
        other, remedy = str(value), "; put it in quotes"
    else:
        return ""
    if section_in(field.annotation) is not None:
        return ""
    try:
        TypeAdapter(field.rebuild_annotation(), config=Section.model_config).validate_python(other)
    except ValidationError:
        return ""
    return remedy


def _plain_value(text: str) -> Any:
    """Returns the value that the text would have in YAML without quotes."""
    for pattern, _, construct in _PLAIN_VALUES.values():
        if re.match(pattern, text):
            with contextlib.suppress(ValueError):  # more digits than Python converts
                return construct(text)
    return text


def _open_sections(section: type[Section], tree: dict[str, Any]) -> None:
    """Adds the sections that are absent, or null because all their keys are commented out."""
    for name, field in keys_of(section).items():
        inner = field.annotation
        if is_section(inner):
            if tree.get(name) is None:
                tree[name] = {}
            if isinstance(tree[name], dict):
                _open_sections(inner, tree[name])


def split_arguments(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Splits the arguments of run_train.py into the path of the configuration and the overrides.

    Raises ConfigError unless exactly one file is given.
    """
    paths, overrides, rest = [], [], iter(arguments)
    for argument in rest:
        if argument == "--config":
            paths.append(next(rest, ""))
        elif argument.startswith("--config="):
            paths.append(argument.removeprefix("--config="))
        else:
            overrides.append(argument)
    if len(paths) != 1 or not paths[0]:
        found = len(paths) if all(paths) else "--config without a file"
        raise ConfigError([f"one --config FILE is needed, found {found}: --config FILE [--section.key=value ...]"])
    return paths[0], overrides
