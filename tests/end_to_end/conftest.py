"""Starts `trainwarden run` for a test and leaves nothing running after it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.running import Running


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """start(job, *command, config="", policy="") -> Running."""
    started: list[Running] = []

    def run(job: str, *command: str, **more: Any) -> Running:
        started.append(Running(tmp_path, job, *command, **more))
        return started[-1]

    yield run
    for running in started:
        running.end()
