"""Numbers about nodes, devices and links as frames of schema `reading`."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from trainwarden.core.model import Frame
from trainwarden.core.schemas import READING

Row: TypeAlias = tuple[str, str, float]
"""Subject (as str(Subject)), signal (a name of core/readings.py), value."""


class ReadingFrames:
    """Numbers the reading frames of one source of a node."""

    def __init__(self, source: str, *, start_ns: int) -> None:
        self._source = source
        self._seq = start_ns // 1000

    def __call__(self, rows: Sequence[Row], now_ns: int) -> list[Frame]:
        """One frame, or none where nothing was read."""
        if not rows:
            return []
        self._seq += 1
        index: dict[str, int] = {}
        rows_N = np.empty(len(rows), READING)
        rows_N["subject"] = [index.setdefault(subject, len(index)) for subject, _, _ in rows]
        rows_N["signal"] = [index.setdefault(signal, len(index)) for _, signal, _ in rows]
        rows_N["value"] = [value for _, _, value in rows]
        rows_N["step"], rows_N["t_ns"] = -1, now_ns
        return [
            Frame(
                schema="reading",
                source=self._source,
                job=None,
                epoch=None,
                seq=self._seq,
                sent_ns=now_ns,
                seen_ns=now_ns,
                names=tuple(index),
                rows=rows_N,
            )
        ]
