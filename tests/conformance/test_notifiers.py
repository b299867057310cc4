"""Every notifier through its port: delivered once a key, told how, never a hostile line; and its own ways to fail."""

import contextlib
import io
import json
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.fakes.web import Web, serving

from trainwarden.alerts.notify.alertmanager import Alertmanager, AlertmanagerConfig
from trainwarden.alerts.notify.jsonl import JsonLines, in_json
from trainwarden.alerts.notify.terminal import ErrorConsole, Terminal, in_words
from trainwarden.core.errors import DeliveryError
from trainwarden.core.model import Epoch, Evidence, Finding, Incident, JobId, Notice, Subject, Tier
from trainwarden.core.ports import Notifier

RANK_2 = Subject(kind="rank", id="2")
FINDING = Finding(
    id="death/train-3/0/rank:2/0",
    revision=0,
    status="final",
    kind="process.killed",
    subject=RANK_2,
    suspects=((RANK_2, 1.0),),
    job=JobId("train-3"),
    epoch=Epoch(0),
    onset_ns=10**18,
    onset_step=7,
    seen_ns=10**18 + 400_000_000,
    confidence=1.0,
    reason="rank 2 (pid 4711) was killed by SIGKILL",
    evidence=(Evidence(what="signal", value=9), Evidence(what="loss", value=float("nan"))),
)
INCIDENT = Incident(
    id="death.train-3.0.rank-2.0",
    revision=1,
    state="confirmed",
    tier=Tier.ERROR,
    kind="process.killed",
    culprit=RANK_2,
    victims=(Subject(kind="rank", id="0"),),
    job=JobId("train-3"),
    epoch=Epoch(0),
    onset_ns=10**18,
    findings=(FINDING,),
    events=(),
    reason="rank 2 (pid 4711) was killed by SIGKILL",
    action="restart the job from the newest verified checkpoint",
    plans=(),
    lost_s={"detect": 0.4},
)
OPENED = Notice(key="death.train-3.0.rank-2.0/1/x", channel="x", change="opened", incident=INCIDENT)
HOSTILE = "\x1b[2J\x07line one\nline two\r\u202e[ERROR] \ud800 \x9b2J é"


class Channel:
    """A notifier and what it delivered."""

    def __init__(self, make: Callable[[], Notifier], delivered: Callable[[], str]) -> None:
        self.make, self.delivered = make, delivered

    @property
    def lines(self) -> list[str]:
        return self.delivered().splitlines()


@pytest.fixture(params=["terminal", "jsonl", "alertmanager"])
def channel(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    """Each registered notifier; a new one is added here and to app/wiring.py."""
    match request.param:
        case "terminal":
            out = io.StringIO()
            yield Channel(lambda: Terminal(ErrorConsole(out)), out.getvalue)
        case "jsonl":
            path = tmp_path / "notices.jsonl"
            yield Channel(lambda: JsonLines(path), path.read_text)
        case "alertmanager":
            monkeypatch.setenv("no_proxy", "127.0.0.1")
            with serving() as web:
                yield from standing(web)


def standing(web: Web) -> Iterator[Channel]:
    """What stands in an Alertmanager after all posts: a line an alert, which it tells apart by their labels."""
    made: list[Alertmanager] = []

    def make() -> Notifier:
        made.append(Alertmanager(AlertmanagerConfig(urls=(web.url,))))
        made[-1].sync(())
        return made[-1]

    def delivered() -> str:
        for one in made:
            one.close()
        alerts = [alert for asked in web.asked for alert in json.loads(asked.body)]
        stand = {json.dumps(alert["labels"]): json.dumps(alert, ensure_ascii=False) for alert in alerts}
        return "".join(f"{line}\n" for line in stand.values())

    yield Channel(make, delivered)
    delivered()


def test_it_names_its_channel_and_gives_a_receipt(channel: Channel) -> None:
    notifier = channel.make()
    assert notifier.channel
    assert OPENED.key in notifier.notify(OPENED)


def test_a_key_is_delivered_once(channel: Channel) -> None:
    notifier = channel.make()
    receipts = {notifier.notify(OPENED) for _ in range(3)}
    assert len(receipts) == 1, "the second time is a success as well"
    assert len(channel.lines) == 1


def test_each_notice_is_one_line_whatever_the_tenant_wrote(channel: Channel) -> None:
    incident = replace(INCIDENT, reason=HOSTILE, action=HOSTILE, job=JobId(HOSTILE))
    notifier = channel.make()
    notifier.notify(replace(OPENED, incident=incident))
    (line,) = channel.delivered().split("\n")[:-1]
    assert line.isprintable()
    assert len(channel.lines) == 1


@pytest.mark.parametrize("change", ["opened", "updated", "escalated", "resolved"])
@pytest.mark.parametrize("tier", Tier)
def test_it_says_every_change_of_every_tier(channel: Channel, change: str, tier: Tier) -> None:
    notice = replace(OPENED, change=change, incident=replace(INCIDENT, tier=tier))  # type: ignore[arg-type]  # one of the changes
    channel.make().notify(notice)
    assert INCIDENT.reason in channel.delivered()
    assert INCIDENT.id in channel.delivered()


def test_an_incident_of_our_own_has_no_job_and_no_runbook(channel: Channel) -> None:
    incident = replace(INCIDENT, job=None, epoch=None, culprit=None, kind="nobody.foresaw", lost_s={}, findings=())
    channel.make().notify(replace(OPENED, incident=incident))
    assert len(channel.lines) == 1


# the terminal


def test_the_terminal_says_it_in_one_plain_line() -> None:
    out = io.StringIO()
    Terminal(ErrorConsole(out)).notify(OPENED)
    assert out.getvalue() == (
        "[ERROR] job train-3: rank 2 (pid 4711) was killed by SIGKILL (incident death.train-3.0.rank-2.0, "
        "0.4 s after it happened). Would do: restart the job from the newest verified checkpoint. "
        "Runbook: process-killed.\n"
    )


@pytest.mark.parametrize(
    ("notice", "words"),
    [
        pytest.param(
            replace(OPENED, change="updated"),
            "[ERROR] job train-3: update: rank 2 (pid 4711) was killed by SIGKILL "
            "(incident death.train-3.0.rank-2.0). Would do: restart the job from the newest verified checkpoint.",
            id="updated",
        ),
        pytest.param(
            replace(OPENED, change="resolved"),
            "[RESOLVED] job train-3: over: rank 2 (pid 4711) was killed by SIGKILL "
            "(incident death.train-3.0.rank-2.0).",
            id="resolved",
        ),
        pytest.param(
            replace(OPENED, change="escalated", incident=replace(INCIDENT, tier=Tier.CRITICAL, plans=("p1",))),
            "[CRITICAL] job train-3: worse: rank 2 (pid 4711) was killed by SIGKILL "
            "(incident death.train-3.0.rank-2.0).",
            id="a plan speaks for itself",
        ),
    ],
)
def test_the_terminal_in_words(notice: Notice, words: str) -> None:
    assert in_words(notice) == words


def test_the_terminal_colours_what_somebody_looks_at_and_does_not_break_lines() -> None:
    out = io.StringIO()
    Terminal(Console(file=out, force_terminal=True, color_system="standard", width=40)).notify(OPENED)
    assert out.getvalue().startswith("\x1b[1;31m[ERROR]\x1b[0m job train-3: ")
    assert out.getvalue().count("\n") == 1


def test_a_reader_that_went_away_is_an_error_and_not_the_end_of_the_process() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb", buffering=0) as raw:
        pipe = io.TextIOWrapper(raw, write_through=True)
        with pytest.raises(DeliveryError, match=r"terminal: cannot be written: .*Broken pipe") as caught:
            Terminal(ErrorConsole(pipe)).notify(OPENED)
        pipe.detach()
    assert not caught.value.retryable


def test_a_closed_terminal_is_an_error() -> None:
    closed = io.StringIO()
    closed.close()
    with pytest.raises(DeliveryError):
        Terminal(ErrorConsole(closed)).notify(OPENED)


# the file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "notices.jsonl"


def numbered(number: int) -> Notice:
    return replace(OPENED, key=f"{INCIDENT.id}/{number}/jsonl")


def keys(path: Path) -> list[str]:
    """Of a file of strict JSON lines only."""
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b"", "the last line is whole"
    return [json.loads(line, parse_constant=pytest.fail)["key"] for line in lines]


def test_a_line_is_plain_json() -> None:
    told = json.loads(json.dumps(in_json(OPENED), allow_nan=False))
    assert (told["key"], told["change"], told["runbook"]) == (OPENED.key, "opened", "process-killed")
    incident = told["incident"]
    assert (incident["tier"], incident["culprit"], incident["victims"]) == ("ERROR", "rank:2", ["rank:0"])
    assert incident["findings"][0]["suspects"] == [["rank:2", 1.0]]
    assert incident["findings"][0]["evidence"][1]["value"] == "NaN"


def test_a_key_is_not_written_again_after_a_restart(path: Path) -> None:
    JsonLines(path).notify(numbered(1))
    again = JsonLines(path)
    again.notify(numbered(1))
    again.notify(numbered(2))
    assert keys(path) == [numbered(1).key, numbered(2).key]
    assert JsonLines(path).holds(numbered(2).key)
    assert not JsonLines(path).holds(numbered(3).key)


def test_only_its_owner_may_read_it(path: Path) -> None:
    JsonLines(path).notify(numbered(1))
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("cut", [1, 30, 300])
def test_a_line_torn_by_a_crash_is_cut_off_and_written_again(path: Path, cut: int) -> None:
    first = JsonLines(path)
    first.notify(numbered(1))
    first.notify(numbered(2))
    os.truncate(path, path.stat().st_size - cut)
    again = JsonLines(path)
    again.notify(numbered(2))
    again.notify(numbered(3))
    assert keys(path) == [numbered(number).key for number in (1, 2, 3)]


def test_lines_that_are_none_of_ours_are_left_alone(path: Path) -> None:
    path.write_bytes(b'not JSON\n[1]\n{"key": 7}\n\xff\xfe\n')
    JsonLines(path).notify(numbered(1))
    assert path.read_bytes().startswith(b'not JSON\n[1]\n{"key": 7}\n\xff\xfe\n{"change"')


def test_a_file_that_somebody_emptied_is_begun_again(path: Path) -> None:
    notifier = JsonLines(path)
    notifier.notify(numbered(1))
    os.truncate(path, 0)
    notifier.notify(numbered(1))
    assert keys(path) == [numbered(1).key]


def test_processes_that_write_at_once_write_each_key_once(path: Path) -> None:
    children = [os.fork() for _ in range(3)]
    if 0 in children:
        with contextlib.suppress(BaseException):
            notifier = JsonLines(path)
            for number in range(20):
                notifier.notify(numbered(number))
            os._exit(0)
        os._exit(1)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert sorted(keys(path)) == sorted(numbered(number).key for number in range(20))


@pytest.fixture
def small_files() -> Iterator[Callable[[int | None], None]]:
    """Files of this process cannot grow beyond so many bytes (None: as before): a full disk, without one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, before if limit is None else (limit, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_space_is_told_leaves_a_whole_file_and_can_be_tried_again(
    path: Path, small_files: Callable[[int | None], None]
) -> None:
    notifier = JsonLines(path)
    notifier.notify(numbered(1))
    small_files(path.stat().st_size + 100)
    with pytest.raises(DeliveryError, match=r"jsonl: .*notices\.jsonl: File too large") as caught:
        notifier.notify(numbered(2))
    assert caught.value.retryable
    assert caught.value.retry_after_s > 0
    assert keys(path) == [numbered(1).key]
    small_files(None)
    notifier.notify(numbered(2))
    assert keys(path) == [numbered(1).key, numbered(2).key]


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    notifier = JsonLines(tmp_path / "none" / "notices.jsonl")
    with pytest.raises(DeliveryError, match="No such file"):
        notifier.notify(OPENED)
    assert not notifier.holds(OPENED.key)
