"""`benchd doctor`: checks what this machine can measure and run, and prints the reason and a remedy if it cannot."""

import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Annotated, TextIO

import msgspec
import typer

from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import AsJson, names
from benchd.daemon.errors import NotAvailable, UsageError, unknown
from benchd.daemon.machine import sandbox
from benchd.daemon.machine.quiet import FOREIGN_CPUS, ForeignUse, cpu_count
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.capabilities import Capability, examine, service
from benchd.daemon.records import Variant, usable_variants
from benchd.daemon.sampling.sources import SAMPLERS, PowerMeter, load

NAME_WIDTH = len("onnxruntime")  # longest name, apart from devices

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
    """Print each finding at once, then a summary; return 7 if nothing can be measured or a `need` is unusable, else 0.

    The samplers read files under `root`. Raises UsageError if a name in `need` is not one of the checks.
    """
    use = ForeignUse()
    findings = _print(examine(root), out, as_json)
    usable = {finding.name: finding.usable for finding in findings}
    for name in need:
        if name not in usable:
            raise unknown("source or runtime", name, usable)
    if not as_json:
        out.write(_summary(usable, out))
        if (cpus := use.cpus()) > FOREIGN_CPUS:
            line = f"busy machine: other processes use {cpu_count(cpus)}: times measured now may be far too long"
            out.write(_wrapped(line, 2, out))
    return 0 if all(usable[name] for name in ("torch", *need)) else 7


def run_unit(out: TextIO, root: Path, as_json: bool) -> int:
    """Print the devices that the installed unit blocks, and the service's state; return 7 if anything is wrong.

    Raises NotAvailable if no unit is installed.
    """
    findings = _print([*_devices(root), *service(root)], out, as_json)
    return 0 if all(finding.usable for finding in findings) else 7


def _devices(root: Path) -> Iterator[Capability]:
    for access in sandbox.examine(root):
        detail = access.reason or "the service can use it"
        remedy = f"{access.remedy}   # sudo systemctl edit benchd" if "=" in access.remedy else access.remedy
        yield Capability(str(access.path), "device", usable=access.reason is None, detail=detail, remedy=remedy)


def _print(findings: Iterable[Capability], out: TextIO, as_json: bool) -> list[Capability]:
    """Print the findings, each line as soon as it is known; return them."""
    if as_json:
        printed = list(findings)
        out.write(msgspec.json.format(msgspec.json.encode(printed)).decode() + "\n")
        return printed
    printed = []
    for finding in findings:
        printed.append(finding)
        remedy = f": {finding.remedy}" if finding.remedy else ""
        usable = "yes" if finding.usable else "no "
        out.write(_wrapped(f"{usable}  {finding.name:{NAME_WIDTH}}  {finding.detail}{remedy}", NAME_WIDTH + 7, out))
        out.flush()
    return printed


def _wrapped(line: str, indent: int, out: TextIO) -> str:
    columns = shutil.get_terminal_size().columns if out.isatty() else sys.maxsize
    return fill(line, columns, subsequent_indent=indent * " ", break_long_words=False, break_on_hyphens=False) + "\n"


def _summary(usable: Mapping[str, bool], out: TextIO) -> str:
    """Return two lines: the backends and sensors that can measure here, and those that cannot."""
    try:
        missing = plan.cannot_run(plan.inspect("auto"))
    except NotAvailable as error:
        missing = {str(error): usable_variants()}
    absent = {name for names in missing.values() for name in names}
    can = _backends(name for name in usable_variants() if name not in absent)
    cannot = {
        reason: [backend for backend in _backends(names) if backend not in can] for reason, names in missing.items()
    }
    meters = [name for name in usable if name in SAMPLERS and isinstance(load(name), PowerMeter)]
    if by := [name for name in meters if usable[name]]:
        can.append(f"energy by {', '.join(by)}")
    else:
        cannot[f"none of {', '.join(meters)} is usable"] = ["energy"]
    reasons = "; ".join(f"{', '.join(names)}, because {reason}" for reason, names in cannot.items() if names)
    lines = {"can measure": ", ".join(can) or "nothing", "cannot": reasons}
    return "\n" + "".join(_wrapped(f"{name}: {text}", 2, out) for name, text in lines.items() if text)


def _backends(variants: Iterable[str]) -> list[str]:
    """Return the distinct variant names without their number formats."""
    plain = (msgspec.structs.replace(Variant.parse(name), precision="fp32").name for name in variants)
    return list(dict.fromkeys(plain))
