"""The places that a configuration names: folders, data files, and commits on the Hub.

A run finds and verifies them once, before it opens anything. A Hub branch may move, so a run asks for its commit only
at the first start and records it in its directory for resumes.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sftron.checkpoint.checkpoint import steps_in
from sftron.checkpoint.model_folder import check_files, local_folder, model_commit, read_config
from sftron.checkpoint.source import ExportSource
from sftron.config import Config
from sftron.config.data_schema import Rows
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.sources import HubSplit, find_files
from sftron.data.types import DataError
from sftron.hub_revision import COMMIT
from sftron.models.architecture import LlamaConfig
from sftron.regular_file import read_json_value
from sftron.train.ranks import Ranks

_Rows = TypeVar("_Rows", bound=Rows)

REVISIONS = "revisions.json"
"""The file of a run directory with the commits: {"datasets/openai/gsm8k@main": commit}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The folders and files that a configuration names, found and verified once by `find_places`."""

    model: Path
    """The folder of the model."""
    architecture: LlamaConfig
    """The architecture that the folder's config.json describes."""
    tokenizer: Path
    """The folder of the tokenizer, most often the model's."""
    data_files: list[tuple[str, int, int, int, int]]
    """The metadata of the data files before they are opened; see `file_stamps`."""


def find_places(config: Config, ranks: Ranks | None = None) -> Places:
    """Finds and verifies what the configuration names.

    Every rank calls this. The first rank of each node downloads what is not in the Hub's cache before the others look.

    Args:
        ranks: None for a single process.

    Raises:
        ValueError: A folder is missing, a file in it is implausible, or config.json is not supported.
    """
    if ranks is None:
        return _verified(config, *_folders(config, download=True))
    is_first = ranks.local_rank == 0
    own = ranks.all_or_raise(lambda: _folders(config, download=True) if is_first else None)
    return ranks.all_or_raise(lambda: _verified(config, *(own or _folders(config, download=False))))


def _folders(config: Config, *, download: bool) -> tuple[Path, Path]:
    """Returns the folders of the model and the tokenizer."""
    model = model_folder(config, download=download)
    if (config.tokenizer_path, config.tokenizer_revision) == (config.model.path, config.model.revision):
        return model, model
    return model, tokenizer_folder(config, download=download)


def _verified(config: Config, model: Path, tokenizer: Path) -> Places:
    for folder in dict.fromkeys((model, tokenizer)):
        check_files(folder)
    return Places(model=model, architecture=read_config(model), tokenizer=tokenizer, data_files=file_stamps(config))


def model_folder(config: Config, *, download: bool = True) -> Path:
    """Returns the folder of the model; see `local_folder`. Raises ValueError."""
    return local_folder(config.model.path, config.model.revision, download=download)


def tokenizer_folder(config: Config, *, download: bool = True) -> Path:
    """Returns the folder of the tokenizer; see `local_folder`. Raises ValueError."""
    path, revision = config.tokenizer_path, config.tokenizer_revision
    return local_folder(path, revision, with_weights=False, download=download)


def local_files(rows: Rows) -> list[Path] | None:
    """Returns the files of a data set, or None if its path can only be a Hub id. Raises DataError."""
    return find_files(rows.path, rows.split, rows.config, has_documents=rows.txt_documents is not None)


def file_stamps(config: Config) -> list[tuple[str, int, int, int, int]]:
    """Returns path, inode, size, mtime and ctime of all data files; data sets on the Hub are left out.

    A write in place that keeps the size and restores the mtime still changes the ctime.
    """
    stamps = []
    for each in config.data.datasets:
        try:
            files = local_files(each) or []
            stats = [(str(file), file.stat()) for file in files]
        except (OSError, DataError):
            continue  # opening the data set reports the problem
        stamps += [(file, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for file, s in stats]
    return stamps


def export_source(config: Config, places: Places, chat_tokenizer: ChatTokenizer) -> ExportSource:
    """Returns what exports take from the folders of the model and the tokenizer.

    Raises:
        ValueError: A folder lacks a file that an export needs, or an export would have another tokenizer.
    """
    known = {"path": config.model.path, "architecture": places.architecture}
    if config.tokenizer.add_tokens:
        with tempfile.TemporaryDirectory() as saved:
            chat_tokenizer.tokenizer.save_pretrained(saved)
            source = ExportSource.read(places.model, Path(saved), **known)
    else:
        source = ExportSource.read(places.model, places.tokenizer, **known)
    if config.tokenizer.chat_template or chat_tokenizer.template.kwargs:
        source = source.with_chat_template(chat_tokenizer.template.source_with_defaults)
    source.require_tokenizer(chat_tokenizer, has_model=config.lora is None or config.lora.merge)
    return source


def pin_revisions(config: Config) -> Config:
    """Returns the configuration with a commit as the revision of everything on the Hub; see `find_commits`."""
    return pin(config, find_commits(config))


def find_commits(config: Config, *, gives_rows: bool = False) -> dict[str, str]:
    """Returns the commits of everything that the configuration takes from the Hub, in the form of the file REVISIONS.

    If the run has a checkpoint to resume from, they are the run's recorded commits, otherwise the Hub's current ones.
    Recorded commits stay even if the run's own config.yaml, with commits in place of branches, resumes it. Raises
    ValueError.

    Args:
        gives_rows: Whether a user's own code gives the rows of the first data set, whose path is then only a name.
    """
    known, commits = _recorded(config), dict[str, str]()
    models = [
        (config.model.path, config.model.revision, True),
        (config.tokenizer_path, config.tokenizer_revision, False),
    ]
    for path, revision, with_weights in models:
        key = _key("models", path, revision)
        if not Path(path).is_dir() and key not in commits:
            commits[key] = known.get(key) or model_commit(path, revision, with_weights=with_weights)
    named = config.data.datasets[1:] if gives_rows else config.data.datasets
    for each in (*named, *config.evaluation.datasets, *config.evaluation.keep):
        key = _key("datasets", each.path, each.revision)
        if local_files(each) is None and key not in commits:
            commits[key] = known.get(key) or HubSplit(each.path, each.split, each.config, each.revision).commit()
    return known | commits


def _recorded(config: Config) -> dict[str, str]:
    """Returns the commits of the run that a start of this configuration would resume; {} for a new run."""
    options, folder = config.checkpoints, config.run_dir
    if options.load == "all" and options.resume not in ("auto", "never"):
        folder = Path(options.resume).resolve().parent.parent
    return read_commits(folder) if steps_in(folder / "checkpoints") else {}


def read_commits(run_directory: Path) -> dict[str, str]:
    """Returns the commits that a run recorded; {} without a record. Raises ValueError if the file is damaged."""
    file = run_directory / REVISIONS
    try:
        commits = read_json_value(file)
        if not all(COMMIT.fullmatch(commit) for commit in commits.values()):
            raise ValueError("holds values other than commits")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: is damaged ({error}); remove it, and name the commits of config.yaml") from error
    return commits


def pin(config: Config, commits: dict[str, str]) -> Config:
    """Returns the configuration with these commits as revisions; other revisions stay unchanged."""

    def of_rows(rows: _Rows) -> _Rows:
        return rows.model_copy(
            update={"revision": commits.get(_key("datasets", rows.path, rows.revision), rows.revision)}
        )

    def of_model(path: str, revision: str | None) -> str | None:
        return commits.get(_key("models", path, revision), revision)

    model, tokenizer, data, evaluation = config.model, config.tokenizer, config.data, config.evaluation
    if tokenizer.path or tokenizer.revision:  # else it has the revision of the model
        revision = of_model(config.tokenizer_path, config.tokenizer_revision)
        tokenizer = tokenizer.model_copy(update={"revision": revision})
    return config.model_copy(
        update={
            "model": model.model_copy(update={"revision": of_model(model.path, model.revision)}),
            "tokenizer": tokenizer,
            "data": data.model_copy(update={"datasets": tuple(map(of_rows, data.datasets))}),
            "evaluation": evaluation.model_copy(
                update={
                    "datasets": tuple(map(of_rows, evaluation.datasets)),
                    "keep": tuple(map(of_rows, evaluation.keep)),
                }
            ),
        }
    )


def _key(kind: str, path: str, revision: str | None) -> str:
    return f"{kind}/{path}@{revision or 'main'}"
