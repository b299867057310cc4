"""What single lines of the kernel log mean: NVIDIA drivers, PCIe, network ports, the OOM killer, crashes.

Tolerant where drivers differ (prefixes of dmesg, journal, syslog and /dev/kmsg; old and new forms; cut tails), strict
about where a message begins: behind its prefix, since the middle of a line may hold names that a tenant chose (of a
process, a cgroup). An unknown code or tail falls back to the plain text, a garbled Xid to one without a code. Nothing
raises. The forms are those of NVIDIA's open kernel modules (nv_printf), of lines quoted in public issues and of Linux
(drivers/pci/pcie/aer.c, mm/oom_kill.c, arch/x86/mm/fault.c, arch/x86/kernel/traps.c). What a code means is decided by
the detectors.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from trainwarden.core.model import Json

LINE_CHARS: Final = 400
"""Of a line that an event quotes."""

_MATCHED_CHARS: Final = 4096
"""Of a line that is looked at: cgroup paths make OOM lines long, no other line comes near."""

_UUIDS: Final = 64
"""GPUs of one node whose UUID is remembered; the most that any node has is 16."""

_NAMED, _UUID = "gpu.named", "gpu.uuid"
"""Lines that only tell about others: no events."""

_BDF = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?"
_PREFIX = re.compile(
    r"\d{1,4},\d{1,20},\d{1,20}(?:,[^;]{0,64})?;"  # /dev/kmsg: priority, number, microseconds, flags
    r"|(?:<\d{1,3}>)?(?:kern *: *[a-z]+ *: )?"  # printk's level; dmesg --decode
    r"(?:(?:\d{4}-\d\d-\d\d[T ][\d:.,]{8,18}(?:[+-]\d\d:?\d\d|Z)?|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) )?"
    r"(?:(?:\S{1,255} )?kernel: )?"  # syslog, journal: the host
    r"(?:\[(?:[ \d.]{3,24}|[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d:]{16,24}|\.\.\.| *[TC]\d+)\] ?){0,2}"
)
_XID = re.compile(
    rf"NVRM: Xid \(?(?:PCI:)?(?P<pci>{_BDF})(?: +GPU-I:(?P<mig>\d{{1,4}}))?\)? *: *(?P<code>\d{{1,9}})\b[., ]*"
    r"(?:pid='?(?P<pid>\d{1,10}|<[^>]*>)'?,? *)?(?:name='?(?P<process>.{0,64}?)'?(?:, *|$))?(?P<body>.*)"
)
_GARBLED = re.compile(rf"NVRM: Xid\b(?:[ (]*(?:PCI:)?(?P<pci>{_BDF}))?(?P<body>.*)")
_LINK_ERROR = re.compile(r"NVLink: fatal error detected on link (?P<link>\d{1,4})\s*(?P<words>\(.*)?")
_UNIT = re.compile(
    r"(?P<unit>\S{1,64})\s+(?P<severity>Fatal|Nonfatal)\s+XC(?P<cross_contained>\d)\s+i(?P<injected>\d)"
    r"\s+Link\s+(?P<link>-?\d{1,4})\s*(?P<words>\(.*)?"
)
_RECOVERY = re.compile(
    r".*?from 0x[0-9a-f]{1,8} \((?P<was>[^()]+)\) to 0x(?P<code>[0-9a-f]{1,8}) \((?P<action>[^()]+)\)"
)
_WORD = re.compile(r"0x[0-9a-fA-F]{1,16}")
_WHOLE_WORD = re.compile(r"0x[0-9a-fA-F]{8}")
_SXID = re.compile(
    rf"nvidia-nvswitch(?P<switch>\d{{1,4}}):? SXid \(PCI:(?P<pci>{_BDF})\) *: *(?P<code>\d{{1,9}})\b[., ]*"
    r"(?:(?P<severity>Fatal|Non-fatal)\b[., ]*)?(?P<body>(?:Link (?P<link>\d{1,4})\b)?.*)"
)
_OFF_BUS = re.compile(
    rf"NVRM: (?:GPU (?P<pci>{_BDF}): GPU has |The NVIDIA GPU (?P<named>{_BDF}).* has )?fallen off the bus"
)
_NAMED_LINE = re.compile(rf"NVRM: The NVIDIA GPU (?P<pci>{_BDF})")
_UUID_LINE = re.compile(rf"NVRM: GPU at PCI:(?P<pci>{_BDF}): (?P<uuid>GPU-[0-9a-fA-F-]{{8,40}})")
_DRIVER = re.compile(
    rf"NVRM: (?:GPU (?P<pci>{_BDF}): )?(?P<error>RmInitAdapter failed|A GPU crash dump has been created"
    rf"|nvAssert\w{{0,40}}|Rate limiting GSP RPC error prints for GPU at PCI:(?P<named>{_BDF}))[!.: ]*(?P<body>.*)"
)
_PEERMEM = re.compile(r"(?P<pci>)(?P<error>nvidia-peermem) .{0,200}?ERROR (?P<body>.*)")
_AER = re.compile(
    rf"\S{{1,64}} (?P<pci>{_BDF}): (?:AER: )?PCIe Bus Error: severity=(?P<severity>[^,]*), type=(?P<type>[^,]*)"
    r"(?:, .{0,64}?\((?P<agent>[^)]*)\))?"
)
_AER_SEVERITIES = {"non-fatal": "nonfatal", "(fatal": "fatal", "uncorrect": "uncorrected", "correct": "corrected"}
"""What a severity has in it (Corrected, Correctable, Uncorrected (Non-Fatal) ...) -> sysfs' word for it."""
_MLX5 = re.compile(
    rf"mlx5_core {_BDF}:? (?P<port>[\w.-]{{1,32}}):? (?:Port: (?P<number>\d{{1,3}}) )?"
    r"[Ll]ink (?P<state>(?i:down|init|armed|active|up))\b"
)
_SO = r"[^\[\]]{1,100}\.so[^\[\]]{0,28}"
_SEGFAULT = re.compile(
    rf"(?P<process>.{{1,64}}?)\[(?P<pid>\d{{1,10}})\]: segfault at .{{0,400}} in (?P<library>{_SO})\["
)
_TRAP = re.compile(
    r"traps: (?P<process>.{1,64}?)\[(?P<pid>\d{1,10})\] (?:general protection|trap )"
    rf".{{0,400}} in (?P<library>{_SO})\["
)
_KILLED = re.compile(
    r"(?:(?:Memory cgroup )?[Oo]ut of memory: )?Kill(?:ed)? process (?P<pid>\d{1,10})(?:, UID \d+)?,? "
    r"\((?P<process>.{0,64}?)\)(?=[ ,.]|$)"
)
_OOM_KILL = re.compile(r"oom-kill:.*,task=(?P<process>.{0,64}?),pid=(?P<pid>\d{1,10}),uid=\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One line that means something. Its text holds no control characters and at most LINE_CHARS characters."""

    kind: str
    """A row of core/kinds.py."""
    where: str
    """What it is about: canonical PCI address, port (`mlx5_5/1`, `eth0`), pid; "" where the line does not say."""
    part: str = ""
    """What else tells two errors of one place apart: the link, the new recovery action or state; "" if nothing."""
    data: Mapping[str, Json]
    """The event's data, but for count and first_ns."""


Make = Callable[[re.Match[str], str], Fact]


class KernelGrammar:
    """Reads lines in order: what takes several lines is joined. `uuids`: PCI address -> GPU UUID that the log told."""

    def __init__(self) -> None:
        self.uuids: dict[str, str] = {}
        self._named = ""

    def __call__(self, line: str) -> Fact | None:
        """What a line says, or None."""
        fact = parse(line)
        if fact is None or fact.kind not in (_NAMED, _UUID, "gpu.off_bus"):
            return fact
        if fact.kind == _NAMED:
            self._named = fact.where
        elif fact.kind == _UUID and len(self.uuids) < _UUIDS:
            self.uuids[fact.where] = str(fact.data["uuid"])
        if fact.kind != "gpu.off_bus":
            return None
        if not fact.where and self._named:
            fact = replace(fact, where=self._named, data={**fact.data, "pci": self._named})
            self._named = ""
        return fact


def interesting(line: str) -> bool:
    """Whether a line may mean something: rejects nearly all others in half a microsecond."""
    return (
        "NVRM: " in line
        or "SXid" in line
        or "mlx5_core" in line
        or " segfault at " in line
        or "PCIe Bus Error" in line
        or "Kill" in line
        or "oom-kill:" in line
        or "traps: " in line
        or "nvidia-peermem" in line
    )


def parse(line: str | bytes) -> Fact | None:
    """What one line says by itself, whatever stands before the message.

    >>> fact = parse("[12.5] NVRM: Xid (PCI:0000:9B:00): 79, pid=7, name=python3, GPU has fallen off the bus.")
    >>> fact.kind, fact.where, fact.data["code"], fact.data["body"]
    ('xid', '0000:9b:00', 79, 'GPU has fallen off the bus.')
    """
    text = line.decode(errors="replace") if isinstance(line, bytes) else line
    if not interesting(text):
        return None
    text = cleaned(text, _MATCHED_CHARS)
    prefix = _PREFIX.match(text)
    message = text[prefix.end() :] if prefix else text
    for start, pattern, make in _SHAPES:
        found = pattern.match(message) if message.startswith(start) else None
        if found is not None:
            return make(found, message)
    return None


def cleaned(text: str, most: int = LINE_CHARS) -> str:
    """Text without control and other unprintable characters, and not longer than this."""
    text = text[:most].strip()
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


def canonical_pci(address: str) -> str:
    """One spelling of a PCI address: domain of at least four digits, lower case, no function 0.

    >>> canonical_pci("00000000:9B:00.0"), canonical_pci("0008:01:00"), canonical_pci("0000:0c:00.1")
    ('0000:9b:00', '0008:01:00', '0000:0c:00.1')
    """
    domain, _, rest = address.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest.removesuffix('.0')}"


def _pci(found: re.Match[str]) -> str:
    groups = found.groupdict()
    address = groups.get("pci") or groups.get("named")
    return canonical_pci(address) if address else ""


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.lstrip("-").isdecimal() else None


def _fact(kind: str, where: str, message: str, part: object = "", **data: Json) -> Fact:
    texts = {key: value[:LINE_CHARS] if isinstance(value, str) else value for key, value in data.items()}
    return Fact(kind=kind, where=where, part=str(part), data={**texts, "line": message[:LINE_CHARS]})


def _xid(found: re.Match[str], message: str) -> Fact:
    code, process, body = int(found["code"]), found["process"], found["body"].strip()
    part, more = _details(code, body)
    if found["mig"] is not None:
        more["mig"] = int(found["mig"])
    process = None if process in (None, "", "<unknown>") else process
    pci, pid = _pci(found), _whole(found["pid"])
    return _fact("xid", pci, message, part, code=code, pci=pci, pid=pid, process=process, body=body, **more)


def _garbled_xid(found: re.Match[str], message: str) -> Fact:
    pci = _pci(found)
    body = found["body"].strip()
    return _fact("xid", pci, message, code=None, pci=pci or None, pid=None, process=None, body=body)


def _details(code: int, body: str) -> tuple[object, dict[str, Json]]:
    """(what tells two errors of this code apart, more data) from the body of an Xid; ("", {}) for an unknown form."""
    if 144 <= code <= 150 and (unit := _UNIT.match(body)):
        severity, link = unit["severity"].lower(), int(unit["link"])
        flags: dict[str, Json] = {key: int(unit[key]) for key in ("cross_contained", "injected")}
        data = {"unit": unit["unit"], "severity": severity, "link": link, "words": _words(unit["words"]), **flags}
        return f"{unit['unit']} {link}", data
    if code == 74 and (error := _LINK_ERROR.match(body)):
        return error["link"], {"link": int(error["link"]), "words": _words(error["words"])}
    if code == 154 and (recovery := _RECOVERY.match(body)):
        action = recovery["action"].strip()
        return action, {"action": action, "action_code": int(recovery["code"], 16), "action_was": recovery["was"]}
    return "", {}


def _words(text: str | None) -> Json:
    """The hexadecimal words of `(0x1 0x2 ...)`; where its end is cut off, only those that are surely whole."""
    word = _WORD if text is not None and ")" in text else _WHOLE_WORD
    return [int(one, 16) for one in word.findall(text or "")]


def _sxid(found: re.Match[str], message: str) -> Fact:
    pci, link = _pci(found), _whole(found["link"])
    severity = (found["severity"] or "").lower().replace("-", "")
    part = "" if link is None else link
    data: dict[str, Json] = {"severity": severity, "link": link, "body": found["body"].strip()}
    return _fact("sxid", pci, message, part, code=int(found["code"]), pci=pci, switch=int(found["switch"]), **data)


def _off_bus(found: re.Match[str], message: str) -> Fact:
    pci = _pci(found)
    return _fact("gpu.off_bus", pci, message, pci=pci or None)


def _named(found: re.Match[str], message: str) -> Fact:
    return _fact(_NAMED, _pci(found), message)


def _uuid(found: re.Match[str], message: str) -> Fact:
    return _fact(_UUID, _pci(found), message, uuid=found["uuid"])


def _driver(found: re.Match[str], message: str) -> Fact:
    pci, error = _pci(found), found["error"].partition(" for GPU at ")[0]
    return _fact("driver.error", pci, message, error, pci=pci or None, error=error, body=found["body"].strip())


def _aer(found: re.Match[str], message: str) -> Fact:
    text = found["severity"].lower()
    severity = next((word for sign, word in _AER_SEVERITIES.items() if sign in text), text)
    error = f"{found['type']} ({found['agent']})" if found["agent"] else found["type"]
    pci = _pci(found)
    return _fact("pcie.aer", pci, message, f"{severity} {error}", pci=pci, severity=severity, error=error)


def _port(found: re.Match[str], message: str) -> Fact:
    number, state = found["number"], found["state"].upper()
    port = f"{found['port']}/{number}" if number else found["port"]
    return _fact("link.state", port, message, state, port=port, state=state)


def _crash(found: re.Match[str], message: str) -> Fact:
    pid, process, library = found["pid"], found["process"], found["library"].strip()
    return _fact("kernel.segfault", pid, message, library, pid=int(pid), process=process, library=library)


def _oom(found: re.Match[str], message: str) -> Fact:
    return _fact("oom.kill", found["pid"], message, pid=int(found["pid"]), process=found["process"])


_SHAPES: tuple[tuple[str, re.Pattern[str], Make], ...] = (
    ("NVRM: Xid", _XID, _xid),
    ("NVRM: Xid", _GARBLED, _garbled_xid),
    ("NVRM: ", _OFF_BUS, _off_bus),
    ("NVRM: The", _NAMED_LINE, _named),
    ("NVRM: GPU at", _UUID_LINE, _uuid),
    ("NVRM: ", _DRIVER, _driver),
    ("nvidia-nvswitch", _SXID, _sxid),
    ("nvidia-peermem", _PEERMEM, _driver),
    ("mlx5_core ", _MLX5, _port),
    ("", _AER, _aer),
    ("oom-kill:", _OOM_KILL, _oom),
    ("", _KILLED, _oom),
    ("traps: ", _TRAP, _crash),
    ("", _SEGFAULT, _crash),
)
"""(what the message must begin with, its form, what it says), tried in this order."""
