"""The agent of a node: which jobs it finds and trusts, what it gathers, how it ends."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.app.otlp_world import metrics_of, points, resource
from tests.app.served import notices, tokens_file, uplink
from tests.collectors.world import World, a_world, tmpfs_folder
from tests.fakes.web import Web, serving
from typer.testing import CliRunner

from trainwarden.app import node_jobs
from trainwarden.app.cli.commands import _app
from trainwarden.app.isolation import Isolation, IsolationConfig, Item
from trainwarden.app.node_agent import NodeAgent, Sent, recorded
from trainwarden.app.node_jobs import Jobs, JobSource
from trainwarden.app.node_sources import BUILT_IN, Devices, NodeSettings, build_sources, load_node_settings
from trainwarden.app.serving import ServerConfig, Serving
from trainwarden.collectors.nccl.source import DumpsConfig
from trainwarden.collectors.rank import Rank
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame, JobId, Tick
from trainwarden.core.ports import Source
from trainwarden.core.recording import read

DEADLINE_S = 20.0
SHM_FORM = re.compile(r"trainwarden-(\d{1,10})")


class Kept:
    """An outlet that keeps everything."""

    dropped = 0
    waiting_bytes = None

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.closed = False

    def send(self, items: Sequence[Item], now_ns: int) -> None:
        self.items += items

    def close(self) -> None:
        self.closed = True

    def frames(self, schema: str) -> list[Frame]:
        return [one for one in self.items if isinstance(one, Frame) and one.schema == schema]

    def events(self, kind: str) -> list[Event]:
        return [one for one in self.items if isinstance(one, Event) and one.kind == kind]


@pytest.fixture
def world() -> Iterator[World]:
    with a_world() as made:
        yield made


def jobs_of(root: Path) -> Jobs:
    jobs = Jobs("n1", [root], start_ns=time.time_ns(), bases=())
    jobs.period_s = 0.05
    return jobs


@contextmanager
def an_agent(*sources: Source) -> Iterator[tuple[NodeAgent, Kept]]:
    kept = Kept()
    agent = NodeAgent("n1", Isolation(IsolationConfig(), "n1"), sources, [kept])
    try:
        yield agent, kept
    finally:
        agent.close()
    assert kept.closed


def turn_until(agent: NodeAgent, met: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not met():
        assert time.monotonic() < end_s, f"never came: {what}"
        agent.turn()
        time.sleep(0.01)


def train(rank: Rank, steps: int) -> None:
    for step in range(steps):
        rank.begin(step)
        rank.value("loss", 2.0)
        rank.end()


# which jobs


def whys(jobs: Jobs) -> list[str]:
    return [str(one.data["why"]) for one in jobs.poll(time.time_ns()) if isinstance(one, Event)]


def test_a_job_is_found_by_its_rings(world: World) -> None:
    world.attach()
    jobs = jobs_of(world.root)
    assert whys(jobs) == []
    assert {job: (one.root, one.uid) for job, one in jobs.found.items()} == {"job": (world.root, os.geteuid())}


def test_users_folders_are_found_by_their_names() -> None:
    with tmpfs_folder() as base:
        for name in (f"trainwarden-{os.geteuid()}", "trainwarden-4294967", "other"):
            (base / name / "j" / "rings").mkdir(parents=True, mode=0o700)
            (base / name).chmod(0o700)
        jobs = Jobs("n1", start_ns=0, bases=[(base, SHM_FORM)])
        (why,) = whys(jobs)
        assert "trainwarden-4294967: belongs to user" in why
        assert whys(jobs) == [], "said once"
        assert [one.root.name for one in jobs.found.values()] == [f"trainwarden-{os.geteuid()}"]


def make_writable(root: Path) -> None:
    root.chmod(0o770)


def make_link(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))
    root.symlink_to(root.with_name("elsewhere"))


def make_file(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))
    root.write_text("")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        pytest.param(make_writable, "others may write to it", id="others may write"),
        pytest.param(make_link, "not a folder", id="a link"),
        pytest.param(make_file, "not a folder", id="a file"),
    ],
)
def test_a_folder_that_is_not_what_it_should_be_is_refused_by_name(spoil: Callable[[Path], None], why: str) -> None:
    with tmpfs_folder() as base:
        root = base / "user"
        (root / "j" / "rings").mkdir(parents=True)
        root.chmod(0o700)
        spoil(root)
        jobs = jobs_of(root)
        assert whys(jobs) == [f"{root}: {why}"]
        assert jobs.found == {}


def test_a_folder_on_a_disk_or_with_a_mount_below_it_is_refused(tmp_path: Path) -> None:
    """A tenant's own file system (FUSE) below his folder could hang whoever looks into it."""
    root, table = tmp_path / "user", tmp_path / "mountinfo"
    (root / "j" / "rings").mkdir(parents=True)
    told = [f"1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / {tmp_path} rw - tmpfs t rw\n"]
    told.append(f"{told[0]}3 2 0:3 / {root}/j/rings rw - fuse.evil e rw\n")
    table.write_text("1 0 0:1 / / rw - ext4 a rw\n")
    jobs = Jobs("n1", [root], start_ns=0, bases=(), mounts=table)
    assert whys(jobs) == [f"{root}: on ext4, not on tmpfs"]
    table.write_text(told[1])
    assert whys(jobs) == [f"{root}: something is mounted below it"]
    assert jobs.found == {}
    table.write_text(told[0])
    assert whys(jobs) == []
    assert list(jobs.found) == ["j"]


def test_without_a_table_of_mounts_nothing_is_looked_into(tmp_path: Path) -> None:
    jobs = Jobs("n1", [tmp_path], start_ns=0, bases=(), mounts=tmp_path / "none")
    assert whys(jobs) == [f"{tmp_path}/none: No such file or directory"]
    assert jobs.found == {}


def test_a_name_is_one_jobs_and_runs_of_ours_are_left_alone() -> None:
    with tmpfs_folder() as base:
        for place in ("a/j", "b/j", "b/k", "b/state-0123456789ab/l", "b/no rings"):
            (base / place / ("rings" if place[-1] in "jkl" else "x")).mkdir(parents=True)
        (base / "b" / "link").symlink_to(base / "a" / "j")
        for name in "ab":
            (base / name).chmod(0o700)
        jobs = Jobs("n1", [base / "a", base / "b"], start_ns=0, bases=())
        assert [why for why in whys(jobs) if "already" in why]
        assert {job: one.root.name for job, one in jobs.found.items()} == {"j": "a", "k": "b"}


def test_a_process_of_somebody_else_in_a_hello_is_not_watched(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.attach()
    jobs = jobs_of(world.root)
    whys(jobs)
    where = jobs.found[JobId("job")]
    ours = JobSource(where, "n1", start_ns=time.time_ns())
    theirs = JobSource(replace(where, uid=os.geteuid() + 1), "n1", start_ns=time.time_ns())
    try:
        for source in (ours, theirs):
            assert [one.kind for one in source.poll(time.time_ns()) if isinstance(one, Event)] == ["hello"]
        assert ours._processes is not None
        assert list(ours._processes.ranks) == [0]
        assert theirs._processes is not None
        assert list(theirs._processes.ranks) == []
    finally:
        ours.close()
        theirs.close()


# what is gathered


def test_what_ranks_do_is_handed_on_from_a_source_of_their_job(world: World) -> None:
    rank = world.attach()
    with an_agent(jobs_of(world.root)) as (agent, kept):
        train(rank, 5)
        turn_until(agent, lambda: sum(len(one.rows) for one in kept.frames("step")) == 5, "five steps")
        assert agent.jobs == {"job"}
        assert {one.source for one in kept.frames("step")} == {"rings/job@n1"}
        (hello,) = kept.events("hello")
        assert (hello.source, hello.job) == ("rings/job@n1", "job")
        assert [one.subject.id for one in kept.events("source.started")] == ["agent@n1"]
        turn_until(agent, lambda: len(kept.frames("live")) > 2, "signs of life")


def test_the_end_of_a_rank_is_told(world: World) -> None:
    def wait_as_a_rank() -> None:
        world.attach()
        time.sleep(DEADLINE_S)

    pid = world.fork(wait_as_a_rank)
    with an_agent(jobs_of(world.root)) as (agent, kept):
        turn_until(agent, lambda: kept.events("hello"), "the hello")
        os.kill(pid, signal.SIGKILL)
        turn_until(agent, lambda: kept.events("process.exit"), "the end")
        (ended,) = kept.events("process.exit")
        assert (ended.source, ended.data["rank"], ended.data["pid"]) == ("processes/job@n1", 0, pid)
        world.wait(pid)


def test_a_job_that_is_over_is_let_go_until_something_new_begins(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_jobs, "OVER_NS", 0)
    monkeypatch.setattr(Jobs, "period_s", 0.05)
    rank = world.attach()
    train(rank, 3)
    with an_agent(jobs_of(world.root)) as (agent, kept):
        turn_until(agent, lambda: kept.frames("step"), "steps")
        assert agent.jobs == {"job"}, "its process lives"
        pid = world.fork(lambda: None)  # attaches nothing
        world.wait(pid)
        rank.close()
        monkeypatch.setattr(node_jobs, "alive", lambda process: False)
        turn_until(agent, lambda: not agent.jobs, "to be let go")
        seen = len(kept.events("hello"))
        for _ in range(20):
            agent.turn()
            time.sleep(0.01)
        assert len(kept.events("hello")) == seen, "an old job is not read again and again"
        monkeypatch.undo()
        world.attach(rank=1, world_size=2)
        turn_until(agent, lambda: len(kept.events("hello")) > seen, "the new one")


def test_a_recording_holds_what_was_gathered_and_how_time_passed(world: World, tmp_path: Path) -> None:
    rank = world.attach()
    outlet = recorded(tmp_path / "rec")
    agent = NodeAgent("n1", Isolation(IsolationConfig(), "n1"), [jobs_of(world.root)], [outlet])
    train(rank, 4)
    turn_until(agent, lambda: agent.jobs, "the job")
    end_s = time.monotonic() + 0.6
    turn_until(agent, lambda: time.monotonic() > end_s, "some ticks")
    agent.close()
    items = list(read(tmp_path / "rec"))
    assert sum(len(one.rows) for one in items if isinstance(one, Frame) and one.schema == "step") == 4
    ticks = [one.seen_ns for one in items if isinstance(one, Tick)]
    assert 2 <= len(ticks) <= 8
    assert [one.seen_ns for one in items] == sorted(one.seen_ns for one in items)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        recorded(tmp_path / "file" / "rec")


def test_a_dump_of_a_rank_is_looked_at_apart_from_its_rings(world: World, tmp_path: Path) -> None:
    config = NodeSettings(dumps=DumpsConfig(prefixes=(f"{tmp_path}/rank_",)))
    world.attach()
    kept, isolation = Kept(), Isolation(IsolationConfig(), "n1")
    agent = NodeAgent("n1", isolation, [jobs_of(world.root)], [kept], settings=config)
    try:
        turn_until(agent, lambda: kept.events("hello"), "the hello")
        (tmp_path / "rank_0").write_bytes(b"no dump at all")
        turn_until(agent, lambda: kept.events("dump.refused"), "the dump")
        (refused,) = kept.events("dump.refused")
        assert (refused.source, refused.job) == ("dumps/job@n1", "job")
        assert refused.data["path"] == str(tmp_path / "rank_0")
    finally:
        agent.close()


def test_a_death_on_a_node_is_told_by_the_server(world: World, tmp_path: Path) -> None:
    """The whole way: ring, agent, token, wire, line, incident, notice."""

    def train_and_wait() -> None:
        train(world.attach(rank=0, world_size=1), 5)
        time.sleep(DEADLINE_S)

    tokens = tokens_file(tmp_path, agents=["n1"])
    serving = Serving(ServerConfig(host="127.0.0.1", port=0, state=tmp_path / "state", tokens=tokens), print)
    host, port = serving.start()
    outlet = Sent(uplink(tmp_path, f"{host}:{port}", "n1"), print)
    agent = NodeAgent("n1", Isolation(IsolationConfig(), "n1"), [jobs_of(world.root)], [outlet])

    def turn_both(met: Callable[[], object], what: str) -> None:
        def turned() -> object:
            serving.turn()
            return met()

        turn_until(agent, turned, what)

    try:
        pid = world.fork(train_and_wait)
        turn_both(lambda: (tmp_path / "state" / "job").exists() and agent.jobs, "the job at the server")
        end_s = time.monotonic() + 0.5
        turn_both(lambda: time.monotonic() > end_s, "some steps")
        world.kill(pid)
        turn_both(lambda: notices(tmp_path / "state", "job"), "the notice")
        assert notices(tmp_path / "state", "job")[0]["incident"]["kind"] == "process.killed"
        assert outlet.dropped == 0
    finally:
        agent.close()
        serving.finish()


# settings


ASKED_FOR = {"recordings", "node_labels"}
"""Built-in sources that there are only by a setting, or in a pod."""


def test_each_source_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    file = tmp_path / "agent.yaml"
    for name in BUILT_IN:
        file.write_text(f"agent: {{sources: [{name}]}}\n")
        made = build_sources(load_node_settings(file), "n1", Devices(), start_ns=time.time_ns())
        assert [one.name.partition("@")[0] for one in made] == ([] if name in ASKED_FOR else [name.replace("_", "-")])
        for one in made:
            getattr(one, "close", lambda: None)()


def test_the_names_of_all_sources_say_which_node_they_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's token is good for sources of that node alone (core/auth.py)."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    made = build_sources(NodeSettings(), "n1", Devices(), start_ns=time.time_ns())
    assert len(made) == len(BUILT_IN) - len(ASKED_FOR)
    assert {one.name.rpartition("@")[2] for one in made} == {"n1"}
    for one in made:
        getattr(one, "close", lambda: None)()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("agent: {sources: []}", "agent.sources: need at least one"),
        ("agent: {sources: [nvmll]}", "agent.sources"),
        ("agent: {rings: [shm]}", "agent.rings: need absolute paths, got shm"),
        ("collectors: {recordings: {speed: 0}}", "collectors.recordings.speed: need more than 0"),
        ("detectors: {}", "detectors: is not known here"),
    ],
)
def test_settings_that_are_wrong_are_refused_with_their_key(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_node_settings(file)


# the command


@pytest.fixture
def web() -> Iterator[Web]:
    with serving() as one:
        yield one


def test_the_command_gathers_and_ends_soon_after_sigterm(world: World, web: Web, tmp_path: Path) -> None:
    """As systemd runs it: default sources, a server that does not answer, a recording, metrics, OTLP. Its own waits
    end after 1.7 s; the rest is for a busy machine."""
    (tmp_path / "token").write_text("secret")
    config = tmp_path / "agent.yaml"
    metrics = f"metrics: {{otlp_endpoint: {web.url}, otlp_period: 1s}}"
    config.write_text(f"agent: {{rings: [{world.root}]}}\nuplink: {{tls: false}}\n{metrics}\n")
    words = ["agent", "--node", "n1", "--config", str(config), "--record", str(tmp_path / "rec")]
    words += ["--server", "127.0.0.1:1", "--token-file", str(tmp_path / "token"), "--metrics", "127.0.0.1:0"]
    rank = world.attach()
    with (tmp_path / "err").open("wb") as err:
        agent = subprocess.Popen([sys.executable, "-m", "trainwarden", *words], stderr=err)
    try:
        train(rank, 3)
        end_s = time.monotonic() + DEADLINE_S
        while not (said := (tmp_path / "err").read_text()).count("not sending: 127.0.0.1:1"):
            assert time.monotonic() < end_s, said
            assert agent.poll() is None, said
            time.sleep(0.05)
        time.sleep(1.0)  # some turns
        status = Path(f"/proc/{agent.pid}/status").read_text()
        began_s = time.monotonic()
    finally:
        agent.terminate()
        code = agent.wait(DEADLINE_S)
    assert code == 0, said
    assert time.monotonic() - began_s < 5.0
    assert "watching node n1: jobs@n1, nvml@n1" in said
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    assert int(peak[1]) < 150 * 1024, "kB of memory"
    frames = [one for one in read(tmp_path / "rec") if isinstance(one, Frame) and one.schema == "step"]
    steps = [one for one in frames if one.job == "job"]  # this host may have other jobs
    assert sum(len(one.rows) for one in steps) == 3
    pushed = metrics_of(web.asked)[-1]
    assert resource(pushed)["service.instance.id"] == "n1/agent"
    told = {name for name, _ in points(pushed)}
    assert {"trainwarden_agent_cpu_budget_cores", "trainwarden_node_load_1m", "process_cpu_seconds_total"} <= told


def test_the_unit_of_systemd_gives_options_that_there_are() -> None:
    unit = (Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "trainwarden-agent.service").read_text()
    given = set(
        re.findall(r"--[a-z-]+", "".join(re.findall(r"^(?:#  .*OPTIONS=|ExecStart=)(.*)$", unit, re.MULTILINE)))
    )
    assert given == {"--config", "--token-file", "--server", "--metrics"}
    shown = CliRunner().invoke(_app, ["agent", "--help"], env={"COLUMNS": "200"}).stdout
    assert [option for option in given if option not in shown] == []
