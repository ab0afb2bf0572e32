"""transformers' Jinja environment for chat templates, with joins, filters and calls that keep the origin of text.

An operation that would turn text of the conversation into a bare string raises ProvenanceLostError with its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

from sftron.data.chat.tracked_markup import TrackedMarkup
from sftron.data.chat.tracked_text import ProvenanceLostError, TrackedStr, concatenate, is_tracked, written_whole

_OWN_KEYWORDS = ("_loop_vars", "_block_vars")


class TrackingEnvironment(ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates, with joins and calls that keep origins."""

    concat = staticmethod(concatenate)  # pyright: ignore[reportAssignmentType]
    intercepted_binops = frozenset({"%"})

    @classmethod
    def like(cls, reference: jinja2.Environment) -> TrackingEnvironment:
        environment = cls(
            trim_blocks=reference.trim_blocks,
            lstrip_blocks=reference.lstrip_blocks,
            extensions=[type(extension) for extension in reference.extensions.values()],
            finalize=_written,
        )
        for extension in environment.extensions.values():
            if hasattr(extension, "_generation_support"):
                vars(extension)["_generation_support"] = _between_marks
        environment.globals.update(reference.globals)
        tracked = {"join": _tracked_join, "tojson": _tracked_tojson(reference.filters["tojson"])}
        tracked |= {"indent": _tracked_indent, "safe": _safe, "string": _tracked_string}
        filters = {**reference.filters, **tracked}.items()
        environment.filters.update({name: environment._keeping_origin(name, function) for name, function in filters})
        return environment

    def _keeping_origin(self, name: str, filter_function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the filter, except that it raises instead of returning a bare str made of the conversation's text."""

        # wraps() also copies the attribute for which Jinja passes its context or environment as the first argument.
        @functools.wraps(filter_function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            result = filter_function(*args, **kwargs)
            if isinstance(result, str) and result and not isinstance(result, TrackedStr) and is_tracked(args):
                raise ProvenanceLostError(f"the filter '{name}' rewrites text of the conversation")
            return result

        return checked

    def getattr(self, obj: Any, attribute: str) -> Any:
        # Jinja tries an attribute of the dict first, and the AttributeError takes most of the time.
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        if type(obj) is LoopContext and attribute in ("first", "last", "index", "index0"):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Any, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a TrackedStr's method instead of a str's if the arguments contain text of the conversation.

        An example is `'sep'.join(texts)`.
        """
        receiver = getattr(callee, "__self__", None)
        if isinstance(receiver, str) and not isinstance(receiver, TrackedStr):
            # A generator or a view of a dict is read once, here.
            is_once = [isinstance(arg, Iterable) and not isinstance(arg, (Mapping, Sequence)) for arg in args]
            args = tuple(list(arg) if once else arg for arg, once in zip(args, is_once, strict=True))
            # Jinja adds the variables of the loop or block around the call.
            if is_tracked([args, {key: value for key, value in kwargs.items() if key not in _OWN_KEYWORDS}]):
                if isinstance(receiver, Markup):
                    raise ProvenanceLostError("the filter 'safe' makes a method escape text of the conversation")
                callee = getattr(TrackedStr.of(receiver, None), getattr(callee, "__name__", "format"))
        return super().call(context, callee, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str) and is_tracked([left, right]):
            raise ProvenanceLostError("the operator % formats text of the conversation")
        return super().call_binop(context, operator, left, right)


def _written(value: Any) -> Any:
    """Returns the text that an expression writes for a value, as by `str`."""
    return value if isinstance(value, str) or not is_tracked(value) else written_whole(str(value), value, "{{ }}")


class _SafeText(Markup):
    """The template's own text after the filter 'safe'. It would escape text that is added to it with +."""

    def __add__(self, other: Any) -> Markup:
        return super().__add__(_untracked(other))

    def __radd__(self, other: Any) -> Markup:
        return super().__radd__(_untracked(other))


def _untracked(other: Any) -> Any:
    if is_tracked(other):
        raise ProvenanceLostError("the filter 'safe' makes + escape text of the conversation")
    return other


def _safe(value: Any) -> Any:
    written = _written(value)
    return TrackedMarkup.like(written) if isinstance(written, TrackedStr) else _SafeText(written)


def _tracked_string(value: Any) -> str:
    return value if isinstance(value, str) else str(_written(value))


def _between_marks(caller: Callable[[], str]) -> TrackedStr:
    """Returns the text between `{% generation %}` marks; transformers' function records its position instead."""
    return concatenate([caller()]).marked()


@jinja2.pass_environment
def _tracked_join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> TrackedStr:
    if attribute is not None:
        value = (environment.getitem(item, attribute) for item in value)
    return concatenate([d]).join([str(_written(item)) for item in value])


def tracked_str_join(values: Iterable[Any]) -> TrackedStr:
    return concatenate([str(_written(value)) for value in values])


def _tracked_tojson(dump: Callable[..., str]) -> Callable[..., str]:
    def tojson(value: Any, *args: Any, **kwargs: Any) -> str:
        return written_whole(dump(value, *args, **kwargs), value, "the filter 'tojson'")

    return tojson


def _tracked_indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Does the same as jinja2.filters.do_indent, including its treatment of blank lines and a final newline."""
    indention = width if isinstance(width, str) else " " * width
    lines = (s + "\n").splitlines()
    rest = [line if not blank and not line else indention + line for line in lines[1:]]
    indented = TrackedStr.of("\n", None).join([lines[0], *rest])
    indented = indention + indented if first else indented
    return TrackedMarkup.like(concatenate([indented])) if isinstance(s, TrackedMarkup) else indented
