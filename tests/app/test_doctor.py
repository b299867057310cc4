"""Facts in, checks out; and one look at the machine that runs the test."""

import io
import json
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from trainwarden.app.cli.commands import _app
from trainwarden.app.cli.doctor import screen
from trainwarden.app.doctor import Facts, Folder, examine, exit_status
from trainwarden.app.doctor_facts import folder, gather
from trainwarden.app.isolation import SourceState
from trainwarden.app.node_sources import AgentConfig, NodeSettings
from trainwarden.detectors.budgets import HangConfig

WELL = Facts(
    uid=1000,
    environment={"TORCH_FR_BUFFER_SIZE": "2000"},
    gpus=True,
    infiniband=True,
    ptrace_scope=0,
    py_spy=True,
    clock_source="tsc",
    clock_synchronized=True,
    clock_offset_s=1e-5,
    rings=[Folder(path="/dev/shm/trainwarden-1000", kind="tmpfs", free_bytes=1 << 30)],
    state=Folder(path="/var/lib/trainwarden", kind="xfs", free_bytes=1 << 40),
    dumps=Folder(path="/home/u/.cache/torch", kind="xfs"),
    sources=[SourceState(name="nvml@n1", word="up", age_s=0.1)],
)


def test_a_host_that_is_well_is_said_to_be() -> None:
    checks = examine(WELL)
    assert {check.level for check in checks} == {"ok"}
    assert [check.area for check in checks] == [
        *("sources", "rings", "timeouts", "flight recorder", "stacks", "clock", "state")
    ]
    assert exit_status(checks) == 0


def env(**more: str) -> dict[str, Any]:
    return {"environment": {**WELL.environment, **more}}


def state(name: str, why: str) -> dict[str, Any]:
    return {"sources": [SourceState(name=name, word="blind", age_s=3, why=why)]}


CASES = [
    # timeouts out of order
    ({"nccl_timeout": timedelta(seconds=30)}, "error", "PyTorch ends the ranks after 30 s"),
    ({"nccl_timeout": timedelta(minutes=5)}, "warning", "may take 10 min, but PyTorch ends ranks that wait 5 min"),
    ({"hang": HangConfig(step=timedelta(minutes=20))}, "error", "found after 20 min"),
    (env(TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="45"), "warning", "monitor may end a rank after 45 s"),
    (env(TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="600000"), "warning", "ranks wait 10 min for dumps"),
    ({"checkpoint_interval": timedelta(seconds=20)}, "note", "checkpoints are 20 s apart"),
    # flight recorder
    ({"environment": {}}, "warning", "most PyTorch releases then record nothing"),
    ({"environment": {}, "gpus": False}, "note", "most PyTorch releases then record nothing"),
    ({"environment": {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}}, "warning", "switched off"),
    (env(TORCH_NCCL_TRACE_BUFFER_SIZE="100"), "warning", "contradict each other"),
    (env(TORCH_NCCL_DUMP_ON_TIMEOUT="false"), "warning", "no dump when a collective times out"),
    (env(TORCH_NCCL_ENABLE_MONITORING="0"), "warning", "monitor thread, which writes dumps, is switched off"),
    (env(TORCH_NCCL_ASYNC_ERROR_HANDLING="1"), "warning", "ends ranks before their dumps are written"),
    ({"dumps": Folder(path="/gone", kind="", why_not="there is no such folder")}, "warning", "dumps go to /gone"),
    ({"dumps": Folder(path="/nfs/u", kind="nfs4", network=True)}, "note", "on nfs4"),
    # launcher
    ({"command": ["torchrun", "--max-restarts=3", "t.py"]}, "warning", "torchrun --max-restarts 3"),
    ({"command": ["torchrun", "--monitor_interval", "30", "t.py"]}, "note", "--monitor-interval 30"),
    # the host
    ({"ptrace_scope": 1}, "warning", "user 1000 may not trace a rank (kernel.yama.ptrace_scope=1)"),
    ({"ptrace_scope": 3, "may_trace": True}, "warning", "nobody may trace"),
    ({"py_spy": False}, "note", "py-spy is not there"),
    ({"clock_source": "hpet"}, "warning", "clock source is hpet"),
    ({"clock_synchronized": False}, "warning", "not synchronized"),
    ({"clock_synchronized": None}, "note", "cannot tell whether"),
    ({"clock_offset_s": 0.2}, "warning", "off by 200 ms"),
    ({"rings": [Folder(path="/dev/shm/x", kind="ext4")]}, "error", "/dev/shm/x: on ext4"),
    ({"rings": [Folder(path="/r", kind="tmpfs", free_bytes=4 << 20)]}, "warning", "has 4 MiB left"),
    ({"state": Folder(path="/lustre/s", kind="lustre", network=True)}, "error", "SQLite) is refused there"),
    ({"state": Folder(path="/s", kind="xfs", why_not="read-only")}, "error", "/s: read-only"),
    ({"state": Folder(path="/s", kind="xfs", free_bytes=1 << 20)}, "warning", "1 MiB left"),
    # sources
    (state("kernel-log@n1", "Operation not permitted"), "warning", "kernel-log@n1 is blind: Operation not permitted"),
    (state("nvml@n1", "no libnvidia-ml.so.1"), "warning", "nvml@n1 is blind"),
    ({**state("nvml@n1", "no libnvidia-ml.so.1"), "gpus": False}, "note", "nvml@n1 is blind"),
    ({**state("infiniband@n1", "no device"), "infiniband": False}, "note", "infiniband@n1 is blind"),
]


@pytest.mark.parametrize(("changed", "level", "words"), CASES, ids=[words for _, _, words in CASES])
def test_what_is_wrong_is_said_with_what_to_do(changed: dict[str, Any], level: str, words: str) -> None:
    checks = examine(replace(WELL, **changed))
    wrong = [check for check in checks if check.level != "ok"]
    (found,) = [check for check in wrong if words in check.what]
    assert found.level == level
    assert found.do or "cannot tell" in found.what
    assert wrong == [found], "one cause, one line"
    assert exit_status(checks) == {"note": 0, "warning": 1, "error": 2}[level]


def test_the_worst_comes_first() -> None:
    checks = examine(replace(WELL, py_spy=False, clock_source="hpet", nccl_timeout=timedelta(seconds=5)))
    levels = [check.level for check in checks]
    assert levels[:3] == ["error", "warning", "note"]
    assert set(levels[3:]) == {"ok"}


def test_dcgm_is_not_missed_where_nvml_can_be_read() -> None:
    sources = [
        SourceState(name="nvml@n1", word="up", age_s=0),
        SourceState(name="dcgm@n1", word="blind", age_s=0, why="connection refused"),
    ]
    (found,) = [check for check in examine(replace(WELL, sources=sources)) if "dcgm@n1 is blind" in check.what]
    assert found.level == "note"


def test_a_folder_that_is_still_to_be_made_is_judged_by_what_is_there(tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    found = folder(tmp_path / "a" / "b")
    assert (found.path, found.why_not) == (str(tmp_path / "a" / "b"), "")
    assert found.kind
    assert found.free_bytes
    assert sorted(tmp_path.rglob("*")) == before


def miniature(tmp_path: Path, **files: str) -> Path:
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


HOST_ONLY = NodeSettings(agent=AgentConfig(sources=("host",)))


def looked(tmp_path: Path, **more: Any) -> Facts:
    return gather(HOST_ONLY, "n1", hang=HangConfig(), proc=tmp_path, sys=tmp_path, state=tmp_path, look_s=0.5, **more)


def test_what_is_gathered_is_what_the_host_says(tmp_path: Path) -> None:
    miniature(
        tmp_path,
        sys__kernel__yama__ptrace_scope="1\n",
        self__status="Name:\tx\nCapEff:\t0000000000080000\n",
        driver__nvidia__version="570",
        devices__system__clocksource__clocksource0__current_clocksource="tsc\n",
    )
    facts = looked(
        tmp_path, environment={"HOME": str(tmp_path), "TORCH_FR_BUFFER_SIZE": "10", "AWS_SECRET": "never shown"}
    )
    assert (facts.ptrace_scope, facts.may_trace, facts.clock_source, facts.gpus) == (1, True, "tsc", True)
    assert (facts.uid, facts.infiniband) == (os.geteuid(), False)
    assert facts.environment == {"TORCH_FR_BUFFER_SIZE": "10"}, "secrets of a job are not even kept"
    assert facts.state is not None
    assert facts.state.path == str(tmp_path)
    assert "host@n1" in {one.name for one in facts.sources}


def test_a_host_that_says_nothing_is_not_said_to_be_well(tmp_path: Path) -> None:
    facts = looked(tmp_path, environment={"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "gone" / "rank_")})
    assert (facts.ptrace_scope, facts.may_trace, facts.clock_source) == (None, False, "")
    assert facts.dumps is not None
    assert facts.dumps.why_not == "there is no such folder"


def test_the_command_exits_by_the_worst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwarden.app.doctor_facts.SETTLE_S", 0.0)
    config = tmp_path / "agent.yaml"
    config.write_text("agent: {sources: [host], node: n1}\n")
    words = ["doctor", "--config", str(config), "--state", str(tmp_path), "--json", "--nccl-timeout", "10s"]
    done = CliRunner().invoke(_app, words)
    told = json.loads(done.stdout)
    assert done.exit_code == told["status"] == 2
    assert told["checks"][0]["area"] == "timeouts"
    assert told["checks"][0]["level"] == "error"


def test_it_is_one_screen_even_where_much_is_wrong() -> None:
    facts = replace(WELL, environment={}, py_spy=False, clock_source="hpet", nccl_timeout=timedelta(seconds=5))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(screen(examine(replace(facts, **state("kernel-log@n1", "[red]\x1b[2Jdenied")))))
    shown = console.export_text()
    assert len(shown.splitlines()) <= 30
    assert "-> sysctl" not in shown
    assert "[red]" in shown, "what a source says is text"
    assert "\x1b" not in shown
