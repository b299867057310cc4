"""Delivering one notice: again and again on its own channel, then on the next one.

Dbos-free, as carry.py is: when to try again is what a recorded step says, so patience goes on where it stood after a
crash. A crash between a receiver's answer and its record delivers again: notices carry keys, so that it can tell.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from trainwarden.app.carry import LOOK_S, Log, Sleep
from trainwarden.core.clock import Clock
from trainwarden.core.errors import DeliveryError
from trainwarden.core.model import Notice
from trainwarden.core.ports import Notifier

PATIENCE_S = 60.0
"""A receiver that wants to be left alone for longer is given up: the next channel is to hear of it now."""

_TAKEN: Final = 0
_GIVEN_UP: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryConfig:
    """How long a channel is tried."""

    tries: int = 5
    """Of one channel, before the next one is told."""

    backoff_s: float = 1.0
    """After the first try, doubled after each: a receiver that restarts is met again, a dead one costs 15 s."""


def deliver(
    notice: Notice, notifiers: Mapping[str, Notifier], log: Log, config: DeliveryConfig, clock: Clock, sleep: Sleep
) -> bool:
    """Whether somebody took it. notifiers: in the order in which the next is told when one is given up."""
    channels = list(notifiers)
    for channel in channels[channels.index(notice.channel) :]:
        one = replace(notice, channel=channel, key=notice.key.removesuffix(notice.channel) + channel)
        at_ns = clock()
        for count in range(config.tries):
            pause_s = config.backoff_s * 2**count
            at_ns = log.record("try", partial(_try, one, notifiers[channel], at_ns, pause_s, clock, sleep))
            if at_ns == _TAKEN:
                return True
            if at_ns == _GIVEN_UP:
                break
    return False


def _try(notice: Notice, notifier: Notifier, at_ns: int, pause_s: float, clock: Clock, sleep: Sleep) -> int:
    """When to try again, or how it ended."""
    while (left_s := (at_ns - clock()) / 1e9) > 0:
        sleep(min(left_s, LOOK_S))
    try:
        notifier.notify(notice)
    except DeliveryError as error:
        wait_s = max(error.retry_after_s, pause_s)
        return clock() + int(wait_s * 1e9) if error.retryable and wait_s <= PATIENCE_S else _GIVEN_UP
    except Exception:  # a notifier's own fault
        return _GIVEN_UP
    return _TAKEN
