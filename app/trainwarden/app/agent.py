"""The agent of one host: polls its sources, hands every hello to those who watch processes, and looks when asked."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from trainwarden.core.model import Event, Frame, Look
from trainwarden.core.ports import Source, Witness


class Agent:
    """Sources and the witness of one host, for one job."""

    def __init__(self, sources: Sequence[Source], witness: Witness, on_hello: Callable[[Event], None]) -> None:
        self._sources, self._witness, self._on_hello = list(sources), witness, on_hello
        self._next_ns = dict.fromkeys(range(len(sources)), 0)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainwarden-look")
        self._looks: list[Future[list[Event]]] = []

    def poll(self, now_ns: int) -> list[Frame | Event]:
        """Everything new from the sources that are due, and what finished looks saw."""
        found: list[Frame | Event] = []
        for number, source in enumerate(self._sources):
            if now_ns < self._next_ns[number]:
                continue
            # a little early rather than a period late: turns are not exactly a period apart
            self._next_ns[number] = now_ns + int(source.period_s * 0.9e9)
            found += self._hear(source.poll(now_ns))
        done = [look for look in self._looks if look.done()]
        self._looks = [look for look in self._looks if not look.done()]
        for look in done:
            found += look.result()
        return found

    def replace(self, old: Source, new: Source, on_hello: Callable[[Event], None]) -> None:
        """Poll another source in the place of one."""
        self._sources[self._sources.index(old)] = new
        self._on_hello = on_hello

    def look(self, look: Look) -> None:
        """Look closer in the background; what is seen comes with a later poll."""
        self._looks.append(self._pool.submit(lambda: list(self._witness.look(look))))

    @property
    def looking(self) -> bool:
        """Whether a look is still under way."""
        return bool(self._looks)

    def close(self) -> None:
        """Wait for looks under way and end."""
        self._pool.shutdown(wait=True)

    def _hear(self, items: Iterable[Frame | Event]) -> list[Frame | Event]:
        heard = list(items)
        for item in heard:
            if isinstance(item, Event) and item.kind == "hello":
                self._on_hello(item)
        return heard
