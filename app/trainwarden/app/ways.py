"""How the bytes of an uplink reach a server: over one connection, or (posted.py) as POSTs where only HTTP passes."""

import select
import socket
import ssl
from typing import ClassVar, Final, Protocol

IDLE_MS: Final = 100
"""Between two looks for an ack where nothing is to be sent."""


class TooLargeError(OSError):
    """What was sent at once is more than somebody on the way takes; it was not taken."""


class Way(Protocol):
    """A connection, or what stands for one. Each method but `end` raises OSError or DataError where it is over."""

    batch_bytes: ClassVar[int]
    """From so many on there is no sense in waiting for more."""
    polls: ClassVar[bool]
    """Whether the server says something only when something is sent, be it nothing."""

    def send(self, data: bytes) -> None:
        """Hand over whole messages; waits while nobody takes them."""
        ...

    def ready(self, *, wait: bool) -> bool:
        """Whether receive() would give something at once; wait: a moment, since there is nothing to send yet."""
        ...

    def receive(self) -> bytes:
        """What the server said, at least a byte of it."""
        ...

    def patience(self, silent_s: float) -> None:
        """How long a send or a receive may take from now on."""
        ...

    def end(self) -> None:
        """Let whoever waits in the others raise; from any thread."""
        ...

    def close(self) -> None: ...


class Stream:
    """A TCP connection, with or without TLS."""

    batch_bytes: ClassVar[int] = 1
    polls: ClassVar[bool] = False

    def __init__(
        self, address: tuple[str, int], context: ssl.SSLContext | None, connect_s: float, woken: socket.socket
    ) -> None:
        """woken: readable when there is something new to send. Raises OSError."""
        self._woken = woken
        plain = socket.create_connection(address, connect_s)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = plain if context is None else context.wrap_socket(plain, server_hostname=address[0])
        except BaseException:
            plain.close()
            raise

    def send(self, data: bytes) -> None:
        """As Way says."""
        if data:
            self._socket.sendall(data)

    def ready(self, *, wait: bool) -> bool:
        """As Way says; looks up when woken."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        poll = select.poll()  # select takes no descriptor above 1023
        for one in (self._socket, self._woken):
            poll.register(one, select.POLLIN)
        ready = {number for number, _ in poll.poll(IDLE_MS if wait else 0)}
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        return self._socket.fileno() in ready

    def receive(self) -> bytes:
        """As Way says."""
        data = self._socket.recv(64 * 1024)
        if not data:
            raise ConnectionError("the server closed the connection")
        return data

    def patience(self, silent_s: float) -> None:
        """As Way says."""
        self._socket.settimeout(silent_s)

    def end(self) -> None:
        """As Way says. Raises OSError where it is over already."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Nothing more."""
        self._socket.close()
