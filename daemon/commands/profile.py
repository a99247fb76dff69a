"""`benchd profile`: where the time of one case goes and what to do about it, from a request to an exit code."""

import shlex
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

import msgspec

from benchd.daemon.commands import once
from benchd.daemon.config import Config, LimitsConfig, MqttConfig, Suite
from benchd.daemon.delivery.sinks import lasting
from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.plan import Machine, OwnModule, Planned
from benchd.daemon.measuring.protocol import Job
from benchd.daemon.measuring.recording import Run, RunId
from benchd.daemon.measuring.session import Session, writable
from benchd.daemon.profiling.collecting import Found, gather
from benchd.daemon.profiling.nsight.nsight import SNN_KERNELS
from benchd.daemon.profiling.output import report
from benchd.daemon.profiling.output.published import record
from benchd.daemon.profiling.output.sections import finding_lines, sections
from benchd.daemon.profiling.output.terminal import print_profile
from benchd.daemon.profiling.profile import METHODS, Profile, ProfileJob, Workload, encode
from benchd.daemon.profiling.rules.findings import find
from benchd.daemon.profiling.trace import tables
from benchd.daemon.profiling.verification import tried
from benchd.daemon.records import Case

USUAL = ("torch", "memory", "benchmark")


class Depth(NamedTuple):
    """How much is profiled: steps before and in the trace, passes by layer, pairs of a verification; and a deadline."""

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


@dataclass(frozen=True)
class Request:
    """What the command line asks for. No method stands for the usual ones, `all` for each; no preset for standard."""

    model: str | None
    variant: str
    methods: list[str]
    presets: list[str]
    steps: int | None
    warm_up: int | None
    workload: Workload
    device: str
    weights: str | None
    data: str | None
    options: dict[str, list[str]]
    batch_size: int | None
    module: str | None
    inputs: list[str]
    kernel_regex: str | None
    snn_kernels: bool
    sort: str | None
    output: Path | None
    as_json: bool
    verify: bool
    mqtt: str | None
    wait: bool = False

    @property
    def depth(self) -> Depth:
        """Return what the preset says."""
        return DEPTHS[self.presets[0] if self.presets else "standard"]


def run(request: Request, out: TextIO, err: TextIO) -> int:
    """Profile the case, write and show it and return the exit code; raise BenchdError before anything is measured."""
    _refuse(request)
    machine = plan.inspect(request.device)
    own = once.own_module(request.module, request.inputs) if request.module else None
    sort = request.sort or ("self_cpu_ns" if machine.device == "cpu" else "self_device_ns")
    tables.sorted_by([], sort)
    planned = _planned(request, machine, own)
    folder = _folder(request.output, planned.case)
    regex = SNN_KERNELS if request.snn_kernels else request.kernel_regex
    sinks, waiting = lasting(folder, MqttConfig(), err, request.mqtt), err if request.wait else None
    with Session(Config(), machine, folder, sinks, waiting=waiting) as session:
        shared = session.run(uuid.uuid4().hex)
        job = _job(request, session.job(planned, shared.suite_id))
        try:
            with session.measuring(ending=()):  # an interrupt ends whatever runs, and Nsight's tools with it
                run_id = RunId.new()
                found = gather(session, job, request.depth.deadline_s, regex)
            profile = _profile(job, found, shared, run_id)
            _write(profile, sort, job, err)
            if request.verify:
                profile = tried(profile, request.depth.pairs, session, err)
                _write(profile, sort, job, err)
        except KeyboardInterrupt:
            err.write(f"interrupted; what was written is in {job.output}\n")
            return 130
        session.publish(record(profile, shared, run_id, found.occupancy))
        session.end()
    _show(profile, sort, job, request.as_json, out)
    for method in found.failed:
        err.write(f"error: {method}: {found.missing[method]}\n")
    return exit_code(profile, found, by_name=bool(request.methods) and "all" not in request.methods)


def _refuse(request: Request) -> None:
    """Raise UsageError for what does not go together, and for numbers and files that cannot be."""
    if not request.model and not request.module:
        raise UsageError("name a model, as in `benchd profile vim_tiny`, or a --module; `benchd list` shows the models")
    if request.model and request.module:
        raise UsageError(f"{request.model} and --module: give one of the two")
    if request.inputs and not request.module:
        raise UsageError("--input is for --module: the models of the catalog know theirs")
    for name, number, least in (("--steps", request.steps, 1), ("--warmup", request.warm_up, 0)):
        if number is not None and number < least:
            raise UsageError(f"{name} {number}: at least {least}")
    if len(request.presets) > 1:
        raise UsageError("--quick and --thorough: give one of the two")
    if request.kernel_regex and request.snn_kernels:
        raise UsageError("--kernel-regex and --snn-kernels: give one of the two")
    if request.verify and (request.module or request.weights or request.data):
        raise UsageError("--verify measures a model of the catalog; leave --module, --weights and --data out")


def _job(request: Request, job: Job) -> ProfileJob:
    depth = request.depth
    return ProfileJob(
        **{name: getattr(job, name) for name in job.__struct_fields__},
        workload=request.workload,
        methods=[method for method in METHODS if {method, "all"} & set(request.methods or USUAL)],
        warm_up=depth.warm_up if request.warm_up is None else request.warm_up,
        steps=request.steps or depth.steps,
        runs=depth.runs,
    )


def _planned(request: Request, machine: Machine, own: OwnModule | None) -> Planned:
    """Return the one case that is asked for; raise UsageError, or NotAvailable where it cannot run here."""
    given = {
        "models": [request.model] if request.model else [],
        "preset": "quick",
        "variants": [request.variant],
        "batch_sizes": [request.batch_size] if request.batch_size is not None else [],
        "options": request.options,
        "directions": ["training" if request.workload == "train" else "inference"],
        "weights": request.weights and plan.named_weights(request.weights),
        "data": request.data,
    }
    entry, *others = plan.plan([msgspec.convert(given, Suite)], LimitsConfig(), machine, own)
    if others:
        raise UsageError(f"a profile is of one case, and these are {1 + len(others)}; give each option one value")
    if entry.reason:
        raise NotAvailable(f"{entry.case.case_id}: {entry.reason}")
    return entry


def _folder(asked: Path | None, case: Case) -> Path:
    """Return the folder to write to, made; raise UsageError for one that holds something."""
    folder = asked or Path("profiles", f"{case.case_id}-{time.strftime('%Y%m%dT%H%M%S')}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--output {folder} is there already and not empty; name a new folder, or remove this one")
    return writable(folder, f"--output {folder}")


def _profile(job: ProfileJob, found: Found, shared: Run, run_id: RunId) -> Profile:
    collected, described = found.collected, shared.environment
    made = Profile(
        run_id=run_id.run_id,
        device_id=shared.device_id,
        case_id=job.case.case_id,
        case=job.case,
        workload=job.workload,
        t_wall=run_id.t_wall,
        tool_version=shared.tool_version,
        command=shlex.join(["benchd", *sys.argv[1:]]),
        device=job.device,
        device_name=collected.device_name,
        environment=msgspec.structs.replace(described, versions=described.versions | collected.versions),
        model=collected.model,
        kernels_ran=collected.kernels_ran,
        torch=found.torch,
        memory=collected.memory,
        benchmark=collected.benchmark,
        layers=collected.layers,
        nsys=found.nsys,
        ncu=found.ncu,
        nesting=found.nesting,
        missing=found.missing,
    )
    return msgspec.structs.replace(made, findings=find(made))


def _write(profile: Profile, sort: str, job: ProfileJob, err: TextIO) -> None:
    """Write profile.json, report.md and, where its packages are there, report.html."""
    folder = Path(job.output)
    (folder / "profile.json").write_bytes(encode(profile) + b"\n")
    (folder / "report.md").write_text(report.markdown(profile, sort), encoding="utf-8")
    try:
        (folder / "report.html").write_text(report.page(profile, sort), encoding="utf-8")
    except NotAvailable as error:
        err.write(f"warning: no report.html: {error}\n")


def _show(profile: Profile, sort: str, job: ProfileJob, as_json: bool, out: TextIO) -> None:
    if as_json:
        out.write(encode(profile).decode() + "\n")
        return
    print_profile(out, [finding_lines(finding) for finding in profile.findings], sections(profile, sort))
    out.writelines(f"{path}\n" for path in sorted(Path(job.output).glob("*")) if path.is_file())


def exit_code(profile: Profile, found: Found, by_name: bool) -> int:
    """Return the first of 7, 6 and 1 that holds, else 0; `by_name` says that the methods were asked for one by one."""
    unavailable = [method for method in METHODS if method in found.missing and method not in found.failed]
    holds = {7: by_name and bool(unavailable), 6: not profile.measured, 1: bool(found.failed)}
    return next((code for code, true in holds.items() if true), 0)
