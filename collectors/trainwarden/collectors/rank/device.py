"""What is asked of a device: events, pinned memory, copies. Nothing here waits for it.

The real one is torch's; torch itself is taken from sys.modules, since it is never imported for our sake.
"""

import sys
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Final, Protocol

from trainwarden.collectors.rank.numbers import RefusedValue

DROPPED: Final = "device_dropped"
"""The counter (records.COUNTERS) of what a device computed and nobody is told."""


class Device(Protocol):
    """Events and slots are the device's own objects. Everything may raise, nothing may wait."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph: then nothing else may be asked."""
        ...

    def slots(self, count: int) -> Sequence[Any]:
        """So many places in pinned host memory, for one float32 each."""
        ...

    def event(self) -> Any:
        """A new event that takes the time."""
        ...

    def copy(self, slot: Any, tensor: Any, event: Any) -> None:
        """Queue the copy of a tensor with one element, and the event behind it, on the current stream."""
        ...

    def record(self, event: Any) -> None:
        """Queue the event on the current stream."""
        ...

    def done(self, event: Any) -> bool:
        """Whether the device has come to it."""
        ...

    def elapsed_s(self, first: Any, last: Any) -> float:
        """Between two events that are done."""
        ...

    def read(self, slot: Any) -> float:
        """What was copied there."""
        ...


class CudaDevice:
    """CUDA and ROCm, by torch; raises what torch raises."""

    def __init__(self) -> None:
        """Raises LookupError where there is no torch that could have one."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.backends.cuda.is_built():
            raise LookupError("no torch that knows CUDA was imported before attach()")
        self._torch, self._cuda = torch, torch.cuda

    def capturing(self) -> bool:
        return bool(self._cuda.is_current_stream_capturing())

    def slots(self, count: int) -> Sequence[Any]:
        with self._torch.inference_mode(False):  # what is made inside could not be written to outside
            pinned = self._torch.zeros(count, dtype=self._torch.float32, device="cpu", pin_memory=True)
        return [pinned[place : place + 1] for place in range(count)]

    def event(self) -> Any:
        if not self._cuda.is_initialized():  # an event would make a context, on a device that nobody chose
            raise RefusedValue(DROPPED, "no phase is timed on the device before the script has used it")
        return self._cuda.Event(enable_timing=True)

    def copy(self, slot: Any, tensor: Any, event: Any) -> None:
        slot.copy_(tensor.detach() if tensor.dim() < 2 else tensor.detach().reshape(1), non_blocking=True)
        event.record(self._cuda.current_stream(tensor.device))

    def record(self, event: Any) -> None:
        event.record()

    def done(self, event: Any) -> bool:
        return bool(event.query())

    def elapsed_s(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) * 1e-3

    def read(self, slot: Any) -> float:
        return float(slot.item())


DEVICES: Final[MutableMapping[str, Callable[[], Device]]] = {"cuda": CudaDevice}
"""By torch's name of their kind. Tensors on any other are refused and counted."""
