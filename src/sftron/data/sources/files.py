"""Finds the files of a split in a file, a folder, a pattern or a folder of the datasets library, and opens them."""

from __future__ import annotations

import contextlib
import difflib
import glob
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from sftron.data.json_text import excerpt
from sftron.data.sources import arrow, streaming
from sftron.data.sources.hub import HubSplit
from sftron.data.sources.jsonl import CODECS, MAX_ROW_BYTES, JsonlSource, kind_of
from sftron.data.sources.spreadsheet import CSV_SUFFIXES
from sftron.data.sources.streaming import StreamedSource
from sftron.data.sources.text_files import TextFiles, TextLines
from sftron.data.sources.views import ConcatenatedSource, RowSource, parse_split, take_rows
from sftron.data.types import DataError, Documents
from sftron.regular_file import open_regular, where_missing

_TEXT_ENDINGS = (".jsonl", ".json", *CSV_SUFFIXES)
_ENDINGS = (*_TEXT_ENDINGS, ".parquet", ".arrow", *(text + codec for text in _TEXT_ENDINGS for codec in CODECS))
_WANTED = "wanted .jsonl, .json, .csv, .tsv, .parquet or .arrow, the first four also as .gz or .zst"
_DOCUMENTS = (".txt", *(".txt" + codec for codec in CODECS))
_WANTED_OF_TEXT = _WANTED.replace("wanted ", "wanted .txt, ").replace("first four", "first five")
_MAX_DESCRIPTION_BYTES = 16 * 2**20
# Names of a split's files, as the datasets library writes them, and common names of splits.
_SHARD_NUMBER = re.compile(r"-(\d{5})-of-(\d{5})")
_SHARD = re.compile(r"(?:.*-)?(\w+(?:\.\w+)*)-\d{5}-of-\d{5}", re.ASCII)
_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}


def open_source(
    path: str,
    split: str = "train",
    max_row_bytes: int = MAX_ROW_BYTES,
    *,
    max_samples: int | None = None,
    config: str | None = None,
    revision: str | None = None,
    documents: Documents | None = None,
) -> RowSource:
    """Opens a file, a folder of files or of the datasets library, a pattern with wildcards, or a Hub id.

    Args:
        path: The path, pattern or Hub id.
        split: The split, or a part of one; see `Split`.
        max_row_bytes: The largest size of a row in bytes; reading a larger row raises DataError.
        max_samples: The number of first rows of the split to use; None uses all of them.
        config: The configuration of a data set of the Hub, also of a downloaded one; None is its default one.
        revision: The branch, tag or commit of a Hub id; None is the branch main.
        documents: What is a row of .txt files: each file or each line. With None, .txt files hold no rows.

    Raises:
        DataError: The data cannot be opened. Broken rows raise only when they are read.
    """
    part = parse_split(split)
    with _readable(path):
        files = _files_or_hub(path, split, config, revision, has_documents=documents is not None)
        if isinstance(files, HubSplit):
            sources: list[RowSource] = [files.open(max_row_bytes)]
        elif is_text_file(files[0]):
            is_lines = documents == "line"
            sources = (
                [TextLines(f, max_row_bytes) for f in files] if is_lines else [TextFiles(path, files, max_row_bytes)]
            )
        else:
            openers = {".parquet": arrow.open_arrow, ".arrow": arrow.open_arrow}
            sources = [openers.get(file.suffix, JsonlSource)(file, max_row_bytes) for file in files]
    source = sources[0] if len(sources) == 1 else ConcatenatedSource(path, sources)
    if len(source) == 0:
        raise DataError(f"{path}: has no rows; name a file with rows")
    rows = part.rows(len(source))
    if not rows:
        raise DataError(f"{path}: split {excerpt(split)} selects none of its {len(source)} rows; select others")
    name = f"{path} ({split})" if part.start or part.stop else source.name
    return take_rows(source, rows[:max_samples], name)


def open_stream(
    path: str,
    split: str = "train",
    max_row_bytes: int = MAX_ROW_BYTES,
    *,
    max_samples: int | None = None,
    config: str | None = None,
    revision: str | None = None,
    documents: Documents | None = None,
) -> StreamedSource:
    """Opens the same data as `open_source`, but for .txt files, to be read forward.

    The bounds of a part of a split must be row numbers from the beginning, as in `train[1000:2000]`.

    Raises:
        DataError: The data cannot be opened, the bounds are of another kind, or there is no row.
    """
    part = parse_split(split)
    if any(bound and bound.strip("0123456789_") for bound in (part.start, part.stop)):
        problem = f"split {excerpt(split)} needs the number of rows, which a stream does not know"
        raise DataError(f"{path}: {problem}; write bounds in rows, train[1000:2000], or remove streaming")
    first = int(part.start or 0)
    ends = [int(part.stop)] if part.stop is not None else []
    ends += [first + max_samples] if max_samples is not None else []
    with _readable(path):
        files = _files_or_hub(path, split, config, revision, has_documents=documents is not None)
        if isinstance(files, HubSplit):
            stream = files.stream(max_row_bytes)
        elif is_text_file(files[0]):
            raise DataError(f"{path}: .txt files are not streamed; remove streaming, or convert them to .jsonl")
        else:
            stream = streaming.open_file_streams(path, files, max_row_bytes)
        source = StreamedSource(stream, first=first, stop=min(ends, default=None))
        if not len(source.head(1)):
            raise DataError(f"{path}: split {excerpt(split)} has no rows; name another split")
    return source


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Turns an OSError into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error


def _files_or_hub(
    path: str, split: str, config: str | None, revision: str | None, *, has_documents: bool = False
) -> list[Path] | HubSplit:
    files = find_files(path, split, config, has_documents=has_documents)
    if files is None:
        return HubSplit(path, parse_split(split).name, config, revision)
    if revision is not None:
        raise DataError(f"{path}: is local, so it has no revision {excerpt(revision)}; remove the key revision")
    return files


def find_files(
    path: str, split: str = "train", config: str | None = None, *, has_documents: bool = False
) -> list[Path] | None:
    """Returns the files that hold a split or a part of one, sorted, or None if the path can only be a Hub id.

    With `has_documents`, .txt files hold rows as well.

    Raises:
        DataError: There is no such file, split or configuration; the message lists what exists instead.
    """
    here, split = Path(path), parse_split(split).name
    endings = (*_ENDINGS, *_DOCUMENTS) if has_documents else _ENDINGS
    if here.is_dir():
        files = _files_of_folder(here, split, config, endings)
    elif config is not None and (here.is_file() or glob.has_magic(path)):
        raise DataError(
            f"{path}: is not a data set of the Hub, so it has no config {excerpt(config)}; remove the key config"
        )
    elif here.is_file() or glob.has_magic(path):
        names = [path] if here.is_file() else sorted(glob.glob(path, recursive=True))  # noqa: PTH207  absolute patterns
        files = [Path(name) for name in names if _is_file(Path(name))]
        if not files:
            raise DataError(f"{path}: no file matches this pattern{where_missing(here)}; {_near(here)}")
        _choose(path, split, ["train"])
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", path, re.ASCII) and _ending_of(here) not in endings and path[0] not in ".~":
        return None
    else:
        problem = f"no such file or folder{where_missing(here)}, nor a Hub id (owner/name)"
        raise DataError(f"{path}: {problem}; {_near(here)}")
    for file in files:
        if (ending := _ending_of(file)) not in endings:
            found = f"the ending {ending}" if file.suffix else "no ending"
            remedy = "; or set `format: text`, if it holds plain text" if ending in _DOCUMENTS else ""
            wanted = _WANTED_OF_TEXT if has_documents else _WANTED
            raise DataError(f"{file}: a file with {found}; {wanted}: convert, decompress or rename it{remedy}")
    if len(set(map(is_text_file, files))) > 1:
        raise DataError(f"{path}: has .txt files and others; make each kind a data set of its own")
    return files


def _is_file(path: Path) -> bool:
    """Returns whether the path is a file. Raises DataError for a dead link, because its rows would be missing
    silently."""
    if path.is_symlink() and not path.exists():
        raise DataError(f"{path}: no such file{where_missing(path)}; restore the file, or remove the link")
    return path.is_file()


def is_text_file(path: Path) -> bool:
    """Returns whether a file is a .txt file, which may be compressed."""
    return _ending_of(path) in _DOCUMENTS


def _ending_of(path: Path) -> str:
    """Returns the extension of a file name, including that of its compression: `.jsonl.gz` for chats.jsonl.gz."""
    return kind_of(path) + path.suffix if path.suffix in CODECS else path.suffix


def _choose(path: str | Path, split: str, known: Sequence[str]) -> str:
    if split not in known:
        remedy = "remove split, and name the file that holds the rows you want"
        remedy = remedy if list(known) == ["train"] else "name one of them"
        raise DataError(f"{path}: has no split {excerpt(split)}, only {', '.join(known)}: {remedy}")
    return split


def _near(path: Path) -> str:
    """Returns a description of the nearest folder that exists: the names most similar to the path's, or the first."""
    folder = next((parent for parent in path.parents if parent.is_dir()), Path())
    names = sorted(item.name for item in folder.iterdir())
    likely = difflib.get_close_matches(path.name, names, n=3) or names[:3]
    return f"{folder}/ has {', '.join(likely) or 'no files'}" + (" ..." if len(names) > len(likely) else "")


# --- Folders ---


def _files_of_folder(folder: Path, split: str, config: str | None, endings: Sequence[str]) -> list[Path]:
    declared = _readme_names_files(folder)
    if config is not None and not declared:
        raise DataError(f"{folder}: README.md declares no configs, so it has no {excerpt(config)}; remove config")
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _saved_files(folder, split)
    # Hidden files are skipped: copies of editors, unfinished downloads.
    seen = sorted(file for file in folder.iterdir() if not file.name.startswith((".", "_")))
    files = [file for file in seen if _ending_of(file) in endings and _is_file(file)]
    if (declared or not files) and (by_split := _files_of_hub_folder(folder, config, declared=declared)):
        files = by_split[_choose(folder, split, list(by_split))]
    elif not files:
        wanted = _WANTED_OF_TEXT if _DOCUMENTS[0] in endings else _WANTED
        raise DataError(f"{folder}: no file of rows in this folder ({wanted}); {_near(folder / '*')}")
    elif any(map(is_text_file, files)):
        _choose(folder, split, ["train"])  # the names of documents name no splits
        if below := _first_document_below(folder):
            problem = f"has .txt files, and {below} in a folder of its own, which would not be read"
            raise DataError(f"{folder}: {problem}; name all by a pattern, {folder}/**/*.txt, or some by {folder}/*.txt")
    else:
        files = _files_of_split(folder, files, split)
    _require_all_shards(folder, files)
    return files


def _first_document_below(folder: Path) -> Path | None:
    """Returns the first .txt file in the folders of a folder, without hidden ones, as a path from there."""
    below = (file.relative_to(folder) for file in folder.glob("*/**/*") if is_text_file(file) and file.is_file())
    return min((path for path in below if not any(part.startswith((".", "_")) for part in path.parts)), default=None)


def _saved_files(folder: Path, split: str) -> list[Path]:
    """Returns the files of a folder that `save_to_disk` of the datasets library wrote."""
    import datasets  # slow to import

    _require_files(folder)
    try:
        saved: Any = datasets.load_from_disk(str(folder))
    except Exception as error:  # what is missing or broken raises many types
        problem = f"the datasets library cannot load it: {' '.join(str(error).split())}"
        raise DataError(f"{folder}: {problem}; save the data set again (save_to_disk)") from error
    splits: dict[str, Any] = {str(saved.split or "train"): saved} if isinstance(saved, datasets.Dataset) else saved
    files = [Path(each["filename"]) for each in splits[_choose(folder, split, list(splits))].cache_files]
    _require_inside(folder, files)
    return files


def _require_files(folder: Path) -> None:
    """Raises DataError if a pipe or a device is in a folder: the datasets library would wait for it."""
    for path in chain(folder.glob("*"), folder.glob("*/*")):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise DataError(f"{path}: is a pipe or a device, in a folder of files; remove it")


def _require_inside(folder: Path, files: Sequence[Path]) -> None:
    root = folder.resolve()
    if outside := [file for file in files if not file.resolve().is_relative_to(root)]:
        raise DataError(f"{folder}: names {outside[0]}, outside of the folder; name the files you want")


def _files_of_split(folder: Path, files: list[Path], split: str) -> list[Path]:
    """Returns the files whose names contain the split's name, or all files if no name contains a split's name."""
    named = {file: _split_in_name(file) for file in files}
    if set(named.values()) - {None, "train"}:
        if unnamed := [file.name for file, name in named.items() if name is None]:
            other = next(file.name for file, name in named.items() if name not in (None, "train"))
            problem = f"{other} names a split, but {unnamed[0]} does not"
            raise DataError(f"{folder}: {problem}; name the files you want by a pattern, {folder}/*{files[0].suffix}")
        _choose(folder, split, sorted({name for name in named.values() if name}))
        files = [file for file in files if named[file] == split]
    else:
        _choose(folder, split, ["train"])
    endings = sorted({_ending_of(file) for file in files})
    if len(endings) > 1:
        problem = f"files of several kinds ({', '.join(endings)}) in this folder"
        raise DataError(f"{folder}: {problem}; name one kind, {folder}/*{endings[0]}")
    return files


def _split_in_name(file: Path) -> str | None:
    """Returns the split in a file's name: `test` for gsm8k_test.jsonl, `train_sft` for a shard of that name."""
    stem = file.name.removesuffix(_ending_of(file))
    shard = _SHARD.fullmatch(stem)
    name = shard[1] if shard else stem
    word = next((word for word in re.split(r"[-_.]", name.lower()) if word in _SPLIT_NAMES), None)
    return name if shard and word not in (None, name) else _SPLIT_NAMES.get(word or "")


def _readme_names_files(folder: Path) -> bool:
    """Returns whether the folder is a data set of the Hub whose README declares the files of each split."""
    with contextlib.suppress(OSError, ValueError), open_regular(folder / "README.md") as file:
        first, *lines = file.read(_MAX_DESCRIPTION_BYTES).split(b"\n")
        end = next((n for n, line in enumerate(lines) if line.startswith(b"---")), 0)
        return first.strip() == b"---" and any(line.startswith(b"configs:") for line in lines[:end])
    return False


def _files_of_hub_folder(folder: Path, config: str | None, *, declared: bool) -> dict[str, list[Path]]:
    """Returns, by split, the files of a downloaded data set of the Hub, as the datasets library finds them.

    The library reads them from the README if that declares files (`declared`), and otherwise looks in `data/` and
    similar folders. The result is empty if there are no files of rows. Raises DataError.
    """
    import datasets  # slow to import

    _require_files(folder)
    root = folder.resolve()  # the library resolves the folder as well
    try:
        with tempfile.TemporaryDirectory() as cache:  # for the library's lock files
            found = datasets.load_dataset_builder(str(root), config, cache_dir=cache).config.data_files or {}
    except Exception as error:  # several configurations or broken YAML raise many types
        if isinstance(error, FileNotFoundError) and not declared:
            return {}
        reason = " ".join(str(error).splitlines()[:2])
        problem = f"the datasets library cannot determine which files to read: {reason}"
        raise DataError(
            f"{folder}: {problem}; name one (config: NAME), or the files you want, {folder}/NAME"
        ) from error
    by_split = {str(split): [Path(os.path.normpath(file)) for file in files] for split, files in found.items()}
    _require_inside(folder, list(chain.from_iterable(by_split.values())))
    return {split: files for split, files in by_split.items() if any(_ending_of(file) in _ENDINGS for file in files)}


def _require_all_shards(folder: Path, files: Sequence[Path]) -> None:
    """Raises DataError if shards are missing by the numbers in the file names, as after an incomplete download."""
    numbers: dict[tuple[str, int], set[int]] = {}  # what follows a number may differ, as in train-00000-of-00002-1f3a
    for file in files:
        if shard := _SHARD_NUMBER.search(file.name):
            numbers.setdefault((file.name[: shard.start()], int(shard[2])), set()).add(int(shard[1]))
    for (name, num_shards), found in numbers.items():
        if missing := sorted({*range(num_shards)} - found):
            problem = f"{len(missing)} of the {num_shards} files {name}-... are missing, first number {missing[0]}"
            raise DataError(f"{folder}: {problem}; download them again, or name the files you want by a pattern")
