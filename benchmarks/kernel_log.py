"""Lines of the kernel log a second that one core reads: /dev/kmsg records through the grammar and the folding.

    python benchmarks/kernel_log.py

A mixed log (of 100 lines 90 are of no interest, 4 look like it and are not, 6 are errors: Xids, SXids, AER, ports, OOM)
and a storm (nothing but Xids, several GPUs and codes) are read in turns with a floor that only splits the lines into
fields. Each round's lines are other ones (addresses, numbers, pids), so that nothing is learnt by heart. Goal, medians
of the rounds: at least 200,000 lines/s of the mixed log; the ratio to the floor is told too.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from trainwarden.collectors.kernel_bursts import Bursts, BurstsConfig
from trainwarden.collectors.kernel_grammar import KernelGrammar

ROUNDS, LINES, GOAL_LINES_PER_S = 15, 40_000, 200_000

DULL = (
    "IPv6: ADDRCONF(NETDEV_CHANGE): cali{n:x}: link becomes ready",
    "perf: interrupt took too long ({n} > 2500), lowering kernel.perf_event_max_sample_rate to 79500",
    "nvidia-nvswitch2: open (major=510)",
    "pcieport 0000:{b:02x}:01.0: PME: Signaling with IRQ {n}",
    "docker0: port {b}(veth{n:x}) entered blocking state",
    "EXT4-fs (nvme0n1p{b}): mounted filesystem with ordered data mode. Opts: (null)",
    "audit: type=1400 audit({n}.123:{n}): apparmor=\"DENIED\" operation=\"open\" profile=\"x\" name=\"/proc/{n}/stat\"",
    "BIOS-e820: [mem 0x{n:016x}-0x{n:016x}] usable",
    "systemd[1]: Started Session {n} of user root, with a line that is longer than most of the others in this log.",
    " ? entry_SYSCALL_64_after_hwframe+0x{b:x}/0xd1",
)  # fmt: skip
NEAR = (
    "NVRM:     -{b}    103  GSP_RM_ALLOC          0x{n:016x} 0x0000000000000004 0x00062ed1a6bd61fa    699us",
    "mlx5_core 0000:{b:02x}:00.0: firmware version: 28.39.{n}",
    "oom_reaper: reaped process {n} (vector), now anon-rss:0kB, file-rss:0kB, shmem-rss:0",
    "systemd-journald[{n}]: Killed by request",
)
ERRORS = (
    "NVRM: Xid (PCI:0000:{b:02x}:00): 13, pid={n}, name=pt_main_thread, Graphics SM Warp Exception on (GPC 9, TPC 1)",
    "NVRM: Xid (PCI:0000:{b:02x}:00): 31, pid='<unknown>', name=<unknown>, Ch 00000008, intr 00000000. MMU Fault: X",
    "NVRM: Xid (PCI:0008:{b:02x}:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link {b:02d} (0x{n:08x} 0x00000000 0x0)",
    "nvidia-nvswitch3: SXid (PCI:0000:{b:02x}:00.0): 12028, Non-fatal, Link {b} egress non-posted PRIV error (First)",
    "nvme 0000:{b:02x}:00.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)",
    "mlx5_core 0000:{b:02x}:00.0 mlx5_{b}: Port: 1 Link DOWN",
)


def mixed(random: random.Random) -> str:
    kind = random.choices((DULL, NEAR, ERRORS), (90, 4, 6))[0]
    return random.choice(kind)


def storm(random: random.Random) -> str:
    return random.choice(ERRORS[:3])


def log(shape: Callable[[random.Random], str], seed: int) -> str:
    """Records as the kernel gives them, LINES of them, never the same for two seeds."""
    made = random.Random(seed)
    bodies = (shape(made).format(n=made.randrange(1 << 31), b=made.randrange(16)) for _ in range(LINES))
    return "\n".join(f"4,{seed * LINES + i},{seed * 10**8 + i * 97},-;{body}" for i, body in enumerate(bodies))


def floor(text: str) -> int:
    """Only splits."""
    return sum(len(line.split(",", 3)) for line in text.split("\n"))


def ours(text: str) -> int:
    """Grammar and folding, as the source does it."""
    grammar, bursts = KernelGrammar(), Bursts(BurstsConfig())
    told = 0
    for t_ns, line in enumerate(text.split("\n")):
        fact = grammar(line)
        if fact is not None:
            told += len([*bursts.add(fact, t_ns * 10_000)])
    return told + len(bursts.close())


def lines_per_s(read: Callable[[str], int], text: str) -> float:
    began_s = time.process_time()
    read(text)
    return LINES / (time.process_time() - began_s)


def row(name: str, ours_per_s: Sequence[float], floor_per_s: Sequence[float]) -> float:
    """Print one log's medians; lines a second of ours."""
    middle, least = statistics.median(ours_per_s), statistics.median(floor_per_s)
    ratio = statistics.median(one / two for one, two in zip(floor_per_s, ours_per_s, strict=True))
    print(f"{name}: {middle:,.0f} lines/s; a loop that only splits: {least:,.0f} lines/s ({ratio:.1f} x as fast)")
    return middle


def main() -> int:
    """Measure, print, and tell by the exit status whether the goal is met."""
    rates: dict[tuple[str, str], list[float]] = {}
    for seed in range(ROUNDS):
        for name, shape in (("mixed", mixed), ("storm", storm)):
            text = log(shape, seed)
            for side, read in (("ours", ours), ("floor", floor))[:: 1 if seed % 2 else -1]:
                rates.setdefault((name, side), []).append(lines_per_s(read, text))
    mixed_per_s = row("mixed log", rates["mixed", "ours"], rates["mixed", "floor"])
    row("storm of Xids", rates["storm", "ours"], rates["storm", "floor"])
    verdict = "PASS" if mixed_per_s >= GOAL_LINES_PER_S else "FAIL"
    print(f"kernel log: {mixed_per_s:,.0f} lines/s on one core (goal {GOAL_LINES_PER_S:,}) {verdict}")
    return verdict == "FAIL"


if __name__ == "__main__":
    sys.exit(main())
