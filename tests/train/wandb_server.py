"""A wandb server on loopback that speaks as much of its language as a run needs, and fails as it is told to."""

import gzip
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Fault = Literal["none", "hangs", "errors", "closes"]


@dataclass
class Server:
    """fault: how it answers; only_once_begun: not before it has made the run.

    known_step: the last step of the run that it knows from earlier; None does not know the run.
    bodies: all that it was sent, in order. over: releases what hangs.
    """

    fault: Fault = "none"
    only_once_begun: bool = False
    known_step: int | None = None
    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    has_begun: bool = False
    exit_code: int | None = None
    is_preempting: bool = False
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def steps(self) -> list[int]:
        return [point["step"] for point in self.points if "loss" in point]

    def answer(self, path: str, body: bytes) -> Any:
        self.bodies.append(path.encode() + b" " + body)
        if path.startswith("/graphql"):
            asked = json.loads(body)
            return {"data": self._query(asked["query"], asked.get("variables") or {})}
        if path.endswith("/file_stream"):
            sent = json.loads(body)
            for line in sent.get("files", {}).get("wandb-history.jsonl", {}).get("content", []):
                self.points.append(json.loads(line))
            self.exit_code = sent.get("exitcode", self.exit_code)
            self.is_preempting |= sent.get("preempting", False)
        return {}

    def _query(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
        if "query RunResumeStatus" in query:
            return {"model": {**project, "bucket": self._known_run(variables)}}
        if "mutation UpsertBucket" in query:
            self.has_begun = True
            if variables.get("config"):
                self.config |= json.loads(variables["config"])
            run = {"id": "x", "name": variables["name"], "displayName": "n", "config": "{}", "historyLineCount": 0}
            return {"upsertBucket": {"bucket": {**run, "project": project}, "inserted": self.known_step is None}}
        if "mutation CreateRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}
        if "mutation CreateArtifact" in query:
            artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": {"id": "s", "latestArtifact": None}}
            return {"createArtifact": {"artifact": artifact}}
        if "artifactType" in query:
            return {"project": None}
        if "query Viewer" in query:
            return {"viewer": {"id": "v", "entity": "e", "username": "u", "flags": "{}", "teams": {"edges": []}}}
        return {}

    def _known_run(self, variables: dict[str, Any]) -> dict[str, Any] | None:
        if self.known_step is None:
            return None
        last = json.dumps([json.dumps({"_step": 40, "step": self.known_step, "_runtime": 9})])
        return {
            "id": "x",
            "name": variables["name"],
            "displayName": "n",
            "config": "{}",
            "summaryMetrics": json.dumps({"step": self.known_step, "_step": 40, "_runtime": 9}),
            "historyLineCount": 41,
            "historyTail": last,
            "eventsLineCount": 0,
            "eventsTail": "[]",
            "logLineCount": 0,
            "tags": [],
            "wandbConfig": '{"t": 1}',
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        served: Server = self.server.served  # pyright: ignore[reportAttributeAccessIssue]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if served.fault != "none" and (served.has_begun or not served.only_once_begun):
            self._fail(served)
            return
        data = json.dumps(served.answer(self.path, body)).encode()
        self._send(200, data)

    do_GET = do_PUT = do_POST  # noqa: N815

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _fail(self, served: Server) -> None:
        if served.fault == "hangs":
            served.over.wait(60)
        elif served.fault == "errors":
            self._send(500, b"{}")
        else:  # a reset, and not an end
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as http:
        http.daemon_threads = True
        http.block_on_close = False
        http.handle_error = lambda *_: None  # a client that is gone
        http.served = server  # pyright: ignore[reportAttributeAccessIssue]
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            http.shutdown()
            thread.join()


def refusing() -> str:
    """The address of a server that is not there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def wait_until(holds: Any, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)
