"""Descriptions of the schema, for `--help` and for error messages."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from sftron.config.replacements import OTHER_TRAINERS, REMOVED
from sftron.config.schema import Config
from sftron.config.values import Section, Wanted

_WIDTH = 118

KeyPath = tuple[str | int, ...]
"""`("data", "datasets", 0, "path")` is data.datasets.0.path."""


def describe_config(section: str | None = None) -> str:
    """Returns the keys of a section, or of all, with their types, defaults and descriptions, for `--help`.

    Raises ValueError if there is no such section; the message names the nearest.
    """
    if section is not None and section not in keys_of(Config):
        near = get_close_matches(section, keys_of(Config), 1)
        meant = f"; did you mean {near[0]}?" if near else f"; choose from {', '.join(keys_of(Config))}"
        raise ValueError(f"--help: unknown section {section!r}{meant}")
    return "\n".join(_describe_section(Config, "", {}, section)).strip() + "\n"


def dotted_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    """Yields every key that `--section.key=value` can set, but for those of lists."""
    for name, field in keys_of(section).items():
        inner = section_of(field.annotation)
        if inner is not None:
            yield from dotted_keys(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


def _describe_section(
    section: type[Section], place: str, lists: dict[str, tuple[str, list[str]]], only: str | None = None
) -> Iterator[str]:
    """Yields the lines of the section at `place`. `lists` has the keys of the items of each list so far."""
    indent = "  " * place.count(".")
    for name, field in keys_of(section).items():
        if only not in (None, name):
            continue
        inner = section_in(field.annotation)
        if inner is not None and section_of(field.annotation) is inner:
            text = " ".join(f"{name}: {field.description or inner.__doc__}".split())
            yield ""
            yield from textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
            yield from _describe_section(inner, f"{place}{name}.", lists)
            continue
        yield from _describe_key(name, field, indent)
        if inner is not None:
            yield from _describe_items(inner, f"{place}{name}", indent + "    ", lists)


def _describe_key(name: str, field: FieldInfo, indent: str) -> Iterator[str]:
    default = "required" if field.is_required() else f"default {_plain(field.default)}"
    margin = indent + "      "
    heading = f"{name} ({default}): {words_of(field.rebuild_annotation())}"
    yield from textwrap.wrap(heading, _WIDTH, initial_indent=indent, subsequent_indent=margin)
    yield from textwrap.wrap(field.description or "", _WIDTH, initial_indent=margin, subsequent_indent=margin)


def _describe_items(
    section: type[Section], place: str, indent: str, lists: dict[str, tuple[str, list[str]]]
) -> Iterator[str]:
    """Yields the keys of a list's items; keys that an earlier list has in the same words are named in one line."""
    repeated = dict[str, list[str]]()
    for name, field in keys_of(section).items():
        lines = list(_describe_key(name, field, indent))
        earlier, known = lists.get(name, ("", []))
        if known == lines:
            repeated.setdefault(earlier, []).append(name)
        else:
            lists[name] = (place, lines)
            yield from lines
    for earlier, names in repeated.items():
        text = f"{', '.join(names)}: as in {earlier}"
        yield from textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "      ")


# --- The schema by key ---


def keys_of(section: type[Section]) -> dict[str, FieldInfo]:
    """Returns the fields by their keys in a file; a key that is a Python keyword (`async`) is a field alias."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def is_section(annotation: Any) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def section_of(annotation: Any) -> type[Section] | None:
    """Returns the section class of a section or an optional section (`Lora | None`); None for other annotations."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next(filter(is_section, options), None)


def section_in(annotation: Any) -> type[Section] | None:
    """Returns the section class of an annotation, or of the items if it is a list; None if there is none."""
    return section_of(get_args(annotation)[0] if get_origin(annotation) is tuple else annotation)


def locate(location: tuple[int | str, ...]) -> tuple[KeyPath, FieldInfo | None]:
    """Returns the key path and the field of a pydantic error location.

    The location may continue after the key with a branch of a union or an index in a list; these are dropped.
    """
    path: KeyPath = ()
    section: type[Section] | None = Config
    field: FieldInfo | None = None
    for part in location:
        if section is None:
            break
        path = (*path, part)
        if isinstance(part, str):
            field = keys_of(section).get(part)
            section = None if field is None else section_in(field.annotation)
    return path, field


# --- Values and types in words ---


def words_of(annotation: Any) -> str:
    """Describes a type in words that complete the sentence "wanted ..."."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        outermost = next((mark.words for mark in reversed(metadata) if isinstance(mark, Wanted)), None)
        return outermost or words_of(inner)
    if get_origin(annotation) is Literal:
        *others, last = get_args(annotation)
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(words_of(option) for option in get_args(annotation))
    if is_section(annotation):
        return f"a mapping with the keys {', '.join(keys_of(annotation))}"
    return {bool: "true or false", NoneType: "null"}[annotation]


def dotted(path: Sequence[str | int]) -> str:
    return ".".join(map(str, path))


def _plain(value: Any) -> str:
    """Returns a value as a user would type it, shortened to 60 characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return textwrap.shorten(text.encode("utf-8", "backslashreplace").decode(), 60) or '""'


def describe_value(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "", int: " (a whole number)", float: " (a number)", str: " (text)", list: " (a list)"}
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
    return (text if len(text) <= 60 else text[:57] + "...") + kinds.get(type(value), " (a mapping)")


# --- Unknown keys ---


def suggest_key(path: KeyPath) -> str:
    """Returns advice for an unknown key, or the keys of its section if there is none.

    Advice is a key with a similar spelling, a key with this name in another section, or the replacement for a key of
    another trainer. A key of another section must have a name of several words: one word, such as `name` or `path`,
    means something else in each section.
    """
    name = str(path[-1])
    parent = locate(path[:-1])[1]
    section = Config if parent is None else section_in(parent.annotation)
    here = [] if section is None else list(keys_of(section))
    everywhere = list(_all_keys(Config))
    if name in everywhere:
        return f"write {name} nested: a line for each section and one for the key"
    qualified = dotted([part for part in path if isinstance(part, str)][-2:])
    if dotted(path) in REMOVED:
        return f"it was removed: {REMOVED[dotted(path)]}"
    if replacement := OTHER_TRAINERS.get(qualified, OTHER_TRAINERS.get(name)):
        return replacement
    nearest = get_close_matches(name, here, cutoff=0.8)  # "slpit" of "split"
    if not nearest:
        of_several_words = {key: key.rsplit(".", 1)[-1] for key in everywhere if "_" in key.rsplit(".", 1)[-1]}
        nearest = [key for key, last in of_several_words.items() if get_close_matches(name, [last], cutoff=0.85)]
    return f"did you mean {' or '.join(nearest)}?" if nearest else f"the keys here are {', '.join(here)}"


def _all_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in keys_of(section).items():
        if inner := section_of(field.annotation):
            yield from _all_keys(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


def is_optional_section(path: KeyPath) -> bool:
    """Returns whether the key at `path` is a section that may be null."""
    found, field = locate(path)
    annotation = field.annotation if field is not None and found == path else None
    return section_of(annotation) is not None and not is_section(annotation)
