"""Mounts that answer, fail, and hang; among them a real file system whose server never answers."""

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.sysfs import Miniature, events, fleeting, numbers

from trainwarden.collectors.mounts import MOUNTS_MAX, Mounts, MountsConfig
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame

NODE, SIGNAL = "node:n1", "node_mount_latency_seconds"
QUICK = timedelta(milliseconds=50)
MNT_DETACH = 2


def source(mini: Miniature, *folders: str, ask: Callable[[str], object] = os.statvfs) -> Mounts:
    config = MountsConfig(folders=folders, deadline=QUICK)
    return Mounts(config, node="n1", start_ns=1_000, proc=mini.proc, ask=ask)


@pytest.fixture
def mini(tmp_path: Path) -> Miniature:
    return Miniature(tmp_path)


def answered(mounts: Mounts) -> list[Frame | Event]:
    """Polls until nothing hangs; what that told."""
    told = list(mounts.poll(7))
    until_s = time.monotonic() + 10
    while mounts.hanging:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    return [*told, *mounts.poll(7)]


def blind_after_deadline(mounts: Mounts) -> list[Frame | Event]:
    """Polls until a mount is told as blind."""
    until_s = time.monotonic() + 10
    while not events(told := list(mounts.poll(7))):
        assert time.monotonic() < until_s
        time.sleep(0.005)
    return told


def test_the_slowest_mount_is_told(mini: Miniature, tmp_path: Path) -> None:
    def ask(folder: str) -> None:
        time.sleep(0.03 if folder == "/slow" else 0)

    mounts = source(mini, "/quick", "/slow", ask=ask)
    found = answered(mounts)
    assert events(found) == []
    assert 0.03 <= numbers(found)[NODE][SIGNAL] < 5
    answered(mounts)


def test_a_mount_that_hangs_holds_one_thread_and_nobody_else(mini: Miniature) -> None:
    release = threading.Event()

    def ask(folder: str) -> None:
        if folder == "/hung":
            release.wait(30)

    mounts = source(mini, "/fine", "/hung", ask=ask)
    try:
        assert list(mounts.poll(7)) == []
        blind = blind_after_deadline(mounts)
        assert events(blind) == [("source.blind", "source:mounts@n1//hung")]
        (event,) = (item for item in blind if isinstance(item, Event))
        assert event.data["why"] == "mount /hung does not answer within 0.05 s"
        first_s = numbers(blind)[NODE][SIGNAL]
        began = time.monotonic()
        later = [list(mounts.poll(7)) for _ in range(20)]
        assert time.monotonic() - began < 5, "a poll does not wait"
        assert all(events(items) == [] for items in later)
        assert first_s < numbers(later[-1])[NODE][SIGNAL] < 30, "the time it took so far"
        assert sum(thread.name == "statfs /hung" for thread in threading.enumerate()) == 1
    finally:
        release.set()
    back = answered(mounts)
    assert events(back) == [("source.up", "source:mounts@n1//hung")]


def test_a_mount_that_fails_is_blind_with_the_reason_and_has_no_latency(mini: Miniature, tmp_path: Path) -> None:
    found = answered(source(mini, str(tmp_path / "absent")))
    (event,) = (item for item in found if isinstance(item, Event))
    assert str(event.data["why"]).endswith("absent: No such file or directory")
    assert numbers(found) == {}


def test_network_file_systems_are_found_and_others_left_alone(mini: Miniature) -> None:
    asked: list[str] = []
    mini.put(
        mini.proc / "self/mounts",
        "proc /proc proc rw 0 0\nn1:/home /home nfs4 rw 0 0\nx /tenant fuse.evil rw 0 0\n"
        + "a@tcp:/fs /my\\040scratch lustre rw 0 0\nn2:/bad nfs\n"
        + "".join(f"n1:/{number} /p{number} nfs rw,{'x' * 200} 0 0\n" for number in range(100)),
    )
    mounts = source(mini, ask=asked.append)
    answered(mounts)
    answered(mounts)
    assert asked[:2] == ["/home", "/my scratch"]
    assert len({*asked}) == MOUNTS_MAX


def test_a_mount_that_is_gone_is_forgotten(mini: Miniature, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    table = mini.put(mini.proc / "self/mounts", f"n1:/home {absent} nfs4 rw 0 0\n")
    mounts = source(mini)
    assert events(answered(mounts)) == [("source.blind", f"source:mounts@n1/{absent}")]
    table.write_text("")
    assert events(answered(mounts)) == [("source.up", f"source:mounts@n1/{absent}")]
    assert list(mounts.poll(7)) == []
    table.unlink()
    assert events(answered(mounts)) == [("source.blind", "source:mounts@n1")]


@contextlib.contextmanager
def unanswering(folder: Path) -> Iterator[None]:
    """A FUSE file system whose server is there and says nothing; skipped where none can be mounted."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"LOUD: /dev/fuse: {error.strerror}: no real file system that hangs")
    try:
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
        if libc.mount(b"hung", os.fsencode(folder), b"fuse.hung", 6, options) != 0:
            words = os.strerror(ctypes.get_errno())
            pytest.skip(f"LOUD: FUSE cannot be mounted here ({words}): no real file system that hangs")
        try:
            yield
        finally:
            libc.umount2(os.fsencode(folder), MNT_DETACH)
    finally:
        os.close(server)  # its death ends every call that waits


def test_a_real_file_system_whose_server_is_silent_does_not_hold_the_agent(mini: Miniature, tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    mounts = source(mini, str(folder))
    with unanswering(folder):
        assert list(mounts.poll(7)) == []
        assert events(blind_after_deadline(mounts)) == [("source.blind", f"source:mounts@n1/{folder}")]
        assert mounts.hanging == 1
        left = threading.active_count()
    until_s = time.monotonic() + 10
    while mounts.hanging:
        assert time.monotonic() < until_s, "the thread ends with the server"
        time.sleep(0.005)
    assert threading.active_count() < left


@pytest.mark.parametrize(
    ("words", "make"),
    [
        pytest.param("period: need at least 1s, got 0.5s", lambda: MountsConfig(period=timedelta(seconds=0.5))),
        pytest.param("deadline: need at least 10ms, got 0s", lambda: MountsConfig(deadline=timedelta())),
        pytest.param("folders: need at most 32, got 33", lambda: MountsConfig(folders=("/x",) * 33)),
    ],
)
def test_the_config_names_the_key_and_the_value(words: str, make: Callable[[], MountsConfig]) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert str(refused.value) == f"collectors.mounts.{words}"


line = st.one_of(
    st.binary(max_size=40),
    st.binary(max_size=20).map(lambda path: b"n1:/x " + path + b" nfs4 rw 0 0"),
)


@settings(max_examples=200)
@given(st.lists(line, max_size=5))
def test_a_garbage_table_never_raises(lines: list[bytes]) -> None:
    with fleeting() as mini:
        mini.put(mini.proc / "self/mounts", b"\n".join(lines))
        asked: list[str] = []
        mounts = source(mini, ask=asked.append)
        found = [*answered(mounts), *answered(mounts)]
        assert all(subject.isascii() and subject.isprintable() for _, subject in events(found))
        assert len(asked) <= 4 * max(1, sum(b" nfs4 " in text for text in b"\n".join(lines).splitlines()))
