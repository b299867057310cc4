"""Lines of the kernel log: every form that was seen in public, whatever stands before it, and hostile ones."""

import csv
import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwarden.collectors.kernel_grammar import LINE_CHARS, Fact, KernelGrammar, interesting, parse

PREFIXES = (
    "",
    "[131453.740743] ",
    "[    0.000001][ T1234] ",
    "[...] ",
    "[Sun Feb 23 16:24:18 2025] ",
    "[Sat Mar  1 01:02:03 2025] ",
    "Mar  1 17:38:27 node-1 kernel: [123.456789] ",
    "node-1 kernel: ",
    "kernel: ",
    "6,901,100;",
    "6,901,100,-;",
    "4,1227,437812449932,c;",
    "4,1227,437812449932,-,caller=T12;",
    "<4>[12.345678] ",
    "kern  :warn  : [131453.740743] ",
    "kern  :warn  : 2025-01-21T04:41:44,285060+00:00 ",
    "2025-01-21T04:41:44.285060+00:00 node-1 kernel: [12.345678] ",
)

MIDDLES = (
    ("", None, None),
    ("pid=77, ", 77, None),
    ("pid=77, name=python3, ", 77, "python3"),
    ("pid=77, name=ray::WorkerDict, ", 77, "ray::WorkerDict"),
    ("pid=77, name=nvc:[driver], ", 77, "nvc:[driver]"),
    ("pid=77, name=KMS thread, ", 77, "KMS thread"),
    ("pid='<unknown>', name=<unknown>, ", None, None),
    ("name=train.3, ", None, "train.3"),
)

BODIES = (
    (13, "Graphics SM Warp Exception on (GPC 9, TPC 1, SM 1): Out Of Range Address"),
    (13, "Graphics SM Global Exception on (GPC 8, TPC 5, SM 1): Multiple Warp Errors"),
    (13, "Graphics Exception: ESR 0x546fb0=0x11f000e 0x546fb4=0x24 0x546fa8=0xf81eb60 0x546fac=0x1174"),
    (13, "Graphics Exception: ChID 000c, Class 0000cbc0, Offset 00000000, Data 00000000"),
    (31, "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_10 faulted @ 0x7f_1. Fault is of type X"),
    (31, "channel 0x00000002 ... GPC0 UNRECOGNIZED_CLIENT ... UNRECOGNIZED_FAULT UNRECOGNIZED_ACCESS_TYPE"),
    (32, "Channel ID 0000000d intr0 00040000"),
    (43, "channel 0x0b00000a"),
    (45, "Ch 00000001 caused by previous Xid 149"),
    (46, "7"),
    (48, "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 1"),
    (62, "0c83(1870) 00000000 00000000"),
    (63, "Row Remapper: New row marked for remapping, reset gpu to activate."),
    (64, "Row Remapper Error: (0x1) - All reserved rows for bank are remapped"),
    (69, "Class Error: ChId 0008, Class 0000cbc0, Offset 00000184, Data ffffffff, ErrorCode 00000004"),
    (79, "GPU has fallen off the bus."),
    (94, "Contained: CE User Channel (0x9). RST: No, D-RST: No"),
    (95, "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No"),
    (109, "Ch 00000008, errorString CTX SWITCH TIMEOUT, Info 0x58005"),
    (
        119,
        "Timeout after 6s of waiting for RPC response from GPU4 GSP! Expected function 103 (GSP_RM_ALLOC) (0x1 0x4).",
    ),
    (120, "GSP task exception: load access fault"),
    (145, "RLW_NEW Sometimes XC7 of an unknown form"),
    (154, "("),
    (171, ""),
    (99999, "unknown error"),
)

NAMES = ("pid", "process", "body", "code")


def read(line: str) -> Fact:
    fact = parse(line)
    assert fact is not None, line
    return fact


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    ("at", "pci"),
    [
        ("(PCI:0000:9b:00)", "0000:9b:00"),
        ("(0000:03:00)", "0000:03:00"),
        ("(PCI:0000:9B:00.0)", "0000:9b:00"),
        ("(PCI:0019:01:00)", "0019:01:00"),
        ("PCI:0018:01:00", "0018:01:00"),
    ],
)
def test_an_xid_is_read_behind_any_prefix_and_its_domain_is_never_the_code(prefix: str, at: str, pci: str) -> None:
    for middle, pid, process in MIDDLES:
        for code, body in BODIES:
            data = read(f"{prefix}NVRM: Xid {at}: {code}, {middle}{body}").data
            assert (data["pci"], *(data[name] for name in NAMES)) == (pci, pid, process, body, code)


def test_a_mig_instance_is_told() -> None:
    fact = read("NVRM: Xid (PCI:0000:9b:00 GPU-I:05): 43, pid=1, name=a, Ch 00000008")
    assert (fact.where, fact.data["mig"], fact.data["code"]) == ("0000:9b:00", 5, 43)


@pytest.mark.parametrize(
    ("code", "body", "unit", "severity", "link", "words"),
    [
        (149, "NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x1 0x2 0x3)", "NETIR_LINK_EVT", "fatal", 9, [1, 2, 3]),
        (149, "NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x0)", "NETIR", "fatal", -1, [0xFE406, 0]),
        (149, "NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00", "NETIR", "fatal", -1, [0xFE406]),
        (149, "NETIR Fatal XC0 i0 Link 3", "NETIR", "fatal", 3, []),
        (146, "TLW_RX/TLW_RX_PIPE0 Nonfatal XC1 i0 Link 00 (0xa)", "TLW_RX/TLW_RX_PIPE0", "nonfatal", 0, [10]),
    ],
)
def test_a_link_error_of_nvlink_5_is_taken_apart(
    code: int, body: str, unit: str, severity: str, link: int, words: list[int]
) -> None:
    data = read(f"NVRM: Xid (PCI:0008:01:00): {code}, pid=7, name=a, {body}").data
    assert [data[key] for key in ("unit", "severity", "link", "words")] == [unit, severity, link, words]


def test_a_link_error_before_nvlink_5_gives_its_registers() -> None:
    fact = read("NVRM: Xid (PCI:0000:9b:00): 74, NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0)")
    assert (fact.data["link"], fact.data["words"], fact.part) == (14, [0, 0, 0x10000, 0], "14")


def test_a_recovery_action_is_read_and_each_new_one_is_another_event() -> None:
    line = "NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)"
    fact = read(line)
    assert (fact.data["action"], fact.data["action_code"], fact.data["action_was"]) == ("Drain and Reset", 4, "None")
    assert fact.part == "Drain and Reset"


@pytest.mark.parametrize(
    "tail", ["Xid : 32", "Xid 74: NVLink fatal link down on GPU 3", "Xid (PCI:0000:9b:00): abc", "Xid"]
)
def test_a_garbled_xid_is_told_without_a_code(tail: str) -> None:
    fact = read(f"NVRM: {tail}")
    assert (fact.kind, fact.data["code"]) == ("xid", None)
    assert str(fact.data["line"]).startswith("NVRM: Xid")


@pytest.mark.parametrize(
    ("text", "code", "severity", "link", "body"),
    [
        (
            "3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)",
            12028,
            "nonfatal",
            32,
            "Link 32 egress non-posted PRIV error (First)",
        ),
        (
            "0 SXid (PCI:0000:a9:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
            20034,
            "fatal",
            30,
            "Link 30 LTSSM Fault Up",
        ),
        (
            "0: SXid (PCI:0000:a9:00.0): 20034, Severity 1 Engine instance 60 Sub-engine instance 00",
            20034,
            "",
            None,
            "Severity 1 Engine instance 60 Sub-engine instance 00",
        ),
        (
            "0: SXid (PCI:0000:a9:00.0): 11111, Data {0x50610002, 0x10100030}",
            11111,
            "",
            None,
            "Data {0x50610002, 0x10100030}",
        ),
        (
            "0: SXid (PCI:0000:a9:00.0): 11001, Fatal, ingress invalid command",
            11001,
            "fatal",
            None,
            "ingress invalid command",
        ),
        ("0: SXid (PCI:0000:a9:00.0): 26006, SOE HALTED", 26006, "", None, "SOE HALTED"),
        ("0: SXid (PCI:0000:a9:00.0): 01234, Non-fatal", 1234, "nonfatal", None, ""),
    ],
)
def test_an_sxid_is_read(text: str, code: int, severity: str, link: int | None, body: str) -> None:
    for prefix in PREFIXES:
        data = read(f"{prefix}nvidia-nvswitch{text}").data
        assert [data[key] for key in ("code", "severity", "link", "body")] == [code, severity, link, body]


@pytest.mark.parametrize(
    ("line", "kind", "where", "data"),
    [
        ("NVRM: GPU 0000:5d:00.0: GPU has fallen off the bus.", "gpu.off_bus", "0000:5d:00", {}),
        (
            "NVRM: GPU 0000:4e:00.0: RmInitAdapter failed! (0x22:0x56:884)",
            "driver.error",
            "0000:4e:00",
            {"error": "RmInitAdapter failed", "body": "(0x22:0x56:884)"},
        ),
        ("NVRM: A GPU crash dump has been created. If possible, run x", "driver.error", "", {"pci": None}),
        (
            "NVRM: nvAssertFailedNoLog: Assertion failed: x @ y.c:1",
            "driver.error",
            "",
            {"error": "nvAssertFailedNoLog"},
        ),
        (
            "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping",
            "driver.error",
            "",
            {"error": "nvidia-peermem", "body": "detected invalid context, skipping"},
        ),
        (
            "pcieport 0000:b7:01.0: AER: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)",
            "pcie.aer",
            "0000:b7:01",
            {"severity": "corrected", "error": "Data Link Layer (Transmitter ID)"},
        ),
        (
            "nvme 0000:01:00.1: PCIe Bus Error: severity=Uncorrectable (Non-Fatal), type=Transaction Layer",
            "pcie.aer",
            "0000:01:00.1",
            {"severity": "nonfatal"},
        ),
        (
            "x 0000:01:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=X, id=1(Agent ID)",
            "pcie.aer",
            "0000:01:00",
            {"severity": "fatal", "error": "X (Agent ID)"},
        ),
        ("mlx5_core 0000:0c:00.0 mlx5_5: Port: 1 Link DOWN", "link.state", "mlx5_5/1", {"state": "DOWN"}),
        ("mlx5_core 0000:0c:00.0 mlx5_5: Port: 1 Link ACTIVE", "link.state", "mlx5_5/1", {"state": "ACTIVE"}),
        ("mlx5_core 0000:0c:00.1 eth2: Link down", "link.state", "eth2", {"state": "DOWN"}),
        (
            "pt_main_thread[77]: segfault at 7f ip 00007f sp 00007f error 4 in libnccl.so.2[7f7c7ac00000+d3d3000]",
            "kernel.segfault",
            "77",
            {"library": "libnccl.so.2", "process": "pt_main_thread"},
        ),
        (
            "traps: python3[77] general protection fault ip:7f sp:7f error:0 in libnccl.so.2.19[7f+1000]",
            "kernel.segfault",
            "77",
            {"library": "libnccl.so.2.19", "process": "python3"},
        ),
        (
            "Out of memory: Killed process 77 (python3) total-vm:1kB, anon-rss:0kB",
            "oom.kill",
            "77",
            {"process": "python3"},
        ),
        ("Memory cgroup out of memory: Killed process 77 (a b), UID 0", "oom.kill", "77", {"process": "a b"}),
        ("Out of memory: Kill process 77 (python) score 50 or sacrifice child", "oom.kill", "77", {}),
        (
            "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task_memcg=/a,task=x,pid=1,uid=0/b,task=node,pid=77,uid=0",
            "oom.kill",
            "77",
            {"process": "node"},
        ),
    ],
)
def test_neighbouring_lines_are_read(line: str, kind: str, where: str, data: dict[str, object]) -> None:
    for prefix in PREFIXES:
        fact = read(prefix + line)
        assert (fact.kind, fact.where) == (kind, where)
        assert {key: fact.data[key] for key in data} == data


@pytest.mark.parametrize(
    "line",
    [
        "mlx5_core 0000:0c:00.0: mlx5_cmd_out_err:818: ACCESS_REG(0x805) failed, bad resource state, err(-22)",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15",
        "NVRM: GPU4 GSP RPC buffer contains function 103 (GSP_RM_ALLOC) and data 0x2081 0x4.",
        "nvidia-nvswitch2: open (major=510)",
        "sshd[66048]: segfault at 0 ip 0000 sp 00007 error 14 in sshd[555dbd1d2000+d0000]",
        "oom_reaper: reaped process 345646 (vector), now anon-rss:0kB",
        "oom-kill:constraint=OTHER_CONSTRAINT",
    ],
)
def test_what_is_no_fault_says_nothing(line: str) -> None:
    assert all(parse(prefix + line) is None for prefix in PREFIXES)


@pytest.mark.parametrize(
    "line",
    [
        "python3[1]: NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
        "6,1,2,-;EXT4-fs error: name NVRM: Xid (PCI:0000:01:00): 79, x",
        "user  :warn  : [1.0] NVRM: Xid (PCI:0000:01:00): 79, x",
        "audit: cgroup=/a/Out of memory: Killed process 1 (systemd)",
    ],
)
def test_a_message_in_the_middle_of_a_line_is_somebody_elses_text(line: str) -> None:
    assert parse(line) is None


def test_a_gpu_that_fell_off_the_bus_in_three_lines_is_named_once() -> None:
    grammar = KernelGrammar()
    lines = (
        "NVRM: The NVIDIA GPU 0000:5d:00.0",
        "NVRM: (PCI ID: 10de:20b0) installed in this system has",
        "eth0: link up",
        "NVRM: fallen off the bus and is not responding to commands.",
    )
    facts = [fact for line in lines if (fact := grammar(f"[1.000000] {line}"))]
    assert [(fact.kind, fact.where, fact.data["pci"]) for fact in facts] == [
        ("gpu.off_bus", "0000:5d:00", "0000:5d:00")
    ]
    alone = KernelGrammar()(lines[-1])
    assert alone is not None
    assert (alone.where, alone.data["pci"]) == ("", None), "which GPU is not known"


def test_the_log_itself_tells_a_gpus_uuid() -> None:
    grammar = KernelGrammar()
    assert grammar("NVRM: GPU at PCI:0000:9b:00: GPU-000009fb-0000-0000-0000-000000000000") is None
    assert grammar.uuids == {"0000:9b:00": "GPU-000009fb-0000-0000-0000-000000000000"}


def test_hostile_text_is_cleaned_and_capped() -> None:
    fact = read("NVRM: Xid (PCI:0000:9b:00): 13, pid=1, name=\x1b[2J\u202ex, " + "y\x07" * 5000)
    texts = [value for value in fact.data.values() if isinstance(value, str)]
    assert all(text.isprintable() and len(text) <= LINE_CHARS for text in texts)
    assert fact.data["process"] == "?[2J?x"


NUMBERS = st.integers(0, 10**9 - 1)
HEX = st.integers(0, 0xFF)
TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40)


@settings(max_examples=200)
@given(
    st.text()
    | st.binary()
    | st.lists(
        st.sampled_from(
            (
                "NVRM: ",
                "Xid ",
                "(PCI:",
                "0000:9b:00",
                "): ",
                "149, ",
                "154, from 0x",
                "nvidia-nvswitch0: SXid ",
                "pid=",
                "name=",
                "Link ",
                "(",
                ")",
                "\x00",
                "\ud800",
                "9" * 30,
                "Kill",
                " segfault at ",
                " in a.so[",
                "traps: ",
                "mlx5_core ",
                "PCIe Bus Error: severity=",
                "\u0663",
            )
        ),
        max_size=12,
    ).map("".join)
)
def test_no_text_raises_and_what_is_said_is_plain_json(line: str | bytes) -> None:
    fact = parse(line)
    if isinstance(line, str):
        KernelGrammar()(line)
        assert fact is None or interesting(line)
    if fact is not None:
        assert json.loads(json.dumps(fact.data, allow_nan=False)) == fact.data
        assert json.dumps(fact.data, ensure_ascii=False).encode()


@settings(max_examples=200)
@given(
    st.sampled_from(PREFIXES),
    st.integers(0, 0xFFFF),
    HEX,
    HEX,
    NUMBERS,
    st.sampled_from(MIDDLES),
    TEXT.map(str.strip).filter(lambda text: not text.startswith(("pid=", "name=", "channel", ".", ","))),
)
def test_a_line_of_known_shape_comes_back_as_it_was_made(
    prefix: str, domain: int, bus: int, slot: int, code: int, middle: tuple[str, int | None, str | None], body: str
) -> None:
    pci = f"{domain:04x}:{bus:02x}:{slot:02x}"
    data = read(f"{prefix}NVRM: Xid (PCI:{pci}): {code}, {middle[0]}{body}").data
    assert tuple(data[name] for name in ("pci", *NAMES)) == (pci, middle[1], middle[2], body, code)


@settings(max_examples=200)
@given(
    st.integers(144, 150), st.booleans(), st.integers(0, 1), st.integers(-1, 17), st.lists(st.integers(0, 2**32 - 1))
)
def test_a_link_error_comes_back_as_it_was_made(
    code: int, fatal: bool, cross: int, link: int, words: list[int]
) -> None:
    severity = "Fatal" if fatal else "Nonfatal"
    tail = f"RLW_CTRL {severity} XC{cross} i0 Link {link:02d} ({' '.join(f'0x{word:08x}' for word in words)})"
    data = read(f"NVRM: Xid (PCI:0000:01:00): {code}, {tail}").data
    assert [data[key] for key in ("severity", "cross_contained", "link", "words")] == [
        severity.lower(),
        cross,
        link,
        words,
    ]


def test_every_public_line_gives_its_labelled_code(shared: Path) -> None:
    with (shared / "data/telemetry/gpud_xid_lines.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 77
    for row in rows:
        fact = read(row["line"])
        assert (fact.kind, fact.data["code"]) == (row["kind"].lower(), int(row["code"])), row["line"]
        assert fact.where == row["pci"].removeprefix("PCI:").removesuffix(".0")


@pytest.mark.parametrize(
    ("name", "kinds", "codes"),
    [
        ("telemetry/gpud_dmesg_libnccl_segfault.log", {"kernel.segfault": 2}, {}),
        ("telemetry/gpud_dmesg_xid119_gsp_timeout.log", {"xid": 5, "driver.error": 1}, {119: 5}),
        ("telemetry/gpud_dmesg_xid13_oom.log", {"xid": 17, "oom.kill": 4}, {13: 16, 43: 1}),
        ("telemetry/gpud_kmsg_raw.log", {}, {}),
        ("hangs/m4_hang_dmesg.txt.gz", {}, {}),
    ],
)
def test_real_logs_say_what_is_known_of_them(
    shared: Path, name: str, kinds: dict[str, int], codes: dict[int, int]
) -> None:
    path = shared / "data" / name
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    grammar = KernelGrammar()
    facts = [fact for line in text.decode(errors="replace").splitlines() if (fact := grammar(line))]
    assert Counter(fact.kind for fact in facts) == kinds
    assert Counter(fact.data["code"] for fact in facts if fact.kind == "xid") == codes
