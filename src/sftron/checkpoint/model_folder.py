"""The folder of a model in Hugging Face format: where it is, its files, and its config.json.

The origin of a folder is not trusted: files are bounded in size, and none is a pipe or a link out of the folder.
"""

import contextlib
import json
import math
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sftron.hub_revision import commit_of
from sftron.models.architecture import LlamaConfig
from sftron.models.wrappers import text_names, with_stored_head, wrapper_of
from sftron.regular_file import read_regular, where_missing

_SMALL_FILES = ["*.json", "*.jinja", "tokenizer*", "LICENSE*", "README.md"]
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("*.tiktoken", "chat_template*", "additional_chat_templates"),
)
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""The files of multimodal models that describe their inputs."""
TERMS = ("LICENSE*", "NOTICE*", "USE_POLICY*")
"""Patterns of the files with the license terms of the model."""

INDEX = "model.safetensors.index.json"
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
_NUM_ROWS_COMPARED = 64
"""The number of rows to compare to tell an untied head from the embeddings."""

MAX_JSON_BYTES = 64 * 2**20
"""The largest known file, the index of a model with 90,000 tensors, has 9 MB."""
_MAX_FILE_BYTES = 512 * 2**20
"""The largest known vocabulary has 35 MB."""
_LIMITS = {
    "*.safetensors": math.inf,
    "*.jinja": 2**20,
    **dict.fromkeys(("*config.json", "*.index.json", "special_tokens_map.json", "README.md", *TERMS), MAX_JSON_BYTES),
    "*": _MAX_FILE_BYTES,
}
"""The maximum size of a file, by the first pattern that matches its name."""


def local_folder(path: str, revision: str | None = None, *, with_weights: bool = True, download: bool = True) -> Path:
    """Returns the local folder of a path or a Hub id; for a Hub id, it is the folder in the Hub's cache.

    Args:
        revision: The branch, tag or commit of a Hub id; None is the branch main.
        with_weights: Whether the weights are needed, or only the tokenizer and the small files.
        download: Whether to download files that are not in the cache.

    Raises:
        ValueError: Neither the folder nor a Hub model of this name exists.
    """
    if (folder := Path(path)).is_dir():
        if revision is not None:
            raise ValueError(f"{path} is a local folder, so it has no revision {revision}; remove the key revision")
        return folder
    from huggingface_hub import snapshot_download

    patterns = [*_SMALL_FILES, "*.safetensors"] if with_weights else _SMALL_FILES
    # gpt-oss has a second copy of its weights in the folder `original`.
    options: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": ["*/*.safetensors"]}
    with _refused(path, revision, with_weights):
        return Path(snapshot_download(path, revision=revision, **options, local_files_only=not download))


def model_commit(path: str, revision: str | None = None, *, with_weights: bool) -> str:
    """Returns the commit that a revision of a Hub model names now. Raises ValueError as `local_folder`."""
    with _refused(path, revision, with_weights):
        return commit_of(path, "model", revision)


@contextlib.contextmanager
def _refused(path: str, revision: str | None, with_weights: bool) -> Iterator[None]:
    """Raises ValueError in place of any error of the Hub."""
    what = f"model.path: {path}" if with_weights else f"no tokenizer can be loaded from {path}: it"
    if Path(path).exists():
        raise ValueError(f"{what} is a file, not a model folder")
    try:
        yield
    except Exception as error:  # huggingface_hub raises many types, some from its HTTP library
        at = "" if revision is None else f" (revision {revision})"
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{what} is not a local folder{where_missing(path)}, and it cannot be downloaded from the Hub{at}: {reason}"
        ) from error


def check_files(folder: Path) -> None:
    """Raises ValueError if a file is implausibly large or not a regular file, or is a link out of the folder, or if the
    folder is a run directory."""
    _require_no_run(folder)
    patterns = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", "README.md", *TOKENIZER_FILES, *TERMS)
    for path in _matching(folder, patterns):
        if path.is_dir() or not path.exists():
            continue
        require_inside(folder, path)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path}: is not a regular file; download the model from its publisher")
        limit = next(limit for pattern, limit in _LIMITS.items() if path.match(pattern))
        if status.st_size > limit:
            raise ValueError(f"{path}: has {status.st_size:,} bytes, but such a file has at most {limit:,}")


def is_run_directory(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "lock").is_file() and not (folder / "config.json").exists()


def _require_no_run(folder: Path) -> None:
    if is_run_directory(folder):
        raise ValueError(
            f"{folder}: is a run directory; give its export {folder / 'latest'}, or convert a checkpoint in "
            f"{folder / 'checkpoints'} (`sftron convert`)"
        )


def require_inside(folder: Path, path: Path) -> None:
    """Raises ValueError if a file is a link out of the folder, unless it is in the Hub's own cache. The content would
    be copied into an export, and might be a private key or the weights of a private model."""
    target = path.resolve()
    in_cache = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    if not in_cache and not target.is_relative_to(folder.resolve()):
        raise ValueError(f"{path}: is a link to {target}, outside the folder, and would be exported; copy the file")


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Returns the paths that match, and all that is in matching folders."""
    matching = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(matching | {path for parent in matching if parent.is_dir() for path in parent.rglob("*")})


def read_files(folder: Path, patterns: Iterable[str]) -> dict[str, bytes]:
    """Returns the contents of the files that match, by their path in the folder. Raises ValueError."""
    paths = [path for path in _matching(folder, patterns) if not path.is_dir()]
    return {path.relative_to(folder).as_posix(): _read_inside(folder, path, _MAX_FILE_BYTES) for path in paths}


def _read_inside(folder: Path, path: Path, max_bytes: int) -> bytes:
    require_inside(folder, path)
    try:
        return read_regular(path, max_bytes)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}). Give a model folder.") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file.

    Raises:
        ValueError: The file is missing, a link out of its folder, too large, or not a JSON object. The message names
            the file.
    """
    data = _read_inside(path.parent, path, MAX_JSON_BYTES)
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a JSON {type(content).__name__}, not an object")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def stop_ids_of(folder: Path) -> dict[int, None]:
    """Returns the ids that end a generation of the model in `folder`, in the order of its files.

    Raises:
        ValueError: eos_token_id is neither an id nor a list of ids; the message has the name of the file.
    """
    stops: dict[int, None] = {}
    for path in (folder / "generation_config.json", folder / "config.json"):
        value = read_json(path).get("eos_token_id") if path.exists() else None
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if wrong := [token_id for token_id in ids if type(token_id) is not int or token_id < 0]:
            raise ValueError(f"{path}: eos_token_id: {wrong[0]!r} is neither a token id nor a list of token ids")
        stops |= dict.fromkeys(ids)
    return stops


def read_config(folder: Path) -> LlamaConfig:
    """Returns the architecture of the model in `folder`.

    Raises:
        ValueError: The config has unsupported values; the message lists all of them. Or the folder is a run directory.
    """
    _require_no_run(folder)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").exists():
        raise ValueError(
            f"{folder}: is an adapter, not a whole model; merge it into its base (`sftron convert`), or "
            "train it further (lora.adapter)"
        )
    config = read_json(folder / "config.json")
    try:
        if wrapper_of(config) is not None and (is_equal := _stored_head_is_equal(folder, config)) is not None:
            config = with_stored_head(config, is_equal)
        return LlamaConfig.from_hf(config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _stored_head_is_equal(folder: Path, config: Mapping[str, Any]) -> bool | None:
    """Returns whether the stored head begins like the embeddings; None if the folder lacks either.

    Loading the weights refuses broken files, and a tied head that differs only in later rows.
    """
    rows = []
    try:
        index = folder / INDEX
        if (folder / "model.safetensors").is_file():
            with safe_open(folder / "model.safetensors", framework="pt") as file:
                file_of = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            file_of = read_json(index)["weight_map"] if index.is_file() else {}
        stored, _ = text_names(file_of, config)
        for name in (HEAD, EMBEDDINGS):
            path = folder / file_of[stored[name]]
            require_inside(folder, path)
            with safe_open(path, framework="pt") as file:
                rows.append(file.get_slice(stored[name])[:_NUM_ROWS_COMPARED].float())
    except (SafetensorError, OSError, KeyError):
        return None
    return rows[0].equal(rows[1])
