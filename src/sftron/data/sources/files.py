"""Finds the files of a split, given a file, a folder, a pattern, or a folder that the datasets library saved."""

from __future__ import annotations

import contextlib
import difflib
import glob
import itertools
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sftron.data.sources.json_text import excerpt
from sftron.data.sources.jsonl import CODECS, ending_of
from sftron.data.sources.views import parse_split
from sftron.data.types import DataError

_TEXT_ENDINGS = (".jsonl", ".json", ".csv")
ENDINGS = (*_TEXT_ENDINGS, ".parquet", ".arrow", *(text + codec for text in _TEXT_ENDINGS for codec in CODECS))
WANTED = "wanted .jsonl, .json, .csv, .parquet or .arrow, the first three also as .gz or .zst"
_SAVE_AGAIN = "save the data set again (save_to_disk)"
_MAX_DESCRIPTION_BYTES = 16 * 2**20
# Names of a split's files, as the datasets library writes them, and common names of splits.
_SHARD_NUMBER = re.compile(r"-(\d{5})-of-(\d{5})")
_SHARD = re.compile(r"(?:.*-)?(\w+(?:\.\w+)*)-\d{5}-of-\d{5}", re.ASCII)
_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}


def find_files(path: str, split: str = "train") -> list[Path] | None:
    """Returns the files that hold a split or a part of one, sorted, or None if the path can only be a Hub id.

    Raises:
        DataError: There is no such file or split; the message lists what there is instead.
    """
    here, split = Path(path), parse_split(split).name
    if here.is_dir():
        return _files_of_folder(here, split)
    if here.is_file() or glob.has_magic(path):
        names = [path] if here.is_file() else sorted(glob.glob(path, recursive=True))  # noqa: PTH207  absolute patterns
        if files := [Path(name) for name in names if Path(name).is_file()]:
            _choose(path, split, ["train"])
            return files
        raise DataError(f"{path}: no file matches this pattern; {_near(here)}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path, re.ASCII) and ending_of(here) not in ENDINGS and path[0] not in ".~":
        return None
    raise DataError(f"{path}: no such file or folder, nor a Hub id (owner/name); {_near(here)}")


def _files_of_folder(folder: Path, split: str) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        name = _choose(str(folder), split, _read_json(folder / "dataset_dict.json", "splits", list))
        return _saved_files(folder / name)
    if (folder / "state.json").is_file():
        own = _read_json(folder / "state.json", "_split", str | None)
        _choose(str(folder), split, [own if re.fullmatch(r"[\w.]+", own or "", re.ASCII) else "train"])
        return _saved_files(folder)
    # Hidden files are skipped: copies of editors, unfinished downloads.
    seen = sorted(file for file in folder.iterdir() if not file.name.startswith((".", "_")))
    files = [file for file in seen if ending_of(file) in ENDINGS and file.is_file()]
    declared = _readme_names_files(folder)
    if (declared or not files) and (by_split := _files_of_hub_folder(folder, declared=declared)):
        files = by_split[_choose(str(folder), split, list(by_split))]
    elif not files:
        raise DataError(f"{folder}: no file of rows in this folder ({WANTED}); {_near(folder / '*')}")
    else:
        files = _files_of_split(folder, files, split)
    _require_all_shards(folder, files)
    return files


def _files_of_split(folder: Path, files: list[Path], split: str) -> list[Path]:
    named = {file: _split_in_name(file) for file in files}
    if set(named.values()) - {None, "train"}:
        if unnamed := [file.name for file, name in named.items() if name is None]:
            other = next(file.name for file, name in named.items() if name not in (None, "train"))
            problem = f"{other} names a split, and {unnamed[0]} does not"
            raise DataError(f"{folder}: {problem}; name the files you want by a pattern, {folder}/*{files[0].suffix}")
        name = _choose(str(folder), split, sorted({name for name in named.values() if name}))
        files = [file for file in files if named[file] == name]
    else:
        _choose(str(folder), split, ["train"])
    endings = sorted({ending_of(file) for file in files})
    if len(endings) > 1:
        problem = f"files of several kinds ({', '.join(endings)}) in this folder"
        raise DataError(f"{folder}: {problem}; name one kind, {folder}/*{endings[0]}")
    return files


def _readme_names_files(folder: Path) -> bool:
    """Returns whether the folder is a data set of the Hub whose README declares the files of each split."""
    with contextlib.suppress(OSError), (folder / "README.md").open("rb") as file:
        header = re.match(rb"---\s*\n(.*?)\n---", file.read(_MAX_DESCRIPTION_BYTES), re.DOTALL)
        return header is not None and re.search(rb"(?m)^configs:", header[1]) is not None
    return False


def _files_of_hub_folder(folder: Path, *, declared: bool) -> dict[str, list[Path]]:
    """Returns, by split, the files of a downloaded data set of the Hub, as the datasets library finds them.

    The library reads them from the README if that declares files (`declared`), and otherwise looks in `data/` and
    similar folders. The result is empty if there are no files of rows. Raises DataError.
    """
    import datasets  # slow to import

    root = folder.resolve()  # the library resolves the folder as well
    try:
        with tempfile.TemporaryDirectory() as cache:  # for the library's lock files
            found = datasets.load_dataset_builder(str(root), cache_dir=cache).config.data_files or {}
    except Exception as error:  # several configurations or broken YAML raise many types
        if isinstance(error, FileNotFoundError) and not declared:
            return {}
        problem = f"the datasets library cannot tell which files are meant: {' '.join(str(error).splitlines()[:2])}"
        raise DataError(f"{folder}: {problem}; name the folder or the files you want, as {folder}/NAME") from error
    by_split = {str(split): [Path(os.path.normpath(file)) for file in files] for split, files in found.items()}
    for file in itertools.chain(*by_split.values()):
        if not file.is_relative_to(root):
            raise DataError(f"{folder}: README.md names {file}, which is outside of the folder; name what you want")
    return {split: files for split, files in by_split.items() if any(ending_of(file) in ENDINGS for file in files)}


def _require_all_shards(folder: Path, files: Sequence[Path]) -> None:
    """Raises DataError if shards are missing by the numbers in the file names, as after an incomplete download."""
    shards: dict[tuple[str, int], set[int]] = {}
    for file in files:
        if shard := _SHARD_NUMBER.search(file.name):
            shards.setdefault((file.name[: shard.start()], int(shard[2])), set()).add(int(shard[1]))
    for (name, number), found in shards.items():
        if missing := sorted(set(range(number)) - found):
            raise DataError(
                f"{folder}: {name} has {number} files by their names, and {len(missing)} are missing, first number "
                f"{missing[0]}; download them again, or name those you want by a pattern"
            )


def _saved_files(folder: Path) -> list[Path]:
    """Returns the files of a folder that `save_to_disk` of the datasets library wrote."""
    path = folder / "state.json"
    entries = _read_json(path, "_data_files", list)
    names = [str(entry.get("filename")) if isinstance(entry, dict) else "" for entry in entries]
    if outside := [name for name in names if not re.fullmatch(r"[\w-][\w.-]*\.arrow", name)]:
        raise DataError(f"{path}: names no .arrow file of its folder, {excerpt(outside[0])}; {_SAVE_AGAIN}")
    return [folder / name for name in names]


def _split_in_name(file: Path) -> str | None:
    """Returns the split in a file's name: `test` for gsm8k_test.jsonl, `train_sft` for a shard of that name."""
    stem = file.name.removesuffix(ending_of(file))
    shard = _SHARD.fullmatch(stem)
    name = shard[1] if shard else stem
    word = next((word for word in re.split(r"[-_.]", name.lower()) if word in _SPLIT_NAMES), None)
    return name if shard and word not in (None, name) else _SPLIT_NAMES.get(word or "")


def _choose(path: str, split: str, known: Sequence[str]) -> str:
    if split not in known:
        remedy = "remove split, and name the file that holds the rows you want"
        remedy = remedy if list(known) == ["train"] else "name one of them"
        raise DataError(f"{path}: has no split {excerpt(split)}, only {', '.join(known)}: {remedy}")
    return split


def _read_json(path: Path, key: str, kind: Any) -> Any:
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(_MAX_DESCRIPTION_BYTES).decode())[key]
        if not isinstance(value, kind):
            raise TypeError(key)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"is not what the datasets library writes, JSON with the key {key}"
        raise DataError(f"{path}: {problem}; {_SAVE_AGAIN}") from error
    return value


def _near(path: Path) -> str:
    """Returns a description of the nearest folder that exists: the names most similar to the path's, or the first."""
    folder = next((parent for parent in path.parents if parent.is_dir()), Path())
    names = sorted(item.name for item in folder.iterdir())
    if not names:
        return f"{folder}/ is empty"
    likely = difflib.get_close_matches(path.name, names, n=3) or names[:3]
    return f"{folder}/ has {', '.join(likely)}" + (" ..." if len(names) > len(likely) else "")
