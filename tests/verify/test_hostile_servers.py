"""A server that is compared gets the key alone, and none of its replies ends the command by a traceback or holds it."""

import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sftron.commands import check
from sftron.verify.parity import EXAMPLE_PROMPTS
from sftron.verify.servers import Server

KEY = "key-of-somebody-1234"
REDIRECTS = (301, 302, 303, 307, 308)
MODELS = {"data": [{"id": "tiny"}]}
VOCABULARY = 768
"""The number of ids of the model."""


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Prints nothing where a client gave up."""


@contextmanager
def listening(answer: Callable[[BaseHTTPRequestHandler], None], certificate: Path | None = None) -> Iterator[int]:
    """Lets `answer` answer every request. Yields the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer(self)

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    server = QuietServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


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


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A certificate for 127.0.0.1 that this process trusts; its key is beside it."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    path = tmp_path / "here.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=here -addext"
    command = [
        "openssl",
        *words.split(),
        "subjectAltName=IP:127.0.0.1",
        "-out",
        path,
        "-keyout",
        path.with_suffix(".key"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    return path


@pytest.mark.parametrize("is_https", [False, True])
def test_no_redirect_is_followed_and_the_key_never_comes_to_another_server(
    is_https: bool, refusal: Callable[..., str], request: pytest.FixtureRequest
) -> None:
    """With every status, of the first request and of a later one, to every kind of place, the own origin included."""
    own_scheme = "https" if is_https else "http"
    place, status, is_later, num_asked, stolen = "", 0, False, 0, []

    def ask(handler: BaseHTTPRequestHandler) -> None:
        nonlocal num_asked, is_later
        num_asked += 1
        assert handler.headers["Authorization"] == f"Bearer {KEY}"
        if handler.path == "/elsewhere":
            stolen.append("the own origin")
            send(handler, {})
        elif is_later and handler.path == "/v1/models":
            send(handler, MODELS)
        else:
            send(handler, {}, status, Location=place)
            is_later = not is_later

    def steal(handler: BaseHTTPRequestHandler) -> None:
        stolen.append(str(handler.headers["Authorization"]))
        send(handler, MODELS)

    with ExitStack() as stack:
        own = stack.enter_context(listening(ask, request.getfixturevalue("certificate") if is_https else None))
        other = stack.enter_context(listening(steal))
        places = {
            "another port": f"http://127.0.0.1:{other}/x",
            "another host": f"http://localhost:{other}/x",
            "the other scheme": f"{'http' if is_https else 'https'}://127.0.0.1:{other}/x",
            "no scheme": f"//127.0.0.1:{other}/x",
            "a file": "file:///etc/passwd",
            "the own origin": f"{own_scheme}://127.0.0.1:{own}/elsewhere",
            "a path": "/elsewhere",
        }
        for place in places.values():
            for status in REDIRECTS:
                for _ in ("the first request", "a later one"):
                    line = refusal(f"{own_scheme}://127.0.0.1:{own}")
                    assert f"HTTP {status} redirects to '{place}', and no redirect is followed" in line
    assert not stolen
    assert num_asked == len(places) * len(REDIRECTS) * 3  # one request where the first one is redirected, else two


def completion(text: object = "hi", finish: object = "stop", num: object = 3, **reply: Any) -> dict[str, Any]:
    choice = {"message": {"content": text}, "finish_reason": finish}
    choice |= {"token_ids": reply.pop("token_ids")} if "token_ids" in reply else {}
    return {"choices": [choice], "usage": {"prompt_tokens": num}, **reply}


NO_IDS = ["5", 1.0, 1.5, float("nan"), -1, VOCABULARY, 10**9, 10**30, True, None, [1], {"a": 1}]
NO_LISTS = ["12", 12, True, {"0": 1}]
NO_TEXTS = ["\ud800", "a\udfffb", 5, True, ["a"], {"a": 1}]
NO_WORDS = ["a\nPASS  all", "a\rb", "a\x1b[31m", "a\u202eb", "a\u2028b", "\ud800", "x" * 2000, 5, None, ["a"], {"a": 1}]
REPLIES = [
    *((completion(prompt_token_ids=[1, 2, each]), "prompt_token_ids[2]", each) for each in NO_IDS),
    *((completion(prompt_token_ids=[1], token_ids=[each]), "choices[0].token_ids[0]", each) for each in NO_IDS),
    *((completion(prompt_token_ids=each), "prompt_token_ids", each) for each in NO_LISTS),
    *((completion(prompt_token_ids=[1], token_ids=each), "choices[0].token_ids", each) for each in NO_LISTS),
    *((completion(each), "choices[0].message.content", each) for each in NO_TEXTS),
    *((completion(finish=each, prompt_token_ids=[1]), "choices[0].finish_reason", each) for each in NO_WORDS),
    *((completion(num=each), "usage.prompt_tokens", each) for each in ("3", 1.5, True, -1, None, [3])),
]
NAMES = [({"data": [{"id": "tiny"}, {"id": each}]}, "id of a model", each) for each in NO_WORDS]


def test_a_value_that_cannot_be_what_it_should_is_one_line_with_the_value_and_the_remedy(
    refusal: Callable[..., str],
) -> None:
    reply: tuple[dict[str, Any], dict[str, Any]] = (MODELS, {})

    def answer(handler: BaseHTTPRequestHandler) -> None:
        models, completed = reply
        if handler.path == "/v1/models":
            send(handler, models)
        elif handler.path == "/v1/chat/completions":
            send(handler, completed)
        else:  # /tokenize
            send(handler, {"tokens": ["a"]})

    with listening(answer) as port:
        for content, name, value in (*REPLIES, *NAMES):
            reply = (content, {}) if "data" in content else (MODELS, content)
            line = refusal(f"http://127.0.0.1:{port}")
            assert f"{name} is {value!r:.60}, not " in line, (name, value)
            assert line.endswith("; is it an OpenAI-like server of this model?")
        reply = (MODELS, completion())
        assert "/tokenize: tokens[0] is 'a'" in refusal(f"http://127.0.0.1:{port}")


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

    with listening(drip) as port:
        try:
            assert "no reply in 1 s; raise --timeout" in refusal(f"http://127.0.0.1:{port}", timeout=1)
        finally:
            is_over.set()


def test_the_command_ends_with_status_2_and_the_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    replies = {"/v1/models": MODELS, "/v1/chat/completions": completion(prompt_token_ids=[-1])}
    with listening(lambda handler: send(handler, replies[handler.path])) as port:
        assert check.main(["--model", str(home / "model"), "--against", "vllm", f"http://127.0.0.1:{port}"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("sftron check: ")
    assert f"prompt_token_ids[0] is -1, not an id from 0 to {VOCABULARY - 1}; is it" in printed.err
    assert printed.err.count("\n") == 1
