import os
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from machines import write

from benchd.daemon.sampling.sources import PowerMeter
from benchd.daemon.sampling.sources.rapl import Rapl

RANGE_UJ = 262143328850
NOBODY = 65534


def zone(root, folder, name, energy_uj=0, range_uj=RANGE_UJ):
    path = f"sys/class/powercap/{folder}"
    write(root, {f"{path}/name": f"{name}\n", f"{path}/energy_uj": f"{energy_uj}\n"})
    if range_uj is not None:
        write(root, {f"{path}/max_energy_range_uj": f"{range_uj}\n"})


def set_energy(root, folder, content):
    write(root, {f"sys/class/powercap/{folder}/energy_uj": f"{content}\n"})


def laptop(root, **package):
    """A package with two parts, the platform, and the package once more as the firmware's registers show it."""
    zone(root, "intel-rapl:0", "package-0", **package)
    zone(root, "intel-rapl:0:0", "core")
    zone(root, "intel-rapl:0:1", "dram")
    zone(root, "intel-rapl:1", "psys")
    zone(root, "intel-rapl-mmio:0", "package-0", 77)
    write(root, {"sys/class/powercap/intel-rapl/enabled": "1\n"})
    return root


def server(root):
    for package in (0, 1):
        zone(root, f"intel-rapl:{package}", f"package-{package}")
    return root


def started(root):
    """Return the sampler after its first tick, which gives every zone."""
    rapl = Rapl(root)
    assert rapl.unavailable() is None
    assert set(values(rapl).values()) == {0.0}
    return rapl


def values(rapl):
    return {sample.rail: sample.value for sample in rapl.sample()}


@contextmanager
def unprivileged():
    """Be nobody for a while, where this is root."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


def test_each_change_is_given_once(tmp_path):
    rapl = started(laptop(tmp_path, energy_uj=5_000_000))
    set_energy(tmp_path, "intel-rapl:0", 5_000_400)
    set_energy(tmp_path, "intel-rapl:0:1", 100)
    before_ns = time.monotonic_ns()
    samples = list(rapl.sample())
    assert {sample.rail: sample.value for sample in samples} == pytest.approx(
        {"package-0": 400e-6, "package-0-dram": 100e-6}
    )
    assert {(sample.metric, sample.source) for sample in samples} == {("energy_counter_j", "rapl")}
    assert all(before_ns <= sample.t_ns <= time.monotonic_ns() for sample in samples)
    assert values(rapl) == {}
    set_energy(tmp_path, "intel-rapl:0", 5_000_700)
    assert values(rapl) == pytest.approx({"package-0": 700e-6})


def test_parts_and_the_platform_are_in_no_sum(tmp_path):
    sources = started(laptop(tmp_path)).power_sources()
    assert [(source.rail, source.scope, source.total) for source in sources] == [
        ("package-0", "CPU package-0", True),
        ("psys", "platform psys", True),
        ("package-0-core", "CPU package-0-core", False),
        ("package-0-dram", "CPU package-0-dram", False),
    ]
    assert {(source.source, source.metric, source.period_s) for source in sources} == {
        ("rapl", "energy_counter_j", 1e-3)
    }
    assert isinstance(Rapl(tmp_path), PowerMeter)


def test_packages_are_summed(tmp_path):
    rapl = started(server(tmp_path))
    first, *parts = rapl.power_sources()
    assert (first.rail, first.scope, first.total) == ("packages", "CPU package-0 and package-1", True)
    assert not any(source.total for source in parts)
    set_energy(tmp_path, "intel-rapl:1", 300)
    assert values(rapl) == pytest.approx({"package-1": 300e-6, "packages": 300e-6})
    set_energy(tmp_path, "intel-rapl:0", 200)
    set_energy(tmp_path, "intel-rapl:1", 400)
    assert values(rapl) == pytest.approx({"package-0": 200e-6, "package-1": 400e-6, "packages": 600e-6})
    assert values(rapl) == {}


def dies(root, *counters_uj):
    for die, energy_uj in enumerate(counters_uj):
        zone(root, f"intel-rapl:{die}", f"package-0-die-{die}", energy_uj)
    return root


def test_dies_that_mirror_one_counter_are_counted_once(tmp_path):
    rapl = started(dies(tmp_path, 7_000_000, 7_000_000))
    first, *others = rapl.power_sources()
    assert (first.rail, first.scope) == (
        "package-0-die-0",
        "CPU package-0-die-0 (repeated as package-0-die-1)",
    )
    assert (first.total, others) == (True, [])
    for die in (0, 1):
        set_energy(tmp_path, f"intel-rapl:{die}", 7_000_300)
    assert values(rapl) == pytest.approx({"package-0-die-0": 300e-6})


def test_a_package_that_fails_is_named_and_leaves_no_smaller_sum(tmp_path):
    rapl = started(server(tmp_path))
    set_energy(tmp_path, "intel-rapl:0", "")
    set_energy(tmp_path, "intel-rapl:1", 300)
    samples = []
    with pytest.raises(OSError, match="package-0: invalid literal"):
        samples.extend(rapl.sample())
    set_energy(tmp_path, "intel-rapl:0", 200)
    assert values(rapl) == pytest.approx({"package-0": 200e-6, "packages": 500e-6})


def test_a_wrap_is_undone(tmp_path):
    rapl = started(laptop(tmp_path, energy_uj=RANGE_UJ - 100))
    set_energy(tmp_path, "intel-rapl:0", 250)
    assert values(rapl) == pytest.approx({"package-0": 350e-6})
    set_energy(tmp_path, "intel-rapl:0", 300)
    assert values(rapl) == pytest.approx({"package-0": 400e-6})


@pytest.mark.parametrize(
    ("before_uj", "after_uj", "range_uj", "reason"),
    [
        (1000, 900, None, "went back by 100 uJ, and without max_energy_range_uj"),
        (1000, 900, "unknown", "without max_energy_range_uj"),
        (10**9, 0, RANGE_UJ, "neither a load nor a wrap explains"),  # the driver was loaded anew
        (0, 10**12, None, "neither a load nor a wrap explains"),
        (0, 5, 10, "wrapped more than once"),
    ],
)
def test_a_step_that_is_not_to_be_trusted_is_named_and_starts_anew(before_uj, after_uj, range_uj, reason, tmp_path):
    rapl = started(laptop(tmp_path, energy_uj=before_uj, range_uj=range_uj))
    set_energy(tmp_path, "intel-rapl:0", after_uj)
    set_energy(tmp_path, "intel-rapl:1", 60)
    samples = []
    with pytest.raises(OSError, match=f"package-0: .*{reason}"):
        samples = list(rapl.sample())
    assert samples == []


def test_the_others_go_on_beside_a_zone_that_fails(tmp_path):
    rapl = started(laptop(tmp_path))
    set_energy(tmp_path, "intel-rapl:0:0", "-")
    set_energy(tmp_path, "intel-rapl:1", 60)
    samples = rapl.sample()
    assert next(samples).rail == "psys"
    with pytest.raises(OSError, match="package-0-core: invalid literal"):
        next(samples)


def test_counters_for_root_alone_say_what_to_do():
    with tempfile.TemporaryDirectory() as folder:  # which nobody may enter, unlike pytest's
        Path(folder).chmod(0o755)
        laptop(Path(folder))
        for counter in Path(folder).glob("sys/class/powercap/*/energy_uj"):
            counter.chmod(0o400 if os.geteuid() == 0 else 0)
        with unprivileged():
            reason = Rapl(Path(folder)).unavailable()
    assert "intel-rapl:0/energy_uj; let a group read it" in reason
    assert 'SUBSYSTEM=="powercap"' in reason


@pytest.mark.parametrize("folder", ["dtpm", "intel-rapl-mmio:0"])
def test_a_machine_without_rapl(folder, tmp_path):
    assert "no intel-rapl zone" in Rapl(tmp_path).unavailable()
    zone(tmp_path, folder, "package-0")
    assert "no intel-rapl zone" in Rapl(tmp_path).unavailable()
