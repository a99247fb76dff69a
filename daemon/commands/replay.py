"""`benchd replay`: sends the results in an output or state folder that no broker has acknowledged yet."""

import sys
import uuid
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated, TextIO

import typer

from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import CaFile, CertificateFile, KeyFile, broker
from benchd.daemon.delivery.broker import Broker
from benchd.daemon.delivery.delivery import Delivery
from benchd.daemon.delivery.log import Log, files
from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.journal import explaining
from benchd.daemon.machine.lock import SERVICE, Busy, MachineLock
from benchd.daemon.verdicts.results import JOURNAL

app = application()


@app.command(epilog="Example: benchd replay bench-out --mqtt mqtt://broker.local")
def replay(
    folder: Annotated[
        Path, typer.Argument(help="The output folder of bench-once, or the state folder of a stopped service.")
    ],
    mqtt: Annotated[str, typer.Option(help="Publish to this broker.", metavar="mqtt://HOST[:PORT]")],
    timeout_s: Annotated[float, typer.Option(help="Give up after this many seconds.", min=0)] = 60.0,
    everything: Annotated[bool, typer.Option("--all", help="Send everything, including what was sent before.")] = False,
    ca_file: CaFile = None,
    certificate_file: CertificateFile = None,
    key_file: KeyFile = None,
) -> None:
    """Send the results in a folder that no broker has acknowledged yet.

    Results that a broker has refused are sent again.
    """
    to = broker(mqtt, ca_file, certificate_file, key_file)
    raise typer.Exit(send(folder, to, timeout_s, sys.stdout, everything=everything))


def send(folder: Path, to: Broker, timeout_s: float, out: TextIO, *, everything: bool = False) -> int:
    """Send the results in `folder` that no broker has acknowledged, or `everything`; report to `out`.

    Returns the exit code: 0 if the broker acknowledged everything, else 1, as for damaged lines. Raises UsageError for
    a folder without results, and NotAvailable while a service runs on it.
    """
    with explaining(folder):
        has_results = bool(files(folder, JOURNAL))
    if not has_results:
        raise UsageError(f"{folder}: contains no {JOURNAL}; give the --output folder of bench-once")
    lock = folder / SERVICE
    try:
        with MachineLock(lock) if lock.exists() else nullcontext():
            return _send(folder, to, timeout_s, out, everything=everything)
    except Busy as busy:
        raise NotAvailable(f"{busy.holder} is using {folder} and delivers its results; stop it first") from busy


def _send(folder: Path, to: Broker, timeout_s: float, out: TextIO, *, everything: bool) -> int:
    damaged: list[str] = []
    with closing(Log(folder / JOURNAL, damaged.append)) as log:
        delivery = Delivery(folder, log)
        if everything:
            delivery.rewind()
        before = delivery.pending
        reason = delivery.drain(to, f"benchd-{uuid.uuid4().hex[:12]}", timeout_s)
    lines = [*damaged, *(f"refused: seq {seq}: {why}" for seq, why in delivery.records.refused.items())]
    left = delivery.pending - len(delivery.refused)
    sent = before - delivery.pending - len(damaged)
    lines.append(f"{sent} sent, {len(delivery.refused)} refused, {left} left{f': {reason}' if reason else ''}")
    out.writelines(f"{line}\n" for line in lines)
    return 1 if damaged or reason else 0
