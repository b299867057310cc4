"""The compose file and what it mounts fit together and to the code.

No image is pulled and no container is started; tests/end_to_end/test_deploy.py starts what is mounted, as processes.
"""

import importlib.util
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from trainwarden.app.launch import check_restarts
from trainwarden.app.wiring import acts, choose_policy, load_settings
from trainwarden.rehearsal.faults import from_json

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
COMPOSE: Mapping[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: Mapping[str, Mapping[str, Any]] = COMPOSE["services"]
PINNED = re.compile(r"[a-z0-9./-]+:v?\d+\.\d+\.\d+[a-z0-9.-]*")
TEXTS = sorted(path for path in (*DEPLOY.rglob("*"), ROOT / "docker-compose.yml") if path.is_file())


def compose() -> list[str] | None:
    """The command that reads compose files here, if there is one."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and subprocess.run([*command, "version"], capture_output=True).returncode == 0:
            return command
    return None


def test_compose_itself_takes_the_file() -> None:
    command = compose()
    if command is None:
        pytest.skip("NOT TESTED: docker-compose.yml, neither `docker compose` nor `docker-compose` is here")
    line = [*command, "-f", str(ROOT / "docker-compose.yml"), "config"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["services"].keys() == SERVICES.keys()


def mounts(service: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(source, target, mode) of each."""
    for mount in service.get("volumes", ()):
        source, target, *mode = mount.split(":")
        yield source, target, "".join(mode)


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_mounts_is_here_or_a_volume(name: str) -> None:
    for source, _, mode in mounts(SERVICES[name]):
        if source.startswith("."):
            assert (ROOT / source).exists(), source
            assert mode == "ro", f"{source}: a container must not write into the repository"
        else:
            assert source in COMPOSE["volumes"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_pinned_healthy_by_a_check_and_reached_by_loopback_only(name: str) -> None:
    service = SERVICES[name]
    assert "build" in service or PINNED.fullmatch(service["image"])
    assert service["healthcheck"]["test"][0] == "CMD"
    assert [port for port in service.get("ports", ()) if not re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)] == []


def test_the_image_is_pinned_and_runs_as_nobody_special() -> None:
    build = SERVICES["trainwarden"]["build"]
    dockerfile = (ROOT / build["context"] / build["dockerfile"]).read_text(encoding="utf-8")
    assert PINNED.fullmatch(re.findall(r"^FROM (.+)$", dockerfile, re.MULTILINE)[0])
    assert re.findall(r"^USER (.+)$", dockerfile, re.MULTILINE)[-1] != "root"
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    components = {path.parent.name for path in ROOT.glob("*/trainwarden")}
    assert "*" in ignored, "what is not named stays out"
    assert {f"!{name}" for name in components | {"examples", "pyproject.toml", "constraints.txt"}} <= set(ignored)


def test_no_secret_stands_anywhere() -> None:
    said = re.compile(r"(password|secret|token|api_?key|credential)\w*\s*[:=]\s*[^\s#]", re.IGNORECASE)
    found = [f"{path.name}: {line.strip()}" for path in TEXTS for line in path.read_text().splitlines()]
    assert [line for line in found if said.search(line)] == []


def test_every_address_leads_to_a_service() -> None:
    """host:port in the files that a container reads, against the names and ports of the others."""
    listens = {
        "trainwarden": "9485",
        "prometheus": "9090",
        "alertmanager": "9093",
        "receiver": "9099",
        "grafana": "3000",
    }
    for name, service in SERVICES.items():
        assert listens[name] in str(service["healthcheck"]["test"])
        assert [port for port in service.get("ports", ()) if not port.endswith(f":{listens[name]}")] == []
    text = "\n".join(path.read_text(encoding="utf-8") for path in TEXTS if path.suffix in (".yml", ".yaml", ".json"))
    asked = re.findall(r"(?:http://|\[\")([a-z]+):(\d+)\b", text)
    assert {"trainwarden", "prometheus", "alertmanager", "receiver"} <= {host for host, _ in asked}
    assert [(host, port) for host, port in asked if listens[host] != port] == []


def option(name: str) -> str:
    """What the rehearsal's command line says for an option."""
    (value,) = (word.partition("=")[2] for word in SERVICES["trainwarden"]["command"] if word.startswith(f"--{name}="))
    return str(value)


def test_the_rehearsal_can_be_started_and_repaired() -> None:
    service = SERVICES["trainwarden"]
    words = service["command"]
    check_restarts(words)
    assert acts(choose_policy(option("policy")))
    assert service["init"], "as PID 1 trainwarden would take the training with it"
    script = words[words.index("torchrun") + 3]
    assert (ROOT / script).is_file()
    faults = from_json(service["environment"]["TRAINWARDEN_FAULTS"])
    assert all(fault.at_step < int(option("steps")) for fault in faults)
    assert not any(fault.outside for fault in faults), "nobody there makes them"


def test_the_settings_of_the_rehearsal_are_good_and_name_every_alertmanager() -> None:
    (file,) = [source for source, target, _ in mounts(SERVICES["trainwarden"]) if target == option("config")]
    settings = load_settings(ROOT / file)
    targets = json.loads((DEPLOY / "prometheus" / "targets" / "alertmanager.json").read_text())
    assert list(settings.alertmanager.urls) == [f"http://{peer}" for one in targets for peer in one["targets"]]


def test_grafana_finds_its_dashboards_where_they_are_mounted() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    providers = yaml.safe_load((provisioning / "dashboards" / "trainwarden.yaml").read_text())["providers"]
    mounted = {target: source for source, target, _ in mounts(SERVICES["grafana"])}
    (folder,) = [mounted[provider["options"]["path"]] for provider in providers]
    assert [path.name for path in (ROOT / folder).glob("*.json")] != []
    sources = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert [source["type"] for source in sources if source.get("isDefault")] == ["prometheus"]


@pytest.fixture(scope="module")
def receiver() -> ModuleType:
    spec = importlib.util.spec_from_file_location("receiver", DEPLOY / "alertmanager" / "receiver.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stand_in_says_once_that_the_dead_man_is_silent(
    receiver: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with receiver.Receiver(("127.0.0.1", 0), receiver.Post) as server:
        server.service_actions()
        assert capsys.readouterr().out == "", "never heard: nothing was promised"
        server.heard_s = time.monotonic() - receiver.DEAD_MAN_S - 1
        server.service_actions()
        server.service_actions()
    assert capsys.readouterr().out.count("SILENT for 180 s") == 1


def test_the_stand_in_prints_no_control_character(receiver: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    receiver.say("pager", "job \x1b[2Jbig\n")
    assert capsys.readouterr().out[9:] == "pager         job ?[2Jbig?\n"
