"""What the NVML reader says is checked before it is believed."""

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainwarden.collectors.nvml_answers import Told, Word, parse_answer
from trainwarden.core.errors import DataError

KEYS = st.sampled_from(
    [
        "i",
        "t_ns",
        "v",
        "absent",
        "links",
        "pids",
        "device",
        "lost",
        "at",
        "ready",
        "done",
        "blind",
        "0",
        "uuid",
        "index",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=6),
    max_leaves=12,
)


@example(b'{"i": Infinity}')
@example(b'{"i": 0, "t_ns": Infinity}')
@example(b'{"i": 0, "t_ns": 0, "v": {"gpu_power_watts": 1%b}}' % (b"0" * 400))
@example(b'{"i": 0, "t_ns": -1%b}' % (b"0" * 30))
@settings(max_examples=200)
@given(JSON.map(lambda said: json.dumps(said).encode()) | st.binary(max_size=40))
def test_whatever_a_reader_says_is_an_answer_or_refused(line: bytes) -> None:
    try:
        said = parse_answer(line)
    except DataError:
        return
    assert isinstance(said, Word) or (isinstance(said, Told) and 0 <= said.t_ns < 2**63)


def test_numbers_that_are_none_are_dropped() -> None:
    said = parse_answer(
        b'{"i": 1, "t_ns": 5, "v": {"gpu_power_watts": NaN, "gpu_energy_joules": 1e999, "node_load_1m": 1, "x": 2,'
        b' "gpu_temperature_celsius": 3}, "links": {"4": {"nvlink_up": 1, "gpu_power_watts": 1}}, "absent": {}}'
    )
    assert isinstance(said, Told)
    assert (said.values, said.links) == ({"gpu_temperature_celsius": 3.0}, {4: {"nvlink_up": 1.0}})
