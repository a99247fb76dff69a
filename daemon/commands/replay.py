"""`benchd replay`: send the results of an output or state folder that no broker has acknowledged yet."""

import sys
import uuid
from pathlib import Path
from typing import Annotated, TextIO

import typer

from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import CaFile, CertificateFile, KeyFile, broker
from benchd.daemon.delivery import refill
from benchd.daemon.delivery.broker import Broker
from benchd.daemon.delivery.outbox import DELIVERED, JOURNALLED, OUTBOX, Outbox
from benchd.daemon.delivery.sender import drain
from benchd.daemon.errors import UsageError
from benchd.daemon.journal import explaining
from benchd.daemon.verdicts.results import JOURNAL

app = application()


@app.command(epilog="Example: benchd replay bench-out --mqtt mqtt://broker.local")
def replay(
    folder: Annotated[
        Path, typer.Argument(help="The output folder of bench-once, or the state folder of the service.")
    ],
    mqtt: Annotated[str, typer.Option(help="Publish to this broker.", metavar="mqtt://HOST[:PORT]")],
    timeout_s: Annotated[float, typer.Option(help="Give up after this many seconds.", min=0)] = 60.0,
    dead: Annotated[bool, typer.Option("--dead", help="Also retry results that a broker has refused.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Send everything that the folder's records.jsonl holds, also what was sent.")
    ] = False,
    ca_file: CaFile = None,
    certificate_file: CertificateFile = None,
    key_file: KeyFile = None,
) -> None:
    """Send the results of a folder that no broker has acknowledged yet."""
    to = broker(mqtt, ca_file, certificate_file, key_file)
    raise typer.Exit(send(folder, to, timeout_s, sys.stdout, dead=dead, everything=everything))


def send(
    folder: Path, to: Broker, timeout_s: float, out: TextIO, *, dead: bool = False, everything: bool = False
) -> int:
    """Send the results in `folder` that no broker has acknowledged, with `dead` also refused ones; report to `out`.

    The outbox gets the records that it never had: all of records.jsonl if it is new, else those measured without a
    broker. With `everything` all that the journals hold is sent. Returns the exit code: 0 if the broker acknowledged
    everything, else 1, also for results that stay refused. Raises UsageError for a folder without results.
    """
    with explaining(folder):
        has_results = (folder / OUTBOX).exists() or refill.journals(folder)
    if not has_results:
        raise UsageError(f"{folder}: contains neither {OUTBOX} nor {JOURNAL}; give the --output folder of bench-once")
    with Outbox(folder / OUTBOX) as outbox:
        unreadable = _complete(outbox, folder, everything=everything)
        if dead or everything:
            outbox.retry_refused()
        report = drain(outbox, to, f"benchd-{uuid.uuid4().hex[:12]}", timeout_s)
        refusals = outbox.refused()
    lines = [*unreadable, *(f"refused: {refusal.key}: {refusal.reason}" for refusal in refusals)]
    reason = f": {report.reason}" if report.reason else ""
    lines.append(f"{report.sent} sent, {report.refused} refused, {report.left} left{reason}")
    out.writelines(f"{line}\n" for line in lines)
    return 1 if unreadable or refusals or report.left else 0


def _complete(outbox: Outbox, folder: Path, *, everything: bool) -> list[str]:
    """Add the records that the outbox never had; return a line for each unreadable one."""
    if everything:
        outbox.keep({DELIVERED: b"[]"})
        outbox.send_again(0)
    # the service flags what it put into an outbox, which may have dropped it since; a new one has had nothing
    is_new = outbox.kept(JOURNALLED) == b""
    paths = refill.journals(folder)
    return refill.refill(outbox, paths, lambda record: everything or is_new or "mqtt" not in record.flags).unreadable
