"""A framework's callback object from what it is to tell: of the framework's own class, and unable to raise."""

import functools
from collections.abc import Callable
from typing import Any

from trainwarden.collectors.rank.rank import Rank


def made(w: Rank, calls: type, *packages: Any) -> Any:
    """An instance of `calls` (made with w) and of each package's class of callbacks. One whose on_ method fails is
    counted and says nothing more."""
    bases = [getattr(package, "TrainerCallback", None) or package.Callback for package in packages]
    told = {name: _guarded(w, method) for name, method in vars(calls).items() if name.startswith("on_")}
    return type("TrainwardenCallback", (calls, *bases), told)(w)


def _guarded(w: Rank, method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            if not self.failed:
                method(self, *args, **kwargs)
        except Exception:
            self.failed = True
            w._failed()

    return guarded
