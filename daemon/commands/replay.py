"""`benchd replay`: send the results of an output or state folder that no broker has acknowledged yet."""

import sys
import uuid
from pathlib import Path
from typing import Annotated, TextIO

import typer

from benchd.daemon import journal, records
from benchd.daemon.commands import application
from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.outbox import OUTBOX, Outbox
from benchd.daemon.delivery.sender import drain
from benchd.daemon.delivery.topics import RESULT_QOS, Topics
from benchd.daemon.errors import BenchdError, SchemaError, UsageError
from benchd.daemon.verdicts.results import JOURNAL

app = application()


@app.command(epilog="Example: benchd replay bench-out --mqtt mqtt://broker.local")
def replay(
    folder: Annotated[
        Path, typer.Argument(help="The output folder of bench-once, or the state folder of the service.")
    ],
    mqtt: Annotated[str, typer.Option(help="Publish to this broker.", metavar="mqtt://HOST[:PORT]")],
    timeout_s: Annotated[float, typer.Option(help="Give up after this many seconds.")] = 60.0,
    dead: Annotated[bool, typer.Option("--dead", help="Also retry results that a broker has refused.")] = False,
) -> None:
    """Send the results of a folder that no broker has acknowledged yet."""
    raise typer.Exit(send(folder, mqtt, timeout_s, sys.stdout, dead=dead))


def send(folder: Path, url: str, timeout_s: float, out: TextIO, *, dead: bool = False) -> int:
    """Send the results in `folder` that no broker has acknowledged, with `dead` also refused ones; report to `out`.

    If there is no outbox, one is made from records.jsonl; if both exist, some results were measured without a broker,
    and those that the outbox never had are added. Returns the exit code: 0 if the broker acknowledged everything, else
    1, also for results that stay refused. Raises UsageError for a bad URL or a folder without either file.
    """
    broker = parse_url(url)
    unreadable = _complete(folder) if (folder / OUTBOX).exists() else _build(folder)
    with Outbox(folder / OUTBOX) as outbox:
        if dead:
            outbox.retry_refused()
        report = drain(outbox, broker, f"benchd-{uuid.uuid4().hex[:12]}", timeout_s)
        refusals = outbox.refused()
    lines = [*unreadable, *(f"refused: {refusal.key}: {refusal.reason}" for refusal in refusals)]
    lines.append(f"{report.sent} sent, {report.refused} refused, {report.left} left{_because(report.reason)}")
    out.writelines(f"{line}\n" for line in lines)
    return 1 if unreadable or refusals or report.left else 0


def _because(reason: str | None) -> str:
    return f": {reason}" if reason else ""


def _build(folder: Path) -> list[str]:
    """Create the outbox from the folder's records; return a line for each unreadable one."""
    if not (folder / JOURNAL).exists():
        raise UsageError(f"{folder}: contains neither {OUTBOX} nor {JOURNAL}; give the --output folder of bench-once")
    # under another name until it is complete: half an outbox would hide the records it lacks
    unfinished = folder / f"{OUTBOX}.unfinished"
    with Outbox(unfinished) as outbox:
        unreadable = _add_all(outbox, folder / JOURNAL)
    unfinished.replace(folder / OUTBOX)
    return unreadable


def _complete(folder: Path) -> list[str]:
    """Add the records that the outbox never had; return a line for each unreadable one.

    The service flags the records it put into an outbox, which may have dropped them since.
    """
    if not (folder / JOURNAL).exists():
        return []
    with Outbox(folder / OUTBOX) as outbox:
        return _add_all(outbox, folder / JOURNAL, but="mqtt")


def _add_all(outbox: Outbox, path: Path, but: str | None = None) -> list[str]:
    """Add the records without the flag `but`; return a line for each unreadable one."""
    unreadable = []
    try:
        for number, line in enumerate(journal.read(path), 1):
            problem = _add(outbox, line, but)
            if problem:
                unreadable.append(f"{path} line {number}: {problem}")
    except SchemaError as error:
        unreadable.append(str(error))
    return unreadable


def _add(outbox: Outbox, line: bytes, but: str | None) -> str | None:
    """Add one record as its original bytes unless it is flagged; return the error if it is not a record."""
    try:
        record = records.decode(line)
        topic = Topics(record.device_id).result(record.run_id)
    except BenchdError as error:
        return str(error)
    if but not in record.flags:
        outbox.add(record.key, topic, RESULT_QOS, line)
    return None
