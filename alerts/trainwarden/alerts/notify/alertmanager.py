"""Incidents to Prometheus' Alertmanager: what is wrong now, told to every peer again and again.

Alertmanager keeps a state, not events: an alert that nobody re-sends ends by itself at its `endsAt`. So a notice only
changes what is wanted to stand there, and one thread a peer posts the whole of it, at once on a change and each
`resend`. A peer that was away, restarted or lost its storage is put right by the next post. Each peer is told (they
agree among each other on who pages; a load balancer would hide an alert from some), and one that hangs holds up nobody.
An empty list is posted too: whether the way is open is known before it is needed.

Alertmanager tells alerts apart by their labels, so these never change while an incident is open; what is revised (kind,
culprit, tier, words) are annotations. Severity must be a label, since routes are chosen by it: it only rises, and then
the alert of the old severity is resolved in the same post in which the new one fires.
"""

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from trainwarden.core.clock import Clock, unix_ns
from trainwarden.core.errors import ConfigError, DeliveryError
from trainwarden.core.kinds import KINDS
from trainwarden.core.model import Incident, Json, Notice, Tier
from trainwarden.core.net import place_of, post_json, value_at
from trainwarden.core.printable import printable
from trainwarden.core.version import __version__

ALERTNAME: Final = "TrainwardenIncident"

SEVERITIES: Final = {Tier.INFO: "info", Tier.WARN: "warning", Tier.ERROR: "error", Tier.CRITICAL: "critical"}

VALID_ROUNDS: Final = 4
"""endsAt of what is open, in rounds from now: Prometheus' own rule. A round is the longest of resend and deadline."""

QUIET_ROUNDS: Final = 3
"""Without a success of any peer, until that is said: before what fires ends by itself."""

RESOLVED_KEPT_NS: Final = 15 * 60 * 10**9
"""What is over is told again for so long, as Prometheus does: a peer that comes back must hear of it, too."""

ALERTS_MAX: Final = 1000
"""Open ones, and ones that are over. About 1 kB each in every post."""

TEXT_MAX_CHARS: Final = 1024
"""Of an annotation: PagerDuty, the narrowest receiver, cuts a summary there."""

RETRY_S: Final = 1.0
"""After a first failure, doubled after each further one up to `resend`: a peer that restarts is met again soon."""

_REFUSED: Final = frozenset({400, 413, 422})
"""Answers about what a post holds. 400: the valid ones of it were taken, or it was no JSON to this version; 422: an
alert is not of its schema, and nothing was taken; 413: a proxy found it too long."""

_HEADERS: Final = {"User-Agent": f"trainwarden/{__version__}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertmanagerConfig:
    """Which Alertmanagers hear of incidents. Nothing is posted while `urls` is empty."""

    urls: tuple[str, ...] = field(default=(), repr=False)
    """Every peer of the cluster by itself, never a load balancer before them: `http://HOST:9093` (with its path prefix,
    without /api), or `env:NAME` or `file:/PATH` to take it from there, as where it holds a password."""

    deadline: timedelta = timedelta(seconds=10)
    """For one post from name lookup to the last byte, and for the last words when the job has ended."""

    resend: timedelta = timedelta(minutes=1)
    """Between two posts when nothing changes: Prometheus' own default."""

    linger: timedelta = timedelta(hours=1)
    """How long what is still open when the job ends goes on firing: nobody will re-send it, and a page that vanishes
    after minutes looks like a recovery. 0: it is resolved with the job."""

    runbooks_url: str = ""
    """Where the pages of docs/runbooks can be read, for the annotation `runbook_url`: the page's file name is put after
    it. Empty: the annotation `runbook` names the page."""

    def __post_init__(self) -> None:
        key = "alerts.alertmanager"
        if not all(url.startswith(("env:", "file:", "https://", "http://")) for url in self.urls):
            raise ConfigError(f"{key}.urls: need https://..., http://..., env:NAME or file:/PATH for each")
        if len(set(self.urls)) < len(self.urls):
            raise ConfigError(f"{key}.urls: need each peer once, and one is named twice")
        if self.runbooks_url and not self.runbooks_url.startswith(("https://", "http://")):
            raise ConfigError(f"{key}.runbooks_url: need https://... or http://..., got {self.runbooks_url!r}")
        for name, least, most, words in (
            ("deadline", timedelta(milliseconds=100), timedelta(minutes=1), "100ms to 1m"),
            ("resend", timedelta(milliseconds=100), timedelta(minutes=10), "100ms to 10m"),
            ("linger", timedelta(0), timedelta(days=7), "0 to 7d"),
        ):
            if not least <= (got := getattr(self, name)) <= most:
                raise ConfigError(f"{key}.{name}: need {words}, got {got.total_seconds():g}s")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alert:
    """What is posted for one incident at one severity."""

    incident: str
    revision: int
    tier: Tier
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_ns: int
    ends_ns: int | None = None
    """When it was over; None: it is not."""

    def posted(self, open_until_ns: int) -> Mapping[str, Json]:
        ends_ns = open_until_ns if self.ends_ns is None else self.ends_ns
        said = {"labels": self.labels, "annotations": self.annotations}
        return {**said, "startsAt": _stamp(self.starts_ns), "endsAt": _stamp(max(ends_ns, self.starts_ns))}


class Wanted:
    """The alerts that are to stand in Alertmanager. Pure: no clock, no network, no thread."""

    def __init__(self, runbooks_url: str = "") -> None:
        self._runbooks_url = runbooks_url
        self._open: dict[str, _Alert] = {}
        """By incident."""
        self._over: dict[tuple[str, Tier], _Alert] = {}
        """By incident and severity, the oldest first."""

    def take(self, incident: Incident, now_ns: int, *, over: bool) -> None:
        """A revision of an incident; an older one than is known is ignored. Raises DeliveryError when there are too
        many."""
        old = self._open.get(incident.id)
        ended = (one.revision for (name, _), one in self._over.items() if name == incident.id)
        if incident.revision <= (max(ended, default=-1) if old is None else old.revision - 1):
            return
        if over:
            self._open.pop(incident.id, None)
            self._end(self._alert(incident, old.tier if old else incident.tier, now_ns), now_ns)
            return
        if old is None and len(self._open) >= ALERTS_MAX:
            why = f"alertmanager: {ALERTS_MAX} incidents are open there already, not taken: {printable(incident.id)}"
            raise DeliveryError(why, retryable=False)
        new = self._alert(incident, max(old.tier, incident.tier) if old else incident.tier, now_ns)
        if old is not None and old.tier < new.tier:
            self._end(old, now_ns)
        self._over.pop((incident.id, new.tier), None)
        self._open[incident.id] = new

    def replace(self, incidents: Iterable[Incident], now_ns: int) -> None:
        """Exactly these are open (the worst of them, where they are too many); what else was is over."""
        worst = sorted(incidents, key=lambda one: (-one.tier, one.onset_ns, one.id))[:ALERTS_MAX]
        for gone in self._open.keys() - {one.id for one in worst}:
            self._end(self._open.pop(gone), now_ns)
        again = {one.id for one in worst} - self._open.keys()
        self._over = {key: one for key, one in self._over.items() if key[0] not in again}
        for incident in worst:
            self.take(incident, now_ns, over=False)

    def alerts(self, now_ns: int, open_until_ns: int) -> list[Mapping[str, Json]]:
        """The body of a post."""
        self._over = {
            key: one
            for key, one in self._over.items()
            if one.ends_ns is None or one.ends_ns > now_ns - RESOLVED_KEPT_NS
        }
        return [one.posted(open_until_ns) for one in (*self._over.values(), *self._open.values())]

    def _end(self, alert: _Alert, now_ns: int) -> None:
        self._over[alert.incident, alert.tier] = replace(alert, ends_ns=now_ns)
        if len(self._over) > ALERTS_MAX:
            del self._over[next(iter(self._over))]

    def _alert(self, incident: Incident, tier: Tier, now_ns: int) -> _Alert:
        page = f"{KINDS[incident.kind].runbook}.md" if incident.kind in KINDS else ""
        labels = {"alertname": ALERTNAME, "incident": incident.id, "job_id": incident.job, "severity": SEVERITIES[tier]}
        annotations = {
            "summary": incident.reason,
            "description": incident.action,
            "kind": incident.kind,
            "culprit": "" if incident.culprit is None else str(incident.culprit),
            "tier": incident.tier.name,
            "state": incident.state,
            "plans": ", ".join(incident.plans),
            "runbook_url": f"{self._runbooks_url.rstrip('/')}/{page}" if page and self._runbooks_url else "",
            "runbook": f"docs/runbooks/{page}" if page and not self._runbooks_url else "",
        }
        return _Alert(
            incident=incident.id,
            revision=incident.revision,
            tier=tier,
            labels={name: printable(text) for name, text in labels.items() if text},
            annotations={name: _cut(printable(text)) for name, text in annotations.items() if text},
            starts_ns=min(max(incident.onset_ns, 0), now_ns),
        )


class _Peer:
    """One Alertmanager, and how it stands with it."""

    def __init__(self, where: str, name: str) -> None:
        self.where, self.name = where, name
        self.up: bool | None = None
        """Whether it took the newest post whole; None: it was not asked yet."""
        self.why = f"{name}: no answer yet"
        self.taken_s = time.monotonic()
        self.seen = -1
        """The version of what is wanted that it was sent."""
        self.pause_s = RETRY_S
        self.parted = False
        """Whether it heard our last words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Errand:
    """One post to one peer."""

    alerts: Sequence[Mapping[str, Json]]
    until_s: float
    """Its deadline, on the monotonic clock."""
    last: bool


class Alertmanager:
    """The notifier of channel `alertmanager`: sync() begins, notify() and sync() never wait for the network, close().

    Nothing is posted before the first sync(): a supervisor that starts again says again what it said before, and what
    is over long since must not flash up.
    """

    channel = "alertmanager"

    def __init__(self, config: AlertmanagerConfig, clock: Clock = unix_ns) -> None:
        self._config, self._clock = config, clock
        self._deadline_s, self._resend_s = config.deadline.total_seconds(), config.resend.total_seconds()
        self._round_s = max(self._deadline_s, self._resend_s)
        self._wanted = Wanted(config.runbooks_url)
        self._changed = threading.Condition()
        self._version = 0
        self._until_s: float | None = None
        """Set by close(): the end of everything, on the monotonic clock."""
        self._peers = _peers(config.urls)
        self._threads: list[threading.Thread] = []

    def notify(self, notice: Notice) -> str:
        """Change what is wanted. Raises DeliveryError when there are too many alerts, or after close()."""
        with self._changed:
            if self._until_s is not None:
                raise DeliveryError(f"alertmanager: closed, not taken: {printable(notice.key)}", retryable=False)
            self._wanted.take(notice.incident, self._clock(), over=notice.change == "resolved")
            self._wake()
        return f"alertmanager: {notice.key}: for {len(self._peers)} peers"

    def sync(self, incidents: Iterable[Incident]) -> None:
        """These incidents are open and no other is: at the start, after a gap, or as often as one likes."""
        with self._changed:
            self._wanted.replace(incidents, self._clock())
            self._wake()
            if not self._threads:
                self._threads = [threading.Thread(target=self._serve, args=(peer,)) for peer in self._peers]
                for thread in self._threads:
                    thread.start()

    def close(self, *, ended: bool = True) -> None:
        """The job's run has ended: what is open is posted a last time, to fire for `linger`. Returns within `deadline`
        whatever the peers do. ended=False: the job goes on under somebody else, who speaks for it; we fall silent."""
        with self._changed:
            if self._until_s is None:
                self._until_s = time.monotonic() + (self._deadline_s if ended else 0.0)
            self._wake()
        for thread in self._threads:
            thread.join()

    @property
    def peers_up(self) -> Mapping[str, bool]:
        """Whether each peer took the newest post whole, by scheme, host and port; none that was not asked yet."""
        with self._changed:
            return {peer.name: peer.up for peer in self._peers if peer.up is not None}

    @property
    def failing(self) -> str:
        """Words for people while no peer has taken a whole post for three rounds, else nothing."""
        with self._changed:
            now_s = time.monotonic()
            quiet_s = now_s - max((peer.taken_s for peer in self._peers), default=now_s)
            if quiet_s <= QUIET_ROUNDS * self._round_s:
                return ""
            return f"no Alertmanager took our alerts for {quiet_s:.0f} s: " + "; ".join(one.why for one in self._peers)

    def _wake(self) -> None:
        self._version += 1
        self._changed.notify_all()

    def _serve(self, peer: _Peer) -> None:
        """The thread of a peer."""
        wait_s = 0.0
        while (errand := self._errand(peer, wait_s)) is not None:
            wait_s = self._carry(errand, peer)

    def _errand(self, peer: _Peer, wait_s: float) -> _Errand | None:
        """What to post next, as soon as something changes and after wait_s at the latest. None: no more."""
        with self._changed:
            left_s = wait_s if self._until_s is None else min(wait_s, self._until_s - time.monotonic())
            self._changed.wait_for(lambda: self._version != peer.seen or peer.parted, left_s)
            peer.seen, last = self._version, self._until_s is not None
            until_s = time.monotonic() + self._deadline_s if self._until_s is None else self._until_s
            valid_s = self._config.linger.total_seconds() if last else VALID_ROUNDS * self._round_s
            now_ns = self._clock()
            alerts = self._wanted.alerts(now_ns, now_ns + int(valid_s * 1e9))
            if last and (peer.parted or not alerts or until_s <= time.monotonic()):
                return None
            return _Errand(alerts=alerts, until_s=until_s, last=last)

    def _carry(self, errand: _Errand, peer: _Peer) -> float:
        """Post it; how long to wait until the next one."""
        asked_s, again = 0.0, True
        try:
            url = value_at(peer.where).rstrip("/") + "/api/v2/alerts"
            why, again = _post(url, errand.alerts, errand.until_s), False
        except DeliveryError as error:
            why, asked_s = str(error), error.retry_after_s
        except Exception as error:  # our own fault; a thread that died of it would be silent for ever
            why = f"{peer.name}: {type(error).__name__}"
        with self._changed:
            peer.up, peer.why = not why, why
            peer.parted = errand.last and not again
            if peer.up:
                peer.taken_s = time.monotonic()
            wait_s = min(max(asked_s, peer.pause_s), self._resend_s) if again else self._resend_s
            peer.pause_s = min(2 * peer.pause_s, self._resend_s) if again else RETRY_S
            return wait_s


def _post(url: str, alerts: Sequence[Mapping[str, Json]], until_s: float) -> str:
    """Post them. What is refused is sent again in halves, so that one alert never takes the others with it; why that
    one was refused. Raises DeliveryError when the peer cannot be reached or takes nothing at all."""
    left_s = max(0.1, round(until_s - time.monotonic(), 1))
    reply = post_json(url, json.dumps(alerts, separators=(",", ":")).encode(), _HEADERS, left_s, also=_REFUSED)
    if reply.status not in _REFUSED:
        return ""
    if len(alerts) > 1:
        half = len(alerts) // 2
        whys = [_post(url, part, until_s) for part in (alerts[:half], alerts[half:])]
        return whys[0] or whys[1]
    return f"{place_of(url)}: answered {reply.status}: {_cut(printable(reply.body.decode(errors='replace').strip()))}"


def _peers(urls: Iterable[str]) -> list[_Peer]:
    """Raises ConfigError for what cannot be read, or is no URL."""
    peers: list[_Peer] = []
    for where in urls:
        try:
            name = place_of(value_at(where))
        except DeliveryError as error:
            raise ConfigError(f"alerts.alertmanager.urls: {error}") from None
        twins = sum(peer.name.partition(" ")[0] == name for peer in peers)
        peers.append(_Peer(where, f"{name} #{twins + 1}" if twins else name))  # gateways: one host, several paths
    return peers


def _stamp(time_ns: int) -> str:
    """RFC 3339, to the millisecond.

    >>> _stamp(1_800_000_000_123_456_789)
    '2027-01-15T08:00:00.123+00:00'
    """
    return datetime.fromtimestamp(time_ns // 10**6 / 1000, UTC).isoformat(timespec="milliseconds")


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_MAX_CHARS else f"{text[: TEXT_MAX_CHARS - 3]}..."
