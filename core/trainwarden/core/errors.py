"""Everything trainwarden raises on purpose.

TrainwardenError
  ConfigError (ValueError)     a file or argument of the user is wrong: key, value got, what is allowed
  DataError (ValueError)       bytes of a ring, recording or dump are not what they claim to be
  OwnedError                   another living supervisor owns the job (exit status 3)
  FencedError                  we owned the job and do not any more
  StoreError                   the journal cannot be written: no durable record, no action
  ChildError                   a command could not be run or overran its deadline
  ActionError                  an actuator failed; `retryable` says whether trying again can help
  DeliveryError                a notifier failed; `retryable`, `retry_after_s`
  InvalidTransition            a state machine was asked for an impossible step; carries the story
"""

from collections.abc import Sequence


class TrainwardenError(Exception):
    """Root of the tree."""


class ConfigError(TrainwardenError, ValueError):
    """The user's file or argument is wrong; the message names the key, the value got and what is allowed."""


class DataError(TrainwardenError, ValueError):
    """Stored or received bytes are not what they claim to be."""


class OwnedError(TrainwardenError):
    """The job has a living owner."""


class FencedError(TrainwardenError):
    """Our term is over: somebody else owns the job."""


class StoreError(TrainwardenError):
    """The journal cannot be written."""


class ChildError(TrainwardenError):
    """A command could not be started, failed or overran its deadline."""


class ActionError(TrainwardenError):
    """An actuator could not reach its goal."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class DeliveryError(TrainwardenError):
    """A notice could not be delivered."""

    def __init__(self, message: str, *, retryable: bool, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.retry_after_s = retry_after_s


class InvalidTransition(TrainwardenError):
    """A machine was asked for a step its state does not allow."""

    def __init__(self, what: str, start: str, finish: str, story: Sequence[str]) -> None:
        super().__init__(f"{what}: {start} -> {finish} is not allowed; story: {' / '.join(story)}")
        self.story = tuple(story)
