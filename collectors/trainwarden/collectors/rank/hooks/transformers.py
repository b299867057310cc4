"""Hugging Face: Trainer(..., callbacks=[callback(w)]). Steps have the numbers of the Trainer's checkpoints.

A step that is logged stays open until then (logging_steps=1 tells each loss, the mean over all ranks). What lies
between steps is evaluation, saving, or else waiting for data.
"""

import os
import sys
from pathlib import Path
from typing import Any

from trainwarden.collectors.rank.hooks.made import made
from trainwarden.collectors.rank.rank import Rank
from trainwarden.collectors.rank.watching import watch
from trainwarden.collectors.rank.words import CHECKPOINT, DATA, EVAL, FEATURE_NAMES


def callback(w: Rank) -> Any:
    """A TrainerCallback of the transformers package, which the script has imported."""
    return made(w, _Calls, sys.modules["transformers"])


class _Calls:
    def __init__(self, w: Rank) -> None:
        self._w, self._open, self.failed = w, False, False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **more: Any) -> None:
        watch(self._w, model, getattr(optimizer, "optimizer", optimizer))  # out of what Accelerate wraps it in

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._w.begin(state.global_step + 1)
        self._open = True

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if not control.should_log:
            self._end(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **more: Any) -> None:
        if self._open:
            for name in logs.keys() & FEATURE_NAMES.keys():
                self._w.value(name, logs[name])
            self._end(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._between(control.should_save, False)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        files = sorted(one.name for one in os.scandir(folder) if one.is_file()) if args.should_save else ()
        self._w.committed(state.global_step, folder, files=files)
        self._w.mark(DATA)

    def _end(self, control: Any) -> None:
        asked, self._open = getattr(self._w.end(), "name", ""), False
        control.should_save |= asked == "checkpoint"
        control.should_training_stop |= asked == "stop"
        self._between(control.should_save, control.should_evaluate)

    def _between(self, saves: bool, evaluates: bool) -> None:
        self._w.phase(EVAL if evaluates else CHECKPOINT) if saves or evaluates else self._w.mark(DATA)
