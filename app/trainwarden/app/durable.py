"""dbos on one SQLite file, as much of it as plans and deliveries need. The only file that imports it (ADR 0003).

dbos writes down how each step of a workflow ended, and after a crash runs the workflow again from its beginning with
those answers: what a body does between its steps must come out the same each time, and a step whose end is not written
down is done again. What dbos writes is JSON (its default is pickle). It opens no port and calls nobody.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Final, TypeAlias, TypeVar

from dbos import DBOS, DBOSConfig, DBOSPortableJSONSerializer, SetWorkflowID, error
from sqlalchemy.exc import SQLAlchemyError

from trainwarden.core.errors import StoreError
from trainwarden.core.model import Json

T = TypeVar("T")
Body: TypeAlias = Callable[["Workflows", str], str]

APPLICATION_VERSION: Final = "1"
"""Of the order of steps in app/carry.py and app/delivery.py. Workflows of another version are not taken up, so it
changes only with that order; dbos's default, a hash of the source, would strand what is under way at each upgrade."""

EXECUTOR_ID: Final = "supervisor"
"""The same in every life: workflows of another executor are not taken up."""

_TOPIC: Final = "told"
_ENDED: Final = "SUCCESS"


class Interrupted(BaseException):
    """Ends a body's thread without a word in the record, so that the next launch goes on with it."""


class Workflows:
    """Launched by being made; goes on with every workflow in the file that has not ended. One at a time in a process.

    bodies: by name; called with this and a text in a thread of dbos, and ended by returning a text, by nothing else.
    dbos itself takes an Exception for an end, also one that says that its file cannot be written. silence_s: without a
    `beat` for so long they stand still. It is what lets a process exit whose main thread failed (Python waits for the
    threads of a pool).
    """

    _one: ClassVar["Workflows | None"] = None

    def __init__(self, path: Path, bodies: Mapping[str, Body], silence_s: float) -> None:
        config = _config(path)
        assert Workflows._one is None, "dbos is one a process: a second would quietly share the first one's file"
        Workflows._one = self
        self._path, self._stop, self._lock = path, threading.Event(), threading.Lock()
        self._active = dict.fromkeys(bodies, 0)
        self._beat_s, self._silence_s = time.monotonic(), silence_s
        self.broken: str | None = None
        """Why a body stands still until the next launch."""
        logging.getLogger("dbos").addHandler(logging.NullHandler())  # with none, dbos adds one that writes to stderr
        try:
            DBOS(config=config)
            self._bodies = {name: self._registered(name, body) for name, body in bodies.items()}
            DBOS.launch()
        except BaseException as why:
            self.end(wait=False)
            if isinstance(why, SQLAlchemyError | error.DBOSException | sqlite3.Error | OSError):
                raise StoreError(f"{path}: cannot be used: {why}") from why
            raise

    def begin(self, name: str, id_: str, text: str) -> str | None:
        """Have a body run with this text, once for each id; what it returned if it has ended. Raises StoreError."""
        with self._words(), SetWorkflowID(id_):
            status = DBOS.start_workflow(self._bodies[name], text).get_status()
        return str(status.output) if status.status == _ENDED else None

    def send(self, id_: str, message: Mapping[str, Json], key: str) -> bool:
        """Let a workflow hear something, once for each key; False: there is no such workflow. Raises StoreError."""
        try:
            with self._words():
                DBOS.send(id_, message, _TOPIC, idempotency_key=key)
        except error.DBOSNonExistentWorkflowError:
            return False
        return True

    def beat(self) -> None:
        """Somebody still comes round who keeps the job ours."""
        self._beat_s = time.monotonic()

    def active(self, name: str) -> int:
        """How many bodies of this name run."""
        return self._active[name]

    @property
    def busy(self) -> bool:
        """Whether any body runs."""
        return any(self._active.values())

    def end(self, *, wait: bool = True) -> bool:
        """Put it away. With `wait`, while a body runs, it is only told: False, ask again."""
        self._stop.set()
        if wait and self.busy:
            return False
        DBOS.destroy(destroy_registry=True)
        Workflows._one = None
        return True

    # inside a body

    def record(self, name: str, work: Callable[[], T]) -> T:
        """One step; what it returned when it first came to its end. Raises StoreError."""
        self.go_on()
        with self._words():
            return DBOS.run_step({"name": name}, work)

    def heard(self) -> list[Mapping[str, Json]]:
        """What was sent to this workflow since it last asked; recorded too. Never waits. Raises StoreError."""
        messages: list[Mapping[str, Json]] = []
        with self._words():
            while (message := DBOS.recv(_TOPIC, timeout_seconds=0)) is not None:
                messages.append(message)
        return messages

    def rest(self, seconds: float) -> None:
        """Sleep, but not past the end. (dbos's own sleep and waits hold a process that wants to exit.)"""
        self._stop.wait(seconds)
        self.go_on()

    def go_on(self) -> None:
        """Raises Interrupted when it is time to end."""
        if self._stop.is_set():
            raise Interrupted
        if time.monotonic() > self._beat_s + self._silence_s:
            self.broken = f"nobody came round for {self._silence_s:g} s"
            raise Interrupted

    def _registered(self, name: str, body: Body) -> Callable[[str], str]:
        @DBOS.workflow(name=name, max_recovery_attempts=None)  # by default it is given up after 100
        def workflow(text: str) -> str:
            with self._counted(name):
                return body(self, text)

        return workflow

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        with self._lock:
            self._active[name] += 1
        try:
            self.go_on()
            yield
        except Interrupted:
            raise
        except BaseException as why:  # also dbos's own, which make it poll for an end that somebody else is to write
            self.broken = f"{type(why).__name__}: {why}"
            raise Interrupted from why
        finally:
            with self._lock:
                self._active[name] -= 1

    @contextmanager
    def _words(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as why:
            raise StoreError(f"{self._path}: cannot be used: {why}") from why


def _config(path: Path) -> DBOSConfig:
    if "?" in str(path):  # the rest would be read as options of the URL
        raise StoreError(f"{path}: a path with a question mark cannot be used")
    return {
        "name": "trainwarden",
        "system_database_url": f"sqlite:///{path}",
        "executor_id": EXECUTOR_ID,
        "application_version": APPLICATION_VERSION,
        "serializer": DBOSPortableJSONSerializer(),
        "sys_db_pool_size": 4,  # writers take turns anyway
        "log_level": "WARNING",  # below it are an advertisement and the story of each launch
        "enable_otlp": False,
        "scheduler_polling_interval_sec": 3600.0,  # nothing is scheduled
        "notification_listener_polling_interval_sec": 0.2,  # nothing waits for it, but an end waits for its sleep
    }
