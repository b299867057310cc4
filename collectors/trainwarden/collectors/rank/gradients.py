"""The norm of a rank's own gradient, taken before any other rank's gradient is added to it. Opt-in.

    watch_gradients(w, model)                      # DistributedDataParallel, or what fully_shard made of it
    watch_gradients(w, model, scale=scaler)        # a GradScaler, or a callable that gives the loss scale
    model.register_comm_hook(state, watched_hook(w, powerSGD_hook))    # DDP takes one hook: yours, seen through
    tell_gradients(w, [bucket.grad_data for ...])  # by hand, between backward and the reduction: Megatron's buckets

A NaN in the reduced gradient is everybody's; here it has one rank's name. What is told is value(GRAD_NORM,
scope="local"): the L2 norm of all gradients that this rank hands to the reduction, accumulated in float32 (float64
gradients in float64), divided by the loss scale and by nothing else: not by the number of ranks, not clipped. So the
norm of the averaged gradient is at most the mean of the ranks' local ones.

- Accumulation: a backward that does not reduce (no_sync) tells nothing, the one that reduces tells the norm of what was
  accumulated. Where each backward of a step reduces, the last one's norm counts; a NaN in any of them stays flagged.
- Tensor or context parallelism: it is the norm of the rank's own share, comparable among ranks of equal `tp` and `cp`.
- FSDP2: gradients are seen in the dtype they are reduced in. Reentrant checkpointing around a sharded module starts
  backwards of its own, and then only the last one's gradients are told.
- A norm above 1.8e19 counts as infinite: its square has no place in a float32. Where a loss scale is told, what is not
  finite is not told: with a dynamic one overflows are routine, and the scaler skips their steps. A NaN that is none of
  those ruins the loss, which is looked at by itself.

Anything else is blind, which the hello says. No collective is started and no device waited for; a failure of ours is
counted, said once and ends the watching, while the reduction goes on. Never met a GPU.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

from trainwarden.collectors.rank.rank import IN_SUMS, Rank
from trainwarden.collectors.rank.say import say
from trainwarden.collectors.rank.words import GRAD_NORM

Hook: TypeAlias = Callable[[Any, Any], Any]
"""A communication hook of DDP: state and bucket to the future of the reduced gradients."""

BLIND: Final = "local_grad_norm"
_UNDIVIDED: Final = ("torch.float32", "torch.bfloat16")
"""FSDP2 divides gradients of any other dtype, by a factor of its own, before it hands them over (PyTorch 2.13)."""


def watch_gradients(w: Rank, model: Any, *, scale: Any = None) -> bool:
    """Tell the local gradient norm of each step. False: it cannot be told (said, also in the hello).

    model: after all that wraps it; DDP's one place for a communication hook is then taken. scale: what the loss was
    multiplied by, a GradScaler or a callable without arguments (a number, or a tensor on the gradients' device). The
    reduction is DDP's own to the last bit, save where it divides by something else than it multiplies with: under
    join(divide_by_initial_world_size=False), and where gradient_as_bucket_view=True keeps gradients from step to step
    (set_to_none=False) with a number of ranks that is no power of two.
    """
    if w.why_off:
        return False
    try:
        why = _watch_ddp(w, model, scale) if hasattr(model, "register_comm_hook") else _watch_sharded(w, model, scale)
    except Exception as error:
        w._failed()
        why = f"{type(error).__name__}: {error}"
    if why:
        _blind(w, why)
    return not why


def watched_hook(w: Rank, hook: Hook, *, scale: Any = None) -> Hook:
    """The hook, for register_comm_hook: it does what it did, after the bucket was seen. The same one if `w` is off."""
    if w.why_off:
        return hook
    seen = _Gradients(w, scale)

    @functools.wraps(hook)  # DDP looks at a hook's name and annotations: it shall find the script's own
    def watched(state: Any, bucket: Any) -> Any:
        seen.bucket(bucket)
        return hook(state, bucket)

    return watched


def tell_gradients(w: Rank, gradients: Iterable[Any], *, scale: Any = None) -> None:
    """Tell the norm of these tensors, which nobody else's gradients are in yet, as this step's local gradient norm.

    For strategies that reduce in buckets of their own, called between backward and the reduction. With Megatron's DDP
    that is ahead of finish_grad_sync(), of bucket.grad_data for each bucket of each of model.buffers, and it is wrong
    with overlap_grad_reduce, which reduces while backward runs.
    """
    if not w.why_off:
        _Gradients(w, scale).all(gradients)


class _Gradients:
    """The norms of one backward's pieces, in their order. Its methods run inside backward and raise nothing."""

    __slots__ = ("_norms", "_off", "_scale", "_stream", "_task", "_torch", "_w")

    def __init__(self, w: Rank, scale: Any) -> None:
        self._w, self._scale, self._torch = w, scale, sys.modules["torch"]
        self._norms: list[Any] = []
        self._off = False
        self._task = -1
        self._stream: Any = contextlib.nullcontext()

    def bucket(self, bucket: Any) -> None:
        """DDP's: told with the last one, ahead of its reduction; some settings leave unused buckets out."""
        try:
            if not self._wanted():
                return
            self._begin()
            self._add(bucket.buffer())
            if bucket.is_last():
                self._tell()
        except Exception:
            self._fail()

    def shard_input(self, gradient: Any) -> None:
        """FSDP2's: told when the backward ends, by a callback of the engine that comes after those of FSDP2."""
        try:
            if not self._wanted():
                return
            if str(gradient.dtype) not in _UNDIVIDED:
                self._off = True
                _blind(self._w, f"FSDP2 divides gradients of {gradient.dtype} ahead of the reduction")
                return
            self._begin()
            self._add(gradient)
            if gradient.device.type != "cpu":
                self._stream = self._torch.accelerator.current_stream()
        except Exception:
            self._fail()

    def all(self, gradients: Iterable[Any]) -> None:
        try:
            if self._wanted():
                for gradient in gradients:
                    self._add(gradient)
                self._tell()
        except Exception:
            self._fail()

    def _wanted(self) -> bool:
        torch = self._torch
        if self._off or self._w._phase < IN_SUMS or torch.compiler.is_compiling():  # off, or between steps
            return False
        return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())

    def _begin(self) -> None:
        """A piece comes: of a new backward? The one before may not have got to its end."""
        task = self._torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._norms.clear()
            self._torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _add(self, gradient: Any) -> None:
        torch = self._torch
        exact = torch.promote_types(gradient.dtype, torch.float32)
        self._norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=exact))

    def _backward_ends(self) -> None:
        try:
            if self._norms:
                with self._stream:  # the one that they were made on
                    self._tell()
        except Exception:
            self._fail()

    def _tell(self) -> None:
        norm = self._torch.linalg.vector_norm(self._torch.stack(self._norms))
        self._norms.clear()
        if self._scale is not None:
            norm = norm / self._loss_scale(norm)
        self._w._value(GRAD_NORM, norm, "local", flagged=self._scale is None)

    def _loss_scale(self, norm: Any) -> Any:
        """A scaler's get_scale() waits for the device; one, scaled, does not."""
        scaler = getattr(self._scale, "scale", None)
        return self._scale() if scaler is None else scaler(self._torch.ones_like(norm))

    def _fail(self) -> None:
        self._off = True
        self._norms.clear()
        self._w._failed()
        _blind(self._w, f"failed: {sys.exception()}")


class _ReduceScatter:
    """What a module reduced its gradients with, seen through (torch's ReduceScatter by its shape)."""

    __slots__ = ("_inner", "_seen")

    def __init__(self, inner: Any, seen: _Gradients) -> None:
        self._inner, self._seen = inner, seen

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.allocate(*args, **kwargs)

    def __call__(self, output_tensor: Any, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        self._seen.shard_input(input_tensor)
        return self._inner(output_tensor, input_tensor, *args, **kwargs)


def _watch_ddp(w: Rank, model: Any, scale: Any) -> str:
    """Why it cannot be; empty: it is done. Raises what torch raises."""
    if type(model).__name__ == "FullyShardedDataParallel":
        return "FSDP's first version is not watched (fully_shard is)"
    if model.logger._get_ddp_logging_data().strs_map.get("comm_hook"):
        return "DDP has a communication hook already, and takes one: register watched_hook(w, HOOK) in its place"
    if model._use_python_reducer:
        return "DDP's Python reducer has no buckets"

    def averaged(group: Any, bucket: Any) -> Any:
        """torch's allreduce_hook divides, DDP without a hook multiplies: with three ranks that differs."""
        mine = bucket.buffer().mul_(1.0 / group.size())
        reduced = sys.modules["torch"].distributed.all_reduce(mine, group=group, async_op=True)
        return reduced.get_future().then(lambda done: done.value()[0])

    averaged.__annotations__.clear()  # DDP accepts none, or types of its own
    model.register_comm_hook(model.process_group, watched_hook(w, averaged, scale=scale))
    return ""


def _watch_sharded(w: Rank, model: Any, scale: Any) -> str:
    """Why it cannot be; empty: it is done. Raises what torch raises."""
    sharded = [module for module in model.modules() if hasattr(module, "set_custom_reduce_scatter")]
    if not sharded:
        return f"nothing is known of how {type(model).__name__} reduces gradients (tell_gradients does it by hand)"
    groups = [module._get_fsdp_state()._fsdp_param_groups for module in sharded]
    if any(len(of_one) > 1 for of_one in groups):
        return "a module of several meshes has no place for a reduce-scatter of ours"
    if any(getattr(group.mesh_info, "shard_mesh_size", 1) == 1 for of_one in groups for group in of_one):
        return "a module is sharded over one rank, and so has no reduce-scatter"
    seen = _Gradients(w, scale)
    for module, of_one in zip(sharded, groups, strict=True):
        for group in of_one:
            if not isinstance(group._reduce_scatter_comm, _ReduceScatter):  # modules may share one
                module.set_custom_reduce_scatter(_ReduceScatter(group._reduce_scatter_comm, seen))
    return ""


def _blind(w: Rank, why: str) -> None:
    text = f"{BLIND}: {why}"
    say(text, f"{text} (the training goes on)")
    if w._hello is not None:
        w._hello.hides(w._lap, BLIND, text)
