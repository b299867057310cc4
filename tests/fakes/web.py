"""A small HTTP server on the loopback that answers what a test tells it to, and remembers what it was asked."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True, kw_only=True)
class Web:
    """What to answer, and what was asked."""

    url: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"ok"
    asked: list[Asked] = field(default_factory=list)
    before: Callable[[], None] = lambda: None
    """Called before the answer: to be slow."""


@contextmanager
def serving() -> Iterator[Web]:
    """Serve until the block is left."""
    web = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            web.asked.append(Asked(path=self.path, headers=dict(self.headers), body=body))
            web.before()
            self.send_response(web.status)
            for name, value in {"Content-Length": str(len(web.body)), **web.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(web.body)

        do_GET = do_POST

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    web.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield web
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
