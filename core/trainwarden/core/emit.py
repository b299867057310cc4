"""Makes the events of one source: numbered, stamped, with every data key that their kind requires."""

from collections.abc import Mapping

from trainwarden.core.kinds import missing_data
from trainwarden.core.model import Epoch, Event, JobId, Json, Subject


class Emitter:
    """Numbers the events of one source from its start time in microseconds, so that a restarted source never repeats.

    >>> emit = Emitter("agent@n1", job=None, start_ns=5_000)
    >>> event = emit("source.started", Subject(kind="source", id="agent@n1"), now_ns=7, data={"why": "first start"})
    >>> event.seq, event.t_ns
    (6, 7)
    """

    def __init__(self, source: str, *, job: JobId | None, start_ns: int) -> None:
        self.source = source
        self._job = job
        self._seq = start_ns // 1000

    def __call__(
        self,
        kind: str,
        subject: Subject,
        *,
        now_ns: int,
        data: Mapping[str, Json],
        t_ns: int | None = None,
        epoch: Epoch | None = None,
    ) -> Event:
        """The next event; t_ns defaults to now."""
        missing = missing_data(kind, data)
        assert not missing, f"{kind}: data lacks {missing}"
        self._seq += 1
        return Event(
            kind=kind,
            subject=subject,
            source=self.source,
            seq=self._seq,
            t_ns=now_ns if t_ns is None else t_ns,
            seen_ns=now_ns,
            job=self._job,
            epoch=epoch,
            data=data,
        )
