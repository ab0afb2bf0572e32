"""Where an exception comes from: the user's own code, a library, or ours."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_EXIT_REMEDY = "return the trainer, and exit only under if __name__ == '__main__'"


def place_of(error: BaseException) -> str:
    """Returns the line where an exception began: the innermost line of the user's own code, if any."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frame = (_user_frames(error) or traceback.extract_tb(error.__traceback__))[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"


@contextmanager
def naming_the_line(what: str, remedy: str = "") -> Iterator[None]:
    """Raises ValueError in place of an exception of code that is not ours, with the line where it began."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())
        raise ValueError(f"{what} {type(error).__name__}: {words} ({place_of(error)}){remedy}") from error


@contextmanager
def naming_the_users_line() -> Iterator[None]:
    """Raises ValueError with the line in place of an exception that came through the user's own code."""
    try:
        yield
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except BaseException as error:  # an exit of the user's would be taken for a verdict
        if not isinstance(error, SyntaxError) and not _user_frames(error):
            raise
        words = " ".join(str(error).split())
        remedy = f"; {_EXIT_REMEDY}" if isinstance(error, SystemExit) else ""
        raise ValueError(f"{place_of(error)}: {type(error).__name__}{': ' * bool(words)}{words}{remedy}") from error


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    own = Path(__file__).parent
    libraries = (sysconfig.get_path("stdlib"), str(own), str(own.with_name("sftcheck")), "<")
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(libraries)
        and {"site-packages", "dist-packages"}.isdisjoint(Path(frame.filename).parts)
    ]
