"""Writes docs/metrics.md from core/signals.py, app/serving.py and app/readings.py. `make docs` runs it; a test says
when the page is old."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainwarden.app.readings import AGENT_METRICS
from trainwarden.app.serving import SERVER_METRICS
from trainwarden.core.signals import METRICS, Metric

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
HEAD = """# Metrics

What `trainwarden run`, `trainwarden server` and `trainwarden agent` show at `/metrics` with `--metrics HOST:PORT`, and
what run and server send to a receiver of OTLP with the setting `metrics.otlp_endpoint`: the same families, under the
same names, with the labels as attributes. Written by `make docs` from `core/signals.py`, `app/serving.py` and
`app/readings.py`.

Units are base units. Every series of a job has the label `job_id`; no series carries an attempt or an incident, and
none stands for a rank but those of the five slowest. What is not known has no series: it is never zero. `process_*`
(CPU, memory, files of the process itself) come from prometheus-client.

A job has at most 2,000 series, and 20 for each of its nodes (`trainwarden_source_up`), however many ranks and restarts
it has had; a test counts them at 12,500 ranks. The steps of an attempt that has ended are shown for 15 minutes; so are
a node, and on a server a job, that nothing was heard of since.
"""

JOB = """
## Of a job

Shown by `trainwarden run` of its own job, and by `trainwarden server` of each of its jobs, without checkpoints: they
lie where the job runs.
"""

SERVER = """
## Of the server

Beside those of its jobs.
"""

AGENT = """
## Of an agent

Beside the readings of its node, which are in [signals.md](signals.md): at most 20 series, one for each source, and one
for each GPU. The readings are a series for each device, link and port, which is more than 20: some 1,860 on a node with
8 GPUs of 18 NVLinks, 8 InfiniBand ports and 2 network cards, most of them (1,152) the eight counters of each NVLink.
They are the node's, not a job's: jobs that come and go leave them alone.
"""

TABLE = """
| metric | type | labels | what it says |
|---|---|---|---|
"""


def page() -> str:
    """All of it."""
    parts: Iterable[tuple[str, Mapping[str, Metric]]] = (
        (JOB, METRICS),
        (SERVER, SERVER_METRICS),
        (AGENT, AGENT_METRICS),
    )
    return HEAD + "".join(head + TABLE + "".join(map(_row, table.values())) for head, table in parts)


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.type} | {labels} | {metric.meaning} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE.name}: {len(METRICS)} metrics of jobs\n")
