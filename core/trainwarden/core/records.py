"""The ring of one rank: the words both sides of the shared memory agree on. Standard library only.

One file per rank and attempt on a tmpfs, written by the rank's main thread, read by the node's agent. ADR 0002 says why
it looks like this. All numbers are little endian (packed in native order, which is a little faster: on a big-endian
machine there is no ring). The file never changes its size; its parts:

    0       header        fixed facts, written before the file gets its name
    128     live block    what the rank does right now: one 8-byte store at each mark
    320     counters      the collector's own failures: counted here, never raised in the training
    384     control       requests to the rank (core/control.py); reserved in version 1, all zero
    512     names         256 slots of 48 bytes, append only, UTF-8, zero padded; a slot is empty or final
    16384   step rows     STEP_ROWS x 96 bytes, one wide row a step, at (seq - 1) % STEP_ROWS
    ...     detail rows   DETAIL_ROWS x 48 bytes, spans, values and marks, at (seq - 1) % DETAIL_ROWS

A row begins and ends with its sequence number (from 1). Python has no memory barriers, so a reader takes a row only
when two reads at least 1 ms apart are byte-equal and head equals tail. Times in the ring are CLOCK_MONOTONIC seconds as
float64 (what time.perf_counter() gives: no conversion on the writer's side; exact to 2 ns in the first 100 days of
uptime); the reader turns them into Unix time. The side ring of a rank (other threads; `.side.ring`) has detail rows
only.
"""

import signal
import struct
from pathlib import Path

MAGIC = b"TWRING\r\n"
"""First bytes of a ring."""

VERSION = 1
"""Layout version. A reader that meets a larger one is blind and says `upgrade the agent`."""

HEADER = struct.Struct("@8s 8I 2i 4I Q q")
"""magic, version, names_offset, steps_offset, step_rows, details_offset, detail_rows, file_bytes, clock (index into
CLOCKS), rank, world_size, attempt, restart, pid, pad, start_time (clock ticks since boot, field 22 of /proc/PID/stat),
created_ns (Unix)."""

CLOCKS = ("wall", "cpu")
"""How spans are timed: `wall` reads the monotonic clock, `cpu` reads the thread's schedstat as well."""

PHASES = (
    "optimizer",
    "wait",
    "backward",
    "forward",
    "data",
    "other",
    "between",
    "init",
    "checkpoint",
    "eval",
    "compile",
    "backward_input",
    "backward_weight",
)
"""Phase ids are the first slots of the names table. `between`: after end() and before the next begin(). `init`: from
attach() to the first begin(). `other`: from begin() to the first mark. The rest are the span kinds of the measurement
contract. A plain step goes down the ids from `other`; the collector relies on it."""

LIVE_OFFSET = 128
LIVE = struct.Struct(f"@{len(PHASES)}d 4q H 6x")
"""since (when each phase was last entered: the rank is in the phase with the newest stamp), step, batch, flags, lap,
state (index into STATES). A phase is entered with one aligned 8-byte store, so a live block is never torn."""

STATES = ("starting", "attached", "detached")
"""What the collector says of itself. `detached`: the script closed it or ended in order."""

COUNTERS_OFFSET = 320
COUNTERS = ("errors", "names_dropped", "values_refused", "device_tensors_refused", "device_dropped")
"""u64 each. errors: exceptions caught inside the collector and calls out of order; refused: values that are no number,
or are on a device and not to be had; device_dropped: values and device times that were not taken or came too late."""

CONTROL_OFFSET = 384
NAMES_OFFSET = 512
NAME_SLOTS = 256
NAME_BYTES = 48
STEPS_OFFSET = 16384
STEP_ROWS = 2048
STEP_ROW = struct.Struct("@I 2i 2H d 16f 2I")
"""A step in sums (form 1): seq, step, batch, flags, lap, end, 16 values in the order of FEATURES, form, tail_seq: 96
bytes."""
STAMP_ROW = struct.Struct("@I i 8x 7d 2f 12x I")
"""The same step in stamps (form 0), if it went down the ids of PHASES from `other`, each phase at most once, and has no
value but loss and grad_norm: seq, step, end, when each of the first six PHASES was last entered (`other`: when the step
began; a stamp before that: not in this step), loss, grad_norm, tail_seq. Batch is the step; flags and lap are 0. The
loop stores, the reader subtracts."""
IN_STAMPS, IN_SUMS = 0, 1
STAMPED = 6
"""How many of PHASES a row in stamps tells of."""

DETAILS_OFFSET = STEPS_OFFSET + STEP_ROWS * STEP_ROW.size
DETAIL_ROWS = 8192
DETAIL_ROW = struct.Struct("@I i 2H h H 2d 2f 2I")
"""seq, step, what (index into DETAILS), name id, mb (span: micro-batch or -1; phase: id of the phase announced), flags,
t (a span's start), value (span: wall seconds without the waits inside it; value and note rows: the value; phase:
seconds it may take), cpu_s, runq_s (NaN where absent), lap, tail_seq: 48 bytes."""
DETAILS = ("none", "span", "value", "phase", "note")
SIDE_ROWS = 1024
"""Detail rows of a side ring."""
FILE_BYTES = DETAILS_OFFSET + DETAIL_ROWS * DETAIL_ROW.size
MAX_FILE_BYTES = 1 << 20
"""No ring is larger (docs/architecture.md, Measuring inside the rank)."""

COMMITTED = "checkpoint_committed"
"""A note of this name, its value the checkpoint's step, says that the rank has finished writing its part."""

RECOMPILED = "recompile "
"""A note whose name begins so says that torch.compile compiled the function named by the rest of it again; its value is
how many recompilations the process has made so far."""

FEATURES = (
    "step_s",
    "data_s",
    "forward_s",
    "backward_s",
    "optimizer_s",
    "checkpoint_s",
    "eval_s",
    "cpu_s",
    "wait_s",
    "runq_s",
    "tokens",
    "loss",
    "grad_norm",
    "local_loss",
    "local_grad_norm",
    "learning_rate",
)
"""Order of the 16 float32 of a step row. `step_s` is wall time from begin() to end(); the other `*_s` of phases are
wall minus run-queue wait (where the clock is `cpu`) minus waits inside. cpu_s, runq_s: of the whole step (NaN on clock
`wall`). wait_s: time in phase `wait`. Nothing measured: NaN. Phases between two steps count into the second's row."""

PHASE_FEATURE = {
    "data": "data_s",
    "forward": "forward_s",
    "backward": "backward_s",
    "backward_input": "backward_s",
    "backward_weight": "backward_s",
    "optimizer": "optimizer_s",
    "wait": "wait_s",
    "checkpoint": "checkpoint_s",
    "eval": "eval_s",
}
"""Which feature a phase's time is added to; `compile` and `other` are only in step_s (and in span rows)."""

LOSS_NONFINITE = 1
GRAD_NONFINITE = 2
LOCAL_NONFINITE = 4
CAPTURED = 8
CONTAINS_COMM = 16
DEVICE_TIMED = 32
"""The step's phases of the device (forward, backward, optimizer, wait) are device time; of a row without it, on clock
`device`, they are absent."""
NONFINITE = LOSS_NONFINITE | GRAD_NONFINITE | LOCAL_NONFINITE


STACK_SIGNAL = signal.SIGRTMIN + 6
"""Makes a rank's faulthandler write its stacks to stack_file(); never USR1 or USR2. The first real-time signals are the
C library's, the last few are used by debuggers' and profilers' habit."""


def stack_file(folder: Path, pid: int) -> Path:
    """Where the stacks of a process go, in the folder of the hellos."""
    return folder / f"stack-{pid}.txt"


def epoch_of(attempt: int, restart: int, lap: int) -> int:
    """One number that only grows: attempt << 32 | restart << 16 | lap.

    >>> hex(epoch_of(2, 1, 3))
    '0x200010003'
    """
    return attempt << 32 | restart << 16 | lap


def attempt_of(epoch: int) -> int:
    """The attempt that an epoch belongs to.

    >>> attempt_of(epoch_of(2, 1, 3))
    2
    """
    return epoch >> 32


def restart_of(epoch: int) -> int:
    """The launcher's own restart count inside the attempt."""
    return epoch >> 16 & 0xFFFF
