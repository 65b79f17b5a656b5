"""A model hub for tests: the few routes of its HTTP API that a pinned download asks, with faults on request."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REPOSITORY = "team/tiny"
REVISION = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """One repository. ``cut`` are files whose next answer ends after that many bytes; ``ranges`` what was asked for."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.told = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        self.revision = REVISION
        self.cut: dict[str, int] = {}
        self.ranges: list[tuple[str, str | None]] = []
        self.stalled = threading.Event()
        self.stall: str | None = None  # a file whose answer stops in the middle and stays open

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def is_large(self, name: str) -> bool:
        """As large files go: the hub knows their sha256, and git only a pointer."""
        return name.endswith(".safetensors")

    def sibling(self, name: str) -> dict[str, object]:
        content = self.files[name]
        blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": blob}
        if self.is_large(name):
            entry["lfs"] = {"sha256": self.told[name], "size": len(content), "pointerSize": 134}
        return entry


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        if path == f"/api/models/{REPOSITORY}/revision/{hub.revision}":
            document = {"id": REPOSITORY, "sha": REVISION, "siblings": [hub.sibling(name) for name in hub.files]}
            self.reply(200, json.dumps(document).encode(), {"content-type": "application/json"})
            return
        name = path.removeprefix(f"/{REPOSITORY}/resolve/{REVISION}/")
        if name not in hub.files:
            code = {"x-error-code": "RevisionNotFound", "x-error-message": "no such commit"}
            self.reply(404, b"{}", code)
            return
        self.send_file(name)

    def send_file(self, name: str) -> None:
        hub, content = self.server, self.server.files[name]
        headers = {"etag": f'"{hub.told[name]}"', "x-repo-commit": REVISION, "accept-ranges": "bytes"}
        asked = self.headers.get("range")
        status, start = 200, 0
        if asked:
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            status, headers["content-range"] = 206, f"bytes {start}-{len(content) - 1}/{len(content)}"
        hub.ranges.append((name, asked))
        self.reply(status, content[start:], headers, hub.cut.pop(name, None), name)

    def reply(
        self,
        status: int,
        content: bytes,
        headers: dict[str, str],
        cut: int | None = None,
        name: str | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if name is not None and name == self.server.stall:
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.server.stalled.set()
            threading.Event().wait(60)
        self.wfile.write(content[:cut])
        if cut is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def hub_server(files: dict[str, bytes]) -> Iterator[Hub]:
    hub = Hub(files)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
