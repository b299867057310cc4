"""Sees processes end, at the moment they end, without being their parent.

A thread sleeps in epoll on one pidfd a process. A pidfd becomes readable when the process turns into a zombie, before
its parent has fetched its status, so /proc/PID/stat still holds the exit status (field 52, proc_pid_stat(5); readable
for whoever may trace the process). When the parent was faster, Linux >= 6.15 still tells it through the pidfd
(PIDFD_GET_INFO, linux/pidfd.h). Otherwise nobody saw it, and that is what is said: never 0.
"""

import contextlib
import fcntl
import os
import select
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass

from trainwarden.core.process import ProcessId, open_pidfd, read_stat

_PIDFD_INFO = struct.Struct("<QQ11Ii")
"""mask, cgroupid, 11 ids, exit_code: the first published size of struct pidfd_info, 64 bytes."""
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
_STATUS_WAIT_S = 0.3
"""How long a status is asked for after a death whose parent was faster: torchrun fetches its children's every 0.1 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """One process that ended."""

    process: ProcessId
    t_ns: int
    """When it was seen to end, Unix; for one that was gone before it was watched: when that was noticed."""
    status: int | None
    """As waitpid gives it; None: nobody here saw it."""
    by: str
    """Who told the status: `zombie`, `pidfd`, or `nobody`."""


class ExitWatch:
    """Watches any number of processes from one sleeping thread; drain() tells which have ended since."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, ProcessId] = {}
        self._ended: deque[Exit] = deque()
        self._unknown: list[tuple[int, Exit]] = []
        self._wake_read, self._wake_write = os.pipe()
        self._epoll.register(self._wake_read, select.EPOLLIN)
        self._thread = threading.Thread(target=self._wait, name="trainwarden-exits", daemon=True)
        self._thread.start()

    def add(self, process: ProcessId) -> None:
        """Watch a process; one that is already gone is told as ended, status unknown."""
        descriptor = open_pidfd(process)
        if descriptor is None:
            self._ended.append(Exit(process=process, t_ns=time.time_ns(), status=None, by="nobody"))
            return
        self._watched[descriptor] = process
        self._epoll.register(descriptor, select.EPOLLIN)

    @property
    def waiting(self) -> bool:
        """Whether drain() has something to tell."""
        return bool(self._ended)

    def drain(self) -> list[Exit]:
        """Every end seen since the last call, in the order of death."""
        found = [self._ended.popleft() for _ in range(len(self._ended))]
        return sorted(found, key=lambda ended: ended.t_ns)

    def close(self) -> None:
        """Stop watching."""
        if self._epoll.closed:
            return
        os.write(self._wake_write, b"x")
        self._thread.join()
        for descriptor in (*self._watched, self._wake_read, self._wake_write):
            os.close(descriptor)
        self._epoll.close()

    def _wait(self) -> None:
        while True:
            try:
                ready = self._epoll.poll(0.02 if self._unknown else -1)
            except InterruptedError:
                continue
            for descriptor, _ in ready:
                if descriptor == self._wake_read:
                    return
                self._see(descriptor)
            self._ask_again()

    def _see(self, descriptor: int) -> None:
        process = self._watched[descriptor]
        now_ns = time.time_ns()
        self._epoll.unregister(descriptor)
        status = _zombie_status(process)
        if status is not None:
            self._tell(descriptor, Exit(process=process, t_ns=now_ns, status=status, by="zombie"))
            return
        self._unknown.append((descriptor, Exit(process=process, t_ns=now_ns, status=None, by="nobody")))

    def _ask_again(self) -> None:
        waiting: list[tuple[int, Exit]] = []
        for descriptor, ended in self._unknown:
            status = _ask_pidfd(descriptor)
            if status is not None:
                self._tell(descriptor, Exit(process=ended.process, t_ns=ended.t_ns, status=status, by="pidfd"))
            elif time.time_ns() - ended.t_ns > _STATUS_WAIT_S * 1e9:
                self._tell(descriptor, ended)
            else:
                waiting.append((descriptor, ended))
        self._unknown = waiting

    def _tell(self, descriptor: int, ended: Exit) -> None:
        self._watched.pop(descriptor)
        os.close(descriptor)
        self._ended.append(ended)


def _zombie_status(process: ProcessId) -> int | None:
    stat = read_stat(process.pid)
    if stat is None or stat.start_time != process.start_time:
        return None
    if stat.exit_status == 0 and os.geteuid() != 0:
        return None  # who may not trace it reads 0 too: that is no status
    return stat.exit_status


def _ask_pidfd(descriptor: int) -> int | None:
    """The exit status by PIDFD_GET_INFO; None where the kernel does not know (any more, or yet)."""
    request = bytearray(_PIDFD_INFO.size)
    struct.pack_into("<Q", request, 0, _PIDFD_INFO_EXIT)
    with contextlib.suppress(OSError):
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, request)
        fields = _PIDFD_INFO.unpack(request)
        if fields[0] & _PIDFD_INFO_EXIT:
            return int(fields[-1])
    return None
