"""Whose token lets what through."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.app.served import Node

from trainwarden.core.auth import Grant, TlsFiles, TokensConfig, hashed, new_token, read_tokens, refused, secret
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame, JobId, Json, Subject, SubjectKind

NOW_NS = 10**18
AGENT, JOB = Grant(kind="agent", name="n1"), Grant(kind="job", name="train")


def frame(node: str = "n1", job: str | None = "train") -> Frame:
    return replace(Node(node, "train", [0], 1).step(1), job=None if job is None else JobId(job))


def event(kind: str, about: SubjectKind = "rank", job: str | None = "train", **data: Json) -> Event:
    made = Node("n1", "train", [0], 1).event(kind, 0, data)
    return replace(made, job=None if job is None else JobId(job), subject=Subject(kind=about, id="0"))


def command(kind: str, expires_ns: int = NOW_NS + 1) -> Event:
    return event(kind, "job", plan="p", who="ann", why="", expires_ns=expires_ns)


def person(scope: str) -> Grant:
    return Grant(kind="command", name="ann", scope=scope)


@pytest.mark.parametrize(
    ("grant", "item", "why"),
    [
        (AGENT, frame(), None),
        (AGENT, frame(job="another"), None),
        (AGENT, frame(job=None), None),
        (AGENT, frame("n2"), "not of node n1"),
        (AGENT, event("xid", "device", None), None),
        (AGENT, command("command.stop_all"), "is not for the token of agent n1"),
        (JOB, frame(), None),
        (JOB, frame("n2"), None),
        (JOB, frame(job="another"), "'another' is not train"),
        (JOB, frame(job=None), "'None' is not train"),
        (JOB, event("process.exit"), None),
        (JOB, event("process.exit", "node"), "no fact that a job may state"),
        (JOB, event("xid", "device"), "no fact that a job may state"),
        (JOB, event("xid", "rank"), "no fact that a job may state"),
        (JOB, event("kind.of_tomorrow"), None),
        (JOB, command("command.approve"), "is not for the token of job train"),
        (person("approve"), command("command.approve"), None),
        (person("approve"), command("command.stop_all"), "(scope approve)"),
        (person("act"), command("command.stop_all"), None),
        (person("observe"), command("command.deny"), "(scope observe)"),
        (person("act"), command("command.deny", NOW_NS - 1), "has expired"),
        (person("act"), frame(), "nothing but commands"),
        (person("act"), event("hello"), "nothing but commands"),
    ],
)
def test_what_a_token_lets_through(grant: Grant, item: Frame | Event, why: str | None) -> None:
    said = refused(grant, item, NOW_NS)
    assert (said is None) if why is None else (said is not None and why in said), said


def written(folder: Path, **told: Mapping[str, str]) -> Path:
    file = folder / "tokens.yaml"
    file.write_text(json.dumps({"tokens": told}))
    return file


def test_a_token_is_known_by_its_hash(tmp_path: Path) -> None:
    mine = new_token()
    tokens = read_tokens(written(tmp_path, agents={"n1": hashed(mine)}, act={"ann": hashed("a")}))
    assert tokens.grant(mine) == AGENT
    assert tokens.grant("a") == person("act")
    assert tokens.grant(new_token()) is None
    assert tokens.grant("") is None
    assert mine not in (tmp_path / "tokens.yaml").read_text()


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({}, "need at least one"),
        ({"agents": {"n1": "secret"}}, "tokens.agents.n1: need sha256:"),
        ({"jobs": {"j": "sha256:" + "A" * 64}}, "tokens.jobs.j: need sha256:"),
        ({"agents": {"n1": hashed("x"), "n2": hashed("x")}}, "got that of tokens.agents.n1"),
        ({"guests": {}}, "tokens.guests"),
    ],
)
def test_a_wrong_file_of_tokens_is_refused_by_its_key(
    tmp_path: Path, told: dict[str, dict[str, str]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        read_tokens(written(tmp_path, **told))
    assert "secret" not in str(refusal.value), "what was written may be the token itself"


def test_a_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("abc\n")
    monkeypatch.setenv("TRAINWARDEN_TOKEN", "abc")
    assert (
        secret(f"file:{tmp_path / 'token'}", "uplink.token") == secret("env:TRAINWARDEN_TOKEN", "uplink.token") == "abc"
    )
    for where in ("abc", "env:NOT_THERE", f"file:{tmp_path}/none", ""):
        with pytest.raises(ConfigError, match=r"uplink\.token") as refusal:
            secret(where, "uplink.token")
        assert "abc" not in str(refusal.value)


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    assert TlsFiles().server() is None
    for files, words in (
        (TlsFiles(cert=tmp_path / "cert.pem"), "cannot use .*cert.pem"),
        (TlsFiles(cert=tmp_path / "none.pem"), "cannot use .*none.pem"),
        (TlsFiles(key=tmp_path / "cert.pem"), "need a certificate"),
    ):
        with pytest.raises(ConfigError, match=words):
            files.server()
    with pytest.raises(ConfigError, match="cannot use"):
        TlsFiles(ca=tmp_path / "cert.pem").client()


def test_every_scope_is_a_section() -> None:
    assert TokensConfig(observe={"a": hashed("1")}, approve={"a": hashed("2")}, act={"a": hashed("3")})
