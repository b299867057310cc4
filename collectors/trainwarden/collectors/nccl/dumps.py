"""Flight-recorder dumps of PyTorch's process groups, every version from 1.x on, as collective frames and dump events.

columns.py reads them in a child; here its columns become rows. What is told of an entry:

- seq counts per group, collectives and point-to-point calls apart (`nccl:send 0->3`, by the group's own numbers).
- op is the recorder's name and, after a slash, the type of the first tensor: `nccl:all_reduce/BFloat16`.
- bytes are those that go in; where nothing goes in, those that come out.
- A time is -1 where the thing has not happened as far as the recorder knows, and 0 where it has but when is not told.
- gloo never leaves `scheduled`: what it has retired is over, done or given up after its timeout, and told as completed
  with 0. Its counts of completed collectives take in what was given up and are not told. With NCCL, retired and not
  completed is a timeout.
- A coalesced call completes as a whole: its parts take the times of its end (pytorch#125173).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainwarden.collectors.nccl.columns import COLUMNS, STATES
from trainwarden.collectors.nccl.reader import DumpLimits, Said, read_columns
from trainwarden.collectors.nccl.restricted import plain
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import DataError
from trainwarden.core.model import Epoch, Event, Frame, JobId, Json, Subject
from trainwarden.core.schemas import COLLECTIVE

NAMES_MAX: Final = 1 << 16
"""What the rows can index."""
PATH_MAX: Final = 4096
REFUSALS_MAX: Final = 256
"""A tenant who makes up a new broken dump each second is told no more of than this."""
_STARTED, _COMPLETED = STATES.index("started"), STATES.index("completed")
_Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dump:
    """One dump that was read."""

    path: str
    rank: int
    written_ns: int
    version: str
    groups: Mapping[str, Json]
    """By name: desc, ranks (members as [first, last, step] runs in the group's order; null: not told), and the newest
    collective enqueued, started and completed (null: none, or not told). `inferred`: which group these counts belong to
    follows from the order in which groups were made, since no entry tells it."""
    names: tuple[str, ...]
    rows_N: NDArray[np.void]
    """COLLECTIVE, as the recorder had them, oldest first."""
    record_N: NDArray[np.int64]
    """The recorder's number of each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRead:
    """One dump that was not."""

    path: str
    why: str


def read_dumps(ranks: Mapping[str, int], *, owner_uid: int, limits: DumpLimits) -> Iterator[Dump | NotRead]:
    """The dumps of some ranks (path -> rank), one after the other. owner_uid: whose they must be; -1: anybody's."""
    for said in read_columns([*ranks], owner_uid=owner_uid, limits=limits):
        try:
            yield NotRead(path=said.path, why=said.why) if said.why else make_dump(said, ranks[said.path])
        except DataError as error:
            yield NotRead(path=said.path, why=str(error))


def make_dump(said: Said, rank: int) -> Dump:
    """The dump of a rank. Raises DataError if it cannot be this rank's."""
    header = said.header
    _check_rank(rank, header["config"])
    columns = dict(_columns(said.columns, header["entries"]))
    groups = [name for name, _ in header["groups"]]
    names = tuple(dict.fromkeys((*groups, *header["ops"])))
    if len(names) > NAMES_MAX:
        raise DataError(f"names {len(names)} groups and calls, at most {NAMES_MAX} can be told apart")
    place_of = {name: place for place, name in enumerate(names)}
    rows_N = np.empty(header["entries"], COLLECTIVE)
    rows_N["rank"] = rank
    rows_N["group"] = np.array([place_of[name] for name in groups], np.uint16)[columns["group"]]
    rows_N["op"] = np.array([place_of[name] for name in header["ops"]], np.uint16)[columns["op"]]
    rows_N["seq"] = np.where(columns["p2p"], columns["p2p_seq"], columns["seq"])
    rows_N["bytes"] = np.maximum(columns["bytes"], -1)
    _set_times(rows_N, columns, header["ops"])
    return Dump(
        path=said.path,
        rank=rank,
        written_ns=header["written_ns"],
        version=header["version"],
        groups=_groups(header),
        names=names,
        rows_N=rows_N,
        record_N=columns["record"],
    )


def _columns(data: bytes, count: int) -> Iterator[tuple[str, NDArray[Any]]]:
    at = 0
    for name, code in COLUMNS:
        column_N = np.frombuffer(data, code, count, at)
        at += column_N.nbytes
        yield name, column_N


def _check_rank(rank: int, config: Mapping[str, Any]) -> None:
    """A process is a member of every group that it tells of."""
    for name, (_, runs) in config.items():
        if runs is not None and not any(rank in range(first, last + 1, step) for first, last, step in runs):
            raise DataError(f"is no dump of rank {rank}, as its file's name has it: group {name} is without that rank")


def _set_times(rows_N: NDArray[np.void], columns: _Columns, ops: list[str]) -> None:
    gloo_N = np.array([op.startswith("gloo:") for op in ops], np.bool_)[columns["op"]]
    done_N = (columns["state"] == _COMPLETED) | (columns["completed"] > 0) | (gloo_N & (columns["retired"] != 0))
    begun_N = done_N | (columns["state"] == _STARTED) | (columns["started"] > 0)
    rows_N["enqueued_ns"] = np.where(columns["created"] > 0, columns["created"], -1)
    rows_N["started_ns"] = np.where(begun_N, np.maximum(columns["started"], 0), -1)
    rows_N["completed_ns"] = np.where(done_N, np.maximum(columns["completed"], 0), -1)
    end_of_op = np.array([op.partition("/")[0].endswith("coalesced") for op in ops], np.bool_)
    if end_of_op.any():
        _complete_parts(rows_N, columns, np.flatnonzero(end_of_op[columns["op"]]))


def _complete_parts(rows_N: NDArray[np.void], columns: _Columns, ends: NDArray[np.intp]) -> None:
    """A coalesced call's parts have its group and number; the recorder notes only its end as started and completed."""
    call_N = np.empty(len(rows_N), [("group", "<u2"), ("p2p", "<u1"), ("seq", "<i8")])
    call_N["group"], call_N["p2p"], call_N["seq"] = rows_N["group"], columns["p2p"], rows_N["seq"]
    _, which_N = np.unique(call_N, return_inverse=True)
    end_of_call = np.full(len(rows_N), -1)
    end_of_call[which_N[ends]] = ends
    end_N = end_of_call[which_N]
    for name in ("started_ns", "completed_ns"):
        open_N = (end_N >= 0) & (rows_N[name] == -1)
        rows_N[name][open_N] = rows_N[name][end_N[open_N]]


# groups


def _groups(header: Mapping[str, Any]) -> dict[str, Json]:
    config, status = header["config"], header["status"]
    about = {name: {"desc": desc, "ranks": None} for name, desc in header["groups"]}
    about |= {name: {"desc": desc, "ranks": ranks} for name, (desc, ranks) in config.items()}
    told = {number: header["groups"][place][0] for number, place in header["numbers"].items()}
    inferred = _by_order(config, status, told)
    trusted = bool(header["library"]) or any(not op.startswith("gloo:") for op in header["ops"])
    for number, (enqueued, started, completed) in status.items():
        name = told.get(number) or inferred.get(number) or f"#{number}"
        counts = {"enqueued": enqueued, "started": started, "completed": completed if trusted else None}
        about.setdefault(name, {"desc": "", "ranks": None}).update(counts, inferred=number not in told)
    return {**about}


def _by_order(config: Mapping[str, Any], status: Mapping[str, Any], told: Mapping[str, str]) -> dict[str, str]:
    """The process's number of a group -> its name, where no entry tells: both count up in the order in which groups are
    made. Nothing where one of them is no number, or where an entry says otherwise."""
    if len(config) != len(status) or not all(key.isdecimal() for key in (*config, *status)):
        return {}
    pairs = dict(zip(sorted(status, key=int), sorted(config, key=int), strict=True))
    return pairs if all(pairs.get(number) == name for number, name in told.items()) else {}


class Teller:
    """Makes frames and events of dumps, for the sources that find them."""

    def __init__(self, emit: Emitter, job: JobId, *, start_ns: int) -> None:
        self._emit, self._job = emit, job
        self._frame_seq = start_ns // 1000
        self._refused: set[tuple[str, str]] = set()

    def say(self, dump: Dump, rows_N: NDArray[np.void], epoch: Epoch, now_ns: int) -> Iterator[Frame | Event]:
        """Rows of a dump, then the event that it was read: all there is of the rank."""
        if len(rows_N):
            self._frame_seq += 1
            yield Frame(
                schema="collective",
                source=self._emit.source,
                job=self._job,
                epoch=epoch,
                seq=self._frame_seq,
                sent_ns=now_ns,
                seen_ns=now_ns,
                names=dump.names,
                rows=rows_N,
            )
        data: dict[str, Json] = {"rank": dump.rank, "version": dump.version, "entries": len(dump.rows_N)}
        data |= {"groups": dump.groups, "path": plain(dump.path, PATH_MAX), "records": [*_window(dump.record_N)]}
        rank = Subject(kind="rank", id=str(dump.rank))
        t_ns = min(dump.written_ns, now_ns)
        yield self._emit("dump", rank, now_ns=now_ns, data=data, t_ns=t_ns, epoch=epoch)

    def refuse(self, path: str, why: str, now_ns: int) -> Iterator[Event]:
        """That a dump is not read, once a reason."""
        if (path, why) in self._refused or len(self._refused) == REFUSALS_MAX:
            return
        self._refused.add((path, why))
        source = Subject(kind="source", id=self._emit.source)
        yield self._emit("dump.refused", source, now_ns=now_ns, data={"path": plain(path, PATH_MAX), "why": why})


def _window(record_N: NDArray[np.int64]) -> Iterator[int]:
    """First and last record that the ring held: nothing is known of what came before."""
    if len(record_N):
        yield from (int(record_N.min()), int(record_N.max()))
