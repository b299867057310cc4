"""Lightning: Trainer(..., callbacks=[callback(w)]). A step is an optimizer step, however many batches it takes.

Its loss is the mean over them. Lightning does not say when a checkpoint is there: only requested ones are committed.
"""

import sys
from pathlib import Path
from typing import Any

from trainwarden.collectors.rank.hooks.made import made
from trainwarden.collectors.rank.rank import Rank
from trainwarden.collectors.rank.watching import Backward, tell_hidden
from trainwarden.collectors.rank.words import CHECKPOINT, DATA, EVAL, FORWARD, LOSS, OPTIMIZER, OTHER


def callback(w: Rank) -> Any:
    """A Callback of the Lightning package, by whichever name the script has imported it."""
    return made(w, _Calls, *filter(None, map(sys.modules.get, ("lightning.pytorch", "pytorch_lightning"))))


class _Calls:
    def __init__(self, w: Rank) -> None:
        self._w, self._backward, self._step, self.failed = w, Backward(w), 0, False
        self._loss: Any = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        tell_hidden(self._w, trainer.strategy.model)

    def on_train_batch_start(self, trainer: Any, module: Any, *batch: Any) -> None:
        if self._step <= trainer.global_step:
            self._step = trainer.global_step + 1
            self._w.begin(self._step)
        self._w.mark(FORWARD)

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self._backward.follow(loss)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self._w.mark(OPTIMIZER)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *batch: Any) -> None:
        self._w.mark(OTHER)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs  # already divided by the step's batches
        self._loss = loss if self._loss is None or loss is None else self._loss + loss
        if trainer.global_step < self._step:
            return
        self._w.value(LOSS, self._loss, scope="local" if trainer.world_size > 1 else None)
        asked, self._loss, staging = self._w.end(), None, (self._w.attempt or {}).get("staging")
        trainer.should_stop |= asked is not None and asked.name == "stop"
        if asked is not None and asked.name == "checkpoint" and staging:
            folder = Path(staging) / f"step-{self._step}"
            trainer.save_checkpoint(folder / "model.ckpt")
            self._w.committed(self._step, folder, files=["model.ckpt"] if trainer.is_global_zero else ())
        self._w.mark(DATA)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._w.phase(EVAL)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._w.mark(DATA)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        self._w.phase(CHECKPOINT)
