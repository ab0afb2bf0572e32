"""The failure that came first, on whichever rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sftron.train.distributed import Ranks
from sftron.train.watch import RankError


@contextmanager
def failure_told(ranks: Ranks, tell: Callable[[str], None], *, refusal: type[ValueError]) -> Iterator[None]:
    """`tell` is given the failure that came first. Raises RankError for another rank's.

    refusal: what is raised on all ranks alike, and so is nobody's fault.
    """
    if ranks.watch:
        ranks.watch.on_failure = tell
    try:
        yield
    except refusal as error:
        tell(f"{type(error).__name__}: {error}")
        raise
    except BaseException as error:
        first = ranks.blame(error)
        tell(first)
        if str(error) in first:
            raise
        raise RankError(first) from error
