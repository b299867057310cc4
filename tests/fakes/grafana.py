"""The part of Grafana's HTTP API that pushing dashboards needs, on the loopback: no Grafana server is packaged.

Written from Grafana's documentation of its folder and dashboard API: answers, statuses and the version check are its;
what it does beyond that (permissions by folder, migrations of what is stored) is not here.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EDITOR, VIEWER = "glsa_editor", "glsa_viewer"
"""Tokens: may write, may only read."""

Answer = tuple[int, Mapping[str, str], bytes]


@dataclass(slots=True, kw_only=True)
class FakeGrafana:
    """What it holds, what it was asked, and how it misbehaves."""

    url: str = ""
    prefix: str = ""
    """Sub path, as behind a proxy."""
    folders: dict[str, str] = field(default_factory=dict)
    """uid -> title."""
    boards: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    """uid -> (uid of its folder, dashboard)."""
    messages: list[str] = field(default_factory=list)
    """Of each save."""
    asked: list[str] = field(default_factory=list)
    """Method and path of each request."""
    instead: Answer | None = None
    """Answered to everything."""
    before_save: Callable[[], None] = lambda: None
    drips: bool = False
    """An answer that never ends, a byte now and then."""
    closing: threading.Event = field(default_factory=threading.Event)

    def answer(self, method: str, path: str, token: str, body: Any) -> tuple[int, Any]:
        """Status and JSON."""
        if token not in (f"Bearer {EDITOR}", f"Bearer {VIEWER}"):
            return 401, {"message": "Invalid API key"}
        if method == "POST" and token == f"Bearer {VIEWER}":
            return 403, {"message": "You'll need additional permissions to perform this action"}
        match method, path.removeprefix(f"{self.prefix}/api/").split("/"):
            case "GET", ["folders"]:
                return 200, [{"uid": uid, "title": title} for uid, title in self.folders.items()]
            case "POST", ["folders"]:
                uid = f"f{len(self.folders)}"
                self.folders[uid] = body["title"]
                return 200, {"uid": uid, "title": body["title"]}
            case "GET", ["dashboards", "uid", uid] if uid in self.boards:
                folder, board = self.boards[uid]
                return 200, {"dashboard": board, "meta": {"folderUid": folder}}
            case "POST", ["dashboards", "db"]:
                self.before_save()
                return self._save(body)
        return 404, {"message": "Not found"}

    def _save(self, body: Any) -> tuple[int, Any]:
        board, uid = body["dashboard"], body["dashboard"]["uid"]
        version = self.boards[uid][1]["version"] if uid in self.boards else 0
        if board["version"] != version and not body["overwrite"]:
            return 412, {"status": "version-mismatch", "message": "The dashboard has been changed by someone else"}
        self.boards[uid] = body["folderUid"], {**board, "id": 7, "version": version + 1}
        self.messages.append(body["message"])
        return 200, {"uid": uid, "status": "success", "version": version + 1}


@contextmanager
def grafana(prefix: str = "") -> Iterator[FakeGrafana]:
    """Serve until the block is left; connections stay open between requests, as Grafana's do."""
    fake = FakeGrafana(prefix=prefix)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    server.daemon_threads = False  # close waits for them: a connection that a client forgot would be noticed
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}{prefix}"
    try:
        yield fake
    finally:
        fake.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(fake: FakeGrafana) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30.0

        def do_GET(self) -> None:
            fake.asked.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if fake.drips:
                return self._drip()
            status, headers, answer = fake.instead or self._answer(json.loads(body or b"null"))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(answer)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_GET

        def _answer(self, body: Any) -> Answer:
            status, told = fake.answer(self.command, self.path, self.headers.get("Authorization", ""), body)
            return status, {"Content-Type": "application/json"}, json.dumps(told).encode()

        def _drip(self) -> None:
            self.close_connection = True
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", "100000")
            self.end_headers()
            try:
                while not fake.closing.wait(0.02):
                    self.wfile.write(b" ")
            except OSError:
                return

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
