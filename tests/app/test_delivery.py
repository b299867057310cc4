"""Who hears of a notice, how often is tried, and how long is waited: with a record in memory and a clock of our own."""

from collections.abc import Sequence

import pytest
from tests.app.test_carry import Clock, Crash, Memory

from trainwarden.app.delivery import DeliveryConfig, deliver
from trainwarden.core.errors import DeliveryError
from trainwarden.core.model import Incident, Notice, Tier

INCIDENT = Incident(
    id="one",
    revision=1,
    state="confirmed",
    tier=Tier.ERROR,
    kind="process.killed",
    culprit=None,
    victims=(),
    job=None,
    epoch=None,
    onset_ns=0,
    findings=(),
    events=(),
    reason="it is gone",
    action="",
    plans=(),
    lost_s={},
)
NOTICE = Notice(key="one/1/web", channel="web", change="opened", incident=INCIDENT)


class Channel:
    """Fails as told, then takes."""

    def __init__(self, channel: str, clock: Clock, *failures: Exception) -> None:
        self.channel = channel
        self._clock, self._failures = clock, list(failures)
        self.tries: list[tuple[str, float]] = []

    def notify(self, notice: Notice) -> str:
        self.tries.append((notice.key, self._clock.now_ns / 1e9))
        if self._failures:
            raise self._failures.pop(0)
        return "taken"


def busy(retry_after_s: float = 0.0) -> DeliveryError:
    return DeliveryError("busy", retryable=True, retry_after_s=retry_after_s)


NEVER = DeliveryError("refused", retryable=False)


@pytest.mark.parametrize(
    ("failures", "at_s", "taken_by"),
    [
        pytest.param([], [0], "web", id="taken at once"),
        pytest.param([busy(), busy()], [0, 1, 3], "web", id="a pause that doubles"),
        pytest.param([busy(7), busy(20)], [0, 7, 27], "web", id="as patient as it is asked to be"),
        pytest.param([busy()] * 5, [0, 1, 3, 7, 15], "pager", id="the next one is told after five tries"),
        pytest.param([NEVER], [0], "pager", id="what is refused is not tried again"),
        pytest.param([busy(3600)], [0], "pager", id="an hour is too long to wait"),
        pytest.param([KeyError("a fault of the notifier")], [0], "pager", id="a notifier that breaks"),
    ],
)
def test_who_hears_of_it_and_when(failures: Sequence[Exception], at_s: list[float], taken_by: str) -> None:
    clock = Clock()
    web, pager = Channel("web", clock, *failures), Channel("pager", clock)
    others = {"before": Channel("before", clock), "web": web, "pager": pager}
    assert deliver(NOTICE, others, Memory(), DeliveryConfig(), clock, clock.sleep)
    assert [round(when_s, 1) for _, when_s in web.tries] == at_s
    assert [key for key, _ in pager.tries] == (["one/1/pager"] if taken_by == "pager" else [])
    assert others["before"].tries == []


def test_nobody_hears_of_it() -> None:
    clock = Clock()
    assert not deliver(NOTICE, {"web": Channel("web", clock, NEVER)}, Memory(), DeliveryConfig(), clock, clock.sleep)


def test_after_a_crash_it_goes_on_where_it_stood() -> None:
    clock = Clock()
    web = Channel("web", clock, *[busy()] * 3)

    log = Memory()
    with pytest.raises(Crash):
        deliver(NOTICE, {"web": web}, log.again(6), DeliveryConfig(), clock, clock.sleep)
    assert len(web.tries) == 2
    assert deliver(NOTICE, {"web": web}, log.again(None), DeliveryConfig(), clock, clock.sleep)
    assert [round(when_s, 1) for _, when_s in web.tries] == [0, 1, 3, 7]
