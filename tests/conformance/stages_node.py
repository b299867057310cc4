"""Stages of what a node's kernel says."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conformance.stages import LIMIT_S, START_NS, Files, Harm, Items, Stage, miniature
from tests.fakes.sysfs import public_folder

from trainwarden.collectors.clockstate import ClockState
from trainwarden.collectors.files.kernel_logs import KernelLogFiles
from trainwarden.collectors.host import Host, HostConfig
from trainwarden.collectors.infiniband import Infiniband, InfinibandConfig
from trainwarden.collectors.kernel_journal import Journal
from trainwarden.collectors.kmsg import KernelLog, KernelLogConfig, Kmsg, Log
from trainwarden.collectors.mounts import Mounts, MountsConfig
from trainwarden.collectors.node_labels import NodeLabelsConfig
from trainwarden.collectors.node_labels import node_labels as node_labels_of
from trainwarden.collectors.pcie import PcieConfig, PcieErrors
from trainwarden.collectors.slurm import Slurm, SlurmConfig
from trainwarden.core.model import Event
from trainwarden.core.ports import Source

# the node's kernel


@contextmanager
def host() -> Iterator[Stage]:
    with miniature() as mini:
        mini.host()
        files = Files(*(path for path in mini.sys.parent.rglob("*") if path.is_file()))
        clock, roots = ClockState(synchronized=True, offset_s=0.25), {"proc": mini.proc, "sys": mini.sys}
        yield Stage(
            make=lambda: Host(HostConfig(), node="n1", start_ns=START_NS, ask_clock=lambda: clock, **roots),
            harms=files.harms(),
            heal=files.heal,
            left=("node_clock_offset_seconds", "node_clock_synchronized"),
            files=files,
        )


@contextmanager
def infiniband() -> Iterator[Stage]:
    with miniature() as mini:
        port = {"state": "4: ACTIVE\n", "phys_state": "5: LinkUp\n", "rate": "400 Gb/sec (4X NDR)\n"}
        names = ("port_xmit_data", "port_rcv_data", "symbol_error", "link_downed", "port_xmit_wait")
        port |= {f"counters/{name}": f"{number}\n" for number, name in enumerate(names, 255)}
        folder = mini.rdma("mlx5_0", {f"ports/1/{file}": text for file, text in port.items()}, pci="0000:9b:00.0")
        files = Files(*(folder / "ports/1" / file for file in port))
        away = mini.sys.with_name("away")
        yield Stage(
            make=lambda: Infiniband(InfinibandConfig(), node="n1", start_ns=START_NS, sys=mini.sys),
            harms=files.harms() | {"the driver gone": lambda: mini.sys.rename(away)},
            heal=lambda: away.rename(mini.sys) if away.exists() else files.heal(),
            files=files,
        )


@contextmanager
def pcie() -> Iterator[Stage]:
    with miniature() as mini:
        rows = {"correctable": "TOTAL_ERR_COR", "nonfatal": "TOTAL_ERR_NONFATAL", "fatal": "TOTAL_ERR_FATAL"}
        device = mini.sys / "bus/pci/devices/0000:9b:00.0"
        texts = {f"aer_dev_{file}": f"RxErr 1\n{row} {number}\n" for number, (file, row) in enumerate(rows.items(), 7)}
        files = Files(*(mini.put(device / file, text) for file, text in texts.items()))
        yield Stage(
            make=lambda: PcieErrors(PcieConfig(), node="n1", start_ns=START_NS, sys=mini.sys),
            harms=files.harms(),
            heal=files.heal,
            polls=len(files.kept),
            files=files,
        )


@contextmanager
def mounts() -> Iterator[Stage]:
    with miniature() as mini:
        files = Files(mini.put(mini.proc / "self/mounts", "fs:/x /shared nfs4 rw 0 0\n"))
        answer, failing, asked_s = threading.Event(), list[OSError](), [0.0]

        def ask(folder: str) -> None:
            asked_s[0] = time.monotonic()
            answer.wait(LIMIT_S)
            if failing:
                raise failing[0]

        def heal() -> None:
            answer.set()
            failing.clear()
            files.heal()

        def settled(source: Source) -> bool:
            waits = isinstance(source, Mounts) and source.hanging
            return not waits or (not answer.is_set() and time.monotonic() - asked_s[0] > 10 * deadline_s)

        answer.set()
        config = MountsConfig(deadline=MountsConfig().deadline / 500)
        deadline_s = config.deadline.total_seconds()
        broken = {"failing": lambda: failing.append(OSError(116, "Stale file handle")), "hanging": answer.clear}
        yield Stage(
            make=lambda: Mounts(config, node="n1", start_ns=START_NS, proc=mini.proc, ask=ask),
            harms=files.harms() | broken,
            heal=heal,
            settled=settled,
            polls=2,
            quiet=("empty", "garbage", "a FIFO"),
            left=("node_mount_latency_seconds",),  # of what hangs it is the time so far
        )
        answer.set()


def _kernel_log(log: Callable[[], Log]) -> Callable[[], Source]:
    return lambda: KernelLog(KernelLogConfig(), "n1", start_ns=START_NS, log=log())


def _whole(path: Path) -> bool:
    return os.path.isfile(path) and os.access(path, os.R_OK, effective_ids=True)


def _xids(source: Source, items: Items) -> bool:
    return any(isinstance(item, Event) and item.kind == "xid" for item in items)


@contextmanager
def kmsg() -> Iterator[Stage]:
    """The device; a pipe of packets in its place."""
    reader, writer = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)
    number = iter(range(100, 10**6))
    with public_folder() as folder:
        path = folder / "kmsg"
        path.touch()
        files = Files(path)
        harms = {way: harm for way, harm in files.harms().items() if way != "a FIFO"}

        def heal() -> None:
            files.heal()
            path.unlink()
            path.symlink_to(f"/proc/self/fd/{reader}")

        def null() -> None:
            path.unlink()
            path.symlink_to("/dev/null")

        heal()
        yield Stage(
            make=_kernel_log(lambda: Kmsg(path)),
            harms=harms | {"another device": null},
            heal=heal,
            stir=lambda: os.write(writer, b"4,%d,1,-;NVRM: Xid (PCI:0000:9b:00): 31, x\n" % next(number)),
            told=_xids,
            later=False,
        )
    os.close(reader)
    os.close(writer)


@contextmanager
def log_file() -> Iterator[Stage]:
    codes = iter(range(10_000))
    with public_folder() as folder:
        path = folder / "kern.log"
        path.write_text("[    1.000000] NVRM: Xid (PCI:0000:9b:00): 31, x\n")
        files = Files(path)

        def stir() -> None:
            if _whole(path) and path.read_bytes()[:1] == b"[":
                with path.open("a") as out:
                    out.write(f"[    2.000000] NVRM: Xid (PCI:0000:9b:00): {next(codes)}, x\n")

        def link() -> None:
            path.unlink()
            path.symlink_to("/dev/zero")

        yield Stage(
            make=_kernel_log(lambda: KernelLogFiles(path, recorded=True)),
            harms=files.harms() | {"a link": link},
            heal=files.heal,
            stir=stir,
            told=_xids,
            quiet=("a folder", "empty", "garbage"),
        )


def _made(source: Source | None) -> Source:
    assert source is not None
    return source


def _domains(source: Source, items: Items) -> bool:
    return any(isinstance(item, Event) and item.kind == "node.domains" for item in items)


@contextmanager
def _changing(name: str, text: str) -> Iterator[tuple[Path, dict[str, Harm], Harm, Harm]]:
    """A file that root keeps, of which a word changes from look to look: (path, harms, heal, stir)."""
    numbers = iter(range(10**6))
    with public_folder() as folder:
        path = folder / name
        path.write_text(text)
        files = Files(path)

        def stir() -> None:
            if _whole(path) and path.read_bytes()[:4] == text[:4].encode():
                path.write_text(text.replace("0", f"{next(numbers)}"))

        yield path, {way: harm for way, harm in files.harms().items() if way != "a FIFO"}, files.heal, stir


@contextmanager
def slurm() -> Iterator[Stage]:
    with _changing("topology.conf", "SwitchName=leaf0 Nodes=n[1-4]\n") as (path, harms, heal, stir):
        config, folder = SlurmConfig(folders=(path.parent,)), path.parent
        harms["the folder forbidden"] = lambda: folder.chmod(0)

        def mend() -> None:
            folder.chmod(0o755)
            heal()

        yield Stage(
            make=lambda: Slurm(config, node="n1", start_ns=START_NS, env={}),
            harms=harms,
            heal=mend,
            stir=stir,
            told=_domains,
            quiet=("missing",),
        )


@contextmanager
def node_labels() -> Iterator[Stage]:
    with _changing("labels", 'topology.kubernetes.io/zone="zone0"\n') as (path, harms, heal, stir):
        yield Stage(
            make=lambda: _made(node_labels_of(NodeLabelsConfig(file=path), node="n1", start_ns=START_NS)),
            harms=harms,
            heal=heal,
            stir=stir,
            told=_domains,
            quiet=("empty",),
            turn_ns=1000 * 10**9,
        )


JOURNAL = """#!{python} -S
import sys
print('{{"__CURSOR": "c", "__REALTIME_TIMESTAMP": "7", "MESSAGE": "NVRM: Xid (PCI:0000:9b:00): 31, x"}}')
"""


@contextmanager
def journal() -> Iterator[Stage]:
    """A journalctl that always knows one more entry."""
    with public_folder() as folder:
        path = folder / "journalctl"
        path.write_text(JOURNAL.format(python=sys.executable))
        path.chmod(0o755)
        files = Files(path)
        harms = files.harms()
        yield Stage(
            make=_kernel_log(lambda: Journal(command=[str(path)], deadline_s=LIMIT_S)),
            harms={way: harms[way] for way in ("missing", "garbage")},
            heal=files.heal,
            polls=2,
            told=_xids,
        )
