"""Spans by opentelemetry-sdk, to any OTLP receiver. Imported only where traces are exported: 0.1 s and 7 MB.

A provider of our own, never the process's global one. Sampler and queue are set here, not by the environment, which may
have them for the training: incidents are rare and all are told, and steps were chosen before. Sending is the business
of a daemon thread (BatchSpanProcessor), so a receiver that is slow, away or hung holds up nobody but close(), and that
only until its deadline. (The SDK's own shutdown waits 30 s, or for ever in older versions, and its exporter's timeout
is one for each read: a receiver that sends a byte now and then is waited for without end.)
"""

import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags, set_span_in_context

from trainwarden.app.story import IncidentStory
from trainwarden.app.traces import SpanPlan, spans_of
from trainwarden.core.model import JobId
from trainwarden.core.printable import printable
from trainwarden.core.version import __version__

QUEUE_SPANS: Final = 2048
BATCH_SPANS: Final = 512
"""Both as the OpenTelemetry specification has them (trace/sdk, batching processor); an incident has about ten spans."""

STEPS_SPANS: Final = 1024
"""While so many spans wait, no more spans of steps are taken: the other half of the queue is for incidents."""

DELAY_MS: Final = 1000
"""Between the end of an incident and its sending: what a killed supervisor loses."""


def otlp_exporter(url: str, headers: Mapping[str, str], deadline_s: float) -> SpanExporter:
    """OTLP over HTTP; deadline_s: for one batch, with all its tries."""
    quiet()
    return OTLPSpanExporter(endpoint=url, headers=dict(headers), timeout=deadline_s)


def quiet() -> None:
    """Keep the SDK from logging each lost batch, as long as a receiver is away: that is counted, and said once."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


def resource_of(**more: str) -> Resource:
    """Who speaks: us, of this version, and what OTEL_RESOURCE_ATTRIBUTES says of the place."""
    return Resource.create({"service.name": "trainwarden", "service.version": __version__, **more})


class Traces:
    """Exports incidents and steps as traces. No call raises; close() alone waits."""

    def __init__(self, exporter: SpanExporter, job: JobId, deadline_s: float) -> None:
        self._sent = _Sent(exporter)
        self._deadline_s = deadline_s
        self._ids = _Ids()
        self._told = self._dropped = 0
        self._fault = ""
        self._done: set[str] = set()
        """Rounds that are exported and over."""
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=resource_of(**{"trainwarden.job_id": printable(job)}),
            id_generator=self._ids,
            shutdown_on_exit=False,
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

    @property
    def counts(self) -> Mapping[str, int]:
        """Spans by what became of them; what waits is in none."""
        return {**self._sent.spans, "dropped": self._dropped}

    @property
    def failing(self) -> bool:
        """Whether the receiver did not take the last batch."""
        return self._sent.failing

    def export(self, story: IncidentStory, end_ns: int, lost_s: Mapping[str, float] | None = None) -> None:
        """Tell the rounds of an incident that were not told yet; see spans_of."""

        def rounds() -> list[SpanPlan]:
            return [one for one in spans_of(story, end_ns, lost_s) if one.path[0] not in self._done]

        self._done |= {one.path[0] for one in self._tell(rounds) if len(one.path) == 1 and not one.error}

    def steps(self, make: Callable[[], Iterable[SpanPlan]]) -> None:
        """Tell the spans of steps, unless too many are waiting already."""

        def room() -> list[SpanPlan]:
            plans = list(make())
            if self._told - sum(self._sent.spans.values()) + len(plans) <= STEPS_SPANS:
                return plans
            self._dropped += len(plans)
            return []

        self._tell(room)

    def close(self) -> str:
        """Hand over what is left; what has not arrived by the deadline, in words (empty: all has)."""
        ending = threading.Thread(target=self._provider.shutdown, name="trainwarden-traces", daemon=True)
        ending.start()
        ending.join(self._deadline_s)
        lost = self._told - self._sent.spans["taken"]
        words = [f"{lost} of {self._told} spans were not taken by the receiver"] if lost else []
        words += [f"{self._dropped} spans of steps were dropped while too many waited"] if self._dropped else []
        return "; ".join(words + ([self._fault] if self._fault else []))

    def _tell(self, make: Callable[[], Sequence[SpanPlan]]) -> Sequence[SpanPlan]:
        """Make spans and end them; those that were."""
        try:
            plans = make()
            for plan in plans:
                self._end(plan)
        except Exception as error:  # a trace is a help: no fault of it may end the loop that watches the training
            self._fault = f"{type(error).__name__}: {error}"
            return ()
        return plans

    def _end(self, plan: SpanPlan) -> None:
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
    """An exporter, and what became of the spans that it was given."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter, self.failing = exporter, False
        self.spans: Counter[str] = Counter(taken=0, failed=0)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self.failing = result is not SpanExportResult.SUCCESS
            self.spans["failed" if self.failing else "taken"] += len(spans)
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
