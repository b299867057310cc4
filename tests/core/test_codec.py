"""Things as text: exact round trips, strict JSON, and refusals that name type and key."""

import contextlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwarden.core import model
from trainwarden.core.codec import Thing, dumps, loads
from trainwarden.core.errors import DataError
from trainwarden.core.model import Epoch, Event, Evidence, JobId, Subject, Tick, Tier

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SCALARS = {int: INT64, str: TEXT, bool: st.booleans(), float: st.floats(allow_nan=False)}
"""NaN is left out since it equals nothing."""


def things(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Any instance of a class of core/model.py."""
    return st.builds(cls, **{field.name: values(field.type) for field in fields(cls)})


def values(kind: Any) -> st.SearchStrategy[Any]:
    if kind == model.Json:
        return JSON
    kind = getattr(kind, "__supertype__", kind)
    if kind in SCALARS:
        return SCALARS[kind]
    args = get_args(kind)
    if getattr(kind, "__dataclass_fields__", None):
        return st.deferred(lambda: things(kind))
    if args and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=2).map(tuple)
    if args and getattr(kind, "__origin__", None) is Mapping:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=2)
    if args and getattr(kind, "__origin__", None) is tuple:
        return st.tuples(*map(values, args))
    if args and type(None) in args:
        return st.none() | values(args[0])
    return st.from_type(kind)


EVENT = Event(
    kind="xid",
    subject=Subject(kind="device", id="GPU-8f3a"),
    source="kmsg@n1",
    seq=3,
    t_ns=1_700_000_000_000_000_000,
    seen_ns=1_700_000_000_000_000_001,
    job=JobId("nano"),
    epoch=Epoch(4_294_967_296),
    data={"code": 79, "line": "NVRM: Xid"},
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(get_args(Thing)).flatmap(things))
def test_a_round_trip_gives_the_same(thing: Thing) -> None:
    text = dumps(thing)
    assert loads(text) == thing
    assert dumps(loads(text)) == text
    assert "\n" not in text


def test_everything_of_the_model_without_arrays_has_a_text_form() -> None:
    classes = {one for one in vars(model).values() if isinstance(one, type) and hasattr(one, "__dataclass_fields__")}
    assert classes - set(get_args(Thing)) == {model.Frame, model.Topology, model.StepMatrix}


def test_the_text_is_canonical() -> None:
    assert dumps(EVENT) == (
        '{"data":{"code":79,"line":"NVRM: Xid"},"epoch":4294967296,"job":"nano","kind":"xid",'
        '"seen_ns":1700000000000000001,"seq":3,"source":"kmsg@n1","subject":{"id":"GPU-8f3a","kind":"device"},'
        '"t_ns":1700000000000000000,"type":"Event"}'
    )


def test_types_come_back_and_not_only_values() -> None:
    status = model.JobStatus(
        attempt=1, state="running", slots={10: "n0:0", 2: "n0:1"}, pids={2: (7, 9)}, exits={}, restarts="us"
    )
    back = loads(dumps(status))
    assert isinstance(back, model.JobStatus)
    assert list(back.slots) == [2, 10]
    assert back.pids[2] == (7, 9)
    incident = loads(dumps(incident_of(Tier.ERROR)))
    assert isinstance(incident, model.Incident)
    assert type(incident.tier) is Tier


def incident_of(tier: Tier) -> model.Incident:
    return model.Incident(
        id="i", revision=1, state="suspected", tier=tier, kind="rank.hung", culprit=None, victims=(), job=None,
        epoch=None, onset_ns=0, findings=(), events=(EVENT,), reason="", action="", plans=(), lost_s={"detect": 1.5},
    )  # fmt: skip


@pytest.mark.parametrize(("value", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_floats_that_are_not_finite_are_text(value: float, text: str) -> None:
    rung = model.Rung(goal="stopped", target=EVENT.subject, args={"deep": [{"x": value}]}, deadline_s=value)
    written = dumps(rung)
    assert json.loads(written)["args"] == {"deep": [{"x": text}]}
    back = loads(written)
    assert isinstance(back, model.Rung)
    assert repr(back.deadline_s) == repr(value)
    assert back.args == {"deep": [{"x": text}]}


def test_numpy_numbers_are_numbers() -> None:
    values: Any = {"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True), "d": (1, 2), "e": np.float64("nan")}
    back = loads(dumps(Evidence(what="x", value=values)))
    assert isinstance(back, Evidence)
    assert back.value == {"a": 0.5, "b": 3, "c": True, "d": [1, 2], "e": "NaN"}


@pytest.mark.parametrize(("written", "read"), [("1", "1.0"), ("1.5", "1.5"), ('"NaN"', "nan"), ("null", "None")])
def test_a_number_may_be_whole_and_missing_where_it_may(written: str, read: str) -> None:
    back = loads(dumps(checkpoint(0.25)).replace('"loss":0.25', f'"loss":{written}'))
    assert isinstance(back, model.Checkpoint)
    assert repr(back.loss) == read


@pytest.mark.parametrize("written", ['"1"', "true", "[]", "1" + "0" * 400])
def test_what_is_no_number_is_refused(written: str) -> None:
    text = dumps(checkpoint(0.25)).replace('"loss":0.25', f'"loss":{written}')
    with pytest.raises(DataError, match=r"Checkpoint\.loss: expected a number, got"):
        loads(text)


def test_truth_is_true_or_false_only() -> None:
    with pytest.raises(DataError, match=r"Checkpoint\.pinned: expected true or false, got 0"):
        loads(dumps(checkpoint(0.25)).replace('"pinned":false', '"pinned":0'))


def checkpoint(loss: float) -> model.Checkpoint:
    return model.Checkpoint(
        name="step-4", job=JobId("nano"), epoch=Epoch(0), step=4, t_ns=0, loss=loss, grad_norm=None,
        data_position=MappingProxyType({"shard": range(2)}), topology=None, rank_steps={0: 4}, trust="good",
        pinned=False, files={"a.pt": (3, "sha256:0")},
    )  # fmt: skip


@pytest.mark.parametrize("loss", [0.25, math.inf])
def test_mappings_and_sequences_of_any_make_are_written(loss: float) -> None:
    back = loads(dumps(checkpoint(loss)))
    assert isinstance(back, model.Checkpoint)
    assert (back.data_position, back.loss) == ({"shard": [0, 1]}, loss)


def test_what_json_cannot_say_is_our_mistake() -> None:
    value: Any = 1j
    with pytest.raises(TypeError, match="complex has no JSON form"):
        dumps(Evidence(what="x", value=value))


def test_fields_of_a_newer_version_are_ignored_and_defaults_filled_in() -> None:
    assert loads('{"type":"Evidence","what":"x","value":1,"novel":2}') == Evidence(what="x", value=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON: Expecting value"),
        ("[" * 100_000, "not JSON: "),
        ('{"type":"Tick","seen_ns":NaN}', "not JSON: NaN is not strict JSON"),
        ("[]", "no known type: None"),
        ('{"type":"Frame"}', "no known type: 'Frame'"),
        ('{"type":["Tick"]}', "no known type: ['Tick']"),
        ('{"type":"Tick"}', "Tick.seen_ns: missing"),
        ('{"type":"Tick","seen_ns":"5"}', "Tick.seen_ns: expected a whole number, got '5'"),
        ('{"type":"Tick","seen_ns":true}', "Tick.seen_ns: expected a whole number, got True"),
        ('{"type":"Tick","seen_ns":9223372036854775808}', "Tick.seen_ns: expected a whole number, got 92233"),
        ('{"type":"Subject","kind":"planet","id":"3"}', "Subject.kind: expected one of rank, device, node"),
        ('{"type":"Look","key":"k","what":"stack","subjects":{}}', "Look.subjects: expected a list, got {}"),
        ('{"type":"Look","key":"k","what":"stack","subjects":[7]}', "Look.subjects[0]: expected Subject, got 7"),
        ('{"type":"Look","key":"k","what":"stack","subjects":[{"kind":"rank"}]}', "Subject.id: missing"),
        ('{"type":"Look","key":"k","what":"stack","subjects":[{"kind":"rank","id":1}]}', "Subject.id: expected text"),
        ('{"type":"Tell","key":"k","plan":"p","message":3}', "Tell.message: expected a mapping, got 3"),
    ],
)
def test_what_is_not_a_thing_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        loads(text)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("slots", {"x": "n0:0"}, "JobStatus.slots: expected whole numbers as keys, got 'x'"),
        ("slots", {"03": "n0:0"}, "JobStatus.slots: expected whole numbers as keys, got '03'"),
        ("pids", {"3": [1]}, "JobStatus.pids.3: expected 2 values, got [1]"),
        ("restarts", "nobody", "JobStatus.restarts: expected one of us, launcher, scheduler, got 'nobody'"),
    ],
)
def test_wrong_mappings_are_refused(key: str, value: object, message: str) -> None:
    status = model.JobStatus(attempt=1, state="running", slots={}, pids={}, exits={}, restarts="us")
    with pytest.raises(DataError, match=re.escape(message)):
        loads(json.dumps({**json.loads(dumps(status)), key: value}))


@pytest.mark.parametrize("tier", [9, "ERROR", None, True, 2.0], ids=str)
def test_a_tier_that_is_none_is_refused(tier: object) -> None:
    with pytest.raises(DataError, match=r"Incident\.tier: expected one of 0, 1, 2, 3"):
        loads(json.dumps({**json.loads(dumps(incident_of(Tier.INFO))), "tier": tier}))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_text_raises_nothing_but_data_errors(data: st.DataObject) -> None:
    written = [dumps(EVENT), dumps(incident_of(Tier.WARN)), dumps(Tick(seen_ns=1))]
    text = bytearray(data.draw(st.sampled_from(written)), "ascii")
    text = text[: data.draw(st.integers(0, len(text)))]
    for at in data.draw(st.lists(st.integers(0, max(len(text) - 1, 0)), max_size=3)) if text else []:
        text[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DataError):
        loads(bytes(text))


@given(JSON)
@settings(max_examples=100, deadline=None)
def test_any_json_raises_nothing_but_data_errors(value: Any) -> None:
    for name in ("Event", "Incident"):
        said = {**(value if isinstance(value, dict) else {"data": value}), "type": name}
        with pytest.raises(DataError):
            loads(json.dumps(said))


@pytest.mark.parametrize("thing", [3, None, {"type": "Tick"}], ids=str)
def test_only_things_of_the_model_are_written(thing: Any) -> None:
    with pytest.raises(TypeError, match="has no text form"):
        dumps(thing)
