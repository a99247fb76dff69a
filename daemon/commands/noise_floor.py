"""`benchd noise-floor`: prints by how much identical code appears to differ on this machine."""

import sys
from contextlib import suppress
from typing import Annotated

import msgspec
import typer

from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import AsJson
from benchd.daemon.config import LimitsConfig
from benchd.daemon.errors import BenchdError, UsageError
from benchd.daemon.measuring import plan
from benchd.daemon.reporting.console import print_noise_floors
from benchd.daemon.verdicts import noise_floor

app = application()


@app.command(epilog="Example: benchd noise-floor; benchd noise-floor --clear square,eager,b1,size=1024")
def noise_floor_(
    case: Annotated[str | None, typer.Argument(help="Only this case.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Delete the comparisons of this case, or all.")] = False,
    json: AsJson = False,
) -> None:
    """Print or clear the noise floor of each case."""
    if clear and json:
        raise UsageError("--json and --clear: give only one of them; --clear prints nothing to encode")
    if clear and case is None:  # without reading the file, which may be damaged
        sys.stdout.write(f"A/A comparisons deleted: {noise_floor.clear()}\n")
        return
    every = noise_floor.every()
    if case and case not in {device_floor.case_id for device_floor in every}:
        case = _stored_as(case)
    floors = [device_floor for device_floor in every if case in (None, device_floor.case_id)]
    if case and not floors:
        raise UsageError(f"no A/A comparison of {case} is stored; run benchd compare --aa {case}")
    if clear:
        sys.stdout.write(f"A/A comparisons deleted: {noise_floor.clear(case)}\n")
    elif json:
        sys.stdout.write(f"{msgspec.json.format(msgspec.json.encode(floors)).decode()}\n")
    else:
        print_noise_floors(sys.stdout, floors)


def _stored_as(case: str) -> str:
    """Return the id under which `benchd compare --aa` stores this case, or the text if it is not a single case."""
    with suppress(BenchdError):
        planned = plan.plan([plan.suite_of(case, "quick")], LimitsConfig(), plan.Machine("cpu", has_cxx=True))
        return planned[0].case.case_id if len(planned) == 1 else case
    return case
