"""The rank collector: a training script's own record of what it does, read by the agent on its node.

    from trainwarden.collectors.rank import BACKWARD, DATA, FORWARD, LOSS, OPTIMIZER, attach

    w = attach()
    for step in range(steps):
        w.begin(step)
        w.mark(DATA);      batch = next(batches)
        w.mark(FORWARD);   loss = model(batch)
        w.value(LOSS, loss, scope="local")  # a number or a tensor; one on a CUDA device is never waited for
        w.mark(BACKWARD);  loss.backward()
        w.mark(OPTIMIZER); optimizer.step()
        w.end()

With PyTorch, watch(w, model, optimizer) makes these marks by itself: begin(), end() and values are left to write.

Standard library only; no system call, no lock and no device synchronisation on the way of a step; never raises.
"""

from trainwarden.collectors.rank.gradients import watch_gradients
from trainwarden.collectors.rank.rank import Rank
from trainwarden.collectors.rank.requests import Agree
from trainwarden.collectors.rank.side import Side
from trainwarden.collectors.rank.start import attach
from trainwarden.collectors.rank.watching import watch
from trainwarden.collectors.rank.words import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    CHECKPOINT,
    COMPILE,
    DATA,
    EVAL,
    FORWARD,
    GRAD_NORM,
    LEARNING_RATE,
    LOSS,
    OPTIMIZER,
    OTHER,
    WAIT,
    Feature,
    Phase,
    Scope,
)
from trainwarden.core.control import Request

__all__ = [
    "BACKWARD",
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "CHECKPOINT",
    "COMPILE",
    "DATA",
    "EVAL",
    "FORWARD",
    "GRAD_NORM",
    "LEARNING_RATE",
    "LOSS",
    "OPTIMIZER",
    "OTHER",
    "WAIT",
    "Agree",
    "Feature",
    "Phase",
    "Rank",
    "Request",
    "Scope",
    "Side",
    "attach",
    "watch",
    "watch_gradients",
]
