"""A bound on the time that a chat template takes: Jinja's sandbox has none, and loops in loops need not end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 60.0
"""Of processor time, for one conversation; one of 4 MiB takes less than two."""


class TemplateTimeError(ValueError):
    """A chat template did not come to its end. No row is dropped for it: whether it is would depend on the machine."""


class _OutOfTime(BaseException):
    """Not an Exception: Jinja passes those over where it computes constants."""


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise _OutOfTime


@contextmanager
def bounded_time() -> Iterator[None]:
    """Raises TemplateTimeError after SECONDS of this process's time. Without effect outside of its main thread, which
    alone receives signals; there neither loader workers nor the trainer render."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGVTALRM) is not _stop:
        signal.signal(signal.SIGVTALRM, _stop)
    try:
        # Again and again: the first one may strike where exceptions are swallowed.
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, 0.1)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _OutOfTime:
        raise TemplateTimeError(
            f"the chat template takes more than {SECONDS:.0f} s for one conversation; give one that comes to its end "
            "(tokenizer.chat_template: FILE)"
        ) from None
