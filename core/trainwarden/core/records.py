"""The ring of one rank: the words both sides of the shared memory agree on. Standard library only.

One file per rank and attempt on a tmpfs, written by the rank's main thread, read by the node's agent. ADR 0002 says why
it looks like this. All numbers are little endian. The file never changes its size; its parts:

    0       header        fixed facts, written once before the magic (which is written last)
    128     live block    what the rank does right now: one 8-byte store at each mark
    192     counters      the collector's own failures: counted here, never raised in the training
    256     control       requests to the rank (core/control.py); reserved in version 1, all zero
    512     names         256 slots of 48 bytes, append only, UTF-8, zero padded; a slot is empty or final
    16384   step rows     STEP_ROWS x 96 bytes, one wide row a step, at (seq - 1) % STEP_ROWS
    ...     detail rows   DETAIL_ROWS x 48 bytes, spans, values and marks, at (seq - 1) % DETAIL_ROWS

A row begins and ends with its sequence number (from 1). Python has no memory barriers, so a reader takes a row only
when two reads at least 1 ms apart are byte-equal and head equals tail.
"""

import struct

MAGIC = b"TWRING\r\n"
"""Last bytes written when a ring is made: a file without them is not (yet) a ring."""

VERSION = 1
"""Layout version. A reader that meets a larger one is blind and says `upgrade the agent`."""

HEADER = struct.Struct("<8s IIIIIII iiII i I Q q")
"""magic, version, names_offset, steps_offset, step_rows, details_offset, detail_rows, file_bytes,
rank, world_size, attempt, restart, pid, clock (index into CLOCKS), start_time (clock ticks since boot, field 22 of
/proc/PID/stat), created_ns (Unix)."""

CLOCKS = ("wall", "cpu")
"""How spans are timed: `wall` reads the monotonic clock, `cpu` reads the thread's schedstat as well."""

LIVE_OFFSET = 128
LIVE = struct.Struct("<q ii Q Q Q")
"""word (since << 6 | phase id; since = CLOCK_MONOTONIC ns), step, batch, flags, lap, state (index into STATES)."""
LIVE_PHASE_BITS = 6
"""Bits of the live word that hold the phase id; 57 bits of nanoseconds are left: 4.5 years of uptime."""

STATES = ("starting", "attached", "detached", "forked_off")
"""What the collector says of itself. `detached`: the script closed it or ended in order."""

COUNTERS_OFFSET = 192
COUNTERS = ("errors", "names_dropped", "values_refused", "device_tensors_refused")
"""u64 each. errors: exceptions caught inside the collector; refused: values that are no CPU number."""

CONTROL_OFFSET = 256
NAMES_OFFSET = 512
NAME_SLOTS = 256
NAME_BYTES = 48
STEPS_OFFSET = 16384
STEP_ROWS = 2048
STEP_ROW = struct.Struct("<I i i H H q 16f I I")
"""seq, step, batch, flags, lap, end_ns (Unix), 16 values in the order of FEATURES, pad, tail_seq: 96 bytes."""
DETAILS_OFFSET = STEPS_OFFSET + STEP_ROWS * STEP_ROW.size
DETAIL_ROWS = 8192
DETAIL_ROW = struct.Struct("<I i H H h H q d f f I I")
"""seq, step, what (index into DETAILS), name id, mb (micro-batch or -1), flags, t_ns (Unix; a span's start),
value (span: wall seconds; value row: the value; mark row: its argument), cpu_s, runq_s (NaN where absent), lap,
tail_seq: 48 bytes."""
DETAILS = ("none", "span", "value", "mark")
FILE_BYTES = DETAILS_OFFSET + DETAIL_ROWS * DETAIL_ROW.size

PHASES = (
    "between",
    "init",
    "data",
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "optimizer",
    "wait",
    "checkpoint",
    "eval",
    "compile",
    "other",
)
"""Phase ids are the first slots of the names table. `between`: after end() and before the next begin().
`init`: from attach() to the first begin(). The rest are the span kinds of the measurement contract."""

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
`wall`). wait_s: time in phase `wait`. Nothing measured: NaN."""

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
NONFINITE = LOSS_NONFINITE | GRAD_NONFINITE | LOCAL_NONFINITE


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


def lap_of(epoch: int) -> int:
    """How often the step number fell back inside one process."""
    return epoch & 0xFFFF
