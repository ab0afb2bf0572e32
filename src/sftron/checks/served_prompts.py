"""The prompts that llama-server, vLLM, Ollama and the template in a GGUF file make of conversations."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from sftron.checks.served_causes import Ids, encode
from sftron.checks.servers import RefusedError, Server
from sftron.data.chat.template import TEMPLATE_ROLE_NAMES, ChatTemplate, TemplateError
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.formats.messages import REASONING_FIELDS
from sftron.data.types import Conversation

KINDS = ("llama-server", "vllm", "gguf", "ollama")


class PromptSource(Protocol):
    """What serves the model."""

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str:
        """Where its ids come from."""
        ...

    @property
    def stop_ids(self) -> set[int] | None:
        """The ids that end a generation; None if it reads those of the folder."""
        ...

    def prompt_ids(self, conversation: Conversation) -> Ids | None:
        """Returns the ids of the conversation and the generation prompt; None if it is refused."""
        ...


@runtime_checkable
class LogProbabilities(Protocol):
    """A server that gives the log-probabilities of ids that it is given."""

    def log_probabilities(self, ids: Ids, start: int) -> list[float]:
        """Returns the log-probability of each id from `start` on, given those before it, in nats."""
        ...


def open_prompts(kind: str, where: str, chat: ChatTokenizer, model: str | None, timeout: float) -> PromptSource:
    """Opens what `--against KIND WHERE` names. Raises ValueError with the remedy."""
    if kind == "gguf":
        return GgufTemplate(Path(where), chat)
    if kind not in _SERVERS:
        raise ValueError(f"--against: {kind} is none of {', '.join(KINDS)}")
    if not where.startswith(("http://", "https://")):
        raise ValueError(f"--against {kind}: {where} is no URL, such as http://localhost:8000; start the server first")
    return _SERVERS[kind](where, chat, model, timeout)


def openai_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Returns messages in OpenAI's form, in which the arguments of calls are JSON text."""
    messages = []
    for message in conversation.messages:
        role, fields = message.role_name or TEMPLATE_ROLE_NAMES[message.role], dict(message.fields)
        if calls := fields.get("tool_calls"):
            fields["tool_calls"] = [_openai_call(call, f"call_{n}") for n, call in enumerate(calls)]
        messages.append({"role": role, "content": message.content, **fields})
    return messages


def _openai_call(call: Mapping[str, Any], identifier: str) -> dict[str, Any]:
    function = dict(call.get("function") or call)
    if not isinstance(arguments := function.get("arguments"), str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {"id": identifier, "type": "function", **call, "function": function}


_OF_THE_REQUEST = (400, 422)
"""The statuses with which servers refuse a conversation; others are failures of the server."""


class _PromptServer(Server, ABC):
    stop_ids: set[int] | None = None
    source = ""

    def __init__(self, url: str, chat: ChatTokenizer, model: str | None, timeout: float) -> None:
        super().__init__(url, model, timeout, len(chat.tokenizer))
        self._chat = chat

    def prompt_ids(self, conversation: Conversation) -> Ids | None:
        try:
            return self._rendered(conversation)
        except RefusedError as error:
            if error.status in _OF_THE_REQUEST:
                return None
            if error.status < 500:
                raise
            raise ValueError(f"{error}. If only {conversation.location} fails, leave that row out") from error

    @abstractmethod
    def _rendered(self, conversation: Conversation) -> Ids:
        """Returns the ids that the server makes of a conversation. Raises RefusedError."""

    def _tokens(self, body: Mapping[str, Any]) -> Ids:
        with self._as_expected("/tokenize"):
            if (ids := self._ids(self._request("/tokenize", dict(body))["tokens"])) is None:
                raise TypeError("the reply has no tokens for a prompt")
            return ids

    def _body(self, conversation: Conversation) -> dict[str, Any]:
        tools = {"tools": [dict(tool) for tool in conversation.tools]} if conversation.tools else {}
        kwargs = {"chat_template_kwargs": dict(conversation.template_kwargs)} if conversation.template_kwargs else {}
        return {"model": self._model, "messages": openai_messages(conversation), **tools, **kwargs}


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{value!r:.60} is not the text of a prompt")
    return value


class VllmPrompts(_PromptServer):
    """vLLM, or SGLang, whose /tokenize takes the same request."""

    source = "/tokenize"

    def _rendered(self, conversation: Conversation) -> Ids:
        # Without add_generation_prompt, which is true by default in vLLM; SGLang then renders as for a chat completion.
        return self._tokens(self._body(conversation))

    def log_probabilities(self, ids: Ids, start: int) -> list[float]:
        path = "/v1/completions"
        request = {"model": self._model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        with self._as_expected(path):
            given = self._request(path, request)["choices"][0]["prompt_logprobs"]
            return [float(given[at][str(ids[at])]["logprob"]) for at in range(start, len(ids))]


_MOST_UNUSED_IDS = 65_536
"""More than the ids that a model embeds beyond its tokenizer's."""


class LlamaServerPrompts(_PromptServer):
    source = "/apply-template and /tokenize"
    kind, start_command = "llama-server", "llama-server --model FILE"

    def _rendered(self, conversation: Conversation) -> Ids:
        with self._as_expected("/apply-template"):
            text = _text(self._request("/apply-template", self._body(conversation))["prompt"])
        # As its own chat completion does.
        return self._tokens({"content": text, "add_special": True, "parse_special": True})

    def log_probabilities(self, ids: Ids, start: int) -> list[float]:
        with self._as_expected("/props"):
            context = int(self._request("/props")["default_generation_settings"]["n_ctx"])
        if len(ids) > context:
            raise ValueError(
                f"--weights: a turn ends at token {len(ids)}, and the context of {self._url} holds {context}; start it "
                f"with --ctx-size {len(ids)}, or compare shorter rows"
            )
        return [self._log_probability(ids[:at], ids[at]) for at in range(start, len(ids))]

    def _log_probability(self, before: Ids, token_id: int) -> float:
        """Asks for the likeliest next tokens, and for all of them if `token_id` is not one of these."""
        # A bias makes it answer with "a", as it gives nothing for an answer that ends in half a character. The
        # log-probabilities are those before the bias.
        bias = {"logit_bias": [[encode(self._chat, "a")[0], 1000]]}
        request = {"prompt": before, "n_predict": 1, "temperature": 0, "cache_prompt": True} | bias
        for number in (100, self._vocab_size + _MOST_UNUSED_IDS):
            with self._as_expected("/completion"):
                first = self._request("/completion", request | {"n_probs": number})["completion_probabilities"][0]
                for each in first["top_logprobs"]:
                    if each["id"] == token_id:
                        return float(each["logprob"])
        raise ValueError(f"{self._url}/completion: the reply lacks the log-probability of token {token_id}")


class OllamaPrompts(_PromptServer):
    """Ollama gives the text of a prompt, and no ids: the folder's tokenizer makes them.

    Ollama writes a BOS token before the text if its model says so, even where one is there.
    """

    source = "/api/chat, in the folder's tokenizer"
    kind, start_command = "Ollama", "ollama serve"

    def __init__(self, url: str, chat: ChatTokenizer, model: str | None, timeout: float) -> None:
        super().__init__(url, chat, model, timeout)
        with self._as_expected("/api/show"):
            self._bos = _written_bos(dict(self._request("/api/show", {"model": self._model})["model_info"]))

    def _rendered(self, conversation: Conversation) -> Ids:
        body = self._body(conversation)
        for given in body["messages"]:
            thought = next((given[key] for key in REASONING_FIELDS if given.get(key)), None)
            for key in REASONING_FIELDS:
                given.pop(key, None)
            given |= {"content": given["content"] or "", **({"thinking": thought} if thought else {})}
            for call in given.get("tool_calls") or ():
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        with self._as_expected("/api/chat"):
            reply = self._request("/api/chat", body | {"stream": False, "_debug_render_only": True})
            text = _text(reply["_debug_info"]["rendered_template"])
        return [*self._bos, *encode(self._chat, text)]


_SERVERS: Mapping[str, type[_PromptServer]] = {
    "llama-server": LlamaServerPrompts,
    "vllm": VllmPrompts,
    "ollama": OllamaPrompts,
}


class GgufTemplate:
    """The template and the vocabulary in a GGUF file. Jinja renders the template, not llama.cpp's own engine.

    It writes today's date, as llama.cpp does.

    Raises ValueError if the file cannot be read, or if its vocabulary is not the tokenizer's.
    """

    source = "the file's template in Jinja, and its vocabulary"

    def __init__(self, path: Path, chat: ChatTokenizer) -> None:
        metadata = _metadata_of(path)
        value = metadata.get
        if not (template := value("tokenizer.chat_template")):
            raise ValueError(f"{path} has no tokenizer.chat_template, and llama.cpp would guess one; convert it again")
        self.name, self._chat = str(path), chat
        of_tools = value("tokenizer.chat_template.tool_use") or template
        self._default, self._tool_use = (
            ChatTemplate(source, chat.tokenizer.special_tokens_map, None, str(path)) for source in (template, of_tools)
        )
        self._bos = _written_bos(metadata)
        names = ("eos", "eot", "eom")
        tokens = value("tokenizer.ggml.tokens") or []
        self.stop_ids = {token for name in names if (token := value(f"tokenizer.ggml.{name}_token_id")) is not None}
        self.stop_ids |= {number for number, token in enumerate(tokens) if token in _ENDS_BY_NAME}
        own = chat.tokenizer.get_vocab()
        wrong = next((token for token, number in own.items() if tokens[number : number + 1] != [token]), None)
        if wrong is not None:
            there = tokens[own[wrong]] if own[wrong] < len(tokens) else "nothing"
            raise ValueError(f"{path}: id {own[wrong]} is {there!r}, and {wrong!r} in the folder; convert it again")

    def prompt_ids(self, conversation: Conversation) -> Ids | None:
        template = self._tool_use if conversation.tools else self._default
        messages = template.plain_messages(conversation.messages)
        try:
            tools = [dict(tool) for tool in conversation.tools]
            text = template.render_changed(messages, tools, variables=conversation.template_kwargs)
        except TemplateError:
            return None
        ids = encode(self._chat, text)
        return ids if self._bos and ids[:1] == self._bos else [*self._bos, *ids]


def _metadata_of(path: Path) -> dict[str, Any]:
    """Returns what a GGUF file says of its template and vocabulary. Raises ValueError."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError(f"--against gguf --data: needs the package gguf ({error}); pip install gguf") from error
    if not path.is_file():
        raise ValueError(f"--against gguf: {path} is not a file")
    try:
        fields = GGUFReader(path).fields
        return {key: fields[key].contents() for key in fields if key.startswith("tokenizer.")}
    except Exception as error:  # gguf raises exceptions of any kind for a damaged file
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"--against gguf: {path} cannot be read ({problem}); convert or copy it again") from error


def _written_bos(metadata: Mapping[str, Any]) -> Ids:
    """Returns the BOS token that is written before a prompt, if one is, given the metadata of a GGUF file."""
    is_written = metadata.get("tokenizer.ggml.add_bos_token")
    if is_written is None:  # llama.cpp's rule
        pre_tokenizer = metadata.get("tokenizer.ggml.pre")
        is_written = metadata.get("tokenizer.ggml.model") == "llama" or pre_tokenizer in ("llama3", "llama-bpe")
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return [bos] if is_written and isinstance(bos, int) else []


_ENDS_BY_NAME = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>", "<end_of_turn>"}
)
"""Tokens that llama.cpp takes for stops by their names, whatever the file states."""
