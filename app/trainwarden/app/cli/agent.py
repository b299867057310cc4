"""`trainwarden agent`: gather what this node's sources see and hand it on."""

import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from trainwarden.app.cli.run import say
from trainwarden.app.looking import Looking
from trainwarden.app.node_agent import Gathering, Outlet, Sent, gather, node_name, recorded
from trainwarden.app.node_sources import load_node_settings
from trainwarden.app.uplink import Uplink
from trainwarden.core.clock import unix_ns
from trainwarden.core.errors import ConfigError

Node = Annotated[str | None, typer.Option(help="Name of this node; none: TRAINWARDEN_NODE, else the host's name.")]
Config = Annotated[Path | None, typer.Option(help="YAML file with the agent's settings.")]


def agent(
    node: Node = None,
    config: Config = None,
    server: Annotated[str | None, typer.Option(help="HOST:PORT of `trainwarden server`, or its URL.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with this node's token.")] = None,
    record: Annotated[Path | None, typer.Option(help="Folder to write all of it to, at most 1 GiB.")] = None,
    metrics: Annotated[str | None, typer.Option(help="HOST:PORT for Prometheus; port 0: any free one.")] = None,
) -> None:
    """Gather what the sources of this node see, until SIGTERM. Needs no rights: what it may not read is said."""
    settings = load_node_settings(config)
    uplink, name = settings.uplink, node_name(node, settings)
    if server is not None:
        uplink = replace(uplink, server=server)
    if token_file is not None:
        uplink = replace(uplink, token=f"file:{token_file.absolute()}")
    outlets: list[Outlet] = [] if record is None else [recorded(record)]
    looking = Looking(name, start_ns=unix_ns()) if "looks" in settings.agent.sources else None
    if uplink.server:
        outlets.append(Sent(Uplink(uplink, name, None if looking is None else looking.take), say))
    if metrics is not None:
        settings = replace(settings, metrics=replace(settings.metrics, listen=metrics))
    if not (outlets or settings.metrics.listen or settings.metrics.otlp_endpoint):
        raise ConfigError(
            "nowhere to hand it on to: give --server HOST:PORT, --record FOLDER or --metrics HOST:PORT, or set "
            "metrics.otlp_endpoint"
        )
    asked = Gathering(node=name, settings=settings, outlets=outlets, looking=looking)
    gather(asked, stop_at_signals(), say)


def stop_at_signals() -> threading.Event:
    """Set by SIGINT and SIGTERM."""
    stop = threading.Event()

    def ask(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    return stop
