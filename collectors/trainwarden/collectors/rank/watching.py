"""watch(): the marks of a PyTorch training loop, made from outside its modules.

    w = attach()
    watch(w, model, optimizer)  # the very objects that the loop calls: after DDP, fully_shard, torch.compile
    for step, batch in enumerate(batches):
        w.begin(step)
        model(batch).mean().backward()
        optimizer.step()
        w.end()

- forward: the outermost call of the model where it is not compiled. It is taken at the one place that nn.Module looks
  at before any hook and any compiled code, which no copy and no pickle of the model contains. A compiler that comes by
  finds nothing there to trace.
- backward: from the first gradient that reaches what the model returned to the end of the rank's own part. Both come
  from the autograd engine (a hook on a node of the graph, a callback of the engine), not from tensors or modules. The
  engine runs our callback ahead of those that a strategy queues while backward runs, and in its own DDP waits for the
  others: between ours and a second one that runs after all of them, the phase is `wait`. A model that is called inside
  backward is recomputed (activation checkpointing): that is backward.
- optimizer: its own step hooks. What lies between these is `other`, and so no own work.
- All these are timed by the device where the model is on one that can (pending.py), else by the host.
- What cannot be told apart is said in the hello: sharded parameters wait for the others inside forward and backward.

No device is waited for, no collective started, nothing raised; a hook that fails is counted, and all of the same
watch() are removed.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from trainwarden.collectors.rank.device import DEVICES
from trainwarden.collectors.rank.pending import time_on
from trainwarden.collectors.rank.rank import IN_SUMS, Rank
from trainwarden.collectors.rank.recompiles import RECOMPILES
from trainwarden.collectors.rank.schedules import watch_schedule
from trainwarden.collectors.rank.words import BACKWARD, FORWARD, OPTIMIZER, OTHER, WAIT

MOST_TENSORS: Final = 8
"""Tensors of a model's output that are followed; more would cost more than they tell (the loss depends on one)."""

MISSES: Final = 3
"""Optimizer steps without a forward or a backward before that is said: the first ones may be somebody's warm-up."""

_FORWARD_SEEN, _BACKWARD_SEEN = 1, 2


def watch(w: Rank, model: Any, *optimizers: Any, time_device: bool = True) -> "Watch | None":
    """Mark the phases of each step between w.begin() and w.end(). None: it cannot be done (said and counted).

    model: an nn.Module, or a schedule of torch.distributed.pipelining, whose micro-batches become spans. Call it once
    all that wraps the model has wrapped it. A phase that the script announces (evaluation, checkpoint) is left alone.
    time_device: phases of a model on a CUDA device are timed there, unless attach() was given clock="cpu".
    """
    if w.why_off:
        return None
    try:
        modules = watch_schedule(w, model)
        watched = Watch(w, None if modules else model, optimizers)
        for module in modules or [model]:
            if time_device and w._schedstat is None:
                _time_on_device(w, module)
            tell_hidden(w, module, inside=bool(modules))
    except Exception:
        w._failed()
        return None
    return watched


def tell_hidden(w: Rank, model: Any, *, inside: bool = False) -> None:
    """Say in the hello what the model's strategy hides. inside: a pipeline schedule calls the model."""
    why = _hidden(model, inside)
    if why:
        hide(w, why)


def hide(w: Rank, why: str) -> None:
    """Say in the hello that this rank's own work cannot be told, and why."""
    if w._hello is not None:
        w._hello.hides(w._lap, "own_work", why)


class Backward:
    """Follows backward passes, whoever starts them."""

    __slots__ = ("_task", "_torch", "_w", "off", "seen")

    def __init__(self, w: Rank) -> None:
        self._w, self._torch = w, sys.modules["torch"]
        self._task = -1
        self.seen = False
        """Whether there was one since somebody set this to False."""
        self.off = False
        """Set: what still hangs on graphs does nothing."""

    def follow(self, output: object) -> None:
        """The next backward begins when a gradient comes to a tensor in `output`. Raises what torch raises."""
        for tensor in _tensors(output):
            tensor.grad_fn.register_prehook(self.begins)

    def running(self) -> bool:
        """Whether the calling thread is inside a backward."""
        return int(self._torch._C._current_graph_task_id()) != -1

    def begins(self, gradients: object = None) -> None:
        """Called inside a backward, for each tensor that is followed: the first one counts."""
        if self._torch.compiler.is_compiling() or self.off:
            return
        task = self._torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task, self.seen = task, True
        try:
            self._queue(self._own_part_ends)
            if in_step(self._w):
                self._w.mark(BACKWARD)
        except Exception:
            self._fail()

    def _own_part_ends(self) -> None:
        try:
            if phase_of(self._w) != BACKWARD:
                return
            distributed = self._torch.distributed
            if distributed.is_available() and distributed.is_initialized():
                self._w.mark(WAIT)
                self._queue(self._all_ends)  # behind whatever is queued by now
            else:
                self._w.mark(OTHER)
        except Exception:
            self._fail()

    def _all_ends(self) -> None:
        if phase_of(self._w) == WAIT:
            self._w.mark(OTHER)

    def _queue(self, callback: Callable[[], None]) -> None:
        self._torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _fail(self) -> None:
        self.off = True
        self._w._failed()


class Watch:
    """The hooks of one watch(), removed by remove() or at the first failure."""

    __slots__ = ("_backward", "_handles", "_inner", "_misses", "_model", "_seen", "_torch", "_w")

    def __init__(self, w: Rank, model: Any, optimizers: tuple[Any, ...]) -> None:
        """model: None where a pipeline schedule calls it. Raises what torch raises."""
        self._w, self._torch = w, sys.modules["torch"]
        self._backward = Backward(w)
        self._seen = self._misses = 0
        self._model = model
        self._inner: Callable[..., Any] | None = None
        if model is not None:
            self._wrap()
        self._handles = [
            handle
            for optimizer in optimizers
            for handle in (
                optimizer.register_step_pre_hook(self._optimizer_begins),
                optimizer.register_step_post_hook(self._optimizer_ends),
            )
        ]

    def remove(self) -> None:
        """Take all hooks away."""
        self._backward.off = True
        while self._handles:
            self._handles.pop().remove()
        model, self._model = self._model, None
        if model is not None and model._compiled_call_impl == self._called:
            model._compiled_call_impl = self._inner if self._inner != model._call_impl else None

    def _wrap(self) -> None:
        """Stand before the model's call, compiled in place (Module.compile) or not."""
        self._inner = self._model._compiled_call_impl or self._model._call_impl
        self._model._compiled_call_impl = self._called

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        inner = self._inner
        assert inner is not None
        if self._torch.compiler.is_compiling():
            return inner(*args, **kwargs)
        marked = self._forward_begins()
        output = inner(*args, **kwargs)
        if marked:
            self._forward_ends(output)
        return output

    def _forward_begins(self) -> bool:
        try:
            if self._model is None:
                return False
            if self._backward.running():
                self._backward.begins()
                return False
            if not in_step(self._w) or not (self._model.training or self._torch.is_grad_enabled()):
                return False
            self._seen = _FORWARD_SEEN
            self._w.mark(FORWARD)
        except Exception:
            self._fail()
            return False
        return True

    def _forward_ends(self, output: object) -> None:
        try:
            if phase_of(self._w) == FORWARD:
                self._w.mark(OTHER)
            if self._torch.is_grad_enabled():
                self._backward.follow(output)
        except Exception:
            self._fail()

    def _optimizer_begins(self, *_: object) -> None:
        if not self._torch.compiler.is_compiling() and in_step(self._w):
            self._w.mark(OPTIMIZER)

    def _optimizer_ends(self, *_: object) -> None:
        if self._torch.compiler.is_compiling():
            return
        try:
            if phase_of(self._w) != OPTIMIZER:
                return
            self._w.mark(OTHER)
            RECOMPILES.look(self._w)
            if self._model is not None:
                self._look_for_misses()
        except Exception:
            self._fail()

    def _look_for_misses(self) -> None:
        seen = self._seen | (_BACKWARD_SEEN if self._backward.seen else 0)
        self._seen, self._backward.seen = 0, False
        if seen == _FORWARD_SEEN | _BACKWARD_SEEN or self._misses == MISSES:
            return
        if self._model._compiled_call_impl != self._called:
            self._wrap()  # compiled in place after watch()
            return
        self._misses += 1
        if self._misses == MISSES:
            what = "backward" if seen == _FORWARD_SEEN else "forward"
            hide(self._w, f"{what}: runs inside compiled or captured code")

    def _fail(self) -> None:
        self._w._failed()
        self.remove()


def _time_on_device(w: Rank, model: Any) -> None:
    for kind in {parameter.device.type for parameter in model.parameters()} & DEVICES.keys():
        time_on(w, kind)


def phase_of(w: Rank) -> int:
    """The phase that is open."""
    return w._sums.phase if w._phase == IN_SUMS else w._phase


def in_step(w: Rank) -> bool:
    """Whether a step is open, in none of the phases that a script announces."""
    return w._phase >= IN_SUMS and phase_of(w) <= OTHER


def _tensors(output: object) -> Iterator[Any]:
    """The tensors in a model's output that backward comes through; it may be nested in what models usually return."""
    found, todo = 0, [output]
    while todo and found < MOST_TENSORS:
        one = todo.pop()
        if getattr(one, "grad_fn", None) is not None:
            found += 1
            yield one
        elif isinstance(one, Mapping):
            todo += one.values()
        elif isinstance(one, list | tuple):
            todo += one


def _hidden(model: Any, inside: bool) -> str:
    """Where this model waits for other ranks inside its forward or backward; empty: nowhere known."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return "forward and backward contain all-gathers (FSDP)"
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        return "forward and backward contain collectives (parameters are DTensors: FSDP2 or tensor parallel)"
    if inside and any(type(module).__name__ == "DistributedDataParallel" for module in model.modules()):
        return "the last backward of a stage contains its reduction (DDP in a pipeline)"
    return ""
