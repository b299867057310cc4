"""Writes docs/metrics.md from core/signals.py. `make docs` runs it; a test says when the page is old."""

import sys
from pathlib import Path

from trainwarden.core.signals import METRICS, Metric

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
HEAD = """# Metrics

What `trainwarden run --metrics HOST:PORT` shows at `/metrics`. Written by `make docs` from `core/signals.py`.

Units are base units. Every series of a job has the label `job_id`; no series carries an attempt or an incident, and
none stands for a rank but those of the five slowest. What is not known has no series: it is never zero. `process_*`
(CPU, memory, files of the supervisor itself) come from prometheus-client.

| metric | type | labels | what it says |
|---|---|---|---|
"""


def page() -> str:
    """All of it."""
    return HEAD + "".join(f"{_row(metric)}\n" for metric in METRICS.values())


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.type} | {labels} | {metric.meaning} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE.name}: {len(METRICS)} metrics\n")
