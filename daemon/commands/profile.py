"""`benchd profile`: shows where the time of one case goes and what to do about it, from command line to exit code."""

import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TextIO, cast

import msgspec
import typer

from benchd.daemon.commands import application, arguments, options
from benchd.daemon.commands.completion import models
from benchd.daemon.commands.options import OfferedField
from benchd.daemon.config import Config, LimitsConfig, Suite
from benchd.daemon.delivery.sinks import lasting
from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.machine.environment import without_credentials
from benchd.daemon.machine.signals import as_interrupt
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.plan import Machine, PlannedCase
from benchd.daemon.measuring.recording import RunHeader, RunId
from benchd.daemon.measuring.session import Session, writable
from benchd.daemon.profiling import comparison
from benchd.daemon.profiling.collecting import BREAK_EVEN, gather
from benchd.daemon.profiling.nsight.nsight import SNN_KERNELS
from benchd.daemon.profiling.output import report
from benchd.daemon.profiling.output.published import record
from benchd.daemon.profiling.output.sections import warning
from benchd.daemon.profiling.output.terminal import print_compared, print_profile
from benchd.daemon.profiling.profile import METHODS, WORKLOADS, Method, Profile, ProfileJob
from benchd.daemon.profiling.rules.findings import find
from benchd.daemon.profiling.trace import tables
from benchd.daemon.profiling.verification import tried
from benchd.daemon.records import Case, UserModule
from benchd.models import catalog

COMPARE = "compare"
USUAL = ("torch", "memory", "benchmark", "layers")


class Depth(NamedTuple):
    """The extent of profiling: warm-up and traced steps, passes per layer, pairs per verification, and a deadline."""

    warm_up: int
    steps: int
    runs: int
    pairs: int
    deadline_s: float


DEPTHS = {
    "quick": Depth(1, 3, 5, 3, 300.0),
    "standard": Depth(1, 3, 10, 7, 1800.0),
    "thorough": Depth(3, 20, 30, 15, 7200.0),
}


app = application()


@app.command(epilog="Example: benchd profile vim_tiny --workload eval --batch-sizes 4 --steps 3 --warmup 1")
@options.of_suite(
    OfferedField("variants", "The variant to profile (default: eager)."),
    OfferedField("batch_sizes", "Images per step (default: the model's own)."),
    *("weights", "data", "samples", "options", "module", "nir", "inputs"),
)
def profile(
    given: dict[str, Any],
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model from `benchd list`; or compare, with two profiles.", metavar="MODEL", autocompletion=models
        ),
    ] = None,
    sides: Annotated[
        list[Path] | None,
        typer.Argument(help="With compare: two profile folders.", metavar="A B", show_default=False),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="torch, memory, benchmark, layers, break-even, nsys, ncu, or all (default: the first four).",
            metavar="A,B",
        ),
    ] = None,
    preset: Annotated[
        str, typer.Option(help="How many steps and runs to measure.", metavar="quick|standard|thorough")
    ] = "standard",
    steps: Annotated[int | None, typer.Option(help="Number of traced steps.", min=1)] = None,
    warmup: Annotated[int | None, typer.Option(help="Number of warm-up steps before the trace.", min=0)] = None,
    workload: Annotated[
        str, typer.Option(help="What a step runs; eval: load, forward, loss, item().", metavar="forward|eval|train")
    ] = "forward",
    device: arguments.Device = "auto",
    kernel_regex: Annotated[str | None, typer.Option(help="Kernels that ncu profiles.", metavar="REGEX")] = None,
    snn_kernels: Annotated[bool, typer.Option("--snn-kernels", help="With ncu, only the neurons' kernels.")] = False,
    sort: Annotated[
        str | None, typer.Option(help="Sort operators by this column (default: self time).", metavar="COLUMN")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="A new or empty folder (default: one under profiles/).", metavar="DIR")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON instead of tables.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Measure the variants that the findings suggest.")] = False,
    mqtt: arguments.Publish = None,
    ca_file: arguments.CaFile = None,
    certificate_file: arguments.CertificateFile = None,
    key_file: arguments.KeyFile = None,
    wait: arguments.Wait = None,
    quiet_for: arguments.QuietFor = None,
) -> None:
    """Show where the time goes and what to do about it.

    Times are by operator, kernel, module, layer and component.
    """
    if model == COMPARE:
        return _compare(sides or [], sys.stdout, as_json=json)
    if sides:
        raise UsageError(
            f"{model} {sides[0]}: a profile covers one model; benchd profile compare A B takes two profiles"
        )
    chosen_workload, methods = (
        arguments.choices("workload", [workload], WORKLOADS)[0],
        arguments.choices("method", arguments.names("--method", method), [*METHODS, "all"]),
    )
    depth = DEPTHS[arguments.choices("preset", [preset], list(DEPTHS))[0]]
    own = _user_module(model, given)
    if kernel_regex and snn_kernels:
        raise UsageError("--kernel-regex and --snn-kernels: give only one of them")
    if verify and (own or {"weights", "data", "samples"} & given.keys()):
        raise UsageError("--verify works with catalog models only; omit --module, --weights and --data")
    machine = plan.inspect(device)
    sort = sort or ("self_cpu_ns" if machine.device == "cpu" else "self_device_ns")
    tables.sorted_by([], sort)
    about = {
        "models": [model] if model else [],
        "directions": ["training" if chosen_workload == "train" else "inference"],
    }
    planned = _planned(options.suite({"variants": ["eager"], "preset": "quick"} | given | about), machine, own)
    chosen = _methods(methods, planned.case)
    to = arguments.mqtt_config(mqtt, ca_file, certificate_file, key_file)
    folder = _folder(output, planned.case)
    sinks, start = lasting(folder, to, sys.stderr), arguments.start(wait, quiet_for)
    with (
        as_interrupt(),
        _not_left_empty(folder, output is None),
        Session(Config(), machine, folder, sinks, start=start) as session,
    ):
        run = session.run(uuid.uuid4().hex)
        job = ProfileJob(
            **msgspec.structs.asdict(session.job(planned, run.suite_id)),
            workload=chosen_workload,
            methods=chosen,
            sweeps=depth.pairs,
            warm_up=depth.warm_up if warmup is None else warmup,
            steps=steps or depth.steps,
            runs=depth.runs,
        )
        measured_profile = None
        try:
            with session.measuring(ending=()):  # an interrupt ends everything that runs, including Nsight's tools
                run_id = RunId.new()
                begun = _begun(job, run, run_id)
                gather(begun, session, job, depth.deadline_s, SNN_KERNELS if snn_kernels else kernel_regex)
            measured_profile = msgspec.structs.replace(begun, findings=find(begun))
            _write(measured_profile, sort, session, sys.stderr)
            if measured_profile.interrupted:
                raise KeyboardInterrupt
            if verify:
                measured_profile = tried(measured_profile, depth.pairs, session, sys.stderr)
                _write(measured_profile, sort, session, sys.stderr)
        except KeyboardInterrupt:
            note = f"partial results are in {job.output}" if measured_profile else "no method had ended"
            sys.stderr.write(f"interrupted; {note}\n")
            raise typer.Exit(130) from None
        session.publish(record(measured_profile, run, run_id))
        session.end()
    if json and (doubt := warning(measured_profile)):
        sys.stderr.write(f"warning: {doubt}\n")
    _show(measured_profile, sort, job, json, sys.stdout)
    sys.stderr.writelines(f"error: {name}: {measured_profile.missing[name]}\n" for name in measured_profile.failed)
    unstored = session.unstored(sys.stderr)
    raise typer.Exit(exit_code(measured_profile, by_name=bool(methods) and "all" not in methods) or unstored)


def _methods(names: Sequence[str], case: Case) -> list[Method]:
    """Return the methods to run; raise NotAvailable for the break-even rate of a net without an ANN."""
    entry = catalog.find(case.model)
    has_ann = bool(entry and entry.ann)
    if BREAK_EVEN in names and not has_ann:
        raise NotAvailable(
            f"break-even compares a spiking net with its ANN, and the catalog has none of {case.model}: profile "
            "snn_stbif_resnet18"
        )
    return [method for method in METHODS if {method, "all"} & set(names or USUAL) and (method != BREAK_EVEN or has_ann)]


def _compare(sides: Sequence[Path], out: TextIO, *, as_json: bool) -> None:
    if len(sides) != 2:
        raise UsageError(f"compare takes two profiles, not {len(sides)}, as in `benchd profile compare before after`")
    compared = comparison.compare(*map(comparison.read, sides))
    if as_json:
        out.write(msgspec.json.encode(compared._asdict()).decode() + "\n")
    else:
        print_compared(out, compared)


def _user_module(model: str | None, given: dict[str, Any]) -> UserModule | None:
    """Remove the user's module from the options; raise UsageError unless there is a model or a module."""
    own = arguments.own_model(given, beside={"MODEL": model})
    if not model and not own:
        raise UsageError("name a model, as in `benchd profile vim_tiny`, or a --module; `benchd list` shows the models")
    return cast(UserModule | None, own)  # never ONNX, because the command has no --onnx


def _planned(suite: Suite, machine: Machine, own: UserModule | None) -> PlannedCase:
    """Return the single case requested; raise UsageError, or NotAvailable if it cannot run here."""
    entry, *others = plan.plan([suite], LimitsConfig(), machine, own)
    if others:
        raise UsageError(f"a profile covers one case, not {1 + len(others)}; give each option one value")
    if entry.reason:
        raise NotAvailable(f"{entry.case.case_id}: {entry.reason}")
    return entry


def _folder(output: Path | None, case: Case) -> Path:
    """Create and return the output folder; raise UsageError if it is not empty."""
    folder = output or Path("profiles", f"{case.case_id}-{time.strftime('%Y%m%dT%H%M%S')}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--output {folder} is not empty; give a new folder, or remove this one")
    return writable(folder, f"--output {folder}")


@contextmanager
def _not_left_empty(folder: Path, is_ours: bool) -> Iterator[None]:
    """Remove the folder if it is empty, for example after an error, and its parent too if we created that."""
    try:
        yield
    finally:
        if not any(path.is_dir() or path.stat().st_size for path in folder.iterdir()):
            shutil.rmtree(folder)
            if is_ours:
                with suppress(OSError):  # the parent contains other profiles
                    folder.parent.rmdir()


def _begun(job: ProfileJob, run: RunHeader, run_id: RunId) -> Profile:
    """Return a profile without results."""
    return Profile(
        run_id=run_id.run_id,
        device_id=run.device_id,
        case_id=job.case.case_id,
        case=job.case,
        workload=job.workload,
        t_wall=run_id.t_wall,
        tool_version=run.tool_version,
        command=shlex.join(["benchd", *map(without_credentials, sys.argv[1:])]),
        device=job.device,
        environment=run.environment,
    )


def _write(profile: Profile, sort: str, session: Session, err: TextIO) -> None:
    """Write profile.json, report.md and, if its packages are installed, report.html."""
    session.keep(session.output / "profile.json", msgspec.json.encode(profile) + b"\n")
    session.keep(session.output / "report.md", report.markdown(profile, sort).encode())
    try:
        session.keep(session.output / "report.html", report.page(profile, sort).encode())
    except NotAvailable as error:
        err.write(f"warning: no report.html: {error}\n")


def _show(profile: Profile, sort: str, job: ProfileJob, as_json: bool, out: TextIO) -> None:
    if as_json:
        out.write(msgspec.json.encode(profile).decode() + "\n")
        return
    print_profile(out, profile, sort)
    out.writelines(f"{path}\n" for path in sorted(Path(job.output).glob("*")) if path.is_file())


def exit_code(profile: Profile, by_name: bool) -> int:
    """Return the first of 7, 6 and 1 that applies, else 0; `by_name` says that methods were requested individually."""
    unavailable = [method for method in METHODS if method in profile.missing and method not in profile.failed]
    holds = {7: by_name and bool(unavailable), 6: not profile.measured, 1: bool(profile.failed)}
    return next((code for code, true in holds.items() if true), 0)
