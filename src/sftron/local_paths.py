"""Paths without the folders of this machine, for cards that leave it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sftron.errors import map_texts

_START = r"(?<![\w.~-])"
"""Matches where a path may begin: not within a name or another path."""
_NAME = r"/[^\s/,;:'\"]+"
_FOLDERS = re.compile(rf"(?:(?<![\w.~/:-])|(?<=file://))(?:~(?:{_NAME})*|(?:{_NAME})+)/")
"""Matches the folders of an absolute path, or of one in the user's folder, also after `file://`."""


def without_folders(value: Any, folders: Sequence[str]) -> Any:
    """Returns JSON values with the folders of each path in their texts removed.

    Args:
        folders: Known folders, the longest first. Text alone does not show whether a space belongs to a path.
    """
    home = os.path.expanduser("~")  # noqa: PTH111  (Path.home raises an exception if there is none)

    def change(text: str) -> str:
        for folder in folders:
            text = re.sub(rf"{_START}{re.escape(folder)}/", "", text)
        return _FOLDERS.sub("", re.sub(rf"{_START}{re.escape(home)}(?![\w.-])", "~", text))

    return map_texts(change, value)


def path_names(value: Any) -> Any:
    """Returns JSON values in which each text that is a whole local path is replaced by its last component."""

    def change(text: str) -> str:
        leads_out = Path(text).is_absolute() or text.startswith("~") or ".." in Path(text).parts
        return Path(text).name if leads_out or re.match(r"(?i)[a-z]:[\\/]|file:", text) else text

    return map_texts(change, value)
