"""What the lines of the NVML reader say, checked: a vendor's library that corrupts its process may have its hand in."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainwarden.core.errors import DataError
from trainwarden.core.readings import READINGS

INDEX_MAX = 255
"""GPUs and links of a node: more is garbage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Who a GPU is: no serial number."""

    uuid: str
    pci: str
    """As the kernel log names it, without the function: 0000:10:1c."""
    index: int
    name: str
    driver: str
    mig: tuple[str, ...]
    """UUIDs of its MIG instances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one GPU told in one pass."""

    index: int
    t_ns: int
    values: Mapping[str, float]
    absent: Mapping[str, str]
    """Signal -> why NVML does not tell it."""
    links: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    pids: tuple[int, ...] | None = None
    """Of compute processes; None: not asked in this pass (nor were `links`)."""
    fabric: str = ""
    """The NVLink domain that spans nodes; "": none."""
    device: Device | None = None
    lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """Anything else: `ready` (how many GPUs), `at` (which GPU comes next), `blind` (why NVML is of no use), `done`."""

    what: str
    number: int = 0
    why: str = ""


def parse_answer(line: bytes) -> Told | Word:
    """Raises DataError for anything but an answer of collectors/nvml_reader.py.

    >>> parse_answer(b'{"at": 3}').number
    3
    """
    try:
        said = json.loads(line)
        return _told(said) if "i" in said else _word(said)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"no answer of the NVML reader: {line[:80]!r}") from error


def _word(said: Mapping[str, Any]) -> Word:
    ((what, value),) = said.items()
    if what == "blind":
        return Word(what=what, why=_text(value))
    if what not in ("ready", "at", "done"):
        raise DataError(what)
    return Word(what=what, number=_index(value))


def _told(said: Mapping[str, Any]) -> Told:
    device, pids = said.get("device"), said.get("pids")
    return Told(
        index=_index(said["i"]),
        t_ns=_whole(said["t_ns"], 2**63 - 1),
        values=_numbers(said.get("v", {}), "gpu_"),
        absent={_text(name): _text(why) for name, why in said.get("absent", {}).items()},
        links={_index(link): _numbers(told, "nvlink_") for link, told in said.get("links", {}).items()},
        pids=None if pids is None else tuple(int(pid) for pid in pids),
        fabric=_text(said.get("fabric", "")),
        device=None if device is None else _device(device),
        lost=_text(said.get("lost", "")),
    )


def _device(said: Mapping[str, Any]) -> Device:
    texts = {name: _text(said[name]) for name in ("uuid", "pci", "name", "driver")}
    return Device(index=_index(said["index"]), mig=tuple(_text(uuid) for uuid in said["mig"]), **texts)


def _numbers(said: Mapping[str, Any], prefix: str) -> dict[str, float]:
    numbers = {name: float(value) for name, value in said.items() if name in READINGS and name.startswith(prefix)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _index(value: Any) -> int:
    return _whole(value, INDEX_MAX)


def _whole(value: Any, most: int) -> int:
    number = int(value)
    if not 0 <= number <= most:
        raise ValueError(number)
    return number


def _text(value: Any) -> str:
    return "".join(char for char in str(value)[:200] if char.isprintable())
