"""Whatever happens to the ring or the process, the training goes on as without us, and the agent takes no half row."""

import contextlib
import gc
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.collectors.world import World, events, frames, make_world, poll, rows, until

from trainwarden.collectors.rank import BACKWARD, DATA, FORWARD, GRAD_NORM, LOSS, OPTIMIZER, Rank, attach
from trainwarden.collectors.rank.ring import Ring
from trainwarden.collectors.rings import TORN_NS, Rings
from trainwarden.core.identity import identify, this_process
from trainwarden.core.model import Event, Frame
from trainwarden.core.records import FEATURES, FILE_BYTES, STAMP_ROW, STEP_ROW, STEPS_OFFSET

LOSS_COLUMN, GRAD_COLUMN = FEATURES.index("loss"), FEATURES.index("grad_norm")


def train(steps: int, **how: int) -> float:
    """A training as deterministic as can be; what it arrives at."""
    w = attach(**how)  # type: ignore[arg-type]
    weight = 1.0
    for step in range(steps):
        record(w, step, weight)
        weight = (weight * 1.7 + 0.3) % 1.0
    w.close()
    return weight


def record(w: Rank, step: int, loss: float) -> None:
    w.begin(step)
    w.mark(DATA)
    w.mark(FORWARD)
    w.mark(BACKWARD)
    w.mark(OPTIMIZER)
    w.value(LOSS, loss)
    w.value(GRAD_NORM, 2.0 * loss)
    w.end()


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> float:
    with monkeypatch.context() as patch:
        patch.setenv("TRAINWARDEN", "0")
        return train(300)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with these options; skips where that is not allowed."""
    mounted: list[Path] = []

    def make(options: str) -> Path:
        point = tmp_path / f"tmpfs-{len(mounted)}"
        point.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"mode=0700,{options}", "tmpfs", str(point)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"NOT TESTED: a tmpfs of our own cannot be mounted here: {done.stderr.strip()}")
        mounted.append(point)
        return point

    yield make
    for point in mounted:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


def test_a_small_tmpfs_will_do(
    mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], undisturbed: float
) -> None:
    """64 MB is what containers have on /dev/shm."""
    world = make_world(monkeypatch, mount("size=64m"))
    assert train(300) == undisturbed
    source = world.source()
    assert len(rows(poll(source), "step")) == 300
    world.end()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param("size=256k", "No space left on device", id="too small"),
        pytest.param("size=8m,nr_inodes=3", "No space left on device", id="no inodes"),
        pytest.param("size=8m,ro", "Read-only file system", id="read-only"),
    ],
)
def test_no_room_for_a_ring_is_said_once_and_the_training_ends_the_same(
    mount: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    undisturbed: float,
    options: str,
    said: str,
) -> None:
    world = make_world(monkeypatch, mount(options))
    assert [train(300), train(300)] == [undisturbed] * 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("trainwarden: no recording of this rank: ")
    assert said in line
    left = [path for path in world.root.rglob("*") if path.is_file()]
    assert left == [], "no draft takes up what room there is"


def fill(folder: Path) -> None:
    """Leave not one page."""
    with (folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_tmpfs_that_others_filled(
    mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, undisturbed: float
) -> None:
    world = make_world(monkeypatch, mount("size=4m"))
    fill(world.root)
    assert train(300) == undisturbed
    (world.root / "ballast").unlink()
    assert train(300) == undisturbed
    source = world.source()
    assert len(rows(poll(source), "step")) == 300, "with room again there is a ring again"
    world.end()


def test_a_ring_needs_no_room_once_it_is_there(
    mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, undisturbed: float
) -> None:
    """A store into a page that the full tmpfs could not give would be SIGBUS, and the end of the training."""
    world = make_world(monkeypatch, mount("size=4m"))
    w = world.attach()
    fill(world.root)
    for step in range(5000):
        record(w, step, 1.0)
        w.note("n")
    assert w.why_off == ""
    world.end()


def test_a_forked_child_never_writes(world: World) -> None:
    """DataLoader workers are forked in the middle of things and inherit the recorder."""
    w, source = world.attach(), world.source()
    w.begin(0)
    w.mark(DATA)
    side = w.side()

    def worker() -> None:
        assert w.why_off == "forked from a process that records"
        for step in range(1, 50):
            record(w, step, 1.0)
        side.note("from the worker")
        w.close()

    assert world.wait(world.fork(worker)) == 0
    w.mark(FORWARD)
    w.end()
    out = poll(source)
    assert rows(out, "step")["step"].tolist() == [0]
    assert rows(out, "live")["state"].tolist() == [1], "attached, not detached by the worker"
    assert events(out, "mark.note") == []


def test_the_lock_lives_and_dies_with_the_rank_not_with_its_workers(world: World) -> None:
    """A worker that outlives a killed rank must not keep the next process of that rank out."""
    report, told = os.pipe()

    def rank() -> None:
        w = attach()
        assert not w.why_off
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
            os._exit(0)
        os.write(told, b"%d\n" % worker)
        time.sleep(60)

    pid = world.fork(rank)
    worker = int(os.read(report, 20))
    try:
        assert "another living process" in attach().why_off, "the rank lives"
        world.kill(pid)
        assert world.attach().why_off == "", "the rank is dead, its worker is not"
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(report)
        os.close(told)


def test_of_two_writers_of_one_rank_the_second_trains_without_us(
    world: World, undisturbed: float, capfd: pytest.CaptureFixture[str]
) -> None:
    w, source = world.attach(rank=1, world_size=4), world.source()
    record(w, 0, 1.0)

    def second() -> None:
        for _ in range(2):
            assert train(300, rank=1, world_size=4) == undisturbed

    assert world.wait(world.fork(second)) == 0
    record(w, 1, 1.0)
    assert rows(poll(source), "step")["step"].tolist() == [0, 1]
    (line,) = capfd.readouterr().err.splitlines()
    assert "another living process is this rank of this attempt" in line


def throttled(w: Rank) -> None:
    """Steps for ever, in bursts that an agent can follow which polls now and then. Their values name their step."""
    for step in range(1 << 20):
        record(w, step, float(step))
        if step % 50 == 0:
            time.sleep(0.02)


def whole(out: list[Frame | Event]) -> list[int]:
    """Steps of the rows that came, each checked to be of one piece."""
    found: list[int] = []
    for frame in frames(out, "step"):
        for row in frame.rows:
            assert row["values"][LOSS_COLUMN] == row["step"]
            assert row["values"][GRAD_COLUMN] == 2 * row["step"]
            assert row["values"][0] > 0
            found.append(int(row["step"]))
    return found


def test_a_rank_stopped_at_any_point_gives_no_half_row_and_goes_on(world: World) -> None:
    source = world.source()
    pid = world.fork(lambda: throttled(attach()))
    seen: list[int] = []

    def more() -> bool:
        out = poll(source)
        new = whole(out)
        for event in events(out, "telemetry.lost"):  # a machine so busy that we were too slow
            seen.extend(range(int(str(event.data["from_seq"])) - 1, int(str(event.data["to_seq"]))))
        seen.extend(new)
        return bool(new)

    until(more, "the first step")
    dice = random.Random(1)
    for stop in range(40):
        os.kill(pid, signal.SIGSTOP)
        until(lambda: not more(), "silence of a stopped rank")
        if stop == 0:  # nor after any time: it is told to the source, not waited for
            later = [[*source.poll(time.time_ns() + tenths * 100_000_000)] for tenths in range(30)]
            assert not any(frames(out, "step") for out in later), "a stopped rank writes nothing"
            assert not any(events(out, "telemetry.lost") for out in later), "it is not gone"
        os.kill(pid, signal.SIGCONT)
        until(more, "the steps after the stop")
        time.sleep(dice.random() * 0.005)
    assert seen == [*range(len(seen))], "no step is missing without a word, none comes twice"


def test_what_a_killed_rank_wrote_survives_it(world: World) -> None:
    source = world.source()
    seen: list[int] = []
    pid = world.fork(lambda: throttled(attach()))
    until(lambda: bool(whole(poll(source))), "the first step")
    world.kill(pid)
    again = world.source()
    seen = whole(poll(again))
    assert seen == [*range(len(seen))]
    assert rows(poll(again), "live")["state"].tolist() == [1], "it never said goodbye"


def torn(ring: Ring, number: int, cut: int) -> None:
    """The first bytes of a row, as a writer leaves them that was stopped in the middle of it."""
    row = bytearray(STEP_ROW.size)
    STAMP_ROW.pack_into(row, 0, number, number - 1, 5.0, *([1.0] * 6), 2.5, 1.5, number)
    at = STEPS_OFFSET + (number - 1) * STEP_ROW.size
    ring.view[at : at + STEP_ROW.size] = bytes(row[:cut]).ljust(STEP_ROW.size, b"\0")


@pytest.mark.parametrize("cut", [4, 8, 24, 60, 91, 92])
def test_a_row_counts_when_it_is_whole(world: World, cut: int) -> None:
    (world.rings).mkdir(parents=True, mode=0o700)
    ring, source = Ring(world.rings, identify({}), this_process(), 0), world.source()
    torn(ring, 1, STEP_ROW.size)
    torn(ring, 2, cut)
    assert rows(poll(source), "step")["step"].tolist() == [0]
    assert frames(poll(source), "step") == []
    torn(ring, 2, STEP_ROW.size)
    torn(ring, 3, cut)
    assert rows(poll(source), "step")["step"].tolist() == [1]
    now_ns = time.time_ns()
    for later_ns in (0, 2 * TORN_NS, 4 * TORN_NS):
        assert events(source.poll(now_ns + later_ns), "telemetry.lost") == [], "its writer lives and may go on"
    ring.close()
    lost = [
        event.data for turn in range(5, 9) for event in events(source.poll(now_ns + turn * TORN_NS), "telemetry.lost")
    ]
    assert lost == [{"from_seq": 3, "to_seq": 3, "rank": 0, "rows": "steps"}], "torn by its end: said once"


def test_a_damaged_row_is_lost_and_those_after_it_are_not(world: World) -> None:
    world.rings.mkdir(parents=True, mode=0o700)
    ring, source = Ring(world.rings, identify({}), this_process(), 0), world.source()
    for number, cut in ((1, 96), (2, 90), (3, 96), (4, 96), (5, 8), (6, 96)):
        torn(ring, number, cut)
    out = poll(source)
    assert rows(out, "step")["step"].tolist() == [0, 2, 3, 5]
    for number in (7, 8):
        torn(ring, number, 96)
    struct.pack_into("<I", ring.view, STEPS_OFFSET + 6 * STEP_ROW.size, 12345)
    out += poll(source)
    assert rows(out, "step")["step"].tolist() == [0, 2, 3, 5, 7]
    lost = [(event.data["from_seq"], event.data["to_seq"]) for event in events(out, "telemetry.lost")]
    assert lost == [(2, 2), (5, 5), (7, 7)]
    ring.close()


def test_a_step_keeps_no_memory(world: World) -> None:
    w = world.attach()
    for step in range(3000):
        record(w, step, 2.5)
    gc.collect()
    tracemalloc.start()
    try:
        record(w, 3000, 2.5)
        before = tracemalloc.take_snapshot()
        for step in range(3001, 8000):
            record(w, step, 2.5)
        gc.collect()
        after = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    ours = tracemalloc.Filter(True, "*/collectors/rank/*")
    kept = after.filter_traces([ours]).compare_to(before.filter_traces([ours]), "filename")
    assert sum(change.size_diff for change in kept) <= 0, kept


STEPS_UNDER_STRACE = """
import os
from trainwarden.collectors.rank import DATA, FORWARD, BACKWARD, OPTIMIZER, LOSS, GRAD_NORM, attach
w = attach()
assert not w.why_off, w.why_off
for step in range(3000):
    if step == 1000:
        os.write(1, b"begin of the steps\\n")
    w.begin(step); w.mark(DATA); w.mark(FORWARD); w.mark(BACKWARD); w.mark(OPTIMIZER)
    w.value(LOSS, 2.5); w.value(GRAD_NORM, 1.5); w.end()
os.write(1, b"end of the steps\\n")
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="NOT TESTED: no strace here")
def test_a_step_makes_no_system_call(world: World, tmp_path: Path) -> None:
    log = tmp_path / "strace"
    command = ["strace", "-f", "-o", str(log), sys.executable, "-c", STEPS_UNDER_STRACE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ptrace" in done.stderr.lower():
        pytest.skip(f"NOT TESTED: strace may not trace here: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    calls = log.read_text().split("begin of the steps", 1)[1].split("end of the steps", 1)[0].splitlines()[1:-1]
    assert calls == [], f"{len(calls)} system calls in 2000 steps"


def test_the_files_size_never_changes(world: World) -> None:
    w = world.attach()
    (path,) = world.rings.iterdir()
    for step in range(3000):
        record(w, step, 1.0)
        w.note("n", step)
    w.close()
    assert path.stat().st_size == FILE_BYTES
    assert struct.unpack_from("<I", path.read_bytes(), STEPS_OFFSET)[0] == 2049


def test_an_agent_that_comes_late_reads_what_is_still_there(world: World) -> None:
    w = world.attach()
    for step in range(3000):
        record(w, step, float(step))
    source: Rings = world.source()
    out = poll(source)
    assert whole(out) == [*range(3000 - 2048, 3000)]
    assert events(out, "telemetry.lost") == [], "it was not there to lose them"
