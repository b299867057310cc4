"""Stands in for a pager: prints what people would be told, a line an alert, and when the dead man falls silent.

    python receiver.py HOST:PORT

Alertmanager's webhooks are posted to /RECEIVER. Standard library only. No watcher: it runs where the rest runs.
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

DEAD_MAN_S = 180.0
"""Three of the dead man's minutes: one lost post is no page."""
WORDS = ("summary", "description", "runbook", "runbook_url")


def say(receiver: str, text: str) -> None:
    """One line; what a job's tenant wrote must not move the terminal's cursor."""
    line = f"{time.strftime('%H:%M:%S')} {receiver:13} {text}"
    sys.stdout.write("".join(c if c.isprintable() else "?" for c in line) + "\n")
    sys.stdout.flush()


class Receiver(HTTPServer):
    """Knows when the dead man was last heard; None: never, so nothing was promised yet."""

    heard_s: float | None = None

    def service_actions(self) -> None:
        """Called between requests, twice a second."""
        if self.heard_s is not None and time.monotonic() - self.heard_s > DEAD_MAN_S:
            self.heard_s = None
            say("dead-man", f"SILENT for {DEAD_MAN_S:.0f} s: nobody may be watching (docs/runbooks/dead-man.md)")


class Post(BaseHTTPRequestHandler):
    """One message of Alertmanager."""

    server: Receiver

    def do_POST(self) -> None:
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        receiver = self.path.strip("/")
        if receiver == "dead-man":
            self.server.heard_s = time.monotonic()
        for alert in told["alerts"]:
            labels, words = alert["labels"], alert["annotations"]
            who = " ".join(f"{key}={labels[key]}" for key in sorted(labels) if key not in ("alertname", "severity"))
            text = " | ".join(words[key] for key in WORDS if words.get(key))
            say(receiver, f"{alert['status']} {labels.get('severity', '-')} {labels['alertname']} {who} | {text}")
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    host, _, port = sys.argv[1].rpartition(":")
    with Receiver((host, int(port)), Post) as server:
        say("receiver", f"listening on {server.server_address[0]!s}:{server.server_port}")
        server.serve_forever()
