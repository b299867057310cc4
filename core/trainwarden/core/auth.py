"""Who may send what: tokens bound to a node, a job or a person, and TLS.

A server keeps hashes only. A token is made by a machine (32 random bytes: `new_token`), so one round of SHA-256 is
enough, and a slow hash would only help those who open connections to tire us. Tokens come from files or the
environment, never from a command line, where every user of the host could read them.

What a job's token lets through was written by the job's tenant: nothing that speaks about a node or a device.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, Literal

from trainwarden.core.config import load
from trainwarden.core.errors import ConfigError, DeliveryError
from trainwarden.core.kinds import KINDS
from trainwarden.core.model import Event, Frame
from trainwarden.core.net import value_at

SCOPES: Final[Mapping[str, frozenset[str]]] = {
    "observe": frozenset(),
    "approve": frozenset({"command.approve", "command.deny", "command.pin"}),
    "act": frozenset({"command.approve", "command.deny", "command.pin", "command.stop_all"}),
}
"""Scope of a command token -> the events that it lets through."""

_HASH: Final = "sha256:"
_DIGITS: Final = len(_HASH) + 4
_OWN: Final = frozenset({"rank", "job"})
"""What a tenant may state facts about: touching a node needs one that he cannot write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensConfig:
    """Who may send. Each token as `sha256:` and 64 hexadecimal digits."""

    agents: Mapping[str, str] = field(default_factory=dict)
    """Node -> its agent's token: everything whose source is of that node (`rings@n17`), of any job."""

    jobs: Mapping[str, str] = field(default_factory=dict)
    """Job -> its token: what is of that job, but no facts about nodes and devices."""

    observe: Mapping[str, str] = field(default_factory=dict)
    """Person -> token: may connect, may not command."""

    approve: Mapping[str, str] = field(default_factory=dict)
    """Person -> token: may approve, deny and pin."""

    act: Mapping[str, str] = field(default_factory=dict)
    """Person -> token: may also stop everything."""

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for section in ("agents", "jobs", *SCOPES):
            told: Mapping[str, str] = getattr(self, section)
            for name, token in told.items():
                where, digits = f"tokens.{section}.{name}", token.removeprefix(_HASH)
                if not token.startswith(_HASH) or len(digits) != 64 or set(digits) - set("0123456789abcdef"):
                    raise ConfigError(f"{where}: need sha256:<64 hexadecimal digits>, got {len(token)} characters")
                if (first := seen.setdefault(token, where)) != where:
                    raise ConfigError(f"{where}: need a token of its own, got that of {first}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a token stands for."""

    kind: Literal["agent", "job", "command"]
    name: str
    scope: str = ""
    """Of a command token: a row of SCOPES."""

    def __str__(self) -> str:
        return f"the token of {self.kind} {self.name}"


class Tokens:
    """All tokens that a server knows."""

    def __init__(self, config: TokensConfig) -> None:
        granted = {Grant(kind="agent", name=name): token for name, token in config.agents.items()}
        granted |= {Grant(kind="job", name=name): token for name, token in config.jobs.items()}
        for scope in SCOPES:
            people: Mapping[str, str] = getattr(config, scope)
            granted |= {Grant(kind="command", name=name, scope=scope): token for name, token in people.items()}
        self._granted: dict[str, list[tuple[bytes, Grant]]] = {}
        """By the first digits of the hash, since 12,500 agents may come back at once."""
        for grant, token in granted.items():
            self._granted.setdefault(token[:_DIGITS], []).append((token.encode(), grant))

    def grant(self, token: str) -> Grant | None:
        """What a token stands for; None: nothing. Hashes are compared in constant time; what the place of a hash
        gives away says nothing of the token."""
        asked, found = hashed(token), None
        for known, grant in self._granted.get(asked[:_DIGITS], ()):
            if hmac.compare_digest(known, asked.encode()):
                found = grant
        return found


def read_tokens(path: Path) -> Tokens:
    """The tokens of a file: one section `tokens`, as TokensConfig. Raises ConfigError, also where there are none."""
    config = _config(path)
    if config == TokensConfig():
        raise ConfigError(f"{path}: tokens: need at least one, got none: nobody could send anything")
    return Tokens(config)


class TokensFile:
    """A file of tokens, followed while a server lives. Raises ConfigError, as read_tokens."""

    def __init__(self, path: Path) -> None:
        self._path, self._stamp = path, _stamp(path)
        self.tokens = read_tokens(path)
        """The last that could be used."""

    def changed(self) -> bool:
        """Whether `tokens` is new since this was asked last; there may be none left. Raises ConfigError for a file that
        cannot be used, once for each state of it: what it said before holds."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        self.tokens = Tokens(_config(self._path))
        return True


def change_tokens(path: Path, change: Callable[[TokensConfig], TokensConfig]) -> None:
    """Write a file of tokens anew, 0600, all of it or nothing; made where it is missing. Comments in it are lost.

    Raises ConfigError, as well where another one writes it at this moment.
    """
    path = path.resolve()
    draft = path.with_name(f"{path.name}.new")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            try:
                changed = change(_config(path) if path.exists() else TokensConfig())
                told = {"tokens": {one.name: dict(getattr(changed, one.name)) for one in fields(changed)}}
                file.write(json.dumps(told, indent=2) + "\n")  # JSON is YAML in which every name is quoted
                file.flush()
                os.fsync(file.fileno())
                if path.exists():  # written by root, read by the server's own user
                    os.fchown(file.fileno(), path.stat().st_uid, path.stat().st_gid)
                draft.rename(path)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
    except FileExistsError:
        raise ConfigError(f"{draft}: is there: another one writes {path.name}; if nobody does, remove it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error


def _config(path: Path) -> TokensConfig:
    with contextlib.suppress(OSError, UnicodeDecodeError):  # load says what it is
        if not path.read_text(encoding="utf-8").strip():  # half of a write, more likely than an end of all tokens
            raise ConfigError(f"{path}: is empty: need a section tokens")
    return load(path, {"tokens": TokensConfig})["tokens"]


def _stamp(path: Path) -> tuple[int, ...]:
    """Changes with the file, also where another one takes its place; (): there is none."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_dev, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def new_token() -> str:
    """A token that nobody guesses."""
    return secrets.token_hex(32)


def hashed(token: str) -> str:
    """As it stands in the server's file.

    >>> hashed("")[:14]
    'sha256:e3b0c44'
    """
    return _HASH + hashlib.sha256(token.encode()).hexdigest()


def secret(where: str, key: str) -> str:
    """A token from `env:NAME` or `file:/PATH`. Raises ConfigError that names the key, never the value."""
    if not where.startswith(("env:", "file:")):
        raise ConfigError(f"{key}: need env:NAME or file:/PATH, got {len(where)} characters that are neither")
    try:
        return value_at(where)
    except DeliveryError as error:
        raise ConfigError(f"{key}: {error}") from error


def refused(grant: Grant, item: Frame | Event, now_ns: int) -> str | None:
    """Why the owner of a token may not send this; None: he may."""
    if grant.kind == "agent":
        if item.source.rpartition("@")[2] != grant.name:
            return f"source {item.source[:80]!r} is not of node {grant.name}"
    elif grant.kind == "job":
        if item.job != grant.name:
            return f"job {str(item.job)[:80]!r} is not {grant.name}"
        if isinstance(item, Event) and _of_a_node(item):
            return f"{item.kind[:40]} of {str(item.subject)[:80]!r} is no fact that a job may state"
    if isinstance(item, Event) and item.kind.startswith("command."):
        return _refused_command(grant, item, now_ns)
    return "a command token sends nothing but commands" if grant.kind == "command" else None


def _of_a_node(event: Event) -> bool:
    kind = KINDS.get(event.kind)
    return kind is not None and kind.hard and (kind.scope not in _OWN or event.subject.kind not in _OWN)


def _refused_command(grant: Grant, event: Event, now_ns: int) -> str | None:
    if grant.kind != "command" or event.kind not in SCOPES[grant.scope]:
        scope = f" (scope {grant.scope})" if grant.scope else ""
        return f"{event.kind[:40]} is not for {grant}{scope}"
    expires_ns = event.data.get("expires_ns")
    if not isinstance(expires_ns, int) or expires_ns < now_ns:
        return f"{event.kind} has expired"
    return None


# TLS


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of one side; None: not given."""

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    """Whose certificates of the other side are believed. A server without it asks for none (tokens still count); a
    client without it believes those that the system believes."""

    def server(self) -> ssl.SSLContext | None:
        """None: plain text. Raises ConfigError."""
        if self.cert is None:
            if self.key is not None or self.ca is not None:
                raise ConfigError("server.cert: need a certificate beside the key or the clients' CA, got none")
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load(context, "server")
        if self.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self) -> ssl.SSLContext:
        """Checks the server's name. Raises ConfigError."""
        context = ssl.create_default_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load(context, "uplink")
        return context

    def _load(self, context: ssl.SSLContext, section: str) -> None:
        try:
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            named = ", ".join(str(one) for one in (self.cert, self.key, self.ca) if one is not None)
            raise ConfigError(f"{section}.cert: cannot use {named}: {error.strerror or error}") from error


def is_loopback(host: str) -> bool:
    """Whether what is sent to this address never leaves the host.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("10.1.1.1"), is_loopback("0.0.0.0")
    (True, True, False, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
