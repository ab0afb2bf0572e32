"""A server on the loopback that speaks as much of the Hub's protocol as a push of files needs, over git-LFS."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "t" * 34
OWNER = "me"


@dataclass
class HubServer:
    """What a server has been told. `fails` requests for a commit are refused, and with `hangs` none is answered."""

    fails: int = 0
    hangs: bool = False
    url: str = ""
    log: list[str] = field(default_factory=list)
    """A line for each request: method, path and status."""
    is_private: dict[str, bool] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    """The files in git-LFS, by their sha256."""
    files: dict[str, bytes] = field(default_factory=dict)
    """The committed files, by repository and path."""
    messages: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    end: threading.Event = field(default_factory=threading.Event)

    def get(self, path: str) -> tuple[int, Any]:
        return 404, {"error": f"unknown: GET {path}"}

    def post(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            given = json.loads(body)
            if given.get("organization") not in (None, "our-team", OWNER):
                return 403, {"error": "you have no rights there"}
            name = f"{given.get('organization') or OWNER}/{given['name']}"
            if name in self.is_private:
                return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
            self.is_private[name] = given.get("private", given.get("visibility") == "private")
            return 200, {"url": f"{self.url}/{name}", "name": name}
        parts = path.strip("/").split("/")
        if path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            modes = ["lfs" if each["path"].endswith(".safetensors") else "regular" for each in files]
            answers = zip(files, modes, strict=True)
            return 200, {
                "files": [{"path": each["path"], "uploadMode": mode, "shouldIgnore": False} for each, mode in answers]
            }
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.url}/lfs/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if path.endswith("/commit/main"):
            if self.fails:
                self.fails -= 1
                return 403, {"error": "the disk of this Hub is full"}
            return 200, self._commit("/".join(parts[2:4]), body)
        return 404, {"error": f"unknown: POST {path}"}

    def put(self, path: str, body: bytes) -> tuple[int, Any]:
        digest = path.rpartition("/")[2]
        if hashlib.sha256(body).hexdigest() != digest:
            return 400, {"error": "other bytes than those of the digest"}
        self.objects[digest] = body
        return 200, {}

    def _commit(self, repository: str, body: bytes) -> dict[str, Any]:
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.messages.append(value["summary"])
            elif entry["key"] == "file":
                self.files[f"{repository}/{value['path']}"] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.files[f"{repository}/{value['path']}"] = self.objects[value["oid"]]
        url = f"{self.url}/{repository}/commit/{len(self.messages):040}"
        return {"commitUrl": url, "commitOid": f"{len(self.messages):040}", "success": True, "hookOutput": ""}


@contextmanager
def serving(hub: HubServer) -> Iterator[HubServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self._body()
            hub.bodies.append(body)
            path = self.path.partition("?")[0]
            if hub.hangs:
                hub.log.append(f"{self.command} {path} -> no answer")
                hub.end.wait()
                self.close_connection = True
                return
            if not path.startswith("/lfs/") and self.headers.get("authorization") != f"Bearer {TOKEN}":
                status, answer = 401, {"error": "who are you?"}
            elif self.command == "GET":
                status, answer = hub.get(path)
            else:
                status, answer = (hub.put if self.command == "PUT" else hub.post)(path, body)
            hub.log.append(f"{self.command} {path} -> {status}")
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = _answer

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding") == "chunked":
                chunks = []
                while size := int(self.rfile.readline(), 16):
                    chunks.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(chunks)
            return self.rfile.read(int(self.headers.get("content-length", 0)))

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.end.set()
        server.shutdown()
        server.server_close()
