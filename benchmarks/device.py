"""What the times and values of a device cost the host: python benchmarks/device.py

One step is begin, four marks and end with clock="device", with and without loss and gradient norm as tensors on the
device. The collector's own share is measured anywhere, with a device that does nothing; what the driver adds, whether
anything waits (torch's synchronisation debugging set to error) and whether a compiled model is broken up needs a GPU:
without one that is said, loudly, and nothing is made up. Exit status 1 if a target is missed.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from trainwarden.collectors.rank import BACKWARD, DATA, FORWARD, GRAD_NORM, LOSS, OPTIMIZER, Rank, attach, watch
from trainwarden.collectors.rank.device import DEVICES
from trainwarden.collectors.rank.pending import time_on

TARGET_US: Final = 40.0
"""Host time a step of timing the phases on a GPU (docs/adr/0006-device-values.md); values come on top."""

ROUNDS, STEPS_A_ROUND = 40, 500


class Nothing:
    """A device that has always done what it was asked."""

    def capturing(self) -> bool:
        return False

    def slots(self, count: int) -> Sequence[float]:
        return [1.5] * count

    def event(self) -> int:
        return 0

    def copy(self, slot: float, tensor: object, event: int) -> None:
        return None

    def record(self, event: int) -> None:
        return None

    def done(self, event: int) -> bool:
        return True

    def elapsed_s(self, first: int, last: int) -> float:
        return 0.25

    def read(self, slot: float) -> float:
        return slot


class Number:
    """A tensor on it."""

    device = type("device", (), {"type": "nothing"})()

    def numel(self) -> int:
        return 1


def host_us(w: Rank, values: Sequence[object], settle: Callable[[], None]) -> float:
    """CPU time of the calling thread in the calls of one step, median of rounds; before each a device may catch up."""
    took_us = []
    for number in range(ROUNDS):
        settle()
        begin_ns = time.thread_time_ns()
        for step in range(number * STEPS_A_ROUND, (number + 1) * STEPS_A_ROUND):
            w.begin(step)
            w.mark(DATA)
            w.mark(FORWARD)
            w.mark(BACKWARD)
            w.mark(OPTIMIZER)
            for name, value in zip((LOSS, GRAD_NORM), values, strict=False):
                w.value(name, value)
            w.end()
        took_us.append((time.thread_time_ns() - begin_ns) / STEPS_A_ROUND / 1000)
    return statistics.median(took_us)


def own_share_us(rank: int, values: Sequence[object]) -> float:
    w = attach(rank=rank, world_size=5)
    time_on(w, "nothing")
    took_us = host_us(w, values, lambda: None)
    w.close()
    return took_us


def on_a_gpu() -> list[tuple[str, float, float]]:
    """Verdicts: what, got, limit."""
    w = attach(rank=3, world_size=5, clock="device")
    values = [torch.ones((), device="cuda"), torch.ones((), device="cuda")]
    host_us(w, values, torch.cuda.synchronize)  # pools are filled
    torch.cuda.set_sync_debug_mode("error")  # whatever waits raises, is counted and fails the verdict
    timing_us, with_values_us = host_us(w, (), lambda: None), host_us(w, values, lambda: None)
    torch.cuda.set_sync_debug_mode("default")
    errors = _errors(w)
    w.close()
    print(f"host time a step with two values: {with_values_us:.1f} us")
    return [("host time of timing a step, us", timing_us, TARGET_US), ("calls that waited or failed", errors, 0)]


def _compiled() -> list[tuple[str, float, float]]:
    w = attach(rank=4, world_size=5)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, fullgraph=True)  # raises at a graph break
    watch(w, compiled, optimizer)
    x = torch.randn(4096, 1024, device="cuda")
    for step in range(20):
        w.begin(step)
        out = compiled(x).square().mean()
        out.backward()
        w.value(LOSS, out)
        optimizer.step()
        optimizer.zero_grad()
        w.end()
    errors = _errors(w)
    w.close()
    return [("errors with a compiled model (fullgraph)", errors, 0)]


def _errors(w: Rank) -> int:
    ring: Any = w._ring
    return int(ring._counters[0])


def main() -> int:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.environ |= {"TRAINWARDEN_DIR": folder, "TRAINWARDEN_JOB": "bench"}
        DEVICES["nothing"] = Nothing
        alone_us, with_values_us = own_share_us(0, ()), own_share_us(1, (Number(), Number()))
        print(f"the collector's own share of a step: {alone_us:.1f} us, with two values {with_values_us:.1f} us")
        if not torch.cuda.is_available():
            print("NOT MEASURED: THERE IS NO CUDA DEVICE HERE. What a driver adds to that is not known.")
            return 0
        print(f"device: {torch.cuda.get_device_name()}")
        verdicts = [*on_a_gpu(), *_compiled()]
    for what, got, limit in verdicts:
        print(f"{'PASS' if got <= limit else 'FAIL'}  {what} <= {limit:g}: {got:.3g}")
    return 0 if all(got <= limit for _, got, limit in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
