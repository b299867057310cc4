"""Spans by opentelemetry-sdk, to any OTLP receiver. Imported only where traces are exported: 0.1 s and 7 MB.

A provider of our own, never the process's global one. Sampler and queue are set here, not by the environment, which may
have them for the training: incidents are rare and all are told. Sending is the business of a daemon thread
(BatchSpanProcessor), so a receiver that is slow, away or hung holds up nobody but close(), and that only until its
deadline. (The SDK's own shutdown waits 30 s, or for ever in older versions, and its exporter's timeout is one for each
read: a receiver that sends a byte now and then is waited for without end.)
"""

import hashlib
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags, set_span_in_context

from trainwarden.alerts.notify.terminal import printable
from trainwarden.app.story import IncidentStory
from trainwarden.app.traces import SpanPlan, spans_of
from trainwarden.core.model import JobId
from trainwarden.core.version import __version__

QUEUE_SPANS: Final = 2048
BATCH_SPANS: Final = 512
"""Both as the OpenTelemetry specification has them (trace/sdk, batching processor); an incident has about ten spans."""

DELAY_MS: Final = 1000
"""Between the end of an incident and its sending: what a killed supervisor loses."""


def otlp_exporter(url: str, deadline_s: float) -> SpanExporter:
    """OTLP over HTTP; deadline_s: for one batch, with all its tries."""
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # a batch that is lost is said, each new try is not
    return OTLPSpanExporter(endpoint=url, timeout=deadline_s)


class Traces:
    """Exports incidents as traces. No call raises; close() alone waits."""

    def __init__(self, exporter: SpanExporter, job: JobId, deadline_s: float) -> None:
        self._sent = _Sent(exporter)
        self._deadline_s = deadline_s
        self._ids = _Ids()
        self._told = 0
        self._fault = ""
        self._done: set[str] = set()
        """Rounds that are exported and over."""
        resource = {"service.name": "trainwarden", "service.version": __version__, "trainwarden.job_id": printable(job)}
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=Resource.create(resource), id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._sent,
                max_queue_size=QUEUE_SPANS,
                schedule_delay_millis=DELAY_MS,
                max_export_batch_size=BATCH_SPANS,
            )
        )
        self._tracer = self._provider.get_tracer("trainwarden", __version__)

    def export(self, story: IncidentStory, end_ns: int, lost_s: Mapping[str, float] | None = None) -> None:
        """Tell the rounds of an incident that were not told yet; see spans_of."""
        try:
            plans = [one for one in spans_of(story, end_ns, lost_s) if one.path[0] not in self._done]
            for plan in plans:
                self._end(plan)
        except Exception as error:  # a trace is a help: no fault of it may end the loop that watches the training
            self._fault = f"{type(error).__name__}: {error}"
            return
        self._done |= {one.path[0] for one in plans if len(one.path) == 1 and not one.error}

    def close(self) -> str:
        """Hand over what is left; what has not arrived by the deadline, in words (empty: all has)."""
        ending = threading.Thread(target=self._provider.shutdown, name="trainwarden-traces", daemon=True)
        ending.start()
        ending.join(self._deadline_s)
        lost = self._told - self._sent.spans
        words = [f"{lost} of {self._told} spans were not taken by the receiver"] if lost else []
        return "; ".join(words + ([self._fault] if self._fault else []))

    def _end(self, plan: SpanPlan) -> None:
        """Make a span and end it."""
        parent = _context(plan.path[:-1]) if plan.path[1:] else None
        self._ids.trace_id, self._ids.span_id = _ids(plan.path)
        self._told += 1
        span = self._tracer.start_span(
            plan.name,
            context=Context() if parent is None else set_span_in_context(NonRecordingSpan(parent), Context()),
            attributes=plan.attributes,
            links=[Link(_context((plan.after,)))] if plan.after else [],
            start_time=plan.start_ns,
        )
        for change in plan.changes:
            span.add_event(change.name, change.attributes, change.t_ns)
        if plan.error:
            span.set_status(Status(StatusCode.ERROR, plan.error))
        span.end(plan.end_ns)


class _Ids(IdGenerator):
    """Gives the ids that the next span is to have."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _Sent(SpanExporter):
    """An exporter, and how many spans were taken from it."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter, self.spans = exporter, 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        self.spans += len(spans) if result is SpanExportResult.SUCCESS else 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _ids(path: Sequence[str]) -> tuple[int, int]:
    """Ids of trace (128 bits) and span (64 bits)."""
    trace, span = (hashlib.sha256("\n".join(words).encode()).digest() for words in (path[:1], path))
    return int.from_bytes(trace[:16]), int.from_bytes(span[-8:])


def _context(path: Sequence[str]) -> SpanContext:
    trace_id, span_id = _ids(path)
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
