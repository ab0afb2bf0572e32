"""Revisions of repositories on the Hub: a branch or a tag may move, a commit never changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

COMMIT = re.compile(r"[0-9a-f]{40}")


def commit_of(repository: str, kind: Literal["model", "dataset"], revision: str | None) -> str:
    """Returns the commit that a branch, tag or commit of a repository is now; None is the branch main.

    If the Hub cannot be reached, it is what the revision was when it was last asked for. Raises the errors of
    huggingface_hub.
    """
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import snapshot_download

    # Unlike HfApi.repo_info, this records the answer in the cache, and finds it there without a network.
    files = ["README.md", "config.json", "tokenizer_config.json"]
    folder = snapshot_download(repository, repo_type=kind, revision=revision, allow_patterns=files)
    return Path(folder).name


def hub_problem(error: Exception) -> str | None:
    """Returns in a few words why a repository of the Hub cannot be read; None for another error."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, HFValidationError):
        return "it is no Hub id (owner/name)"
    if isinstance(error, GatedRepoError):
        return "request access on its page, and log in (`hf auth login`)"
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such repository, or it is private (`hf auth login`)"
    if isinstance(error, RevisionNotFoundError):
        return "it has no such revision; name a branch, a tag or a whole commit"
    if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        return f"it is not in the cache, and {why}"
    return None
