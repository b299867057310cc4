"""Traces of steps: few, of few ranks, at the times that the ranks told, and never in the way of an incident's."""

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.app.served import Node, until
from tests.app.story_world import killed, world
from tests.app.test_otlp import absent
from tests.detectors.world import JOB, START_NS, step_matrix, topology
from tests.fakes.web import serving
from tests.remediation.plan_world import at

from trainwarden.app import step_traces
from trainwarden.app.jobs import Jobs, JobsConfig
from trainwarden.app.otlp import STEPS_SPANS, Traces
from trainwarden.app.outlets import Outlets
from trainwarden.app.step_traces import SPANS_MAX, StepTraces
from trainwarden.app.traces import SpanPlan, TracesConfig
from trainwarden.app.wiring import Settings
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Epoch, Frame, StepMatrix
from trainwarden.core.records import FEATURES, epoch_of
from trainwarden.core.schemas import STEP

MS = 10**6
PLAIN: Mapping[str, ArrayLike] = {
    "step_s": 0.1,
    "data_s": 0.01,
    "forward_s": [0.02, 0.021, 0.03, 0.022],
    "backward_s": 0.03,
    "wait_s": 0.02,
    "optimizer_s": 0.01,
}
"""Of four ranks: 2 is the slowest, 1 the median."""


class Told:
    """A job whose steps close, and what is to be told of them."""

    def __init__(self, every: int = 1, rank: int = 0, ranks: int = 4, attempt: int = 1) -> None:
        self.traces, self.ranks = StepTraces(every, rank), ranks
        self.where = topology(ranks, epoch=epoch_of(attempt, 0, 0))

    def frame(self, step: int, end_ns: ArrayLike, ranks: Iterable[int] | None = None) -> Frame:
        who = [*(range(self.ranks) if ranks is None else ranks)]
        rows = np.zeros(len(who), STEP)
        rows["rank"], rows["step"], rows["end_ns"] = who, step, end_ns
        stamps = {"sent_ns": 0, "seen_ns": 0}
        epoch = self.where.epoch
        return Frame(schema="step", source="rings@n1", job=JOB, epoch=epoch, seq=step, **stamps, names=(), rows=rows)

    def matrix(
        self, step: int, end_ns: int, values: Mapping[str, ArrayLike], seen: Sequence[bool] | None
    ) -> StepMatrix:
        told = {name: np.broadcast_to(np.asarray(value, float), self.ranks) for name, value in values.items()}
        return step_matrix(self.where, step, told, seen_R=seen, seen_ns=end_ns + 50 * MS)

    def close(
        self,
        step: int,
        values: Mapping[str, ArrayLike] = PLAIN,
        *,
        end_ns: ArrayLike | None = None,
        seen: Sequence[bool] | None = None,
    ) -> list[SpanPlan]:
        """Steps end ten times a second."""
        usual_ns = START_NS + step * 100 * MS
        self.traces.hear([self.frame(step, usual_ns if end_ns is None else end_ns)])
        return self.traces.closed(self.matrix(step, usual_ns, values, seen))


def exported(*plans: SpanPlan) -> Sequence[ReadableSpan]:
    memory = InMemorySpanExporter()
    traces = Traces(memory, JOB, deadline_s=10)
    traces.steps(lambda: plans)
    assert traces.close() == ""
    return memory.get_finished_spans()


def tree(spans: Sequence[ReadableSpan]) -> list[tuple[str, str | None]]:
    names = {span.context.span_id: span.name for span in spans if span.context is not None}
    return [(span.name, None if span.parent is None else names[span.parent.span_id]) for span in spans]


def shown(spans: Sequence[SpanPlan]) -> list[object]:
    """Ranks: the slowest, the median, the chosen one."""
    return [one.attributes["trainwarden.rank"] for one in spans if one.name.startswith("rank ")]


# one trace


def test_a_step_is_a_trace_of_the_slowest_the_median_and_the_chosen_rank() -> None:
    spans = exported(*Told(rank=3).close(7))
    phases = ("data", "forward", "backward", "wait", "optimizer")
    assert tree(spans) == [
        ("step", None),
        *(
            pair
            for rank in (2, 1, 3)
            for pair in ((f"rank {rank}", "step"), *((one, f"rank {rank}") for one in phases))
        ),
    ]
    assert len({span.context.trace_id for span in spans if span.context is not None}) == 1
    said = dict(spans[0].attributes or {})
    assert {name.removeprefix("trainwarden."): value for name, value in said.items()} == {
        "job_id": "job",
        "step": 7,
        "batch": 7,
        "attempt": 1,
        "restart": 0,
        "epoch": epoch_of(1, 0, 0),
        "ranks": 4,
        "partial": False,
        "clock": "of each rank",
    }
    ranks = [dict(span.attributes or {}) for span in spans if span.name.startswith("rank ")]
    assert [(one["trainwarden.rank"], one["trainwarden.why"]) for one in ranks] == [
        (2, "slowest"),
        (1, "median"),
        (3, "chosen"),
    ]
    assert ranks[0]["trainwarden.device"] == "n1:2"


def test_times_are_those_of_the_rows_and_phases_lie_end_to_end() -> None:
    end_ns = START_NS + np.array([700, 701, 705, 699]) * MS  # of clocks that differ
    spans = Told().close(7, end_ns=end_ns)
    step, slowest = spans[0], spans[1]
    assert (slowest.start_ns, slowest.end_ns) == pytest.approx((START_NS + 605 * MS, START_NS + 705 * MS), abs=100)
    assert (step.start_ns, step.end_ns) == pytest.approx((START_NS + 600 * MS, START_NS + 705 * MS), abs=100)
    assert [one.name for one in spans[2:7]] == ["data", "forward", "backward", "wait", "optimizer"]
    assert [one.start_ns for one in spans[3:7]] == [one.end_ns for one in spans[2:6]]
    assert spans[2].start_ns == slowest.start_ns
    lengths = [(one.end_ns - one.start_ns) / MS for one in spans[2:7]]
    assert lengths == pytest.approx([10, 30, 30, 20, 10], abs=0.001)


def test_a_save_between_two_steps_lies_before_the_step_that_tells_it() -> None:
    _, rank, save, data, *_ = Told().close(7, {**PLAIN, "checkpoint_s": 0.5})
    assert (save.name, data.name) == ("checkpoint", "data")
    assert rank.end_ns - rank.start_ns == pytest.approx(600 * MS, abs=1000)
    assert (save.start_ns, data.start_ns) == (rank.start_ns, save.end_ns)


def test_what_was_not_measured_is_no_span_and_nobody_is_slowest_by_nothing() -> None:
    spans = Told(rank=1).close(7, {"step_s": 0.1, "forward_s": np.nan})
    assert [one.name for one in spans] == ["step", "rank 1"]


@pytest.mark.parametrize("end_ns", [0, -(2**63), 2**63 - 1, START_NS + 10**15])
def test_a_time_that_cannot_be_is_not_shown(end_ns: int) -> None:
    usual_ns = START_NS + 700 * MS
    assert shown(Told(rank=2).close(7, end_ns=np.array([usual_ns, usual_ns, end_ns, usual_ns]))) == [3, 1]
    assert Told().close(7, {**PLAIN, "step_s": 1e30}) == []
    assert Told().close(7, {**PLAIN, "step_s": -1.0}) == []


def test_ranks_that_were_not_there_are_not_shown() -> None:
    spans = Told(rank=3).close(7, seen=[True, True, False, False])
    assert shown(spans) == [1, 0]
    assert spans[0].attributes["trainwarden.ranks"] == 2
    assert spans[0].attributes["trainwarden.partial"] is True


def test_what_the_tenant_calls_his_device_is_harmless() -> None:
    one = Told()
    one.where = topology(4, epoch=one.where.epoch, devices=["a", "b", "\x1b[2J" + "x" * 500, "d"])
    device = one.close(7)[1].attributes["trainwarden.device"]
    assert isinstance(device, str)
    assert len(device) < 100
    assert device.isprintable()


# ids


def test_the_same_step_has_the_same_ids_and_no_other_has_them() -> None:
    def ids(spans: Sequence[ReadableSpan]) -> list[tuple[int, int]]:
        return [(span.context.trace_id, span.context.span_id) for span in spans if span.context is not None]

    first = ids(exported(*Told().close(7)))
    assert ids(exported(*Told().close(7))) == first, "a supervisor that was started again tells it again"
    elsewhere = Told()
    elsewhere.where = topology(4, epoch=elsewhere.where.epoch, devices=[f"n2:{rank}" for rank in range(4)])
    others = [Told().close(8), Told(attempt=2).close(7), elsewhere.close(7)]
    assert len({ids(exported(*one))[0] for one in others} | {first[0]}) == 4


# which steps


def test_one_of_many_is_told() -> None:
    one = Told(every=50)
    told = [step for step in range(1, 201) if one.close(step)]
    assert told == [50, 100, 150, 200]


def test_the_steps_around_the_first_sign_of_an_incident_are_told_whenever_they_close() -> None:
    one, onset_ns = Told(every=1000), START_NS + 1050 * MS  # in step 11
    for step in range(1, 11):
        assert one.close(step) == []
    past = one.traces.around("i1", onset_ns)
    assert [plan.attributes["trainwarden.step"] for plan in past if plan.name == "step"] == [10]
    assert past[0].attributes["trainwarden.incident_id"] == "i1"
    assert one.traces.around("i1", onset_ns) == [], "once"
    later = [step for step in range(11, 20) if one.close(step)]
    assert later == [11, 12]
    assert one.traces.around("i2", onset_ns) == [], "they were told already"


def test_an_incident_is_enough_for_its_steps_to_leave(tmp_path: Path) -> None:
    outlets = Outlets(Settings(traces=TracesConfig(otlp_endpoint="http://127.0.0.1:1", steps=1000)), JOB, print)
    outlets.close(None)
    memory = InMemorySpanExporter()
    outlets._traces = Traces(memory, JOB, deadline_s=10)
    one = Told()
    with world(tmp_path) as told:
        told.play(6, killed())
        onset_ns = told.told.newest.onset_ns
        outlets.hear([one.frame(3, onset_ns)])
        outlets.stepped(one.matrix(3, onset_ns, PLAIN, None))
        outlets.trace(told.told, tmp_path)
        outlets.close(None)
        assert ("step", None) in tree(memory.get_finished_spans())
        assert at(0) < onset_ns


# bounds


def test_a_step_of_many_ranks_has_as_few_spans_and_costs_little() -> None:
    one, ranks = Told(ranks=12_500), 12_500
    values = {name: np.full(ranks, 0.01) for name in FEATURES if name.endswith("_s")}
    begun_s = time.process_time()
    for step in range(1, 21):
        assert len(one.close(step, {**values, "step_s": np.full(ranks, 1.0)})) <= SPANS_MAX == 25
    assert (time.process_time() - begun_s) / 20 < 0.05, "20 times what it takes on an idle machine"


def test_rows_of_steps_that_never_close_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_traces, "ROWS_MAX", 100)
    monkeypatch.setattr(step_traces, "STEPS_MAX", 30)
    one = Told()
    for step in np.random.default_rng(5).integers(-(2**31), 2**31, 200).tolist():
        one.traces.hear([one.frame(step, 0)])
        assert len(one.traces._held) <= 30
        assert sum(held.rows for held in one.traces._held.values()) == one.traces._rows <= 100
    one.traces.hear([one.frame(5, START_NS, ranks=[-1, 4, 2**31 - 1])])
    assert one.close(5) != []
    assert one.traces._held.keys() <= {key for key in one.traces._held if key[1] > 5}


def test_rows_of_several_steps_in_one_frame_and_copies_of_them_are_told_apart() -> None:
    one = Told()
    frame = one.frame(0, 0, ranks=[0, 1, 2, 3, 0, 1, 2, 3])
    frame.rows["step"] = [7] * 4 + [8] * 4
    frame.rows["end_ns"] = [START_NS + 700 * MS] * 4 + [START_NS + 800 * MS] * 4
    one.traces.hear([frame, one.frame(7, START_NS + 777 * MS), one.frame(8, START_NS + 888 * MS)])
    for step in (7, 8):
        spans = one.traces.closed(one.matrix(step, START_NS + step * 100 * MS, PLAIN, None))
        assert spans[0].end_ns == START_NS + step * 100 * MS


class Stuck(SpanExporter):
    """Takes nothing until it is let."""

    def __init__(self) -> None:
        self.let = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        until("leave", lambda: self.let)
        return SpanExportResult.SUCCESS


def test_a_receiver_that_hangs_costs_steps_and_not_incidents() -> None:
    stuck = Stuck()
    traces, one = Traces(stuck, JOB, deadline_s=10), Told()
    began_s = time.monotonic()
    for step in range(1, 101):
        plans = one.close(step)
        traces.steps(lambda plans=plans: plans)  # type: ignore[misc]
    assert time.monotonic() - began_s < 10, "nobody waits"
    spans = 19
    kept = STEPS_SPANS // spans * spans
    assert traces.counts == {"taken": 0, "failed": 0, "dropped": 100 * spans - kept}
    stuck.let = True
    assert traces.close() == f"{100 * spans - kept} spans of steps were dropped while too many waited"
    assert traces.counts["taken"] == kept


def test_what_is_not_taken_is_counted_and_said_once() -> None:
    said = list[str]()
    with absent() as url:
        config = TracesConfig(otlp_endpoint=url, steps=1, deadline=timedelta(milliseconds=200))
        outlets, one = Outlets(Settings(traces=config), JOB, said.append), Told()
        for step in range(1, 4):
            outlets.hear([one.frame(step, START_NS + step * 100 * MS)])
            outlets.stepped(one.matrix(step, START_NS + step * 100 * MS, PLAIN, None))
        until("a failure", lambda: outlets.exported()["otlp_spans_total", "failed"])
        for _ in range(3):
            outlets.turned()
        assert said == ["the OTLP receiver does not take traces"]
        outlets.close(None)
    assert outlets.exported()["otlp_spans_total", "failed"] == 57


def test_a_fault_of_ours_ends_nothing() -> None:
    traces = Traces(InMemorySpanExporter(), JOB, deadline_s=10)
    traces.steps(lambda: [][0])
    assert traces.close() == "IndexError: list index out of range"


# all of it


def test_a_server_sends_one_of_many_steps_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as web:
        settings = Settings(traces=TracesConfig(otlp_endpoint=web.url, steps=4))
        all_ = Jobs(settings, JobsConfig(), tmp_path, print)
        node, now_ns = Node("n0", "j", [0, 1], 2), time.time_ns()
        all_.take("life", node.hellos(), now_ns, of_node=True)
        for frame in node.steps(1, 9):
            now_ns += 500 * MS
            frame.rows["end_ns"] = now_ns
            frame.rows["values"][:, FEATURES.index("forward_s")] = [0.1, 0.2]
            all_.take("life", [frame], now_ns, of_node=True)
            all_.tick(now_ns)
        all_.close()
        bodies = [ExportTraceServiceRequest.FromString(one.body) for one in web.asked]
    spans = [
        span for body in bodies for one in body.resource_spans for scope in one.scope_spans for span in scope.spans
    ]
    steps = [
        {pair.key: pair.value.int_value for pair in span.attributes}["trainwarden.step"]
        for span in spans
        if span.name == "step"
    ]
    assert steps == [4, 8]
    assert {span.name for span in spans} == {"step", "rank 0", "rank 1", "forward"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 10}, "traces.steps: needs traces.otlp_endpoint, got 10 and no receiver"),
        ({"otlp_endpoint": "env", "steps": -1}, "traces.steps: need 0 or more, got -1"),
        ({"otlp_endpoint": "env", "rank": -1}, "traces.rank: need 0 or more, got -1"),
    ],
)
def test_wrong_settings_are_refused(settings: Mapping[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        TracesConfig(**settings)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_epochs_are_numbers_that_fit() -> None:
    one = Told(attempt=2**30)
    assert exported(*one.close(7))[0].attributes is not None
    assert one.where.epoch == Epoch(2**62)
