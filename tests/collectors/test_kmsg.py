"""The kernel log as a source: the device (a packet pipe in its place), recorded files, the journal."""

import errno
import gzip
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwarden.collectors.files.kernel_logs import KernelLogFiles, stamp
from trainwarden.collectors.kernel_journal import Journal
from trainwarden.collectors.kmsg import RETRY_NS, KernelLog, KernelLogConfig, Kmsg, Log
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame

S = 1_000_000_000
XID = "NVRM: Xid (PCI:0000:9b:00): "


@dataclass
class Device:
    """A pipe that gives one record a read, as /dev/kmsg does."""

    path: Path
    writer: int
    number: int = 100

    def say(self, *messages: str, priority: int = 4, skip: int = 0) -> None:
        for message in messages:
            self.number += 1 + skip
            us = time.monotonic_ns() // 1000
            os.write(self.writer, f"{priority},{self.number},{us},-;{message}\n SUBSYSTEM=pci\n".encode())


@pytest.fixture
def device() -> Iterator[Device]:
    reader, writer = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)  # O_DIRECT: a pipe of packets
    yield Device(Path(f"/proc/self/fd/{reader}"), writer)
    os.close(reader)
    os.close(writer)


def source(log: Log, config: KernelLogConfig | None = None, **uuids: str) -> KernelLog:
    return KernelLog(config or KernelLogConfig(), "n1", start_ns=0, log=log, device_of=lambda pci: uuids.get(pci[5:7]))


def events(source: KernelLog, now_ns: int | None = None) -> list[Event]:
    found: list[Frame | Event] = [*source.poll(now_ns or time.time_ns())]
    assert all(isinstance(one, Event) and one.source == "kernel-log@n1" for one in found)
    return [one for one in found if isinstance(one, Event)]


def test_an_xid_becomes_an_event_of_its_gpu(device: Device) -> None:
    kernel = source(Kmsg(device.path), b7="GPU-known")
    assert events(kernel) == []
    before_ns = time.time_ns()
    device.say(
        XID + "79, pid=7, name=python3, GPU has fallen off the bus.", XID.replace("9b", "b7") + "13, x", "eth0: up"
    )
    first, second = events(kernel)
    assert (first.kind, str(first.subject)) == ("xid", "device:n1/pci-0000:9b:00")
    assert (first.data["code"], first.data["pid"], first.data["count"]) == (79, 7, 1)
    assert first.data["first_ns"] == first.t_ns
    assert before_ns - S <= first.t_ns <= first.seen_ns
    assert str(second.subject) == "device:GPU-known"
    kernel.close()


def test_subjects_of_links_processes_and_gpus_that_the_log_itself_names(device: Device) -> None:
    kernel = source(Kmsg(device.path))
    events(kernel)
    device.say(
        "NVRM: GPU at PCI:0000:9b:00: GPU-00000000-1111",
        XID + "43, Ch 00000008",
        "mlx5_core 0000:0c:00.0 mlx5_5: Port: 1 Link DOWN",
        "Out of memory: Killed process 77 (python3)",
        "NVRM: A GPU crash dump has been created.",
        r"NVRM: The NVIDIA GPU 0000:5d:00.0\x0aNVRM: (PCI ID: 1:2) in this system has\x0aNVRM: fallen off the bus and",
    )
    assert [(one.kind, str(one.subject)) for one in events(kernel)] == [
        ("xid", "device:GPU-00000000-1111"),
        ("link.state", "link:n1/mlx5_5/1"),
        ("oom.kill", "node:n1"),
        ("driver.error", "node:n1"),
        ("gpu.off_bus", "device:n1/pci-0000:5d:00"),
    ]
    kernel.close()


def test_a_burst_is_told_at_once_and_once_more_when_it_is_over(device: Device) -> None:
    kernel = source(Kmsg(device.path))
    events(kernel)
    device.say(*[XID + "95, Uncontained: FBHUB."] * 9)
    (first,) = events(kernel)
    (last,) = events(kernel, time.time_ns() + 20 * S)
    assert [(one.data["count"], one.data["first_ns"]) for one in (first, last)] == [(1, first.t_ns), (9, first.t_ns)]
    assert kernel.totals == {("xid", "0000:9b:00", 95): (1, 9)}
    kernel.close()


def test_records_that_were_overwritten_are_counted(device: Device) -> None:
    kernel = source(Kmsg(device.path))
    events(kernel)
    device.say("a")
    device.say("b", skip=7)
    (lost,) = events(kernel)
    assert (lost.kind, lost.data["from_seq"], lost.data["to_seq"]) == ("telemetry.lost", 102, 108)
    assert events(kernel) == []
    kernel.close()


def test_an_overrun_before_the_first_record_is_a_gap_from_nobody_knows_where(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[OSError | bytes] = [
        BrokenPipeError(),
        b"4,9,1,-;" + XID.encode() + b"79, x",
        OSError(errno.EIO, "I/O error"),
    ]

    def read(descriptor: int, size: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    kernel = source(Kmsg(device.path))
    with monkeypatch.context() as patch:
        patch.setattr("trainwarden.collectors.kmsg.os.read", read)
        blind, lost, xid = events(kernel)
    assert (lost.data["from_seq"], lost.data["to_seq"], xid.data["code"]) == (None, 8, 79)
    assert (blind.kind, "I/O error" in str(blind.data["why"])) == ("source.blind", True)
    kernel.close()


def test_the_setting_names_where_the_log_is_read(tmp_path: Path) -> None:
    file = tmp_path / "dmesg.txt"
    file.write_text(f"{XID}79, x\n")
    kernel = KernelLog(KernelLogConfig(source=str(file), recorded=True), "n1", start_ns=0)
    assert codes(kernel) == [(79, 1)]
    for name in ("kmsg", "journal"):
        KernelLog(KernelLogConfig(source=name), "n1", start_ns=0).close()


def test_what_a_program_wrote_is_no_fact_of_the_kernel(device: Device) -> None:
    device_log, drill = Kmsg(device.path), Kmsg(device.path, drills=True)
    kernel, trial = source(device_log), source(drill)
    for one in (kernel, trial):
        events(one)
        device.say(XID + "79, x", priority=12)
        assert [event.kind for event in events(one)] == (["xid"] if one is trial else [])
        one.close()


def test_a_restart_goes_on_where_the_last_process_stood(device: Device, tmp_path: Path) -> None:
    config = KernelLogConfig(position=tmp_path / "position.json")
    first = source(Kmsg(device.path), config)
    events(first)
    device.say(XID + "13, x")
    assert len(events(first)) == 1
    first.close()
    number, device.number = device.number, device.number - 2
    device.say("seen before", "seen before", XID + "31, x")
    assert device.number == number + 1
    second = source(Kmsg(device.path), config)
    assert [event.data["code"] for event in events(second)] == [31]
    second.close()


def test_after_a_reboot_all_of_the_new_boots_log_is_read(device: Device) -> None:
    log = Kmsg(device.path)
    log.resume({"boot": "another", "number": 10**6})
    device.number = -1
    kernel = source(log)
    device.say("first", XID + "13, x")
    assert [event.kind for event in events(kernel)] == ["xid"]
    kernel.close()


def test_a_position_that_cannot_be_kept_costs_nothing_else(device: Device, tmp_path: Path) -> None:
    file = tmp_path / "absent" / "position.json"
    kernel = source(Kmsg(device.path), KernelLogConfig(position=file))
    events(kernel)
    device.say(XID + "13, x")
    assert [event.kind for event in events(kernel)] == ["xid"]
    assert events(kernel) == []
    kernel.close()


def test_a_log_that_cannot_be_read_is_blind_once_and_up_when_it_comes(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    kernel, now_ns = source(Kmsg(path)), time.time_ns()
    (blind,) = events(kernel, now_ns)
    assert (blind.kind, str(blind.subject)) == ("source.blind", "source:kernel-log@n1")
    assert "No such file" in str(blind.data["why"])
    assert "mount /dev/kmsg" in str(blind.data["why"])
    os.mkfifo(path)
    assert events(kernel, now_ns + 1) == []
    assert [one.kind for one in events(kernel, now_ns + RETRY_NS)] == ["source.up"]
    kernel.close()


def test_a_forbidden_log_says_what_to_grant(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.touch(mode=0)
    kernel, uid = source(Kmsg(path)), os.geteuid()
    os.seteuid(uid or 65534)  # root may read everything
    try:
        (blind,) = events(kernel)
    finally:
        os.seteuid(uid)
    assert "grant read access" in str(blind.data["why"])


def test_the_log_of_this_machine_is_read_whole() -> None:
    log = Kmsg()
    log.resume({"boot": "another", "number": 0})
    lines = [*log.read(time.time_ns())]
    log.close()
    if log.why_blind:
        pytest.skip(f"LOUD: {log.why_blind}")
    now_ns = time.time_ns()
    assert lines
    assert all(0 < t_ns <= now_ns and "\n" not in line for t_ns, line in lines)


@settings(max_examples=200)
@given(st.lists(st.binary(min_size=1, max_size=200) | st.just(b"4,1,2,-;" + XID.encode() + b"79, x"), max_size=12))
def test_no_record_raises(records: list[bytes]) -> None:
    reader, writer = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)
    for record in records:
        os.write(writer, record)
    kernel = source(Kmsg(Path(f"/proc/self/fd/{reader}")))
    events(kernel)
    kernel.close()
    os.close(reader)
    os.close(writer)


# files

LINES = (
    f"[Sun Feb 23 16:24:18 2025] {XID}119, a\n[Sun Feb 23 16:24:24 2025] {XID}119, b\n[Sun Feb 23 16:26:00 2025] x\n"
)


def codes(kernel: KernelLog, now_ns: int | None = None) -> list[tuple[object, object]]:
    return [(one.data["code"], one.data["count"]) for one in events(kernel, now_ns) if one.kind == "xid"]


def test_a_recording_gives_its_events_with_their_own_times(tmp_path: Path) -> None:
    file = tmp_path / "dmesg.txt"
    file.write_text(LINES)
    kernel = source(KernelLogFiles(file, recorded=True))
    first, last = events(kernel)
    assert (first.data["count"], last.data["count"]) == (1, 2)
    assert (first.t_ns, last.t_ns) == (1740327858 * S, 1740327864 * S)
    assert events(kernel) == []


def test_a_growing_file_is_followed_through_a_rotation(tmp_path: Path) -> None:
    file = tmp_path / "kern.log"
    file.write_text(f"{XID}13, old\n")
    kernel = source(KernelLogFiles(file))
    assert codes(kernel) == [], "what was there before us is not ours"
    with file.open("a") as out:
        out.write(f"{XID}31, x\n{XID}43, half")
    assert codes(kernel) == [(31, 1)]
    with file.open("a") as out:
        out.write(f" a line\n{XID}45, x\n")
    file.rename(tmp_path / "kern.log.1")
    file.write_text(f"{XID}79, x\n")
    assert codes(kernel) == [(43, 1), (45, 1), (79, 1)]
    file.write_text("")
    assert codes(kernel) == []
    file.write_text(f"{XID}48, x\n")
    assert codes(kernel)[-1] == (48, 1)


def test_an_emptied_file_is_a_gap(tmp_path: Path) -> None:
    file = tmp_path / "kern.log"
    file.write_text("x\n" * 50)
    kernel = source(KernelLogFiles(file, recorded=True))
    events(kernel)
    file.write_text(f"{XID}48, x\n")
    assert [one.kind for one in events(kernel)] == ["telemetry.lost", "xid"]


def test_a_last_line_without_its_end_is_read_when_it_stays_so(tmp_path: Path) -> None:
    file = tmp_path / "dmesg.txt"
    file.write_text(f"{XID}79, x")
    kernel = source(KernelLogFiles(file, recorded=True))
    assert codes(kernel) == []
    assert codes(kernel) == [(79, 1)]


def test_a_restart_goes_on_in_the_files(tmp_path: Path) -> None:
    file, config = tmp_path / "kern.log", KernelLogConfig(position=tmp_path / "position.json")
    file.write_text(f"{XID}13, x\n")
    first = source(KernelLogFiles(file, recorded=True), config)
    assert codes(first) == [(13, 1)]
    first.close()
    with file.open("a") as out:
        out.write(f"{XID}31, x\n")
    assert codes(source(KernelLogFiles(file), config)) == [(31, 1)]


def test_a_folder_is_read_file_by_file_and_nothing_special_is_opened(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "a.log").write_text(f"{XID}13, x\n")
    (folder / "b.gz").write_bytes(gzip.compress(f"{XID}31, x\n".encode()))
    (folder / "torn.gz").write_bytes(gzip.compress(b"x" * 100_000)[:60])
    (tmp_path / "secret").write_text(f"{XID}79, x\n")
    (folder / "link.log").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "fifo.log")
    with (folder / "sparse.log").open("wb") as out:
        out.truncate(1 << 40)
    kernel = source(KernelLogFiles(folder, recorded=True))
    began_s = time.monotonic()
    found = events(kernel)
    assert {one.data.get("code") for one in found if one.kind == "xid"} == {13, 31}
    assert [one.kind for one in found if one.kind != "xid"] == ["source.blind"]
    assert time.monotonic() - began_s < 5


def test_a_folder_that_is_not_there_is_blind(tmp_path: Path) -> None:
    (blind,) = events(source(KernelLogFiles(tmp_path / "absent")))
    assert "No such file" in str(blind.data["why"])


@pytest.mark.parametrize(
    ("line", "t_ns"),
    [
        ("[   12.500000] x", 100 * S + 12_500_000_000),
        ("<4>[   12.500000] x", 100 * S + 12_500_000_000),
        ("6,901,100,-;x", 100 * S + 100_000),
        ("[Sun Feb 23 16:24:18 2025] x", 1740327858 * S),
        ("kern  :warn  : 2025-01-21T04:41:44,285060+00:00 x", 1737434504_285060_000),
        ("2025-01-21T05:41:44.285060+01:00 n kernel: [1.000000] x", 1737434504_285060_000),
        ("Feb 23 16:24:18 n kernel: [12.500000] x", 1740327858 * S),
        ("Dec 31 00:00:00 n kernel: x", 1735603200 * S),
        ("Feb 30 00:00:00 n kernel: x", None),
        ("[Sun Xxx 23 16:24:18 2025] x", None),
        ("x", None),
    ],
)
def test_every_form_of_time_is_read(line: str, t_ns: int | None) -> None:
    assert stamp(line, 1740400000 * S, boot_ns=100 * S) == t_ns


@settings(max_examples=200)
@given(st.text(st.sampled_from("[]<>0123456789.:,;-+TZ SunFebDec "), max_size=40))
def test_no_time_raises(line: str) -> None:
    assert stamp(line, 1740400000 * S) is None or line


def test_the_dmesg_of_a_real_hang_has_no_xid(shared: Path) -> None:
    kernel = source(KernelLogFiles(shared / "data/hangs/m4_hang_dmesg.txt.gz", recorded=True))
    assert events(kernel) == []
    assert events(kernel) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpud_dmesg_xid119_gsp_timeout.log", [(119, 1), (119, 3), (119, 1), (119, 1)]),
        ("gpud_dmesg_xid13_oom.log", [(13, 1), (13, 16), (43, 1)]),
    ],
)
def test_real_bursts_are_folded(shared: Path, name: str, expected: list[tuple[int, int]]) -> None:
    kernel = source(KernelLogFiles(shared / "data/telemetry" / name, recorded=True))
    found = [(one.data["code"], one.data["count"]) for one in events(kernel) if one.kind == "xid"]
    assert sorted(found) == sorted(expected)


# the journal

FAKE = """#!{python}
import json, sys
arguments = sys.argv[1:]
assert arguments[0] == "-k" and "json" in arguments
entries = [json.loads(line) for line in open({entries!r})]
if "--after-cursor" in arguments:
    cursor = arguments[arguments.index("--after-cursor") + 1]
    if cursor == "gone":
        sys.exit("Failed to seek to cursor: Invalid argument")
    entries = [one for one in entries if int(one["__CURSOR"][1:]) > int(cursor[1:])]
    entries = entries[:int(arguments[-1])]
else:
    entries = entries[-1:]
print("not an entry")
for one in entries:
    print(json.dumps(one))
"""


@dataclass
class FakeJournal:
    """A journalctl that shows the entries of a file, as the real one does (checked by hand with systemd 252)."""

    command: Path
    entries: Path
    number: int = 0

    def add(self, message: object, facility: str = "0") -> None:
        self.number += 1
        entry = {"__CURSOR": f"c{self.number}", "__REALTIME_TIMESTAMP": str(10**15 + self.number), "MESSAGE": message}
        with self.entries.open("a") as out:
            out.write(json.dumps({**entry, "SYSLOG_FACILITY": facility}) + "\n")


@pytest.fixture
def journal(tmp_path: Path) -> FakeJournal:
    made = FakeJournal(tmp_path / "journalctl", tmp_path / "entries")
    made.entries.touch()
    made.command.write_text(FAKE.format(python=sys.executable, entries=str(made.entries)))
    made.command.chmod(stat.S_IRWXU)
    return made


def test_the_journal_is_read_behind_its_cursor(journal: FakeJournal) -> None:
    journal.add(XID + "13, before us")
    kernel = source(Journal(command=[str(journal.command)], deadline_s=30))
    assert events(kernel) == []
    journal.add(XID + "31, x")
    journal.add([*(XID + "43, \x1b").encode()])
    journal.add(None)
    journal.add(XID + "79, x", facility="1")
    journal.add("x\n" + XID + "45, x")
    found = events(kernel)
    assert [one.data["code"] for one in found] == [31, 43, 45]
    assert found[0].t_ns == (10**15 + 2) * 1000
    assert events(kernel, found[0].t_ns) == []


def test_a_journal_that_says_nothing_or_hangs_is_blind(journal: FakeJournal, tmp_path: Path) -> None:
    (empty,) = events(source(Journal(command=[str(journal.command)], deadline_s=30)))
    assert "grant: group systemd-journal" in str(empty.data["why"])
    (hangs,) = events(source(Journal(command=["sleep", "60"], deadline_s=0.1)))
    (absent,) = events(source(Journal(command=[str(tmp_path / "absent")])))
    assert "cannot be started" in str(absent.data["why"])
    assert hangs.kind == "source.blind"


def test_a_cursor_that_is_gone_is_a_gap(journal: FakeJournal) -> None:
    journal.add("x")
    log = Journal(command=[str(journal.command)], deadline_s=30)
    log.resume({"cursor": "gone"})
    kernel, now_ns = source(log), time.time_ns()
    assert sorted(one.kind for one in events(kernel, now_ns)) == ["source.blind", "telemetry.lost"]
    assert [one.kind for one in events(kernel, now_ns + RETRY_NS)] == ["source.up"]
    journal.add(XID + "13, x")
    assert codes(kernel, now_ns + RETRY_NS + S) == [(13, 1)]


def test_a_source_that_is_none_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"collectors.kernel_log.source: need kmsg, journal or an absolute path, got 'x'"
    ):
        KernelLogConfig(source="x")
