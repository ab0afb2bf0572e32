"""`split`: which of a data set's splits, and which part of it, in the words of the datasets library."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sftron.data.json_files import excerpt
from sftron.data.types import DataError

_SYNTAX = re.compile(
    r"(?P<name>\w+(?:\.\w+)*)(?:\[(?:(?P<start>-?[\d_]+)(?P<start_pct>%)?)?:(?:(?P<stop>-?[\d_]+)(?P<stop_pct>%)?)?\])?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Split:
    """A split, or a part of one.

        train              all rows
        train[100:200]     rows 100 to 199, from 0
        train[-10%:]       the last tenth
        train[:5%]         the first twentieth; 5 % of 199 rows is 9.95, so 10 rows

    start, stop: borders as in Python's slices, None for an end; in percent where `in_percent`, rounded to the closest
    row, halves to the even one.
    """

    text: str
    name: str
    start: int | None = None
    stop: int | None = None
    in_percent: bool = False

    @property
    def is_part(self) -> bool:
        return self.start is not None or self.stop is not None

    def rows(self, num_rows: int) -> range:
        """The rows it takes of a split of so many; a border outside of it is its end."""
        start, stop, _ = slice(self._border(self.start, num_rows), self._border(self.stop, num_rows)).indices(num_rows)
        return range(start, max(start, stop))

    def _border(self, border: int | None, num_rows: int) -> int | None:
        return round(border * num_rows / 100) if border is not None and self.in_percent else border


def parse_split(text: str) -> Split:
    """Raises DataError for what the syntax does not have."""
    found = _SYNTAX.fullmatch(text)
    if found is None:
        remedy = "write train, train[:100], train[100:200], train[:5%] or train[-10%:]"
        if "+" in text:
            remedy = "make each part a data set of its own"
        raise DataError(f"split {excerpt(text)} is not understood; {remedy}")
    start, stop = (None if found[group] is None else int(found[group]) for group in ("start", "stop"))
    units = {found[f"{group}_pct"] for group in ("start", "stop") if found[group] is not None}
    if len(units) > 1:
        raise DataError(f"split {excerpt(text)} has one border in percent and one in rows; write both in one unit")
    in_percent = units == {"%"}
    for border in (start, stop):
        if in_percent and border is not None and abs(border) > 100:
            raise DataError(f"split {excerpt(text)}: {border}% is more than there is; write -100% to 100%")
    return Split(text, found["name"], start, stop, in_percent)
