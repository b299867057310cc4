"""Stages of what libraries, exporters and tenants say."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.collectors.dumpmaking import a_dump, an_entry, pickled
from tests.collectors.world import World, a_world, tmpfs_folder
from tests.conformance.stages import GARBAGE, START_NS, Files, Harm, Items, Stage
from tests.fakes.sysfs import public_folder
from tests.fakes.web import serving

from trainwarden.app.looking import JobLooks
from trainwarden.app.node_jobs import JobDumps, JobRoot, Jobs, JobSource
from trainwarden.collectors.dcgm import Dcgm, DcgmConfig
from trainwarden.collectors.files.dumps import DumpFolder, DumpFolderConfig
from trainwarden.collectors.files.recordings import Recordings, RecordingsConfig
from trainwarden.collectors.nccl.source import DumpsConfig
from trainwarden.collectors.nvml import Nvml, NvmlConfig
from trainwarden.core.emit import Emitter
from trainwarden.core.model import Event, Frame, JobId, Look, Subject
from trainwarden.core.ports import Source
from trainwarden.core.recording import Recorder

# its GPUs


@contextmanager
def nvml() -> Iterator[Stage]:
    """The library of tests/fakes/nvml.c, which must be on LD_LIBRARY_PATH."""
    with public_folder() as folder, pytest.MonkeyPatch.context() as patch:
        file, fine = folder / "gpus", "count 2\npower 250000\ntemperature 40\n"
        patch.setenv("TRAINWARDEN_FAKE_NVML", str(file))

        def put(lines: str) -> None:
            file.with_suffix(".new").write_text(fine + lines)
            file.with_suffix(".new").rename(file)

        put("")
        stage = Stage(
            make=lambda: Nvml(NvmlConfig(), node="n1", start_ns=START_NS, clock=lambda: stage.now_ns),
            harms={
                "no driver": lambda: put("nvmlInitWithFlags 9\nnvmlDeviceGetPowerUsage 18\n"),
                "a crash": lambda: put("nvmlDeviceGetPowerUsage -2\n"),
            },
            heal=lambda: put(""),
            settled=lambda source: isinstance(source, Nvml) and not source.busy,
            turn_ns=1000 * 10**9,  # a GPU that took its reader along is left out for minutes
        )
        yield stage


@contextmanager
def dcgm() -> Iterator[Stage]:
    power, base = iter(range(300, 10**6)), [0]
    with serving() as web:
        web.body = b""

        def harm(status: int, body: bytes) -> Harm:
            def answer() -> None:
                web.status, web.body = status, body + b"#"

            return answer

        def heal() -> None:
            web.status, web.body = 200, b""

        def stir() -> None:
            base[0] = len(web.asked)
            if not web.body.endswith(b"#"):
                web.body = b'DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-1",Hostname="n1"} %d\n' % next(power)

        yield (
            stage := Stage(
                make=lambda: Dcgm(DcgmConfig(url=web.url), "n1", start_ns=START_NS, clock=lambda: stage.now_ns),
                harms={
                    "failing": harm(503, b"no"),
                    "empty": harm(200, b""),
                    "garbage": harm(200, GARBAGE),
                    "another host's": harm(200, b'DCGM_FI_DEV_POWER_USAGE{gpu="0",Hostname="n2"} 300\n'),
                    "blank": harm(200, b'DCGM_FI_DEV_POWER_USAGE{gpu="0",Hostname="n1"} 9223372036854775794\n'),
                },
                heal=heal,
                stir=stir,
                settled=lambda source: len(web.asked) >= base[0] + 2,  # the second is asked when the first was taken
            )
        )
        # the fetch under way ends by itself; close() of the source has waited for it


# what others wrote down


@contextmanager
def recordings() -> Iterator[Stage]:
    with public_folder() as folder:
        emit, source = Emitter("host@n9", job=None, start_ns=7), Subject(kind="source", id="host@n9")
        with Recorder(folder / "frames") as recorder:
            for second in range(1, 4):
                recorder.write(emit("source.started", source, now_ns=second * 10**9, data={"why": "x"}))
        files = Files(*(folder / "frames").iterdir())
        config = RecordingsConfig(folder=folder / "frames", speed=1000.0)
        harms = files.harms()
        yield Stage(
            make=lambda: Recordings(config, node="n1", start_ns=START_NS),
            harms={way: harms[way] for way in ("missing", "a folder", "empty", "garbage", "forbidden")},
            heal=files.heal,
            polls=1,
            told=lambda source, items: any(item.source == "host@n9" for item in items),
            later=False,
            foreign=True,
        )


def _odd(path: Path) -> dict[str, Harm]:
    """What a tenant can put at a path."""

    def sparse() -> None:
        with path.open("wb") as file:
            file.truncate(1 << 40)

    return {
        "a folder": path.mkdir,
        "a FIFO": lambda: os.mkfifo(path),
        "empty": path.touch,
        "garbage": lambda: path.write_bytes(GARBAGE),
        "a link": lambda: path.symlink_to("/dev/zero"),
        "a sparse terabyte": sparse,
    }


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def jobs() -> Iterator[Stage]:
    """A root that is good, and what lies at another."""
    with tmpfs_folder() as folder:
        (folder / "good/job/rings").mkdir(parents=True, mode=0o700)
        other = folder / "other"
        odd = _odd(other)

        def anybodys() -> None:
            other.mkdir()
            other.chmod(0o777)

        yield Stage(
            make=lambda: Jobs("n1", [folder / "good", other], start_ns=START_NS, bases=()),
            harms={
                **{way: odd[way] for way in ("a FIFO", "empty", "a link")},
                "anybody's": anybodys,
            },
            heal=lambda: _clear(other),
            told=lambda source, items: isinstance(source, Jobs) and set(source.found) == {"job"},
        )


def _job_source(world: World) -> JobSource:
    where = JobRoot(job=world.job, root=world.root, uid=os.getuid(), stamp=(0, 0))
    return JobSource(where, "n1", start_ns=START_NS)


@contextmanager
def rings() -> Iterator[Stage]:
    """A rank that trains, and what lies beside its ring."""
    with a_world() as world:
        rank, step = world.attach(0, 2), iter(range(10**6))
        path = world.rings / "rank-1-0-0.ring"

        def stir() -> None:
            rank.begin(next(step))
            rank.end()

        def told(source: Source, items: Items) -> bool:
            return any(isinstance(item, Frame) and item.schema == "step" for item in items)

        yield Stage(
            make=lambda: _job_source(world),
            harms=_odd(path),
            heal=lambda: _clear(path),
            stir=stir,
            told=told,
        )


@contextmanager
def looks() -> Iterator[Stage]:
    """A job about which a server asks, of a rank that is not on this node."""
    keys, made = iter(range(10**6)), list[JobLooks]()
    with a_world() as world:
        job = _job_source(world)

        def make() -> JobLooks:
            made.append(JobLooks(DumpsConfig(), job, "n1", start_ns=START_NS))
            return made[-1]

        def stir() -> None:
            one = Look(key=f"k{next(keys)}", what="dump", subjects=(Subject(kind="rank", id="7"),))
            assert made[-1].ask(one, stage.now_ns) == ""

        stage = Stage(make=make, harms={}, heal=lambda: None, stir=stir)
        yield stage
        job.close()


@contextmanager
def dumps() -> Iterator[Stage]:
    """A rank that has said hello: its dump, and what lies where another one may be."""
    with a_world() as world, public_folder() as folder:
        rank, entries = world.attach(0, 1), iter(range(10**6))
        job = _job_source(world)
        list(job.poll(START_NS))

        def stir() -> None:
            (folder / "trace_0").write_bytes(pickled(a_dump(an_entry(next(entries)), an_entry(next(entries)))))

        path = folder / "odd_0"
        odd = _odd(path)
        prefixes = (f"{folder}/trace_", f"{folder}/odd_")
        yield Stage(
            make=lambda: JobDumps(DumpsConfig(prefixes=prefixes), job, "n1"),
            harms={way: odd[way] for way in ("a FIFO", "garbage", "a link", "a sparse terabyte")},
            heal=lambda: _clear(path),
            stir=stir,
            polls=2,
            told=lambda source, items: any(isinstance(item, Event) and item.kind == "dump" for item in items),
        )
        job.close()
        rank.close()


@contextmanager
def dump_folder() -> Iterator[Stage]:
    with public_folder() as folder:
        (folder / "rank_0.pickle").write_bytes(pickled(a_dump(an_entry(0), an_entry(1))))
        path = folder / "rank_1.pickle"
        odd = _odd(path)
        yield Stage(
            make=lambda: DumpFolder(DumpFolderConfig(folder=folder, job=JobId("job")), start_ns=START_NS),
            harms={way: odd[way] for way in ("a FIFO", "empty", "garbage", "a link", "a sparse terabyte")},
            heal=lambda: _clear(path),
            told=lambda source, items: any(isinstance(item, Event) and item.kind == "dump" for item in items),
            later=False,
        )
