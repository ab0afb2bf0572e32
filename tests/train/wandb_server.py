"""A wandb server on loopback that speaks as much of its language as a run needs, or hangs."""

import gzip
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Server:
    """A server that `hangs` "always", "later" (with the points of a run) or "never".

    `bodies` are all requests, in order; `runs` are the variables of each mutation that made or changed a run. `over`
    releases requests that hang.
    """

    hangs: str = "never"
    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    is_preempting: bool = False
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def steps(self) -> list[int]:
        return [point["step"] for point in self.points if "loss" in point]

    def answer(self, path: str, body: bytes) -> Any:
        if self.hangs == "always" or (self.hangs == "later" and path.endswith("/file_stream")):
            self.over.wait(60)
        self.bodies.append(path.encode() + b" " + body)
        if path.startswith("/graphql"):
            request = json.loads(body)
            return {"data": self._query(request["query"], request.get("variables") or {})}
        if path.endswith("/file_stream"):
            sent = json.loads(body)
            files = {name: file["content"] for name, file in sent.get("files", {}).items()}
            self.points += map(json.loads, files.get("wandb-history.jsonl", []))
            for line in files.get("wandb-summary.json", []):
                self.summary = json.loads(line)
            self.exit_code = sent.get("exitcode", self.exit_code)
            self.is_preempting |= sent.get("preempting", False)
        return {}

    def _query(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
        if "query RunResumeStatus" in query:
            return {"model": {**project, "bucket": self._known_run() if self.runs else None}}
        if "mutation UpsertBucket" in query:
            self.runs.append(variables)
            self.config |= json.loads(variables.get("config") or "{}")
            run = {"id": "x", "name": variables["name"], "displayName": "n", "config": "{}", "historyLineCount": 0}
            return {"upsertBucket": {"bucket": {**run, "project": project}, "inserted": len(self.runs) == 1}}
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

    def _known_run(self) -> dict[str, Any]:
        last = json.dumps(self.points[-1] | {"_runtime": 9})
        history = {"historyLineCount": len(self.points), "historyTail": json.dumps([last]), "summaryMetrics": last}
        none = {"eventsLineCount": 0, "eventsTail": "[]", "logLineCount": 0, "tags": []}
        name = self.runs[-1]["name"]
        return {
            "id": "x",
            "name": name,
            "displayName": "n",
            "config": "{}",
            "wandbConfig": '{"t": 1}',
            **history,
            **none,
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
        data = json.dumps(served.answer(self.path, body)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST


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
    """Returns the address of a server that is not there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"
