"""Children that answer lines with lines and are never waited for."""

import signal
import time
from collections.abc import Callable

import pytest

from trainwarden.core.child import Talker
from trainwarden.core.errors import ChildError


def until(talker: Talker, enough: Callable[[list[bytes]], bool]) -> list[bytes]:
    said, end_s = list[bytes](), time.monotonic() + 20
    while not enough(said) and time.monotonic() < end_s:
        said += talker.lines()
        time.sleep(0.002)
    return said


def test_lines_come_whole_and_when_they_come() -> None:
    talker = Talker(["sh", "-c", "while read word; do printf 'said '; printf \"$word\\n\"; done"])
    assert talker.lines() == []
    talker.ask(b"one")
    assert until(talker, bool) == [b"said one"]
    talker.kill()
    assert talker.wait(5.0)
    assert talker.code == -signal.SIGKILL


def test_a_child_that_does_not_listen_or_is_gone_blocks_nobody() -> None:
    talker = Talker(["sleep", "60"])
    for _ in range(100):
        talker.ask(b"x" * 4000)
    assert talker.lines() == []
    assert talker.code is None
    talker.kill()
    assert talker.wait(5.0)


def test_a_line_without_end_is_refused() -> None:
    talker = Talker(["sh", "-c", "while :; do printf xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done"])
    with pytest.raises(ChildError, match="a line of more than 1000 bytes"):
        until(talker, lambda _: bool(talker.lines(at_most_bytes=1000)))
    talker.kill()
    assert talker.wait(5.0)


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(ChildError, match="no-such-program: cannot be started: No such file"):
        Talker(["no-such-program"])
