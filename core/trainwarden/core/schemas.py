"""The five row types of frames. Small integers index Frame.names; a step row's numbers sit in one float32 block, so
that a receiver scatters them with one copy (68 M rows/s against 8-10 M for plain structured rows)."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from trainwarden.core.model import Schema
from trainwarden.core.records import FEATURES

STEP: Final = np.dtype(
    [
        ("rank", "<i4"),
        ("step", "<i4"),
        ("batch", "<i4"),
        ("flags", "<u2"),
        ("lap", "<u2"),
        ("end_ns", "<i8"),
        ("values", "<f4", (len(FEATURES),)),
    ]
)
"""One optimizer step of one rank, 88 bytes; values as records.FEATURES, flags as records."""

LIVE: Final = np.dtype(
    [
        ("rank", "<i4"),
        ("step", "<i4"),
        ("batch", "<i4"),
        ("phase", "<u2"),
        ("flags", "<u2"),
        ("lap", "<u2"),
        ("state", "<u2"),
        ("since_ns", "<i8"),
    ]
)
"""What a rank does right now. phase indexes Frame.names; state indexes records.STATES; since_ns: Unix time of the mark
that opened the phase. Sent at each poll, changed or not: a live frame is a sign of life of the *agent*."""

SPAN: Final = np.dtype(
    [
        ("rank", "<i4"),
        ("step", "<i4"),
        ("kind", "<u2"),
        ("mb", "<i2"),
        ("flags", "<u2"),
        ("lap", "<u2"),
        ("start_ns", "<i8"),
        ("values", "<f4", (4,)),
    ]
)
"""One timed stretch inside a step. kind indexes Frame.names; mb: micro-batch or -1; values: wall_s, cpu_s, runq_s,
device_s (NaN where not measured)."""

READING: Final = np.dtype([("subject", "<u2"), ("signal", "<u2"), ("step", "<i4"), ("t_ns", "<i8"), ("value", "<f8")])
"""One number about one subject. subject and signal index Frame.names (subject as str(Subject)); step: -1 where none."""

COLLECTIVE: Final = np.dtype(
    [
        ("rank", "<i4"),
        ("group", "<u2"),
        ("op", "<u2"),
        ("seq", "<i8"),
        ("enqueued_ns", "<i8"),
        ("started_ns", "<i8"),
        ("completed_ns", "<i8"),
        ("bytes", "<i8"),
    ]
)
"""One collective of one rank, from a flight recorder. group and op index Frame.names; a time not seen is -1; 0: it
happened, but when is not told."""

DTYPES: Final[Mapping[Schema, np.dtype[Any]]] = {
    "step": STEP,
    "live": LIVE,
    "span": SPAN,
    "reading": READING,
    "collective": COLLECTIVE,
}
