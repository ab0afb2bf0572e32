"""A bound on the memory that a chat template takes: Jinja's sandbox has none, and `'x' * 10 ** 10` is an expression.

The system keeps it: while a template is rendered, this process may not grow by more than BYTES, and Python raises where
it would, at whatever expression, filter or method that is.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

if sys.platform == "linux":
    import resource

BYTES = 2**30
"""Beyond what the process has when a conversation begins; one of 4 MiB takes a tenth."""
FREE_CHARACTERS = 2**24
"""What a template may write for any conversation; for a larger one, GROWTH times its own."""
GROWTH = 16

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class TemplateMemoryError(ValueError):
    """A chat template wants more memory than any conversation needs. No row is dropped for it."""


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Raises TemplateMemoryError in place of a MemoryError. Without a bound of its own elsewhere than on Linux."""
    if sys.platform != "linux":
        yield
        return
    before, bound = _bounds()
    resource.setrlimit(resource.RLIMIT_AS, bound)
    try:
        yield
    except MemoryError:
        raise TemplateMemoryError(
            f"the chat template takes more than {BYTES // 2**20} MiB of memory for one conversation; "
            "give one that does not (tokenizer.chat_template: FILE)"
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def require_in_proportion(text: str, *given: Any) -> None:
    """Raises TemplateMemoryError where a rendered text is many times what it was made of: its tokens would take a
    hundred times its memory."""
    if len(text) > FREE_CHARACTERS and len(text) > GROWTH * (size := _num_characters(given)):
        raise TemplateMemoryError(
            f"the chat template writes {len(text):,} characters for a conversation of {size:,}; give one that writes "
            "each once (tokenizer.chat_template: FILE)"
        )


def _num_characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + _num_characters(each) for key, each in value.items())
    return sum(map(_num_characters, value)) if isinstance(value, (list, tuple)) else 0


_Limits = tuple[int, int]
_last: tuple[float, int, _Limits, _Limits] = (0.0, 0, (0, 0), (0, 0))
"""When, with which BYTES, and what _bounds has found."""
_FRESH_S = 0.01
"""To ask the system takes a third of the time of a short conversation."""


def _bounds() -> tuple[_Limits, _Limits]:
    """The limits of this process's address space as they are, and as they are to be."""
    global _last
    asked, extra, before, bound = _last
    if time.monotonic() - asked > _FRESH_S or extra != BYTES:
        before = resource.getrlimit(resource.RLIMIT_AS)
        wanted = _address_space_bytes() + BYTES
        bound = (min([wanted, *(each for each in before if each != resource.RLIM_INFINITY)]), before[1])
        _last = time.monotonic(), BYTES, before, bound
    return before, bound


def _address_space_bytes() -> int:
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(file, 100).split()[0]) * _PAGE_BYTES
    finally:
        os.close(file)
