"""Shows one record in readable form: its result, stages, check, energy, blocks and environment."""

from asyncio import to_thread
from collections.abc import Iterator, Sequence
from statistics import median
from urllib.parse import quote

import msgspec
from nicegui import ui

from benchd.daemon.records import PROFILED, Energy, ProcessResult, Record, ending
from benchd.daemon.reporting.scenario_note import scenario_figures
from benchd.daemon.verdicts.compare import command
from benchd.daemon.verdicts.figures import memory_mib
from benchd.dashboard import queries
from benchd.dashboard.layout import (
    PATIENCE_S,
    facts,
    frame,
    heading,
    history_path,
    local,
    notice,
    record_path,
)
from benchd.dashboard.limits import SHOWN
from benchd.dashboard.messages import Result
from benchd.dashboard.store import Store
from benchd.dashboard.text import accuracy, error_share, fact, figure, more, plus_minus, rounded, short, time
from benchd.dashboard.views import charts
from benchd.dashboard.views.history import BY_ARRIVAL, is_undated

BLOCKS = (
    "Median of each block, by process; hollow points were disturbed. A process's interval comes from its blocks, the "
    "record's from its processes."
)


def add(store: Store) -> None:
    """Serve the view at /result/<key>."""

    @ui.page("/result/{key}", response_timeout=PATIENCE_S)
    async def show(key: str) -> None:
        async with frame("Record"):
            result, record = await to_thread(queries.result, store, key), await to_thread(queries.record, store, key)
            if result is None or record is None:
                notice("This record is unknown here. Results lists the known ones.")
                return
            _head(result, record)
            _links(result)
            with ui.element("div").classes("grid"):
                _card("Result", _result(result, record))
                _card("Check", _check(record))
                missing: dict[str, object] = {"not measured": record.missing.get("energy", "no sensor")}
                _card("Energy", _energy(record.energy) if record.energy else missing)
                _card("Stages, median of processes", _stages(record.processes))
            _processes(record.processes)
            with ui.element("div").classes("wide"):
                _card("Environment", _environment(record))
                _card("Not measured, and why", dict(record.missing))
            heading("Measure it again")
            ui.label(command(record)).classes("command")


def _head(result: Result, record: Record) -> None:
    ui.label(short(f"{record.case_id} on {record.device_id}")).classes("verdict")
    doubt = f"; dated {BY_ARRIVAL}" if is_undated(result) else ""
    ui.label(short(f"{local(result.measured_s)}, benchd {record.tool_version}") + doubt).classes("soft")
    if record.status != "ok":
        ui.label(f"✕ {record.status}: {record.reason or 'no reason given'}").classes("verdict bad")
    if result.checked == "failed":
        ui.label("✕ its answers are wrong: it fails its numerical check").classes("verdict bad")


def _links(result: Result) -> None:
    with ui.row():
        ui.link("raw record", record_path(result.key)).classes("link")
        ui.link("history", history_path(result.device_id, result.case_id)).classes("link")
        ui.link("device", f"/device/{quote(result.device_id)}").classes("link")
        if PROFILED in result.flags:
            ui.label("this is a profile: it is never ranked or compared").classes("soft")


def _card(title: str, pairs: dict[str, object]) -> None:
    if pairs:
        with ui.element("section").classes("card"):
            heading(title)
            facts(pairs)


def _result(result: Result, record: Record) -> dict[str, object]:
    timing, floor, memory = record.timing, record.floor, memory_mib(record)
    if timing is None:
        return {"median": "not measured", "flags": record.flags}
    share = error_share(result)
    return {
        "median": f"{time(result)} ({100 * timing.confidence:.3g} %, {timing.interval_basis.replace('_', ' ')})",
        **{
            name: rounded(value, share, "ms")
            for name, value in (("p90", timing.p90_ms), ("p99", timing.p99_ms), ("p99.9", timing.p999_ms))
            if value
        },
        record.case.scenario: scenario_figures(record),
        "fastest, slowest": f"{figure(timing.min_ms, 'ms')}, {figure(timing.max_ms, 'ms')}",
        "runs": timing.runs,
        "throughput": rounded(record.throughput_per_s, share, "/s") if record.throughput_per_s else None,
        "of floor": f"{rounded(record.x_of_floor, share, 'x')}" if record.x_of_floor else None,
        "floor": f"{figure(floor.floor_ms, 'ms')}, bound by {floor.bound_by}" if floor else None,
        "accuracy": accuracy(result) if record.accuracy else None,
        "memory": figure(memory, "MiB") if memory is not None else None,
        "memory of the process": _beside_device(record),
        "including build and check": _with_check(record),
        "power mode": record.environment.power_mode,
        "clocks": _means(record, "_clock_hz", 1e6, "MHz"),
        "temperature": _means(record, "_temp_c", 1.0, "°C"),
        "preset": record.preset,
        "flags": record.flags,
    }


def _means(record: Record, suffix: str, scale: float, unit: str) -> list[str]:
    metrics = ending(record.telemetry, suffix)
    return [f"{_plain(name)} {figure(summary.mean / scale, unit)}" for name, summary in metrics.items()]


def _beside_device(record: Record) -> str | None:
    """Return the process's own memory if `memory` is the accelerator's."""
    if record.memory is None or record.environment.device == "cpu":
        return None
    return figure(record.memory.rss_peak_bytes / 2**20, "MiB")


def _with_check(record: Record) -> str | None:
    """Return the process's peak memory since its start."""
    peak = record.memory.worker_peak_bytes if record.memory else None
    return figure(peak / 2**20, "MiB") if peak else None


def _plain(metric: str) -> str:
    return metric.replace("_clock_hz", "").replace("_temp_c", "").replace("@", " ")


def _check(record: Record) -> dict[str, object]:
    check = record.check
    if check is None:
        return {"not checked": record.missing.get("check", "no reason given")}
    return {
        "verdict": check.verdict,
        "agreement": f"{check.agreeing} of {check.decided} images agree" if check.agreeing is not None else None,
        "rule": check.rule,
        "images": check.images,
        "largest error": f"{check.error_share:.2g} of the largest answer, {check.tolerance:.2g} allowed",
        "images off": f"{check.images_off}, {check.images_off_allowed} allowed" if check.images_off else None,
        "reference": check.reference,
        "note": check.note,
    }


def _energy(energy: Energy) -> dict[str, object]:
    share = energy.energy_err_j / energy.energy_j if energy.energy_j else 0.0
    gross_mj, net_j = 1e3 * energy.gross_per_inference_j, energy.net_per_inference_j
    net_err_j = energy.net_per_inference_err_j
    return {
        "per inference": plus_minus(gross_mj, share * gross_mj, "mJ"),
        "without idle": plus_minus(1e3 * net_j, 1e3 * net_err_j if net_err_j else None, "mJ") if net_j else None,
        "window": plus_minus(energy.energy_j, energy.energy_err_j, "J"),
        "idle": figure(energy.idle_w, "W") if energy.idle_w else None,
        "scope": energy.scope,
        "source": f"{energy.source}, {energy.updates} values, every {figure(1e3 * energy.sensor_period_s, 'ms')}",
        "caveats": energy.flags,
    }


def _stages(processes: Sequence[ProcessResult]) -> dict[str, object]:
    """Return the median duration of each stage over the processes that reached it."""
    every = [msgspec.structs.asdict(process.stages) for process in processes]
    known = {name: [s for stages in every if (s := stages[name]) is not None] for name in (every[0] if every else ())}
    return {
        name.removesuffix("_s").replace("_", " "): _duration(median(times_s))
        for name, times_s in known.items()
        if times_s
    }


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"


def _processes(processes: Sequence[ProcessResult]) -> None:
    """Show a line for each process, and its block medians."""
    heading("Processes and blocks")
    with ui.column().style("gap: .1rem"):
        for number, process in enumerate(processes[:SHOWN], 1):
            ui.label(short(f"{number}: {'; '.join(_process(process))}")).classes("figure")
        ui.label(more(len(processes) - SHOWN)).classes("soft")
    blocks = [process for process in processes[:SHOWN] if process.blocks]
    if blocks:
        ui.label(BLOCKS).classes("soft")
        ui.echart(charts.blocks(blocks), renderer="svg").style("height: 16rem; width: 100%")


def _process(process: ProcessResult) -> Iterator[str]:
    yield process.status if process.status == "ok" else f"✕ {process.status}, {process.reason or 'no reason given'}"
    if (timing := process.timing) and timing.low_ms and timing.high_ms:
        yield plus_minus(timing.median_ms, (timing.high_ms - timing.low_ms) / 2, "ms")
    if warm := process.warm_up:
        yield f"warm-up {warm.runs} runs, {figure(warm.seconds, 's')}, {'steady' if warm.steady else 'not steady'}"
    if blocks := process.blocks:
        yield f"{blocks.count} blocks of {blocks.runs_per_block} runs, {blocks.stop_reason}"
    if interference := process.interference:
        reasons = {word for block in interference.reasons for word in block}
        yield f"disturbed by {', '.join(sorted(reasons))}" if reasons else "undisturbed"


def _environment(record: Record) -> dict[str, object]:
    fields = msgspec.structs.asdict(record.environment)
    return dict(fact(name, value) for name, value in fields.items() if name != "cpu_flags")
