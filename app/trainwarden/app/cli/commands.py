"""All commands, one file a noun."""

import sys

import typer

from trainwarden.app.cli import (
    agent,
    approve,
    checkpoints,
    dashboards,
    demo,
    doctor,
    record,
    report,
    run,
    server,
    tokens,
)
from trainwarden.core.errors import TrainwardenError

_app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Watches a training job, says what is wrong, where and why.",
)
_app.command("run")(run.run)
_app.command("server")(server.server)
_app.command("demo")(demo.demo)
_app.command("report")(report.report)
_app.command("agent")(agent.agent)
_app.command("record")(record.record)
_app.command("replay")(record.replay)
_app.command("doctor")(doctor.doctor)
_app.command("approve")(approve.approve)
_app.command("deny")(approve.deny)
_app.command("stop-all")(approve.stop_all)
_app.add_typer(checkpoints.checkpoints, name="checkpoints")
_app.add_typer(tokens.tokens, name="tokens")
_app.add_typer(dashboards.dashboards, name="dashboards")


def run_commands() -> None:
    """Parse and run; what we raise on purpose becomes one line and an exit status, never a traceback."""
    try:
        _app()
    except TrainwardenError as error:
        sys.stderr.write(f"trainwarden: {error}\n")
        sys.exit(run.EXIT_STATUS.get(type(error), 1))
