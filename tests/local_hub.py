"""A Hub on the loopback: repositories of models and data sets with commits, branches and tags, over the Hub's protocol.

`LocalHub.files` has what a repository holds at each commit. It answers what huggingface_hub, transformers and the
datasets library ask to read a repository, and logs each request.
"""

import hashlib
import importlib
import io
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq


@dataclass
class Repository:
    """`commits`: the files of each commit, by path. `refs`: the commits of branches and tags."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def push(self, files: Mapping[str, bytes], *refs: str) -> str:
        """Commits these files alone, and moves main and `refs` there. Returns the commit."""
        content = hashlib.sha1(b"".join(name.encode() + data for name, data in sorted(files.items())))
        commit = hashlib.sha1(content.digest() + str(len(self.commits)).encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.refs |= dict.fromkeys(("main", *refs), commit)
        return commit

    def commit_of(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


@dataclass
class LocalHub:
    """`repositories`: by kind and name, as `datasets/openai/gsm8k`."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def repository(self, name: str) -> Repository:
        return self.repositories.setdefault(name, Repository())

    def answer(self, path: str, query: Mapping[str, list[str]], body: bytes) -> "Answer":
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts[0] == "api" and parts[1] in ("models", "datasets"):
            return self._describe("/".join(parts[1:4]), parts[4:], query, body)
        kind = parts.pop(0) if parts[0] == "datasets" else "models"
        if parts[2:3] == ["resolve"]:
            return self._file(f"{kind}/{parts[0]}/{parts[1]}", parts[3], "/".join(parts[4:]))
        return Answer(404, headers={"X-Error-Code": "RepoNotFound"})

    def _describe(self, name: str, rest: list[str], query: Mapping[str, list[str]], body: bytes) -> "Answer":
        if (repository := self.repositories.get(name)) is None:
            return Answer(404, headers={"X-Error-Code": "RepoNotFound"})
        what, revision, *folder = [*rest, "revision", "main"][:2] + rest[2:]
        if (commit := repository.commit_of(revision)) is None:
            return Answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        files, prefix = repository.commits[commit], "".join(f"{part}/" for part in folder)
        if what == "revision":
            siblings = [{"rfilename": path} for path in files]
            facts = {"id": name.partition("/")[2], "sha": commit, "private": False, "gated": False, "tags": []}
            return Answer.of_json({**facts, "siblings": siblings, "downloads": 0, "disabled": False})
        if what == "tree":
            inside = {path: data for path, data in files.items() if path.startswith(prefix)}
            if prefix and not inside:
                return Answer(404, headers={"X-Error-Code": "EntryNotFound"})
            is_deep = query.get("recursive", ["false"])[0].lower() == "true"
            flat = {path: data for path, data in inside.items() if is_deep or "/" not in path[len(prefix) :]}
            return Answer.of_json([*_folders(inside, prefix, is_deep), *(_entry(*each) for each in flat.items())])
        if what == "paths-info":
            asked = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
            folders = {each["path"]: each for each in _folders(files, "", is_deep=True)}
            found = [_entry(path, files[path]) if path in files else folders.get(path) for path in asked]
            return Answer.of_json([each for each in found if each])
        return Answer(404)

    def _file(self, name: str, revision: str, path: str) -> "Answer":
        repository = self.repositories.get(name, Repository())
        if (commit := repository.commit_of(revision)) is None:
            return Answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        if path not in repository.commits[commit]:
            return Answer(404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        data = repository.commits[commit][path]
        return Answer(200, data, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})


@dataclass(frozen=True)
class Answer:
    status: int
    data: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_json(cls, value: Any) -> "Answer":
        return cls(200, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _entry(path: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


def _folders(files: Mapping[str, bytes], prefix: str, is_deep: bool) -> list[dict[str, Any]]:
    names = {str(folder) for path in files for folder in Path(path).parents} - {"."}
    names = {name for name in names if name.startswith(prefix) and (is_deep or "/" not in name[len(prefix) :])}
    return [
        {"type": "directory", "path": name, "size": 0, "oid": hashlib.sha1(name.encode()).hexdigest()}
        for name in sorted(names)
    ]


@contextmanager
def serving(hub: LocalHub) -> Iterator[LocalHub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            url = urlsplit(self.path)
            answer = hub.answer(url.path, parse_qs(url.query), body)
            hub.log.append(f"{self.command} {unquote(url.path)} -> {answer.status}")
            data, status, headers = answer.data, answer.status, dict(answer.headers)
            if (asked := self.headers.get("range")) and status == 200:
                first, last = (int(each) if each else len(data) - 1 for each in asked.removeprefix("bytes=").split("-"))
                last = min(last, len(data) - 1)
                headers["Content-Range"], status = f"bytes {first}-{last}/{len(data)}", 206
                data = data[first : last + 1]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_POST = do_HEAD = _answer

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


# --- Repositories shaped like public ones ---


def parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return file.getvalue()


def data_set(
    configs: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], folder: str = "", default: str | None = None
) -> dict[str, bytes]:
    """Returns the files of a data set whose README declares its configurations.

    Args:
        configs: The rows, by configuration and split.
        folder: The folder of those of the configurations; openai/gsm8k has none, HuggingFaceTB/smoltalk `data/`.
        default: The configuration that its README makes the default one.
    """
    files, lines = {}, ["---", "license: mit", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", *["  default: true"] * (config == default), "  data_files:"]
        for split, rows in splits.items():
            lines += [f"  - split: {split}", f"    path: {folder}{config}/{split}-*"]
            files[f"{folder}{config}/{split}-00000-of-00001.parquet"] = parquet(rows)
    return {"README.md": "\n".join([*lines, "---", "# A data set", ""]).encode(), ".gitattributes": b"", **files}


GSM8K_CONFIGS = ("main", "socratic")
SMOLTALK_CONFIGS = (
    *("all", "smol-magpie-ultra", "smol-constraints", "smol-rewrite", "smol-summarize", "apigen-80k"),
    *("everyday-conversations", "explore-instruct-rewriting", "longalign", "metamathqa-50k", "numina-cot-100k"),
    *("openhermes-100k", "self-oss-instruct", "systemchats-30k"),
)


def gsm8k(answer: str, num_rows: int = 40) -> dict[str, bytes]:
    """The files of openai/gsm8k, whose answers end in `answer`."""

    def rows(config: str, split: str) -> list[dict[str, str]]:
        return [
            {"question": f"What is {n} in {config}?", "answer": f"It is {split} {n}.\n#### {answer}"}
            for n in range(num_rows if split == "train" else 7)
        ]

    return data_set({config: {split: rows(config, split) for split in ("train", "test")} for config in GSM8K_CONFIGS})


def smoltalk(num_rows: int = 20) -> dict[str, bytes]:
    def rows(config: str, split: str) -> list[dict[str, Any]]:
        turns = lambda n: [  # noqa: E731
            {"content": f"Say {n} for {config}.", "role": "user"},
            {"content": f"{split} {n}, said for {config}.", "role": "assistant"},
        ]
        return [{"messages": turns(n), "source": config} for n in range(num_rows if split == "train" else 5)]

    sets = {config: {split: rows(config, split) for split in ("train", "test")} for config in SMOLTALK_CONFIGS}
    return data_set(sets, "data/")


def folder_files(folder: Path) -> dict[str, bytes]:
    """The files of a model's folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- This process, as if it had been started with HF_ENDPOINT and HF_HOME ---


def point_at(url: str, cache: Path, *, offline: bool = False) -> None:
    """Sets what huggingface_hub and the datasets library read from the environment when they are imported."""
    for (module, name), value in _constants(url, cache, offline=offline).items():
        assert hasattr(importlib.import_module(module), name)
        setattr(importlib.import_module(module), name, value)


@contextmanager
def local_hub(cache: Path) -> Iterator[LocalHub]:
    """A Hub for the code in the block, whose cache is in `cache`."""
    with serving(LocalHub()) as hub:
        constants = _constants(hub.url, cache, offline=False)
        before = {key: getattr(importlib.import_module(key[0]), key[1]) for key in constants}
        point_at(hub.url, cache)
        try:
            yield hub
        finally:
            for (module, name), value in before.items():
                setattr(importlib.import_module(module), name, value)


def _constants(url: str, cache: Path, *, offline: bool) -> dict[tuple[str, str], Any]:
    hub, sets = "huggingface_hub.constants", "datasets.config"
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    return {
        (hub, "HF_HUB_OFFLINE"): offline,
        (hub, "ENDPOINT"): url,
        (hub, "HUGGINGFACE_CO_URL_TEMPLATE"): template,
        (hub, "HF_HUB_CACHE"): str(cache / "hub"),
        (hub, "HF_HUB_DISABLE_XET"): True,
        (sets, "HF_HUB_OFFLINE"): offline,
        (sets, "HF_ENDPOINT"): url,
        (sets, "HUB_DATASETS_URL"): url + "/datasets/{repo_id}/resolve/{revision}/{path}",
        (sets, "HF_DATASETS_CACHE"): str(cache / "datasets"),
        (sets, "DOWNLOADED_DATASETS_PATH"): str(cache / "downloads"),
        (sets, "HF_MODULES_CACHE"): str(cache / "modules"),
    }
