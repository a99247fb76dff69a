"""The fleet in a terminal of any width: trouble first, whole numbers, and what is hidden counted."""

import io
import re
import time
from contextlib import closing

import pytest
from messages_made import message
from records_made import ENERGY, PASSED, WRONG, made, timing
from rich.console import Console

from benchd.daemon.delivery.messages import Health, Info
from benchd.daemon.records import Case, Summary, Variant
from benchd.daemon.records import SamplerReport as Report
from benchd.daemon.reporting.sensors_table import sensors
from benchd.dashboard import watch
from benchd.dashboard.messages import flat
from benchd.dashboard.queries import Device
from benchd.dashboard.store import Store
from benchd.dashboard.watch import StoreContent, screen

WIDTHS = (60, 80, 120)


def device(number, **fields):
    given = {"state": "online", "age_s": 6542.0, "info": Info(), "power_w": 12.345, "temp_c": None, "throttled": False}
    health = fields.pop("health", Health(activity="measuring", case_id="snn_stbif_resnet18,custom-fp16,b64,level=16"))
    return Device(device_id=f"orin-of-the-northern-site-{number:03}", health=health, **given | fields)


FLEET = [
    *(device(number) for number in range(297)),
    device(297, throttled=True, power_w=1234.5),
    device(298, health=Health(problem="disk full: 1234567 bytes free", pending=12352)),
    device(299, state="silent", power_w=None),
]
CASE = Case(model="snn_stbif_resnet18", variant=Variant.parse("custom-fp16"), batch_size=64)
RESULTS = [
    flat(made(case=CASE, timing=timing(104.3161, low_ms=103.9, high_ms=104.7), energy=ENERGY, check=check), 0.0)
    for check in (PASSED, WRONG)
]


def shown(width, height=30, fleet=FLEET):
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, color_system=None)
    console.print(screen(StoreContent(fleet, RESULTS), console))
    return out.getvalue()


@pytest.mark.parametrize("width", WIDTHS)
def test_no_number_is_cut_and_no_line_too_long(width):
    text = shown(width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert set(re.findall(r"(\d+)…", text)) <= {"1234567", "18", "16", "64"}
    numbers = ["12.35 W", "1234 W", "104.3 ms" if width < 120 else "104.3 [103.9, 104.7] ms"]
    numbers += ["109 min ago", "site-299", "bench-abc123"] if width >= 80 else []
    numbers += ["12352", "500 ± 25 mJ"] if width >= 120 else []
    for number in numbers:
        assert number in text
    assert len(text.splitlines()) <= 30


@pytest.mark.parametrize("width", WIDTHS)
def test_trouble_comes_first_and_what_is_hidden_is_counted(width):
    text = shown(width)
    first = text.splitlines()[2:5]
    assert all("silent" in line or "THROTTLED" in line or "disk full" in line for line in first)
    assert "and 280 more" in text
    assert "FAILED" in text


def test_hours_of_results_and_telemetry_leave_only_what_is_shown(monkeypatch):
    start_s = 1_790_000_000.0
    with closing(Store("sqlite://")) as store:
        for number in range(200):
            now_s = start_s + 36 * number
            monkeypatch.setattr(time, "time", lambda now_s=now_s: now_s)
            bodies = {
                "status": {"state": "online"},
                f"result/r{number}": made(run_id=f"r{number}", device_id="d1"),
                "event": {"event": f"e{number}"},
                "telemetry": {"samples": [[0, "power_w", float(number), "fake"]]},
                "rubbish": number,
            }
            watch.keep(store, [message("d1", kind, body, now_s) for kind, body in bodies.items()])
            view = watch.look(store)
        with store.reading() as connection:
            counts = {name: len(connection.execute(table.select()).all()) for name, table in store.tables.items()}
    assert {name: count for name, count in counts.items() if count} == {
        "device": 1,
        "document": 1,
        "result": 10,
        "telemetry": 2,
        "version": 1,
    }
    assert [result.run_id for result in view.results] == [f"r{number}" for number in range(199, 189, -1)]
    assert [(device.state, device.power_w) for device in view.devices] == [("online", 199.0)]


@pytest.mark.parametrize("width", WIDTHS)
def test_sensors_have_units_and_throttling_first(width):
    summaries = {
        "cpu_clock_hz": Summary(1e9, 2.6e9, 2.6e9, 9, "procfs"),
        "power_w@VDD_GPU_SOC": Summary(5.0, 6.5, 7.0, 9, "ina3221"),
        "gpu_throttle_reasons": Summary(0.0, 8.0, 8.0, 9, "nvml"),
        "memory_used_bytes": Summary(2**30, 2**30, 2**30, 9, "procfs"),
        "gpu_utilization_percent": Summary(50.0, 50.0, 50.0, 9, "nvml"),
    }
    out = io.StringIO()
    Console(file=out, width=width).print(
        sensors(
            summaries,
            Report(sources=[], cpu_s=0.0, period_s=0.1, period_p99_error=None, samples=9),
            width,
        )
    )
    lines = out.getvalue().splitlines()
    assert "THROTTLED" in lines[2]
    for cell in ("2600 MHz", "6.5 W", "1024 MiB", "50 %", "power VDD_GPU_SOC"):
        assert cell in out.getvalue()
    assert max(map(len, lines)) <= width
