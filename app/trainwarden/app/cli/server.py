"""`trainwarden server`: watch the jobs of many nodes."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from trainwarden.app.cli.agent import stop_at_signals
from trainwarden.app.cli.run import say
from trainwarden.app.folders import state_folder
from trainwarden.app.serving import ServerConfig, Serving, address_of, load_server_settings
from trainwarden.core.auth import TlsFiles


def server(
    tokens: Annotated[Path, typer.Option(help="YAML file: who may send, as hashes of tokens.")],
    listen: Annotated[str, typer.Option(help="HOST:PORT for agents; port 0: any free one.")] = "127.0.0.1:9401",
    state: Annotated[Path | None, typer.Option(help="Folder for what is kept; on a local disk.")] = None,
    cert: Annotated[Path | None, typer.Option(help="PEM file: our certificate; without it only loopback.")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file: its key.")] = None,
    client_ca: Annotated[Path | None, typer.Option(help="PEM file: agents must show a certificate of it.")] = None,
    plaintext: Annotated[bool, typer.Option(help="Listen without TLS where other hosts can read along.")] = False,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings.")] = None,
    http: Annotated[str | None, typer.Option(help="HOST:PORT for agents that only HTTP lets through (POST).")] = None,
    metrics: Annotated[str | None, typer.Option(help="HOST:PORT for Prometheus; port 0: any free one.")] = None,
) -> None:
    """Take what agents send of many jobs, and say what is wrong, where and why. Observe only: it repairs nothing.

    A SIGTERM ends it in order; the jobs go on with the next server of the same STATE.
    Exit status: 2 wrong settings.
    """
    settings, of_ingest, of_jobs, of_http = load_server_settings(config)
    if metrics is not None:
        settings = replace(settings, metrics=replace(settings.metrics, listen=metrics))
    host, port = address_of(listen)
    serving = Serving(
        ServerConfig(
            host=host,
            port=port,
            state=state_folder(state),
            tokens=tokens,
            tls=TlsFiles(cert=cert, key=key, ca=client_ca),
            settings=settings,
            ingest=replace(of_ingest, plaintext=of_ingest.plaintext or plaintext),
            jobs=of_jobs,
            http=of_http if http is None else replace(of_http, listen=http),
        ),
        say,
    )
    stop = stop_at_signals()
    serving.start()
    while not stop.is_set():
        serving.turn()
    serving.finish()
