"""`benchd selfcheck`: checks in a few minutes whether this installation measures correctly, and writes a report."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, TextIO

import msgspec
import typer
from rich.text import Text

from benchd.daemon.commands import application
from benchd.daemon.commands.arguments import AsJson, Device, QuietFor, Wait, start
from benchd.daemon.config import Config, LimitsConfig, Suite
from benchd.daemon.delivery.sinks import lasting
from benchd.daemon.measuring import capabilities, plan
from benchd.daemon.measuring.capabilities import SelfCheck
from benchd.daemon.measuring.session import Session, made_output
from benchd.daemon.measuring.supervisor import Supervisor
from benchd.daemon.reporting.console import Screen, console_on
from benchd.daemon.reporting.tables import ALARM, GOOD, Cell, print_rows
from benchd.daemon.verdicts.sanity import SanityResult, examine

MODEL = "snn_onepass"  # supports every variant and is built within a second
LIMITS = LimitsConfig(warm_up_cap_s=0.5, measure_cap_s=3.0, check_images=4)
STYLES = {"right": GOOD, "wrong": ALARM, "not tested": ""}

app = application()


@app.command(epilog="Example: benchd selfcheck --output selfcheck")
def selfcheck(
    device: Device = "auto",
    output: Annotated[Path, typer.Option(help="Folder for selfcheck.json and the records.", metavar="DIR")] = Path(
        "selfcheck"
    ),
    wait: Wait = None,
    quiet_for: QuietFor = None,
    json: AsJson = False,
) -> None:
    """Measure a short case of each variant, and check the figures.

    Checks answers, clocks, and energy against power times time. Attach selfcheck.json to a bug report. Exits with 1 if
    anything is wrong, 6 if nothing was measured.
    """
    machine, folder = plan.inspect(device), made_output(output)
    settings = Config(limits=LIMITS)
    planned = plan.plan([Suite(models=[MODEL], preset="standard", processes=1)], LIMITS, machine)
    screen = Screen(sys.stderr, sys.stderr, as_json=False)
    with Session(settings, machine, folder, [*lasting(folder, settings.mqtt, sys.stderr), screen]) as session:
        session.start = start(wait, quiet_for)
        supervisor = Supervisor(session, planned)
        supervisor.run()
    findings = examine(supervisor.records)
    for reason, variants in plan.cannot_run(machine).items():
        findings.append(SanityResult(", ".join(variants), "run", "not tested", reason))
    result = SelfCheck(version("benchd"), findings, list(capabilities.examine()), supervisor.records)
    path, body = folder / "selfcheck.json", msgspec.json.format(msgspec.json.encode(result))
    if json:
        sys.stdout.write(f"{body.decode()}\n")
    else:
        _print(findings, sys.stdout)
    if session.keep(path, body) and not json:
        sys.stdout.write(f"{path}\n")
    unstored = session.unstored(sys.stderr)
    raise typer.Exit(130 if session.interrupted else _code(findings) or unstored)


def _print(findings: list[SanityResult], out: TextIO) -> None:
    rows: list[list[Cell]] = [
        [finding.case_id, finding.subject, Text(finding.judgement, STYLES[finding.judgement]), finding.detail]
        for finding in findings
    ]
    print_rows(console_on(out), ["case", "tested", "found", "why"], rows)


def _code(findings: list[SanityResult]) -> int:
    if any(finding.judgement == "wrong" for finding in findings):
        return 1
    return 0 if any(finding.judgement == "right" for finding in findings) else 6
