"""Writes docs/signals.md from core/signals.py, core/readings.py and app/readings.py. `make docs` runs it; a test says
when the page is old."""

import sys
from collections.abc import Iterable
from pathlib import Path

from trainwarden.app.readings import LABELS
from trainwarden.core.readings import READINGS
from trainwarden.core.signals import SIGNALS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "signals.md"

HEAD = """# Signals

Every number that is measured: by ranks, and by the agent of a node. Written by `make docs` from `core/signals.py`,
`core/readings.py` and `app/readings.py`. What run, server and agent show beside these is in [metrics.md](metrics.md).

What cannot be read has no series: it is never zero, and a value that its source has not told again within three of its
periods is gone. What each source needs to be allowed is in [privileges.md](privileges.md). Counters are shown as they
are told, from whatever they were at first, resets and all: what counts is their growth.
"""

RANKS = """
## Of ranks

Source: the ring that each rank writes. Recorded and sent for each rank and step; shown as a rollup of the newest closed
step over all ranks of a job (quantile 0.5, 0.99 and 1): three series a job, however many ranks.

| signal | unit | kind | source | metric | cardinality |
|---|---|---|---|---|---|
"""

NODES = """
## Of nodes

Read by `trainwarden agent`, the first source that can tell it; shown by the agent of the node. `node` is the node's
name; `uuid` the GPU's; `gpu` its index; `link` a port (`mlx5_0/1`) or an NVLink (`nvlink-3`).

| signal | unit | kind | source | metric | cardinality | what it says |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """All of it."""
    ranks = (
        (f"`{one.name}`", one.unit, "gauge", "ring", f"`{one.metric}`", "3 a job (`job_id`, `quantile`)")
        for one in SIGNALS.values()
    )
    nodes = (
        (
            *(f"`{one.name}`", one.unit, one.kind, ", ".join(one.sources), f"`{one.metric}`"),
            f"1 a {one.of} ({_labels(LABELS[one.of])})",
            one.meaning,
        )
        for one in READINGS.values()
    )
    return HEAD + RANKS + _rows(ranks) + NODES + _rows(nodes)


def _labels(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _rows(rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE.name}: {len(SIGNALS)} signals of ranks, {len(READINGS)} of nodes\n")
