"""Revisions of repositories on the Hub: a branch or a tag may move; a commit never changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

COMMIT = re.compile(r"[0-9a-f]{40}")


def commit_of(repository: str, kind: Literal["model", "dataset"], revision: str | None) -> str:
    """Returns the commit that a branch, tag or commit of a repository names now; None is the branch main.

    If the Hub cannot be reached, returns the commit of the last successful request. Raises huggingface_hub's errors.
    """
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import snapshot_download

    # Unlike HfApi.repo_info, this records the answer in the cache, and finds it there without a network.
    files = ["README.md", "config.json", "tokenizer_config.json"]
    folder = snapshot_download(repository, repo_type=kind, revision=revision, allow_patterns=files)
    return Path(folder).name
