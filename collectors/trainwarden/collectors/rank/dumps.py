"""A stack on request where nobody may trace us: a real-time signal makes faulthandler write to a file of ours.

faulthandler writes from the C handler, so it also answers while the main thread waits inside a collective. It is only
installed where nothing is: a script's own handler is never replaced. USR1 and USR2 belong to scripts and schedulers.
"""

import contextlib
import faulthandler
import os
import signal
from pathlib import Path

from trainwarden.core.records import STACK_SIGNAL, stack_file


class Dumps:
    """The handler of this process, for as long as it records."""

    def __init__(self, folder: Path, pid: int) -> None:
        """Raises OSError, ValueError where it cannot be installed; the signal is then left as it was."""
        self._fd = -1
        if signal.getsignal(STACK_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):  # ignored: by a parent that closed
            return
        path = stack_file(folder, pid)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_APPEND, 0o600)
        try:
            faulthandler.register(STACK_SIGNAL, file=self._fd, all_threads=True, chain=False)
        except (RuntimeError, ValueError, OSError):
            self.close()
            raise

    def close(self) -> None:
        """Take the handler away; a signal that comes later is ignored, not deadly."""
        if self._fd >= 0:
            with contextlib.suppress(ValueError):
                faulthandler.unregister(STACK_SIGNAL)
                signal.signal(STACK_SIGNAL, signal.SIG_IGN)
            os.close(self._fd)
            self._fd = -1
