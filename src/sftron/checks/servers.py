"""Servers of a model: vLLM or another OpenAI-like server over HTTP, or llama.cpp in this process.

Each returns its answer to a prompt, and the prompt's ids if it knows them.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch

from sftron.checks.parity import Ids, Prompt
from sftron.data.child_process import heard_signals
from sftron.errors import show
from sftron.models.quantization import dtype_name
from sftron.report.shown import on_one_line

_MAX_REPLY_BYTES = 16 * 2**20
_START_SECONDS = 600
"""How long `vllm serve` may take to become ready; vLLM gives its own engine as long."""
_END_SECONDS = 20
"""How long it may take to end before it is killed."""
_NUM_LAST_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAnswer:
    """A server's greedy answer. Ids are None if the server does not return them."""

    source: str
    """Where the prompt's ids, or their number, come from."""
    prompt_ids: Ids | None = None
    num_prompt_tokens: int | None = None
    text: str
    token_ids: Ids | None = None
    finish: str
    """The finish_reason: `stop` for a stop token, `length` for the limit."""


@contextmanager
def open_served(
    against: tuple[str, str],
    *,
    num_positions: int,
    max_positions: int,
    vocab_size: int,
    dtype: torch.dtype | None,
    served_model: str | None,
    timeout: float,
) -> Iterator[Server | GgufFile]:
    """Opens the server that `--against KIND WHERE` names. Raises ValueError with the remedy if that fails."""
    kind, where = against
    if kind == "gguf":
        yield GgufFile(Path(where), num_positions)
    elif kind != "vllm":
        raise ValueError(f"--against: unknown kind {kind}; give vllm or gguf")
    elif urllib.parse.urlsplit(where).scheme in ("http", "https"):
        yield Server(where, served_model, timeout, vocab_size)
    elif Path(where).is_dir():
        if served_model:
            raise ValueError(
                f"--served-model is {served_model}, but a folder's server has only one model; remove the option"
            )
        dtype = dtype or torch.float32
        # Twice the positions, because another template may make longer prompts.
        positions = str(min(2 * num_positions, max_positions))
        options = ["--dtype", dtype_name(dtype), "--enforce-eager", "--max-model-len", positions]
        with _vllm_serve(where, options) as url:
            yield Server(url, None, timeout, vocab_size, dtype)
    else:
        raise ValueError(
            f"--against vllm: {where} is neither a folder nor a URL; give one, such as http://localhost:8000"
        )


@contextmanager
def _vllm_serve(folder: str, options: list[str]) -> Iterator[str]:
    """Serves a folder on a free port of this machine. Ends the server and all its processes afterward, also on a
    signal.

    Yields the URL. Raises ValueError with the server's last lines if it does not become ready, and adds these lines to
    a ValueError of the block.
    """
    if (program := shutil.which("vllm")) is None:
        raise ValueError(
            f"--against vllm {folder}: serving a folder needs vLLM, but `vllm` is not on PATH; install it in its own "
            "environment and put that environment's bin folder on PATH, or start it elsewhere and give its URL"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "serve", folder, "--host", "127.0.0.1", "--port", str(port), *options]
    with tempfile.NamedTemporaryFile(prefix="vllm-serve-", suffix=".log") as log, _ended_by_signals():
        show(f"starting {shlex.join(command)}; its output is in {log.name}", to=sys.stderr)
        # A process group of its own, so that all its processes can be ended.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, url)
            yield url
        except ValueError as error:
            lines = Path(log.name).read_text(encoding="utf-8", errors="replace").splitlines()[-_NUM_LAST_LINES:]
            last = "The last lines of `vllm serve`:" if lines else "`vllm serve` printed nothing."
            raise ValueError("\n  ".join([f"{error}\n{last}", *lines])) from error
        finally:
            _end(process)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None:
        with suppress(OSError, HTTPException):
            _fetch(urllib.request.Request(f"{url}/health"), timeout=5)
            return
        if time.monotonic() > deadline:
            raise ValueError(
                f"`vllm serve` is not ready after {_START_SECONDS:g} s ({url}/health); start it yourself and give "
                "its URL"
            )
        time.sleep(0.2)
    raise ValueError(f"`vllm serve` ended with status {process.returncode} before it was ready")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Makes each signal that ends a run raise an exception in this process, as Ctrl-C does."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in heard_signals() if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its group, and kills what has not ended in time."""
    try:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(_END_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, because the request carries a key."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _fetch(request: urllib.request.Request, timeout: float) -> bytes:
    """Returns the content of a reply. Requests to this machine bypass the environment's proxy.

    Raises TimeoutError if the reply is not complete in time. A socket's timeout applies to each read, so a server that
    sends a byte per second would never exceed it. Therefore a thread reads, and is abandoned after the timeout.
    """
    is_here = urllib.parse.urlsplit(request.full_url).hostname in ("localhost", "127.0.0.1", "::1")
    opener = urllib.request.build_opener(_NoRedirects, *([urllib.request.ProxyHandler({})] if is_here else []))
    content: Future[bytes] = Future()

    def read() -> None:
        try:
            with opener.open(request, timeout=timeout) as response:
                content.set_result(response.read(_MAX_REPLY_BYTES))
        except Exception as error:
            content.set_exception(error)

    threading.Thread(target=read, daemon=True).start()
    return content.result(timeout)


class RefusedError(ValueError):
    """A server answered with an HTTP status other than 200."""

    def __init__(self, url: str, error: urllib.error.HTTPError) -> None:
        with error:
            reason = " ".join(error.read(300).decode(errors="replace").split())
        remedy = "look at its log" if error.code >= 500 else "correct the URL"
        if error.code in (401, 403):
            remedy = "set VLLM_API_KEY to its key"
        elif error.code == 429:
            remedy = "wait, or raise its limit of requests"
        elif error.code < 400:
            place = error.headers.get("Location", "")[:200]
            reason = f"redirects to {place!r}, which is not followed with VLLM_API_KEY"
        super().__init__(f"{url}: HTTP {error.code} ({reason}); {remedy}")
        self.status = error.code


class Server:
    """A server that speaks OpenAI's protocol, such as `vllm serve`. Its key, if any, is in $VLLM_API_KEY.

    vLLM returns the ids of prompt and answer (return_token_ids, and /tokenize in old versions); others return counts.

    Args:
        timeout: The seconds within which each reply must be complete.
        vocab_size: The number of ids of the expected model; a reply with any other id is refused.
        dtype: The type that it computes in, if known.
    """

    is_quantized = False
    kind, start_command = "an OpenAI-like server", "vllm serve FOLDER"

    def __init__(
        self, url: str, model: str | None, timeout: float, vocab_size: int, dtype: torch.dtype | None = None
    ) -> None:
        self.dtype = dtype
        self._url, self._timeout, self._vocab_size = url.rstrip("/").removesuffix("/v1"), timeout, vocab_size
        with self._as_expected("/v1/models"):
            names = [str(each["id"]) for each in self._request("/v1/models")["data"]]
        if not names:
            raise ValueError(f"{self._url}/v1/models lists no model; give the URL of {self.kind}")
        if model not in names if model else len(names) > 1:
            wanted = f"--served-model is {model}, but" if model else "give one of them as --served-model:"
            raise ValueError(f"{wanted} {self._url} serves {on_one_line(', '.join(names)[:1000])}")
        self._model = model or names[0]
        self.name = on_one_line(f"{self._model} at {self._url}")

    def answer(self, prompt: Prompt, max_new_tokens: int) -> ServedAnswer:
        request, path = {"model": self._model, "messages": list(prompt)}, "/v1/chat/completions"
        limits = {"temperature": 0, "max_tokens": max_new_tokens}
        try:
            reply = self._request(path, request | limits | {"return_token_ids": True})
        except RefusedError as error:
            if error.status not in (400, 422):
                raise
            reply = self._request(path, request | limits)  # some servers refuse unknown keys
        with self._as_expected(path):
            choice, source = reply["choices"][0], "prompt_token_ids"
            prompt_ids = self._ids(reply.get("prompt_token_ids"))
            if prompt_ids is None:
                prompt_ids, source = self._tokenize(request), "/tokenize"
            return ServedAnswer(
                source="usage.prompt_tokens" if prompt_ids is None else source,
                prompt_ids=prompt_ids,
                num_prompt_tokens=int(reply["usage"]["prompt_tokens"]),
                text=str(choice["message"]["content"] or ""),
                token_ids=self._ids(choice.get("token_ids")),
                finish=on_one_line(str(choice["finish_reason"])),
            )

    def _tokenize(self, request: dict[str, Any]) -> Ids | None:
        """Returns the ids of vLLM's /tokenize; None if the server lacks that path, or its path takes plain text."""
        try:
            return self._ids(self._request("/tokenize", request | {"add_generation_prompt": True}).get("tokens"))
        except RefusedError:
            return None

    def _request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Returns the JSON value of the server's reply. Raises ValueError with the remedy."""
        url, key = self._url + path, os.environ.get("VLLM_API_KEY", "").strip()
        if not key.isprintable():
            raise ValueError("VLLM_API_KEY holds a character that no request can carry, such as a line end; correct it")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            data = None if body is None else json.dumps(body).encode()
            content = _fetch(urllib.request.Request(url, data, headers), self._timeout)
        except urllib.error.HTTPError as error:
            raise RefusedError(url, error) from error
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            problem = f"no server answers ({reason}); start it (`{self.start_command}`), or correct the URL"
            if isinstance(reason, TimeoutError):
                problem = f"no reply in {self._timeout:g} s; raise --timeout, or look at its log"
            raise ValueError(f"{url}: {problem}") from error
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{url}: {content[:60]!r} is not JSON; check that this is {self.kind}") from error

    def _ids(self, value: Any) -> Ids | None:
        """Returns the ids of a reply; None if it has none. Raises TypeError if one is not in the vocabulary."""
        if not value:
            return None
        if not isinstance(value, list):
            raise TypeError(f"{value!r:.60} is not a list of ids")
        for token_id in value:
            if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                raise TypeError(f"{token_id!r:.60} is not an id from 0 to {self._vocab_size - 1}")
        return value

    @contextmanager
    def _as_expected(self, path: str) -> Iterator[None]:
        """Raises ValueError about a reply that no server of this kind would give."""
        try:
            yield
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            problem = f"the reply lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{self._url}{path}: {problem}; check that this is {self.kind} with this model") from error


_GGUF_TYPES = {"0": torch.float16, "1": torch.float16, "32": torch.bfloat16}
"""The types that llama.cpp computes in for F32, F16 and BF16 files, by general.file_type; other files are quantized.
Even for F32, it keeps keys and values in F16."""


class GgufFile:
    """A GGUF file in llama.cpp. llama-cpp-python's chat completion renders the template in the file."""

    def __init__(self, path: Path, num_positions: int) -> None:
        try:
            from llama_cpp import Llama  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ValueError(
                f"--against gguf: llama-cpp-python is missing ({error}); pip install 'sftron[gguf]', which compiles it "
                "with CMake and a C++ compiler"
            ) from error
        if not path.is_file():
            raise ValueError(f"--against gguf: {path} is not a file")
        try:
            self._llama = Llama(str(path), n_ctx=2 * num_positions, seed=0, verbose=False)
        except ValueError as error:
            raise ValueError(f"--against gguf: llama.cpp cannot load {path} ({error}); convert it again") from error
        metadata = self._llama.metadata
        if "tokenizer.chat_template" not in metadata:
            raise ValueError(f"{path} has no tokenizer.chat_template, so llama.cpp would guess one; convert it again")
        self.name = str(path)
        self.dtype: torch.dtype | None = _GGUF_TYPES.get(metadata.get("general.file_type", ""))
        self.is_quantized = self.dtype is None

    def answer(self, prompt: Prompt, max_new_tokens: int) -> ServedAnswer:
        reply: Any = self._llama.create_chat_completion(
            list(prompt), temperature=0.0, max_tokens=max_new_tokens, repeat_penalty=1.0
        )
        choice, number = reply["choices"][0], reply["usage"]["prompt_tokens"]
        return ServedAnswer(
            source="llama.cpp",
            prompt_ids=self._llama.input_ids[:number].tolist(),
            text=choice["message"]["content"] or "",
            finish=choice["finish_reason"],
        )
