"""Loads a Config from a YAML file and command-line overrides, and reports all problems together, with file and line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from sftron.config.help import (
    KeyPath,
    describe_value,
    dotted,
    is_optional_section,
    is_section,
    keys_of,
    locate,
    section_in,
    section_of,
    suggest_key,
    words_of,
)
from sftron.config.plain_yaml import PLAIN_VALUES, Loader, first_odd_space, odd_space, syntax_problem, variable_problem
from sftron.config.replacements import OTHER_TRAINERS, REMOVED, VALUES_OF_OTHERS
from sftron.config.schema import Config
from sftron.config.values import Section
from sftron.errors import redacted
from sftron.regular_file import expand_home, read_regular, where_missing

_MAX_FILE_BYTES = 256 * 2**10
"""The largest accepted file, ten times the size of a long configuration; PyYAML reads 60 KB/s."""


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
    draft = _Draft(Path(expand_home(str(path))), overrides)
    draft.read_file()
    if draft.problems and not draft.tree:
        raise ConfigError(draft.problems)
    return draft.validate()


def with_overrides(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the keys and values of a configuration with overrides applied. Raises ConfigError as `load_config`."""
    draft = _Draft(Path("the configuration"), overrides)
    draft.tree = deepcopy(dict(tree))
    draft.validate()
    return draft.given


# --- Values with their origins ---

_Origin = tuple[int, int]
"""The number of the override, or 0 for the file, and the line in the file. Problems are reported in this order."""

_STEPS, _EPOCHS = ("tokens", "train_steps"), ("tokens", "train_epochs")
_INSTEAD_OF: dict[KeyPath, KeyPath] = {_STEPS: _EPOCHS, _EPOCHS: _STEPS}
"""The key of the file that an override of a key replaces, because a run has only one of the two."""


class _Draft:
    """The given values before validation, each with its origin, and the problems found so far."""

    def __init__(self, path: Path, overrides: Sequence[str]) -> None:
        self.tree: dict[str, Any] = {}
        self.given: dict[str, Any] = {}
        """The keys that the file and the overrides give, without defaults."""
        self._path, self._overrides = path, overrides
        self._origins: dict[KeyPath, _Origin] = {(): (0, 0)}
        self._problems: list[tuple[_Origin, str]] = []
        self._explained = set[KeyPath]()
        """The values with a reported problem; no further problems are reported for them."""

    @property
    def problems(self) -> list[str]:
        return [f"{self._words(origin)}: {problem}" for origin, problem in sorted(self._problems)]

    def _words(self, origin: _Origin) -> str:
        override, line = origin
        if override:
            return f"override {self._overrides[override - 1]}"
        return f"{self._path}:{line}" if line else str(self._path)

    def validate(self) -> Config:
        """Applies the overrides, keeps the tree as `given`, and validates it. Raises ConfigError."""
        for number in range(1, 1 + len(self._overrides)):
            self.override(number)
        self.given = deepcopy(self.tree)
        _open_sections(Config, self.tree)
        self.fill_in_run_name()
        config = None
        try:
            config = Config.model_validate(self.tree)
        except ValidationError as error:
            self.report_invalid(error)
        if config is None or self.problems:
            raise ConfigError(self.problems)
        return config

    def _add(self, origin: _Origin, path: KeyPath, problem: str) -> None:
        self._problems.append((origin, f"{dotted(path)}: {problem}" if path else problem))

    def report(self, path: KeyPath, problem: str, causes: Sequence[KeyPath] = ()) -> None:
        """Records a problem with the value at `path`.

        If an override has set one of the `causes`, or a key inside one, the problem is reported at the override,
        because the file alone may be correct.
        """
        if path in self._explained:
            return
        overrides = [
            origin
            for known, origin in self._origins.items()
            if origin[0] and any(known[: len(cause)] == cause for cause in causes)
        ]
        self._add(min(overrides, default=self._origin_of(path)), path, problem)

    def _origin_of(self, path: KeyPath) -> _Origin:
        """Returns the origin of a value, else of the first value inside it, else of the section where it is missing."""
        if path not in self._origins:
            inside = [origin for known, origin in self._origins.items() if path and known[: len(path)] == path]
            if inside:
                return min(inside)
        return next(self._origins[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self._origins)

    def read_file(self) -> None:
        try:
            text = read_regular(self._path, _MAX_FILE_BYTES).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            return self.report((), f"byte {error.start} is not UTF-8; save the file as UTF-8")
        except OSError as error:
            where = where_missing(self._path) if isinstance(error, FileNotFoundError) else ""
            return self.report((), f"cannot be read: {error.strerror}{where}")
        except ValueError as error:
            return self.report((), str(error))
        tree = self._parse(text, ())
        if isinstance(tree, dict):
            self.tree = tree
        elif not self._problems:
            found = "is empty" if tree is None else f"found {describe_value(tree)}"
            self.report((), f"{found}; wanted {words_of(Config)}")
        return None

    def override(self, number: int) -> None:
        """Applies `--section.key=value`; list items are given by index, as in `--data.datasets.0.path=x`.

        An override of train_steps removes the file's train_epochs, and vice versa.
        """
        origin = (number, 0)
        match = re.fullmatch(r"--([^=\s]+)=(.*)", self._overrides[number - 1], re.DOTALL)
        if match is None:
            return self._add(origin, (), "wanted --section.key=value")
        path: KeyPath = ()
        holder: Any = self.tree
        value: Any = self.tree
        key: Any = None
        for part in match[1].split("."):
            if path and value is None and isinstance(holder, dict):
                value = holder[key] = {}
            holder, key = value, part
            if isinstance(holder, list) and part.isdecimal() and int(part) < len(holder):
                key = int(part)
                value = holder[key]
            elif isinstance(holder, dict):
                value = holder.get(key)
            elif isinstance(holder, list):
                return self._add(origin, path, f"no item {part}; wanted an index below {len(holder)}")
            else:
                return self._add(origin, path, f"is {describe_value(holder)}, which has no keys")
            path = (*path, key)
        if self._origins.get(path, (0, 0))[0]:
            self._add(origin, path, "given twice; keep one")
        self._origins = {known: at for known, at in self._origins.items() if known[: len(path)] != path}
        self._origins[path] = origin
        num_problems = len(self._problems)
        value = self._parse(match[2], path, number)
        if len(self._problems) == num_problems:
            other = _INSTEAD_OF.get(path, ())
            is_override = self._origins.get(other, (0, 0))[0] > 0
            if other and not is_override and isinstance(holder, dict) and value is not None and holder.get(key) is None:
                holder.pop(other[-1], None)
            holder[key] = value
        return None

    def _parse(self, text: str, path: KeyPath, override: int = 0) -> Any:
        try:
            node = Loader(text).get_single_node()
            return None if node is None else self._build(node, path, override)
        except yaml.MarkedYAMLError as error:
            line, problem = (error.problem_mark.line + 1 if error.problem_mark else 1), error.problem
            if not override and (odd := first_odd_space(text)):
                line, problem = odd
            elif error.problem_mark and not override:
                problem = syntax_problem(str(problem), text.splitlines()[line - 1 :], error.problem_mark.column)
        except yaml.reader.ReaderError as error:
            line, problem = text.count("\n", 0, error.position) + 1, f"the character {error.character!r} is not allowed"
        except RecursionError:
            line, problem = 1, "it is nested too deeply"
        self._add((override, 0 if override else line), (), f"is not YAML: {problem}")
        return None

    def _build(self, node: yaml.Node, path: KeyPath, override: int) -> Any:
        """Returns the node as plain Python values, and records their lines and duplicate keys.

        PyYAML's own constructor keeps no lines and silently takes the last of duplicate keys.
        """

        def origin_of(node: yaml.Node) -> _Origin:
            return (override, 0 if override else node.start_mark.line + 1)

        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            mapping: dict[str, Any] = {}
            lines: dict[str, int] = {}
            for key_node, value_node in node.value:
                key = str(key_node.value)
                if problem := odd_space(key, anywhere=True):
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
                if key in mapping:
                    problem = f"given twice, first on line {lines[key]}; keep one"
                    self._add(origin_of(key_node), (*path, key), problem)
                    continue
                lines[key] = key_node.start_mark.line + 1
                self._origins[(*path, key)] = origin_of(key_node)
                mapping[key] = self._build(value_node, (*path, key), override)
                if value_node.value == "" and mapping[key] is None and is_optional_section((*path, key)):
                    problem = "is empty; write {} for its defaults, or null to leave the section out"
                    self._add(origin_of(key_node), (*path, key), problem)
            return mapping
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            self._origins.update({(*path, index): origin_of(item) for index, item in enumerate(node.value)})
            return [self._build(item, (*path, index), override) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag in PLAIN_VALUES:
            if redacted(node.value) != node.value:
                problem = "holds a password or a token, which would be written to logs; leave it out, and set it in "
                self._add(origin_of(node), path, f"{problem}the environment (HF_TOKEN, WANDB_API_KEY)")
            if problem := variable_problem(node.value, path):
                self._add(origin_of(node), path, problem)
                self._explained.add(path)
            if node.style is None and (problem := odd_space(node.value)):
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
            try:
                return PLAIN_VALUES[node.tag][2](node.value)
            except ValueError:
                pass
        raise yaml.MarkedYAMLError(problem=f"{node.tag} is not supported", problem_mark=node.start_mark)

    def fill_in_run_name(self) -> None:
        """Replaces each `{section.key}` in the run name by its value: `lr_{optimizer.learning_rate}` -> `lr_0.0004`.

        Characters in values that are not allowed in a folder name become `-`.
        """
        general = self.tree.get("general")
        if not isinstance(general, dict) or not isinstance(general.get("run_name"), str):
            return
        try:
            general["run_name"] = re.sub(r"\{([^{}]*)\}", lambda hole: self._fill_in(hole[1]), general["run_name"])
        except ValueError as error:
            self.report(("general", "run_name"), str(error))
            general["run_name"] = "unusable"  # otherwise its braces would be reported again

    def _fill_in(self, key: str) -> str:
        path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
        if key == "general.run_name":
            raise ValueError("refers to itself; name another key in the braces")
        if locate(path)[1] is None:
            raise ValueError(f"{{{key}}} is not a key; {suggest_key(path)}")
        value = self._value_at(path)
        if isinstance(value, (dict, list, tuple)):
            found = describe_value(value)
            raise ValueError(f"{{{key}}} is {found}, which cannot be part of a name; name one of its keys")
        return re.sub(r"[^A-Za-z0-9_.-]", "-", value if isinstance(value, str) else json.dumps(value))

    def report_invalid(self, error: ValidationError) -> None:
        """Reports pydantic's errors by key, and contradictions between valid sections."""
        invalid: set[KeyPath] = set()
        for detail in error.errors(include_url=False):
            if detail["type"] == "contradictions":
                for keys, problem in detail.get("ctx", {}).get("found", ()):
                    causes = [tuple(key.split(".")) for key in keys.split()]
                    self.report(causes[0], problem, causes)
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

    def _value_at(self, path: Sequence[str | int]) -> Any:
        """Returns the given value, or the default if there is none."""
        value: Any = self.tree
        for part in path:
            if value is None:  # an optional section that is absent
                return None
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                _, field = locate(tuple(path))
                return None if field is None or field.is_required() else field.default
        return value


# --- Problems in words ---


def _problem(path: KeyPath, field: FieldInfo | None, kind: str, message: str, value: Any) -> str:
    if kind == "extra_forbidden":
        return f"unknown key; {suggest_key(path)}"
    if kind == "refused":
        return message
    if isinstance(value, str) and (replacement := REMOVED.get(f"{dotted(path)}={value}")):
        return f"{value} was removed: {replacement}"
    section = None if field is None else section_in(field.annotation)
    if kind == "model_type" and field is not None and section is not None:
        remedy = OTHER_TRAINERS.get(str(path[-1]), "")
        wanted = words_of(field.annotation if section_of(field.annotation) is section else section)
        return f"found {describe_value(value)}; wanted {wanted}" + (remedy and f"; {remedy}")
    named = dotted([part for part in path if isinstance(part, str)])
    remedy = f"; {advice}" if (advice := VALUES_OF_OTHERS.get(f"{named}={value}")) else _as_list(field, value)
    return f"found {describe_value(value)}; wanted {_wanted(field)}{remedy}"


def _as_list(field: FieldInfo | None, value: Any) -> str:
    """Returns the remedy for a single item where a list is wanted, else ""."""
    if field is None or get_origin(field.annotation) is not tuple:
        return ""
    section, first = section_in(field.annotation), next(iter(value), "") if isinstance(value, dict) else ""
    if section is not None and first.lstrip("-") in keys_of(section):
        return f'; write a dash and a space before the first key of each item, as "- {first.lstrip("-")}: ..."'
    return f"; write [{value}]" if section is None and isinstance(value, str) else ""


def _wanted(field: FieldInfo | None) -> str:
    return words_of(Config if field is None else field.rebuild_annotation())


def _open_sections(section: type[Section], tree: dict[str, Any]) -> None:
    """Adds missing sections, including ones that are null because all their keys are commented out; optional ones as
    null."""
    for name, field in keys_of(section).items():
        if inner := section_of(field.annotation):
            if tree.get(name) is None:
                tree[name] = {} if is_section(field.annotation) else None
            if isinstance(tree[name], dict):
                _open_sections(inner, tree[name])


def split_arguments(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the path of the configuration and the overrides; raises ConfigError unless exactly one file is given."""
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
        raise ConfigError([f"give exactly one --config FILE, not {found}: --config FILE [--section.key=value ...]"])
    return paths[0], overrides
