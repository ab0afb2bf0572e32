"""Safety checks of a model's or tokenizer's folder, whose origin is not trusted, before it is read."""

from __future__ import annotations

import stat
from pathlib import Path

from sftron.regular_file import read_regular

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates",
)
TERMS = ("LICENSE*", "NOTICE*", "USE_POLICY*")
"""Patterns of the files with the license terms of the model."""

MAX_JSON_BYTES = 64 * 2**20
"""The largest known file, the index of a model with 90,000 tensors, has 9 MB."""
MAX_FILE_BYTES = 512 * 2**20
"""The largest known vocabulary has 35 MB."""
_MAX_TEMPLATE_BYTES = 2**20
_SMALL = (
    *TERMS,
    "README.md",
    "config.json",
    "generation_config.json",
    "*_config.json",
    "special_tokens_map.json",
    "*.index.json",
)


def check_files(folder: Path) -> None:
    """Raises ValueError if a file is implausibly large or not a regular file, or is a link out of the folder."""
    for path in _matching(folder, ("*.json", "*.safetensors", *TOKENIZER_FILES, *TERMS)):
        require_inside(folder, path)
    for path in _matching(folder, ("*.json", "*.txt", "*.jinja", "*.model", "README.md", *TOKENIZER_FILES, *TERMS)):
        if path.is_dir():
            continue
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path}: is no regular file; take the model from where it was published")
        limit = MAX_JSON_BYTES if any(path.match(pattern) for pattern in _SMALL) else MAX_FILE_BYTES
        limit = _MAX_TEMPLATE_BYTES if path.suffix == ".jinja" else limit
        if status.st_size > limit:
            raise ValueError(f"{path}: has {status.st_size:,} bytes, and no such file has more than {limit:,}")


def require_inside(folder: Path, path: Path) -> None:
    """Raises ValueError if a file is a link out of the folder, unless it is in the Hub's own cache. The content would
    be copied into an export, and might be a private key or the weights of a private model."""
    target = path.resolve()
    in_cache = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    if not in_cache and not target.is_relative_to(folder.resolve()):
        raise ValueError(f"{path}: is a link to {target}, outside the folder, and would be exported; copy the file")


def read_inside(folder: Path, path: Path, max_bytes: int) -> bytes:
    """Returns the content of a file.

    Raises:
        ValueError: The file is missing, too large, or a link out of the folder.
    """
    require_inside(folder, path)
    try:
        return read_regular(path, max_bytes)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}). Is this the folder of a model?") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """Returns the files that match, including all files in matching folders and excluding broken links."""
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    inner = {path for each in found if each.is_dir() for path in each.rglob("*")}
    return sorted(path for path in found | inner if path.exists())
