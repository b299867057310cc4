"""One line on standard error for each thing there is to say, and never at the price of the training."""

import os
import select
import sys
from typing import Final

_MAX_CHARACTERS: Final = 1000
"""At most 4000 bytes; a pipe that polls as writable takes 4096 at once (PIPE_BUF): the write cannot block."""
_MAX_LINES: Final = 20
"""In the life of a process."""

_said: set[str] = set()


def say(cause: str, text: str) -> None:
    """Say it if nothing was said of this cause before and standard error takes it right now."""
    if cause in _said or len(_said) == _MAX_LINES:
        return
    _said.add(cause)
    try:
        stderr = sys.__stderr__.fileno() if sys.__stderr__ is not None else -1  # -1: fd 2 may be anything by now
        if stderr >= 0 and select.select([], [stderr], [], 0)[1]:
            os.write(stderr, f"trainwarden: {text[:_MAX_CHARACTERS]}\n".encode(errors="replace"))
    except (OSError, ValueError):
        return


def say_error(error: BaseException | None) -> None:
    """An exception that we caught, told apart by where it was caught."""
    trace = error.__traceback__ if error is not None else None
    where = f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}" if trace is not None else ""
    say(f"{type(error).__name__} {where}", f"{type(error).__name__}: {error} (the training goes on)")
