"""A server that is compared gets the key alone, and none of its replies ends the command by a traceback or holds it."""

import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from sftron.checks.parity import EXAMPLE_PROMPTS
from sftron.checks.servers import Server
from tests.checks.chat_server import serving

KEY = "key-of-somebody-1234"
REDIRECTS = (301, 302, 303, 307, 308)
MODELS = {"data": [{"id": "tiny"}]}
VOCABULARY = 768
"""The number of ids of the model."""


def listening(answer: Callable[[BaseHTTPRequestHandler], None]) -> AbstractContextManager[str]:
    """Lets `answer` answer every request. Yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer(self)

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    return serving(Handler)


def send(request: BaseHTTPRequestHandler, content: object, status: int = 200, **headers: str) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(json.dumps(content).encode())


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Asks a server for the answer to a prompt, and returns the one line with which it is refused."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setenv("no_proxy", "*")

    def ask(url: str, timeout: float = 20.0) -> str:
        with pytest.raises(ValueError) as refused:  # noqa: PT011  the tests compare the message
            Server(url, None, timeout, VOCABULARY).answer(EXAMPLE_PROMPTS[0], 4)
        line = str(refused.value)
        assert "\n" not in line
        assert KEY not in line
        return line

    return ask


def test_no_redirect_is_followed_and_the_key_never_comes_to_another_server(refusal: Callable[..., str]) -> None:
    place, status, stolen = "", 0, []

    def steal(handler: BaseHTTPRequestHandler) -> None:
        stolen.append(str(handler.headers["Authorization"]))
        send(handler, MODELS)

    def ask(handler: BaseHTTPRequestHandler) -> None:
        assert handler.headers["Authorization"] == f"Bearer {KEY}"
        if handler.path == "/elsewhere":
            steal(handler)
        send(handler, {}, status, Location=place)

    with listening(ask) as own, listening(steal) as other:
        for place in (f"{other}/x", f"{other}/x".removeprefix("http:"), "file:///etc/passwd", "/elsewhere"):
            for status in REDIRECTS:
                line = refusal(own)
                assert f"HTTP {status} (redirects to '{place}', which is not followed" in line
    assert not stolen


def completion(text: object = "hi", finish: object = "stop", num: object = 3, **reply: Any) -> dict[str, Any]:
    choice = {"message": {"content": text}, "finish_reason": finish}
    choice |= {"token_ids": reply.pop("token_ids")} if "token_ids" in reply else {}
    return {"choices": [choice], "usage": {"prompt_tokens": num}, **reply}


NO_IDS = ["5", 1.0, float("nan"), -1, VOCABULARY, 10**30, True, None, [1], {"a": 1}]
REPLIES = [
    *(completion(prompt_token_ids=[1, 2, each]) for each in NO_IDS),
    *(completion(prompt_token_ids=[1], token_ids=[each]) for each in NO_IDS),
    *(completion(prompt_token_ids=each) for each in ("12", 12, True, {"0": 1})),
    *(completion(prompt_token_ids=[1], num=each) for each in (None, [3])),
    *({**completion(), **each} for each in ({"choices": []}, {"choices": [5]}, {"usage": None})),
    {},
    [1],
]


def test_an_invalid_value_is_refused_in_one_line_with_the_value_and_the_remedy(
    refusal: Callable[..., str],
) -> None:
    reply: tuple[Any, Any] = (MODELS, {})

    def answer(handler: BaseHTTPRequestHandler) -> None:
        models, completed = reply
        if handler.path == "/v1/models":
            send(handler, models)
        else:
            send(handler, completed if handler.path == "/v1/chat/completions" else {"tokens": ["a"]})

    with listening(answer) as url:
        for models, completed in ((MODELS, each) for each in REPLIES):
            reply = (models, completed)
            line = refusal(url)
            assert line.endswith("; check that this is an OpenAI-like server with this model"), completed
        for models in ({"data": [5]}, {"data": [{}]}, [], {}):
            reply = (models, {})
            assert "check that this is an OpenAI-like server with this model" in refusal(url)
        reply = (MODELS, completion())
        assert "'a' is not an id from 0 to" in refusal(url)


def test_a_name_of_a_server_can_imitate_no_line_of_the_report(refusal: Callable[..., str]) -> None:
    with listening(lambda handler: send(handler, {"data": [{"id": "a\nPASS  all\x1b[31m"}, {"id": "b"}]})) as url:
        assert "\x1b" not in refusal(url)


@pytest.mark.parametrize("is_of_the_headers", [False, True])
def test_a_reply_that_drips_past_its_time_is_refused(is_of_the_headers: bool, refusal: Callable[..., str]) -> None:
    """Each byte comes in time, and the whole reply does not."""
    is_over = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        if not is_of_the_headers:
            handler.send_response(200)
            handler.end_headers()
        for _ in range(100):
            if is_over.wait(0.1):
                return
            handler.wfile.write(b" " if not is_of_the_headers else b"HTTP/1.1 100 Continue\r\n\r\n")
        send(handler, MODELS)

    with listening(drip) as url:
        try:
            assert "no reply in 1 s; raise --timeout" in refusal(url, timeout=1)
        finally:
            is_over.set()
