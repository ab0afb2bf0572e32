"""What a run takes from the Hub: the commits of its models and data sets, which a resume uses again.

A branch may move. So a run asks the Hub once, at its first start, and records the answers in its directory.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TypeVar

from sftron.checkpoint.checkpoint import steps_in
from sftron.checkpoint.model_folder import local_folder, model_commit
from sftron.checkpoint.source import ExportSource
from sftron.config import Config
from sftron.config.data_schema import Rows
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.sources import HubSplit, find_files
from sftron.hub_revision import COMMIT
from sftron.regular_file import read_json_value

_Rows = TypeVar("_Rows", bound=Rows)

REVISIONS = "revisions.json"
"""The file of a run directory with the commits: {"datasets/openai/gsm8k@main": commit}."""


def model_folder(config: Config, *, download: bool = True) -> Path:
    """Returns the folder of the model; see `local_folder`. Raises ValueError."""
    return local_folder(config.model.path, config.model.revision, download=download)


def tokenizer_folder(config: Config, *, download: bool = True) -> Path:
    """Returns the folder of the tokenizer; see `local_folder`. Raises ValueError."""
    path, revision = config.tokenizer_path, config.tokenizer_revision
    return local_folder(path, revision, with_weights=False, download=download)


def export_source(config: Config, folder: Path, chat_tokenizer: ChatTokenizer) -> ExportSource:
    """Returns what exports take from the folders of the model and the tokenizer.

    Raises:
        ValueError: A folder lacks a file that an export needs, or an export would have another tokenizer.
    """
    path = config.model.path
    if config.tokenizer.add_tokens:
        with tempfile.TemporaryDirectory() as saved:
            chat_tokenizer.tokenizer.save_pretrained(saved)
            source = ExportSource.read(folder, Path(saved), path=path)
    else:
        source = ExportSource.read(folder, tokenizer_folder(config, download=False), path=path)
    if config.tokenizer.chat_template:
        source = source.with_chat_template(chat_tokenizer.template.source)
    source.require_tokenizer(chat_tokenizer, has_model=config.lora is None or config.lora.merge)
    return source


def pinned(config: Config) -> Config:
    """Returns the configuration with a commit as the revision of everything on the Hub; see `find_commits`."""
    return pin(config, find_commits(config))


def find_commits(config: Config) -> dict[str, str]:
    """Returns the commits of all that the configuration takes from the Hub, in the form of the file REVISIONS.

    They are those of the run, if it has a checkpoint to resume from, and else what the Hub says now. What the run has
    recorded stays, also if its own config.yaml, with commits in place of branches, resumes it. Raises ValueError.
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
    for each in (*config.data.datasets, *config.evaluation.datasets):
        key = _key("datasets", each.path, each.revision)
        if find_files(each.path, each.split, each.config) is None and key not in commits:
            commits[key] = known.get(key) or HubSplit(each.path, each.split, each.config, each.revision).commit()
    return known | commits


def _recorded(config: Config) -> dict[str, str]:
    """Returns the commits of the run that a start of this configuration would resume; {} for a new run."""
    options, folder = config.checkpoints, config.run_dir
    if options.load == "all" and options.resume not in ("auto", "never"):
        folder = Path(options.resume).resolve().parent.parent
    return read_commits(folder) if steps_in(folder / "checkpoints") else {}


def read_commits(run_directory: Path) -> dict[str, str]:
    """Returns the commits that a run has recorded, {} if there are none. Raises ValueError if the file is damaged."""
    file = run_directory / REVISIONS
    try:
        commits = read_json_value(file)
        if not all(COMMIT.fullmatch(commit) for commit in commits.values()):
            raise ValueError("holds other values than commits")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: is damaged ({error}); remove it, and name the commits of config.yaml") from error
    return commits


def pin(config: Config, commits: dict[str, str]) -> Config:
    """Returns the configuration with these commits as revisions; what they do not have stays as it is."""

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
            "evaluation": evaluation.model_copy(update={"datasets": tuple(map(of_rows, evaluation.datasets))}),
        }
    )


def _key(kind: str, path: str, revision: str | None) -> str:
    return f"{kind}/{path}@{revision or 'main'}"
