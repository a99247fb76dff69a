"""Jobs of the profiling child: a net of the test's own or a small catalogued one, on the CPU with one thread."""

from worker_jobs import changed, user_module

from benchd.daemon.measuring.plan import PRESETS
from benchd.daemon.profiling.profile import ProfileJob
from benchd.daemon.records import Case, Variant


def profile_job(folder, *, model="snn_onepass", variant="eager", batch=2, options=None, **fields):
    """Return a job of a catalogued model; `fields` replace those of the job."""
    case = Case(model=model, variant=Variant.parse(variant), batch_size=batch, options=options or {}, threads=1)
    return changed(_job(folder, case), **fields)


def own_job(folder, *, build="pass", forward="pass", variant="eager", batch=2, **fields):
    """Return a job of the small net in `worker_jobs` with these lines in its functions."""
    case = Case(model="own.net.build", variant=Variant.parse(variant), batch_size=batch, threads=1)
    module = user_module(folder, build=build, forward=forward)
    return changed(_job(folder, case), module=module, **fields)


def _job(folder, case):
    return ProfileJob(
        case=case,
        suite_id="the run of a test",
        limits=PRESETS["quick"],
        workload="forward",
        methods=["torch"],
        warm_up=1,
        steps=2,
        runs=3,
        device="cpu",
        output=str(folder),
        cache=str(folder / "cache"),
        artifacts=str(folder / "artifacts"),
    )
