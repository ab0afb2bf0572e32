"""Software that serves a model: vLLM or another OpenAI-like server over HTTP, or llama.cpp.

Each gives its answer to a prompt, with the ids that it made of the prompt if it gives them.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol

import torch

from sftron.verify.parity import Ids, Prompt

_MAX_REPLY_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAnswer:
    """A greedy answer of what serves the model. Ids are None if it does not give them."""

    source: str
    """Where the prompt's ids, or their number, come from."""
    prompt_ids: Ids | None = None
    num_prompt_tokens: int | None = None
    text: str
    token_ids: Ids | None = None
    finish: str
    """The finish_reason: `stop` for a stop token, `length` for the limit."""

    def without_stop(self, stop_ids: Collection[int]) -> ServedAnswer:
        """Returns the answer without the stop token at its end."""
        if self.finish == "stop" and self.token_ids and self.token_ids[-1] in stop_ids:
            return replace(self, token_ids=self.token_ids[:-1])
        return self


class Served(Protocol):
    """A served model.

    Attributes:
        dtype: The type that it computes in; None if it is not known.
    """

    name: str
    dtype: torch.dtype | None
    is_quantized: bool

    def answer(self, prompt: Prompt, max_new_tokens: int) -> ServedAnswer: ...


def open_served(against: tuple[str, str], *, num_positions: int, served_model: str | None, timeout: float) -> Served:
    """Opens what `--against KIND WHERE` names. Raises ValueError with the remedy if it cannot be used."""
    kind, where = against
    if kind == "gguf":
        return GgufFile(Path(where), num_positions)
    if kind != "vllm":
        raise ValueError(f"--against: {kind} is neither vllm nor gguf")
    if urllib.parse.urlsplit(where).scheme in ("http", "https"):
        return Server(where, served_model, timeout)
    remedy = f"start `vllm serve {where}` and give its URL" if Path(where).is_dir() else "give the server's URL"
    raise ValueError(f"--against vllm: {where} is no URL, such as http://localhost:8000; {remedy}")


class RefusedError(ValueError):
    """A server answered with an HTTP error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """A server that speaks OpenAI's protocol, such as `vllm serve`. $VLLM_API_KEY, if set, is its key.

    vLLM gives the ids of prompt and answer (return_token_ids, and /tokenize in old versions); others give their number.
    """

    dtype: torch.dtype | None = None
    is_quantized = False

    def __init__(self, url: str, model: str | None, timeout: float) -> None:
        self._url, self._timeout = url.rstrip("/").removesuffix("/v1"), timeout
        listed = self._ask("/v1/models").get("data")
        names = [each.get("id") for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        if not names:
            raise ValueError(f"{self._url}/v1/models lists no model; give the URL of an OpenAI-like server")
        if model not in names if model else len(names) > 1:
            wanted = f"--served-model is {model}, but" if model else "give one of them as --served-model:"
            raise ValueError(f"{wanted} {self._url} serves {', '.join(map(str, names))}")
        self._model = model or names[0]
        self.name = f"{self._model} at {self._url}"

    def answer(self, prompt: Prompt, max_new_tokens: int) -> ServedAnswer:
        asked = {"model": self._model, "messages": list(prompt)}
        limits = {"temperature": 0, "max_tokens": max_new_tokens}
        path = "/v1/chat/completions"
        try:
            reply = self._ask(path, asked | limits | {"return_token_ids": True})
        except RefusedError as error:
            if error.status not in (400, 422):
                raise
            reply = self._ask(path, asked | limits)  # some servers refuse keys that they do not know
        try:
            choice, number = reply["choices"][0], reply["usage"]["prompt_tokens"]
            text, finish = choice["message"]["content"] or "", choice["finish_reason"]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"{self._url}{path}: the reply lacks {error!s} (choices, message, usage); is it an OpenAI-like server?"
            ) from error
        prompt_ids, source = _ids(reply.get("prompt_token_ids")), "prompt_token_ids"
        if prompt_ids is None:
            prompt_ids, source = self._tokenize(asked), "/tokenize"
        return ServedAnswer(
            source="usage.prompt_tokens" if prompt_ids is None else source,
            prompt_ids=prompt_ids,
            num_prompt_tokens=number,
            text=str(text),
            token_ids=_ids(choice.get("token_ids")),
            finish=str(finish),
        )

    def _tokenize(self, asked: dict[str, Any]) -> Ids | None:
        """Returns the ids of vLLM's /tokenize; None if the server has no such path, or one for plain text."""
        try:
            return _ids(self._ask("/tokenize", asked | {"add_generation_prompt": True}).get("tokens"))
        except RefusedError:
            return None

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the JSON object that the server replies. Raises ValueError with the remedy."""
        url, key = self._url + path, os.environ.get("VLLM_API_KEY", "").strip()
        if not key.isprintable():
            raise ValueError("VLLM_API_KEY holds a character that no request can carry, such as a line end; correct it")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=self._timeout) as reply:
                content = reply.read(_MAX_REPLY_BYTES)
        except urllib.error.HTTPError as error:
            said = error.read(300).decode(errors="replace")
            is_key, remedy = error.code in (401, 403), "look at its log" if error.code >= 500 else "correct the URL"
            remedy = "set VLLM_API_KEY to its key" if is_key else remedy
            raise RefusedError(f"{url}: HTTP {error.code} ({' '.join(said.split())}); {remedy}", error.code) from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                problem = f"no reply in {self._timeout:g} s; raise --timeout, or look at its log"
            else:
                problem = f"no server answers ({reason}); start it (`vllm serve FOLDER`), or correct the URL"
            raise ValueError(f"{url}: {problem}") from error
        except ValueError as error:
            raise ValueError(f"{url}: cannot be asked ({error}); correct the URL, or VLLM_API_KEY") from error
        try:
            found = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{url}: {content[:60]!r} is not JSON; is it an OpenAI-like server?") from error
        if not isinstance(found, dict):
            raise ValueError(f"{url}: {content[:60]!r} is no JSON object; is it an OpenAI-like server?")
        return found


def _ids(value: object) -> Ids | None:
    """Returns the value if it is a list of ids that is not empty, else None."""
    return value if isinstance(value, list) and value and all(type(each) is int for each in value) else None


_GGUF_TYPES = {"0": torch.float16, "1": torch.float16, "32": torch.bfloat16}
"""The types in which llama.cpp computes with F32, F16 and BF16, by general.file_type; other files are quantized.

With F32 too, it keeps keys and values in F16."""


class GgufFile:
    """A GGUF file in llama.cpp, by llama-cpp-python's chat completion, which renders the template in the file."""

    def __init__(self, path: Path, num_positions: int) -> None:
        try:
            from llama_cpp import Llama  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ValueError(
                f"--against gguf: needs llama-cpp-python ({error}); pip install 'sftron[gguf]', which compiles it with "
                "CMake and a C++ compiler"
            ) from error
        if not path.is_file():
            raise ValueError(f"--against gguf: {path} is not a file")
        try:
            self._llama = Llama(str(path), n_ctx=2 * num_positions, seed=0, verbose=False)
        except ValueError as error:
            raise ValueError(f"--against gguf: llama.cpp cannot load {path} ({error}); convert it again") from error
        metadata = self._llama.metadata
        if "tokenizer.chat_template" not in metadata:
            raise ValueError(f"{path} has no tokenizer.chat_template, and llama.cpp would guess one; convert it again")
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
