"""`benchd doctor`: what this machine can measure and run and, if it cannot, why and what to do, one line per check."""

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import TextWrapper
from typing import Annotated, TextIO

import msgspec
import typer

from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import AsJson, names
from benchd.daemon.errors import UsageError, unknown
from benchd.daemon.machine import sandbox
from benchd.daemon.measuring.capabilities import Capability, examine, service

app = application()


@app.command(epilog="Example: benchd doctor --need nvml,tensorrt")
def doctor(
    need: Annotated[str | None, typer.Option(help="Exit with 7 unless all of these are usable.", metavar="A,B")] = None,
    unit: Annotated[bool, typer.Option("--unit", help="List the devices that the installed unit blocks.")] = False,
    json: AsJson = False,
) -> None:
    """Check which sensors and runtimes this machine can use.

    For each unusable one, print the reason and a remedy.
    """
    if unit and need:
        raise UsageError("--unit and --need: give only one of them")
    root = Path("/")
    raise typer.Exit(run_unit(sys.stdout, root, json) if unit else run(sys.stdout, root, json, names("--need", need)))


def run(out: TextIO, root: Path, as_json: bool, need: Sequence[str] = ()) -> int:
    """Print the findings; return 7 if nothing can be measured or something in `need` is unusable, else 0.

    The samplers look under `root`. Raises UsageError if a name in `need` is not one of the checks.
    """
    findings = list(examine(root))
    usable = {finding.name: finding.usable for finding in findings}
    for name in need:
        if name not in usable:
            raise unknown("source or runtime", name, usable)
    _print(findings, out, as_json)
    return 0 if all(usable[name] for name in ("torch", *need)) else 7


def run_unit(out: TextIO, root: Path, as_json: bool) -> int:
    """Print which devices the installed unit blocks, and the service's state; return 7 if anything is wrong.

    Raises NotAvailable if no unit is installed.
    """
    findings = [*_devices(root), *service(root)]
    _print(findings, out, as_json)
    return 0 if all(finding.usable for finding in findings) else 7


def _devices(root: Path) -> Iterator[Capability]:
    for access in sandbox.examine(root):
        detail = access.reason or "the service can use it"
        remedy = f"{access.remedy}   # sudo systemctl edit benchd" if "=" in access.remedy else access.remedy
        yield Capability(str(access.path), "device", usable=access.reason is None, detail=detail, remedy=remedy)


def _print(findings: Sequence[Capability], out: TextIO, as_json: bool) -> None:
    if as_json:
        out.write(msgspec.json.format(msgspec.json.encode(findings)).decode() + "\n")
        return
    columns = shutil.get_terminal_size().columns if out.isatty() else sys.maxsize
    width = max((len(finding.name) for finding in findings), default=0)
    lines = TextWrapper(
        width=columns, subsequent_indent=(width + 7) * " ", break_long_words=False, break_on_hyphens=False
    )
    for finding in findings:
        remedy = f": {finding.remedy}" if finding.remedy else ""
        usable = "yes" if finding.usable else "no "
        out.write(lines.fill(f"{usable}  {finding.name:{width}}  {finding.detail}{remedy}") + "\n")
