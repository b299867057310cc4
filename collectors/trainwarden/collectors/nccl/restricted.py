"""Takes in what a tenant wrote, pickle or JSON, with nothing to lose: the only home of pickle. Standard library only.

No global can be had, so an opcode that calls, builds or instantiates finds nothing to call. What refusing globals does
not bound (a short file that makes a huge memo, hashes nested tuples for hours or off the end of the C stack) the kernel
does: this runs in a child (columns.py) without privileges and with little memory and processor time. If a file kills
the child, dumps.py names the file and goes on with the next.
"""

import contextlib
import errno
import io
import json
import os
import pickle
import resource
import stat
from typing import Any, Final, NoReturn

WHY_MAX: Final = 200
"""Characters of a reason, which may hold a tenant's words."""
_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_NOTHING_MORE: Final = (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC)
_NO_GROUP: Final = 65534
"""Linux's overflow id: what nobody is."""
_PREFETCH: Final = 1 << 17
"""How far pickle looks ahead in a file; from a file that cannot look ahead it reads opcode by opcode."""


class Refused(Exception):
    """Why something is not read."""


class _Plain(pickle.Unpickler):
    """Containers, numbers, text, bytes and None; nothing that has a name elsewhere."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise Refused(f"hostile: it names the global {module}.{name}; only plain containers and numbers are read")

    def persistent_load(self, pid: object) -> NoReturn:
        raise Refused("hostile: it names an object outside of it; only plain containers and numbers are read")


def shut_in(owner_uid: int, beside: str, memory_bytes: int) -> None:
    """Give up for good all that reading needs not: files to write, processes, memory, and where root, being root.

    owner_uid: whose files are read; -1: whoever reads. The group is that of the folder of `beside`, a file to read, so
    that a project's folder can be entered.
    """
    if owner_uid > 0 and os.geteuid() == 0:
        group = _NO_GROUP
        with contextlib.suppress(OSError):
            group = os.stat(os.path.dirname(beside)).st_gid or _NO_GROUP
        with contextlib.suppress(PermissionError):  # a root that may not become somebody else is none
            os.setgroups([])
            os.setresgid(group, group, group)
            os.setresuid(owner_uid, owner_uid, owner_uid)
    for what in _NOTHING_MORE:
        resource.setrlimit(what, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = memory_bytes if hard == resource.RLIM_INFINITY else min(hard, memory_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def read(path: str, owner_uid: int, max_bytes: int) -> tuple[bytes, int]:
    """All of a regular file and when it was written (Unix ns). Raises OSError, Refused."""
    try:
        fd = os.open(path, _FLAGS)
    except OSError as error:
        raise Refused("a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)) from None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise Refused("not a regular file")
    with os.fdopen(fd, "rb") as file:
        if owner_uid not in (-1, found.st_uid):
            raise Refused(f"belongs to user {found.st_uid}, the job to user {owner_uid}")
        if found.st_size > max_bytes:
            raise Refused(f"has {found.st_size} bytes, at most {max_bytes} are read")
        data = file.read(found.st_size + 1)
    if len(data) != found.st_size:
        raise Refused("changed while it was read")
    return data, found.st_mtime_ns


def load(data: bytes) -> Any:
    """What a pickle or a JSON text holds. Raises Refused, whatever the bytes are; but see above what it takes."""
    if not data:
        raise Refused("empty: its writer ended, or has not begun")
    form = "JSON" if data[:_PREFETCH].lstrip()[:1] == b"{" else "pickle"
    try:
        return json.loads(data) if form == "JSON" else _Plain(io.BufferedReader(io.BytesIO(data), _PREFETCH)).load()
    except Refused:
        raise
    except MemoryError:
        raise Refused("needs more memory than it may have") from None
    except Exception as error:  # pickle raises whatever the step that failed raises
        raise Refused(f"no whole {form}: {type(error).__name__}: {error}") from None


def plain(text: str, most: int = WHY_MAX) -> str:
    """A tenant's words, fit to be shown."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])
