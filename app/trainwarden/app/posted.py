"""The way to a server where only HTTP passes: each send is a POST, and its answer is what the server has to say.

The bodies of one session, one after the other, are what a connection would carry, and so are the answers
(app/posting.py). A POST that fails ends the session as a cut ends a connection: the next one sends again what was not
acknowledged, and the server passes over what it knows. Only who says Retry-After is asked again with the same bytes.
"""

import json
import secrets
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Final

from trainwarden.app.ways import TooLargeError
from trainwarden.core.errors import DeliveryError
from trainwarden.core.net import Poster, Reply

if TYPE_CHECKING:
    from trainwarden.app.uplink import UplinkConfig

PATH: Final = "/v1/frames"
SESSION: Final = "Trainwarden-Session"
"""Header: a word of 8 to 64 characters that names a session, the same in all its POSTs."""
AT: Final = "Trainwarden-At"
"""Header: how many bytes of the session went before this body."""
POST_S: Final = 30.0
"""For all of a POST: a proxy that holds it for longer has forgotten it."""
_TOO_LARGE: Final = 413


class Posted:
    """A Way (app/ways.py) made of POSTs, at most one in `uplink.post_s` unless much is waiting."""

    batch_bytes: ClassVar[int] = 256 * 1024
    polls: ClassVar[bool] = True

    def __init__(
        self,
        config: "UplinkConfig",
        token: str,
        context: ssl.SSLContext | None,
        woken: socket.socket,
        hurry: threading.Event,
        busy: Callable[[str], None],
    ) -> None:
        """woken: readable when there is something new to send. hurry: the end is near. busy: told why nothing is taken
        for now, and "" when it is again."""
        self._woken, self._hurry, self._busy, self._post_s = woken, hurry, busy, config.post_s
        headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/octet-stream",
            SESSION: secrets.token_hex(16),
        }
        self._poster = Poster(config.server.rstrip("/") + PATH, headers, context)
        self._ended = threading.Event()
        self._at, self._inbox, self._next_s = 0, b"", 0.0

    def send(self, data: bytes) -> None:
        """As Way says: POST it, be it nothing; as often as Retry-After is said."""
        busy = False
        while True:
            reply = self._post(data)
            if 200 <= reply.status < 300:
                break
            why = f"answered {reply.status}{_reason(reply.body)}"
            if reply.status == _TOO_LARGE:
                raise TooLargeError(why)
            if not reply.retry_after_s:
                raise ConnectionError(why)
            busy = True
            self._busy(why)
            if self._ended.wait(min(reply.retry_after_s, POST_S)):
                raise ConnectionError("given up")
        if busy:
            self._busy("")
        self._at += len(data)
        self._inbox += reply.body
        self._next_s = time.monotonic() + self._post_s

    def ready(self, *, wait: bool) -> bool:
        """As Way says; a moment is until the next POST is due."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        while wait and not self._inbox and (left_s := self._next_s - time.monotonic()) > 0 and not self._hurry.is_set():
            if poll.poll(1000 * left_s):
                self._woken.recv(4096)
        return bool(self._inbox)

    def receive(self) -> bytes:
        """As Way says."""
        if not self._inbox:
            raise ConnectionError("the server took a hello and said nothing")
        data, self._inbox = self._inbox, b""
        return data

    def patience(self, silent_s: float) -> None:
        """As Way says; POST_S stays."""

    def end(self) -> None:
        """As Way says."""
        self._ended.set()
        self._poster.end()

    def close(self) -> None:
        """Nothing more."""
        self._poster.close()

    def _post(self, data: bytes) -> Reply:
        try:
            return self._poster.post(data, {AT: str(self._at)}, POST_S)
        except DeliveryError as error:
            raise ConnectionError(str(error)) from None


def _reason(body: bytes) -> str:
    """What a server of ours says in its answer; a proxy's page is not repeated.

    >>> _reason(b'{"why": "the token is not known"}'), _reason(b"<html>")
    (': the token is not known', '')
    """
    try:
        return f": {str(json.loads(body)['why'])[:200]}"
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
