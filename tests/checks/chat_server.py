"""A server that speaks vLLM's protocol for the tests: it renders, generates and decodes with transformers.

It shares no code with sftron.
"""

import datetime
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass
class Behavior:
    """What the server does; by default, what vLLM does."""

    folder: Path
    template: str | None = None
    add_generation_prompt: bool = True
    adds_bos: bool = False
    stops: bool = True
    gives_ids: bool = True
    has_tokenize: bool = True
    refuses_unknown_keys: bool = False
    wrong_at_step: int | None = None
    limit: int = 1000
    """The most tokens of an answer."""
    status: int = 200
    body: bytes | None = None
    seconds: float = 0.0
    models: tuple[str, ...] = ("tiny",)


def serve(behavior: Behavior) -> type[BaseHTTPRequestHandler]:
    tokenizer: Any = AutoTokenizer.from_pretrained(behavior.folder)
    model: Any = AutoModelForCausalLM.from_pretrained(behavior.folder, dtype=torch.float32)

    def prompt_ids(messages: list[dict[str, str]]) -> list[int]:
        options = {"add_generation_prompt": behavior.add_generation_prompt, "chat_template": behavior.template}
        ids = tokenizer.apply_chat_template(messages, return_dict=False, **options)
        return [tokenizer.bos_token_id] * behavior.adds_bos + ids

    def change(_: Any, scores: torch.Tensor, state: list[int]) -> torch.Tensor:
        state.append(0)
        if len(state) - 1 == behavior.wrong_at_step:
            scores = scores.scatter(1, scores.argmax(1, keepdim=True), -torch.inf)
        return scores

    def complete(request: dict[str, Any]) -> dict[str, Any]:
        ids, state = prompt_ids(request["messages"]), []
        output = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=bool(request["temperature"]),
            max_new_tokens=min(request["max_tokens"], behavior.limit),
            eos_token_id=tokenizer.eos_token_id if behavior.stops else -1,
            pad_token_id=0,
            logits_processor=[lambda ids, scores: change(ids, scores, state)],
        )
        new = output[0, len(ids) :].tolist()
        is_stopped = behavior.stops and new[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(new, skip_special_tokens=True)
        choice = {"message": {"content": text}, "finish_reason": "stop" if is_stopped else "length"}
        reply = {"choices": [choice], "usage": {"prompt_tokens": len(ids)}}
        if behavior.gives_ids and request.get("return_token_ids"):
            reply["prompt_token_ids"], choice["token_ids"] = ids, new
        return reply

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"data": [{"id": name} for name in behavior.models]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert request["model"] in behavior.models
            if behavior.refuses_unknown_keys and "return_token_ids" in request:
                self.reply({"error": "return_token_ids"}, 400)
            elif self.path == "/v1/chat/completions":
                self.reply(complete(request))
            elif self.path == "/tokenize" and behavior.has_tokenize:
                self.reply({"tokens": prompt_ids(request["messages"])})
            else:
                self.reply({"error": "no such path"}, 404)

        def reply(self, content: dict[str, Any], status: int = 200) -> None:
            time.sleep(behavior.seconds)
            self.send_response(behavior.status if behavior.status != 200 else status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode() if behavior.body is None else behavior.body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@dataclass
class Rendering:
    """How a server makes a prompt of messages in OpenAI's form, without a model; by default, as vLLM does."""

    folder: Path
    tokenizer: Any = None
    change_message: Callable[[dict[str, Any]], dict[str, Any]] = dict
    change_messages: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list
    change_tools: Callable[[list[Any]], Any] = list
    json_options: dict[str, Any] = field(default_factory=dict)
    change_json: Callable[[str], str] = str
    template: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    date: datetime.date | None = None
    change_ids: Callable[[list[int]], list[int]] = list
    parses_arguments: bool = True
    parses_special: bool = True
    model_info: dict[str, Any] = field(default_factory=dict)
    """What Ollama says of the model."""
    status: int = 200
    """The status of replies to POST."""
    reply: dict[str, Any] | None = None
    """What it replies in place of a prompt."""

    def __post_init__(self) -> None:
        self.tokenizer = self.tokenizer or AutoTokenizer.from_pretrained(self.folder)

        def tojson(value: Any, indent: int | None = None) -> str:
            return self.change_json(json.dumps(value, **{"ensure_ascii": False, "indent": indent, **self.json_options}))

        def refuse(problem: str) -> None:
            raise ValueError(problem)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = tojson
        day = self.date or datetime.date.today()
        environment.globals |= {"raise_exception": refuse, "strftime_now": day.strftime}
        self._template = environment.from_string(self.template or self.tokenizer.chat_template)

    def text(self, messages: list[dict[str, Any]], tools: list[Any]) -> str:
        given = []
        for message in self.change_messages(messages):
            changed = self.change_message(json.loads(json.dumps(message)))
            for call in changed.get("tool_calls") or ():
                if self.parses_arguments:
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            given.append({**changed, "content": changed.get("content") or ""})
        options = {"add_generation_prompt": True, **self.tokenizer.special_tokens_map, **self.variables}
        return self._template.render(messages=given, tools=self.change_tools(tools) or None, **options)

    def ids(self, text: str) -> list[int]:
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = not self.parses_special
        return self.change_ids(backend.encode(text, add_special_tokens=False).ids)


def serve_prompts(rendering: Rendering) -> type[BaseHTTPRequestHandler]:
    """The paths of vLLM, llama-server and Ollama that give prompts, written by hand: no server was compared."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/api/show":
                return self.reply({"model_info": rendering.model_info})
            if rendering.reply is not None:
                return self.reply(rendering.reply, rendering.status)
            if "content" in request:
                return self.reply({"tokens": rendering.ids(request["content"])})
            for message in request["messages"]:
                if "thinking" in message:  # Ollama's name
                    message["reasoning_content"] = message.pop("thinking")
                for call in message.get("tool_calls") or ():
                    if not isinstance(arguments := call["function"]["arguments"], str):
                        call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
            text = rendering.text(request["messages"], request.get("tools", []))
            if self.path == "/apply-template":
                return self.reply({"prompt": text})
            if self.path == "/api/chat" and request["_debug_render_only"]:
                return self.reply({"_debug_info": {"rendered_template": text}})
            return self.reply({"tokens": rendering.ids(text)})

        def reply(self, content: dict[str, Any], status: int = 200) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_: object) -> None:
            pass

    return Handler


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Prints nothing where a client gave up."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Lets the handler answer on a free port of this machine. Yields the URL."""
    server = QuietServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":  # as `vllm serve FOLDER --host 127.0.0.1 --port PORT ...`
    folder, port = Path(sys.argv[2]), int(sys.argv[sys.argv.index("--port") + 1])
    QuietServer(("127.0.0.1", port), serve(Behavior(folder, models=(str(folder),)))).serve_forever()
