"""The dashboards that ship, on their way to a Grafana: over its HTTP API by grafana-client (extra `dashboards`).

A dashboard is known by its uid: pushing again changes nothing if nothing changed, and one that a person saved while we
looked is not written over. The asynchronous client is used because only so one deadline holds for all of it: its
timeouts bound each single wait, and a peer that sends a byte now and then would hold us for as long as it likes.
"""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from trainwarden.core.errors import ConfigError, DeliveryError
from trainwarden.core.net import place_of
from trainwarden.core.version import __version__

DEADLINE_S = 20.0
"""For all requests of a push together; a person waits for it. Our choice."""
SAID_MAX = 200
"""Characters of Grafana's own words in an error."""

_ADVICE: Mapping[int, str] = {
    400: "what was sent is not accepted (a provisioned dashboard is changed where it is provisioned)",
    401: "the token is not accepted: GRAFANA_TOKEN or --token-file must hold that of a service account",
    403: "the token may not do this: give its service account the role Editor",
    404: "no such thing there: --url must be the address of Grafana itself, with its sub path if it has one",
    412: "somebody else saved it at the same time: look at what changed, then push again",
}
"""What to do, by status (Grafana's HTTP API, "Create / Update dashboard")."""
_STRANGE = "answers, but not as Grafana does: --url must be the address of Grafana itself"

Dashboard = Mapping[str, Any]
"""A dashboard's JSON, schema v1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grafana:
    """Where to push to."""

    url: str
    token: str = field(repr=False)
    deadline_s: float = DEADLINE_S

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            known = False
        if not known:
            raise ConfigError("--url: need http://HOST[:PORT][/PATH] or https://..., got something else")
        if parts.username or parts.password or parts.query:
            raise ConfigError("--url: need an address without user, password or query: put a token into GRAFANA_TOKEN")
        if not self.token or not (self.token.isascii() and self.token.isprintable()) or " " in self.token:
            raise ConfigError("GRAFANA_TOKEN or --token-file: need a service account's token, got none or not one")


def shipped(runbooks: str = "") -> Mapping[str, Dashboard]:
    """File name -> dashboard; runbooks: the address that the variable of this name begins with, if not the shipped."""
    found = (entry for entry in (files("trainwarden.dashboards") / "json").iterdir() if entry.name.endswith(".json"))
    read = {entry.name: json.loads(entry.read_text(encoding="utf-8")) for entry in found}
    for variable in (one for board in read.values() for one in board["templating"]["list"]):
        if variable["name"] == "runbooks" and runbooks:
            variable["query"] = runbooks.rstrip("/")
            variable["current"] = {"text": variable["query"], "value": variable["query"]}
    return dict(sorted(read.items()))


def push(boards: Sequence[Dashboard], grafana: Grafana, folder: str, *, dry_run: bool = False) -> Sequence[str]:
    """Bring dashboards into a folder, which is made if it is missing; a line for each: what was (or would be) done.

    Raises ConfigError without grafana-client, DeliveryError that names host, status and what to do.
    """
    try:
        from grafana_client.api import AsyncGrafanaApi
        from grafana_client.client import GrafanaException, GrafanaTimeoutError
        from niquests.exceptions import JSONDecodeError, RequestException, TooManyRedirects
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'trainwarden[dashboards]'") from None
    place = place_of(grafana.url)
    late = f"{place}: no answer within {grafana.deadline_s:g} s: is it Grafana's address, and is it well?"
    try:
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            return loop.run_until_complete(_session(AsyncGrafanaApi, boards, grafana, folder, dry_run))
    except (TimeoutError, GrafanaTimeoutError):
        raise DeliveryError(late, retryable=True) from None
    except TooManyRedirects:
        raise DeliveryError(f"{place}: leads elsewhere: name the address it leads to", retryable=False) from None
    except GrafanaException as error:
        advice = _ADVICE.get(error.status_code, "it failed: see its log, then push again")
        said = "".join(letter for letter in str(error.message) if letter.isprintable())[:SAID_MAX]
        status, retryable = error.status_code, error.status_code >= 500
        raise DeliveryError(f"{place}: answered {status}: {advice} ({said})", retryable=retryable) from None
    except JSONDecodeError:
        raise DeliveryError(f"{place}: {_STRANGE}", retryable=False) from None
    except (RequestException, OSError) as error:
        advice = "is it Grafana's address, and does it run?"
        raise DeliveryError(f"{place}: cannot be reached ({type(error).__name__}): {advice}", retryable=True) from None


async def _session(api: Any, boards: Sequence[Dashboard], grafana: Grafana, folder: str, dry_run: bool) -> list[str]:
    parts = urlsplit(grafana.url)
    path = parts.path.strip("/")
    opened = api(
        grafana.token,
        host=f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname,
        port=parts.port,
        url_path_prefix=f"{path}/" if path else "",  # the client itself would ask PATHapi
        protocol=parts.scheme,
        timeout=grafana.deadline_s,
    )
    opened.client.s.max_redirects = 0  # a POST that is redirected comes back as a GET that does nothing
    try:
        async with asyncio.timeout(grafana.deadline_s):
            return await _push(opened, boards, folder, dry_run)
    finally:
        await opened.client.s.close()


async def _push(api: Any, boards: Sequence[Dashboard], title: str, dry_run: bool) -> list[str]:
    folders = _at(api, {"folders": await api.folder.get_all_folders()}, "folders", list)
    home = next((_at(api, one, "uid", str) for one in folders if _at(api, one, "title", str) == title), None)
    where = f"folder {title}" if home else f"folder {title}, which is new"
    if home is None and not dry_run:
        home = _at(api, await api.folder.create_folder(title), "uid", str)
    lines = []
    for board in boards:
        stored = await _stored(api, board["uid"])
        change = _change(board, stored, home)
        lines.append(f"{board['title']}: {'would be ' if dry_run and change != 'unchanged' else ''}{change} in {where}")
        if change == "unchanged" or dry_run:
            continue
        sent = {**board, "id": None, "version": stored["dashboard"].get("version", 0) if stored else 0}
        body = {"dashboard": sent, "folderUid": home, "message": f"trainwarden {__version__}", "overwrite": False}
        reply = await api.dashboard.update_dashboard(body)
        lines[-1] += f": {api.client.url.removesuffix('/api')}/d/{_at(api, reply, 'uid', str)}"
    return lines


async def _stored(api: Any, uid: str) -> Mapping[str, Any] | None:
    """What Grafana has by this uid: {"dashboard": ..., "meta": ...}."""
    from grafana_client.client import GrafanaClientError

    try:
        found = await api.dashboard.get_dashboard(uid)
    except GrafanaClientError as error:
        if error.status_code != 404:
            raise
        return None
    return {name: _at(api, found, name, dict) for name in ("dashboard", "meta")}


def _change(board: Dashboard, stored: Mapping[str, Any] | None, home: str | None) -> str:
    if stored is None:
        return "created"
    same = {**stored["dashboard"], "id": None, "version": 0} == {**board, "id": None, "version": 0}
    return "unchanged" if same and stored["meta"].get("folderUid") == home else "updated"


def _at(api: Any, reply: Any, key: str, kind: type) -> Any:
    """What an answer has by this name, if it is one of Grafana's. Raises DeliveryError."""
    found = reply.get(key) if isinstance(reply, dict) else None
    if not isinstance(found, kind):
        raise DeliveryError(f"{place_of(api.client.url)}: {_STRANGE}", retryable=False)
    return found
