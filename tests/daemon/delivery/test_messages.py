"""What is made of a record and of health for readers that want flat objects, files and discovery."""

import msgspec
import pytest
from records_made import ENERGY, PASSED, accuracy, made, timing

from benchd.daemon.delivery import messages
from benchd.daemon.records import ProcessResult, Summary, Window
from benchd.daemon.service import prometheus


def test_latest_is_flat_in_the_units_of_its_names():
    tops = {"cpu_temp_c": 50.0, "gpu_temp_c": 60.0}
    record = made(
        energy=ENERGY,
        check=PASSED,
        telemetry={name: Summary(40.0, 45.0, top, 9, "s") for name, top in tops.items()},
        processes=[ProcessResult(status="ok", timing=timing(), window=Window(0, 4 * 10**9))],
    )
    latest = messages.latest(record)
    assert (latest.energy_mj, latest.energy_err_mj, latest.power_w) == (500.0, pytest.approx(25.0), 5.0)
    assert (latest.temp_max_c, latest.check, latest.median_ms) == (60.0, "passed", 5.0)


def test_latest_has_the_accuracy_flat_and_stays_small():
    latest = messages.latest(made(accuracy=accuracy(lost=2)))
    assert (latest.accuracy_value, latest.accuracy_drop) == (0.5, 0.02)
    assert latest.accuracy_low < 0.5 < latest.accuracy_high
    assert len(msgspec.json.encode(latest)) < 2048


def test_latest_of_a_failed_case_holds_nulls():
    latest = messages.latest(made(status="failed", timing=None, processes=[]))
    assert (latest.status, latest.median_ms, latest.energy_mj, latest.power_w, latest.check) == ("failed",) + (
        None,
    ) * 4


def test_the_prometheus_file_is_whole_and_readable_for_all(tmp_path):
    path = tmp_path / "benchd.prom"
    for problem in (None, "degraded:disk"):
        prometheus.write(path, messages.Health(pending=3, problem=problem))
    text = path.read_text()
    assert "\nbenchd_pending 3.0\n" in text
    assert "\nbenchd_problem 1.0\n" in text
    assert path.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in tmp_path.iterdir()] == ["benchd.prom"]
    for line in text.splitlines():
        assert line.startswith(("# HELP benchd_", "# TYPE benchd_", "benchd_"))
