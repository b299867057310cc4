"""Dashboards on their way to a Grafana (a fake of its HTTP API: tests/fakes/grafana.py) and into a folder."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.grafana import EDITOR, VIEWER, Answer, FakeGrafana, grafana
from typer.testing import CliRunner

from trainwarden.alerts.rules import rules_text
from trainwarden.app.cli import commands
from trainwarden.core.errors import ConfigError, DeliveryError
from trainwarden.dashboards.push import Grafana, push, shipped

UID = "trainwarden-job"
BOARDS = list(shipped().values())


@pytest.fixture
def fake() -> Iterator[FakeGrafana]:
    with grafana() as served:
        yield served


def pushed(fake: FakeGrafana, token: str = EDITOR, *, dry_run: bool = False, deadline_s: float = 20.0) -> list[str]:
    return [*push(BOARDS, Grafana(url=fake.url, token=token, deadline_s=deadline_s), "GPU", dry_run=dry_run)]


def saves(fake: FakeGrafana) -> list[str]:
    return [asked for asked in fake.asked if asked.startswith("POST")]


def test_a_dashboard_is_created_in_a_folder_that_is_made_for_it(fake: FakeGrafana) -> None:
    assert pushed(fake) == [f"Training job: created in folder GPU, which is new: {fake.url}/d/{UID}"]
    assert fake.folders == {"f0": "GPU"}
    home, stored = fake.boards[UID]
    assert home == "f0"
    assert {**stored, "id": None, "version": None} == {**BOARDS[0], "id": None, "version": None}
    assert fake.messages[0].startswith("trainwarden ")


def test_pushing_again_changes_nothing(fake: FakeGrafana) -> None:
    pushed(fake)
    fake.asked.clear()
    assert pushed(fake) == ["Training job: unchanged in folder GPU"]
    assert saves(fake) == []
    assert fake.boards[UID][1]["version"] == 1


def test_what_a_person_changed_is_brought_back_as_a_new_version(fake: FakeGrafana) -> None:
    pushed(fake)
    fake.boards[UID][1]["title"] = "Mine"
    (line,) = pushed(fake)
    assert line.startswith("Training job: updated in folder GPU")
    assert (fake.boards[UID][1]["title"], fake.boards[UID][1]["version"]) == ("Training job", 2)


def test_a_dashboard_that_lies_elsewhere_is_moved(fake: FakeGrafana) -> None:
    pushed(fake)
    fake.boards[UID] = ("other", fake.boards[UID][1])
    pushed(fake)
    assert fake.boards[UID][0] == "f0"


def test_a_dry_run_asks_and_changes_nothing(fake: FakeGrafana) -> None:
    assert pushed(fake, VIEWER, dry_run=True) == ["Training job: would be created in folder GPU, which is new"]
    pushed(fake)
    fake.asked.clear()
    assert pushed(fake, dry_run=True) == ["Training job: unchanged in folder GPU"]
    fake.boards[UID][1]["title"] = "Mine"
    assert pushed(fake, dry_run=True) == ["Training job: would be updated in folder GPU"]
    assert saves(fake) == []


def test_a_grafana_below_a_sub_path_is_found() -> None:
    with grafana("/tools/grafana") as fake:
        (line,) = pushed(fake)
        assert line.endswith(f"/tools/grafana/d/{UID}")
        assert all(asked.split(" ")[1].startswith("/tools/grafana/api/") for asked in fake.asked)


def test_what_somebody_saved_while_we_looked_is_not_written_over(fake: FakeGrafana) -> None:
    pushed(fake)
    stored = fake.boards[UID][1]
    stored["title"] = "Mine"
    fake.before_save = lambda: stored.update(title="Theirs", version=stored["version"] + 1)
    with pytest.raises(DeliveryError, match=r"answered 412: somebody else saved it .* \(.*changed by someone else\)"):
        pushed(fake)
    assert stored["title"] == "Theirs"


JSON, HTML = {"Content-Type": "application/json"}, {"Content-Type": "text/html"}


@pytest.mark.parametrize(
    ("answer", "words", "retryable"),
    [
        pytest.param((400, JSON, b'{"message": "Cannot save"}'), r"400: .* provisioned .*\(.*Cannot", False, id="400"),
        pytest.param((404, HTML, b"<html>"), "404: .* address of Grafana itself", False, id="404, not Grafana's"),
        pytest.param((500, JSON, b'{"message": "disk full"}'), r"500: it failed: .*disk full", True, id="500"),
        pytest.param((502, HTML, b"<html>\x1b[31m"), r"502: it failed: see its log", True, id="a proxy's 502"),
        pytest.param((200, HTML, b"<html>log in"), "not as Grafana does", False, id="a page for people"),
        pytest.param((200, JSON, b'{"folders": "none"}'), "not as Grafana does", False, id="another API"),
        pytest.param((200, JSON, b'[{"uid": 3}]'), "not as Grafana does", False, id="folders without titles"),
        pytest.param((200, JSON, b"{"), "not as Grafana does", False, id="JSON that ends too soon"),
        pytest.param((302, {"Location": "/login"}, b""), "leads elsewhere", False, id="a redirect"),
    ],
)
def test_an_answer_that_is_none_is_told_with_host_and_advice(
    fake: FakeGrafana, answer: Answer, words: str, retryable: bool
) -> None:
    fake.instead = answer
    with pytest.raises(DeliveryError, match=words) as caught:
        pushed(fake)
    assert str(caught.value).startswith(f"{fake.url}: ")
    assert caught.value.retryable == retryable
    assert EDITOR not in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("token", "words"),
    [
        pytest.param("glsa_unknown", "401: the token is not accepted: GRAFANA_TOKEN or --token-file", id="unknown"),
        pytest.param(VIEWER, "403: .* the role Editor", id="may only read"),
    ],
)
def test_a_token_that_is_not_enough_is_told_without_it(fake: FakeGrafana, token: str, words: str) -> None:
    with pytest.raises(DeliveryError, match=words) as caught:
        pushed(fake, token)
    assert token not in str(caught.value)


def test_nobody_there_is_told() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(DeliveryError, match=rf"{url}: cannot be reached \(Connect\w+\): is it"):
            push(BOARDS, Grafana(url=url, token=EDITOR), "GPU")


def test_one_deadline_holds_for_an_answer_that_never_ends(fake: FakeGrafana) -> None:
    fake.drips = True
    began_s = time.monotonic()
    with pytest.raises(DeliveryError, match=r"no answer within 0\.3 s") as caught:
        pushed(fake, deadline_s=0.3)
    assert caught.value.retryable
    assert time.monotonic() - began_s < 10


def test_a_silent_peer_is_left_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DeliveryError, match=r"no answer within 0\.3 s"):
            push(BOARDS, Grafana(url=url, token=EDITOR, deadline_s=0.3), "GPU")


def test_no_thread_or_connection_stays(fake: FakeGrafana) -> None:
    """At once, not only by the time the leak check of all tests looks."""
    before = threading.active_count()
    pushed(fake)
    fake.closing.set()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before, [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    "url",
    ["", "grafana:3000", "ftp://grafana", "http://", "http://h:99999", "http://u:secret@h", "http://h/?token=secret"],
)
def test_an_address_that_is_none_or_holds_a_secret_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^--url: need") as caught:
        Grafana(url=url, token=EDITOR)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "t\u00f6ken"])
def test_a_token_that_cannot_be_one_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match=r"^GRAFANA_TOKEN or --token-file: need"):
        Grafana(url="http://grafana", token=token)


def test_the_token_is_not_shown_by_accident() -> None:
    assert EDITOR not in repr(Grafana(url="http://grafana", token=EDITOR))


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grafana_client", "grafana_client.api", "grafana_client.client"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'trainwarden\[dashboards\]'"):
        push(BOARDS, Grafana(url="http://grafana", token=EDITOR), "GPU")
    monkeypatch.setattr(sys, "argv", ["trainwarden", "dashboards", "push", "--url", "http://grafana"])
    monkeypatch.setenv("GRAFANA_TOKEN", EDITOR)
    with pytest.raises(SystemExit) as caught:
        commands.run_commands()
    assert caught.value.code == 2


def test_the_command_loads_no_client_until_it_pushes() -> None:
    code = (
        "import sys, trainwarden.app.cli.dashboards, trainwarden.dashboards.push as p; p.shipped(); print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50).stdout
    assert {"grafana_client", "niquests", "grafana_foundation_sdk", "httpx"} & set(loaded.split()) == set()


def invoke(*words: str) -> str:
    done = CliRunner().invoke(commands._app, ["dashboards", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_takes_the_token_from_the_environment_or_a_file(
    fake: FakeGrafana, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", EDITOR)
    assert "created in folder trainwarden, which is new" in invoke("push", "--url", fake.url)
    monkeypatch.setenv("GRAFANA_TOKEN", "glsa_unknown")
    (tmp_path / "token").write_text(f"{EDITOR}\n")
    told = invoke(
        "push", "--url", fake.url, "--token-file", str(tmp_path / "token"), "--runbooks", "https://w/runbooks/"
    )
    assert "updated in folder trainwarden" in told
    (runbooks,) = [one for one in fake.boards[UID][1]["templating"]["list"] if one["name"] == "runbooks"]
    assert runbooks["query"] == runbooks["current"]["value"] == "https://w/runbooks"


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--token-file: cannot read .*/token: FileNotFoundError"):
        invoke("push", "--url", "http://grafana", "--token-file", str(tmp_path / "token"))


def test_export_writes_what_grafana_and_prometheus_read(tmp_path: Path) -> None:
    told = invoke("export", str(tmp_path / "out"))
    written = {str(path.relative_to(tmp_path / "out")): path for path in (tmp_path / "out").rglob("*.*")}
    assert set(written) == {f"dashboards/{name}" for name in shipped()} | {f"rules/{name}" for name in rules_text()}
    assert [Path(line) for line in told.splitlines()] == [path for path in map(Path, told.split()) if path.is_file()]
    assert json.loads(written["dashboards/job.json"].read_text()) == shipped()["job.json"]
    assert {name: written[f"rules/{name}"].read_text() for name in rules_text()} == rules_text()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"FOLDER: cannot write .*file/dashboards/job\.json"):
        invoke("export", str(tmp_path / "file"))
